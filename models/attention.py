"""Grouped-query attention that reads every key once: query heads that share a key-value head are rows of one product.

Transformers copies keys and values for every query head wherever a mask is given and there are several queries; for a
tree that is most of what attention costs, and it grows with the context. B rows, H query heads, G key-value heads,
N queries, S keys, D head width.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "outrider"  # as transformers knows it


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
    found = nn.functional.scaled_dot_product_attention(
        query.reshape(rows, groups, shared * count, width),
        key,
        value,
        attn_mask=attention_mask,
        scale=how.get("scaling"),
    )
    return found.reshape(rows, heads, count, -1).transpose(1, 2).contiguous(), None


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
