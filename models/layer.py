"""The decoder layer of a feature drafter: attention over pairs of embedding and feature, then an MLP.

B rows, Q queries, S keys, T positions, D width, H heads, G key-value heads, C head width.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.packed import added, joined_product, together
from models.sight import Looking, Sight, grouped
from models.transfer import sent
from models.whole import Pair, Whole


def layer_config(target: PretrainedConfig, width: int) -> LlamaConfig:
    """The geometry of a drafter's layer: a Llama layer with heads and rotary embedding like the target's.

    One of another width than the target's has as many of those heads as fit into it, and an MLP in proportion.
    """
    heads = target.num_attention_heads
    groups = getattr(target, "num_key_value_heads", None) or heads
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // heads
    if width != target.hidden_size:
        if width < head_dim or width % head_dim:
            raise ValueError(
                f"width={width} is no multiple of the target's heads, which are {head_dim} wide; change it"
            )
        heads = width // head_dim
        groups = gcd(heads, groups)
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=target.intermediate_size * width // target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-5),
        rope_parameters=rope_of(target),
    )


def rope_of(target: PretrainedConfig) -> dict[str, Any] | None:
    """The target's rotary settings in transformers' spelling of today, from `rope_parameters` or from `rope_theta` and
    `rope_scaling`; None where it says nothing.

    Where kinds of layers differ it is full attention's. A drafter turns whole heads.
    """
    ropes: dict[str, Any] = getattr(target, "rope_parameters", None) or {}
    if any(isinstance(rope, dict) for rope in ropes.values()):
        ropes = ropes.get("full_attention") or next(iter(ropes.values()))
    if not ropes and (theta := getattr(target, "rope_theta", None)):
        ropes = {"rope_type": "default", "rope_theta": theta, **(getattr(target, "rope_scaling", None) or {})}
        ropes["rope_type"] = ropes.pop("type", ropes["rope_type"])
    return {key: value for key, value in ropes.items() if key != "partial_rotary_factor"} or None


class Rotary:
    """Turns heads by their position, which `stretch` divides (position interpolation, Chen et al. 2023).

    No module: cast to bf16 with one, its frequencies would lose their digits.
    """

    def __init__(self, config: LlamaConfig, stretch: float):
        made = LlamaRotaryEmbedding(config)
        slow = made.inv_freq.float() / stretch
        self.frequencies = torch.cat([-slow, slow])  # each half of a head turns towards the other
        self.scale = made.attention_scaling
        self.asked: tuple[Tensor, torch.dtype] | None = None  # where `turns` were made for
        self.turns = torch.empty(0), torch.empty(0)
        self.tables: dict[torch.dtype, Pair] = {}  # [positions, C] in main memory

    def __call__(self, heads: Tensor, position: Tensor) -> Tensor:
        """`heads` [B, H, S, C] at `position` [B, S]."""
        cos, sin = self.angles(position, heads.dtype)
        return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)

    def angles(self, position: Tensor, dtype: torch.dtype) -> Pair:
        """Cosines and sines [B, 1, S, C] at `position` [B, S]; several layers, or queries and keys, ask for the same."""
        if self.asked is None or self.asked[0] is not position or self.asked[1] is not dtype:
            self.asked, self.turns = (position, dtype), self._at(position, dtype)
        return self.turns

    def _at(self, position: Tensor, dtype: torch.dtype) -> Pair:
        if position.device.type != "cpu":
            return self._made(position[:, None], dtype)
        end = int(position.max()) + 1 if position.numel() else 1
        if dtype not in self.tables or end > len(self.tables[dtype][0]):
            self.tables[dtype] = self._made(torch.arange(2 * end), dtype)
        cos, sin = self.tables[dtype]  # looked up in fewer operations than computed
        return cos[position][:, None], sin[position][:, None]

    def _made(self, position: Tensor, dtype: torch.dtype) -> Pair:
        """Cosines and sines [..., C] at `position` [...]."""
        self.frequencies = sent(self.frequencies, position.device)  # stays there
        angle = position[..., None] * self.frequencies
        cos, sin = angle.cos(), angle.sin()
        if self.scale != 1:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(dtype), sin.to(dtype)


class RMSNorm(nn.RMSNorm):
    """The norm in its weight's precision: under autocast states come in bf16, and torch's fused kernel wants both alike."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.to(self.weight.dtype))


class Attention(nn.Module):
    """Projections of grouped-query attention that reads `width_in` wide inputs, with rotary positions."""

    joined = ("q_proj", "k_proj", "v_proj")  # asked for one input: when packed, one product

    def __init__(self, config: LlamaConfig, width_in: int, stretch: float = 1.0):
        super().__init__()
        heads, groups = config.num_attention_heads, cast(int, config.num_key_value_heads)
        width = cast(int, config.head_dim)
        self.groups, self.shared, self.width = groups, heads // groups, width
        self.q_proj = nn.Linear(width_in, heads * width, bias=False)
        self.k_proj = nn.Linear(width_in, groups * width, bias=False)
        self.v_proj = nn.Linear(width_in, groups * width, bias=False)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)
        self.rotary = Rotary(config, stretch)

    def queries(self, states: Tensor, position: Tensor) -> Tensor:
        """[B, H, Q, C] of inputs [B, Q, width_in] at `position` [B, Q]."""
        return self.rotary(self._heads(self.q_proj(states)), position)

    def pairs(self, states: Tensor, position: Tensor) -> Pair:
        """Keys and values [B, G, S, C] of inputs [B, S, width_in] at `position` [B, S]."""
        return self.rotary(self._heads(self.k_proj(states)), position), self._heads(self.v_proj(states))

    def queries_and_pairs(self, states: Tensor, position: Tensor) -> tuple[Tensor, Pair]:
        """Both of inputs [B, S, width_in] at `position` [B, S], in as few operations as it takes."""
        every = self._heads(together([self.q_proj, self.k_proj, self.v_proj], states))
        turned = every.shape[1] - self.groups
        queries, keys = self.rotary(every[:, :turned], position).split([turned - self.groups, self.groups], dim=1)
        return queries, (keys, every[:, turned:])

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def mask(self, seen: Tensor) -> Tensor:
        """[B, 1, H/G * Q, S] what `found` asks for where queries see what `seen` [B, Q, S] says."""
        return seen.repeat(1, self.shared, 1)[:, None]

    def found(self, queries: Tensor, pairs: Pair, mask: Tensor) -> Tensor:
        """[B, Q, H*C] what `queries` find in `pairs` where `mask` lets them look."""
        rows = queries.unflatten(1, (self.groups, -1)).flatten(2, 3)  # heads of a group are rows: keys are read once
        found = nn.functional.scaled_dot_product_attention(rows, *pairs, attn_mask=mask)
        return found.reshape(queries.shape).transpose(1, 2).flatten(2)

    def found_with_own(self, queries: Tensor, pairs: Pair, sight: Sight, own: Sequence[Pair]) -> Tensor:
        """[B, H, Q, C] what `queries` find in `pairs` as `sight` allows and each in its own keys of `own`, [B, G, Q, C].

        The two are weighed against each other by the logarithms of their weights' sums: one softmax over all keys.
        """
        found, mass = cast(Pair, Looking.apply(queries, *pairs, sight))
        if not own:
            return found
        asked = grouped(queries, self.groups) * self.width**-0.5
        near = [(asked * keys[:, :, None]).sum(-1) for keys, _ in own]
        weights = torch.stack([grouped(mass, self.groups), *near], dim=-1).softmax(-1).to(found.dtype)
        shares = weights.unsqueeze(-1).unbind(-2)
        mixed = shares[0] * grouped(found, self.groups)
        for share, (_, values) in zip(shares[1:], own, strict=True):
            mixed = mixed + share * values[:, :, None]
        return mixed.flatten(1, 2)


class MLP(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    joined = ("gate_proj", "up_proj")

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor, plus: Tensor) -> Tensor:
        """That of `states`, added to `plus`."""
        return added(self.down_proj, nn.functional.silu(self.gate_proj(states)) * self.up_proj(states), plus)


class Layer(nn.Module):
    """What every drafter's layer is: attention whose output is added to a base, then an MLP that is added too."""

    whole: Whole | None = None  # itself as one operation

    def __init__(self, config: LlamaConfig, width_in: int, stretch: float):
        super().__init__()
        self.self_attn = Attention(config, width_in, stretch)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def outputs(self, base: Tensor, found: Tensor) -> Tensor:
        """The layer's output [..., D] from what attention `found` [..., H*C]."""
        states = added(self.self_attn.o_proj, found, base)
        return self.mlp(self.post_attention_layernorm(states), states)

    def unite(self) -> None:
        """Be one operation where few elements are read, once products are packed and norms quickened."""
        attention, mlp, norm = self.self_attn, self.mlp, self.post_attention_layernorm
        products = joined_product(attention.q_proj), attention.o_proj, joined_product(mlp.gate_proj), mlp.down_proj
        assert norm.eps is not None
        self.whole = Whole.of(products, attention.width, None, norm.weight, attention.width**-0.5, norm.eps)

    def through(self, inputs: tuple[Tensor, Tensor], position: Tensor, seen: Tensor) -> Tensor:
        """[B, N, D] the layer's output for its `inputs` at `position` [B, N], each of which sees what `seen` [B, N, N] says."""
        attention, (entering, base) = self.self_attn, inputs
        queries, pairs = attention.queries_and_pairs(entering, position)
        return self.outputs(base, attention.found(queries, pairs, attention.mask(seen)))


class PlainLayer(Layer):
    """A Llama layer as every target has it; `normed` False leaves out the norm before attention, as EAGLE-1 does."""

    def __init__(self, config: LlamaConfig, stretch: float = 1.0, normed: bool = True):
        super().__init__(config, config.hidden_size, stretch)
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = norm if normed else nn.Identity()

    def inputs(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., D], and what its output is added to [..., D]."""
        return self.input_layernorm(state), state


class FusedLayer(Layer):
    """EAGLE-3's layer: attention reads [norm(embedding), norm(feature)], and its output is added to the feature.

    `residual` before_norm: the feature itself is what is added to; after_norm: the normed one.
    """

    def __init__(self, config: LlamaConfig, residual: str, stretch: float = 1.0):
        super().__init__(config, 2 * config.hidden_size, stretch)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.residual = residual
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)

    def inputs(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2D], and what its output is added to [..., D]."""
        normed = self.hidden_norm(feature)
        pair = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return pair, feature if self.residual == "before_norm" else normed
