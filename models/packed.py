"""Linear layers of a frozen model on a CPU: weights laid out once for products of few rows, and few large products.

Decoding multiplies one row, or a tree's, by the same large matrices again and again. Several rows read them in the order
that oneDNN's kernel wants. For a large matrix in fp32 that is the kernel of its convolution: a linear layer is one over
single pixels, the rows side by side as an image, and it reads a weight from one end to the other where the kernel of
linear layers jumps (on a CPU with AVX2 a tree of 4 to 12 nodes takes 22 to 36 % less time in a head, 2 to 22 % in an MLP). One row
is bound by memory, and reads a wide matrix fastest column by column: the product is then a sum of long rows of the
transpose, not many short dot products (on such a CPU 11 GB/s against 6).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from models import native

ROWS = 8  # the number of rows the packed layout is chosen for: a small tree
STEP = 4  # images as wide as a multiple of it read a weight in one layout
USUAL = range(STEP, 65, STEP)  # widths for which that must be so
MOST = 512  # rows; wider images are slower than the kernel of linear layers, at 1,200 three times
PRODUCT, SUM = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary
WIDE = 2  # outputs for each input
LARGE = 1 << 20  # weights; in smaller matrices a convolution's own costs outweigh what it saves


class PackedLinear(nn.Module):
    """What a linear layer computes, from copies of its weight [out, in]: one for a single row, one for several; or from
    the one that the operations of models/native.cpp read, where they serve.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        weight = weight.detach()
        self.out, self.width = weight.shape
        self.bias, self.laid = bias, None
        if native.serves(weight) and self.width % 2 == 0:
            self.laid = native.lay_out(weight)
            return
        self.single: Tensor | None = None  # in bf16 oneDNN serves one row too
        if weight.dtype == torch.float32:
            self.single = weight.t().contiguous().t() if weight.shape[0] > self.width else weight
        self.wide = weight.shape[0] > WIDE * self.width  # in bf16 oneDNN reads those faster for four rows than for one
        self.image = self.single is not None and weight.numel() >= LARGE and all(fits(self.width, n) for n in USUAL)
        self.packed = for_image(weight, ROWS) if self.image else torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def forward(self, states: Tensor, plus: Tensor | None = None) -> Tensor:
        """The product of `states` [..., in], added to `plus` [..., out] where that is given."""
        if self.laid is not None:
            return native.product(states, self.laid, self.out, self.bias, plus)
        if self.single is not None:
            made = self._of_floats(states, self.single)
            return made if plus is None else made.add_(plus)
        if plus is not None:
            return SUM(states, plus, self.packed, self.bias, "add")
        if self.wide and 0 < (count := states.numel() // self.width) < STEP:
            rows = nn.functional.pad(states.reshape(count, self.width), (0, 0, 0, STEP - count))
            return PRODUCT(rows, self.packed, self.bias, "none", [], "")[:count].view(*states.shape[:-1], -1)
        return PRODUCT(states, self.packed, self.bias, "none", [], "")

    def _of_floats(self, states: Tensor, single: Tensor) -> Tensor:
        """The product in fp32, by what is fastest for so many rows."""
        count = states.numel() // self.width
        short = -count % STEP
        if count <= 1 or (self.image and (count > MOST or not fits(self.width, count + short))):
            return nn.functional.linear(states, single, self.bias)
        if not self.image:
            return PRODUCT(states, self.packed, self.bias, "none", [], "")
        rows = states.reshape(count, self.width)
        if short:
            rows = nn.functional.pad(rows, (0, 0, 0, short))
        found = torch.ops.mkldnn._convolution_pointwise(
            rows.t()[None, :, None], self.packed, self.bias, [0, 0], [1, 1], [1, 1], 1, "none", [], ""
        )
        return found[0, :, 0, :count].t().view(*states.shape[:-1], -1)


def for_image(weight: Tensor, rows: int) -> Tensor:
    """`weight` [out, in] as oneDNN's convolution wants it for an image of `rows` pixels."""
    size = [1, weight.shape[1], 1, rows]
    return torch.ops.mkldnn._reorder_convolution_weight(weight[:, :, None, None], [0, 0], [1, 1], [1, 1], 1, size)


@functools.cache
def fits(width: int, rows: int) -> bool:
    """Whether an image of `rows` pixels reads a weight [out, `width`] in the layout made for ROWS of them.

    For another oneDNN would lay the weight out anew in every product, hundreds of times slower than the product; so it is
    asked. Its layouts round the outputs up to blocks of various sizes: 577 outputs tell those apart by their bytes.
    """
    weight = torch.zeros(577, width)
    ours, wanted = (torch.ops.mkldnn._nbytes(for_image(weight, count)) for count in (ROWS, rows))
    return bool(ours == wanted)


class Joined:
    """Linear layers that read the same input, as one product: the first that is asked computes for all of them."""

    def __init__(self, layers: Sequence[nn.Linear]):
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.sizes = [layer.out_features for layer in layers]
        self.product = PackedLinear(weight, joined_bias(layers))
        self.read: Tensor | None = None  # the input that others will ask for as well
        self.made: dict[int, Tensor] = {}  # what they have not taken yet

    def part(self, place: int, states: Tensor) -> Tensor:
        """What layer `place` makes of `states`; nobody takes twice, so what another pass has left is not taken for this one's."""
        if states is not self.read or place not in self.made:
            parts = self.product(states).split(self.sizes, dim=-1)
            self.read, self.made = states, dict(enumerate(parts))
        part = self.made.pop(place)
        if not self.made:
            self.read = None
        return part


class Part(nn.Module):
    """One layer of several that are computed together."""

    def __init__(self, whole: Joined, place: int):
        super().__init__()
        self.whole, self.place = whole, place

    def forward(self, states: Tensor) -> Tensor:
        return self.whole.part(self.place, states)


def joined_product(layer: nn.Module) -> nn.Module:
    """The product that computes `layer`, and others with it where they were joined."""
    return layer.whole.product if isinstance(layer, Part) else layer


def together(layers: Sequence[nn.Module], states: Tensor) -> Tensor:
    """What each of `layers` makes of `states` [..., in], side by side; where they were packed, as one product."""
    first = layers[0]
    if isinstance(first, Part):
        return first.whole.product(states)
    return torch.cat([layer(states) for layer in layers], dim=-1)


def added(layer: nn.Module, states: Tensor, plus: Tensor) -> Tensor:
    """What `layer` makes of `states`, added to `plus`: by the product itself, where it is a packed one."""
    return layer(states, plus) if isinstance(layer, PackedLinear) else plus + layer(states)


def joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The biases one after the other, zeros where a layer has none; None where no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    none = [layer.weight.new_zeros(layer.out_features) for layer in layers]
    return torch.cat(
        [zeros if layer.bias is None else layer.bias.detach() for layer, zeros in zip(layers, none, strict=True)]
    )


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for packed weights of `dtype` here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(module: nn.Module, joined: Iterable[Sequence[nn.Linear]] = ()) -> None:
    """Replace every linear layer under `module` by its packed twin, and the layers of each of `joined` by one product."""
    twins: dict[nn.Module, nn.Module] = {}
    for layers in joined:
        whole = Joined(layers)
        twins |= {layer: Part(whole, place) for place, layer in enumerate(layers)}
    for layer in module.modules():
        if type(layer) is nn.Linear and layer not in twins:
            twins[layer] = PackedLinear(layer.weight, layer.bias)
    swap(module, twins)


def declared(module: nn.Module) -> list[list[nn.Linear]]:
    """The linear layers that modules under `module` declare, by the names in `joined`, to be asked for one input."""
    names = [(part, getattr(part, "joined", ())) for part in module.modules()]
    return [[getattr(part, name) for name in some] for part, some in names if some]


def swap(module: nn.Module, twins: Mapping[nn.Module, nn.Module]) -> None:
    """Put each of `twins` wherever under `module` the part stands that it is the twin of."""
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if child in twins:
            setattr(module, name, twins[child])
        else:
            swap(child, twins)


def same_input(module: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """The linear layers under `module` that read the very same tensor while `run` runs, in the order they are called.

    A layer that is called twice is joined to none.
    """
    readers: dict[int, tuple[Tensor, list[nn.Linear]]] = {}  # the tensor is held, so that its id stays its own
    calls: dict[nn.Linear, int] = {}

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        calls[layer] = calls.get(layer, 0) + 1
        if args:
            readers.setdefault(id(args[0]), (args[0], []))[1].append(layer)

    linears = [layer for layer in module.modules() if type(layer) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(note) for layer in linears]
    run()
    for hook in hooks:
        hook.remove()
    groups = [[layer for layer in layers if calls[layer] == 1] for _, layers in readers.values()]
    return [layers for layers in groups if len(layers) > 1]
