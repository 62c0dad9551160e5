"""What a drafter accepts in contexts longer than it learned from, as it is and with each remedy.

`python -m train.long_context conf=NAME` asks the run's benchmark questions at the end of long conversations, which are
made of the held-out ones of its data; other drafters of the target stand in `decode.beside`. Nothing is trained: a window
or stretched positions change no weight.
"""

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from conf import command
from conf.schema import Run
from decode.arms import Arm, arms_of
from decode.engine import generate
from decode.figures import Figure, Sample, Tally, bootstrap, depths, steps_of, tau
from decode.opening import open_drafter, open_target
from decode.progress import Bar
from decode.prompts import choose
from models.files import write_whole
from models.shelf import Card, family_class, make_folder
from train.chat import Message, render
from train.sources import rows_of


@dataclass
class Found:
    """What one way of reading one length of context was worth to one drafter."""

    drafter: str
    context: int  # tokens, prompt and answer
    prompts: int
    tokens: float  # of the prompts, on average
    remedy: str
    tau: Figure
    over: Figure  # tau over the first drafter's as it is in the same context, prompt by prompt
    accepted: list[float]  # by depth: of the rounds accepted down to the depth before


def measure(run: Run) -> list[Found]:
    """Decode the benchmark's questions behind contexts of each length, print a table and write it beside the drafter."""
    how, arms = run.decode, arms_of(run)
    for arm in arms:
        if arm.folder is None:
            raise ValueError(f"{arm.name} needs no training, so no context is longer than it learned from")
    target = open_target(run.target)
    if max(how.contexts) > target.context:
        raise ValueError(
            f"decode.contexts={how.contexts}: {target.identity.name} reads {target.context} tokens; ask for no more"
        )
    prompts = {context: list(long_prompts(run, target.tokenizer, context - how.tokens)) for context in how.contexts}
    ways = [(arm, context, *way) for context in prompts for arm in arms for way in remedies(arm.card, context).items()]
    found, first = [], dict[int, Tally]()
    with Bar("long contexts", sum(len(prompts[context]) for _, context, *_ in ways)) as bar:
        for arm, context, remedy, knobs in ways:
            drafter = open_drafter(arm.folder, replace(arm.card, knobs=arm.card.knobs | knobs), target)
            runs = []
            for prompt in prompts[context]:
                runs.append(generate(target, drafter, [prompt], how.tokens, arm.budget))
                bar.advance()
            tally = Tally.of([Sample("", each, each) for each in runs])
            over = bootstrap(tally, tau, first.setdefault(context, tally))
            rates = [round(each.alpha, 4) for each in depths(steps_of(runs))]
            length = round(sum(map(len, prompts[context])) / len(runs), 1)
            found.append(Found(arm.name, context, len(runs), length, remedy, bootstrap(tally, tau), over, rates))
    out = Path(run.out)
    make_folder(out)
    write_whole(out / "long_context.json", json.dumps([asdict(one) for one in found], indent=1))
    show(found, arms)
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


def show(found: Sequence[Found], arms: Sequence[Arm]) -> None:
    """The table."""
    table = Table(box=box.SIMPLE)
    for name in ("context", "drafter", "read with", "tau", "over the first", "accepted by depth"):
        table.add_column(name, overflow="fold")
    for one in found:
        rates = " ".join(f"{rate:.2f}" for rate in one.accepted)
        table.add_row(str(one.context), one.drafter, one.remedy, str(one.tau), str(one.over), rates)
    console = Console()
    console.print(table)
    learned = ", ".join(f"{arm.name} learned from up to {arm.card.training.get('longest', '?')} tokens" for arm in arms)
    console.print(f"{found[0].prompts} prompts; {learned}", highlight=False)


if __name__ == "__main__":
    command("train.long_context:measure")()
