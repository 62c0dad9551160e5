"""Packed linear layers compute what plain ones do."""

import pytest
import torch
from torch import nn

from models.packed import PackedLinear, pack, packs

pytestmark = pytest.mark.skipif(not packs(torch.device("cpu"), torch.float32), reason="oneDNN is not available")


@pytest.mark.parametrize("rows", [1, 7, 8, 40])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_packed_layer_equals_the_plain_one(rows: int, bias: bool) -> None:
    linear = nn.Linear(24, 17, bias=bias)
    states = torch.randn(2, rows, 24)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(states), linear(states))


def test_packing_replaces_every_linear_layer_and_nothing_else() -> None:
    model = nn.Sequential(
        nn.Embedding(3, 4), nn.ModuleDict({"inner": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))}), nn.Linear(4, 2)
    )
    pack(model)
    assert [type(module) for module in model.modules() if not list(module.children())] == [
        nn.Embedding,
        PackedLinear,
        nn.LayerNorm,
        PackedLinear,
    ]
