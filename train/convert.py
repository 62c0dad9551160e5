"""Read a drafter that another program wrote, and keep it as one of ours."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import Run
from decode.opening import identity_of, target_folder
from models.ends import Ends, opened, tensor_files
from models.layouts import recognised
from models.served import Layout, Own, Served
from models.shelf import CARD, Card, keep, read_card, require_target
from models.source import Identity, fetched
from train.export import RECORD


def convert(run: Run) -> None:
    """Make a drafter folder of `out` from the foreign one that `trained` names, for the run's target."""
    if not run.trained:
        raise ValueError("name the folder or Hub name of the drafter: outrider-convert FOLDER target=... out=...")
    out = Path(run.out)
    if out.exists():
        raise ValueError(f"{out} exists already; choose another folder with out=, or remove it")
    source = fetched(run.trained, kind="drafter", pickles=run.allow_pickle)
    served = read_files(source, run.allow_pickle)
    layout = recognised(served, run.layout)
    folder = target_folder(run.target)
    own = layout.read(served, Ends.load(folder, dtype=None))
    card = card_of(source, layout, own, identity_of(run.target), run.trained)
    keep(own.tensors, card, out)
    for note in own.notes:
        print(f"note: {note}")
    print(
        f"the drafter, read as {layout.name}'s, is in {out}; measure it: python decode/run.py conf=<one of this target> trained={out}"
    )


def read_files(folder: Path, allow_pickle: bool = False) -> Served:
    """Config and tensors of the foreign drafter in `folder`."""
    if (folder / CARD).exists():
        raise ValueError(
            f"{folder} holds {CARD}: it is a drafter of Outrider's already; write it for others with outrider-export"
        )
    listed = folder / "config.json"
    if not listed.exists():
        raise ValueError(
            f"{folder} holds no config.json, so it is no drafter; name the folder that a trainer or exporter wrote"
        )
    try:
        config = json.loads(listed.read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{listed} is no JSON object; download the drafter again")
    return Served(config, read_tensors(folder, allow_pickle))


def read_tensors(folder: Path, allow_pickle: bool) -> dict[str, Tensor]:
    """All tensors of a folder, from safetensors or, where that is allowed, from pickles that may hold nothing but tensors."""
    pickles = sorted(file for pattern in ("*.bin", "*.pt") for file in folder.glob(pattern))
    if list(folder.glob("*.safetensors")) or not pickles:
        found = {}
        for name, file in tensor_files(folder).items():
            with opened(file) as shard:
                found[name] = shard.get_tensor(name)
        return found
    if not allow_pickle:
        raise ValueError(
            f"{folder} holds {pickles[0].name}, a pickle, and no safetensors; if you trust whoever made it, read it with allow_pickle=true"
        )
    return {name: value for file in pickles for name, value in unpickled(file).items()}


def unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, which may hold nothing else."""
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{file} is no pickle of tensors ({type(error).__name__}), and nothing else is read; ask for a safetensors file"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{file} holds more than tensors by name; ask for a safetensors file")
    return found


def card_of(source: Path, layout: Layout, own: Own, target: Identity, name: str) -> Card:
    """The card that came with an export of ours, or a new one that says where the drafter is from."""
    record = source / RECORD
    if not record.exists():
        return Card(
            layout.family, own.knobs, asdict(target), own.taps, training={"converted": layout.name, "from": name}
        )
    card = read_card(source, RECORD)
    require_target(card, source, target)
    apart = [
        f"{key} {card.knobs.get(key)} there and {value} in the config"
        for key, value in own.knobs.items()
        if key != "taps" and card.knobs.get(key, value) != value
    ]
    apart += [f"taps {card.taps} there and {own.taps} in the config"] * (card.taps != own.taps)
    if apart:
        raise ValueError(
            f"{record} and config.json disagree: {', '.join(apart)}; one of them was changed after the export"
        )
    return card
