"""What a drafter is worth while it learns: acceptance on held-out text, the tau it implies, and a short real decode.

R rows of held-out text, K depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from decode.engine import generate
from decode.prompts import evenly
from models.drafter import Budget, Drafter, FeatureBatch
from models.target import Target
from models.tree import chain
from train.chat import Example
from train.engines import Engine
from train.features import Source
from train.joint import Shift
from train.trainee import Trainee

DRAWS = 1000  # bootstrap samples of the held-out rows


@dataclass
class Verdict:
    """Acceptance by depth on held-out text; tau is what the greedy rates imply for a chain, as if depths were independent."""

    step: int
    tau: float
    low: float  # 95 % interval of tau, a bootstrap over the held-out rows
    high: float
    greedy: list[float]  # first pick right
    sampled: list[float]  # overlap
    positions: list[int]
    decoded: float | None  # tau of a real decode of a few held-out prompts
    moved: dict[str, float] | None = None  # of a target that learns: how far it is from what it was

    def beats(self, other: "Verdict | None") -> bool:
        """Whether more is accepted than `other` found, or as much and the target foretells the text better."""
        return other is None or self._worth > other._worth

    @property
    def _worth(self) -> tuple[float, float]:
        return self.tau, -self.moved["perplexity"] if self.moved else 0.0

    @property
    def acceptance(self) -> dict[str, Any]:
        """By depth, as a card shows it."""
        return {"greedy": self.greedy, "sampled": self.sampled, "positions": self.positions}


@dataclass
class Trial:
    """A short real decode: chains over `prompts`, each rank its share. `twin` is a drafter to decode with, in the target's precision."""

    target: Target
    twin: Drafter
    prompts: Sequence[list[int]]
    tokens: int
    depth: int

    def run(self, drafter: Drafter, engine: Engine) -> float:
        """Tau: 1 + accepted guesses over rounds, of all ranks together."""
        self.twin.load_state_dict(drafter.state_dict())
        taps = self.target.taps
        mine = self.prompts[engine.rank :: engine.ranks]
        budget = Budget(tuple(chain(self.depth)), self.depth + 1)
        runs = [generate(self.target, self.twin, [prompt], self.tokens, budget) for prompt in mine]
        self.target.tap(taps)
        texts = [text for run in runs for text in run.generations]
        counts = [sum(sum(text.accepted) for text in texts), sum(len(text.steps) for text in texts)]
        accepted, rounds = engine.sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        return 1 + accepted / max(rounds, 1)


class Judge:
    """Judges the trainee of `engine` on `heldout` text, and by `trial` if there is one."""

    def __init__(self, heldout: Source, engine: Engine, trial: Trial | None):
        self.heldout, self.engine, self.trial = heldout, engine, trial

    def __call__(self, trainee: Trainee, step: int) -> Verdict:
        """Every rank must call. The drafter is asked itself, not the module that engines wrap: ranks may have different
        numbers of batches.
        """
        drafter = trainee.drafter
        with self.engine.whole(), torch.no_grad():
            drafter.eval()
            sums, moved = self._sums(trainee, drafter)
            decoded = self.trial.run(drafter, self.engine) if self.trial else None
            drafter.train()
        low, high = interval(sums)
        seen, hits, overlap = sums.sum(0)
        greedy, sampled = rounded(hits / seen.clamp(min=1)), rounded(overlap / seen.clamp(min=1))
        tau = float(taus(sums.sum(0)))
        decoded = None if decoded is None else round(decoded, 4)
        return Verdict(step, round(tau, 4), low, high, greedy, sampled, [int(value) for value in seen], decoded, moved)

    def _sums(self, trainee: Trainee, drafter: Drafter) -> tuple[Tensor, dict[str, float] | None]:
        """[R, 3, K] positions, hits and overlap of every held-out row, in the same order whoever read them.

        Beside them how far a target that learns has moved since the rows were first read.
        """
        pieces = list(enumerate(self.heldout.everything()))
        mine, shift = [], Shift(trainee.moving.target) if trainee.moving else None
        for number, piece in pieces[self.engine.rank :: self.engine.ranks]:
            before = self.heldout.features(piece)
            now = trainee.read(before)
            if shift:
                shift.see(before, now)
            for row in rows_of(now):
                with trainee.autocast():
                    loss = drafter.training_loss(row)
                mine.append((number, torch.stack([loss.seen, loss.hits, loss.overlap]).double().cpu()))
        every = sorted(self.engine.gather(mine), key=lambda each: each[0])
        return torch.stack([sums for _, sums in every]), shift.told() if shift else None


def rows_of(batch: FeatureBatch) -> list[FeatureBatch]:
    """The batch row by row."""
    names = [part.name for part in fields(FeatureBatch)]
    return [
        FeatureBatch(*(getattr(batch, name)[row : row + 1] for name in names)) for row in range(len(batch.input_ids))
    ]


def taus(sums: Tensor) -> Tensor:
    """[...] the tau that sums [..., 3, K] imply: a chain reaches a depth if every guess before it was right."""
    return 1 + (sums[..., 1, :] / sums[..., 0, :].clamp(min=1)).cumprod(-1).sum(-1)


def interval(sums: Tensor) -> tuple[float, float]:
    """95 % bootstrap interval of tau over the rows of `sums` [R, 3, K]."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(sums), (DRAWS, len(sums)), generator=generator)
    low, high = taus(sums[picks].sum(1)).quantile(torch.tensor([0.025, 0.975], dtype=sums.dtype)).tolist()
    return round(low, 4), round(high, 4)


def prompts_of(held: Sequence[Example], count: int) -> list[list[int]]:
    """What stands before the first answer of `count` held-out conversations, taken evenly; those that begin with it are passed over."""
    every = [example.input_ids[: example.loss_mask.index(True)] for example in held]
    return evenly([prompt for prompt in every if prompt], count)


def rounded(rates: Tensor) -> list[float]:
    """Rates to four places, as a card shows them."""
    return [round(value, 4) for value in rates.tolist()]
