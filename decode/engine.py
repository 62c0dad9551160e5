"""The loop: propose, read, accept, keep. Plain decoding is the same loop with a drafter that proposes nothing.

B rows decode side by side; a row whose text ends gives its seat to the next waiting prompt.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.accept import Accepted, Typical, accept
from models.cache import KVCache
from models.drafter import Budget, Committed, Drafter, Reading
from models.sampling import GREEDY, Draw, Sampling, Voice
from models.target import Target
from models.tree import Node, TokenTree

PHASES = ("draft", "verify", "accept", "keep")
TOGETHER = 16  # prompts are read at a time, and of so many rows one may wait empty for others that read with it


@dataclass(frozen=True)
class Step:
    """What one round did to one row."""

    nodes: int  # guesses that the target read, the root left out
    path: tuple[int, ...]  # tree nodes of the accepted guesses that stand in the text, from the top
    offered: int  # how deep below the root a guess could still count
    committed: (
        int  # tokens added to the text: the accepted guesses, and the bonus token unless the text ended before it
    )
    odds: tuple[tuple[int, float], ...] = ()  # each guess's depth and log-probability of its path, where one was given


@dataclass
class Generation:
    """What was written after one prompt, and how: its first token comes from reading the prompt, the others in steps."""

    prompt: int  # index into the prompts
    tokens: list[int] = field(default_factory=list)  # up to and including the end token, at most the limit
    ended: bool = False  # by an end token
    steps: list[Step] = field(default_factory=list)  # one a round

    @property
    def accepted(self) -> list[int]:
        """For each round, guessed tokens that stand in the text."""
        return [len(step.path) for step in self.steps]

    @property
    def offered(self) -> list[int]:
        """For each round, how deep a guess could still count."""
        return [step.offered for step in self.steps]

    @property
    def committed(self) -> list[int]:
        """For each round, tokens added to the text."""
        return [step.committed for step in self.steps]


@dataclass
class Round:
    """One pass of the target: its clocks in seconds, and the generations that it moved on."""

    seconds: dict[str, float]
    prefill: float  # seconds spent before it on reading prompts
    width: int  # nodes that the target read in every row, root and unused ones included
    moved: list[Generation]
    finished: list[Generation]


@dataclass
class Run:
    """Generations in the order of their prompts, and the rounds that wrote them."""

    generations: list[Generation]
    turns: list[Round]

    @property
    def seconds(self) -> dict[str, float]:
        """What all rounds took, by phase."""
        return {phase: sum(turn.seconds[phase] for turn in self.turns) for phase in PHASES}

    @property
    def prefill(self) -> float:
        """Seconds spent on reading prompts."""
        return sum(turn.prefill for turn in self.turns)

    @property
    def rounds(self) -> int:
        """Passes of the target over trees."""
        return sum(bool(turn.moved) for turn in self.turns)


class Clock:
    """Laps between phases; waits for the device so that a lap holds its own work."""

    def __init__(self, device: torch.device):
        self.device, self.last = device, 0.0

    def lap(self) -> float:
        """Seconds since the last lap."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        since, self.last = now - self.last, now
        return since


def rounds(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limit: int,
    budget: Budget,
    sampling: Sampling = GREEDY,
    rows: int = 1,
    typical: Typical | None = None,
) -> Iterator[Round]:
    """Decode up to `limit` tokens after each of `prompts`, `rows` at a time, and yield after every pass of the target.

    The text is the target's own, unless `typical` guesses are to stand.
    """
    rows = min(rows, len(prompts))
    target.tap(drafter.taps)
    seats = Seats(target, prompts, limit, budget, sampling, rows)
    state = drafter.begin(rows, seats.cache.capacity)
    clock = Clock(target.device)
    while seats.fill():
        if state is None:  # a drafter's own memory has a place for every row
            seats.shrink()
        clock.lap()
        tree = drafter.propose(seats.committed, state, budget, seats.voice)
        draft = clock.lap()
        reading = target.read(tree, seats.cache)
        verify = clock.lap()
        assert reading.logits is not None
        accepted = accept(tree, reading.logits, seats.voice, typical)
        took = clock.lap()
        moved = seats.keep(tree, reading, accepted)
        seconds = dict(zip(PHASES, (draft, verify, took, clock.lap()), strict=True))
        yield Round(seconds, seats.prefill, tree.tokens.shape[1], moved, seats.leave())
    if finished := seats.leave():  # prompts whose very first token ended the text
        yield Round(dict.fromkeys(PHASES, 0.0), seats.prefill, 0, [], finished)


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limit: int,
    budget: Budget,
    sampling: Sampling = GREEDY,
    rows: int = 1,
    typical: Typical | None = None,
) -> Run:
    """All of `rounds`, folded."""
    turns = list(rounds(target, drafter, prompts, limit, budget, sampling, rows, typical))
    finished = [generation for turn in turns for generation in turn.finished]
    return Run(sorted(finished, key=lambda generation: generation.prompt), turns)


class Seats:
    """Who sits in which row: prompts wait, take a free row, are decoded and leave."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        limit: int,
        budget: Budget,
        sampling: Sampling,
        rows: int,
    ):
        nodes = max(budget.nodes, len(budget.paths) + 1)
        longest = max((len(prompt) for prompt in prompts), default=0)
        if not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt is empty; every prompt needs at least one token")
        if limit < 1:
            raise ValueError(f"limit={limit} leaves nothing to say; ask for at least one token")
        if longest + limit > target.context:
            raise ValueError(
                f"a prompt of {longest} tokens and {limit} new ones exceed the {target.context} tokens of {target.identity.name}; shorten the prompt or ask for fewer"
            )
        self.target, self.limit, self.sampling = target, limit, sampling
        self.waiting = deque(enumerate(prompts))
        self.sitting: list[Generation | None] = [None] * rows
        self.draws: list[Draw] = [sampling.draw(0)] * rows
        self.cache: KVCache = target.cache(rows, longest + limit + nodes)
        self.committed = nothing(target, rows)
        self.left: list[Generation] = []  # finished, not yet handed out
        self.prefill = 0.0  # seconds that the last `fill` spent reading prompts

    @property
    def voice(self) -> Voice:
        """How the rows speak."""
        return Voice(self.sampling, self.draws)

    def fill(self) -> bool:
        """Seat waiting prompts in free rows; false when nobody sits."""
        clock = Clock(self.target.device)
        clock.lap()
        self.prefill = 0.0
        free = [row for row, who in enumerate(self.sitting) if who is None][: len(self.waiting)]
        if any(self.sitting) and len(free) < min(len(self.sitting) // TOGETHER, len(self.waiting)):
            free = []  # a few more, and all are read in one pass
        while free:
            some = free[:TOGETHER]  # about equally long, and enough for full speed
            self._seat(some, [self.waiting.popleft() for _ in some])
            self.prefill += clock.lap()
            free = [row for row in free if self.sitting[row] is None][: len(self.waiting)]  # one may end at once
        return any(self.sitting)

    def _seat(self, free: list[int], prompts: list[tuple[int, Sequence[int]]]) -> None:
        lengths = torch.tensor([len(ids) for _, ids in prompts])
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for _, ids in prompts], batch_first=True)
        rows = torch.tensor(free)
        reading = self.target.prefill(ids, lengths, self.cache, rows)
        assert reading.logits is not None
        for row, (index, _) in zip(free, prompts, strict=True):
            self.sitting[row], self.draws[row] = Generation(index), self.sampling.draw(index)
        first = accept(
            TokenTree.roots(ids[:, 0].to(self.target.device)),
            reading.logits,
            Voice(self.sampling, [self.draws[row] for row in free]),
        )
        device = self.target.device
        said = Committed(
            ids.to(device),
            lengths.to(device),
            reading.features,
            reading.hidden,
            torch.tensor(first.bonus, device=device),
            torch.ones(len(free), dtype=torch.bool, device=device),
        )
        self.committed = place(self.committed, said, rows.to(device))
        for row, token in zip(free, first.bonus, strict=True):
            self._say(row, [token])

    def shrink(self) -> None:
        """Once nobody waits, drop the empty rows: the last ones take their places."""
        taken = [row for row, who in enumerate(self.sitting) if who is not None]
        if self.waiting or len(taken) == len(self.sitting):
            return
        last = iter(row for row in taken if row >= len(taken))
        order = [row if self.sitting[row] is not None else next(last) for row in range(len(taken))]
        self.sitting, self.draws = [self.sitting[row] for row in order], [self.draws[row] for row in order]
        rows = torch.tensor(order)
        self.cache.select(rows)
        held = self.committed
        parts = (held.tokens, held.length, held.features, held.hidden, held.bonus, held.fresh)
        self.committed = Committed(*(part[rows.to(part.device)] for part in parts))

    def leave(self) -> list[Generation]:
        """The generations that finished since the last call."""
        gone, self.left = self.left, []
        return gone

    def keep(self, tree: TokenTree, reading: Reading, accepted: Accepted) -> list[Generation]:
        """Commit the accepted paths to cache and text; return the generations that moved."""
        paths = [path if who else [] for who, path in zip(self.sitting, accepted.paths, strict=True)]
        self.cache.keep(paths)
        self.committed = committed(tree, reading, paths, accepted.bonus)
        moved = []
        for number, (nodes, odds, path, bonus) in enumerate(
            zip(tree.listed, odds_of(tree), paths, accepted.bonus, strict=True)
        ):
            if (who := self.sitting[number]) is None:
                continue
            guesses = path[1:]
            kept = self._say(number, [*(nodes[node].token for node in guesses), bonus])
            tried = min(len(guesses) + has_child(nodes, path[-1]), kept)
            used = sum(node.valid for node in nodes) - 1
            who.steps.append(Step(used, tuple(guesses[:kept]), tried, kept, odds))
            moved.append(who)
        return moved

    def _say(self, row: int, tokens: list[int]) -> int:
        """Append what still counts of `tokens` to the row's text, free the row where the text ends, and return how many counted."""
        who = self.sitting[row]
        assert who is not None
        for count, token in enumerate(tokens, start=1):
            who.tokens.append(token)
            who.ended = token in self.target.end_tokens
            if who.ended or len(who.tokens) == self.limit:
                self.sitting[row] = None
                self.left.append(who)
                self.cache.reset(torch.tensor([row]))
                return count
        return len(tokens)


def committed(tree: TokenTree, reading: Reading, paths: Sequence[list[int]], bonus: Sequence[int]) -> Committed:
    """What stands in the text after a round that kept the nodes on `paths` of `tree`, and said a `bonus` token."""
    longest = max(map(len, paths))
    rows = []
    for nodes, path, token in zip(tree.listed, paths, bonus, strict=True):
        blank = [0] * (longest - len(path))
        rows.append([len(path), token, *path, *blank, *(nodes[node].token for node in path), *blank])
    told = torch.tensor(rows, device=reading.hidden.device)  # at once: to start is most of what a small tensor costs
    length, last, kept, tokens = told.split([1, 1, longest, longest], dim=1)
    row = torch.arange(len(paths), device=told.device)[:, None]
    fresh = torch.zeros(len(paths), dtype=torch.bool, device=told.device)
    return Committed(tokens, length[:, 0], reading.features[row, kept], reading.hidden[row, kept], last[:, 0], fresh)


def has_child(nodes: Sequence[Node], parent: int) -> bool:
    """Whether a guess was tried below the node `parent`."""
    return any(node.valid and node.parent == parent for node in nodes)


def odds_of(tree: TokenTree) -> list[tuple[tuple[int, float], ...]]:
    """For each row its guesses' depths and the log-probabilities of their paths, where the drafter ranked them so."""
    if tree.scores is None:
        return [()] * len(tree.tokens)
    rows = zip(tree.sights, tree.scores, tree.listed, strict=True)
    return [
        tuple((sees.bit_count() - 1, score) for sees, score, node in list(zip(*row, strict=True))[1:] if node.valid)
        for row in rows
    ]


def nothing(target: Target, rows: int) -> Committed:
    """What stands in `rows` rows before a prompt is read."""
    none, width = torch.zeros(rows, dtype=torch.long, device=target.device), target.ends.head.shape[1]
    blank = torch.empty(rows, 0, width, dtype=target.dtype, device=target.device)
    return Committed(none[:, None][:, :0], none, blank.repeat(1, 1, len(target.taps)), blank, none, none.bool())


def place(old: Committed, new: Committed, rows: Tensor) -> Committed:
    """`old` with the rows `rows` replaced by those of `new`, both padded to the longer."""
    width = max(old.tokens.shape[1], new.tokens.shape[1])

    def merged(ours: Tensor, theirs: Tensor) -> Tensor:
        room = ours.new_zeros(ours.shape[0], width, *ours.shape[2:])
        room[:, : ours.shape[1]] = ours
        room[rows, : theirs.shape[1]] = theirs
        return room

    return Committed(
        merged(old.tokens, new.tokens),
        old.length.index_copy(0, rows, new.length),
        merged(old.features, new.features),
        merged(old.hidden, new.hidden),
        old.bonus.index_copy(0, rows, new.bonus),
        old.fresh.index_copy(0, rows, new.fresh),
    )
