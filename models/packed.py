"""Linear layers of a frozen target on a CPU, with weights laid out once for products of a few rows.

Scoring a tree multiplies few rows by large matrices, again and again with the same weights. oneDNN keeps them in
the order its kernel reads: on a CPU without bf16 instructions ten rows then cost 1.3 to 1.5 times one, not twice.
"""

import torch
from torch import Tensor, nn

ROWS = 8  # the number of rows the layout is chosen for: a small tree


class PackedLinear(nn.Module):
    """What a linear layer computes, from a packed copy of its weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        self.bias = bias

    def forward(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for packed weights of `dtype` here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(module: nn.Module) -> None:
    """Replace every linear layer under `module` by its packed twin."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack(child)
