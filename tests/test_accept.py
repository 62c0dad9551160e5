"""The accept rules, against walking every path. That they leave the text's distribution alone: tests/test_exact.py."""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.accept import Accepted, Typical, accept, accept_greedy, accept_sampled, first_of_largest
from models.sampling import Draw, Sampling, Voice
from models.tree import TokenTree
from reference import greedy_by_walking, outcomes, probs_by_hand, sampled_by_walking, typical_by_walking

V = 5


def test_a_rejection_that_only_rounding_allows_still_ends_in_a_token_the_target_may_say() -> None:
    """The draft equals the target but for the last bit, and the draw that says no comes up."""
    unlikely = 0
    for seed in range(40):
        logits = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(seed))
        logits[..., -1] = -torch.inf
        probs = logits.double().softmax(-1).float()
        for token in range(10):
            answers = iter([0])
            weights: list[Tensor] = []

            def draw(given: Tensor, answers: Iterator[int] = answers, weights: list[Tensor] = weights) -> int:
                weights.append(given)
                return next(answers, int(given.argmax()))

            tree = TokenTree(
                torch.tensor([[0, token]]), torch.tensor([[-1, 0]]), torch.ones(1, 2, dtype=torch.bool), probs
            )
            accept_sampled(tree, logits, Sampling(1.0), [draw])
            assert weights[-1].sum() > 0
            assert weights[-1][-1] == 0
            unlikely += bool(weights[0][0] > 0)
    assert unlikely > 20


def test_a_drafter_that_agrees_with_the_target_is_always_accepted() -> None:
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs = Sampling(0.7).probs(logits)
    for first, second in itertools.product(range(V), repeat=2):
        tree = TokenTree(
            torch.tensor([[0, first, second]]), torch.tensor([[-1, 0, 1]]), torch.ones(1, 3, dtype=torch.bool), probs
        )

        def accepted(draw: Draw, tree: TokenTree = tree) -> int:
            return len(accept_sampled(tree, logits, Sampling(0.7), [draw]).paths[0])

        assert {length for length, _ in outcomes(accepted)} == {3}


def random_trees(
    seed: int, rows: int, nodes: int, siblings_differ: bool, drawn: bool = False
) -> tuple[TokenTree, Tensor]:
    """Ragged trees over a vocabulary so small that guesses are often right, and logits [rows, nodes, V]."""
    chance = random.Random(seed)
    tokens, parents, valid = [], [], []
    for _ in range(rows):
        above = [-1]
        taken: dict[int, list[int]] = defaultdict(list)
        row = [chance.randrange(V)]
        for node in range(1, nodes):
            above.append(chance.choice([parent for parent in range(node) if len(taken[parent]) < V]))
            siblings = taken[above[-1]]
            row.append(chance.choice([token for token in range(V) if token not in siblings or not siblings_differ]))
            siblings.append(row[-1])
        tokens.append(row)
        parents.append(above)
        valid.append([True, *(chance.random() < 0.8 for _ in range(nodes - 1))])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, nodes, V, generator=generator, dtype=torch.float64)
    probs = None
    if drawn:
        probs = torch.randn(rows, nodes, V, generator=generator, dtype=torch.float64).softmax(-1)
        probs = probs.where(probs > 0.1, 0.0)  # some guesses cannot have been drawn
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid), probs), logits


def unpadded(accepted: Accepted) -> list[tuple[list[int], int]]:
    """Path and bonus of every row."""
    return list(zip(accepted.paths, accepted.bonus, strict=True))


TREES = {"seed": st.integers(0, 2**20), "rows": st.integers(1, 4), "nodes": st.integers(1, 16)}


@settings(max_examples=80, deadline=None)
@given(**TREES, siblings_differ=st.booleans(), drawn=st.booleans(), top_k=st.integers(0, 3))
def test_sampled_acceptance_asks_and_answers_as_walking_child_by_child_does(
    seed: int, rows: int, nodes: int, siblings_differ: bool, drawn: bool, top_k: int
) -> None:
    """Path, bonus, and the weights of every draw on the way, where the same answers come up."""
    tree, logits = random_trees(seed, rows, nodes, siblings_differ, drawn)
    sampling = Sampling(0.8, top_k)

    def script(row: int, weights: list[Tensor]) -> Draw:
        answer = sampling.draw(row)

        def draw(unscaled: Tensor) -> int:
            weights.append(unscaled.double() / unscaled.double().sum())
            return answer(weights[-1].round(decimals=9))

        return draw

    asked: list[list[Tensor]] = [[] for _ in range(rows)]
    ours = unpadded(accept_sampled(tree, logits, sampling, [script(row, asked[row]) for row in range(rows)]))
    for row, path in enumerate(ours):
        weights: list[Tensor] = []
        probs = [probs_by_hand(each, sampling) for each in logits[row].tolist()]
        guess = None if tree.child_probs is None else tree.child_probs[row].tolist()
        each = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.valid[row].tolist()
        assert sampled_by_walking(*each, probs, guess, script(row, weights)) == path
        assert len(weights) == len(asked[row])
        for mine, twin in zip(asked[row], weights, strict=True):
            torch.testing.assert_close(mine, twin, rtol=0, atol=1e-12)


@settings(max_examples=80, deadline=None)
@given(**TREES, siblings_differ=st.booleans(), epsilon=st.floats(0.01, 1.0), delta=st.floats(0.01, 2.0))
def test_typical_acceptance_equals_walking_every_path(
    seed: int, rows: int, nodes: int, siblings_differ: bool, epsilon: float, delta: float
) -> None:
    tree, logits = random_trees(seed, rows, nodes, siblings_differ)
    sampling, rule = Sampling(0.8, top_k=4), Typical(epsilon, delta)
    voice = Voice(sampling, [sampling.draw(row) for row in range(rows)])
    for row, (path, bonus) in enumerate(unpadded(accept(tree, logits, voice, rule))):
        probs = [probs_by_hand(each, sampling) for each in logits[row].tolist()]
        each = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.valid[row].tolist()
        assert path == typical_by_walking(*each, probs, epsilon, delta)
        assert bonus == sampling.draw(row)(torch.tensor(probs[path[-1]], dtype=torch.float64))


def test_typical_acceptance_at_temperature_0_is_greedy() -> None:
    tree, logits = random_trees(1, rows=8, nodes=12, siblings_differ=True)
    assert unpadded(accept(tree, logits, Voice(), Typical())) == unpadded(accept_greedy(tree, logits))


@pytest.mark.parametrize("bad", [(0.0, 0.3), (1.5, 0.3), (float("nan"), 0.3), (0.1, 0.0), (0.1, -1.0), (0.1, math.inf)])
def test_impossible_typical_acceptance_is_refused_with_its_values(bad: tuple[float, float]) -> None:
    sentence = r"epsilon={} delta={} is no typical acceptance: epsilon is in \(0, 1\], delta is above 0"
    with pytest.raises(ValueError, match=sentence.format(*bad)):
        Typical(*bad)


@settings(max_examples=80, deadline=None)
@given(**TREES, siblings_differ=st.booleans())
def test_greedy_acceptance_of_any_tree_equals_walking_every_path(
    seed: int, rows: int, nodes: int, siblings_differ: bool
) -> None:
    tree, logits = random_trees(seed, rows, nodes, siblings_differ)
    for row, done in enumerate(unpadded(accept_greedy(tree, logits))):
        each = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.valid[row].tolist()
        assert done == greedy_by_walking(*each, logits[row].argmax(-1).tolist())


@pytest.mark.parametrize("siblings_differ", [True, False])
def test_greedy_acceptance_equals_walking_every_path(siblings_differ: bool) -> None:
    deepest = 0
    for seed in range(40):
        tree, logits = random_trees(seed, rows=4, nodes=14, siblings_differ=siblings_differ)
        walked = [
            greedy_by_walking(*row)
            for row in zip(
                tree.tokens.tolist(),
                tree.parents.tolist(),
                tree.valid.tolist(),
                logits.argmax(-1).tolist(),
                strict=True,
            )
        ]
        accepted = accept_greedy(tree, logits)
        assert unpadded(accepted) == walked
        deepest = max(deepest, *map(len, accepted.paths))
    assert deepest >= 4


def test_greedy_acceptance_equals_sampling_from_a_one_hot_target() -> None:
    for seed in range(30):
        tree, logits = random_trees(seed, rows=3, nodes=14, siblings_differ=True)
        sampling = Sampling(temperature=1e-6, seed=seed)
        assert sampling.probs(logits).max(-1).values.eq(1).all()
        ours = accept_sampled(tree, logits, sampling, [sampling.draw(row) for row in range(3)])
        assert unpadded(ours) == unpadded(accept_greedy(tree, logits))


def test_of_two_equal_siblings_greedy_takes_the_one_that_goes_further() -> None:
    tree = TokenTree(torch.tensor([[0, 3, 3, 2]]), torch.tensor([[-1, 0, 0, 2]]), torch.ones(1, 4, dtype=torch.bool))
    choice = torch.tensor([[3, 2, 2, 4]])
    assert unpadded(accept_greedy(tree, torch.nn.functional.one_hot(choice, V).float())) == [([0, 2, 3], 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_logit_is_the_first_of_equals_whatever_the_signs(dtype: torch.dtype) -> None:
    """Rows of few values tie; one row lies below zero, where the bits of floats are in reverse, and one ends at zero."""
    rows = torch.randint(-9, 9, (2, 40, 30), generator=torch.Generator().manual_seed(0)).to(dtype) / 4
    rows[0, 1], rows[0, 2] = -rows[0, 1].abs() - 1, -rows[0, 2].abs()
    rows[1, 0, 5:9] = torch.tensor([0.0, -0.0, -torch.inf, torch.inf])
    for logits in (rows, rows[:1, :1], rows[1:, 3:], rows[:1, 2:3]):
        wanted = [[row.index(max(row)) for row in some] for some in logits.tolist()]
        assert first_of_largest(logits) == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_unused_node_is_never_accepted_though_the_target_is_sure_of_its_token(temperature: float) -> None:
    tree = TokenTree(
        torch.zeros(1, 4, dtype=torch.long), torch.tensor([[-1, 0, 1, 0]]), torch.tensor([[True, False, True, False]])
    )
    logits = torch.zeros(1, 4, V)
    logits[..., 0] = 1e4
    sampling = Sampling(temperature)
    assert unpadded(accept(tree, logits, Voice(sampling, [sampling.draw(0)]))) == [([0], 0)]


def test_rows_are_accepted_each_with_its_own_draws() -> None:
    tree, logits = random_trees(3, rows=5, nodes=9, siblings_differ=True)
    sampling = Sampling(1.0, seed=5)
    together = accept_sampled(tree, logits, sampling, [sampling.draw(row) for row in range(5)])
    alone = [
        accept_sampled(
            TokenTree(tree.tokens[row : row + 1], tree.parents[row : row + 1], tree.valid[row : row + 1]),
            logits[row : row + 1],
            sampling,
            [sampling.draw(row)],
        )
        for row in range(5)
    ]
    assert unpadded(together) == [unpadded(one)[0] for one in alone]
    assert len(set(map(len, together.paths))) > 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 4, 9, 50])
@pytest.mark.parametrize("top_p", [1e-9, 0.4, 0.9, 1.0])
def test_probabilities_equal_those_found_token_by_token(temperature: float, top_k: int, top_p: float) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.tensor([probs_by_hand(row, sampling) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(sampling.probs(logits), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": -0.5},
        {"top_p": float("nan")},
    ],
)
def test_impossible_sampling_is_refused_with_its_values(bad: dict[str, float]) -> None:
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value}.*is no sampling: temperature and top_k are at least 0"):
        Sampling(**bad)  # type: ignore[arg-type]


def test_draws_fall_in_proportion_and_never_on_a_weight_of_zero() -> None:
    draw = Sampling(1.0, seed=3).draw(0)
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 2.0, 0.0])
    counts = torch.bincount(torch.tensor([draw(weights) for _ in range(3000)]), minlength=6) / 3000
    assert counts[weights == 0].sum() == 0
    torch.testing.assert_close(counts, weights / 6, rtol=0, atol=0.04)


def test_draws_differ_between_rows_and_seeds_and_repeat_with_them() -> None:
    def first(seed: int, row: int) -> list[int]:
        draw = Sampling(1.0, seed=seed).draw(row)
        return [draw(torch.ones(1000)) for _ in range(5)]

    assert first(1, 2) == first(1, 2)
    assert len({tuple(first(seed, row)) for seed in range(3) for row in range(3)}) == 9
