"""A layer as one operation computes what the layer does, and stands only where it can."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from conftest import stock_model, tiny_config
from models import native
from models.drafter import Committed
from models.eagle3 import Eagle3
from models.ends import Ends
from models.native import LIBRARY, compiled, compiles, likeliest, norm, unable
from models.packed import PackedLinear
from models.quick import Block, Single
from models.source import from_random
from models.stack import Growing
from models.target import Target, differs, load_target
from models.tree import TokenTree
from models.whole import HEADS, Whole

CPU, BF16 = torch.device("cpu"), torch.bfloat16
pytestmark = pytest.mark.skipif(unable(CPU, BF16) is not None, reason=str(unable(CPU, BF16)))

HEADED = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(autouse=True)
def in_use() -> None:
    """As once a target is compiled: what is made from now on is made for the operations."""
    native.operations()


def by_hand(
    whole: dict[str, Tensor], entering: Tensor, base: Tensor, angles: Tensor, seen: Tensor, held: Tensor
) -> Any:
    """In fp64 and one head after the other: the output, and keys and values [2, B, G, N, D] of the new tokens."""
    rows, count, _ = base.shape
    groups, width = held.shape[2], held.shape[-1]
    read = entering.double()
    if "before" in whole:
        read = whole["before"].double() * read * (read.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    heads = (read @ whole["project"].double().t() + whole["project_bias"].double()).unflatten(-1, (-1, width))
    unit = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, :, None]
    half, turned = width // 2, heads.shape[2] - groups
    pairs = torch.complex(heads[:, :, :turned, :half], heads[:, :, :turned, half:]) * unit
    queries, keys = torch.cat([pairs.real, pairs.imag], dim=-1).split([turned - groups, groups], dim=2)
    new = torch.stack([keys, heads[:, :, turned:]]).transpose(2, 3)
    found = torch.zeros(rows, count, turned - groups, width, dtype=torch.float64)
    for row, head in itertools.product(range(rows), range(turned - groups)):
        group = head // ((turned - groups) // groups)
        key, value = held[:, row, group].double().clone()
        here = seen[row].any(0).nonzero().max() + 1 - count  # new tokens are the last that anybody sees
        key[here : here + count], value[here : here + count] = new[:, row, group]
        score = (queries[row, :, head] @ key.t() * width**-0.5).masked_fill(~seen[row], -torch.inf)
        found[row, :, head] = score.softmax(-1) @ value
    states = base.double() + found.flatten(2) @ whole["mix"].double().t()
    normed = whole["after"].double() * states * (states.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    gate, up = (normed @ whole["gate"].double().t()).chunk(2, -1)
    return states + (nn.functional.silu(gate) * up) @ whole["down"].double().t(), new


@pytest.mark.parametrize("width", HEADS)
@pytest.mark.parametrize(
    ("starts", "count", "room"),
    [([0], 1, 5), ([37], 1, 64), ([7], 3, 10), ([250], 10, 300), ([3, 40, 0], 4, 50), ([5, 90], 33, 123)],
    ids=str,
)
@pytest.mark.parametrize("before", [True, False], ids=["norm before", "comes normed"])
@torch.inference_mode()
def test_a_layer_as_one_operation_is_the_layer(
    width: int, starts: Sequence[int], count: int, room: int, before: bool
) -> None:
    torch.manual_seed(width + room)
    rows, groups, shared, size = len(starts), 2, 3, 64
    shapes = {
        "project": ((shared + 2) * groups * width, size),
        "mix": (size, shared * groups * width),
        "gate": (2 * 96, size),
        "down": (size, 96),
    }
    whole = {name: (torch.randn(shape) / shape[1] ** 0.5).bfloat16() for name, shape in shapes.items()}
    whole |= {"project_bias": torch.randn(shapes["project"][0]).bfloat16(), "after": torch.rand(size).bfloat16()}
    whole |= {"before": torch.rand(size).bfloat16()} if before else {}
    entering, base = torch.randn(2, rows, count, size).bfloat16()
    angles = 10 * torch.rand(rows, count, width // 2)
    held = torch.randn(2, rows, groups, room, width).bfloat16()
    end = max(starts) + count
    seen = torch.zeros(rows, count, end, dtype=torch.bool)
    for row, start in enumerate(starts):
        seen[row, :, : start + count] = torch.rand(count, start + count) < 0.7
        seen[row, range(count), range(start, start + count)] = True  # everybody sees itself
    expected, new = by_hand(whole, entering, base, angles, seen, held[..., :end, :])

    both = torch.cat([angles, angles], dim=-1)
    products = [
        PackedLinear(whole[name], whole["project_bias"] if name == "project" else None)
        for name in ("project", "mix", "gate", "down")
    ]
    layer = Whole(products, whole.get("before"), whole["after"], width**-0.5, 1e-5)
    store = held.clone()
    made = layer(entering, base, (both.cos().bfloat16(), both.sin().bfloat16()), store.unbind(), starts, seen)
    assert differs(made, expected) < 0.01
    for row, start in enumerate(starts):
        kept = store[:, row, :, start : start + count]
        assert differs(kept, new[:, row]) < 0.01
        assert torch.equal(store[:, row, :, :start], held[:, row, :, :start])
        assert torch.equal(store[:, row, :, start + count :], held[:, row, :, start + count :])


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 5, 96), (700, 33)], ids=str)
@torch.inference_mode()
def test_the_norm_rounds_where_transformers_does(shape: tuple[int, ...]) -> None:
    states, weight = torch.randn(shape).bfloat16(), torch.rand(shape[-1]).bfloat16()
    wide = states.float()
    expected = weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).bfloat16()
    assert (norm(states, weight, 1e-5) == expected).float().mean() > 0.99  # sums are taken in another order
    torch.testing.assert_close(norm(states, weight, 1e-5), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("rows", [1, 5, 12, 13, 40])
@pytest.mark.parametrize("biased", [True, False])
@torch.inference_mode()
def test_a_row_has_the_same_product_whatever_stands_beside_it(rows: int, biased: bool) -> None:
    weight, bias = (torch.randn(70, 48) / 7).bfloat16(), torch.randn(70).bfloat16() if biased else None
    layer, states, plus = (
        PackedLinear(weight, bias),
        torch.randn(1, rows, 48).bfloat16(),
        torch.randn(1, rows, 70).bfloat16(),
    )
    expected = nn.functional.linear(states.double(), weight.double(), None if bias is None else bias.double())
    together = layer(states)
    assert differs(together, expected) < 0.004
    assert differs(layer(states, plus), expected + plus) < 0.004
    for row in range(rows):
        assert torch.equal(layer(states[:, row : row + 1]), together[:, row : row + 1])


@torch.inference_mode()
def test_what_is_no_number_is_picked_last() -> None:
    logits = torch.full((1, 40), torch.nan).bfloat16()
    logits[0, 33], logits[0, 7] = 1.0, -torch.inf
    assert int(likeliest(logits, 3)[1][0, 0]) == 33


@pytest.mark.parametrize(("size", "count"), [(5, 5), (31, 2), (32, 4), (1000, 10), (8192, 4)])
@torch.inference_mode()
def test_the_likeliest_tokens_are_those_of_a_sort(size: int, count: int) -> None:
    logits = (3 * torch.randn(2, 3, size)).bfloat16()
    logits[0, 0, 1] = -torch.inf
    log_probs, picks = likeliest(logits, count)
    whole = logits.log_softmax(-1, dtype=torch.float32)
    ranked, order = whole.sort(dim=-1, descending=True, stable=True)  # of equals the first
    assert torch.equal(picks, order[..., :count])
    torch.testing.assert_close(log_probs, ranked[..., :count], rtol=1e-5, atol=1e-5)


def headed(compile: bool | None, **changes: Any) -> Target:
    """A small target whose heads the operation knows."""
    folder = from_random(tiny_config("llama", **{**HEADED, **changes}))
    return load_target(folder, "llama", dtype="bf16", device="cpu", compile=compile)


@torch.inference_mode()
def test_a_compiled_target_reads_trees_of_uneven_rows_no_worse_than_another() -> None:
    targets = {compile: headed(compile) for compile in (None, False)}
    assert all(isinstance(layer, Single) for layer in targets[None].layers)
    assert all(isinstance(layer, Block) for layer in targets[False].layers)
    ids = torch.randint(3, 272, (2, 30), generator=torch.Generator().manual_seed(3))
    lengths, parents = torch.tensor([20, 11]), torch.tensor([[-1, 0, 0, 1, 3, 2]] * 2)
    tree = TokenTree(ids[:, 24:], parents, torch.ones_like(parents, dtype=torch.bool))
    exact = stock_model(from_random(tiny_config("llama", **HEADED)))
    apart = {}
    for compile, target in targets.items():
        cache = target.cache(2, 40)
        target.prefill(ids[:, :20], lengths, cache)
        first = target.read(tree, cache).logits
        cache.keep([[0, 1, 3], [0, 2]])  # moved to where they stay
        second = target.read(TokenTree.roots(ids[:, 5]), cache).logits
        assert first is not None
        assert second is not None
        for row, kept in enumerate(([0, 1, 3], [0, 2])):
            text = [*ids[row, : lengths[row]].tolist(), *ids[row, 24:][kept].tolist(), int(ids[row, 5])]
            said = exact(input_ids=torch.tensor([text]), use_cache=False).logits[0]
            apart[compile, row, "tree"] = differs(first[row, kept], said[lengths[row] : -1])
            apart[compile, row, "behind it"] = differs(second[row, 0], said[-1])
    for row, where in itertools.product(range(2), ("tree", "behind it")):
        assert apart[None, row, where] < 1.5 * apart[False, row, where] + 0.005


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"head_dim": 16}], ids=["another gate", "narrow heads"])
def test_a_layer_that_the_operation_does_not_know_stays(changes: dict[str, Any]) -> None:
    assert all(isinstance(layer, Block) for layer in headed(None, **changes).layers)


@torch.inference_mode()
def test_a_compiled_drafter_says_what_another_does_level_by_level() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=8
    )
    said: dict[bool, list[Tensor]] = {}
    for whole in (True, False):
        torch.manual_seed(5)
        drafter = Eagle3(Ends(torch.randn(20, 64), torch.randn(20, 64), None, config), steps=4, vocabulary=9, layers=2)
        drafter = drafter.eval().bfloat16()
        drafter.ready(whole)
        assert [layer.whole is not None for layer in drafter.stack] == [whole] * 2
        memory, said[whole] = drafter.begin(2, 60), []
        for lengths, fresh in (([12, 30], True), ([3, 1], False)):  # a prompt, and what a round commits
            committed = Committed(
                torch.randint(0, 20, (2, max(lengths))),
                torch.tensor(lengths),
                torch.randn(2, max(lengths), 3 * 64).bfloat16(),
                torch.randn(2, max(lengths), 64).bfloat16(),
                torch.tensor([4, 5]),
                torch.full((2,), fresh),
            )
            growing = Growing(drafter, committed, memory)
            said[whole].append(growing(committed.bonus[:, None], torch.zeros(2, 1).long()))
            said[whole].append(growing(torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.zeros(2, 3).long()))
            said[whole].append(growing(torch.tensor([[9, 1], [2, 3]]), torch.tensor([[2, 0], [1, 1]])))
    for ours, theirs in zip(said[True], said[False], strict=True):
        assert differs(ours, theirs) < 0.03


def test_what_cannot_be_compiled_is_refused_before_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"target\.compile=true cannot be: it is for bf16 on a CPU, and the target is in float32"
    ):
        load_target(Path("nowhere"), "nothing", dtype="fp32", device="cpu", compile=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="there is no C\\+\\+ compiler"):
        compiles(True, CPU, BF16)
    assert not compiles(None, CPU, BF16)
    assert not compiles(False, CPU, BF16)


def test_a_compiler_that_fails_leaves_nothing_behind_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\necho 'native.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    native.operations.cache_clear()
    with pytest.raises(
        ValueError, match=r"broken-g\+\+ could not compile native.cpp \(native.cpp:1: error: no such header\)"
    ):
        compiles(True, CPU, BF16)
    assert not compiles(None, CPU, BF16)
    assert "note: layers stay uncompiled" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "compiled").iterdir())


def test_the_library_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (compiled() / LIBRARY).exists()
    monkeypatch.setattr(native, "_compile", lambda folder: pytest.fail("compiled again"))
    assert (compiled() / LIBRARY).exists()


@torch.inference_mode()
def test_what_does_not_fit_together_is_refused() -> None:
    layer = headed(None).layers[0]
    assert isinstance(layer, Single)
    states, seen = torch.randn(2, 3, 64).bfloat16(), torch.ones(2, 3, 5, dtype=torch.bool)
    angles, store = torch.ones(2, 3, 32).bfloat16(), torch.zeros(2, 2, 2, 6, 32).bfloat16()
    whole = layer.whole
    assert whole(states, states, (angles, angles), store.unbind(), [2, 1], seen).shape == states.shape
    with pytest.raises(RuntimeError, match="angles are not those of 2 rows of 3 tokens"):
        whole(states, states, (angles[:1], angles[:1]), store.unbind(), [2, 1], seen)
    with pytest.raises(RuntimeError, match="what is seen is not that of 2 rows of 3 tokens"):
        whole(states, states, (angles, angles), store.unbind(), [2, 1], seen[:, :2])
    with pytest.raises(RuntimeError, match="there is no room for 3 tokens from 4 on"):
        whole(states, states, (angles, angles), store.unbind(), [2, 4], seen)
