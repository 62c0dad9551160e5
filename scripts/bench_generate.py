"""Tokens a second beside transformers' generate: python scripts/bench_generate.py conf=medusa_smol [decode.tree=tuned]

Every prompt of the run's sets by the drafter, by our plain decoding and by `generate` with either cache, one after the
other, reading the prompt included; on an otherwise idle machine. Ratios to the faster cache, with intervals over prompts.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from bench_round import by_generate
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf import command
from conf.schema import Run
from decode.arms import arms_of
from decode.engine import generate
from decode.figures import Figure, Tally, bootstrap, speedup
from decode.opening import open_drafter, open_target, open_tokenizer, served_folder
from decode.progress import tracked
from decode.prompts import choose
from models.drafter import Budget, Plain

Way = Callable[[list[int], int], int]  # a prompt and the most new tokens -> tokens written
CACHES = {"generate, dynamic cache": None, "generate, static cache": "static"}


def ways_of(run: Run) -> dict[str, Way]:
    """Every way to decode, by name."""
    arms, target = arms_of(run), open_target(run.target)
    stock: Any = AutoModelForCausalLM.from_pretrained(served_folder(run.target), dtype=target.dtype).eval()

    def ours(drafter: Any, budget: Budget) -> Way:
        return lambda prompt, most: len(generate(target, drafter, [prompt], most, budget).generations[0].tokens)

    def theirs(cache: str | None) -> Way:
        return lambda prompt, most: len(by_generate(stock, target, prompt, most, cache))

    drafted = {arm.name: ours(open_drafter(arm.folder, arm.card, target), arm.budget) for arm in arms}
    return drafted | {"plain": ours(Plain(), Budget(nodes=1))} | {name: theirs(cache) for name, cache in CACHES.items()}


def ratio(ours: Tensor, theirs: Tensor) -> Figure:
    """Tokens over seconds of `ours` [2, S] over those of `theirs`."""
    blank = torch.zeros_like(ours[0])
    tally = Tally(*(blank for _ in Tally._fields))
    return bootstrap(
        tally._replace(tokens=ours[0], seconds=ours[1], plain_tokens=theirs[0], plain_seconds=theirs[1]), speedup
    )


def bench(run: Run) -> None:
    """Time all ways, and print their speeds, and their ratios set by set."""
    console, how = Console(), run.decode
    chosen = choose(how.bench, open_tokenizer(run.target), how.prompts, how.longest, 1)
    prompts = [(name, dialogue.prompt()) for name, dialogues in chosen.items() for dialogue in dialogues]
    ways = ways_of(run)
    spent: dict[str, list[tuple[int, float]]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompts[0][1], 8)  # first calls allocate
    for number, (_, prompt) in enumerate(tracked(prompts, "decoding", console=console)):
        for name in sorted(ways, reverse=bool(number % 2)):
            began = time.perf_counter()
            spent[name].append((ways[name](prompt, how.tokens), time.perf_counter() - began))
    counts = {name: torch.tensor(each, dtype=torch.float64).T for name, each in spent.items()}  # [2, S]
    speeds = {name: (each[0].sum() / each[1].sum()).item() for name, each in counts.items()}
    for name, speed in speeds.items():
        console.print(f"{name}: {speed:.1f} tokens/s over {len(prompts)} prompts", highlight=False)
    fastest = max(CACHES, key=lambda name: speeds[name])
    for name in (name for name in ways if name not in CACHES):
        told = [f"all {ratio(counts[name], counts[fastest])}"]
        for asked in chosen:
            mine = [number for number, (other, _) in enumerate(prompts) if other == asked]
            told.append(f"{asked} {ratio(counts[name][:, mine], counts[fastest][:, mine])}")
        console.print(f"{name} over {fastest}: {', '.join(told)}", highlight=False)


main = command("bench_generate:bench")

if __name__ == "__main__":
    main()
