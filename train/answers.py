"""Prompts become conversations: what nobody has answered the target answers, once, into the user's cache."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema import Data, Run
from decode.opening import identity_of
from decode.prompts import evenly
from models.files import alone_in, cache_home
from train.chat import Row
from train.clean import asked_in, words
from train.data import write_rows
from train.regenerate import Kept, Talk, answer, journal_of, questions, terms_of
from train.sources import IMAGINED, conversations_of, rows_of


def conversations_for(run: Run, quiet: bool = False) -> list[Row]:
    """The conversations that `run.data` means, of which the target has answered those that were prompts alone."""
    if run.data.path == IMAGINED:
        run = replace(run, data=replace(run.data, path=str(imagined_by(run))))
    rows = rows_of(run.data, quiet)
    if not (run.data.answer and any(map(unanswered, rows))):
        return rows
    rows = needed(rows, run.data)
    prompts = worth_asking(run.data.path, [row for row in rows if unanswered(row)])
    given = answers_to(run, prompts)
    found = [given.get(key_of(row)) if unanswered(row) else row for row in rows]
    return [row for row in found if row is not None]


def unanswered(row: Row) -> bool:
    """Whether `row` holds messages, and the assistant says nothing in them."""
    return "messages" in row and not any(message.get("role") == "assistant" for message in row["messages"])


def needed(rows: list[Row], data: Data) -> list[Row]:
    """Those of `rows` that `data.conversations` takes, evenly over all but the held-out last ones, and these."""
    known, held = rows[: -data.heldout or None], rows[-data.heldout or len(rows) :]
    return rows if data.conversations is None else evenly(known, data.conversations) + held


def key_of(row: Row) -> str:
    """What is asked in `row`, in a few letters."""
    return hashlib.sha256(json.dumps(row["messages"]).encode()).hexdigest()[:16]


def worth_asking(path: str, rows: Sequence[Row]) -> dict[str, Row]:
    """Those of `rows` that hold a word, each once, by what is asked. Raises ValueError where none has two: that is no log of prompts."""
    spoken = [(row, words(asked_in(row))) for row in rows]
    if max(len(said) for _, said in spoken) < 2:
        raise ValueError(
            f"the prompts of {path} are all empty or of one word, and teach nothing of a domain; is it the right column (data.columns)?"
        )
    return {key_of(row): row for row, said in spoken if said}


def answers_to(run: Run, prompts: Mapping[str, Row]) -> dict[str, Row]:
    """What the target answers to `prompts`, but those that are too long; all that it ever answered on these terms is kept."""
    file = kept_in(run, "answers")
    with one_at_a_time(file.parent):
        known = {row["id"]: row for row in conversations_of(file)} if file.exists() else {}
        if missing := {key: row for key, row in prompts.items() if key not in known}:
            asked, out = (file.with_name(f".{file.name}.{part}.jsonl") for part in ("prompts", "new"))
            told = f"{len(missing):,} prompts of {run.data.path}"
            missing |= begun_before(run, asked, out)
            write_rows(asked, ({"id": key, "messages": row["messages"]} for key, row in missing.items()))
            ask(run, str(asked), out, told)
            too_long = {key: {"id": key, "messages": row["messages"]} for key, row in missing.items()}
            known |= too_long | {row["id"]: row for row in conversations_of(out)}
            write_rows(file, known.values())
            for part in (asked, out):
                part.unlink()
    return {key: known[key] for key in prompts if not unanswered(known[key])}


def begun_before(run: Run, asked: Path, out: Path) -> dict[str, Row]:
    """Those of the prompts `asked` that a killed run has answers to: whatever is asked next, these stay among it."""
    if not asked.exists():
        return {}
    begun = {key for key, _ in Kept(journal_of(out), terms_of(run)).answers}
    return {row["id"]: row for row in conversations_of(asked) if Talk(row, questions(row)).key in begun}


def imagined_by(run: Run) -> Path:
    """The file of conversations for which the target wrote the questions, too."""
    file = kept_in(run, "imagined", run.regenerate.count, run.data.near)
    with one_at_a_time(file.parent):
        if not file.exists():
            ask(run, IMAGINED, file, f"{run.regenerate.count:,} questions of its own")
    return file


def one_at_a_time(home: Path) -> AbstractContextManager[None]:
    """Within, no other run asks for what is kept in the folder `home`: who comes second waits, and then finds it answered."""
    told = f"another run has the target answer prompts into {home}; this one waits for it"
    return alone_in(home, lambda: print(told, flush=True))


def kept_in(run: Run, what: str, *terms: Any) -> Path:
    """The cache's file of what this target answers, on the terms of `run.regenerate`."""
    how, whose = run.regenerate, identity_of(run.target).fingerprint
    every = json.dumps([how.tokens, how.longest, how.temperature, run.seed, *terms])
    home = cache_home() / what
    home.mkdir(parents=True, exist_ok=True)
    return home / f"{whose}-{hashlib.sha256(every.encode()).hexdigest()[:8]}.jsonl.gz"


def ask(run: Run, prompts: str, out: Path, what: str) -> None:
    """Let the target answer `prompts`, a file, and write `out`; a run that is killed goes on when it is started again."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            f"the target has not answered {what} yet; let one process do it, `python -m train.data` with the same settings, and start again"
        )
    out.unlink(missing_ok=True)  # of a run that was killed after it had written them
    print(f"the target answers {what}, once, into {out.parent}")
    data = Data(path=prompts, near=run.data.near)
    answer(replace(run, data=data, regenerate=replace(run.regenerate, prompts=prompts, out=str(out))))
