"""Everything a run remembers, so that a killed one goes on to the same weights.

A checkpoint is a folder named by its step: written beside that name and renamed once it is whole. It holds weights,
moments and buffers in full, whoever shares them out, so it is read by any engine on any number of ranks.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conf.schema import Run
from train.engines import Engine, put, weights_of
from train.judge import Verdict

HOME, TENSORS, BEST, REST = "checkpoints", "state.safetensors", "best.safetensors", "state.json"
CONTENT = "data.content"
NULL = "None"  # a setting without a value


@dataclass
class Progress:
    """How far a run is, and the best it was."""

    step: int = 0
    best: Verdict | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)  # of the best, on the first rank
    behind: int = 0  # evaluations since the best

    def hear(self, verdict: Verdict, engine: Engine) -> None:
        """Keep the weights if none before accepted more."""
        self.behind += 1
        if verdict.beats(self.best):
            self.best, self.behind = verdict, 0
            with engine.whole():
                self.weights = (
                    {name: value.cpu().clone() for name, value in weights_of(engine.trainee).items()}
                    if engine.first
                    else {}
                )


class Keeper:
    """The checkpoints of the run in `out`, of which the newest run.log.keep stay. `config` is what shapes the weights."""

    def __init__(self, out: Path, config: dict[str, Any], run: Run, loud: bool):
        self.out, self.keep, self.loud = out, run.log.keep, loud
        self.about = {
            "config": config,
            "run": json.loads(json.dumps(asdict(run), default=lambda value: value.value)),
            "code": code_digest(),
        }

    def save(self, engine: Engine, progress: Progress) -> None:
        """Keep the run as it is after `progress.step` steps; every rank must call. Raises ValueError where the disk refuses.

        The order of the data and the learning rate are functions of the seed and the step, so the step stands for them.
        """
        tensors, dice = engine.remembered(), engine.gather([thrown(engine.device)])
        rest = {
            "step": progress.step,
            "ranks": engine.ranks,
            "best": progress.best and asdict(progress.best),
            "behind": progress.behind,
        }
        refused = self._write(progress, tensors, {**rest, "dice": dice, **self.about}) if engine.first else None
        if refused := engine.agree(refused):
            raise ValueError(refused)

    def _write(self, progress: Progress, tensors: dict[str, Tensor], rest: dict[str, Any]) -> str | None:
        home = self.out / HOME
        beside, final = home / ".part", home / f"step_{progress.step:08}"
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            save_file(tensors, beside / TENSORS)
            save_file(progress.weights, beside / BEST)
            (beside / REST).write_text(json.dumps(rest))
            for file in beside.iterdir():
                with file.open("rb") as written:
                    os.fsync(written)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            last = found(self.out)
            kept = f"the one after step {step_of(last)} stays" if last else "there is none yet"
            return f"the checkpoint after step {progress.step} cannot be written to {home} ({error}); {kept}. Make room, and the same command goes on"
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        for old in every(self.out)[: -self.keep]:
            shutil.rmtree(old)
        return None

    def open(self, trainee: nn.Module) -> tuple[Progress, dict[str, Tensor], list[Any]]:
        """Where the run stopped, with its weights in `trainee`; moments and dice are for after `engine.start`."""
        folder = found(self.out)
        if folder is None:
            return Progress(), {}, []
        tensors, rest = load_file(folder / TENSORS), json.loads((folder / REST).read_text())
        if rest["code"] != self.about["code"] and self.loud:
            print("Outrider's code has changed since the checkpoint: the run goes on, but may not end in the same bits")
        put(
            {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")},
            trainee,
        )
        best = Verdict(**rest["best"]) if rest["best"] else None
        return Progress(rest["step"], best, load_file(folder / BEST), rest["behind"]), tensors, rest["dice"]


def every(out: Path) -> list[Path]:
    """The whole checkpoints of the run in `out`, the oldest first."""
    return sorted(folder for folder in (out / HOME).glob("step_*") if (folder / REST).exists())


def found(out: Path) -> Path | None:
    """The run's last whole checkpoint."""
    whole = every(out)
    return whole[-1] if whole else None


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder is named by."""
    return int(checkpoint.name.removeprefix("step_"))


def require_same(out: Path, config: dict[str, Any]) -> None:
    """Raise ValueError, naming what differs, where `out` holds an unfinished run of another configuration.

    What the data say is compared only where `config` knows it already. A setting that one of the two does not know is null there.
    """
    folder = found(out)
    if folder is None:
        return
    before: Mapping[str, Any] = json.loads((folder / REST).read_text())["config"]
    now = json.loads(json.dumps(config))
    differing = [
        f"{key}: {before.get(key)} then, {now.get(key)} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, NULL) != now.get(key, NULL) and (key != CONTENT or CONTENT in now)
    ]
    if differing:
        raise ValueError(
            f"{out} holds an unfinished run of another configuration ({'; '.join(differing)}); set them back, choose out=, or overwrite=true"
        )


def forget(out: Path) -> None:
    """Drop the checkpoints of `out`."""
    shutil.rmtree(out / HOME, ignore_errors=True)


def code_digest() -> str:
    """Which code shaped the weights: a digest of the packages that train."""
    files = sorted(
        file for package in ("models", "train") for file in (Path(__file__).parent.parent / package).glob("*.py")
    )
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()[:16]


def thrown(device: torch.device) -> dict[str, Any]:
    """Where this rank's random numbers are: Python's, numpy's and torch's."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state(device).numpy().tobytes().hex() if device.type == "cuda" else None,
    }


def throw(dice: list[Any], engine: Engine) -> None:
    """Go on with this rank's random numbers; a rank that was not there before keeps those it started with."""
    if engine.rank >= len(dice):
        return
    mine = dice[engine.rank]
    version, keys, gauss = mine["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(mine["numpy"]))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["torch"]), dtype=torch.uint8))
    if mine["cuda"] and engine.device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(mine["cuda"]), dtype=torch.uint8), engine.device)
