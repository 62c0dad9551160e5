"""Let the target answer prompts: a drafter learns the target's own words."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from conf.schema import Run
from decode.arms import Arm, arm_of
from decode.opening import end_tokens_of, find_beside, identity_of, open_drafter, open_target, open_tokenizer
from decode.progress import Bar
from models.drafter import Budget, Plain
from models.sampling import Sampling
from models.shelf import require_target
from models.target import Target
from train.asking import Ask, Inside, Speaker
from train.chat import Message, Row, render
from train.data import write_rows
from train.endpoint import Endpoint
from train.imagined import imagined
from train.sources import rows_of

SEEDS = 1 << 31  # an answer's seed is below it, which every server takes


def answer(run: Run) -> None:
    """The command: answer the user turns of run.regenerate.prompts and write run.regenerate.out."""
    out, how = check(run), run.regenerate
    rows = [] if how.prompts == "imagined" else with_ids(rows_of(replace(run.data, path=str(how.prompts), mix=None)))
    require_names(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    if how.url:
        tokenizer = open_tokenizer(run.target)
        speaker: Speaker = Endpoint(how, tokenizer, end_tokens_of(run.target, tokenizer))
    else:
        arm = drafter_of(run)
        target = open_target(run.target)
        tokenizer, speaker = target.tokenizer, inside(run, target, arm)
        if how.prompts == "imagined":
            questions = out.with_name(f".{out.name}.questions.jsonl")
            spoken = Sampling(1.0, seed=run.seed)
            rows = imagined(target, how.count, how.tokens, spoken, how.rows, run.data.near, questions)
    if how.prompts == "imagined" and tokenizer.chat_template is None:
        write_rows(out, rows)  # texts, which nobody answers
        written = len(rows)
    else:
        written = regenerate(speaker, tokenizer, rows, out, terms_of(run))
    out.with_name(f".{out.name}.questions.jsonl").unlink(missing_ok=True)
    print("\n".join([*speaker.notes(), f"{written} of {len(rows)} conversations are in {out}"]))


def check(run: Run) -> Path:
    """Where the answers go. Raises ValueError for settings with which nothing would be answered, before anything loads."""
    how = run.regenerate
    if not how.prompts or not how.out:
        raise ValueError("give regenerate.prompts=<conversations.jsonl> and regenerate.out=<file to write>")
    for name in ("tokens", "rows", "longest", "tries", "count"):
        if getattr(how, name) < 1:
            raise ValueError(f"regenerate.{name}={getattr(how, name)} answers nothing; give at least 1")
    if how.timeout <= 0 or how.temperature < 0:
        raise ValueError(
            f"regenerate.timeout={how.timeout} and regenerate.temperature={how.temperature}: the first is above 0, the second at least 0"
        )
    if how.url and (how.drafter or how.prompts == "imagined"):
        raise ValueError(
            "an endpoint drafts by itself and imagines nothing; leave out regenerate.url, or regenerate.drafter and prompts=imagined"
        )
    if Path(how.out).exists() and not run.overwrite:
        raise ValueError(f"{how.out} exists; choose another regenerate.out, or overwrite=true")
    return Path(how.out)


def drafter_of(run: Run) -> Arm | None:
    """The drafter that helps the target to answer, checked against it before its weights load."""
    if run.regenerate.drafter is None:
        return None
    arm = arm_of(run.regenerate.drafter, find_beside(run.regenerate.drafter), run.decode)
    if arm.folder is not None:
        require_target(arm.card, arm.folder, identity_of(run.target))
    return arm


def inside(run: Run, target: Target, arm: Arm | None) -> Inside:
    """The target in this process, alone or with a drafter."""
    how, sampling = run.regenerate, Sampling(run.regenerate.temperature, seed=run.seed)
    if arm is None:
        return Inside(target, Plain(), Budget(nodes=1), how.tokens, sampling, how.rows)
    return Inside(target, open_drafter(arm.folder, arm.card, target), arm.budget, how.tokens, sampling, how.rows)


@dataclass(frozen=True)
class Terms:
    """What shapes the answers, so that a resumed run must have the same. How they are got shapes nothing."""

    target: str
    tokens: int
    longest: int  # tokens of a prompt; a conversation with a longer one is left out
    temperature: float = 0.0
    seed: int = 0


def terms_of(run: Run) -> Terms:
    """The terms that `run` sets."""
    how = run.regenerate
    return Terms(run.target.name, how.tokens, how.longest, how.temperature, run.seed)


@dataclass
class Talk:
    """A conversation on its way: what is asked in each turn, and all that was said so far."""

    row: Row
    turns: list[list[Message]]  # the user's message, and what the system says before it
    said: list[Message] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.row["id"])

    @property
    def key(self) -> str:
        """Which questions these are: another file's conversation of the same id is another one."""
        return hashlib.sha256(json.dumps([self.name, self.turns]).encode()).hexdigest()[:16]

    def seed(self, turn: int, base: int) -> int:
        """A seed for every answer, whatever was answered before it and stands beside it."""
        return int(hashlib.sha256(f"{self.key} {turn} {base}".encode()).hexdigest(), 16) % SEEDS

    def written(self) -> Row:
        """As the file has it."""
        return {**{key: self.row[key] for key in ("id", "source") if key in self.row}, "messages": self.said}


class Kept:
    """Answers on disk as they come, a line each in a file that only grows; a killed run finds them there.

    The first line says on which terms they were given.
    """

    def __init__(self, file: Path, terms: Terms):
        self.file, self.answers = file, dict[tuple[str, int], Message]()
        lines = whole_lines(file)
        if not lines:
            self._append(asdict(terms))
            return
        try:
            before, *found = map(json.loads, lines)
            self.answers = {(one["key"], one["turn"]): one["message"] for one in found}
            changed = [
                f"{name} was {before[name]} and is {now}" for name, now in asdict(terms).items() if before[name] != now
            ]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} is no file of answers; delete it, and all is answered anew") from None
        if changed:
            raise ValueError(
                f"{file} holds the answers of a run that was not finished ({', '.join(changed)}); go on with its settings, or delete it"
            )

    def add(self, key: str, turn: int, message: Message) -> None:
        """Keep one more."""
        self._append({"key": key, "turn": turn, "message": message})
        self.answers[key, turn] = message

    def _append(self, line: dict[str, Any]) -> None:
        left = memoryview(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        try:
            with self.file.open("ab", buffering=0) as file:
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            raise ValueError(
                f"{self.file} cannot be written ({error.strerror}); the {len(self.answers)} answers before stay: make "
                f"room, then start the same command again, which asks only for the others"
            ) from None


def journal_of(out: Path) -> Path:
    """Where a run that will write `out` keeps its answers until then."""
    return out.with_name(f".{out.name}.answers")


def whole_lines(file: Path) -> list[bytes]:
    """The lines of `file`, none where it is not there; one that a kill or a full disk cut short is taken off it.

    As bytes: the cut may be inside a letter, and a text may hold other line ends.
    """
    if not file.exists():
        return []
    whole, newline, _ = file.read_bytes().rpartition(b"\n")
    os.truncate(file, len(whole + newline))
    return whole.split(b"\n") if newline else []


def regenerate(speaker: Speaker, tokenizer: PreTrainedTokenizerBase, rows: list[Row], out: Path, terms: Terms) -> int:
    """Answer the user turns of `rows` and write the conversations to `out`, in their order; return how many were written.

    Every turn is answered after the answers before it.
    """
    require_names(rows)
    kept = Kept(journal_of(out), terms)
    talks = [Talk(row, turns) for row in rows if (turns := questions(row))]
    every = [(talk.key, turn) for talk in talks for turn in range(len(talk.turns))]
    with Bar("regenerate", len(every), sum(one in kept.answers for one in every)) as bar:
        for turn in range(max((len(talk.turns) for talk in talks), default=0)):
            talks, asks = asked(talks, turn, kept, tokenizer, terms)
            for number, ids in speaker.answers([ask for _, ask in asks]):
                talk, _ = asks[number]
                content = tokenizer.decode(ids, skip_special_tokens=True)
                talk.said.append({"role": "assistant", "content": content, "ids": ids})
                kept.add(talk.key, turn, talk.said[-1])
                bar.advance(tokens=len(ids))
    if not talks:
        raise ValueError(
            f"none of the {len(rows)} prompts can be asked: none has a user turn and is within {terms.longest} tokens; "
            f"check the file, or raise regenerate.longest"
        )
    try:
        write_rows(out, (talk.written() for talk in talks))
    except ValueError as error:
        raise ValueError(f"{error}; all answers stay in {kept.file}, and the same command goes on") from None
    kept.file.unlink()
    return len(talks)


def asked(
    talks: list[Talk], turn: int, kept: Kept, tokenizer: PreTrainedTokenizerBase, terms: Terms
) -> tuple[list[Talk], list[tuple[Talk, Ask]]]:
    """The talks that go on, with what is known of `turn` put in, and what is still to be asked in it."""
    left, asks = [], []
    for talk in talks:
        if turn < len(talk.turns):
            talk.said += talk.turns[turn]
            if known := kept.answers.get((talk.key, turn)):
                talk.said.append(known)
            else:
                prompt = render(tokenizer, talk.said, speak=True)
                if len(prompt) > terms.longest:
                    continue
                asks.append((talk, Ask(talk.name, list(talk.said), prompt, talk.seed(turn, terms.seed))))
        left.append(talk)
    return left, asks


def questions(row: Row) -> list[list[Message]]:
    """What each turn asks: a user's message, and what the system says before it. What assistants said is left out."""
    turns: list[list[Message]] = []
    before: list[Message] = []
    for message in row.get("messages", ()):
        if message["role"] in ("system", "user"):
            if not isinstance(message["content"], str):
                raise ValueError(
                    f"conversation {row['id']} has a {message['role']} turn whose content is no text; drop it"
                )
            before.append({"role": message["role"], "content": message["content"]})
        if message["role"] == "user":
            turns.append(before)
            before = []
    return turns


def with_ids(rows: Iterable[Row]) -> list[Row]:
    """The rows, each with an `id`: its own, or its number."""
    return [{"id": number, **row} for number, row in enumerate(rows)]


def require_names(rows: list[Row]) -> None:
    """Raise ValueError where two conversations have one id."""
    name, times = next(iter(Counter(str(row["id"]) for row in rows).most_common(1)), ("", 0))
    if times > 1:
        raise ValueError(f"two conversations have the id {name}; give every one its own, or none to any")
