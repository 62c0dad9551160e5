"""Prompts become conversations: what nobody has answered the target answers, once, into the user's cache."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema import Data, Run
from decode.opening import target_folder
from models.source import cache_home, fingerprint
from train.chat import Row
from train.clean import asked_in, words
from train.data import write_rows
from train.regenerate import answer
from train.sources import IMAGINED, conversations_of, rows_of


def conversations_for(run: Run, quiet: bool = False) -> list[Row]:
    """The conversations that `run.data` means, of which the target has answered those that were prompts alone."""
    if run.data.path == IMAGINED:
        run = replace(run, data=replace(run.data, path=str(answers_to(run, None))))
    rows = rows_of(run.data, quiet)
    open_rows = [row for row in rows if run.data.answer and unanswered(row)]
    if not open_rows:
        return rows
    prompts = worth_asking(run.data.path, open_rows)
    given = {row["id"]: row for row in conversations_of(answers_to(run, list(prompts.values())))}
    answered = {key: given.get(at) for at, key in enumerate(prompts)}  # but those that were too long
    found = [answered.get(key_of(row)) if unanswered(row) else row for row in rows]
    return [row for row in found if row is not None]


def unanswered(row: Row) -> bool:
    """Whether `row` holds messages, and the assistant says nothing in them."""
    return "messages" in row and not any(message.get("role") == "assistant" for message in row["messages"])


def key_of(row: Row) -> str:
    """What is asked in `row`."""
    return json.dumps(row["messages"])


def worth_asking(path: str, rows: Sequence[Row]) -> dict[str, Row]:
    """Those of `rows` that hold a word, each once, by what is asked. Raises ValueError where none has two: that is no log of prompts."""
    spoken = [(row, words(asked_in(row))) for row in rows]
    if max(len(said) for _, said in spoken) < 2:
        raise ValueError(
            f"the prompts of {path} are all empty or of one word, and teach nothing of a domain; is it the right column (data.columns)?"
        )
    return {key_of(row): row for row, said in spoken if said}


def answers_to(run: Run, prompts: list[Row] | None) -> Path:
    """The file of the target's answers to `prompts`, or to its own questions where there are None; made the first time."""
    how, whose = run.regenerate, fingerprint(target_folder(run.target), run.target.trust_remote_code)
    asked = [row["messages"] for row in prompts or ()]
    terms: list[Any] = [asked, how.tokens, how.longest, how.temperature, run.seed]
    terms += [how.count, run.data.near] if prompts is None else []
    file = cache_home() / "answers" / f"{whose}-{hashlib.sha256(json.dumps(terms).encode()).hexdigest()[:16]}.jsonl.gz"
    if file.exists():
        return file
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            f"the target has not answered the prompts of {run.data.path} yet; let one process do it, `python -m train.data` with the same settings, and start again"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    what = (
        f"{len(asked):,} prompts of {run.data.path}" if prompts is not None else f"{how.count:,} questions of its own"
    )
    print(f"the target answers {what}, once: {file}")
    questions = file.with_name(f".{file.name}.prompts.jsonl")
    if prompts is not None:
        write_rows(questions, ({"id": at, "messages": talk} for at, talk in enumerate(asked)))
    source = IMAGINED if prompts is None else str(questions)
    data = Data(path=source, near=run.data.near)
    answer(replace(run, data=data, overwrite=False, regenerate=replace(how, prompts=source, out=str(file))))
    questions.unlink(missing_ok=True)
    return file
