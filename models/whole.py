"""A decoder layer as one operation of models/native.cpp, for the target and for drafters.

B rows, N tokens, G key-value heads, D head width.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from models.native import operations
from models.packed import PackedLinear

HEADS = (32, 64, 96, 128)  # widths that the operation knows
Pair = tuple[Tensor, Tensor]  # keys and values [B, G, S, D], or cosines and sines


class Whole:
    """A layer as one operation: attention that adds what it found to a base, then a gated MLP that adds to that.

    `before` is the weight of the norm of what attention reads, unless it comes normed, and `after` that of the MLP's, both
    with `eps`; `scale` is that of scores.
    """

    def __init__(
        self, products: Sequence[PackedLinear], before: Tensor | None, after: Tensor, scale: float, eps: float
    ):
        project, mix, gate, down = products
        self.parts = (
            before, project.laid, project.bias, mix.laid, mix.bias, after, gate.laid, gate.bias, down.laid, down.bias,
            project.out, gate.out, scale, eps,
        )  # fmt: skip
        self.layer = operations().layer.default

    @classmethod
    def of(
        cls,
        products: Sequence[nn.Module],
        width: int,
        before: Tensor | None,
        after: Tensor,
        scale: float,
        eps: float,
    ) -> "Whole | None":
        """That of four `products` (to queries, keys and values, back, to gate and input, back) and heads `width` wide; None where
        products are not laid out for it, or heads not as wide as it knows."""
        packed = [one for one in products if isinstance(one, PackedLinear) and one.laid is not None]
        if len(packed) < len(products) or width not in HEADS:
            return None
        return cls(packed, before, after, scale, eps)

    def __call__(
        self, entering: Tensor, base: Tensor, angles: Pair, store: Pair, starts: Sequence[int], seen: Tensor
    ) -> Tensor:
        """[B, N, width] the layer's output, where queries see what `seen` [B, (1,) N, S] says.

        New keys and values go into `store` [B, G, room, D] from `starts` [B] on.
        """
        made: Tensor = self.layer(entering, base, *angles, *store, starts, seen, *self.parts)
        return made
