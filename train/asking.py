"""Who answers: the interface that the three ways share, and the target in this process, alone or with a drafter.

A way takes questions and gives each one's answer as token ids, in the order in which they are done.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from decode.engine import rounds
from models.drafter import Budget, Drafter
from models.sampling import Draw, Sampling
from models.target import Target
from train.chat import Message


@dataclass(frozen=True)
class Ask:
    """What is to be answered next in one conversation."""

    name: str  # the conversation's id, for people
    messages: list[Message]  # what was said so far
    prompt: list[int]  # the same as token ids, up to where the target speaks
    seed: int  # the answer's own: whatever else is asked, and in whatever order


class Speaker(Protocol):
    """One way to get the target's answers."""

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, list[int]]]:
        """The number of each of `asks` and its answer's token ids, up to and including an end token, as they are done."""

    def notes(self) -> list[str]:
        """What is to be said of the answers once all are given."""


@dataclass(frozen=True)
class Seeded(Sampling):
    """Sampling whose row r draws by the seed `seeds[r]`."""

    seeds: tuple[int, ...] = ()

    def draw(self, row: int) -> Draw:
        return super().draw(self.seeds[row])


@dataclass
class Inside:
    """The target in this process: `rows` answers side by side; one that ends makes room for the next."""

    target: Target
    drafter: Drafter
    budget: Budget
    limit: int
    sampling: Sampling
    rows: int

    def answers(self, asks: Sequence[Ask]) -> Iterator[tuple[int, list[int]]]:
        """Long prompts first: those that are read together are then about equally long, and so is what the rows remember."""
        order = sorted(range(len(asks)), key=lambda number: -len(asks[number].prompt))
        prompts = [asks[number].prompt for number in order]
        sampling = Seeded(**asdict(self.sampling), seeds=tuple(asks[number].seed for number in order))
        turns = rounds(self.target, self.drafter, prompts, self.limit, self.budget, sampling, self.rows)
        for turn in turns if asks else ():
            for finished in turn.finished:
                yield order[finished.prompt], finished.tokens

    def notes(self) -> list[str]:
        """Nothing: the ids are those that were generated."""
        return []
