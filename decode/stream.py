"""One request as it is written: committed tokens and text, round by round, until an end token, a stop string or the limit."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from decode.engine import Generation, rounds
from models.drafter import Budget, Drafter
from models.sampling import GREEDY, Sampling
from models.target import Target

UNFINISHED = "\ufffd"  # what a tokenizer shows for a character of which bytes are missing


@dataclass
class Statistics:
    """What a request came to; seconds are those of the rounds, and of reading the prompt."""

    prompt: int  # tokens
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0  # guesses in the text
    seconds: float = 0.0
    prefill: float = 0.0
    reason: str = ""  # end, stop or limit, once it is over

    @property
    def tau(self) -> float:
        """Tokens a round; the first token comes from reading the prompt."""
        return (self.tokens - 1) / self.rounds if self.rounds else 0.0


@dataclass
class Piece:
    """What one round added: tokens, and the text that can no longer become part of a stop string."""

    tokens: list[int]
    text: str


@dataclass
class Request:
    """What is asked, and how it went: iterate over `pieces`, then read `statistics` and `text`."""

    target: Target
    drafter: Drafter
    prompt: Sequence[int]
    limit: int
    budget: Budget = field(default_factory=Budget)
    sampling: Sampling = GREEDY
    stops: Sequence[str] = ()  # strings before which the text ends
    ends: Collection[int] = ()  # tokens that end it beside the target's own

    def __post_init__(self) -> None:
        if not all(self.stops):
            raise ValueError("a stop string is empty, which stands everywhere; give at least one character, or none")
        vocabulary = self.target.config.vocab_size
        if strange := [token for token in self.ends if not 0 <= token < vocabulary]:
            raise ValueError(f"end token {strange[0]} is none of the target's {vocabulary} tokens")
        self.statistics = Statistics(len(self.prompt))
        self.tokens: list[int] = []
        self.text = ""  # what was handed out

    def pieces(self) -> Iterator[Piece]:
        """The text as it is committed; after the last piece, `statistics.reason` says why it is over."""
        told = self.statistics
        for turn in rounds(self.target, self.drafter, [self.prompt], self.limit, self.budget, self.sampling):
            (generation,) = turn.moved or turn.finished
            told.seconds += sum(turn.seconds.values())
            told.prefill += turn.prefill
            told.rounds += bool(turn.moved)
            yield self._take(generation, bool(turn.finished))
            if told.reason:
                return

    def _take(self, generation: Generation, over: bool) -> Piece:
        """The next piece of what `generation` now holds, up to where the text ends."""
        told, before = self.statistics, len(self.tokens)
        said, kept = generation.tokens, len(generation.tokens)
        if over:
            told.reason = "end" if generation.ended else "limit"
        for count in range(before + 1, len(said) + 1):
            ended = said[count - 1] in self.ends
            if ended or first_stop(written(self.target.tokenizer, said[:count]), self.stops) is not None:
                told.reason, kept = "end" if ended else "stop", count
                break
        self.tokens = said[:kept]
        told.tokens = kept
        told.accepted = sum(generation.accepted)
        return Piece(self.tokens[before:], self._hand_out())

    def _hand_out(self) -> str:
        """What the text has now beyond what was handed out."""
        whole = written(self.target.tokenizer, self.tokens)
        at = first_stop(whole, self.stops)
        safe = whole[:at] if at is not None or self.statistics.reason else whole[: settled(whole, self.stops)]
        fresh = safe[len(self.text) :]
        self.text += fresh
        return fresh


def written(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of `tokens`, without end tokens and the like."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of `stops` begins in `text`."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def settled(text: str, stops: Sequence[str]) -> int:
    """How much of `text` stays whatever follows: not the beginning of a stop string, nor of a character."""
    whole = len(text.rstrip(UNFINISHED))
    open_ends = (size for stop in stops for size in range(1, len(stop)) if text[:whole].endswith(stop[:size]))
    return whole - max(open_ends, default=0)
