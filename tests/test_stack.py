"""Trees of every feature drafter against drafting each path alone, and the memory of what was read."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from models.drafter import Budget, Committed
from models.eagle import Eagle
from models.eagle3 import Eagle3
from models.ends import Ends
from models.peagle import PEagle
from models.sampling import Voice
from models.stack import FeatureDrafter, Growing

WIDTH, VOCABULARY, DEPTH = 16, 20, 4
MADE: dict[str, Callable[[Ends], FeatureDrafter]] = {
    "eagle": lambda ends: Eagle(ends, vocabulary=9),
    "eagle3": lambda ends: Eagle3(ends, steps=DEPTH, vocabulary=9, layers=2, feedback="after_norm"),
    "peagle": lambda ends: PEagle(ends, depths=DEPTH, vocabulary=9, layers=2),
}


def made(family: str) -> FeatureDrafter:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=8
    )
    drafter = MADE[family](Ends(torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY, WIDTH), None, config)).eval()
    drafter.learn_vocabulary(torch.arange(VOCABULARY) % 7)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter


def said(lengths: list[int]) -> Committed:
    """Random texts of those lengths, and a bonus token for each."""
    torch.manual_seed(sum(lengths))
    rows, most = len(lengths), max(lengths)
    return Committed(
        torch.randint(0, VOCABULARY, (rows, most)),
        torch.tensor(lengths),
        torch.randn(rows, most, 3 * WIDTH),
        torch.randn(rows, most, WIDTH),
        torch.randint(0, VOCABULARY, (rows,)),
        torch.ones(rows, dtype=torch.bool),
    )


@torch.inference_mode()
def after(drafter: FeatureDrafter, committed: Committed, path: tuple[int, ...]) -> Tensor:
    """[rows, V] log-probabilities of what follows `path`, the root its first token, drafted alone."""
    state = drafter.begin(len(committed.length), 40)
    if isinstance(drafter, PEagle):
        return drafter.guesses(committed, state, len(path))[:, -1].log_softmax(-1)
    growing = Growing(drafter, committed, state)
    for token in path:
        found = growing(torch.full((len(committed.length), 1), token), torch.zeros(len(committed.length), 1).long())
    return found[:, 0].log_softmax(-1)


def best_paths(drafter: FeatureDrafter, committed: Committed, row: int, budget: Budget) -> set[tuple[int, ...]]:
    """EAGLE-2's tree: all candidates with their worth, level by level, and the best of them."""
    root = (int(committed.bonus[row]),)
    growing, every = {root: 0.0}, {}
    for _ in range(budget.depth):
        children = {}
        for path, score in growing.items():
            likely = after(drafter, committed, path)[row]
            for token in likely.argsort(descending=True)[: budget.branch]:
                children[*path, int(drafter.vocabulary.to_target(token))] = score + likely[token].item()
        every |= children
        growing = dict(sorted(children.items(), key=lambda item: -item[1])[: budget.branch])
    return {root, *sorted(every, key=lambda path: -every[path])[: budget.nodes - 1]}


@pytest.mark.parametrize("family", MADE)
def test_a_dynamic_tree_has_the_paths_that_are_likeliest_when_each_is_drafted_alone(family):
    drafter, committed, budget = made(family), said([6, 3]), Budget(nodes=12, depth=DEPTH, branch=3)
    tree = drafter.propose(committed, drafter.begin(2, 40), budget, Voice())
    for row in range(2):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert set(paths) == best_paths(drafter, committed, row, budget)


@pytest.mark.parametrize("family", MADE)
def test_what_was_read_in_two_rounds_with_a_tree_between_is_as_if_read_in_one(family):
    drafter, budget = made(family), Budget(nodes=12, depth=DEPTH, branch=3)
    whole, state = said([7]), drafter.begin(1, 3)
    first = Committed(
        whole.tokens[:, :5], torch.tensor([5]), whole.features[:, :5], whole.hidden[:, :5], whole.tokens[:, 5], whole.fresh
    )  # fmt: skip
    rest = Committed(
        whole.tokens[:, 5:], torch.tensor([2]), whole.features[:, 5:], whole.hidden[:, 5:], whole.bonus, ~whole.fresh
    )
    drafter.propose(first, state, budget, Voice())
    again = drafter.propose(rest, state, budget, Voice())
    once = drafter.propose(whole, drafter.begin(1, 40), budget, Voice())
    assert torch.equal(again.tokens, once.tokens)
    assert torch.equal(again.parents, once.parents)
