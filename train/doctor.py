"""Examine a drafter that is to be served: its files, the meaning of its config, and what it accepts when it is replayed.

Whatever makes a server's guesses go wrong without an error is looked for: each suspicion changes one thing that is often wrong
and replays; the one that mends the acceptance is named.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.console import Console
from torch import Tensor

from conf.schema import Run
from decode.opening import open_target
from models.layer import layer_config
from models.source import fetched
from models.target import Target
from train.convert import read_files
from train.data import load_examples
from train.export import RECORD, template_digest
from train.replay import Patient, Text, hits
from train.sources import rows_of

CONVERSATIONS, LONGEST = 8, 256  # that are replayed: the last of the data, which training held out
MENDED = 1.1  # how much more a suspicion must accept to be named
LOST = 0.9  # of the recorded acceptance: less is ill, where it is not chance
SIGMAS = 4  # how far chance goes, in standard deviations of a share of the replayed positions
ZEROS = 0.02  # share of a matrix that may be zero: more is underflow
LAYER = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
)
FLAGS = ("norm_before_residual", "norm_output", "fc_norm")


class Finding(NamedTuple):
    """One thing that is wrong, by its short name, and what to do about it."""

    name: str
    sentence: str


@dataclass
class Chart:
    """What the doctor wrote down."""

    findings: list[Finding] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)  # acceptance by depth in the replay
    seen: list[float] = field(default_factory=list)  # positions it was measured at
    recorded: list[float] = field(default_factory=list)  # and what training measured


def examine(run: Run) -> None:
    """The command: examine `trained` for the run's target. Raises ValueError where it is ill."""
    if not run.trained:
        raise ValueError("name the folder or Hub name of the drafter: outrider-doctor FOLDER target=...")
    chart = chart_of(run, fetched(run.trained, kind="drafter", pickles=run.allow_pickle))
    console = Console()
    for name, rates in (("accepts by depth", chart.measured), ("training measured", chart.recorded)):
        if rates:
            console.print(f"{name}: {' '.join(f'{rate:.3f}' for rate in rates)}")
    for finding in chart.findings:
        console.print(f"{finding.name}: {finding.sentence}", highlight=False)
    if chart.findings:
        raise ValueError(f"{run.trained} is ill: {', '.join(finding.name for finding in chart.findings)}")
    console.print(f"{run.trained} is sound")


def chart_of(run: Run, folder: Path) -> Chart:
    """All findings: those of the files alone come first, and where there are such, nothing is replayed."""
    try:
        served = read_files(folder, run.allow_pickle)
    except ValueError as error:
        return Chart([Finding("files", str(error))])
    target = open_target(run.target)
    record = read_record(folder)
    chart = Chart(recorded=(record.get("acceptance") or {}).get("greedy") or [])
    chart.findings = [
        *strangers(folder, record, target),
        *underflows(served.tensors),
        *vocabulary_faults(served.config, served.tensors, target),
    ]
    patient = admitted(served.config, served.tensors, target)
    if isinstance(patient, Finding):
        chart.findings.append(patient)
    if chart.findings or isinstance(patient, Finding):
        return chart
    texts = read_texts(run, record, target, patient)
    counts = hits(patient, texts)
    chart.measured, chart.seen = rates(counts), counts[1].tolist()
    chart.findings = [*complaints(chart, patient, texts, served.tensors, target)]
    return chart


def read_record(folder: Path) -> dict[str, Any]:
    """What training wrote down, where the export brought it along."""
    file = folder / RECORD
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def rates(counts: Tensor) -> list[float]:
    """Acceptance by depth."""
    return (counts[0] / counts[1].clamp(min=1)).tolist()


# --- the files --------------------------------------------------------------------------------------------------------


def strangers(folder: Path, record: dict[str, Any], target: Target) -> Iterator[Finding]:
    """Whether the drafter was made for this target, and for what the target is told before a user's words."""
    if record and record["target"]["fingerprint"] != target.identity.fingerprint:
        settings = folder / "serve.json"
        told = json.loads(settings.read_text()).get("chat_template") if settings.exists() else None
        now = template_digest(target.tokenizer.chat_template)
        if told not in (None, now):
            yield Finding(
                "template",
                f"it was trained on another chat template than this target's tokenizer has ({told}, not {now}); serve it with that one",
            )
        else:
            yield Finding(
                "target",
                f"it was trained for {record['target']['name']} ({record['target']['fingerprint']}) and this is {target.identity.name} ({target.identity.fingerprint})",
            )


def underflows(tensors: dict[str, Tensor]) -> Iterator[Finding]:
    """Matrices that lost their small numbers, or hold no numbers."""
    for name, value in tensors.items():
        if not value.is_floating_point():
            continue
        if not bool(value.isfinite().all()):
            yield Finding("numbers", f"{name} holds NaN or infinity")
        zero = float((value == 0).float().mean())
        if value.dim() == 2 and zero > ZEROS:
            yield Finding(
                "underflow",
                f"{zero:.0%} of {name} is zero: small numbers were lost when it was stored as {value.dtype}; store it as bfloat16 or float32",
            )


def vocabulary_faults(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Iterator[Finding]:
    """What is wrong with d2t, by the rules of those who read it: ascending offsets, as many as t2d marks."""
    whole, head = target.identity.vocabulary, tensors.get("lm_head.weight")
    if "token_map" in tensors or head is None or len(head) == whole:
        return
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        yield Finding(
            "d2t missing",
            f"the head has {len(head)} rows of {whole} and no d2t says which; a server takes the first {len(head)}",
        )
        return
    ids = d2t + torch.arange(len(d2t))
    marked = None if t2d is None else t2d.nonzero()[:, 0]
    if marked is not None and torch.equal(marked, d2t):
        yield Finding("d2t as positions", "d2t holds the target's ids; it must hold offsets, id - draft id")
    elif not bool(((ids >= 0) & (ids < whole)).all()) or bool((ids[1:] <= ids[:-1]).any()):
        yield Finding("d2t", f"d2t does not name ascending tokens of the target's {whole}")
    elif marked is not None and not torch.equal(marked, ids):
        kind = "d2t as identity" if not d2t.any() else "d2t"
        yield Finding(
            kind,
            f"d2t names other tokens than t2d marks ({int((~torch.isin(ids, marked)).sum())} of {len(ids)}); write t2d's ids as offsets",
        )


def admitted(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Patient | Finding:
    """The patient that the files describe, or why none can be made of them."""
    held = {
        name.replace("midlayer.", "layers.0."): value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
    }
    heads = {name.split(".")[1] for name in held if name.startswith("blocks.")}
    if heads:
        lacking = [] if {"lm_head.weight", "lm_heads.0.weight"} & held.keys() else ["lm_head.weight"]
    else:
        lacking = sorted(
            {"fc.weight", "norm.weight", "lm_head.weight", *(f"layers.0.{part}.weight" for part in LAYER)} - held.keys()
        )
    if lacking:
        return Finding("tensors", f"{', '.join(lacking)} missing")
    return Patient(held, held.get("token_map"), len(heads)) if heads else eagle3_patient(config, held, target)


def eagle3_patient(config: dict[str, Any], held: dict[str, Tensor], target: Target) -> Patient | Finding:
    """EAGLE-3 as vLLM reads its config, speculators' or a flat one; SGLang's numbers where only they stand there."""
    layer = config.get("transformer_layer_config") or config
    listed, nested = (
        config.get("eagle_aux_hidden_state_layer_ids"),
        (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"),
    )
    deep = len(target.layers)
    taps = tuple(listed or [layer_id + 1 for layer_id in nested or (1, deep // 2 - 1, deep - 4)])
    width = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    if held["fc.weight"].shape != (layer["hidden_size"], len(taps) * target.identity.width):
        return Finding(
            "fc",
            f"fc.weight has shape {list(held['fc.weight'].shape)} and the config names {len(taps)} taps of width {target.identity.width}",
        )
    if held["layers.0.self_attn.q_proj.weight"].shape[0] != layer["num_attention_heads"] * width:
        return Finding(
            "head_dim",
            f"q_proj has {held['layers.0.self_attn.q_proj.weight'].shape[0]} rows and the config means {layer['num_attention_heads']} heads of {width}",
        )
    if not all(0 <= tap <= deep for tap in taps) or list(taps) != sorted(set(taps)):
        return Finding("taps", f"taps {list(taps)} must ascend within 0 to {deep}")
    rope = layer.get("rope_parameters") or {
        **(layer.get("rope_scaling") or {}),
        "rope_theta": layer.get("rope_theta", 10000.0),
    }
    flags = {
        flag: bool(config.get(flag, flag == "norm_before_residual" and "speculators_model_type" in config))
        for flag in FLAGS
    }
    if flags["fc_norm"] and "fc_norm.0.weight" not in held:
        return Finding("fc_norm", "the config says fc_norm and the file holds no such norms")
    ids = held["d2t"] + torch.arange(len(held["d2t"])) if "d2t" in held else None
    return Patient(
        held,
        ids,
        3,
        taps,
        (),
        {"rope_type": "default", **rope},
        layer.get("rms_norm_eps", 1e-5),
        width,
        norm_before_fc=bool(config.get("norm_before_fc")),
        **flags,
    )


# --- the replay -------------------------------------------------------------------------------------------------------


def read_texts(run: Run, record: dict[str, Any], target: Target, patient: Patient) -> list[Text]:
    """The last conversations of the data that it was trained on, which it has not seen, as the target reads them."""
    if known := (record.get("training") or {}).get("data"):
        run.data.path = known
    rows = list(rows_of(run.data, quiet=True))[-CONVERSATIONS:]
    examples = load_examples(rows, target.tokenizer, target.end_tokens, min(LONGEST, target.context), True)
    deep = len(target.layers)
    near = sorted({tap + step for tap in patient.taps for step in (-1, 0, 1) if 0 <= tap + step <= deep})
    target.tap(tuple(near))
    texts = []
    for example in examples:
        ids, mask = torch.tensor(example.input_ids), torch.tensor(example.loss_mask).bool()
        batch = target.features(ids[None], mask[None], torch.tensor([len(ids)]))
        states = (
            dict(zip(near, batch.features[0].float().cpu().split(target.identity.width, dim=-1), strict=True))
            if near
            else {}
        )
        embedded = (
            patient.tensors["embed_tokens.weight"][ids]
            if "embed_tokens.weight" in patient.tensors
            else target.ends.embed(ids.to(target.device)).float().cpu()
        )
        texts.append(Text(ids, mask, states, batch.last_hidden[0].float().cpu().clone(), embedded.clone()))
    return texts


def lost(now: float, then: float, seen: float) -> bool:
    """Whether an acceptance of `now` at `seen` positions is less than `then` beyond chance."""
    chance = SIGMAS * (then * (1 - then) / max(seen, 1)) ** 0.5
    return now < min(LOST * then, then - chance)


def complaints(
    chart: Chart, patient: Patient, texts: list[Text], tensors: dict[str, Tensor], target: Target
) -> Iterator[Finding]:
    """What the replay shows: the suspicion that mends it most, or that none does."""
    base, known = sum(chart.measured), chart.recorded[: len(chart.measured)]
    triples = zip(chart.measured, known, chart.seen, strict=False)
    fallen = [depth for depth, triple in enumerate(triples, start=1) if lost(*triple)]
    if known and not fallen:
        return
    tried = [(sum(rates(hits(other, theirs))), name) for name, other, theirs in suspicions(patient, texts, target)]
    most, best = max(tried, default=(0.0, ""))
    if most > MENDED * base + 0.05:
        accepted = f"{most / patient.depth:.1%} of its guesses instead of {base / patient.depth:.1%}"
        yield Finding(best, f"with this changed it accepts {accepted}: {ADVICE[best]}")
    elif strange := foreign_head(patient, tensors, target):
        yield Finding("head", strange)
    elif fallen:
        where = ", ".join(map(str, fallen))
        yield Finding(
            "acceptance",
            f"it accepts less than training measured at depth {where}, and nothing that was tried mends it",
        )


ADVICE = {
    "taps": "the config's tap numbers are off by one; vLLM counts the embedding as 0, SGLang counts layers",
    "labels": "its guesses are for another token than the server takes them for; its training's labels or heads are off by one",
    "norm_before_residual": "the flag is flipped",
    "norm_output": "the flag is flipped, or stands there in SpecForge's meaning",
    "fc_norm": "the flag is flipped",
    "fc columns": "the parts of fc belong to the taps in another order; servers take them ascending",
    "rope": "its rotary settings are not the target's; write rope_theta and rope_parameters",
    "embedding": "its embed_tokens are another target's; leave them out",
}


def suspicions(patient: Patient, texts: list[Text], target: Target) -> Iterator[tuple[str, Patient, list[Text]]]:
    """Patients with one thing changed, and the texts to replay: what is often wrong, by its name."""
    yield from (("labels", replace(patient, shift=shift), texts) for shift in (-1, 1))
    if not patient.taps:
        return
    for step in (-1, 1):
        taps = tuple(tap + step for tap in patient.taps)
        if all(tap in texts[0].states for tap in taps):
            yield "taps", replace(patient, taps=taps), texts
    yield "norm_before_residual", replace(patient, norm_before_residual=not patient.norm_before_residual), texts
    yield "norm_output", replace(patient, norm_output=not patient.norm_output), texts
    if "fc_norm.0.weight" in patient.tensors:
        yield "fc_norm", replace(patient, fc_norm=not patient.fc_norm), texts
    for order in [*permutations(range(len(patient.taps)))][1:]:
        yield "fc columns", replace(patient, order=order), texts
    rope = layer_config(target.config, target.identity.width).rope_parameters
    if dict(patient.rope or {}) != dict(rope or {}):
        yield "rope", replace(patient, rope=rope), texts
    if "embed_tokens.weight" in patient.tensors:
        own = [replace(text, embedded=target.ends.embed(text.ids.to(target.device)).float().cpu()) for text in texts]
        yield "embedding", patient, own


def foreign_head(patient: Patient, tensors: dict[str, Tensor], target: Target) -> str:
    """Why the output matrix seems to be of another vocabulary: its rows are no nearer to the target's own rows than to others'."""
    head = tensors.get("lm_head.weight", tensors.get("lm_heads.0.weight"))
    if head is None or head.shape[1] != target.identity.width:
        return ""
    own = target.ends.head.float().cpu() if patient.ids is None else target.ends.head.float().cpu()[patient.ids]
    near = torch.cosine_similarity(head.float(), own).mean()
    far = torch.cosine_similarity(head.float(), own.roll(1, 0)).mean()
    return (
        f"the rows of its output matrix resemble the target's own rows ({near:.2f}) no more than others ({far:.2f}): the head, or its vocabulary, is another's"
        if near < far + 0.05
        else ""
    )
