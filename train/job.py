"""A training job: build target and drafter, fit, save."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from hydra.utils import instantiate

from conf.schema import Features, Reasoning, Run
from decode.opening import open_target, target_folder
from models.adapter import merge
from models.drafter import Drafter
from models.ends import layer_weights
from models.shelf import CARD, Card, family_class, knobs_of, make_folder, save_drafter
from models.target import Target, resolve_dtype
from models.tree import best_tree
from train import checkpoint, optim
from train.adapt import adapter_of, go_on_from, settle_start
from train.answers import conversations_for
from train.chat import Example
from train.data import load_examples, spoken
from train.features import Live, Reader, Source
from train.loop import fit
from train.sources import require_there
from train.store import open_store

MOST_NODES = 64  # of the tree that a card recommends; a measurement takes the first `decode.nodes` of them


def train(run: Run) -> None:
    """Train the run's drafter and leave it in run.out."""
    out, config = Path(run.out), identity(run)
    optim.check(run.optim)
    accelerator = prepare(run, out, config)
    target = open_target(run.target)
    known, taught, held = conversations(run, target)
    set_seed(run.seed)
    drafter: Drafter = instantiate(run.drafter, _partial_=True)(target.ends).to(target.device)
    if run.optim.steps and not any(True for _ in drafter.parameters()):
        raise ValueError(f"{run.drafter['_target_']} has no weights to train: it is only counted. Set optim.steps=0")
    target.tap(drafter.taps)
    before, said = spoken(known)
    counts = torch.bincount(said, minlength=target.identity.vocabulary)
    if run.init_from:
        go_on_from(run, drafter, target.ends, counts, quiet=not accelerator.is_main_process)
    else:
        drafter.learn_vocabulary(counts)
        drafter.learn_successors(before, said)
        drafter.inherit(lambda number: layer_weights(target_folder(run.target), number))
    reader = reader_for(run, target, taught + held, accelerator)
    room = run.data.packing
    source = Source(taught, reader, run.optim.batch, run.seed, room=room)
    heldout = Source(held, reader, run.optim.batch, run.seed, keep=True, room=room)
    heldout.read_all(quiet=not accelerator.is_main_process)
    if run.overwrite:
        clear(out, accelerator)
    began = time.perf_counter()
    acceptance = fit(drafter, source, heldout, run, accelerator, config)
    if accelerator.is_main_process:
        print(f"waiting for features took {source.waited / (time.perf_counter() - began):.1%} of the training time")
        tree = recommended_tree(drafter, heldout)
        if run.peft and run.peft.merge:
            merge(drafter)
        save_drafter(drafter, card(run, drafter, target, tree, acceptance, taught), out, torch.bfloat16)
        checkpoint.forget(out)
        print(f"the drafter is in {out}; measure it: python decode/run.py conf={run.conf_name} trained={out}")
    accelerator.end_training()


def extract(run: Run) -> None:
    """The command: write what the target makes of the run's conversations to the store that `data.features=cached` reads."""
    require_parts(run)
    target = open_target(run.target)
    _, taught, held = conversations(run, target)
    drafter: Drafter = instantiate(run.drafter, _partial_=True)(target.ends)
    target.tap(drafter.taps)
    store = open_store(run.data.store, target, taught + held)
    state = PartialState()  # one process, or those that torchrun or accelerate started
    state.wait_for_everyone()
    store.fill(target, taught + held, state.process_index, state.num_processes)
    state.wait_for_everyone()
    if state.is_main_process:
        print(f"the features of {len(taught + held):,} conversations are in {store.folder}")


def conversations(run: Run, target: Target) -> tuple[list[Example], list[Example], list[Example]]:
    """All conversations that may teach, those of them that do, and those held out."""
    longest = min(run.data.longest, target.context)
    kept = run.data.reasoning is Reasoning.keep
    rows = conversations_for(run, quiet=not PartialState().is_main_process)
    examples = load_examples(rows, target.tokenizer, target.end_tokens, longest, kept)
    known, held = split(examples, run.data.heldout)
    return known, evenly(known, run.data.conversations), held


def reader_for(run: Run, target: Target, examples: list[Example], accelerator: Accelerator) -> Reader:
    """The target, or a store on disk that holds what it makes of `examples`."""
    if run.data.features is Features.online:
        return Live(target)
    taps = target.taps
    store = open_store(run.data.store, target, examples)
    accelerator.wait_for_everyone()  # all see the same shards before any writes
    store.fill(target, examples, accelerator.process_index, accelerator.num_processes)
    accelerator.wait_for_everyone()
    store.look()
    target.tap(taps)
    return store


def identity(run: Run) -> dict[str, Any]:
    """What must be the same for a run to go on where it stopped: all that shapes the weights."""
    shaping = {
        "target": asdict(run.target),
        "drafter": run.drafter,
        "data": {key: value for key, value in asdict(run.data).items() if key != "store"},
        "optim": asdict(run.optim),
    }
    told = {f"{part}.{key}": str(value) for part, values in shaping.items() for key, value in values.items()}
    return {**told, "seed": str(run.seed), "init_from": str(run.init_from), "peft": str(run.peft)}


def prepare(run: Run, out: Path, config: dict[str, Any]) -> Accelerator:
    """The output folder and the accelerator, with every complaint before weights load."""
    if not require_parts(run).needs_training:
        raise ValueError(
            f"{run.drafter['_target_']} needs no training; measure it: python decode/run.py conf={run.conf_name}"
        )
    if min(run.log.evaluate_every, run.log.save_every) < 1:
        raise ValueError(
            "log.evaluate_every and log.save_every count steps; give at least 1, or more than optim.steps for never"
        )
    if (out / CARD).exists() and not run.overwrite:
        raise ValueError(f"{out} holds a finished drafter; choose out=, or overwrite=true to train it again")
    if not run.overwrite:
        checkpoint.require_same(out, config)
    make_folder(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = resolve_dtype(run.optim.precision, device) is torch.bfloat16
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", cpu=device.type == "cpu")
    accelerator.wait_for_everyone()
    return accelerator


def require_parts(run: Run) -> type[Drafter]:
    """The drafter's family. Raises ValueError where none, none that there is, or none with these knobs is chosen, and for missing data."""
    if "_target_" not in run.drafter:
        raise ValueError("no drafter is chosen; give drafter= or name one in your conf, such as `- /drafter: medusa`")
    family = family_class(run.drafter["_target_"], knobs_of(run.drafter))
    require_there(run.data)
    settle_start(run)
    return family


def clear(out: Path, accelerator: Accelerator) -> None:
    """Drop what an earlier run left in `out`, now that nothing is left to complain of."""
    if accelerator.is_main_process:
        checkpoint.forget(out)
        (out / CARD).unlink(missing_ok=True)
    accelerator.wait_for_everyone()


def split(examples: list[Example], heldout: int) -> tuple[list[Example], list[Example]]:
    """The last `heldout` conversations are for evaluation, the others teach."""
    if not 0 < heldout < len(examples):
        raise ValueError(
            f"data.heldout={heldout} of {len(examples)} conversations leaves none to {'train on' if heldout else 'evaluate with'}; change it"
        )
    return examples[:-heldout], examples[-heldout:]


def evenly(examples: list[Example], count: int | None) -> list[Example]:
    """`count` of the conversations, taken evenly over the file, or all."""
    if count is None or count >= len(examples):
        return examples
    if count < 1:
        raise ValueError(f"data.conversations={count} leaves nothing to train on; give at least 1, or null for all")
    return [examples[index * len(examples) // count] for index in range(count)]


def recommended_tree(drafter: Drafter, heldout: Source) -> list[list[int]]:
    """The static tree that held-out text favours, its best nodes first; [] for drafters that make their own."""
    drafter.eval()
    seen = [drafter.ranks(heldout.features(piece), width=10) for piece in heldout.everything()]
    known = [ranks for ranks in seen if ranks is not None]
    return [list(path) for path in best_tree(torch.cat(known), MOST_NODES)] if known else []


def card(
    run: Run, drafter: Drafter, target: Target, tree: list[list[int]], acceptance: dict[str, Any], taught: list[Example]
) -> Card:
    """What the drafter's card says."""
    training = {
        "conf": run.conf_name,
        "data": run.data.path,
        "conversations": len(taught),
        "tokens": sum(len(example.input_ids) for example in taught),
        "answer_tokens": sum(sum(example.loss_mask) for example in taught),
        "optim": {**asdict(run.optim), "betas": list(run.optim.betas)},
        "seed": run.seed,
        "init_from": run.init_from,
        "outrider": version("outrider"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return Card(
        run.drafter["_target_"],
        knobs_of(run.drafter),
        asdict(target.identity),
        list(drafter.taps),
        tree,
        training,
        acceptance,
        drafter.meaning(),
        adapter_of(run),
    )
