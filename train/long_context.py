"""What a drafter accepts in contexts longer than it learned from, as it is and with each remedy.

`python -m train.long_context conf=NAME` asks the run's benchmark questions at the end of long conversations, which are
made of the held-out ones of its data. Nothing is trained: a window or stretched positions change no weight.
"""

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from conf import command
from conf.schema import Decode, Run
from decode.arms import budget_for
from decode.engine import generate
from decode.figures import Sample, Tally, depths, steps_of, tau
from decode.opening import find_drafter, open_drafter, open_target
from decode.prompts import choose
from models.drafter import Drafter
from models.files import write_whole
from models.shelf import Card, family_class, make_folder, read_card
from models.target import Target
from train.chat import Message, render
from train.sources import rows_of


@dataclass
class Found:
    """What one way of reading one length of context was worth."""

    context: int  # tokens, prompt and answer
    prompts: int
    tokens: float  # of the prompts, on average
    remedy: str
    tau: float
    accepted: list[float]  # by depth: of the rounds accepted down to the depth before


def measure(run: Run) -> list[Found]:
    """Decode the benchmark's questions behind contexts of each length, print a table and write it beside the drafter."""
    how, folder = run.decode, find_drafter(run)
    if isinstance(folder, Card):
        raise ValueError(f"{folder.family} needs no training, so no context is longer than it learned from")
    card = read_card(folder)
    target = open_target(run.target)
    if max(how.contexts) > target.context:
        raise ValueError(
            f"decode.contexts={how.contexts}: {target.identity.name} reads {target.context} tokens; ask for no more"
        )
    found = []
    for context in how.contexts:
        prompts = list(long_prompts(run, target.tokenizer, context - how.tokens))
        for remedy, knobs in remedies(card, context).items():
            drafter = open_drafter(folder, replace(card, knobs=card.knobs | knobs), target)
            found.append(decoded(target, drafter, card, prompts, how, context, remedy))
    out = Path(run.out)
    make_folder(out)
    write_whole(out / "long_context.json", json.dumps([asdict(one) for one in found], indent=1))
    show(found, card)
    return found


def long_prompts(run: Run, tokenizer: PreTrainedTokenizerBase, longest: int) -> Iterator[list[int]]:
    """For each question a conversation that ends with it, of as many earlier turns as fit into `longest` tokens."""
    how = run.decode
    turns = [row["messages"] for row in rows_of(run.data, quiet=True)[-run.data.heldout :] if "messages" in row]
    if not turns:
        raise ValueError("data.path holds no conversations of messages to make long contexts of; name others")
    chosen = choose(how.bench, tokenizer, how.prompts, min(how.longest, longest))
    questions = [dialogue.turns[0] for dialogues in chosen.values() for dialogue in dialogues]
    for number, question in enumerate(questions):
        begin = number * len(turns) // len(questions)
        yield long_prompt(tokenizer, [*turns[begin:], *turns[:begin]], question, longest)


def long_prompt(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[list[Message]], question: str, longest: int
) -> list[int]:
    """Token ids of the most of `turns`, again and again where they are too few, before `question`."""

    def rendered(count: int) -> list[int]:
        said = [message for turn in islice(cycle(turns), count) for message in turn if message["role"] != "system"]
        plain = [{"role": message["role"], "content": message["content"]} for message in said]
        return render(tokenizer, [*plain, {"role": "user", "content": question}], speak=True)

    fits, too_many = 0, 1
    while len(rendered(too_many)) <= longest:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if len(rendered(middle)) <= longest else (fits, middle)
    return rendered(fits)


def remedies(card: Card, context: int) -> dict[str, dict[str, Any]]:
    """Ways to read `context` tokens: as it is; looking back no further than it learned to; positions pressed together."""
    ways: dict[str, dict[str, Any]] = {"as it is": {}}
    learned, knobs = card.training.get("longest"), inspect.signature(family_class(card.family, [])).parameters
    if learned and context > learned and {"window", "stretch"} <= set(knobs):
        ways[f"window={learned}"] = {"window": learned}
        ways[f"stretch={context / learned:.3g}"] = {"stretch": context / learned}
    return ways


def decoded(
    target: Target, drafter: Drafter, card: Card, prompts: list[list[int]], how: Decode, context: int, remedy: str
) -> Found:
    """What `drafter` is worth behind `prompts`."""
    run = generate(target, drafter, prompts, how.tokens, budget_for(how, card), rows=1)
    worth = tau(Tally.of([Sample("", run, run)])).item()
    accepted = [round(each.alpha, 4) for each in depths(steps_of([run]))]
    length = sum(map(len, prompts)) / len(prompts)
    return Found(context, len(prompts), round(length, 1), remedy, round(worth, 4), accepted)


def show(found: Sequence[Found], card: Card) -> None:
    """The table."""
    table = Table(title=f"a drafter that learned from up to {card.training.get('longest', '?')} tokens")
    for name in ("context", "prompt tokens", "read with", "tau", "accepted by depth"):
        table.add_column(name)
    for one in found:
        rates = " ".join(f"{rate:.2f}" for rate in one.accepted)
        table.add_row(str(one.context), f"{one.tokens:.0f}", one.remedy, f"{one.tau:.2f}", rates)
    Console().print(table)


if __name__ == "__main__":
    command("train.long_context:measure")()
