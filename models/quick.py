"""Parts of a frozen model in fewer operations on a CPU, each put in only where it says what the stock part says.

At the sizes of a small target an operation costs about as much to start as to do: transformers' norm is six of them and
its rotation of queries and keys fourteen, in every layer. B rows, N tokens, H heads, D head width.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from models.attention import NAME, grouped_attention
from models.packed import Part, swap

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
SCALES = (1.0, 1e-3)  # of what a norm is shown: an epsilon counts where its input is small
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Norm(nn.Module):
    """The norm by root mean square, in one operation."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.detach(), requires_grad=False), eps

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.rms_norm(states, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Attention that turns queries and keys together, as they come out of one product with the values."""

    def __init__(self, stock: nn.Module):
        super().__init__()
        query = stock.q_proj
        assert isinstance(query, Part)
        self.stock, self.product, self.out = stock, query.whole.product, stock.get_submodule("o_proj")
        self.width: int = stock.head_dim  # type: ignore[assignment]
        self.heads = [size // self.width for size in query.whole.sizes]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **how: Any,
    ) -> tuple[Tensor, None]:
        made = self.product(hidden_states).unflatten(-1, (-1, self.width))
        turned = turn(made[:, :, : self.heads[0] + self.heads[1]], *position_embeddings).transpose(1, 2)
        query, key = turned.split(self.heads[:2], dim=1)
        value = made[:, :, -self.heads[2] :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.stock.layer_idx)  # type: ignore[arg-type]
        found, _ = grouped_attention(self.stock, query, key, value, attention_mask, scaling=self.stock.scaling)
        return self.out(found.flatten(2)), None


def turn(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The rotary embedding of `states` [B, N, H, D] by angles [B, N, D] that are the same in both halves."""
    half = states.shape[-1] // 2
    sine = sine[:, :, None, :half]
    turned = states * cosine[:, :, None]
    turned[..., :half].addcmul_(states[..., half:], sine, value=-1)
    turned[..., half:].addcmul_(states[..., :half], sine)
    return turned


def twins_of(stock: nn.Module) -> Iterator[nn.Module]:
    """What might compute the same as `stock`, by what it is made of."""
    own, inner = dict(stock.named_parameters(recurse=False)), dict(stock.named_children())
    eps = getattr(stock, "variance_epsilon", getattr(stock, "eps", None))
    if set(own) == {"weight"} and own["weight"].ndim == 1 and not inner and isinstance(eps, float):
        yield Norm(own["weight"], eps)
        yield Norm(1 + own["weight"], eps)  # Gemma's weights count from 1
    ours = not own and set(inner) == {*PROJECTIONS, "o_proj"} and _joined([inner[name] for name in PROJECTIONS])
    how = getattr(getattr(stock, "config", None), "_attn_implementation", None)
    if ours and how in (NAME, "sdpa"):
        yield Attention(stock)


def _joined(layers: list[nn.Module]) -> bool:
    """Whether `layers` are all the parts of one product, in order."""
    parts = [layer for layer in layers if isinstance(layer, Part)]
    if len(parts) < len(layers) or any(part.whole is not parts[0].whole for part in parts):
        return False
    return [part.place for part in parts] == list(range(len(parts[0].whole.sizes)))


def quicken(model: nn.Module, run: Callable[[], object], within: float) -> None:
    """Put twins in the places of what `run` calls under `model`, where both answer alike `within` a relative error."""
    calls: dict[nn.Module, Call] = {}

    def note(stock: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        calls[stock] = args, kwargs

    hooks = [
        part.register_forward_hook(note, with_kwargs=True)
        for part in model.modules()
        if next(twins_of(part), None) is not None
    ]
    run()
    for hook in hooks:
        hook.remove()
    found = {
        stock: next((twin for twin in twins_of(stock) if alike(twin, stock, calls[stock], within)), None)
        for stock in calls
    }
    swap(model, {stock: twin for stock, twin in found.items() if twin is not None})


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
