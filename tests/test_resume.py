"""What a run remembers: killed anywhere it goes on to the same bits, and what it had is never lost."""

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed

from conf.schema import Kind, Optim
from models.medusa import Medusa
from runs import composed, forked
from test_engines import talk
from train import checkpoint, job
from train.checkpoint import Keeper, Progress, throw, thrown
from train.data import write_rows
from train.engines import engine_for, weights_of
from train.judge import Verdict
from train.sources import conversations_of
from train.trainee import Trainee

WORDS = [
    "target.dtype=fp32",
    "optim.precision=fp32",
    "optim.steps=24",
    "optim.warmup=2",
    "log.evaluate_every=2",
    "log.save_every=1",
]


def begun(folder: Path, out: str, *words: str) -> BaseProcess:
    return forked("train", f"out={out}", *WORDS, *words, log=folder / f"{out}.log")


def after(out: Path, step: int, process: BaseProcess) -> None:
    """Wait until the run in `out` has a checkpoint of `step` or a later one."""
    while process.is_alive():
        found = checkpoint.found(out)
        if found is not None and checkpoint.step_of(found) >= step:
            return
        time.sleep(0.002)
    raise AssertionError(out.with_suffix(".log").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    """The drafter of a run that nobody disturbed."""
    process = begun(folder, "whole")
    process.join()
    assert process.exitcode == 0, (folder / "whole.log").read_text()
    return (folder / "whole" / "model.safetensors").read_bytes()


def kill_at_random(folder: Path, whole: bytes, kills: int) -> None:
    """Kill -9 the same run again and again, at moments that fall into steps, evaluations and saves alike."""
    dice, out, log = random.Random(0), folder / f"killed{kills}", folder / f"killed{kills}.log"
    for _ in range(kills):
        before = checkpoint.found(out)
        process = begun(folder, out.name)
        while process.is_alive() and checkpoint.found(out) == before:
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.5))
        process.kill()
        process.join()
        if (out / "drafter.yaml").exists():  # it was faster
            assert (out / "model.safetensors").read_bytes() == whole
            shutil.rmtree(out)
    process = begun(folder, out.name)
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert (out / "model.safetensors").read_bytes() == whole


def test_a_run_killed_while_it_saves_goes_on_to_the_same_bits(folder, whole):
    process = begun(folder, "saving")
    after(folder / "saving", 3, process)
    while not (folder / "saving" / "checkpoints" / ".part").exists() and process.is_alive():
        pass
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    again = begun(folder, "saving")
    again.join()
    assert again.exitcode == 0, (folder / "saving.log").read_text()
    assert (folder / "saving" / "model.safetensors").read_bytes() == whole


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(folder, whole):
    kill_at_random(folder, whole, kills=20)


def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_go_on(folder, whole):
    process = begun(folder, "asked", "log.save_every=99")
    log = folder / "asked.log"
    while not log.exists() or "step 2:" not in log.read_text():  # said when acceptance is measured
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 1
    assert "of 24 and saved; the same command goes on" in log.read_text()
    step = checkpoint.step_of(checkpoint.found(folder / "asked"))
    assert 0 < step < 24
    again = begun(folder, "asked")
    again.join()
    assert again.exitcode == 0, log.read_text()
    assert (folder / "asked" / "model.safetensors").read_bytes() == whole


def small(llama, out: Path, steps: int = 0) -> tuple:
    """A keeper, an engine that took so many steps, and how far it is."""
    torch.manual_seed(0)
    engine, trainee = engine_for(Kind.auto), Trainee(Medusa(llama.target.ends, heads=2))
    engine.start(trainee, Optim())
    progress = Progress()
    for _ in range(steps):
        engine.learn(talk(), torch.tensor(9.0), last=True)
        engine.step(1e-3, Optim())
        progress.step += 1
    return Keeper(out, {"a": "b"}, composed("log.keep=2"), loud=True), engine, progress


def test_a_checkpoint_holds_weights_moments_dice_best_and_what_was_told(llama, tmp_path):
    keeper, engine, progress = small(llama, tmp_path, steps=3)
    progress.hear(Verdict(3, 1.5, 1.4, 1.6, [0.5], [0.5], [9], None), engine)
    set_seed(7)
    keeper.save(engine, progress)
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    _, other, _ = small(llama, tmp_path, steps=1)
    again, tensors, dice = keeper.open(other.trainee)
    other.recall(tensors)
    throw(dice, other)
    assert [random.random(), np.random.rand(), torch.rand(()).item()] == drawn
    assert (again.step, again.best, again.behind) == (3, progress.best, 0)
    assert all(torch.equal(value, again.weights[name]) for name, value in weights_of(engine.trainee).items())
    mine, theirs = engine.remembered(), other.remembered()
    assert mine.keys() == theirs.keys()
    assert any(name.endswith("exp_avg_sq") for name in mine)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    rest = json.loads((checkpoint.found(tmp_path) / checkpoint.REST).read_text())
    assert rest["config"] == {"a": "b"}
    assert (rest["run"]["target"]["name"], rest["run"]["optim"]["schedule"]) == ("tiny", "cosine")
    assert rest["code"] == checkpoint.code_digest()


def test_the_newest_checkpoints_stay(llama, tmp_path):
    keeper, engine, progress = small(llama, tmp_path)
    for progress.step in (9, 10, 100):
        keeper.save(engine, progress)
    assert [checkpoint.step_of(folder) for folder in checkpoint.every(tmp_path)] == [10, 100]


def test_a_full_disk_leaves_the_last_checkpoint(llama, tmp_path):
    keeper, engine, progress = small(llama, tmp_path)
    progress.step = 1
    keeper.save(engine, progress)
    progress.step = 2
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(
            ValueError, match=r"the checkpoint after step 2 cannot be written .* the one after step 1 stays"
        ):
            keeper.save(engine, progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    keeper.save(engine, progress)
    assert checkpoint.step_of(checkpoint.found(tmp_path)) == 2


def test_other_dice_belong_to_other_ranks(llama, tmp_path):
    _, engine, _ = small(llama, tmp_path)
    engine.rank = 1
    before = torch.get_rng_state()
    throw([thrown(engine.device)], engine)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_runs_do_not_share_a_folder(tmp_path):
    (tmp_path / "out").mkdir()
    held = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(
        ValueError, match=r"another run is writing to .*out; wait for it, or choose another folder with out="
    ):
        job.train(composed(f"out={tmp_path / 'out'}"))
    os.close(held)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_refused():
    with pytest.raises(ValueError, match=r"/proc/nowhere cannot be written to \(.*\); choose another folder with out="):
        job.train(composed("out=/proc/nowhere"))


def test_a_run_on_other_text_is_another_run(tmp_path, monkeypatch):
    rows = list(conversations_of(Path(job.__file__).parent / "corpus" / "tiny.jsonl"))
    write_rows(tmp_path / "data.jsonl", rows)
    words = [
        f"out={tmp_path / 'out'}",
        f"data.path={tmp_path / 'data.jsonl'}",
        *WORDS[:2],
        "optim.steps=3",
        "optim.warmup=1",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "forget", lambda out: None)
        job.train(composed(*words))
    (tmp_path / "out" / "drafter.yaml").unlink()
    write_rows(tmp_path / "data.jsonl", rows[::-1])
    monkeypatch.setattr(job, "open_target", lambda conf: pytest.fail("the weights were loaded"))
    with pytest.raises(ValueError, match=r"another configuration \(data\.content: \w+ then, \w+ now\)"):
        job.train(composed(*words))
