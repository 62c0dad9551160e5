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
MANY = 1024  # keys of all rows, from about where two products in bf16 take half the time of torch's own attention


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """Attention [B, N, H, D] of `query` [B, H, N, D] over `key` and `value` [B, G, S, D].

    An additive mask [B, 1, H/G * N, S] that repeats its N rows once for each head of a group asks for this way; any
    other mask, and none, is read as transformers' own sdpa reads it.
    """
    (rows, heads, count, width), groups = query.shape, key.shape[1]
    shared = heads // groups
    if attention_mask is None or attention_mask.shape[2] == count:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    if attention_mask.shape[2] != shared * count:  # these layers share otherwise than the config says
        return sdpa_attention_forward(module, query, key, value, attention_mask[:, :, :count], **how)
    folded, scale = query.reshape(rows, groups, shared * count, width), how.get("scaling") or width**-0.5
    if key.is_contiguous() and wants_whole(key.device, key.dtype, rows * key.shape[2]):
        found = by_products(folded, key, value, attention_mask, scale)
    else:
        found = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scale)
    return found.reshape(rows, heads, count, -1).transpose(1, 2).contiguous(), None


def wants_whole(device: torch.device, dtype: torch.dtype, keys: int) -> bool:
    """Whether attention to so many keys is two products, if they lie in one piece; others are copied, and nothing is won."""
    return device.type == "cpu" and dtype == torch.bfloat16 and keys >= MANY


def by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention [B, G, R, D] of `query` [B, G, R, D], with the additive `mask` [B, 1, R, S], written out.

    Scores are rounded to the queries' dtype: over 1,952 tokens SmolLM2's distributions were as far from those in fp32
    (KL 0.0012) as by torch's kernel, which keeps them in fp32 (0.0013).
    """
    rows, groups = key.shape[:2]
    score = torch.bmm((query * scale).flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).unflatten(0, (rows, groups))
    weights = score.add_(mask).softmax(-1)
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
