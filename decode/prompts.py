"""Benchmark prompts: which conversations a drafter is measured on, and what the user says next in each."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from decode.tables import HUB, file_rows, hub_rows, parsed

Item = TypeVar("Item")

SHIPPED = Path(__file__).parent / "bench"
SEVERAL = {"spec_bench": ("mt_bench", "qa", "math_reasoning", "rag")}  # one name for several sets


@dataclass
class Dialogue:
    """A conversation under way: what its user says turn by turn, and what the target has answered so far."""

    turns: list[str]
    tokenizer: PreTrainedTokenizerBase
    answers: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether every turn has its answer."""
        return len(self.answers) == len(self.turns)

    def prompt(self) -> list[int]:
        """Token ids of all that was said and the next turn, in the chat template, up to where the assistant begins.

        Earlier answers are rendered from their text. A template may strip or drop some of it, and the tokenizer may cut
        it into other tokens than the target wrote: so would a chat server, and all arms read the same ids.
        """
        said = [
            {"role": role, "content": text}
            for user, answer in zip(self.turns, self.answers, strict=False)
            for role, text in (("user", user), ("assistant", answer))
        ]
        said.append({"role": "user", "content": self.turns[len(self.answers)]})
        return cast(
            list[int],
            self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=False),
        )

    def hear(self, tokens: Sequence[int]) -> None:
        """Take what the target answered, and go on to the next turn."""
        self.answers.append(cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=True)))


def choose(
    names: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int, longest: int, turns: int = 1
) -> dict[str, list[Dialogue]]:
    """For each benchmark, `count` conversations of up to `turns` turns, taken evenly over the file of those that fit.

    A conversation fits whose first prompt is of up to `longest` tokens.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the target's tokenizer has no chat template, so benchmark questions cannot be asked; choose an instruct model"
        )
    chosen = {}
    for label, name in labelled(names).items():
        every = [Dialogue(asked[:turns], tokenizer) for asked in conversations(name)]
        lengths = [len(dialogue.prompt()) for dialogue in every]
        fitting = [dialogue for dialogue, length in zip(every, lengths, strict=True) if length <= longest]
        if not fitting:
            raise ValueError(
                f"no prompt of {name} is within decode.longest={longest} tokens; raise it (the shortest has {min(lengths)})"
            )
        chosen[label] = evenly(fitting, count)
    most = max(len(dialogue.turns) for dialogues in chosen.values() for dialogue in dialogues)
    if most < turns:
        raise ValueError(
            f"decode.turns={turns}, and the longest conversation chosen from {', '.join(chosen)} has {most}; ask for fewer, or name a set that has more, such as mt_bench with 2"
        )
    return chosen


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """`count` of `items`, or all where there are no more, taken evenly over them: number floor(i * all / count)."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def exchanges(chosen: Mapping[str, list[Dialogue]], rows: int, longest: int) -> Iterator[tuple[str, list[Dialogue]]]:
    """Up to `rows` dialogues of one benchmark at a time, each for its next turn, until none has one left.

    Whoever takes them lets each `hear` its answer before asking for more. A dialogue leaves when its next prompt is of more than
    `longest` tokens.
    """
    for bench, dialogues in chosen.items():
        while dialogues:
            for start in range(0, len(dialogues), rows):
                yield bench, dialogues[start : start + rows]
            dialogues = [one for one in dialogues if not one.over and len(one.prompt()) <= longest]


def most_exchanges(chosen: Mapping[str, list[Dialogue]], rows: int) -> int:
    """How many `exchanges` there are where no dialogue leaves early."""
    left = [[len(one.turns) for one in dialogues] for dialogues in chosen.values()]
    return sum(-(-sum(turns > turn for turns in every) // rows) for every in left for turn in range(max(every)))


def labelled(names: Sequence[str]) -> dict[str, str]:
    """The benchmarks that `names` mean, each once, by what a report calls them: the last word of a path, if it is no other's."""
    every = dict.fromkeys(one for name in names for one in SEVERAL.get(name, (name,)))
    last = {name: Path(name.partition("?")[0]).name.split(".")[0] for name in every}
    shared = Counter(last.values())
    return {last[name] if shared[last[name]] == 1 else name: name for name in every}


def conversations(name: str) -> list[list[str]]:
    """What the user says, turn by turn, in every row of the benchmark `name`: a shipped one, or the user's own.

    That is the path of a JSONL file, or hub://owner/name. Behind a question mark `column` names the field that holds the
    prompt, and for the Hub `config` and `split` choose the part: hub://openai/gsm8k?config=main&split=test&column=question.
    """
    place, options = parsed(name, ("config", "split", "column") if name.startswith(HUB) else ("column",))
    fields = _fields(options)
    rows = hub_rows(place, options, fields) if place.startswith(HUB) else file_rows(bench_file(place))
    asked = [_turns(where, row, fields) for where, row in rows]
    if not asked:
        raise ValueError(f"the benchmark {place} is empty")
    return asked


def _fields(options: Mapping[str, str]) -> list[str]:
    """Where to look for the prompt, in this order."""
    return [options["column"]] if "column" in options else ["turns", "messages"]


def shipped() -> list[str]:
    """The sets that ship, each under its own name."""
    return sorted(file.name.split(".")[0] for file in SHIPPED.glob("*.jsonl*"))


def bench_file(name: str) -> Path:
    """The file of the benchmark `name`: a shipped one, or a path of the user's."""
    for found in (SHIPPED / f"{name}.jsonl.gz", SHIPPED / f"{name}.jsonl", Path(name)):
        if found.is_file():
            return found
    raise ValueError(
        f"there is no benchmark {name!r}; use {', '.join(sorted([*SEVERAL, *shipped()]))}, the path of a .jsonl file, or hub://<owner>/<name>"
    )


def _turns(where: str, row: Any, fields: Sequence[str]) -> list[str]:
    """What the user says in `row`: a text, a list of texts, or messages of which the user's are asked."""
    there = row if isinstance(row, dict) else {}
    value = next((there[name] for name in fields if name in there), None)
    said = value if isinstance(value, list) else [value]
    said = [one.get("content") if isinstance(one, dict) else one for one in said if not _by_others(one)]
    if not said or not all(isinstance(text, str) and text.strip() for text in said):
        raise ValueError(
            f"{where} has no prompt in {' or '.join(fields)}; give it turns, messages, or the column that holds its text as ?column= (it has {', '.join(map(str, there)) or 'no columns'})"
        )
    return cast(list[str], said)


def _by_others(one: Any) -> bool:
    return isinstance(one, dict) and one.get("role") != "user"
