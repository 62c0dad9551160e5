"""What decoding can write and how likely, counted out: every way its draws can fall, not a sample of them."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.accept import Accepted, accept
from models.drafter import Budget
from models.growth import Ask, grow, grow_dynamic
from models.sampling import Draw, Sampling, Voice
from models.tree import Path, TokenTree, chain, ordered_paths, parents_of
from models.vocabulary import DraftVocabulary
from reference import outcomes, probs_by_hand

Text = tuple[int, ...]
Law = dict[Text, float]
Rule = Callable[[TokenTree, Tensor, Voice], Accepted]

ONE, CHAIN, DEEP = chain(1), chain(2), chain(3)
FORK = ordered_paths([(0,), (1,)])
WIDE = ordered_paths([(0,), (1,), (2,)])
BUSH = ordered_paths([(0,), (1,), (0, 0)])
TWICE = ordered_paths([(0,), (1,), (0, 0), (1, 0)])
TREE = ordered_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@dataclass(frozen=True)
class World:
    """A target and a drafter over `size` tokens, each with a random opinion that depends on everything in the text."""

    size: int = 5

    def logits(self, text: Text, name: str = "target") -> Tensor:
        """[V] what the target says after `text`."""
        seed = random.Random(f"{name} {text}").randrange(2**31)
        return 2 * torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def guesses(self, text: Text) -> Tensor:
        """[V] what the drafter believes: not the target's distribution, and without one token the target may say."""
        probs = self.logits(text, "draft").softmax(-1)
        probs[probs.argmin()] = 0.0
        return probs / probs.sum()

    def read(self, text: Text, tree: TokenTree) -> Tensor:
        """[1, N, V] what the target says after every node of `tree`, whose root is the last token of `text`."""
        tokens = tree.tokens[0].tolist()
        spelled = [text]
        for node, parent in enumerate(tree.parents[0].tolist()[1:], 1):
            spelled.append((*spelled[parent], tokens[node]))
        return torch.stack([self.logits(each) for each in spelled])[None]


Propose = Callable[[World, Text, list[Path], Draw], TokenTree]


def top_picks(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """A tree whose child of rank r is the drafter's r-th choice."""
    tokens = [text[-1]]
    spelled: dict[Path, Text] = {(): text}
    for path in paths:
        tokens.append(int(world.guesses(spelled[path[:-1]]).argsort(descending=True)[path[-1]]))
        spelled[path] = (*spelled[path[:-1]], tokens[-1])
    return TokenTree(
        torch.tensor([tokens]), torch.tensor([parents_of(paths)]), torch.ones(1, len(tokens), dtype=torch.bool)
    )


def doubled(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Top picks, where siblings of rank 0 and 1 are the same token."""
    tree = top_picks(world, text, paths, draw)
    first = {path[:-1]: node for node, path in enumerate(paths, 1) if path[-1] == 0}
    source = [0, *(first[path[:-1]] if path[-1] == 1 else node for node, path in enumerate(paths, 1))]
    return TokenTree(tree.tokens[:, source], tree.parents, tree.valid)


def echoed(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Top picks that do not look at their parent, as Medusa's: the same tokens stand under every node."""
    order = world.guesses(text).argsort(descending=True)
    tokens = torch.tensor([[text[-1], *(int(order[path[-1]]) for path in paths)]])
    return TokenTree(tokens, torch.tensor([parents_of(paths)]), torch.ones_like(tokens, dtype=torch.bool))


def ragged(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Top picks, where a leaf and an inner node are not used; what the inner one holds is the target's likeliest token."""
    tree = top_picks(world, text, paths, draw)
    leaf, inner = len(paths), 1 + paths.index((0,))
    tree.valid[0, [leaf, inner]] = False
    tree.tokens[0, inner] = int(world.logits(text).argmax())
    return tree


def oracle(world: World, text: Text) -> Ask:
    """What the drafter says after the nodes of a tree that grows below the end of `text`."""
    grown: list[Text] = []

    def ask(tokens: Tensor, places: Tensor) -> Tensor:
        above = list(grown)
        pairs = zip(tokens[0].tolist(), places[0].tolist(), strict=True)
        grown[:] = [(*above[place], token) for token, place in pairs] if above else [text]
        return torch.stack([world.guesses(each) for each in grown])[None].log()

    return ask


def dynamic(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """The drafter's most probable branches, as many as `paths` has, whatever their shape."""
    root = torch.tensor([text[-1]])
    return grow_dynamic(root, oracle(world, text), DraftVocabulary(None, world.size), Budget((), len(paths) + 1, 3, 2))


def likely(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """The drafter's most probable branches, where it believes in them at all."""
    root = torch.tensor([text[-1]])
    return grow_dynamic(
        root, oracle(world, text), DraftVocabulary(None, world.size), Budget((), len(paths) + 1, 3, 2, least=0.3)
    )


@dataclass
class Grown:
    """What drafters propose that draw their guesses: trees of models/growth.py over the draft tokens `spoken`.

    `same`: below every node of a depth they believe the same, as Medusa's heads do, so that siblings under different
    parents share tokens.
    """

    sampling: Sampling
    spoken: tuple[int, ...]
    same: bool = False
    doubled: int = 0  # trees in which a token stands under two parents
    short: int = 0  # trees in which the drafter ran out of tokens

    def __call__(self, world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
        ids = torch.tensor(self.spoken)
        vocabulary = DraftVocabulary(len(ids), world.size)
        vocabulary.learn(torch.bincount(ids, minlength=world.size))
        below, depth = oracle(world, text), itertools.count()

        def ask(tokens: Tensor, places: Tensor) -> Tensor:
            if self.same:
                return world.logits((*text, next(depth)), "draft")[ids].log_softmax(-1)[None, None]
            said = below(tokens, places)[..., ids]
            return said.where(said.isfinite().any(-1, keepdim=True), 0.0)  # it has to believe in something

        budget = Budget(tuple(paths), len(paths) + 1, sampled=True)
        tree = grow(torch.tensor([text[-1]]), ask, vocabulary, budget, Voice(self.sampling, [draw]))
        inside = tree.tokens[0, tree.depth[0] == 2].tolist()
        self.doubled += len(set(inside)) < len(inside)
        self.short += not tree.valid.all()
        return tree


def drawn(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
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
        rows.append(world.guesses(spelled[path]))
        left[path] = rows[-1].clone()
    valid = torch.ones(1, len(tokens), dtype=torch.bool)
    return TokenTree(torch.tensor([tokens]), torch.tensor([parents_of(paths)]), valid, torch.stack(rows)[None])


def drawn_ragged(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """The same, where the last node, whatever was drawn for it, is not used."""
    tree = drawn(world, text, paths, draw)
    tree.valid[0, -1] = False
    return tree


def drawn_where_parents_please(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """The same, where whether a node is used depends on the tokens above it, never on its own."""
    tree = drawn(world, text, paths, draw)
    for node, parent in enumerate(tree.parents[0].tolist()):
        if parent > 0:
            tree.valid[0, node] = tree.tokens[0, parent] % 2 == 0
    return tree


def exhausted(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Siblings from a drafter that believes in one token only: the second child is what a draw from nothing gives."""
    tree = drawn(world, text, FORK, lambda weights: int(weights.argmax()))
    only = int(tree.tokens[0, 1])
    probs = torch.nn.functional.one_hot(torch.full((1, 3), only), world.size).double()
    return TokenTree(torch.tensor([[text[-1], only, (only + 1) % world.size]]), tree.parents, tree.valid, probs)


@dataclass
class Decoder:
    """The loop propose, accept, go on from the bonus token; `shapes[n]` is the tree once n tokens are there."""

    propose: Propose
    shapes: list[list[Path]]
    sampling: Sampling
    world: World = World()
    rule: Rule = accept
    known: dict[Text, Law] = field(default_factory=dict)
    longest: int = 0  # tokens that one round gave at most

    def round(self, text: Text) -> Law:
        """What one round adds to `text`, and how likely: every way its draws can fall."""
        if text not in self.known:

            def run(draw: Draw) -> Text:
                tree = self.propose(self.world, text, self.shapes[min(len(text), len(self.shapes)) - 1], draw)
                done = self.rule(tree, self.world.read(text, tree), Voice(self.sampling, [draw]))
                return (*tree.tokens[0, done.paths[0][1:]].tolist(), done.bonus[0])

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

    def error(self, length: int) -> float:
        """Total variation distance of the first `length` tokens from the target's own."""
        return variation(self.law(length), own_law(length, self.sampling, self.world))


def own_law(length: int, sampling: Sampling, world: World = World()) -> Law:
    """The distribution of the first `length` tokens that the target says by itself after the prompt (0,)."""
    law: Law = {(0,): 1.0}
    for _ in range(length):
        probs = {text: probs_by_hand(world.logits(text).tolist(), sampling) for text in law}
        law = {
            (*text, token): chance * more
            for text, chance in law.items()
            for token, more in enumerate(probs[text])
            if more
        }
    return {text[1:]: chance for text, chance in law.items()}


def variation(ours: Law, theirs: Law) -> float:
    """Total variation distance."""
    return sum(abs(ours.get(text, 0.0) - theirs.get(text, 0.0)) for text in {*ours, *theirs}) / 2
