"""Prompts that stand twice, almost twice, or in a benchmark, found and dropped.

A text is compared as its words: case, spaces and punctuation aside.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from decode.prompts import conversations, shipped
from train.chat import Row

WORDS = re.compile(r"\w+")
OVERLAP = 13  # words in a row that a prompt may not share with a benchmark (Brown et al. 2020)
SHINGLE = 3  # words of the pieces by which two prompts are compared


def cleaned(rows: Iterable[Row], near: float, benches: Sequence[str] | None = None) -> tuple[list[Row], Counter[str]]:
    """Those of `rows` that are new and in no benchmark (all that ship, or `benches`), and how many were dropped and why.

    Of two prompts alike, in the Jaccard measure of their word 3-grams at least `near`, the first stays.
    """
    if not 0 < near <= 1:
        raise ValueError(f"data.near={near}: how alike two prompts may be is above 0 and at most 1")
    known = {
        gram for text in bench_texts(shipped() if benches is None else benches) for gram in grams(words(text), OVERLAP)
    }
    kept: list[Row] = []
    dropped: Counter[str] = Counter()
    seen: set[tuple[str, ...]] = set()
    alike = Alike(near)
    for row in rows:
        spoken = words(asked_in(row))
        if tuple(spoken) in seen:
            dropped["the same as another"] += 1
        elif not known.isdisjoint(grams(spoken, OVERLAP)):
            dropped["in a benchmark"] += 1
        elif not alike.new(set(grams(spoken, SHINGLE)) or {tuple(spoken)}):
            dropped["almost the same as another"] += 1
        else:
            kept.append(row)
        seen.add(tuple(spoken))
    return kept, dropped


def report(name: str, kept: int, dropped: Counter[str]) -> str:
    """One line on what was kept and dropped."""
    why = ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common())
    return f"{name}: {kept:,} conversations kept, {dropped.total():,} dropped" + (f" ({why})" if why else "")


def bench_texts(names: Iterable[str]) -> Iterator[str]:
    """Everything that users say in the benchmarks `names`."""
    for name in names:
        for turns in conversations(name):
            yield from turns


def asked_in(row: Row) -> str:
    """What the user says in `row`; a row without users is its text or token ids."""
    if "messages" in row:
        return " ".join(str(message["content"]) for message in row["messages"] if message["role"] == "user")
    return str(row.get("text") or row.get("input_ids"))


def words(text: str) -> list[str]:
    return WORDS.findall(text.lower())


def grams(spoken: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Every `size` words in a row."""
    return zip(*(spoken[start:] for start in range(size)), strict=False)


class Alike:
    """Sets of pieces, found again by their rarest: two of Jaccard >= `near` share one of their first few in any fixed order.

    (The prefix filter of Bayardo, Ma and Srikant 2007: nothing is missed.)
    """

    def __init__(self, near: float):
        self.near = near
        self.sets: list[frozenset[tuple[str, ...]]] = []
        self.holders: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def new(self, pieces: set[tuple[str, ...]]) -> bool:
        """Whether no set that came before is like `pieces`, which then joins them."""
        ordered = sorted(pieces)
        first = ordered[: len(ordered) - math.ceil(self.near * len(ordered)) + 1]
        rivals = {at for piece in first for at in self.holders[piece]}
        if any(self._jaccard(pieces, self.sets[at]) >= self.near for at in rivals):
            return False
        for piece in first:
            self.holders[piece].append(len(self.sets))
        self.sets.append(frozenset(pieces))
        return True

    @staticmethod
    def _jaccard(ours: set[tuple[str, ...]], theirs: frozenset[tuple[str, ...]]) -> float:
        return len(ours & theirs) / len(ours | theirs)
