"""Parts of a frozen model in fewer operations on a CPU, each put in only where it says what the stock part says.

At the sizes of a small target an operation costs about as much to start as to do: transformers' norm is six of them and
its rotation of queries and keys fourteen, in every layer; and calling its layers takes a fifth as long as what they do.
B rows, N tokens, H heads, D head width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from models.attention import NAME, grouped_attention
from models.cache import KVCache
from models.native import norm, serves
from models.packed import Part, swap
from models.whole import Whole

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
FEW = 32  # rows: from about there torch's own norm, which is ten operations, is faster
MANY = 64  # tokens: a text, whose products and blocks of attention are what takes time
SCALES = (1.0, 1e-3)  # of what a norm is shown: an epsilon counts where its input is small
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Norm(nn.Module):
    """The norm by root mean square: our operation, or for few rows the one by mean and variance, for which there is a kernel.

    A row beside its own negative has the mean 0, so its variance is its mean square.
    """

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.detach(), requires_grad=False), eps
        self.twice = torch.cat([weight, weight]).detach()
        self.shape, self.few = weight.shape, FEW * len(weight)

    def forward(self, states: Tensor) -> Tensor:
        if serves(states):
            return norm(states, self.weight, self.eps)
        if states.numel() > self.few:
            return nn.functional.rms_norm(states, self.shape, self.weight, self.eps)
        both = torch.cat((states, -states), dim=-1)
        return nn.functional.layer_norm(both, self.twice.shape, self.twice, None, self.eps)[..., : self.shape[0]]


class Attention(nn.Module):
    """Attention that turns queries and keys together, as they come out of one product with the values."""

    def __init__(self, stock: nn.Module):
        super().__init__()
        query = stock.q_proj
        assert isinstance(query, Part)
        self.stock, self.product, self.out = stock, query.whole.product, stock.get_submodule("o_proj")
        self.width: int = stock.head_dim  # type: ignore[assignment]
        self.project = self.product.forward
        self.number: int = stock.layer_idx  # type: ignore[assignment]
        self.scale: float = stock.scaling  # type: ignore[assignment]
        self.heads = [size // self.width for size in query.whole.sizes]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **how: Any,
    ) -> tuple[Tensor, None]:
        return self.out(self.found(hidden_states, position_embeddings, attention_mask, cache)), None

    def found(self, states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        """[B, N, H*D] what every head finds, before the heads are mixed."""
        made = self.project(states).unflatten(-1, (-1, self.width))
        turned = turn(made[:, :, : self.heads[0] + self.heads[1]], *angles).transpose(1, 2)
        query, key = turned.split(self.heads[:2], dim=1)
        value = made[:, :, -self.heads[2] :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.number)
        found, _ = grouped_attention(self.stock, query, key, value, mask, scaling=self.scale)
        return found.flatten(2)


class Gated(nn.Module):
    """An MLP whose gate and input come out of one product."""

    def __init__(self, stock: nn.Module):
        super().__init__()
        gate = stock.gate_proj
        assert isinstance(gate, Part)
        self.product, self.out = gate.whole.product, stock.get_submodule("down_proj")
        self.act: Callable[[Tensor], Tensor] = stock.get_submodule("act_fn")
        self.project = self.product.forward

    def forward(self, states: Tensor) -> Tensor:
        return self.out(self.found(states))

    def found(self, states: Tensor) -> Tensor:
        """[B, N, inner width] what the last product reads."""
        gate, up = self.project(states).chunk(2, dim=-1)
        return self.act(gate) * up


class Block(nn.Module):
    """A layer of norm and attention, norm and MLP, each of which is added to what it read by the product that ends it."""

    def __init__(self, stock: nn.Module):
        super().__init__()
        before, attention, after, mlp = (stock.get_submodule(name) for name in LAYER)
        assert isinstance(attention, Attention)
        assert isinstance(mlp, Gated)
        self.parts = nn.ModuleList([before, attention, after, mlp])
        # called past nn.Module, whose way to a norm of one row takes longer than the norm
        self.before, self.attend, self.mix = before.forward, attention.found, attention.out.forward
        self.after, self.gate, self.down = after.forward, mlp.found, mlp.out.forward

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Cache | None = None,
        **how: Any,
    ) -> Tensor:
        found = self.attend(self.before(hidden_states), position_embeddings, attention_mask, cache)
        states = self.mix(found, hidden_states)
        return self.down(self.gate(self.after(states)), states)


class Single(nn.Module):
    """A block that is one operation where few tokens are read: behind what a cache holds, where the mask says what is
    seen, or by themselves, where it says what is added to scores, as everywhere else.
    """

    def __init__(self, block: Block, whole: Whole):
        super().__init__()
        self.block, self.whole = block, whole
        attention = block.parts[1]
        assert isinstance(attention, Attention)
        self.number, self.groups, self.width = attention.number, attention.heads[1], attention.width

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **how: Any) -> Tensor:
        angles, cache, (rows, count, _) = how["position_embeddings"], how.get("cache"), hidden_states.shape
        if attention_mask is None:
            return self.block(hidden_states, **how)
        if attention_mask.dtype == torch.bool and isinstance(cache, KVCache) and cache.filled is None:
            store = cache.pair(self.number, hidden_states, self.groups, self.width)
            return self.whole(hidden_states, hidden_states, angles, store, cache.starts, attention_mask)
        if cache is None and count <= MANY:
            seen = (attention_mask[:, 0, :count] == 0).expand(rows, -1, -1)
            cosine, sine = (angle.expand(rows, -1, -1) for angle in angles)
            keys, values = hidden_states.new_empty(2, rows, self.groups, count, self.width)
            return self.whole(hidden_states, hidden_states, (cosine, sine), (keys, values), [0] * rows, seen)
        return self.block(hidden_states, attention_mask, **how)


def whole_of(block: Block) -> Whole | None:
    """The parts of `block` as one operation reads them, where it knows their shapes."""
    before, attention, after, mlp = block.parts
    assert isinstance(before, Norm)
    assert isinstance(attention, Attention)
    assert isinstance(after, Norm)
    assert isinstance(mlp, Gated)
    if before.eps != after.eps:
        return None
    products = attention.product, attention.out, mlp.product, mlp.out
    return Whole.of(products, attention.width, before.weight, after.weight, attention.scale, after.eps)


LAYER = {"input_layernorm": Norm, "self_attn": Attention, "post_attention_layernorm": Norm, "mlp": Gated}


def turn(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The rotary embedding of `states` [B, N, H, D] by angles [B, N, D] that are the same in both halves."""
    half = states.shape[-1] // 2
    sine = sine[:, :, None, :half]
    turned = states * cosine[:, :, None]
    turned[..., :half].addcmul_(states[..., half:], sine, value=-1)
    turned[..., half:].addcmul_(states[..., :half], sine)
    return turned


def twins_of(stock: nn.Module, single: bool) -> Iterator[nn.Module]:
    """What might compute the same as `stock`, by what it is made of; a layer only once its parts are twins, and as a
    `single` operation only where that is asked for."""
    own, inner = dict(stock.named_parameters(recurse=False)), dict(stock.named_children())
    if isinstance(stock, Block) and single and (whole := whole_of(stock)):
        yield Single(stock, whole)
    if isinstance(stock, Norm | Attention | Gated | Block | Single):
        return
    eps = getattr(stock, "variance_epsilon", getattr(stock, "eps", None))
    if set(own) == {"weight"} and own["weight"].ndim == 1 and not inner and isinstance(eps, float):
        yield Norm(own["weight"], eps)
        yield Norm(1 + own["weight"], eps)  # Gemma's weights count from 1
    if own:
        return
    how = getattr(getattr(stock, "config", None), "_attn_implementation", None)
    if set(inner) == {*PROJECTIONS, "o_proj"} and _joined(inner, PROJECTIONS) and how in (NAME, "sdpa"):
        yield Attention(stock)
    if set(inner) >= {*GATED, "down_proj"} and _joined(inner, GATED) and "act_fn" in inner:
        yield Gated(stock)
    if set(inner) == set(LAYER) and all(isinstance(inner[name], kind) for name, kind in LAYER.items()):
        yield Block(stock)


def _joined(inner: Mapping[str, nn.Module], names: Sequence[str]) -> bool:
    """Whether those of `inner` called `names` are all the parts of one product, in order."""
    parts = [part for name in names if isinstance(part := inner[name], Part)]
    if len(parts) < len(names) or any(part.whole is not parts[0].whole for part in parts):
        return False
    return [part.place for part in parts] == list(range(len(parts[0].whole.sizes)))


def quicken(model: nn.Module, run: Callable[[], object], within: float, single: bool = False) -> None:
    """Put twins in the places of what `run` calls under `model`, where both answer alike `within` a relative error.

    First of parts, then of layers made of those, then of layers as `single` operations.
    """
    while twins := alike_in(model, run, within, single):
        swap(model, twins)


def alike_in(model: nn.Module, run: Callable[[], object], within: float, single: bool) -> dict[nn.Module, nn.Module]:
    """The twins of what `run` calls under `model` that answer alike."""
    calls: dict[nn.Module, Call] = {}

    def note(stock: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        calls[stock] = args, kwargs

    might = [part for part in model.modules() if next(twins_of(part, single), None) is not None]
    if not might:
        return {}
    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in might]
    run()
    for hook in hooks:
        hook.remove()
    found = {
        stock: next((twin for twin in twins_of(stock, single) if alike(twin, stock, calls[stock], within)), None)
        for stock in calls
    }
    return {stock: twin for stock, twin in found.items() if twin is not None}


def quicken_norms(model: nn.Module) -> None:
    """Put twins in the places of torch's own norms under `model`, which need no trial."""
    norms = [part for part in model.modules() if isinstance(part, nn.RMSNorm)]
    swap(model, {norm: Norm(norm.weight, norm.eps) for norm in norms if norm.eps is not None})


def alike(twin: nn.Module, stock: nn.Module, call: Call, within: float) -> bool:
    """Whether both make the same of `call`, and of far smaller arguments."""
    args, kwargs = call
    for scale in SCALES:
        ours, theirs = (part(*(arg * scale for arg in args), **kwargs) for part in (twin, stock))
        if isinstance(ours, tuple):
            ours, theirs = ours[0], theirs[0]
        if ours.shape != theirs.shape or not (ours - theirs).float().norm() <= within * theirs.float().norm():
            return False
    return True
