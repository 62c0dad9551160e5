"""Conversations: JSONL files in, token ids and loss masks out.

A row is {"id", "messages": [{"role", "content"}, ...]}; an assistant message may carry the token `ids` that the target
wrote, which are then used as they are and never tokenised again. A row may instead be {"input_ids", "loss_mask"}.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One conversation as the drafter sees it."""

    input_ids: list[int]
    loss_mask: list[bool]  # true where the target speaks, the end of its turn included


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file, plain or gzipped."""
    if not path.exists():
        raise ValueError(f"there is no data file {path}; check data.path")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                raise ValueError(
                    f"{path} line {number} is no JSON; every line of a .jsonl file is one object"
                ) from None
            if not isinstance(row, dict) or not ("messages" in row or "input_ids" in row):
                raise ValueError(
                    f"{path} line {number} has neither messages nor input_ids; see train/data.py for the form of a row"
                )
            yield row


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows beside `path` and rename, the same bytes for the same rows."""
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(gzip.compress(text, 9, mtime=0) if path.suffix == ".gz" else text)
    beside.rename(path)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], speak: bool) -> list[int]:
    """Token ids of `messages` in the tokenizer's chat template; `speak` ends them where the assistant begins."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "the target's tokenizer has no chat template; choose an instruct model, or give rows as input_ids and loss_mask"
        )
    plain = [{key: value for key, value in message.items() if key != "ids"} for message in messages]
    return cast(
        list[int],
        tokenizer.apply_chat_template(plain, add_generation_prompt=speak, tokenize=True, return_dict=False),
    )


def example(tokenizer: PreTrainedTokenizerBase, row: Row, ends: frozenset[int]) -> Example:
    """Token ids and loss mask of `row`: each assistant turn up to and including its end token.

    It stops before a turn whose prompt does not begin with the text so far: a template that drops reasoning from
    history, or `ids` that are spelled otherwise when their text is tokenised again. The target never read both in a row.
    Raises ValueError where no assistant speaks or the template rewrites the prompt when it answers.
    """
    if "input_ids" in row:
        if len(row["input_ids"]) != len(row.get("loss_mask", ())):
            raise ValueError(
                f"{row.get('id', 'a row')} has {len(row['input_ids'])} input_ids, and loss_mask has another length; give one flag a token"
            )
        return Example(list(row["input_ids"]), [bool(flag) for flag in row["loss_mask"]])
    name, messages = row.get("id", "a conversation"), row["messages"]
    ids: list[int] = []
    mask: list[bool] = []
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = render(tokenizer, messages[:turn], speak=True)
        if before[: len(ids)] != ids:
            break
        spoken = message.get("ids") or _spoken(tokenizer, messages[: turn + 1], before, ends, name)
        mask += [False] * (len(before) - len(ids)) + [True] * len(spoken)
        ids = ids + before[len(ids) :] + spoken
    if not any(mask):
        raise ValueError(
            f"{name} has no assistant turn; a drafter learns from what the target says. Run scripts/regenerate.py first"
        )
    return Example(ids, mask)


def _spoken(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], before: list[int], ends: frozenset[int], name: str
) -> list[int]:
    whole = render(tokenizer, messages, speak=False)
    if whole[: len(before)] != before:
        raise ValueError(
            f"{name}: the chat template rewrites earlier text when the assistant answers, so the answer cannot be told from the prompt"
        )
    spoken = whole[len(before) :]
    last = max((at for at, token in enumerate(spoken) if token in ends), default=len(spoken) - 1)
    return spoken[: last + 1]


def load_examples(path: Path, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], longest: int) -> list[Example]:
    """Every conversation of `path`, cut to `longest` tokens; those whose answer is cut away entirely are left out."""
    found = []
    for row in read_rows(path):
        whole = example(tokenizer, row, ends)
        cut = Example(whole.input_ids[:longest], whole.loss_mask[:longest])
        if any(cut.loss_mask):
            found.append(cut)
    if not found:
        raise ValueError(
            f"{path} holds no conversation with an answer within data.longest={longest} tokens; raise it or give other data"
        )
    return found
