"""A training job: build target and drafter, fit, save."""

import copy
import hashlib
import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from hydra.utils import instantiate

from conf.schema import Features, Kind, Reasoning, Run
from decode.opening import (
    base_folder,
    context_of,
    end_tokens_of,
    identity_of,
    open_target,
    open_tokenizer,
    served_folder,
)
from decode.prompts import evenly
from models.adapter import merge
from models.drafter import Drafter
from models.ends import layer_weights
from models.shelf import CARD, Card, family_class, knobs_of, make_folder, save_drafter
from models.target import Target, resolve_dtype
from train import checkpoint, optim
from train.adapt import adapter_of, go_on_from, settle_start
from train.answers import conversations_for
from train.bodiless import Bodiless
from train.chat import Example
from train.data import load_examples, spoken
from train.engines import Engine, check_target, engine_for, put
from train.engines import check as check_engine
from train.features import Live, Reader, Source, laid_out
from train.joint import Moving, Unread, way_to
from train.joint import check as check_joint
from train.judge import Judge, Trial, Verdict, prompts_of
from train.log import plain, sentence
from train.loop import fit
from train.plan import plan
from train.sources import require_there
from train.store import open_store
from train.trainee import Trainee, apply
from train.trees import recommend


def train(run: Run) -> None:
    """Train the run's drafter and leave it in run.out, or with run.plan only say what that would take."""
    if run.plan:
        return plan(run)
    out = Path(run.out)
    engine, config = prepare(run, out)
    with engine.owning(out):
        known, taught, held = conversations(run, quiet=not engine.first)
        config |= {checkpoint.CONTENT: content(taught, held)}
        if not run.overwrite:
            checkpoint.require_same(out, config)
        target = target_for(run, taught + held, engine)
        drafter = taught_by(run, target, known, quiet=not engine.first)
        moving = Moving(target, run.joint, run.optim.steps) if run.joint and isinstance(target, Target) else None
        reader = reader_for(run, target, taught + held, engine)
        teaches = Unread(target.device) if moving else reader
        source = Source(taught, teaches, run.optim.batch, run.seed, room=run.data.packing)
        heldout = Source(held, reader, run.optim.batch, run.seed, keep=True)
        heldout.read_all(quiet=not engine.first)
        if run.overwrite:
            clear(out, engine)
        bf16 = resolve_dtype(run.optim.precision, engine.device) is torch.bfloat16
        trainee = Trainee(drafter, bf16, moving)
        judge = Judge(heldout, engine, trial_of(run, target, drafter, held))
        apply(run.engine, drafter)
        progress = fit(trainee, source, judge, run, engine, checkpoint.Keeper(out, config, run, engine.first))
        with engine.whole():
            if engine.first:
                if moving:
                    heldout = Source(held, reader, run.optim.batch, run.seed)  # read anew
                finish(run, trainee, target, heldout, progress, taught)
        engine.wait()
    engine.end()


def finish(
    run: Run,
    trainee: Trainee,
    target: Target | Bodiless,
    heldout: Source,
    progress: checkpoint.Progress,
    taught: list[Example],
) -> None:
    """Save the drafter as it was when it accepted most."""
    best, out, drafter = progress.best, Path(run.out), trainee.drafter
    assert best is not None
    put(progress.weights, trainee)
    said = card(run, drafter, target, best, taught)
    recommend(drafter, heldout, said)
    way = f"conf={run.conf_name} trained={out}"
    if trainee.moving:
        assert run.joint is not None
        assert best.moved is not None
        said.target = asdict(trainee.moving.save(out / "target", base_folder(run.target)))
        said.training["target"] = {**plain(run.joint), **best.moved}
        way += f" {way_to(run, out / 'target')}"
        print(f"the target has changed: {sentence(best.moved)}. It is in {out / 'target'}")
    if run.peft and run.peft.merge:
        merge(drafter)
    save_drafter(drafter, said, out, torch.bfloat16)
    checkpoint.forget(out)
    print(f"the drafter is in {out}; measure it: python decode/run.py {way}")


def taught_by(run: Run, target: Target | Bodiless, known: list[Example], quiet: bool) -> Drafter:
    """The drafter before its first step."""
    set_seed(run.seed)
    drafter: Drafter = instantiate(run.drafter, _partial_=True)(target.ends).to(target.device)
    if run.optim.steps and not run.joint and not any(True for _ in drafter.parameters()):
        raise ValueError(f"{run.drafter['_target_']} has no weights to train: it is only counted. Set optim.steps=0")
    target.tap(drafter.taps)
    before, said = spoken(known)
    counts = torch.bincount(said, minlength=target.identity.vocabulary)
    if run.init_from:
        go_on_from(run, drafter, target.ends, counts, quiet)
        return drafter
    drafter.learn_vocabulary(counts)
    drafter.learn_successors(before, said)
    drafter.inherit(lambda number: layer_weights(served_folder(run.target), number))
    return drafter


def target_for(run: Run, examples: list[Example], engine: Engine) -> Target | Bodiless:
    """The target, without its body where features of all `examples` are on disk and nothing is decoded."""
    if run.data.features is Features.cached and not (run.log.prompts or run.target.trust_remote_code):
        alone = Bodiless(run.target)
        alone.tap(instantiate(run.drafter, _partial_=True)(alone.ends).taps)
        if not open_store(run.data.store, alone, examples).missing(examples):
            return alone
    return open_target(run.target, engine.spread if run.engine.shard_target else None, hasten=run.joint is None)


def trial_of(run: Run, target: Target | Bodiless, drafter: Drafter, held: list[Example]) -> Trial | None:
    """The short decode of every evaluation, where log.prompts asks for one."""
    if not run.log.prompts or isinstance(target, Bodiless):
        return None
    twin = copy.deepcopy(drafter, {id(target.ends): target.ends}).to(target.device, target.dtype).eval()
    prompts = [prompt for prompt in prompts_of(held, run.log.prompts) if len(prompt) + run.log.tokens <= target.context]
    depth = min(run.decode.depth, len(drafter.counts(*laid_out([held[:1]])[1:3])))
    return Trial(target, twin, prompts, run.log.tokens, depth)


def extract(run: Run) -> None:
    """The command: write what the target makes of the run's conversations to the store that `data.features=cached` reads."""
    require_parts(run)
    state = PartialState(cpu=not torch.cuda.is_available())  # one process, or those that torchrun or accelerate started
    _, taught, held = conversations(run, quiet=not state.is_main_process)
    target = open_target(run.target)
    drafter: Drafter = instantiate(run.drafter, _partial_=True)(target.ends)
    target.tap(drafter.taps)
    store = open_store(run.data.store, target, taught + held)
    state.wait_for_everyone()
    store.fill(target, taught + held, state.process_index, state.num_processes)
    state.wait_for_everyone()
    if state.is_main_process:
        print(f"the features of {len(taught + held):,} conversations are in {store.folder}")


def conversations(run: Run, quiet: bool) -> tuple[list[Example], list[Example], list[Example]]:
    """All conversations that may teach, those of them that do, and those held out; the target's weights are not needed."""
    tokenizer = open_tokenizer(run.target)
    longest = min(run.data.longest, context_of(run.target))
    kept = run.data.reasoning is Reasoning.keep
    rows = conversations_for(run, quiet=quiet)
    examples = load_examples(rows, tokenizer, end_tokens_of(run.target, tokenizer), longest, kept)
    known, held = split(examples, run.data.heldout)
    return known, some(known, run.data.conversations), held


def content(taught: list[Example], held: list[Example]) -> str:
    """What the conversations say, in a few letters: runs on other text are other runs."""
    told = [len(taught), *((example.input_ids, example.loss_mask) for example in [*taught, *held])]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def reader_for(run: Run, target: Target | Bodiless, examples: list[Example], engine: Engine) -> Reader:
    """The target, or a store on disk that holds what it makes of `examples`."""
    if run.data.features is Features.online:
        assert isinstance(target, Target)
        return Live(target)
    taps = target.taps
    store = open_store(run.data.store, target, examples)
    engine.wait()  # all see the same shards before any writes
    if isinstance(target, Target):
        store.fill(target, examples, engine.rank, engine.ranks)
        engine.wait()
        store.look()
        target.tap(taps)
    return store


def identity(run: Run, ranks: int) -> dict[str, Any]:
    """What must be the same for a run to go on where it stopped: all that shapes the weights but what the data say.

    Of micro-batches and ranks only the product does.
    """
    together = run.optim.batch * run.optim.accumulate * ranks
    shaping = {
        "target": asdict(run.target),
        "drafter": run.drafter,
        "data": {key: value for key, value in asdict(run.data).items() if key != "store"},
        "optim": {
            key: value for key, value in (asdict(run.optim) | {"together": together}).items() if key != "accumulate"
        },
    }
    told = {f"{part}.{key}": str(value) for part, values in shaping.items() for key, value in values.items()}
    return {
        **told,
        "seed": str(run.seed),
        "init_from": str(run.init_from),
        "peft": str(run.peft),
        "joint": str(run.joint),
    }


def prepare(run: Run, out: Path) -> tuple[Engine, dict[str, Any]]:
    """The engine and what shapes the weights, with every complaint that needs no data and no weights."""
    optim.check(run.optim)
    if not require_parts(run).needs_training:
        raise ValueError(
            f"{run.drafter['_target_']} needs no training; measure it: python decode/run.py conf={run.conf_name}"
        )
    if (
        min(run.log.evaluate_every, run.log.save_every, run.log.keep) < 1
        or min(run.log.prompts, run.log.tokens - 2) < 0
    ):
        raise ValueError(
            "log.evaluate_every and log.save_every count steps; give at least 1, or more than optim.steps for never. log.keep is at least 1, log.tokens 2"
        )
    if (out / CARD).exists() and not run.overwrite:
        raise ValueError(f"{out} holds a finished drafter; choose out=, or overwrite=true to train it again")
    resolve_dtype(run.optim.precision, torch.device("cpu"))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    kind = run.engine.kind if run.optim.steps else Kind.auto  # where nothing is trained, nothing is shared
    check_engine(kind, ranks, run.engine.offload, run.optim.clip_value)
    check_target(run, ranks)
    run.optim.accumulate = optim.accumulated(run.optim, ranks)
    config = identity(run, ranks)
    if not run.overwrite:
        checkpoint.require_same(out, config)
    make_folder(out)
    return engine_for(kind, run.engine.offload), config


def require_parts(run: Run) -> type[Drafter]:
    """The drafter's family. Raises ValueError where none, none that there is, or none with these knobs is chosen, and for missing data."""
    if "_target_" not in run.drafter:
        raise ValueError("no drafter is chosen; give drafter= or name one in your conf, such as `- /drafter: medusa`")
    family = family_class(run.drafter["_target_"], knobs_of(run.drafter))
    require_there(run.data)
    if run.target.adapter:
        identity_of(run.target)  # it fits
    settle_start(run)
    if run.joint:
        check_joint(run, family)
    return family


def clear(out: Path, engine: Engine) -> None:
    """Drop what an earlier run left in `out`, now that nothing is left to complain of."""
    if engine.first:
        checkpoint.forget(out)
        (out / CARD).unlink(missing_ok=True)
    engine.wait()


def split(examples: list[Example], heldout: int) -> tuple[list[Example], list[Example]]:
    """The last `heldout` conversations are for evaluation, the others teach."""
    if not 0 < heldout < len(examples):
        raise ValueError(
            f"data.heldout={heldout} of {len(examples)} conversations leaves none to {'train on' if heldout else 'evaluate with'}; change it"
        )
    return examples[:-heldout], examples[-heldout:]


def some(examples: list[Example], count: int | None) -> list[Example]:
    """`count` of the conversations, taken evenly over the file, or all."""
    if count is None:
        return examples
    if count < 1:
        raise ValueError(f"data.conversations={count} leaves nothing to train on; give at least 1, or null for all")
    return evenly(examples, count)


def card(run: Run, drafter: Drafter, target: Target | Bodiless, best: Verdict, taught: list[Example]) -> Card:
    """What the drafter's card says, but for its tree."""
    training = {
        "conf": run.conf_name,
        "data": run.data.path,
        "conversations": len(taught),
        "longest": max(len(example.input_ids) for example in taught),
        "tokens": sum(len(example.input_ids) for example in taught),
        "answer_tokens": sum(sum(example.loss_mask) for example in taught),
        "optim": {**plain(run.optim), "betas": list(run.optim.betas)},
        "best": {"step": best.step, "tau": best.tau, "low": best.low, "high": best.high, "decoded": best.decoded},
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
        training=training,
        acceptance=best.acceptance,
        meaning=drafter.meaning(),
        adapter=adapter_of(run),
    )
