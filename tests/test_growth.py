"""Trees grown level by level, against growing them one node after the other."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.drafter import Budget
from models.growth import grow, grow_dynamic
from models.sampling import Sampling, Voice
from models.tree import TokenTree, chain, ordered_paths
from models.vocabulary import DraftVocabulary

V = 12
SHIFT = 100  # the target's id of a draft token


class Oracle:
    """Log-probabilities that depend on the whole path from the root on."""

    def __init__(self, rows: int, flat: bool = False):
        self.rows, self.flat = rows, flat
        self.paths: list[list[tuple[int, ...]]] = []
        self.asked: list[int] = []

    def says(self, row: int, path: tuple[int, ...]) -> Tensor:
        """What follows `path` in `row`."""
        if self.flat:
            return torch.zeros(V)
        seed = hash((row, *path)) % (2**31)
        return (3 * torch.randn(V, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)

    def __call__(self, tokens: Tensor, places: Tensor) -> Tensor:
        self.asked.append(tokens.shape[1])
        before = self.paths or [[()]] * self.rows
        self.paths = [
            [
                (*before[row][place], token)
                for token, place in zip(tokens[row].tolist(), places[row].tolist(), strict=True)
            ]
            for row in range(self.rows)
        ]
        return torch.stack(
            [torch.stack([self.says(row, path) for path in self.paths[row]]) for row in range(self.rows)]
        )


def vocabulary() -> DraftVocabulary:
    """The last V of the target's tokens."""
    made = DraftVocabulary(V, SHIFT + V)
    made.learn(torch.arange(SHIFT + V))
    return made


VOCABULARY = vocabulary()


def paths_of(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """Each node's tokens from the root on."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def dynamic_by_hand(oracle: Oracle, row: int, root: int, budget: Budget) -> set[tuple[int, ...]]:
    """All candidates with their worth, and the best of them."""
    growing, every = {(root,): 0.0}, {}
    for _ in range(budget.depth):
        children = {}
        for path, score in growing.items():
            likely = oracle.says(row, path)
            for token in likely.argsort(descending=True)[: budget.branch].tolist():
                children[(*path, token + SHIFT)] = score + likely[token].item()
        every |= children
        growing = dict(sorted(children.items(), key=lambda item: -item[1])[: budget.branch])
    return {(root,), *sorted(every, key=lambda path: -every[path])[: budget.nodes - 1]}


@pytest.mark.parametrize(
    "budget", [Budget((), 10, 4, 4), Budget((), 30, 3, 6), Budget((), 4, 5, 2), Budget((), 9, 1, 20)]
)
def test_a_dynamic_tree_has_the_most_probable_paths(budget):
    oracle = Oracle(rows=3)
    tree = grow(torch.tensor([1, 2, 3]), oracle, VOCABULARY, budget, Voice())
    for row in range(3):
        assert set(paths_of(tree, row)) == dynamic_by_hand(Oracle(3), row, row + 1, budget)
    assert (tree.parents[:, 1:] < torch.arange(1, tree.tokens.shape[1])).all()
    assert tree.valid.all()


def test_the_first_nodes_of_a_dynamic_tree_are_the_smaller_tree():
    large = grow(torch.tensor([1, 2]), Oracle(rows=2), VOCABULARY, Budget((), 20, 4, 4), Voice())
    for nodes in (2, 5, 11):
        small = grow(torch.tensor([1, 2]), Oracle(rows=2), VOCABULARY, Budget((), nodes, 4, 4), Voice())
        assert torch.equal(small.tokens, large.tokens[:, :nodes])
        assert torch.equal(small.parents, large.parents[:, :nodes])


def test_where_all_paths_are_equally_likely_parents_still_come_first():
    tree = grow_dynamic(torch.tensor([1]), Oracle(1, flat=True), VOCABULARY, Budget((), 6, 4, 3))
    assert tree.tokens.shape == (1, 6)
    assert tree.depth[0].tolist() == [0, 1, 1, 1, 2, 2]


def test_a_tree_has_no_more_nodes_than_were_drafted():
    tree = grow_dynamic(torch.tensor([1]), Oracle(1), VOCABULARY, Budget((), 99, 2, 2))
    assert tree.tokens.shape == (1, 1 + 2 + 4)


@pytest.mark.parametrize("least", [0.01, 0.1, 0.3, 0.99])
def test_unlikely_paths_are_left_out_and_the_rest_is_as_without_a_floor(least):
    root, shape = torch.tensor([1, 2, 3]), Budget((), 20, 4, 4)
    whole = grow(root, Oracle(3), VOCABULARY, shape, Voice())
    tree = grow(root, Oracle(3), VOCABULARY, replace(shape, least=least), Voice())
    assert whole.scores is not None
    for row in range(3):
        likely = int((torch.tensor(whole.scores[row]).exp() >= least).sum())
        assert int(tree.valid[row].sum()) == likely
        assert paths_of(tree, row)[:likely] == paths_of(whole, row)[:likely]
    assert tree.tokens.shape[1] == int(tree.valid.sum(1).max())


def test_levels_that_could_not_change_the_tree_are_not_drafted():
    for budget in (Budget((), 3, 6, 4), Budget((), 20, 6, 4, least=0.2)):
        oracle, patient = Oracle(rows=2), Oracle(rows=2)
        tree = grow(torch.tensor([1, 2]), oracle, VOCABULARY, budget, Voice())
        assert 0 < len(oracle.asked) < budget.depth
        deep = replace(budget, nodes=200, least=0.0)
        whole = grow(torch.tensor([1, 2]), patient, VOCABULARY, deep, Voice())
        assert len(patient.asked) == budget.depth
        for row in range(2):
            used = int(tree.valid[row].sum())
            assert paths_of(tree, row)[:used] == paths_of(whole, row)[:used]


def test_a_static_tree_holds_the_picks_of_its_paths_and_asks_only_parents():
    paths = tuple(ordered_paths([[0], [1], [3], [0, 0], [1, 2], [1, 0], [1, 2, 1], [1, 2, 1, 0]]))
    oracle = Oracle(rows=2)
    tree = grow(torch.tensor([5, 6]), oracle, VOCABULARY, Budget(paths, nodes=9), Voice())
    assert oracle.asked == [1, 2, 1, 1]
    for row in range(2):
        wanted = [(5 + row,)]
        for path in paths:
            above = wanted[0] if len(path) == 1 else wanted[1 + paths.index(path[:-1])]
            likely = Oracle(2).says(row, above)
            wanted.append((*above, int(likely.argsort(descending=True)[path[-1]]) + SHIFT))
        assert paths_of(tree, row) == wanted


def test_a_pick_beyond_the_draft_vocabulary_is_refused():
    with pytest.raises(ValueError, match=f"the tree takes the {V + 1}th pick of a draft vocabulary of {V} tokens"):
        grow(torch.tensor([5]), Oracle(1), VOCABULARY, Budget(((V,),)), Voice())


def test_a_sampled_tree_holds_what_each_rows_own_draws_gave_sibling_after_sibling():
    paths = tuple(ordered_paths([[0], [2], [0, 1], [0, 3], [2, 0], [0, 3, 0]]))
    sampling = Sampling(0.8, top_k=6)
    tree = grow(
        torch.tensor([5, 6]),
        Oracle(2),
        VOCABULARY,
        Budget(paths, nodes=7, sampled=True),
        Voice(sampling, [sampling.draw(0), sampling.draw(1)]),
    )
    assert tree.child_probs is not None
    for row in range(2):
        draw, spelled = sampling.draw(row), {(): (5 + row,)}
        for node in ((), *(path for path in paths if path in ((0,), (2,), (0, 3)))):
            probs = sampling.probs(Oracle(2).says(row, spelled[node]))
            number = 0 if not node else 1 + paths.index(node)
            torch.testing.assert_close(tree.child_probs[row, number, SHIFT:], probs)
            assert not tree.child_probs[row, number, :SHIFT].any()
            left = probs.clone()
            for path in paths:
                if path[:-1] == node:
                    token = draw(left)
                    left[token] = 0.0
                    spelled[path] = (*spelled[node], token + SHIFT)
        assert paths_of(tree, row) == [spelled[()], *(spelled[path] for path in paths)]
    assert tree.valid.all()


def test_where_no_tree_is_named_a_sampled_one_is_a_chain():
    for budget, depth in ((Budget(depth=3, sampled=True), 3), (Budget(depth=9, nodes=5, sampled=True), 4)):
        tree = grow(torch.tensor([5]), Oracle(1), VOCABULARY, budget, Voice(Sampling(1.0), [Sampling(1.0).draw(0)]))
        assert tree.parents.tolist() == [list(range(-1, depth))]


def test_nodes_for_which_no_token_is_left_are_not_used_nor_what_is_below_them():
    paths = tuple(ordered_paths([[0], [1], [2], [0, 0], [2, 0], [2, 0, 0]]))
    sampling = Sampling(1.0, top_k=2)
    voice = Voice(sampling, [sampling.draw(0)])
    tree = grow(torch.tensor([5]), Oracle(1), VOCABULARY, Budget(paths, nodes=7, sampled=True), voice)
    assert tree.valid.tolist() == [[True, True, True, False, True, False, False]]


def test_a_drafter_that_says_the_same_below_every_node_need_say_it_once():
    said = {depth: (2 * torch.randn(2, 1, V)).log_softmax(-1) for depth in range(3)}

    class Same(Oracle):
        def __call__(self, tokens: Tensor, places: Tensor) -> Tensor:
            self.asked.append(tokens.shape[1])
            once = said[len(self.asked) - 1]
            return once.expand(-1, tokens.shape[1], -1) if self.flat else once

    paths = tuple(ordered_paths([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0]]))
    sampling = Sampling(1.0)
    for budget in (Budget(depth=3), Budget(paths, nodes=9), Budget(paths, nodes=9, sampled=True)):
        trees = [
            grow(
                torch.tensor([5, 6]),
                Same(2, flat),
                VOCABULARY,
                budget,
                Voice(sampling, [sampling.draw(0), sampling.draw(1)]),
            )
            for flat in (False, True)
        ]
        assert torch.equal(trees[0].tokens, trees[1].tokens)
        assert torch.equal(trees[0].parents, trees[1].parents)


def test_nothing_is_drawn_at_temperature_0():
    with pytest.raises(ValueError, match="at temperature 0 there is nothing to draw; propose top picks"):
        grow(torch.tensor([5]), Oracle(1), VOCABULARY, Budget(paths=tuple(chain(2)), sampled=True), Voice())
