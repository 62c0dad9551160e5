"""Packed linear layers compute what plain ones do."""

import pytest
import torch
from torch import nn

from models.packed import LARGE, USUAL, PackedLinear, Part, fits, pack, packs, same_input

pytestmark = pytest.mark.skipif(not packs(torch.device("cpu"), torch.float32), reason="oneDNN is not available")


@pytest.mark.parametrize("rows", [1, 7, 8, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [17, 40], ids=["narrow", "wide"])
@torch.inference_mode()
def test_a_packed_layer_equals_the_plain_one(rows: int, bias: bool, out: int) -> None:
    linear = nn.Linear(24, out, bias=bias)
    for batch in (1, 2):
        states = torch.randn(batch, rows, 24)
        torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(states), linear(states))


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 40, 168, 600], ids=lambda rows: f"{rows} rows")
@torch.inference_mode()
def test_a_large_packed_layer_equals_the_plain_one(rows: int) -> None:
    """An image, where oneDNN keeps to one layout; 168 pixels want another on a CPU with AVX2, and 600 are too many."""
    linear, states = nn.Linear(2048, LARGE // 2048 + 3), torch.randn(1, rows, 2048)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(states), linear(states))


@pytest.mark.skipif(not packs(torch.device("cpu"), torch.bfloat16), reason="no kernels for bf16 here")
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (1, 3), (8, 1), (2, 5), (0, 1), (2,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [32, 256], ids=["narrow", "wide"])
@torch.inference_mode()
def test_a_packed_layer_in_bf16_equals_the_plain_one(shape: tuple[int, ...], bias: bool, out: int) -> None:
    linear, states = nn.Linear(64, out, bias=bias).bfloat16(), torch.randn(*shape, 64).bfloat16()
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(states), linear(states), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_product_is_added_to_what_is_given_and_leaves_that_alone(dtype: torch.dtype) -> None:
    if not packs(torch.device("cpu"), dtype):
        pytest.skip(f"no kernels for {dtype} here")
    linear, close = nn.Linear(64, 32).to(dtype), {"rtol": 0.02, "atol": 0.05} if dtype is torch.bfloat16 else {}
    for rows in (1, 3, 9):
        states, plus = torch.randn(1, rows, 64).to(dtype), torch.randn(1, rows, 32).to(dtype)
        before = plus.clone()
        found = PackedLinear(linear.weight, linear.bias)(states, plus)
        torch.testing.assert_close(found, linear(states) + plus, **close)
        assert torch.equal(plus, before)


@torch.inference_mode()
def test_a_large_layer_is_no_image_where_the_usual_trees_want_several_layouts() -> None:
    for width in (256, 4096):
        layer = PackedLinear(torch.zeros(LARGE // width, width), None)
        assert layer.image == all(fits(width, rows) for rows in USUAL)


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


class Reader(nn.Module):
    """Two layers that read one input, one of them without a bias, and two that read others."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 9), nn.Linear(6, 4, bias=False)
        self.apart, self.twice = nn.Linear(9, 5), nn.Linear(6, 6)
        self.skip = False

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = self.twice(self.twice(states))
        left = self.left(states)
        return left, left if self.skip else self.right(states), self.apart(left)


@torch.inference_mode()
def test_layers_that_read_one_input_become_one_product_and_say_what_they_said() -> None:
    reader, states = Reader(), torch.randn(2, 3, 6)
    said = reader(states)
    joined = same_input(reader, lambda: reader(states))
    assert joined == [[reader.left, reader.right]]
    pack(reader, joined)
    assert [type(child) for child in reader.children()] == [Part, Part, PackedLinear, PackedLinear]
    for batch in (states, states[:1, :1]):
        expected = [part[: len(batch), : batch.shape[1]] for part in said]
        torch.testing.assert_close(list(reader(batch)), expected)


@torch.inference_mode()
def test_a_joined_layer_never_takes_what_was_made_of_an_input_that_changed_since() -> None:
    """Somebody reuses the tensor that the first layer read, after a pass in which the second was not asked."""
    reader, states = Reader(), torch.randn(1, 2, 6)
    reader.twice = nn.Identity()  # type: ignore[assignment]
    pack(reader, [[reader.left, reader.right]])
    first = reader(states)[1].clone()
    reader.skip = True
    reader(states)
    reader.skip = False
    torch.testing.assert_close(reader(states.mul_(2))[1], 2 * first)
