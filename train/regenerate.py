"""Let the target answer prompts: a drafter learns the target's own words."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conf.schema import Run
from decode.engine import Generation, rounds
from decode.opening import open_target
from models.drafter import Budget, Plain
from models.sampling import Sampling
from models.target import Target
from train.chat import Message, Row, render
from train.data import write_rows
from train.imagined import imagined
from train.sources import rows_of


def answer(run: Run) -> None:
    """The command: answer the user turns of run.regenerate.prompts and write run.regenerate.out."""
    how = run.regenerate
    if not how.prompts or not how.out:
        raise ValueError("give regenerate.prompts=<conversations.jsonl> and regenerate.out=<file to write>")
    if (out := Path(how.out)).exists() and not run.overwrite:
        raise ValueError(f"{out} exists; choose another regenerate.out, or overwrite=true")
    imagine = how.prompts == "imagined"
    rows = [] if imagine else with_ids(rows_of(replace(run.data, path=how.prompts, mix=None)))
    out.parent.mkdir(parents=True, exist_ok=True)
    target, questions = open_target(run.target), out.with_name(f".{out.name}.questions.jsonl")
    if imagine:
        rows = imagined(target, how.count, how.tokens, Sampling(1.0, seed=run.seed), how.rows, run.data.near, questions)
    if imagine and target.tokenizer.chat_template is None:
        write_rows(out, rows)  # texts, which nobody answers
        written = len(rows)
    else:
        sampling = Sampling(how.temperature, seed=run.seed)
        written = regenerate(target, rows, out, how.tokens, sampling, how.rows, how.longest)
    questions.unlink(missing_ok=True)
    print(f"{written} of {len(rows)} conversations are in {out}")


def regenerate(
    target: Target, rows: list[Row], out: Path, limit: int, sampling: Sampling, seats: int, longest: int
) -> int:
    """Answer the user turns of `rows` and write the conversations to `out`, in their order; return how many were written.

    Finished conversations are appended to a part file as they come, so a killed run goes on where it stopped. Prompts
    of more than `longest` tokens are left out.
    """
    ids = [str(row["id"]) for row in rows]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ValueError(f"two conversations have the id {twice}; give every one its own, or none to any")
    part = out.with_name(f".{out.name}.answers")
    done = _answered(part)
    todo = [row for row in rows if str(row["id"]) not in done]
    with part.open("a", encoding="utf-8") as journal:
        for row in _answers(target, todo, limit, sampling, seats, longest, total=len(rows)):
            done[str(row["id"])] = row
            journal.write(json.dumps(row, ensure_ascii=False) + "\n")
            journal.flush()
    written = [done[str(row["id"])] for row in rows if str(row["id"]) in done]
    if not written:
        raise ValueError(f"none of the {len(rows)} prompts is within {longest} tokens; raise the limit on prompts")
    write_rows(out, written)
    part.unlink()
    return len(written)


def _answered(part: Path) -> dict[str, Row]:
    """What an earlier run left in the part file; a line cut short by a kill is dropped from it."""
    if not part.exists():
        return {}
    # bytes: the cut may be inside a letter, and a text may hold other line ends
    whole = part.read_bytes().split(b"\n")[:-1]
    part.write_bytes(b"".join(line + b"\n" for line in whole))
    return {str(row["id"]): row for row in map(json.loads, whole)}


def _answers(
    target: Target, rows: list[Row], limit: int, sampling: Sampling, seats: int, longest: int, total: int
) -> Iterator[Row]:
    """Conversations in the order in which they finish; every user turn is answered after the answers before it."""
    columns = (
        TextColumn("regenerate"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=total, completed=total - len(rows), rate="")
        open_rows = [(row, asked) for row in rows if (asked := _questions(row))]
        progress.advance(bar, len(rows) - len(open_rows))
        spoken: dict[str, list[Message]] = {str(row["id"]): [] for row, _ in open_rows}
        for turn in range(max((len(asked) for _, asked in open_rows), default=0)):
            waiting = []
            for row, asked in open_rows:
                if turn < len(asked):
                    said = spoken[str(row["id"])]
                    said.append(asked[turn])
                    waiting.append((row, asked, render(target.tokenizer, said, speak=True)))
            waiting = sorted((entry for entry in waiting if len(entry[2]) <= longest), key=lambda entry: -len(entry[2]))
            words, clock = 0, 0.0
            for step in rounds(
                target, Plain(), [prompt for *_, prompt in waiting], limit, Budget(nodes=1), sampling, seats
            ):
                words, clock = (
                    words + len(step.moved) + len(step.finished),
                    clock + step.prefill + sum(step.seconds.values()),
                )
                for generation in step.finished:
                    row, asked, _ = waiting[generation.prompt]
                    said = spoken[str(row["id"])]
                    said.append(_answer(target, generation))
                    if turn + 1 == len(asked):
                        yield {**{key: row[key] for key in ("id", "source") if key in row}, "messages": said}
                        progress.advance(bar)
                progress.update(bar, rate=f"{words / clock:.0f} tokens/s")


def _questions(row: Row) -> list[Message]:
    return [
        {"role": "user", "content": message["content"]}
        for message in row.get("messages", ())
        if message["role"] == "user"
    ]


def _answer(target: Target, generation: Generation) -> Message:
    content = target.tokenizer.decode(generation.tokens, skip_special_tokens=True)
    return {"role": "assistant", "content": content, "ids": generation.tokens}


def with_ids(rows: Iterable[Row]) -> list[Row]:
    """The rows, each with an `id`: its own, or its number."""
    return [{"id": number, **row} for number, row in enumerate(rows)]
