"""Measure a drafter against plain decoding, prompt by prompt, in one process and on one clock."""

import json
import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from conf.schema import Decode, Run
from decode.accept import Sampling
from decode.engine import generate
from decode.opening import find_drafter, open_drafter, open_target, target_folder
from decode.prompts import bench_file, bench_prompts
from decode.report import Report, Sample
from models.drafter import Budget, Drafter, Plain
from models.shelf import Card, make_folder, read_card, require_target
from models.source import identify
from models.tree import chain, ordered_paths


def measure(run: Run) -> Report:
    """Decode every prompt with the drafter and without, and print and write what it was worth."""
    console, how = Console(), run.decode
    check(how)
    folder = find_drafter(run)
    card = read_card(folder)
    budget, sampling = budget_for(how, card), Sampling(how.temperature, how.top_k, how.top_p, run.seed)
    for name in how.bench:
        bench_file(name)
    require_target(card, folder, identify(target_folder(run.target), run.target.name, run.target.trust_remote_code))
    target = open_target(run.target)
    drafter = open_drafter(folder, card, target)
    prompts = bench_prompts(how.bench, target.tokenizer, how.prompts, how.longest)
    console.print(f"drafter {folder}, target {run.target.name} ({target.identity.fingerprint})")
    generate(target, drafter, [prompts[how.bench[0]][0]], 8, budget)  # warm up: first calls compile and allocate
    work = [(bench, batch) for bench, asked in prompts.items() for batch in batches(asked, how.rows)]
    samples = []
    arms: dict[str, tuple[Drafter, Budget]] = {"drafted": (drafter, budget), "plain": (Plain(), Budget(nodes=1))}
    for number, (bench, batch) in enumerate(track(work, "decoding", console=console)):
        runs = {}
        for arm in sorted(arms, reverse=number % 2 == 1):  # neither arm always goes first
            guesser, allowed = arms[arm]
            runs[arm] = generate(target, guesser, batch, how.tokens, allowed, sampling, how.rows)
        samples.append(Sample(bench, **runs))
    report = Report.of(samples, settings(run, folder, target.dtype, budget))
    report.show(console)
    out = write(report, run)
    console.print(f"written to {out}")
    return report


def check(how: Decode) -> None:
    """Raise ValueError for settings with which nothing would be measured."""
    # the first token is no round's, so one token measures nothing
    least = {"prompts": 1, "longest": 1, "tokens": 2, "nodes": 2, "depth": 1, "rows": 1}
    for name, value in least.items():
        if getattr(how, name) < value:
            raise ValueError(f"decode.{name}={getattr(how, name)} measures nothing; give at least {value}")
    if not how.bench:
        raise ValueError("decode.bench is empty; name a set of prompts, such as [gsm8k]")


def batches(prompts: list[list[int]], rows: int) -> list[list[list[int]]]:
    return [prompts[start : start + rows] for start in range(0, len(prompts), rows)]


def budget_for(how: Decode, card: Card) -> Budget:
    """How much may be proposed: the tree that `decode.tree` names, checked before weights load."""
    if how.tree == "auto":
        paths = ordered_paths(card.tree)[: how.nodes - 1]
    elif how.tree == "chain":
        paths = chain(how.depth)
    elif how.tree and isinstance(how.tree, list) and all(isinstance(path, list) for path in how.tree):
        paths = ordered_paths(how.tree)
    else:
        raise ValueError(f"decode.tree={how.tree}; use auto, chain, or a list of paths such as [[0],[1],[0,0]]")
    return Budget(tuple(paths), max(how.nodes, len(paths) + 1), how.depth)


def settings(run: Run, folder: Path, dtype: torch.dtype, budget: Budget) -> dict[str, Any]:
    """What the figures were taken with."""
    how = asdict(run.decode)
    return {
        "drafter": run.conf_name,
        "folder": folder.name,
        "target": run.target.name,
        "dtype": str(dtype).removeprefix("torch."),
        **{key: how[key] for key in ("tokens", "temperature", "top_k", "top_p", "rows", "longest")},
        "tree": [list(path) for path in budget.paths],
        "nodes": len(budget.paths) + 1 if budget.paths else budget.nodes,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "taken": datetime.now().isoformat(timespec="seconds"),
    }


def write(report: Report, run: Run) -> Path:
    """The report as JSON, in a folder of its own."""
    out = Path(run.decode.out or Path(run.out, "measure", datetime.now().strftime("%Y-%m-%d_%H-%M-%S")))
    make_folder(out)
    beside = out / ".report.json.part"
    beside.write_text(json.dumps(report.to_json(), indent=1))
    beside.rename(out / "report.json")
    return out / "report.json"
