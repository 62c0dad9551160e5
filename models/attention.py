"""Grouped-query attention that reads every key once: query heads that share a key-value head are rows of one product.

Transformers copies keys and values for every query head wherever a mask is given and there are several queries; for a
tree that is most of what attention costs, and it grows with the context. B rows, H query heads, G key-value heads,
N queries, S keys, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "outrider"  # as transformers knows it
SHORT, LONG = 64, 128  # queries at a time in a text of up to 4 * SHORT tokens, and in a longer one
MANY = 1024  # keys of all rows, from about where two products in bf16 take half the time of torch's own attention


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """Attention [B, N, H, D] of `query` [B, H, N, D] over `key` and `value` [B, G, S, D].

    An additive mask [B, 1, H/G * N, S] that repeats its N rows once for each head of a group asks for this way; without
    one a text may read itself in blocks. All else is read as transformers' own sdpa reads it.
    """
    (rows, heads, count, width), groups = query.shape, key.shape[1]
    shared, scale = heads // groups, how.get("scaling") or width**-0.5
    if attention_mask is None and reads_text(module, query, key):
        return by_blocks(query, key, value, scale), None
    if attention_mask is None or attention_mask.shape[2] == count:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    if attention_mask.shape[2] != shared * count:  # these layers share otherwise than the config says
        return sdpa_attention_forward(module, query, key, value, attention_mask[:, :, :count], **how)
    folded = query.reshape(rows, groups, shared * count, width)
    if key.is_contiguous() and wants_whole(key.device, key.dtype, rows * key.shape[2]):
        found = by_products(folded, key, value, attention_mask, scale)
    else:
        found = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scale)
    return found.reshape(rows, heads, count, -1).transpose(1, 2).contiguous(), None


def reads_text(module: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether queries are those of a whole text to itself, in bf16 on a CPU, and nobody will differentiate."""
    whole = 1 < query.shape[2] == key.shape[2] and getattr(module, "is_causal", True)
    return whole and query.device.type == "cpu" and query.dtype == torch.bfloat16 and not torch.is_grad_enabled()


def by_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention [B, N, H, D] of `query` [B, H, N, D] over `key` and `value` [B, G, N, D], some queries at a time.

    Each block looks as far as its last query, so that about half of all products are made; in bf16 it takes 42 to 80 % of
    the time of torch's kernel for 80 to 4,096 tokens.
    """
    count, shared = query.shape[2], query.shape[1] // key.shape[1]
    asked, key, value = query.unflatten(1, (-1, shared)), key.contiguous(), value.contiguous()
    size = SHORT if count <= 4 * SHORT else LONG
    later = torch.full((size, size), -torch.inf, dtype=query.dtype).triu_(1)
    found = torch.empty_like(asked)
    for start in range(0, count, size):
        block, end = asked[:, :, :, start : start + size], min(start + size, count)
        mask = later[: end - start, : end - start].repeat(shared, 1)
        made = by_products(block.flatten(2, 3), key[:, :, :end], value[:, :, :end], mask, scale)
        found[:, :, :, start:end] = made.unflatten(2, (shared, -1))
    return found.flatten(1, 2).transpose(1, 2)


def wants_whole(device: torch.device, dtype: torch.dtype, keys: int) -> bool:
    """Whether attention to so many keys is two products, if they lie in one piece; others are copied, and nothing is won."""
    return device.type == "cpu" and dtype == torch.bfloat16 and keys >= MANY


def by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention [B, G, R, D] of `query` [B, G, R, D], with the additive `mask` [..., R, M] of the last M keys, written out.

    Scores are rounded to the queries' dtype: over 1,952 tokens SmolLM2's distributions were as far from those in fp32
    (KL 0.0012) as by torch's kernel, which keeps them in fp32 (0.0013).
    """
    rows, groups = key.shape[:2]
    score = torch.bmm((query * scale).flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).unflatten(0, (rows, groups))
    score[..., -mask.shape[-1] :].add_(mask)
    weights = score.softmax(-1)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).unflatten(0, (rows, groups))


def share_keys(model: PreTrainedModel) -> int:
    """Let `model` attend in this way where it can, and return how often its masks are to repeat their rows."""
    config = model.config.get_text_config(decoder=True)
    shared = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if shared == 1 or model.config._attn_implementation != "sdpa":
        return 1
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return shared if model.config._attn_implementation == NAME else 1
