"""Examine a drafter that is to be served: its files, the meaning of its config, and what it accepts when it is replayed.

Whatever makes a server's guesses go wrong without an error is looked for: each suspicion changes one thing that is often wrong
and replays; the one that mends the acceptance is named.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
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
from models.served import Served
from models.shelf import CARD, Card, read_card
from models.source import fetched
from models.target import Target
from train.convert import read_files, read_tensors
from train.data import load_examples
from train.export import RECORD, template_digest
from train.replay import Patient, Text, hits
from train.sources import rows_of

CONVERSATIONS, LONGEST = 8, 256  # that are replayed: the last of the data, which training held out
MENDED = 1.1  # how much more a suspicion must accept to be named, where it does not bring back half of what was lost
LOST = 0.9  # of the recorded acceptance: less is ill, where it is not chance
SIGMAS = 4  # how far chance goes, in standard deviations of a share of the replayed positions
ZEROS = 0.02  # share of a matrix that may be zero: more is underflow
LAYER = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    "post_attention_layernorm",
)
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # vLLM's names of P-EAGLE's mask token
FAMILIES = ("models.medusa.Medusa", "models.eagle.Eagle", "models.eagle3.Eagle3", "models.peagle.PEagle")
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
    own = (folder / CARD).exists()
    card = readable(read_card(folder)) if own else None
    try:
        served = Served({}, read_tensors(folder, False)) if own else read_files(folder, run.allow_pickle)
    except ValueError as error:
        return Chart([Finding("files", str(error))])
    target = open_target(run.target)
    record = asdict(card) if card else read_record(folder)
    chart = Chart(recorded=(record.get("acceptance") or {}).get("greedy") or [])
    config, tensors = own_config(card, target) if card else served.config, renamed(served.tensors)
    chart.findings = [
        *strangers(folder, record, target),
        *underflows(tensors),
        *vocabulary_faults(tensors, target),
    ]
    patient = admitted(config, tensors, target)
    if isinstance(patient, Finding):
        chart.findings.append(patient)
    if chart.findings or isinstance(patient, Finding):
        return chart
    texts = read_texts(run, record, target, patient)
    counts = hits(patient, texts)
    chart.measured, chart.seen = rates(counts), counts[1].tolist()
    chart.findings = [*complaints(chart, patient, texts, tensors, target)]
    return chart


def read_record(folder: Path) -> dict[str, Any]:
    """What training wrote down, where the export brought it along."""
    file = folder / RECORD
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def rates(counts: Tensor) -> list[float]:
    """Acceptance by depth."""
    return (counts[0] / counts[1].clamp(min=1)).tolist()


def readable(card: Card) -> Card:
    """The card, of a drafter that Outrider saved and no one exported, where the doctor can replay it."""
    if card.family not in FAMILIES:
        raise ValueError(f"the doctor replays {', '.join(FAMILIES)}, and this is a {card.family}; measure it instead")
    if card.adapter:
        raise ValueError("it holds an adapter alone; export it, which adds it to its drafter, and examine the export")
    odd = [
        f"{knob}={card.knobs[knob]}"
        for knob in ("window", "stretch", "width")
        if card.knobs.get(knob) not in (None, 1.0)
    ]
    if odd:
        raise ValueError(f"the doctor replays no drafter with {', '.join(odd)}; measure it instead")
    return card


def own_config(card: Card, target: Target) -> dict[str, Any]:
    """What a card of ours says, in vLLM's words; what it does not say is the target's."""
    knobs, mask = card.knobs, card.knobs.get("mask_token")
    return {
        **layer_config(target.config, target.identity.width).to_dict(),
        "num_hidden_layers": knobs.get("layers", 1),
        "eagle_aux_hidden_state_layer_ids": card.taps,
        "norm_before_residual": knobs.get("residual") == "after_norm",
        "norm_output": knobs.get("feedback") == "after_norm",
        "fc_norm": knobs.get("fc_norm", False),
        "mask_token_id": target.identity.vocabulary - 1 if mask is None else mask,
    }


# --- the files --------------------------------------------------------------------------------------------------------


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by vLLM's names, whoever named them."""

    def theirs(name: str) -> str:
        name = re.sub(r"^(medusa_heads?|vocabulary)\.", "", name)
        name = re.sub(r"^(?:blocks\.)?(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        name = re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)
        name = re.sub(r"^above\.(\d+)", lambda match: f"layers.{int(match[1]) + 1}", name)
        return re.sub(r"^midlayer\.", "layers.0.", name)

    return {theirs(name): value for name, value in tensors.items()}


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


def vocabulary_faults(tensors: dict[str, Tensor], target: Target) -> Iterator[Finding]:
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
    held = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    layer = config.get("transformer_layer_config") or config
    layers = layer.get("num_hidden_layers", 1)
    heads = len({name.split(".")[1] for name in held if name.startswith("blocks.")})
    plain = not heads and not {"layers.0.hidden_norm.weight", "norm.weight", "lm_head.weight"} & held.keys()
    ids = held["d2t"] + torch.arange(len(held["d2t"])) if "d2t" in held else held.get("token_map")
    if plain or (heads and config.get("model_type") != "medusa"):  # else vLLM's, which brings what it reads
        held = {**borrowed(ids, target), **held}
    if lacking := lacking_in(held, heads, 0 if heads else layers, plain):
        return Finding("tensors", f"{', '.join(lacking)} missing")
    if heads:
        return Patient(held, ids, heads)
    width = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    if held["layers.0.self_attn.q_proj.weight"].shape[0] != layer["num_attention_heads"] * width:
        return Finding(
            "head_dim",
            f"q_proj has {held['layers.0.self_attn.q_proj.weight'].shape[0]} rows and the config means {layer['num_attention_heads']} heads of {width}",
        )
    rope = layer.get("rope_parameters") or {
        **(layer.get("rope_scaling") or {}),
        "rope_theta": layer.get("rope_theta", 10000.0),
    }
    eps = layer.get("rms_norm_eps", 1e-5)
    found = Patient(held, ids, 3, layers, rope={"rope_type": "default", **rope}, eps=eps, width=width)
    return found if plain else eagle3_patient(found, config, layer, target)


def borrowed(ids: Tensor | None, target: Target) -> dict[str, Tensor]:
    """The target's head, for a drafter that brings none."""
    head, bias = target.ends.head.float().cpu(), target.ends.bias
    found = {"lm_head.weight": head if ids is None else head[ids]}
    return found if bias is None else {**found, "lm_head.bias": (bias if ids is None else bias[ids]).float().cpu()}


def lacking_in(held: dict[str, Tensor], heads: int, layers: int, plain: bool) -> list[str]:
    """The tensors without which nothing can be replayed."""
    if heads:
        return [] if {"lm_head.weight", "lm_heads.0.weight"} & held.keys() else ["lm_head.weight"]
    first = () if plain else ("input_layernorm", "hidden_norm")
    wanted = {"fc.weight", *(() if plain else ("norm.weight", "lm_head.weight"))}
    for number in range(layers):
        parts = (*LAYER, *(("input_layernorm",) if number else first))
        wanted |= {f"layers.{number}.{part}.weight" for part in parts}
    return sorted(wanted - held.keys())


def eagle3_patient(found: Patient, config: dict[str, Any], layer: dict[str, Any], target: Target) -> Patient | Finding:
    """EAGLE-3 as vLLM reads its config, speculators' or a flat one; SGLang's numbers where only they stand there."""
    held = found.tensors
    listed, nested = (
        config.get("eagle_aux_hidden_state_layer_ids"),
        (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"),
    )
    deep = len(target.layers)
    taps = tuple(listed or [layer_id + 1 for layer_id in nested or (1, deep // 2 - 1, deep - 4)])
    if held["fc.weight"].shape != (layer["hidden_size"], len(taps) * target.identity.width):
        return Finding(
            "fc",
            f"fc.weight has shape {list(held['fc.weight'].shape)} and the config names {len(taps)} taps of width {target.identity.width}",
        )
    if not all(0 <= tap <= deep for tap in taps) or list(taps) != sorted(set(taps)):
        return Finding("taps", f"taps {list(taps)} must ascend within 0 to {deep}")
    usual = config.get("speculators_model_type") == "eagle3"  # vLLM's default of norm_before_residual there
    flags: dict[str, Any] = {flag: bool(config.get(flag, flag == "norm_before_residual" and usual)) for flag in FLAGS}
    if flags["fc_norm"] and "fc_norm.0.weight" not in held:
        return Finding("fc_norm", "the config says fc_norm and the file holds no such norms")
    mask = next((config[name] for name in MASKS if config.get(name) is not None), None)
    if "mask_hidden" in held and mask is None:
        return Finding("mask token", f"the config names none ({MASKS[0]}), and vLLM does not start without")
    embedded = embedding_of(held, target)(torch.tensor([mask]))[0] if "mask_hidden" in held else None
    return replace(found, taps=taps, mask=embedded, norm_before_fc=bool(config.get("norm_before_fc")), **flags)


def embedding_of(held: Mapping[str, Tensor], target: Target) -> Callable[[Tensor], Tensor]:
    """What makes embeddings of token ids: the drafter's own, where it brings one, or the target's."""
    if "embed_tokens.weight" in held:
        return lambda ids: held["embed_tokens.weight"][ids]
    return lambda ids: target.ends.embed(ids.to(target.device)).float().cpu()


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
        embedded = embedding_of(patient.tensors, target)(ids)
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
    known = chart.recorded[: len(chart.measured)]
    graded = len(known) or patient.depth
    base = sum(chart.measured[:graded])
    triples = zip(chart.measured, known, chart.seen, strict=False)
    fallen = [depth for depth, triple in enumerate(triples, start=1) if lost(*triple)]
    if known and not fallen:
        return
    every = suspicions(patient, texts, target)
    tried = [(sum(rates(hits(other, theirs))[:graded]), name) for name, other, theirs in every]
    most, best = max(tried, default=(0.0, ""))
    if most > MENDED * base + 0.05 or (fallen and most > (base + sum(known)) / 2):
        accepted = f"{most / graded:.1%} of its guesses instead of {base / graded:.1%}"
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
    "fc columns": "the parts of fc are in another order; servers take taps ascending, and EAGLE-1's embedding before its state",
    "rope": "its rotary settings are not the target's; write rope_theta and rope_parameters",
    "embedding": "its embed_tokens are another target's; leave them out",
}


def suspicions(patient: Patient, texts: list[Text], target: Target) -> Iterator[tuple[str, Patient, list[Text]]]:
    """Patients with one thing changed, and the texts to replay: what is often wrong, by its name."""
    yield from (("labels", replace(patient, shift=shift), texts) for shift in (-1, 1))
    if not patient.layers:
        return
    for order in [*permutations(range(len(patient.taps) or 2))][1:]:
        yield "fc columns", replace(patient, order=order), texts
    rope = layer_config(target.config, target.identity.width).rope_parameters
    if dict(patient.rope or {}) != dict(rope or {}):
        yield "rope", replace(patient, rope=rope), texts
    if "embed_tokens.weight" in patient.tensors:
        theirs = embedding_of({}, target)
        yield "embedding", patient, [replace(text, embedded=theirs(text.ids)) for text in texts]
    if patient.taps:
        yield from tapped(patient, texts)


def tapped(patient: Patient, texts: list[Text]) -> Iterator[tuple[str, Patient, list[Text]]]:
    """What is often wrong with those that read taps."""
    for step in (-1, 1):
        taps = tuple(tap + step for tap in patient.taps)
        if all(tap in texts[0].states for tap in taps):
            yield "taps", replace(patient, taps=taps), texts
    yield "norm_before_residual", replace(patient, norm_before_residual=not patient.norm_before_residual), texts
    yield "norm_output", replace(patient, norm_output=not patient.norm_output), texts
    if "fc_norm.0.weight" in patient.tensors:
        yield "fc_norm", replace(patient, fc_norm=not patient.fc_norm), texts


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
