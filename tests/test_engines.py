"""Engines: however many processes share a run and whatever they share, it is the same run."""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.schema import Engine as How
from conf.schema import Kind, Optim
from decode.engine import generate
from decode.opening import open_drafter, open_target
from models.drafter import Budget, FeatureBatch, Plain
from models.eagle3 import Eagle3
from models.medusa import Medusa
from models.shelf import read_card
from models.tree import chain
from reference import marked_batch
from runs import composed, said, together
from train import checkpoint, job
from train.engines import check, check_target, engine_for
from train.optim import accumulated, optimizer_for, rate
from train.trainee import Trainee, apply

EXACT = [
    "target.dtype=fp32",
    "optim.precision=fp32",
    "optim.lr=1e-3",
    "optim.batch=2",
    "optim.together=4",
    "log.keep=99",
]
SHORT = [*EXACT, "optim.steps=8", "optim.warmup=2", "log.evaluate_every=4", "log.save_every=4", "drafter.heads=2"]
LONG = [*EXACT, "optim.steps=30", "optim.warmup=4", "log.evaluate_every=15", "log.save_every=15"]
SHARING = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]


def ranks(count: int, folder: Path, out: str, *words: str) -> str:
    """Train in `folder`/`out` on so many ranks, in the environment that torchrun gives; what the first rank said."""
    return together(count, "runs", f"out={out}", *words, folder=folder, name=out)[0]


def losses(text: str) -> list[float]:
    """Every step's loss to the last digit."""
    return [float(loss) for loss in re.findall(r"exactly \d+ (\S+)", text)]


def state(out: Path) -> dict[str, Tensor]:
    folder = checkpoint.found(out)
    assert folder is not None
    return load_file(folder / checkpoint.TENSORS)


def backward(out: Path, step: int) -> None:
    """Bring a finished run back to where it was after `step`."""
    for file in ("drafter.yaml", "model.safetensors"):
        (out / file).unlink()
    for folder in checkpoint.every(out):
        if checkpoint.step_of(folder) > step:
            shutil.rmtree(folder)


def near(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Weights within 1e-5, and moments by name within 1e-5 of their size."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        size = 1.0 if name.startswith("model") else value.double().abs().max().item() or 1.0
        assert (value.double() - other[name].double()).abs().max().item() <= 1e-5 * size, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    """One rank's losses over 30 steps; its run stays in `folder`/alone."""
    return losses(ranks(1, folder, "alone", *LONG))


@pytest.fixture(scope="module")
def briefly(folder: Path) -> list[float]:
    """One rank's losses over 8 steps; its run stays in `folder`/short1."""
    return losses(ranks(1, folder, "short1", *SHORT))


def decodes(out: Path) -> None:
    """The drafter in `out` loads, and what is written with it is the target's own text."""
    target = open_target(composed("target.dtype=fp32").target)
    drafter = open_drafter(out, read_card(out), target)
    prompt = [[1, 2, 3]]
    drafted, plain = (generate(target, each, prompt, 12, Budget(tuple(chain(2)), 3)) for each in (drafter, Plain()))
    assert drafted.generations[0].tokens == plain.generations[0].tokens


def test_two_ranks_that_share_their_weights_are_the_run_of_one(folder, briefly):
    other = losses(ranks(2, folder, "short2", *SHORT, "engine=fsdp2"))
    assert len(briefly) == 8
    assert other == pytest.approx(briefly, abs=1e-5)
    near(state(folder / "short1"), state(folder / "short2"))
    decodes(folder / "short2")
    whole = (folder / "short2" / "model.safetensors").read_bytes()
    backward(folder / "short2", 4)
    assert losses(ranks(2, folder, "short2", *SHORT, "engine=fsdp2")) == other[4:]
    assert (folder / "short2" / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("kind", ["fsdp2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "zero3"))])
def test_a_target_that_is_shared_out_teaches_as_a_whole_one(kind, folder, briefly):
    """Each of two ranks holds half of every layer, which are all even, beside embedding, head and last norm."""
    shared = losses(ranks(2, folder, f"shared-{kind}", *SHORT, f"engine={kind}", "engine.shard_target=true"))
    assert shared == pytest.approx(briefly, abs=1e-5)
    near(state(folder / "short1"), state(folder / f"shared-{kind}"))
    decodes(folder / f"shared-{kind}")
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    ends = 2 * 257 * 64 + 64
    logs = [folder / f"shared-{kind}.{rank}.log" for rank in range(2)]
    held = [int(re.search(r"holds (\d+) bytes", log.read_text())[1]) for log in logs]
    assert held == [4 * (ends + layer)] * 2  # of two layers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_what_is_kept_in_main_memory_steps_the_same(kind, folder, briefly):
    words = [*SHORT, f"engine={kind}", "engine.offload=true"]
    assert losses(ranks(2, folder, f"off-{kind}", *words)) == pytest.approx(briefly, abs=1e-5)
    near(state(folder / "short1"), state(folder / f"off-{kind}"))
    whole = (folder / f"off-{kind}" / "model.safetensors").read_bytes()
    backward(folder / f"off-{kind}", 4)
    assert losses(ranks(2, folder, f"off-{kind}", *words)) == pytest.approx(briefly[4:], abs=1e-5)
    assert (folder / f"off-{kind}" / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize(
    ("count", "words", "message"),
    [
        (1, [], "shares the target among processes and there is one; start it with torchrun"),
        (2, ["data.features=cached"], "each process reads for itself: write the features first"),
        (2, ["log.prompts=2"], "each process decodes by itself; set log.prompts=0"),
        (2, ["target.device_map=auto"], "which place the target themselves; choose one"),
        (2, ["target.adapter=some", "target.merge=false"], "set target.merge=true"),
    ],
)
def test_a_target_that_cannot_be_shared_out_is_refused(count, words, message):
    check_target(composed(*words), count)
    with pytest.raises(ValueError, match=rf"engine\.shard_target=true .*{message}"):
        check_target(composed("engine.shard_target=true", *words), count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARING)
def test_thirty_steps_of_two_ranks_are_those_of_one(kind, folder, alone):
    shared = losses(ranks(2, folder, kind, *LONG, f"engine={kind}"))
    assert len(shared) == len(alone) == 30
    assert shared == pytest.approx(alone, abs=1e-5)
    near(state(folder / "alone"), state(folder / kind))
    decodes(folder / kind)
    whole = (folder / kind / "model.safetensors").read_bytes()
    backward(folder / kind, 15)
    assert losses(ranks(2, folder, kind, *LONG, f"engine={kind}")) == shared[15:]
    assert (folder / kind / "model.safetensors").read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARING)
def test_a_run_goes_on_under_another_engine_on_other_ranks(kind, folder, alone):
    shutil.copytree(folder / "alone", folder / f"from-alone-{kind}")
    backward(folder / f"from-alone-{kind}", 15)
    assert losses(ranks(2, folder, f"from-alone-{kind}", *LONG, f"engine={kind}")) == pytest.approx(
        alone[15:], abs=1e-5
    )
    backward(folder / f"from-alone-{kind}", 15)
    assert losses(ranks(1, folder, f"from-alone-{kind}", *LONG)) == alone[15:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"],
        ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m"],
        ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--module", "--no_local_rank"],
    ],
    ids=["torchrun", "accelerate launch", "deepspeed"],
)
def test_every_launcher_starts_the_run(start, folder, alone):
    out = f"by{len(start)}{start[1][:5]}"
    code, text, errors = said(*start, "runs", f"out={out}", *LONG, cwd=folder)
    assert code == 0, errors
    assert losses(text) == pytest.approx(alone, abs=1e-5)


def test_the_conversations_of_a_step_are_shared_among_ranks():
    optim = Optim(batch=2, accumulate=1, together=12)
    assert [accumulated(optim, count) for count in (1, 2, 3, 6)] == [6, 3, 2, 1]
    assert accumulated(Optim(accumulate=5), 4) == 5
    with pytest.raises(ValueError, match=r"optim\.together=12 .* on 4 processes; .*a multiple of 8 would do"):
        accumulated(optim, 4)


def test_an_engine_that_cannot_run_here_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="engine=single is one process and 2 were started"):
        check(Kind.single, 2)
    with pytest.raises(
        ValueError, match="engine=zero2 shares work among processes and there is one; start it with torchrun"
    ):
        check(Kind.zero2, 1)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ValueError, match="engine=zero3 needs deepspeed, which is not installed"):
        check(Kind.zero3, 2)
    check(Kind.fsdp2, 2)
    with pytest.raises(ValueError, match=r"engine\.offload=true is for engine=zero1, zero2 or zero3, not fsdp2"):
        check(Kind.fsdp2, 2, offload=True)
    with pytest.raises(ValueError, match=r"engine=zero1 clips the gradient's norm alone; set optim\.clip_value=null"):
        check(Kind.zero1, 2, clip_value=0.5)


@pytest.mark.parametrize(
    ("word", "message"),
    [("engine=fsdp2", "engine=fsdp2 shares work"), ("optim.together=3", "optim.together=3 conversations")],
)
def test_a_run_that_cannot_be_shared_ends_before_anything_is_made(word, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        job.train(composed(f"out={tmp_path / 'out'}", "optim.batch=2", word))
    assert list(tmp_path.iterdir()) == []


def talk(taps: int = 0) -> FeatureBatch:
    """Two conversations for a target of conftest's size."""
    return marked_batch(
        ["0" * 24, "0" * 20 + "----"], ["." * 6 + "x" * 18, "." * 9 + "x" * 11 + "...."], 272, 32, taps, seed=0
    )


def medusa(target, **knobs) -> Medusa:
    torch.manual_seed(0)
    return Medusa(target.ends, heads=2, layers=2, **knobs)


def gradient(trainee: Trainee, batch) -> tuple[float, dict[str, Tensor], int]:
    """The loss on `batch`, its gradients, and how many bytes waited for the backward pass."""
    kept = {}

    def note(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        loss = trainee(batch).total
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in trainee.named_parameters()}, sum(kept.values())


def eagle3(target, layers: int) -> Eagle3:
    torch.manual_seed(0)
    return Eagle3(target.ends, taps=(1, 2), steps=5, layers=layers, vocabulary=8, window=9)


@pytest.mark.parametrize(
    ("make", "taps", "left"),
    [
        (partial(medusa, head="shared", vocabulary=8), 0, 1.0),
        (partial(eagle3, layers=1), 2, 0.5),
        (partial(eagle3, layers=3), 2, 0.5),
    ],
    ids=["medusa", "eagle3", "eagle3 of 3 layers"],
)
def test_forgetting_activations_changes_memory_and_nothing_else(make, taps, left, llama):
    """Of EAGLE-3 a step's inputs stay: less than half of all."""
    batch = talk(taps)
    plain, forgetful = (Trainee(make(llama.target)) for _ in range(2))
    apply(How(checkpointing=True), forgetful.drafter)
    one, other = gradient(plain, batch), gradient(forgetful, batch)
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    assert other[2] < left * one[2]


@pytest.mark.slow
def test_compiled_layers_teach_the_same(llama):
    batch = talk()
    plain, compiled = (Trainee(medusa(llama.target)) for _ in range(2))
    apply(How(compile=True), compiled.drafter)
    one, other = gradient(plain, batch), gradient(compiled, batch)
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert all(torch.allclose(value, other[1][name], atol=1e-4) for name, value in one[1].items())
    assert plain.state_dict().keys() == compiled.state_dict().keys()


def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(llama):
    batch = talk()
    exact, short = (Trainee(medusa(llama.target), bf16) for bf16 in (False, True))
    one, other = gradient(exact, batch), gradient(short, batch)
    assert one[0] != other[0] == pytest.approx(one[0], rel=0.02)
    assert {value.dtype for value in other[1].values()} == {torch.float32}


class Uneven(Medusa):
    """Its second head learns four times as fast."""

    def groups(self):
        slow, fast = (list(head.parameters()) for head in self.lm_heads)
        return [(1.0, [*self.blocks.parameters(), *slow]), (4.0, fast)]


def test_every_group_has_a_rate_of_its_own(llama):
    """AdamW's first step is as long as the rate, whatever the gradient."""
    engine, optim = engine_for(Kind.auto), Optim(lr=1e-3, warmup=4, steps=9)
    drafter = Uneven(llama.target.ends, heads=2)
    before = [head.weight.detach().clone() for head in drafter.lm_heads]
    engine.start(Trainee(drafter), optim)
    engine.learn(talk(), torch.tensor(1.0), last=True)
    engine.step(rate(optim, 0), Optim(clip=1e9))
    moved = [(head.weight - was).abs().median().item() for head, was in zip(drafter.lm_heads, before, strict=True)]
    assert moved == pytest.approx([1e-3 / 4, 4 * 1e-3 / 4], rel=1e-3)
    assert [group["scale"] for group in optimizer_for(drafter.groups(), optim).param_groups] == [1.0, 4.0]


def test_no_number_of_a_gradient_passes_its_own_limit(llama):
    engine, optim = engine_for(Kind.auto), Optim(clip=1e9, clip_value=1e-3)
    engine.start(Trainee(medusa(llama.target)), optim)
    engine.learn(talk(), torch.tensor(1.0), last=True)
    seen = []

    def note(optimizer, args, kwargs):
        seen.extend(parameter.grad.abs().max().item() for parameter in optimizer.param_groups[0]["params"])

    engine.optimizer.register_step_pre_hook(note)
    assert engine.step(1e-3, optim) > 1e-3
    assert max(seen) == pytest.approx(1e-3)
