"""The accept rules. Whatever is proposed, the text must be distributed as the target's own: counted out exactly, not sampled."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from decode.accept import Accepted, accept, accept_greedy, accept_sampled
from models.drafter import Budget
from models.growth import grow, grow_dynamic
from models.sampling import Draw, Sampling, Voice
from models.tree import Path, TokenTree, ordered_paths, parents_of
from models.vocabulary import DraftVocabulary
from reference import greedy_by_walking, outcomes, probs_by_hand

V = 5
Text = tuple[int, ...]
Law = dict[Text, float]

ONE = ordered_paths([(0,)])
CHAIN = ordered_paths([(0,), (0, 0)])
FORK = ordered_paths([(0,), (1,)])
BUSH = ordered_paths([(0,), (1,), (0, 0)])
TREE = ordered_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def table(name: str, text: Text) -> Tensor:
    """Random logits [V] that depend on everything in `text`."""
    seed = random.Random(f"{name} {text}").randrange(2**31)
    return 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draft_probs(text: Text) -> Tensor:
    """[V] what the drafter believes: not the target's distribution, and without one token the target may say."""
    probs = table("draft", text).softmax(-1)
    probs[probs.argmin()] = 0.0
    return probs / probs.sum()


def top_picks(text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """A tree whose child of rank r is the drafter's r-th choice."""
    tokens = [text[-1]]
    spelled: dict[Path, Text] = {(): text}
    for path in paths:
        tokens.append(int(draft_probs(spelled[path[:-1]]).argsort(descending=True)[path[-1]]))
        spelled[path] = (*spelled[path[:-1]], tokens[-1])
    return TokenTree(
        torch.tensor([tokens]), torch.tensor([parents_of(paths)]), torch.ones(1, len(tokens), dtype=torch.bool)
    )


def doubled(text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Top picks, where siblings of rank 0 and 1 are the same token."""
    tree = top_picks(text, paths, draw)
    first = {path[:-1]: node for node, path in enumerate(paths, 1) if path[-1] == 0}
    source = [0, *(first[path[:-1]] if path[-1] == 1 else node for node, path in enumerate(paths, 1))]
    return TokenTree(tree.tokens[:, source], tree.parents, tree.valid)


def ragged(text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Top picks, where a leaf and an inner node are not used; what the inner one holds is the target's likeliest token."""
    tree = top_picks(text, paths, draw)
    leaf, inner = len(paths), 1 + paths.index((0,))
    tree.valid[0, [leaf, inner]] = False
    tree.tokens[0, inner] = int(table("target", text).argmax())
    return tree


def oracle(text: Text) -> Callable[[Tensor, Tensor], Tensor]:
    """What the drafter says after the nodes of a tree that grows below the end of `text`."""
    grown: list[Text] = []

    def ask(tokens: Tensor, places: Tensor) -> Tensor:
        above = list(grown)
        pairs = zip(tokens[0].tolist(), places[0].tolist(), strict=True)
        grown[:] = [(*above[place], token) for token, place in pairs] if above else [text]
        return torch.stack([draft_probs(each) for each in grown])[None].log()

    return ask


def dynamic(text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """The drafter's most probable branches, as many as `paths` has, whatever their shape."""
    root = torch.tensor([text[-1]])
    return grow_dynamic(root, oracle(text), lambda ids: ids, depth=3, branch=2, nodes=len(paths) + 1)


def reduced(*tokens: int) -> DraftVocabulary:
    """A draft vocabulary of `tokens`."""
    made = DraftVocabulary(len(tokens), V)
    made.learn(torch.bincount(torch.tensor(tokens), minlength=V))
    return made


@dataclass
class Grown:
    """What drafters propose that draw their guesses: trees of models/growth.py, as the target speaks.

    `same`: below every node of a depth they believe the same, as Medusa's heads do, so that siblings under different
    parents share tokens.
    """

    sampling: Sampling
    vocabulary: DraftVocabulary
    same: bool = False
    doubled: int = 0  # trees in which a token stands under two parents
    short: int = 0  # trees in which the drafter ran out of tokens

    def __call__(self, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
        spoken = self.vocabulary.ids if self.vocabulary.reduced else torch.arange(V)
        below, depth = oracle(text), itertools.count()

        def ask(tokens: Tensor, places: Tensor) -> Tensor:
            if self.same:
                return table("draft", (*text, next(depth)))[spoken].log_softmax(-1)[None, None]
            said = below(tokens, places)[..., spoken]
            return said.where(said.isfinite().any(-1, keepdim=True), 0.0)  # it has to believe in something

        budget = Budget(tuple(paths), len(paths) + 1, sampled=True)
        tree = grow(torch.tensor([text[-1]]), ask, self.vocabulary, budget, Voice(self.sampling, [draw]))
        inside = tree.tokens[0, tree.depth[0] == 2].tolist()
        self.doubled += len(set(inside)) < len(inside)
        self.short += not tree.valid.all()
        return tree


def sampled(text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """A tree whose siblings are drawn one after the other, without replacement, from the drafter's distribution."""
    tokens, rows = [text[-1]], []
    spelled: dict[Path, Text] = {(): text}
    left: dict[Path, Tensor] = {}
    for path in [(), *paths]:
        if path:
            above = path[:-1]
            tokens.append(draw(left[above]))
            left[above][tokens[-1]] = 0.0
            spelled[path] = (*spelled[above], tokens[-1])
        rows.append(draft_probs(spelled[path]))
        left[path] = rows[-1].clone()
    valid = torch.ones(1, len(tokens), dtype=torch.bool)
    return TokenTree(torch.tensor([tokens]), torch.tensor([parents_of(paths)]), valid, torch.stack(rows)[None])


def sampled_ragged(text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """The same, where the last node, whatever was drawn for it, is not used."""
    tree = sampled(text, paths, draw)
    tree.valid[0, -1] = False
    return tree


def exhausted(text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Siblings from a drafter that believes in one token only: the second child is what a draw from nothing gives."""
    tree = sampled(text, FORK, lambda weights: int(weights.argmax()))
    assert tree.child_probs is not None
    only = int(tree.tokens[0, 1])
    probs = torch.nn.functional.one_hot(torch.full((1, 3), only), V).double()
    return TokenTree(torch.tensor([[text[-1], only, (only + 1) % V]]), tree.parents, tree.valid, probs)


def target_logits(text: Text, tree: TokenTree) -> Tensor:
    """[1, N, V] what the target says after every node of `tree`, whose root is the last token of `text`."""
    tokens = tree.tokens[0].tolist()
    spelled = [text]
    for node, parent in enumerate(tree.parents[0].tolist()[1:], 1):
        spelled.append((*spelled[parent], tokens[node]))
    return torch.stack([table("target", each) for each in spelled])[None]


@dataclass
class Decoder:
    """The loop propose, accept, go on from the bonus token; `shapes[n]` is the tree once n tokens are there."""

    propose: Callable[[Text, list[Path], Draw], TokenTree]
    shapes: list[list[Path]]
    sampling: Sampling
    known: dict[Text, Law] = field(default_factory=dict)
    longest: int = 0  # tokens that one round gave at most

    def round(self, text: Text) -> Law:
        """What one round adds to `text`, and how likely: every way its draws can fall."""
        if text not in self.known:

            def run(draw: Draw) -> Text:
                tree = self.propose(text, self.shapes[min(len(text), len(self.shapes)) - 1], draw)
                done = accept_sampled(tree, target_logits(text, tree), self.sampling, [draw])
                path = done.path[0, : done.length[0]]
                return (*tree.tokens[0, path[1:]].tolist(), int(done.bonus[0]))

            law: Law = defaultdict(float)
            for added, chance in outcomes(run):
                law[added] += chance
            self.known[text] = law
            self.longest = max(self.longest, *map(len, law))
        return self.known[text]

    def law(self, length: int) -> Law:
        """The distribution of the first `length` tokens after the prompt (0,), round after round."""
        law: Law = defaultdict(float)

        def go_on(text: Text, chance: float) -> None:
            if len(text) > length:
                law[text[1 : length + 1]] += chance
                return
            for added, more in self.round(text).items():
                go_on(text + added, chance * more)

        go_on((0,), 1.0)
        return law


def own_law(length: int, sampling: Sampling) -> Law:
    """The distribution of the first `length` tokens that the target says by itself after the prompt (0,)."""
    law: Law = {(0,): 1.0}
    for _ in range(length):
        probs = {text: probs_by_hand(table("target", text).tolist(), sampling) for text in law}
        law = {(*text, token): chance * probs[text][token] for text, chance in law.items() for token in range(V)}
    return {text[1:]: chance for text, chance in law.items()}


def variation(ours: Law, theirs: Law) -> float:
    """Total variation distance."""
    return sum(abs(ours.get(text, 0.0) - theirs.get(text, 0.0)) for text in {*ours, *theirs}) / 2


SAMPLINGS = [Sampling(1.0), Sampling(1.3, top_k=3), Sampling(1.0, top_p=0.7), Sampling(0.6, top_k=4, top_p=0.9)]


@pytest.mark.exact
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("propose", [top_picks, doubled, ragged, dynamic])
def test_certain_proposals_leave_the_law_of_the_text_alone(
    propose: Callable[[Text, list[Path], Draw], TokenTree], sampling: Sampling
) -> None:
    decoder = Decoder(propose, [TREE, TREE, FORK], sampling)
    assert variation(decoder.law(3), own_law(3, sampling)) < 1e-9
    assert decoder.longest > 1


@pytest.mark.exact
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.9, top_k=3)], ids=str)
def test_a_chain_of_certain_proposals_leaves_the_law_of_four_tokens_alone(sampling: Sampling) -> None:
    decoder = Decoder(top_picks, [CHAIN, CHAIN, CHAIN, ONE], sampling)
    assert variation(decoder.law(4), own_law(4, sampling)) < 1e-9
    assert decoder.longest == 3


@pytest.mark.exact
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    ("propose", "shape"),
    [(sampled, CHAIN), (sampled, BUSH), (sampled_ragged, BUSH)],
    ids=["chain", "bush", "ragged bush"],
)
def test_drawn_proposals_leave_the_law_of_the_text_alone(
    propose: Callable[[Text, list[Path], Draw], TokenTree], shape: list[Path], sampling: Sampling
) -> None:
    decoder = Decoder(propose, [shape, FORK, ONE], sampling)
    assert variation(decoder.law(3), own_law(3, sampling)) < 1e-9
    assert decoder.longest > 1


TWICE = ordered_paths([(0,), (1,), (0, 0), (1, 0)])


@pytest.mark.exact
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("shape", [CHAIN, BUSH, TWICE], ids=["chain", "bush", "two parents"])
@pytest.mark.parametrize("vocabulary", [DraftVocabulary(None, V), reduced(0, 2, 3), reduced(4)], ids=["all", "3", "1"])
@pytest.mark.parametrize("same", [False, True], ids=["by branch", "by depth"])
def test_trees_that_drafters_draw_leave_the_law_of_the_text_alone(
    same: bool, vocabulary: DraftVocabulary, shape: list[Path], sampling: Sampling
) -> None:
    propose = Grown(sampling, vocabulary, same)
    decoder = Decoder(propose, [shape, FORK, ONE], sampling)
    error = variation(decoder.law(3), own_law(3, sampling))
    assert error < 1e-9
    assert decoder.longest > 1 or vocabulary.reduced
    assert propose.doubled or shape is not TWICE
    assert propose.short or vocabulary.size > 1 or shape is CHAIN


@pytest.mark.exact
def test_three_drawn_siblings_leave_the_law_of_the_text_alone() -> None:
    decoder = Decoder(sampled, [ordered_paths([(0,), (1,), (2,)]), ONE], Sampling(1.0))
    assert variation(decoder.law(2), own_law(2, Sampling(1.0))) < 1e-9


@pytest.mark.exact
def test_a_drafter_that_runs_out_of_tokens_leaves_the_law_of_the_text_alone() -> None:
    decoder = Decoder(exhausted, [FORK], Sampling(1.0))
    assert variation(decoder.law(3), own_law(3, Sampling(1.0))) < 1e-9


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
            return int(accept_sampled(tree, logits, Sampling(0.7), [draw]).length)

        assert {length for length, _ in outcomes(accepted)} == {3}


def random_trees(seed: int, rows: int, nodes: int, siblings_differ: bool) -> tuple[TokenTree, Tensor]:
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
    logits = torch.randn(rows, nodes, V, generator=torch.Generator().manual_seed(seed))
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid)), logits


def unpadded(accepted: Accepted) -> list[tuple[list[int], int]]:
    """Path and bonus of every row."""
    return [
        (path[:length], bonus)
        for path, length, bonus in zip(
            accepted.path.tolist(), accepted.length.tolist(), accepted.bonus.tolist(), strict=True
        )
    ]


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
        assert accepted.path.shape == (4, max(len(path) for path, _ in walked))
        deepest = max(deepest, accepted.path.shape[1])
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
    assert len(set(together.length.tolist())) > 1


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
