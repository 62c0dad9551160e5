"""Measure a drafter against plain decoding, prompt by prompt, in one process and on one clock."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from conf.schema import Decode, Run
from decode.engine import generate
from decode.opening import find_beside, find_drafter, open_drafter, open_target, open_tokenizer, target_folder
from decode.prompts import choose, exchanges, most_exchanges
from decode.report import Report, Sample, compare
from models.drafter import Budget, Drafter, Plain
from models.sampling import Sampling
from models.shelf import Card, make_folder, read_card, require_target
from models.source import identify
from models.tree import chain, ordered_paths


@dataclass
class Arm:
    """One drafter under measurement."""

    name: str
    folder: Path
    card: Card
    budget: Budget


def measure(run: Run) -> Report:
    """Decode every prompt with the drafter and without, and print and write what it was worth.

    The drafters that `decode.beside` names are measured in the same run, prompt by prompt.
    """
    console, how = Console(), run.decode
    check(how)
    sampling = Sampling(how.temperature, how.top_k, how.top_p, run.seed)
    arms = [arm_of(run.conf_name, find_drafter(run), how)]
    arms += [arm_of(Path(name).name, find_beside(name), how) for name in how.beside]
    identity = identify(target_folder(run.target), run.target.name, run.target.trust_remote_code)
    for arm in arms:
        require_target(arm.card, arm.folder, identity)
    chosen = choose(how.bench, open_tokenizer(run.target), how.prompts, how.longest, how.turns)
    target = open_target(run.target)
    guessers: list[tuple[Drafter, Budget]] = [(Plain(), Budget(nodes=1))]
    guessers += [(open_drafter(arm.folder, arm.card, target), arm.budget) for arm in arms]
    for arm in arms:
        console.print(f"{arm.name}: drafter {arm.folder}")
    console.print(f"target {run.target.name} ({target.identity.fingerprint})")
    for guesser, budget in guessers:  # warm up: first calls compile and allocate
        generate(target, guesser, [next(iter(chosen.values()))[0].prompt()], 8, budget)
    work = exchanges(chosen, how.rows, how.longest)
    total = most_exchanges(chosen, how.rows)
    samples: list[list[Sample]] = [[] for _ in arms]
    for number, (bench, dialogues) in enumerate(track(work, "decoding", total, console=console)):
        batch = [dialogue.prompt() for dialogue in dialogues]
        order = range(len(guessers)) if number % 2 else reversed(range(len(guessers)))  # no arm always goes first
        runs = {
            at: generate(target, guessers[at][0], batch, how.tokens, guessers[at][1], sampling, how.rows)
            for at in order
        }
        for at, mine in enumerate(samples, start=1):
            mine.append(Sample(bench, drafted=runs[at], plain=runs[0]))
        for dialogue, answer in zip(dialogues, runs[0].generations, strict=True):
            dialogue.hear(answer.tokens)  # plain decoding's, so that all arms read the same next prompt
    reports = [Report.of(mine, settings(run, arm, target.dtype)) for arm, mine in zip(arms, samples, strict=True)]
    for report in reports:
        report.show(console)
    if len(reports) > 1:
        compare(console, reports)
    console.print(f"written to {write(reports, run)}")
    return reports[0]


def arm_of(name: str, folder: Path, how: Decode) -> Arm:
    """The drafter in `folder`, and what it may propose."""
    card = read_card(folder)
    return Arm(name, folder, card, budget_for(how, card))


def check(how: Decode) -> None:
    """Raise ValueError for settings with which nothing would be measured."""
    # the first token is no round's, so one token measures nothing
    least = {"prompts": 1, "longest": 1, "tokens": 2, "nodes": 2, "depth": 1, "rows": 1, "branch": 1, "turns": 1}
    for name, value in least.items():
        if getattr(how, name) < value:
            raise ValueError(f"decode.{name}={getattr(how, name)} measures nothing; give at least {value}")
    if not how.bench:
        raise ValueError("decode.bench is empty; name a set of prompts, such as [gsm8k]")


def budget_for(how: Decode, card: Card) -> Budget:
    """How much may be proposed: the tree that `decode.tree` names, checked before weights load."""
    if how.tree == "dynamic" or (how.tree == "auto" and not card.tree):
        return Budget((), how.nodes, how.depth, how.branch)
    if how.tree == "auto":
        paths = ordered_paths(card.tree)[: how.nodes - 1]
    elif how.tree == "chain":
        paths = chain(how.depth)
    elif how.tree and isinstance(how.tree, list) and all(isinstance(path, list) for path in how.tree):
        paths = ordered_paths(how.tree)
    else:
        raise ValueError(
            f"decode.tree={how.tree}; use auto, chain, dynamic, or a list of paths such as [[0],[1],[0,0]]"
        )
    return Budget(tuple(paths), max(how.nodes, len(paths) + 1), how.depth)


def settings(run: Run, arm: Arm, dtype: torch.dtype) -> dict[str, Any]:
    """What the figures were taken with."""
    how, budget = asdict(run.decode), arm.budget
    return {
        "drafter": arm.name,
        "folder": arm.folder.name,
        "target": run.target.name,
        "dtype": str(dtype).removeprefix("torch."),
        **{key: how[key] for key in ("bench", "turns", "tokens", "temperature", "top_k", "top_p", "rows", "longest")},
        "tree": [list(path) for path in budget.paths] or {"depth": budget.depth, "branch": budget.branch},
        "nodes": len(budget.paths) + 1 if budget.paths else budget.nodes,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "taken": datetime.now().isoformat(timespec="seconds"),
    }


def write(reports: Sequence[Report], run: Run) -> Path:
    """The reports as JSON, in a folder of their own: report.json, and one beside it for each drafter beside."""
    out = Path(run.decode.out or Path(run.out, "measure", datetime.now().strftime("%Y-%m-%d_%H-%M-%S")))
    make_folder(out)
    for number, report in enumerate(reports):
        name = f"report_{report.settings['drafter']}.json" if number else "report.json"
        beside = out / f".{name}.part"
        beside.write_text(json.dumps(report.to_json(), indent=1))
        beside.rename(out / name)
    return out / "report.json"
