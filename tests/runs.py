"""Runs for the tests: composed as the command line composes them, and started as processes of their own."""

import copy
import functools
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from conf import command, register
from conf.schema import Run

ROOT = Path(__file__).parent.parent


def composed(*overrides: str, conf: str = "tiny") -> Run:
    """The Run that `conf=... overrides` means. What Hydra would fill in at the command line, the caller gives."""
    return copy.deepcopy(_composed(conf, overrides))


def changed(run: Run, setting: str, value: object) -> Run:
    """`run` with another value of, say, optim.lr: what an override does, without the quarter of a second."""
    parts = setting.split(".")
    holder: Any = run
    for part in parts[:-1]:
        holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
    if isinstance(holder, dict):
        holder[parts[-1]] = value
    else:
        assert hasattr(holder, parts[-1])
        setattr(holder, parts[-1], value)
    return run


@functools.cache
def _composed(conf: str, overrides: tuple[str, ...]) -> Run:
    register()
    with initialize_config_module(config_module="conf", version_base="1.3"):
        config = compose(
            config_name="run", overrides=[f"conf={conf}", f"conf_name={conf}", f"out=outputs/{conf}", *overrides]
        )
    return cast(Run, OmegaConf.to_object(config))


def said(*words: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of a Python process in the folder `cwd`, on one thread, with our tests importable."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "1000"}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, text=True, capture_output=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def forked(module: str, *words: str, log: Path, **env: str) -> BaseProcess:
    """`python -m module words` in the folder of `log`, which takes what it says: a process of its own, but from one that has
    imported torch and the rest already, which takes most of a short command's time.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["train.job", "decode.measure"])
    process = server.Process(target=_enter, args=(module, words, log, env))
    process.start()
    return process


def together(ranks: int, module: str, *words: str, folder: Path, name: str) -> list[str]:
    """What each of so many processes says that run `module` in `folder`, in the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    logs = [folder / f"{name}.{rank}.log" for rank in range(ranks)]
    started = [
        forked(module, *words, log=log, **(env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}))
        for rank, log in enumerate(logs)
    ]
    for process, log in zip(started, logs, strict=True):
        process.join()
        assert process.exitcode == 0, log.read_text()
    return [log.read_text() for log in logs]


def _enter(module: str, words: tuple[str, ...], log: Path, env: dict[str, str]) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(log.parent)
    os.environ.update(env, COLUMNS="1000")
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def show(run: Run) -> None:
    """A job that only says what it was told."""
    print("told", run.conf_name, run.out, run.seed, run.target.name, run.optim.steps)


def main() -> None:
    """`python -m runs conf=NAME`: what `python -m train` does, but checkpoints stay, every loss is said to the last digit, and
    every rank says how much of the target it holds.
    """
    from torch.distributed.tensor import DTensor

    from train import checkpoint, job, log

    checkpoint.forget = lambda out: None
    opened, step = job.open_target, log.Journal.step

    def weighed(*given: Any, **how: Any) -> Any:
        target = opened(*given, **how)
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in target.model.parameters()]
        print("holds", sum(part.nbytes for part in parts), "bytes")
        return target

    def told(self: log.Journal, done: int, loss: float, *rest: float) -> None:
        self.console.print(f"exactly {done} {loss!r}")
        step(self, done, loss, *rest)

    job.open_target = weighed
    log.Journal.step = told  # type: ignore[method-assign,assignment]
    command("train.job:train")()


if __name__ == "__main__":
    main()
