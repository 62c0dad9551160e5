"""Prompt lookup, against searching the whole text every time."""

import random
import time

import pytest
import torch

from conftest import tiny_target
from decode.engine import generate
from models.drafter import Budget, Committed, Plain
from models.ngram import Ngram, Text
from models.sampling import Sampling, Voice
from models.tree import chain


def by_searching(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """What followed the longest end of `text` where it stood last before, by looking everywhere."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + count]
    return []


def committed(rows: list[tuple[list[int], bool, int]]) -> Committed:
    """Rows of new tokens, whether they are a prompt, and the bonus token."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(new) for new, *_ in rows], batch_first=True).long()
    blank = torch.empty(len(rows), tokens.shape[1], 0)
    length, bonus = torch.tensor([len(new) for new, *_ in rows]), torch.tensor([bonus for *_, bonus in rows])
    return Committed(tokens, length, blank, blank, bonus, torch.tensor([fresh for _, fresh, _ in rows]))


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (2, 2), (5, 2), (1, 1)])
def test_guesses_are_those_found_by_searching_the_whole_text(longest: int, shortest: int) -> None:
    """In three rows that grow by one to four tokens a round, and sometimes begin again or stand empty."""
    chance, drafter = random.Random(longest), Ngram(None, longest, shortest)
    state, texts, empty = drafter.begin(3, 99), [[], [], []], 0
    for turn in range(60):
        rows = []
        for row in range(3):
            fresh = turn == 0 or chance.random() < 0.05
            idle = not fresh and chance.random() < 0.1
            new = [chance.randrange(4) for _ in range(0 if idle else chance.randrange(1, 9 if fresh else 5))]
            texts[row] = new if fresh else texts[row] + new
            rows.append((new, fresh, chance.randrange(4)))
        depth = chance.choice([2, 5])
        tree = drafter.propose(committed(rows), state, Budget(tuple(chain(depth)), depth + 1), Voice())
        assert tree.parents[0].tolist() == list(range(-1, tree.tokens.shape[1] - 1))
        for row in range(3):
            guess = by_searching([*texts[row], rows[row][2]], longest, shortest, depth)
            assert tree.tokens[row, tree.valid[row]].tolist() == [rows[row][2], *guess]
            empty += not guess
    assert empty or shortest == 1


def test_a_chain_fills_the_tree_where_none_is_named() -> None:
    drafter = Ngram(None, 2, 1)
    tree = drafter.propose(committed([([*range(20), 3], True, 4)]), drafter.begin(1, 99), Budget(nodes=7), Voice())
    assert tree.tokens.tolist() == [[4, 5, 6, 7, 8, 9, 10]]


def test_a_text_without_repetition_is_only_its_root() -> None:
    drafter = Ngram(None)
    tree = drafter.propose(committed([([1, 2, 3], True, 4)]), drafter.begin(1, 99), Budget(), Voice())
    assert tree.tokens.tolist() == [[4]]


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    text, taken = Text(range(2, 5)), []
    for _ in range(2):
        began = time.perf_counter()
        for token in range(40_000):
            text.extend([token % 977])
            text.guess(token % 977 + 1, 9)
        taken.append(time.perf_counter() - began)
    assert taken[1] < 3 * taken[0]


@pytest.mark.exact
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.05, seed=3)], ids=["greedy", "sampled"])
def test_a_target_that_goes_in_circles_is_followed_whoever_sits_beside(sampling: Sampling) -> None:
    target = tiny_target("llama", initializer_range=0.1)
    prompts, budget = [[5, 9, 200, 31], [17, 4], [99, 98, 97], [44], [7, 7, 8]], Budget(nodes=6)
    alone = generate(target, Ngram(target.ends, 3, 1), prompts, 24, budget, sampling).generations
    if not sampling.temperature:
        plain = generate(target, Plain(), prompts, 24, Budget(nodes=1)).generations
        assert [one.tokens for one in alone] == [one.tokens for one in plain]
        assert len({tuple(one.accepted) for one in alone}) == 5
        assert max(max(one.accepted) for one in alone) == 4
    for rows in (2, 3):
        run = generate(target, Ngram(target.ends, 3, 1), prompts, 24, budget, sampling, rows)
        assert [(one.tokens, one.accepted) for one in run.generations] == [(one.tokens, one.accepted) for one in alone]


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (2, 0)])
def test_sizes_that_are_none_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match=f"longest={longest} shortest={shortest}: shortest is at least 1 and at most"):
        Ngram(None, longest, shortest)
