"""Everything a run remembers, so that a killed one goes on to the same weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.shelf import replace_folder

FOLDER, TENSORS, REST = "checkpoint", "state.safetensors", "state.json"


def save_checkpoint(
    out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]
) -> None:
    """Keep the run after `step` steps: written beside the last checkpoint, which it then replaces.

    The order of the data and the learning rate are functions of the seed and the step, so the step stands for them.
    """
    beside = out / f".{FOLDER}.part"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{slot}": torch.as_tensor(value) for slot, value in slots.items()}
    tensors["rng"] = torch.get_rng_state()
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, beside / TENSORS)
    (beside / REST).write_text(json.dumps({"step": step, "config": config}))
    replace_folder(beside, out / FOLDER)


def load_checkpoint(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bring `model` and `optimizer` to where the run stopped; the steps it had done, 0 for a new run."""
    folder = found(out)
    if folder is None:
        return 0
    tensors = load_file(folder / TENSORS)
    model.load_state_dict(
        {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    )
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, slot = name.split(".", 2)
            state.setdefault(int(index), {})[slot] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng"])
    return int(json.loads((folder / REST).read_text())["step"])


def found(out: Path) -> Path | None:
    """The run's last whole checkpoint, even where it was killed between the two renames of a save."""
    for folder in (out / FOLDER, out / f".{FOLDER}.old"):
        if (folder / REST).exists():
            return folder
    return None


def require_same(out: Path, config: dict[str, Any]) -> None:
    """Raise ValueError, naming what differs, where `out` holds an unfinished run of another configuration."""
    folder = found(out)
    if folder is None:
        return
    before = json.loads((folder / REST).read_text())["config"]
    now = json.loads(json.dumps(config))
    differing = [
        f"{key}: {before.get(key)} then, {now.get(key)} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if differing:
        raise ValueError(
            f"{out} holds an unfinished run of another configuration ({'; '.join(differing)}); set them back, choose out=, or overwrite=true"
        )


def forget(out: Path) -> None:
    """Drop the checkpoints of `out`."""
    for folder in (FOLDER, f".{FOLDER}.old", f".{FOLDER}.part"):
        shutil.rmtree(out / folder, ignore_errors=True)
