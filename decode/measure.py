"""Measure a drafter against plain decoding, prompt by prompt, in one process and on one clock."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from conf.schema import Accept, Decode, Proposal, Run
from decode.accept import Typical
from decode.arms import Arm, arms_of, beyond, cpu_name, require_least, widest
from decode.cost import Cost, Ladder
from decode.engine import Run as Decoded
from decode.engine import generate
from decode.figures import Sample
from decode.gather import show
from decode.hindsight import divergences, overlap_by_depth, sample_text
from decode.journal import write_trace
from decode.opening import called, open_drafter, open_target, open_tokenizer
from decode.page import write_page
from decode.progress import tracked
from decode.prompts import Dialogue, choose, exchanges, most_exchanges
from decode.report import Report, write_report
from models.drafter import Budget, Drafter, Plain
from models.sampling import Sampling
from models.shelf import load_drafter, make_folder
from models.target import Target


def measure(run: Run) -> Report:
    """Decode every prompt with the drafter and without, and print and write what it was worth.

    The drafters that `decode.beside` names are measured in the same run, prompt by prompt.
    """
    console, how = Console(), run.decode
    check(how)
    sampling, typical = Sampling(how.temperature, how.top_k, how.top_p, run.seed), typical_of(how)
    arms = arms_of(run)
    chosen = choose(how.bench, open_tokenizer(run.target), how.prompts, how.longest, how.turns)
    target = open_target(run.target)
    drafters = [open_drafter(arm.folder, arm.card, target) for arm in arms]
    for arm in arms:
        console.print(f"{arm.name}: drafter {arm.folder or arm.card.family}")
        if warning := beyond(arm, longest_of(chosen, how)):
            console.print(f"warning: {warning}")
    if typical:
        console.print(f"typical acceptance, lossy: the text is not distributed as the target's own ({typical})")
    console.print(f"target {called(run.target)} ({target.identity.fingerprint})")
    guessers = [(Plain(), Budget(nodes=1)), *((each, arm.budget) for each, arm in zip(drafters, arms, strict=True))]
    decode = partial(generate, target, limit=how.tokens, sampling=sampling, rows=how.rows, typical=typical)
    ladder = Ladder(target, how.rows, typical_context(chosen, how.tokens), widest(arms))
    samples = decode_all(decode, guessers, chosen, how, ladder, console)
    cost = ladder.cost()
    first = arms[0].name, samples[0]
    reports = [
        graded(run, arm, target, mine, each, cost, None if arm is arms[0] else first)
        for arm, each, mine in zip(arms, drafters, samples, strict=True)
    ]
    for report in reports:
        report.show(console, how.explain)
    if len(reports) > 1:
        show(console, told(reports), notes=[])
    console.print(f"written to {write(reports, samples, run)}")
    return reports[0]


def check(how: Decode) -> None:
    """Raise ValueError for settings with which nothing would be measured."""
    # the first token is no round's, so one token measures nothing
    least = {"prompts": 1, "longest": 1, "tokens": 2, "nodes": 2, "depth": 1, "rows": 1, "branch": 1, "turns": 1}
    require_least("decode", how, least)
    if how.proposal is Proposal.sampled and not how.temperature:
        raise ValueError(
            "decode.proposal=sampled has nothing to draw at temperature 0; set decode.temperature, or use top"
        )
    if how.proposal is Proposal.sampled and how.tree == "dynamic":
        raise ValueError(
            "decode.tree=dynamic takes the likeliest branches, which are not drawn; use chain or a list of paths with decode.proposal=sampled"
        )
    if not 0 <= how.least < 1:
        raise ValueError(
            f"decode.least={how.least} is no probability; give one from 0, which leaves nothing out, to below 1"
        )
    if how.least and how.proposal is Proposal.sampled:
        raise ValueError(
            "decode.least with decode.proposal=sampled would look at a drawn guess before it lets it stand, which bends the text; leave one of them out"
        )
    if not how.bench:
        raise ValueError("decode.bench is empty; name a set of prompts, such as [gsm8k]")


def typical_of(how: Decode) -> Typical | None:
    """The lossy rule, where `decode.accept` asks for it."""
    if how.accept is Accept.lossless:
        return None
    if not how.temperature:
        raise ValueError(
            "decode.accept=typical at temperature 0 is greedy decoding; set decode.temperature above 0, or leave decode.accept out"
        )
    return Typical(how.epsilon, how.delta)


def decode_all(
    decode: Callable[..., Decoded],
    guessers: Sequence[tuple[Drafter, Budget]],
    chosen: Mapping[str, list[Dialogue]],
    how: Decode,
    ladder: Ladder,
    console: Console,
) -> list[list[Sample]]:
    """For every guesser but the first, which is plain decoding, its samples: all arms interleaved, prompt by prompt, and
    the ladder climbed between.
    """
    warm = next(iter(chosen.values()))[0].prompt()
    in_turn(partial(decode, limit=8), guessers, [warm], 1)  # first calls compile and allocate
    samples: list[list[Sample]] = [[] for _ in guessers[1:]]
    begun = dict.fromkeys(chosen, 0)
    work = tracked(
        exchanges(chosen, how.rows, how.longest), "decoding", most_exchanges(chosen, how.rows), console=console
    )
    for number, (bench, dialogues) in enumerate(work):
        batch = [dialogue.prompt() for dialogue in dialogues]
        runs = in_turn(decode, guessers, batch, number)
        for at, mine in enumerate(samples, start=1):
            mine.append(Sample(bench, runs[at], runs[0], batch, begun[bench]))
        begun[bench] += len(batch)
        for dialogue, answer in zip(dialogues, runs[0].generations, strict=True):
            dialogue.hear(answer.tokens)  # plain decoding's, so that all arms read the same next prompt
        ladder.climb()
    return samples


def in_turn(
    decode: Callable[..., Decoded], guessers: Sequence[tuple[Drafter, Budget]], batch: list[list[int]], number: int
) -> dict[int, Decoded]:
    """What each guesser writes after `batch`, the first of them first where `number` is odd, else last."""
    order = range(len(guessers)) if number % 2 else reversed(range(len(guessers)))  # no arm always goes first
    return {at: decode(guessers[at][0], batch, budget=guessers[at][1]) for at in order}


def longest_of(chosen: Mapping[str, list[Dialogue]], how: Decode) -> int:
    """Tokens of the longest text that may come about, earlier turns left out, whose answers nobody knows yet."""
    return how.tokens + max(len(dialogue.prompt()) for dialogues in chosen.values() for dialogue in dialogues)


def typical_context(chosen: Mapping[str, list[Dialogue]], tokens: int) -> int:
    """Tokens that stand before a round, on average: the prompt and half of what may be written after it."""
    lengths = [len(dialogue.prompt()) for dialogues in chosen.values() for dialogue in dialogues]
    return sum(lengths) // len(lengths) + tokens // 2


def graded(
    run: Run,
    arm: Arm,
    target: Target,
    samples: Sequence[Sample],
    drafter: Drafter,
    cost: Cost,
    first: tuple[str, Sequence[Sample]] | None,
) -> Report:
    """What the samples of one drafter say, beside the name and samples of the `first`, and what reading them again adds."""
    # what was trained grades as in training, not packed
    learner = load_drafter(arm.folder, arm.card, target.ends, target.dtype) if arm.folder else drafter
    shared = overlap_by_depth(target, learner, samples)
    apart = [] if run.decode.temperature else divergences(target, samples)
    shown = sample_text(target.tokenizer, samples)
    told, theirs = settings(run, arm, target), None
    if first:
        told["first"], theirs = first
    return Report.of(samples, told, cost, shared, apart, shown, theirs)


def settings(run: Run, arm: Arm, target: Target) -> dict[str, Any]:
    """What the figures were taken with."""
    how, budget = asdict(run.decode), arm.budget
    return {
        "drafter": arm.name,
        "folder": arm.folder.name if arm.folder else None,
        "target": called(run.target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "compiled": target.compiled,
        **{key: how[key] for key in ("bench", "turns", "tokens", "temperature", "top_k", "top_p", "rows", "longest")},
        "tree": [list(path) for path in budget.paths]
        or {"depth": budget.depth, "branch": budget.branch, "least": budget.least},
        "proposal": run.decode.proposal.value,
        "accept": run.decode.accept.value,
        "nodes": len(budget.paths) + 1 if budget.paths else budget.nodes,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "taken": datetime.now().isoformat(timespec="seconds"),
    }


def write(reports: Sequence[Report], samples: Sequence[Sequence[Sample]], run: Run) -> Path:
    """The reports as JSON, in a folder of their own: report.json, and one beside it for each drafter beside."""
    out = Path(run.decode.out or Path(run.out, "measure", datetime.now().strftime("%Y-%m-%d_%H-%M-%S")))
    make_folder(out)
    if run.decode.trace:
        names = [report.settings["drafter"] for report in reports]
        write_trace(out / "trace.jsonl", dict(zip(names, samples, strict=True)))
    for number, report in enumerate(reports):
        write_report(report, out / (f"report_{report.settings['drafter']}.json" if number else "report.json"))
    write_page(out / "report.html", told(reports))
    return out / "report.json"


def told(reports: Sequence[Report]) -> dict[str, dict[str, Any]]:
    """The reports by their drafters' names, as their JSON holds them."""
    return {report.settings["drafter"]: report.to_json() for report in reports}
