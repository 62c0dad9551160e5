"""What a run would take, before anything of it loads: parameters, memory a rank, disk, tokens, steps and time.

P parameters that are trained, N ranks, D width, L taps.
"""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from hydra.utils import instantiate
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from conf.schema import Features, Kind, Run
from decode.opening import config_of, worn_by
from models.drafter import Drafter, FeatureBatch
from models.ends import Ends
from models.packed import packs
from models.target import resolve_dtype
from models.worn import skeleton
from train.joint import outline
from train.optim import accumulated
from train.trainee import Trainee, apply

ORDER = (Kind.ddp, Kind.zero1, Kind.zero2, Kind.fsdp2, Kind.zero3)  # the simplest first
SLACK = 0.95  # of a device's memory that a run may fill
PROBE = 3e11  # floating-point operations that a pass of the probe may cost: seconds
FP32 = 4
CONTEXT = 0.6e9  # bytes of a CUDA context


@dataclass(frozen=True)
class Machine:
    """What the run is planned for."""

    ranks: int
    memory: float  # bytes a rank
    device: torch.device


@dataclass(frozen=True)
class Sizes:
    """What memory follows from, in numbers and bytes."""

    trained: int  # parameters
    frozen: int
    target: float  # bytes of the target as it is loaded
    layers: float  # of them those of its layers, where these are shared out
    gathered: float  # bytes of those that a pass has whole at a time: the one that computes, and the next
    row: float  # bytes of what the target makes of one token
    batch: float  # tokens that a rank reads at once
    held: float  # tokens held out, whose features stay in memory
    activations: float  # bytes of a forward and backward pass, beyond weights and gradients
    process: float  # bytes of the process before anything loads
    aside: bool  # moments and the weights that they step are in main memory, whatever the device
    multiplied: float  # the target's weights, as often as a step multiplies a token with them


def plan(run: Run) -> None:
    """The command: print what the run would take, and which engine fits where the chosen one does not."""
    console, machine = Console(), machine_of(run)
    empty = float(psutil.Process().memory_info().rss) if machine.device.type == "cpu" else CONTEXT
    run.optim.accumulate = accumulated(run.optim, machine.ranks)
    config = config_of(run.target)
    worn_by(run.target)
    drafter, ends, model = outlined(run, config)
    tokens = min(run.data.longest, getattr(config, "max_position_embeddings", run.data.longest))
    probed = probe(run, config, drafter, ends, tokens, machine.device)
    sizes = sizes_of(run, drafter, ends, model, tokens, probed, empty)
    kind = chosen(run, machine)
    console.print(
        f"{run.conf_name}: {sizes.trained:,} parameters are trained, {sizes.frozen:,} of {run.target.name} are frozen"
    )
    console.print(table_of(parts(sizes, kind, machine), kind, machine))
    for sentence in (verdict(sizes, kind, machine), *amounts(run, sizes, machine, tokens, probed)):
        console.print(sentence)


def machine_of(run: Run) -> Machine:
    """The machine that `machine` describes, such as 8x80, else this one. Raises ValueError where it describes none."""
    if run.machine is not None:
        given = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", run.machine)
        if not given:
            raise ValueError(f"machine={run.machine} describes none; give ranks and the GB of each, such as 8x80")
        return Machine(int(given[1]), int(given[2]) * 1e9, torch.device("cuda"))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        return Machine(ranks, float(torch.cuda.mem_get_info()[0]), torch.device("cuda"))
    return Machine(ranks, psutil.virtual_memory().available / ranks, torch.device("cpu"))


def chosen(run: Run, machine: Machine) -> Kind:
    """The engine that the run would use."""
    if run.engine.kind is not Kind.auto:
        return run.engine.kind
    return Kind.single if machine.ranks == 1 else Kind.ddp


def outlined(run: Run, config: PretrainedConfig) -> tuple[Drafter, Ends, PreTrainedModel]:
    """The drafter, the target's ends and the target, without their numbers."""
    model = skeleton(config)
    with torch.device("meta"):
        ends = Ends.of(model)
        drafter: Drafter = instantiate(run.drafter, _partial_=True)(ends)
    return drafter, ends, model


def sizes_of(
    run: Run, drafter: Drafter, ends: Ends, model: PreTrainedModel, tokens: int, probed: "Probed | None", process: float
) -> Sizes:
    """The sizes of a run whose rows are `tokens` long, in a process that takes `process` bytes before anything loads."""
    learned, kept, passes = outline(run.joint, model)
    every = sum(parameter.numel() for parameter in model.parameters())
    frozen = every - learned if run.joint and run.joint.r is None else every
    device = torch.device("cuda" if run.machine or torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype(run.target.dtype, device)
    item = dtype.itemsize
    tied = ends.head is ends.embedding
    body = {"4bit": 0.5, "8bit": 1.0}.get(run.target.quantization or "", item)
    alone = run.data.features is Features.cached and not run.log.prompts
    edges = ends.head.numel() * (1 if tied else 2)
    target = edges * item + (0 if alone else (frozen - edges) * body)
    shared = run.engine.shard_target and not alone
    layers = (frozen - edges) * body if shared else 0.0
    if not alone and not shared and not run.joint and packs(device, dtype):
        copies = 2 if dtype == torch.float32 else 1  # laid out for a tree, and in fp32 for a single row
        target += copies * ((frozen - edges) * body + ends.head.numel() * item)
    batch = run.optim.batch * (run.data.packing or tokens)
    trained = learned + sum(p.numel() for _, group in drafter.groups() for p in group)
    row = (len(drafter.taps) + 1) * ends.width * item
    activations = (probed.bytes if probed else estimated(drafter, batch)) + batch * kept * FP32
    gathered = 2 * layers / ends.config.num_hidden_layers
    return Sizes(
        trained, frozen, target, layers, gathered, row, batch, run.data.heldout * tokens, activations, process,
        run.engine.offload, passes * every,
    )  # fmt: skip


def estimated(drafter: Drafter, tokens: float) -> float:
    """Bytes that a forward pass keeps: the inputs and outputs of every matrix at every token, once a depth.

    Output matrices are left out: logits exist in chunks. A bound on paper, where nothing can be measured.
    """
    mask, document = torch.ones(1, 64, dtype=torch.bool), torch.zeros(1, 64, dtype=torch.long)
    depths = len(drafter.counts(mask, document))
    named = [(name, part.weight.shape) for name, part in drafter.named_modules() if isinstance(part, nn.Linear)]
    matrices = [shape for name, shape in named if "lm_head" not in name]
    return depths * tokens * sum(map(sum, matrices)) * FP32


def parts(sizes: Sizes, kind: Kind, machine: Machine) -> dict[str, float]:
    """Bytes of each part on one rank at the moment that needs most, under an engine of this kind."""
    ranks, weights = machine.ranks, float(FP32 * sizes.trained)
    sharded = kind in (Kind.fsdp2, Kind.zero3)
    moments_shared = sharded or kind in (Kind.zero1, Kind.zero2)
    master = weights / ranks if kind in (Kind.zero1, Kind.zero2, Kind.zero3) else 0
    buckets = weights if kind is Kind.ddp and ranks > 1 else 0
    found = {
        "process": sizes.process,
        "target": sizes.target - sizes.layers + sizes.layers / ranks + (sizes.gathered if ranks > 1 else 0),
        "drafter": weights + master + (weights / ranks if sharded else 0),
        "gradients": weights + buckets + (weights / ranks if sharded or kind is Kind.zero2 else 0),
        "moments": 2 * weights / (ranks if moments_shared else 1),
        "features": 2 * sizes.batch * sizes.row,
        "held-out features": sizes.held * sizes.row,
        "activations": sizes.activations,
    }
    if sizes.aside and machine.device.type != "cpu":
        found["drafter"], found["moments"] = found["drafter"] - master, 0.0
    if machine.device.type == "cpu":  # where a GPU's main memory would hold them
        found["best weights"] = weights
        found["activations"] = max(found["activations"], 3 * weights)  # or the copies that a checkpoint writes
    return found


def table_of(found: Mapping[str, float], kind: Kind, machine: Machine) -> Table:
    """The parts, and what they come to."""
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=f"GB a rank, engine={kind.value}, {machine.ranks} ranks of {machine.memory / 1e9:.1f} GB",
    )
    table.add_column("part")
    table.add_column("GB", justify="right")
    for name, size in found.items():
        table.add_row(name, f"{size / 1e9:.2f}")
    table.add_row("all", f"{sum(found.values()) / 1e9:.2f}")
    return table


def verdict(sizes: Sizes, kind: Kind, machine: Machine) -> str:
    """Whether it fits, and what would."""
    room = SLACK * machine.memory
    if sum(parts(sizes, kind, machine).values()) <= room:
        return f"engine={kind.value} fits"
    fitting = [other for other in ORDER if machine.ranks > 1 and sum(parts(sizes, other, machine).values()) <= room]
    if fitting:
        return f"engine={kind.value} does not fit; engine={fitting[0].value} does"
    if sizes.target > room / 2 and not sizes.layers:
        return (
            f"no engine fits: each rank holds the target, {sizes.target / 1e9:.1f} GB of {machine.memory / 1e9:.1f}. Share it out with engine.shard_target=true, let "
            "scripts/extract.py write its features once (target.device_map=auto spreads it) and train with data.features=cached, or quantize it with target.quantization=4bit"
        )
    return "no engine fits; lower optim.batch (with optim.together the step stays the same), data.longest or data.heldout, or set engine.checkpointing=true"


def amounts(run: Run, sizes: Sizes, machine: Machine, tokens: int, probed: "Probed | None") -> list[str]:
    """Tokens, steps, disk and time."""
    step = sizes.batch * run.optim.accumulate * machine.ranks
    said = [
        f"{run.optim.steps:,} steps of up to {step:,.0f} tokens: rows of up to {tokens} tokens, {run.optim.batch} a batch, {run.optim.accumulate} batches a rank"
    ]
    if run.data.features is Features.cached:
        rows = (
            f"{run.data.conversations:,} conversations and {run.data.heldout:,} held out take up to"
            if run.data.conversations
            else "every conversation takes up to"
        )
        count = (run.data.conversations + run.data.heldout) if run.data.conversations else 1
        said.append(f"features on disk: {rows} {count * tokens * sizes.row / 1e9:.2f} GB")
    if probed is None:
        return [*said, "time: not measured, as this machine cannot run a step of it"]
    reading = (
        0.0 if run.data.features is Features.cached else 2 * sizes.multiplied * probed.second_per_flop * sizes.batch
    )
    seconds = (probed.seconds * sizes.batch + reading) * run.optim.accumulate * run.optim.steps
    said.append(
        f"time: {seconds / 60:.1f} minutes, from a step measured on this machine ({1 / probed.seconds:,.0f} tokens/s a rank"
        + (", the target's reading estimated)" if reading else ")")
    )
    return said


@dataclass(frozen=True)
class Probed:
    """What a step of the drafter took on this machine."""

    bytes: float  # beyond weights and gradients, scaled to a whole batch
    seconds: float  # a token
    second_per_flop: float


def probe(
    run: Run, config: PretrainedConfig, outline: Drafter, shape: Ends, tokens: int, device: torch.device
) -> Probed | None:
    """Run a step of a drafter of this shape on random features; None where it would take too long or too much memory."""
    trained = sum(parameter.numel() for parameter in outline.parameters())
    ends_size = 2 * shape.head.numel()
    depths = len(outline.counts(torch.ones(1, 64, dtype=torch.bool), torch.zeros(1, 64, dtype=torch.long)))
    rows = min(run.optim.batch, int(PROBE / (6 * trained * depths * tokens + 1)))
    if (
        device.type != "cpu"
        or not (rows and trained)
        or 4 * (2 * trained + ends_size) > psutil.virtual_memory().available / 2
    ):
        return None
    ends = Ends(torch.zeros(shape.head.shape), torch.randn(shape.head.shape) * 0.02, None, config)
    drafter: Drafter = instantiate(run.drafter, _partial_=True)(ends)
    apply(run.engine, drafter)
    trainee = Trainee(drafter, resolve_dtype(run.optim.precision, device) is torch.bfloat16)
    batch = invented(rows, tokens, ends, len(drafter.taps))
    trainee(batch).total.backward()  # allocates the gradients
    before, began = peak_from_here(), time.perf_counter()
    trainee(batch).total.backward()
    seconds = time.perf_counter() - began
    return Probed(max(peak() - before, 0.0) * run.optim.batch / rows, seconds / (rows * tokens), second_per_flop())


def invented(rows: int, tokens: int, ends: Ends, taps: int) -> FeatureBatch:
    """A batch of noise: a quarter of each row is prompt."""
    place = torch.arange(tokens).expand(rows, tokens)
    hidden = torch.randn(rows, tokens, ends.width)
    ids = torch.randint(0, ends.vocabulary, (rows, tokens))
    return FeatureBatch(ids, place >= tokens // 4, torch.zeros_like(place), place, hidden.repeat(1, 1, taps), hidden)


def peak_from_here() -> float:
    """Forget the peak of this process's memory so far, where the kernel can; bytes in use now."""
    if (forget := Path("/proc/self/clear_refs")).exists():
        forget.write_text("5")
    return float(psutil.Process().memory_info().rss)


def peak() -> float:
    """The most bytes that this process has had in use since; where the kernel does not say, the bytes in use now."""
    said = Path("/proc/self/status")
    lines = said.read_text().splitlines() if said.exists() else []
    high = [float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return high[0] if high else float(psutil.Process().memory_info().rss)


def second_per_flop() -> float:
    """Seconds that one operation of a product of 512 rows takes here."""
    left, right = torch.randn(512, 1024), torch.randn(1024, 1024)
    left @ right
    began = time.perf_counter()
    left @ right
    return (time.perf_counter() - began) / (2 * left.numel() * len(right.T))
