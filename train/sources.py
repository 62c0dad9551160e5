"""Where conversations come from, in the forms in which people publish them, as rows of messages.

A path of a JSONL, JSON or Parquet file, a folder of them, or hub://owner/name?config=&split=&revision=&streaming.
"""

from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from conf import packaged
from conf.schema import Data
from decode.prompts import evenly
from decode.tables import HUB, file_rows, hub_rows, parsed
from train.chat import Message, Row
from train.clean import cleaned, report

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
IMAGINED = "imagined"  # in place of a path: the target asks itself
OPTIONS = ("config", "split", "revision", "streaming")
FORMS = "messages or conversations, data (texts in turn), turns, instruction and output, prompt and response, question and answer, text, or input_ids and loss_mask"


def rows_of(data: Data, quiet: bool = False) -> list[Row]:
    """The conversations that `data` means: those of its path, cleaned where it says so, and a share of others mixed in."""
    rows = list(conversations_of(data.path, table_of("columns", data.columns)))
    if data.clean:
        rows, dropped = cleaned(rows, data.near)
        if not quiet:
            print(report(data.path, len(rows), dropped))
    return mixed(rows, table_of("mix", data.mix))


def table_of(name: str, value: Any) -> dict[str, Any]:
    """The setting data.`name` as what it says of each column or source."""
    if not isinstance(value or {}, dict):
        raise ValueError(f"data.{name}={value} is no table; write it as 'data.{name}={{key: value}}'")
    return dict(value or {})


def require_there(data: Data) -> None:
    """Raise ValueError for a file that does not exist."""
    for path in (data.path, *map(place_of, table_of("mix", data.mix))):
        if path != IMAGINED and not path.startswith(HUB) and not packaged(path).exists():
            raise ValueError(f"there is no data file {packaged(path)}; check data.path")


def place_of(name: str) -> str:
    """Where the source `name` of a mix is: what the file of conf/data of this name says, else the name itself."""
    part = packaged(f"pkg://conf/data/{name}.yaml")
    return str(yaml.safe_load(part.read_text())["path"]) if part.exists() else name


def mixed(rows: list[Row], shares: Mapping[str, float]) -> list[Row]:
    """`rows` and as many of each other source, taken evenly over it, as make its share of the whole, spread evenly among them."""
    if not shares:
        return rows
    own = 1 - sum(shares.values())
    if own <= 0 or min(shares.values()) <= 0:
        raise ValueError(
            f"data.mix={dict(shares)} leaves {own:.2f} for data.path; shares are above 0 and sum to less than 1"
        )
    placed = list(zip(((at + 0.5) / len(rows) for at in range(len(rows))), rows, strict=True))
    for name, share in shares.items():
        others = list(conversations_of(place_of(name)))
        taken = evenly(others, round(len(rows) * share / own))
        placed += [((at + 0.5) / len(taken), row) for at, row in enumerate(taken)]
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def conversations_of(path: str | Path, columns: Mapping[str, str] = MappingProxyType({})) -> Iterator[Row]:
    """The rows of `path` as messages; `columns` says which of its columns are ours, such as {messages: chat}."""
    if str(path).startswith(HUB):
        place, options = parsed(str(path), OPTIONS)
        rows = hub_rows(place, options, likely="train")
    else:
        require_there(Data(path=str(path)))
        rows = file_rows(packaged(str(path)))
    for where, row in rows:
        yield as_messages(where, row, columns)


def as_messages(where: str, row: Any, columns: Mapping[str, str]) -> Row:
    """`row`, whatever its form, as {"messages"} or {"input_ids", "loss_mask"} or {"text"}, with its id and source."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no object with columns; a row has {FORMS}")
    if missing := [theirs for theirs in columns.values() if theirs not in row]:
        raise ValueError(f"{where} has no column {missing[0]} (it has {', '.join(map(str, row))}); mend data.columns")
    there = {**row, **{ours: row[theirs] for ours, theirs in columns.items()}}
    kept = {key: there[key] for key in ("id", "source", "tools") if there.get(key) is not None}
    if "input_ids" in there:
        return {**kept, "input_ids": there["input_ids"], "loss_mask": there.get("loss_mask", ())}
    if there.get("messages") or there.get("conversations"):
        return {**kept, "messages": [_message(where, one) for one in there.get("messages") or there["conversations"]]}
    if isinstance(there.get("data"), list):
        return {**kept, "messages": _in_turn(there["data"])}
    if isinstance(there.get("turns"), list):
        return {**kept, "messages": [{"role": "user", "content": text} for text in there["turns"]]}
    if (pair := _pair(there)) is not None:
        return {**kept, "messages": _in_turn(pair)}
    if isinstance(there.get("text"), str):
        return {**kept, "text": there["text"]}
    raise ValueError(
        f"{where} has {', '.join(map(str, row)) or 'no columns'}; a row has {FORMS}: say which is which in data.columns, such as 'data.columns={{messages: chat}}'"
    )


def _message(where: str, one: Any) -> Message:
    """A message of ours from OpenAI's or ShareGPT's."""
    role = one.get("role", one.get("from")) if isinstance(one, dict) else None
    content = one.get("content", one.get("value")) if isinstance(one, dict) else None
    if not isinstance(role, str):
        raise ValueError(f"{where} has a message without a role; each has role and content, or from and value")
    rest = {
        key: value
        for key, value in one.items()
        if key not in ("role", "from", "content", "value") and value is not None
    }
    return {"role": ROLES.get(role, role), "content": content, **rest}


def _in_turn(texts: list[str]) -> list[Message]:
    """Texts that user and assistant say in turn."""
    return [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), texts, strict=False)]


def _pair(row: Row) -> list[str] | None:
    """Question and answer of an instruction row, or the question alone."""
    for asked, answered in (
        ("instruction", ("output", "response")),
        ("prompt", ("response", "completion", "answer")),
        ("question", ("answer", "response")),
    ):
        if isinstance(row.get(asked), str):
            question = "\n\n".join(filter(None, (row[asked], row.get("input"))))
            answer = next((row[name] for name in answered if isinstance(row.get(name), str)), None)
            return [question] if answer is None else [question, answer]
    return None
