"""Write a trained drafter as another program reads it, with what is needed to serve it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conf.schema import Run
from conf.schema import Target as TargetConf
from decode.choice import Point, chain_lengths, measured
from decode.opening import called, identity_of, open_tokenizer, served_folder, trained_by
from models.ends import Ends
from models.layouts import layout_for
from models.served import Layout, Served
from models.shelf import (
    CARD,
    WEIGHTS,
    Card,
    card_text,
    family_class,
    load_drafter,
    packed,
    read_card,
    read_tensors,
    replace_folder,
    require_target,
    untrained,
)
from models.source import from_hub

RECORD = (
    "outrider.yaml"  # the drafter's card in an export: what it drafts for, and what it accepted when it was trained
)
UNMEASURED = 3  # depths of a chain where training measured one of a drafter that may go on
RARE = 0.05  # a guess that is reached less often than this is not worth a token of the target's pass


def export(run: Run) -> Path:
    """Write the run's drafter in the layout `layout`, in the folder that is returned."""
    if run.layout is None:
        raise ValueError(
            "layout= is not set; name the program that will read the drafter: vllm, sglang, speculators, eagle or medusa"
        )
    source = trained(run)
    card = read_card(source)
    layout = layout_for(run.layout, card.family)
    layout.require_said(card.knobs)
    out = destination(run, layout)
    folder = served_folder(run.target)
    require_target(card, source, identity_of(run.target))
    served = layout.write(*opened_drafter(source, card, folder), verifier(run.target, folder))
    template = template_digest(open_tokenizer(run.target).chat_template)
    drafter = {"family": card.family, "knobs": card.knobs, "training": card.training}
    curve = measured(run.conf_name, {"target": called(run.target), "drafter": drafter})
    write(served, layout, source, card, verifier(run.target, folder), template, curve, out)
    print(f"the drafter of {source} is in {out}, as {layout.name} reads it; {out / 'serve.md'} says how to serve it")
    return out


def trained(run: Run) -> Path:
    """The folder of the trained drafter: the one `trained` names, else what the experiment left in outputs/, else the shipped one."""
    if run.trained:
        return from_hub(run.trained, kind="drafter")
    if run.drafter and (card := untrained(run.drafter)):
        raise ValueError(
            f"a {card.family.rpartition('.')[2]} is never trained, so there is nothing to export; vLLM has methods of its own, ngram and draft_model"
        )
    if (Path(run.out) / CARD).exists():
        return Path(run.out)
    if found := trained_by(run.conf_name, Path("outputs", run.conf_name)):
        return found
    raise ValueError(
        f"there is no trained drafter of {run.conf_name}; train one with `python -m train conf={run.conf_name}`, or name one with trained=<folder or Hub name>"
    )


def destination(run: Run, layout: Layout) -> Path:
    """Where the export goes: `out`, or below it where that is the run's own folder. Raises ValueError where it exists."""
    out = Path(run.out)
    out = out / layout.name if out == Path("outputs", run.conf_name) or (out / CARD).exists() else out
    if out.exists():
        raise ValueError(f"{out} exists already; choose another folder with out=, or remove it")
    return out


def verifier(conf: TargetConf, folder: Path) -> str:
    """Where other programs find the target: its Hub name, or the local folder of one that has none, or wears an adapter."""
    return conf.name if conf.wheel is None and conf.random is None and conf.adapter is None else str(folder)


def opened_drafter(source: Path, card: Card, folder: Path) -> tuple[Any, dict[str, torch.Tensor], Ends]:
    """The drafter, checked, its tensors as they are stored, and the target's ends in their own precision."""
    ends = Ends.load(folder, dtype=None)
    drafter = load_drafter(source, card, ends, torch.float32)
    if card.adapter:  # is added to what it was trained on, and rounded as training would have
        merged = {
            name: value.to(torch.bfloat16) if value.is_floating_point() else value
            for name, value in drafter.state_dict().items()
        }
        return drafter, merged, ends
    return drafter, read_tensors(source / WEIGHTS), ends


def write(
    served: Served,
    layout: Layout,
    source: Path,
    card: Card,
    target: str,
    template: str,
    curve: tuple[str, list[Point]],
    out: Path,
) -> None:
    """All files beside their folder, which then gets its name; the same drafter gives the same bytes."""
    beside = out.with_name(f".{out.name}.part")
    beside.mkdir(parents=True)
    (beside / layout.file).write_bytes(packed(served.tensors))
    (beside / "config.json").write_text(json.dumps(served.config, indent=2) + "\n")
    record = (source / CARD).read_text()
    if card.adapter:
        record = card_text(replace(card, adapter={}))
    (beside / RECORD).write_text(record)
    settings = {"chat_template": template, **engine_settings(layout, card, *curve)}
    (beside / "serve.json").write_text(json.dumps(settings, indent=2) + "\n")
    (beside / "serve.md").write_text(recipe(layout, card, settings, target))
    replace_folder(beside, out)


def template_digest(template: Any) -> str:
    """A chat template's fingerprint."""
    return hashlib.sha256(repr(template).encode()).hexdigest()[:16]


def guesses(card: Card) -> int:
    """How many tokens a chain should guess: as deep as the product of the measured rates stays above RARE.

    EAGLE-1 is taught one depth and goes on below it: the next ones, which nobody measured, are taken to be like it.
    """
    rates, reached = card.acceptance.get("greedy") or [1.0, 1.0, 1.0], 1.0
    if len(rates) == 1 and family_class(card.family, card.knobs).reach(card.knobs) is None:
        rates = rates * UNMEASURED
    for depth, rate in enumerate(rates):
        reached *= rate
        if reached < RARE:
            return max(depth, 1)
    return len(rates)


def engine_settings(layout: Layout, card: Card, processor: str = "", points: Sequence[Point] = ()) -> dict[str, Any]:
    """What the servers are told, those that read this layout; by batch size, where what passes cost was measured."""
    depth = guesses(card)
    told: dict[str, Any] = {
        "num_speculative_tokens": depth,
        "expected_acceptance_by_depth": card.acceptance.get("greedy"),
    }
    if layout.method:
        told["vllm"] = {"method": layout.method, "num_speculative_tokens": depth, **layout.told}
        if points and card.acceptance.get("greedy"):
            runs = chain_lengths(points, card.acceptance["greedy"])
            told["vllm"] |= {
                "num_speculative_tokens": max(1, *(length for *_, length in runs)),
                "num_speculative_tokens_per_batch_size": [list(run) for run in runs],
            }
            told["costs_measured_on"] = processor
        if layout.method == "medusa" and card.knobs.get("vocabulary"):
            told["vllm_loader"] = {"enable_weights_track": False}  # see models/medusa_files.py
    if layout.name == "sglang":
        tree = {"speculative_num_steps": depth, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 10}
        told["sglang"] = {"speculative_algorithm": "EAGLE3", **tree}
    return told


def recipe(layout: Layout, card: Card, settings: dict[str, Any], target: str) -> str:
    """serve.md."""
    here = "<this folder>"
    lines = [
        f"# A drafter for {card.target['name']}",
        "",
        f"Written by Outrider in the layout `{layout.name}`. The tokenizer is the target's.",
    ]
    if "vllm" in settings:
        told = json.dumps({**settings["vllm"], "model": here})
        loader = (
            f" --model-loader-extra-config '{json.dumps(settings['vllm_loader'])}'" if "vllm_loader" in settings else ""
        )
        lines += ["", "```bash", f"vllm serve {target} --speculative-config '{told}'{loader}", "```"]
        if "costs_measured_on" in settings:
            lines += [
                "",
                f"How many tokens are guessed at each batch size is what would pay most on the machine where `decode.tune` measured ({settings['costs_measured_on']}); measure on the one that serves, and export again. Where 0 stands, nothing pays.",
            ]
    if "sglang" in settings:
        flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settings["sglang"].items())
        lines += [
            "",
            "```bash",
            f"python -m sglang.launch_server --model-path {target} --speculative-draft-model-path {here} {flags}",
            "```",
        ]
    rates = ", ".join(f"{rate:.2f}" for rate in card.acceptance.get("greedy", []))
    lines += [
        "",
        f"On held-out text its first guess at each depth was the target's own in {rates or 'no measured share'} of the cases.",
    ]
    lines += [
        "Servers draft chains or fixed trees; whichever they accept, the text stays the target's own where they verify without loss."
    ]
    return "\n".join(lines) + "\n"
