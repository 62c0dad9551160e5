"""Drafters on disk: a folder with drafter.yaml, which says what it is, and model.safetensors."""

import hashlib
import importlib
import inspect
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from models.adapter import KEYS, add, thin
from models.drafter import Drafter
from models.ends import Ends
from models.files import write_whole
from models.source import Identity, from_hub
from models.vocabulary import DraftVocabulary

SCHEMA = 1
CARD, WEIGHTS, ADAPTER = "drafter.yaml", "model.safetensors", "adapter.safetensors"


@dataclass
class Card:
    """drafter.yaml: family and knobs, whose drafter it is, and what was measured when it was trained."""

    family: str  # module and class, as in conf/drafter/*.yaml
    knobs: dict[str, Any]
    target: dict[str, Any]  # name, fingerprint, width, vocabulary; with an adapter its name, and base's fingerprint
    taps: list[int]
    tree: list[list[int]] = field(
        default_factory=list
    )  # recommended paths, the best first; empty: the drafter's own way
    training: dict[str, Any] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)  # by depth, on held-out conversations
    meaning: dict[str, str] = field(default_factory=dict)  # of knobs whose names mean other things elsewhere
    adapter: dict[str, Any] = field(default_factory=dict)  # LoRA's r, alpha, targets, and the drafter it belongs on
    schema: int = SCHEMA
    forecast: dict[int, float] = field(default_factory=dict)  # tau of the tree's first nodes, by their number


def save_drafter(drafter: Drafter, card: Card, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Keep `drafter` in `folder`, its weights as `dtype`; where the card tells of an adapter, its matrices alone."""
    state = thin(drafter) if card.adapter else drafter.state_dict()
    keep({name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}, card, folder)


def keep(tensors: Mapping[str, Tensor], card: Card, folder: Path) -> None:
    """Write both files beside their names and rename; the card comes last, so a folder with a card is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    name, other = (ADAPTER, WEIGHTS) if card.adapter else (WEIGHTS, ADAPTER)
    weights, text = folder / f".{name}.part", folder / f".{CARD}.part"
    weights.write_bytes(packed(tensors))
    text.write_text(card_text(card))
    weights.rename(folder / name)
    text.rename(folder / CARD)
    (folder / other).unlink(missing_ok=True)


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """`tensors` as a safetensors file; save_file would leave one readable to its owner alone."""
    return save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, metadata={"format": "pt"})


def read_card(folder: Path, name: str = CARD) -> Card:
    """The card of the drafter in `folder`. Raises ValueError where there is none that this version reads."""
    file = folder / name
    if not file.exists():
        pickles = [found.name for pattern in ("*.bin", "*.pt", "*.pth") for found in folder.glob(pattern)]
        held = f"; {pickles[0]} there is a pickle, which Outrider does not open" if pickles else ""
        raise ValueError(
            f"{folder} holds no {CARD}, so it is no trained drafter{held}. Name a folder that `python -m train` wrote"
        )
    try:
        fields = yaml.safe_load(file.read_text())
    except yaml.YAMLError:
        raise ValueError(f"{file} is no YAML; download or train the drafter again") from None
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        found = fields.get("schema") if isinstance(fields, dict) else None
        raise ValueError(
            f"{file} has schema {found} and this version of Outrider reads {SCHEMA}; train the drafter again or use the version that wrote it"
        )
    wrong = [f"it lacks {name}" for name in sorted({"family", "knobs", "target", "taps"} - set(fields))]
    wrong += [f"{name} is unknown" for name in sorted(set(fields) - set(Card.__dataclass_fields__))]
    wrong += [
        f"its target lacks {name}"
        for name in ("name", "fingerprint", "width")
        if name not in fields.get("target", name)
    ]
    if wrong:
        raise ValueError(f"{file} is no card of a drafter: {', '.join(wrong)}; download or train the drafter again")
    return Card(**fields)


def write_card(card: Card, folder: Path) -> None:
    """The card alone, in place of the one that `folder` has."""
    write_whole(folder / CARD, card_text(card))


def card_text(card: Card) -> str:
    """drafter.yaml."""
    text: str = yaml.safe_dump(asdict(card), sort_keys=False, default_flow_style=None, width=110)
    return text


def require_target(card: Card, folder: Path, target: Identity) -> None:
    """Raise ValueError where the drafter in `folder` belongs to another target."""
    name, trained = target.name, card.target
    if trained["width"] != target.width:
        raise ValueError(
            f"{folder} was trained for {trained['name']} (width {trained['width']}); {name} has width {target.width}. Set target= to the former"
        )
    if trained["fingerprint"] == target.fingerprint:
        return
    if (trained.get("base") or trained["fingerprint"]) == (target.base or target.fingerprint):
        there, here = trained.get("adapter"), target.adapter
        raise ValueError(
            f"{folder} was trained for {trained['name']} {_wearing(there)} and this is {name} {_wearing(here)}{', which has changed' if there == here else ''}. "
            f"Set target.adapter={there or 'null'} or train again"
        )
    raise ValueError(
        f"{folder} was trained for {trained['name']} (fingerprint {trained['fingerprint']}); these weights of {name}, its tokenizer or its "
        f"template are others ({target.fingerprint}). Set target= to the former or train again"
    )


def _wearing(adapter: str | None) -> str:
    return f"with the adapter {adapter}" if adapter else "without an adapter"


def family_class(family: str, knobs: Iterable[str]) -> type[Drafter]:
    """The class called `family`, if it is a drafter and has these knobs."""
    module, _, name = family.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(
            f"there is no drafter family {family!r}; a family is module.Class, such as models.medusa.Medusa"
        ) from None
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise ValueError(f"{family} is no drafter family")
    known = list(inspect.signature(found).parameters)[1:]
    if strange := sorted(set(knobs) - set(known)):
        raise ValueError(f"{family} has no knob {', '.join(strange)}; it has {', '.join(known)}")
    return found


def knobs_of(drafter: dict[str, Any]) -> dict[str, Any]:
    """What a family is told in conf/drafter/*.yaml; the other keys are Hydra's."""
    return {key: value for key, value in drafter.items() if not key.startswith("_")}


def untrained(drafter: dict[str, Any]) -> Card | None:
    """A card for `drafter`, a family and its knobs as in conf/drafter/*.yaml; None where it needs training."""
    knobs = knobs_of(drafter)
    if family_class(drafter["_target_"], knobs).needs_training:
        return None
    return Card(drafter["_target_"], knobs, target={}, taps=[])


def load_drafter(folder: Path | None, card: Card, ends: Ends, dtype: torch.dtype) -> Drafter:
    """The drafter in `folder` on the target's ends, for decoding; every missing, extra or misshapen tensor is named.

    One that needs no training has no folder.
    """
    drafter = family_class(card.family, card.knobs)(ends, **card.knobs)
    if folder is None:
        return drafter.to(device=ends.head.device, dtype=dtype).eval()
    if list(drafter.taps) != card.taps:
        raise ValueError(
            f"{folder / CARD} lists taps {card.taps} and its knobs mean {list(drafter.taps)}; the two must be the same, in ascending order"
        )
    fill(drafter, folder, card)
    return drafter.to(device=ends.head.device, dtype=dtype).eval().requires_grad_(False)


def fill(drafter: Drafter, folder: Path, card: Card) -> None:
    """Give `drafter` the weights in `folder`; those of an adapter are added to the weights of the drafter it was trained on."""
    if not card.adapter:
        return load_weights(drafter, folder / WEIGHTS)
    if missing := KEYS - set(card.adapter):
        raise ValueError(f"{folder / CARD} tells of an adapter without {', '.join(sorted(missing))}; train it again")
    try:
        base = from_hub(card.adapter["of"], kind="drafter")
    except ValueError as error:
        raise ValueError(f"{folder} is an adapter on the drafter {card.adapter['of']}: {error}") from None
    below = read_card(base)
    if digest(base, below) != card.adapter["digest"]:
        raise ValueError(
            f"{folder} is an adapter on another drafter than the one in {base}, whose weights have changed since; give that one back, or train the adapter again"
        )
    fill(drafter, base, below)
    add(drafter, read_tensors(folder / ADAPTER), card.adapter, str(folder / ADAPTER))


def digest(folder: Path, card: Card) -> str:
    """Which weights, or which adapter, stand in `folder`."""
    return hashlib.sha256((folder / (ADAPTER if card.adapter else WEIGHTS)).read_bytes()).hexdigest()[:16]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises ValueError where it is missing or damaged."""
    if not file.exists():
        raise ValueError(
            f"{file.parent} holds no {file.name}; the drafter's weights are missing. Download or train it again"
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"{file} is damaged or no safetensors file ({error}); download or train the drafter again"
        ) from None


def load_weights(drafter: Drafter, file: Path) -> None:
    """Fill `drafter` from the safetensors `file`, strictly."""
    tensors = read_tensors(file)
    wrong = misfits(tensors, {name: value.shape for name, value in drafter.state_dict().items()})
    if wrong:
        raise ValueError(f"{file} does not fit its {CARD}: {'; '.join(wrong)}")
    drafter.load_state_dict(tensors)
    for part in drafter.modules():
        if isinstance(part, DraftVocabulary):
            try:
                part.check()
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None


def misfits(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> list[str]:
    """What is wrong with `tensors` where there should be the names of `shapes`, each of its shape."""
    wrong = [f"{name} is missing" for name in shapes.keys() - tensors.keys()]
    wrong += [f"{name} is not part of this drafter" for name in tensors.keys() - shapes.keys()]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(shapes[name])}"
        for name in shapes.keys() & tensors.keys()
        if tensors[name].shape != shapes[name]
    ]
    return sorted(wrong)


def make_folder(folder: Path) -> None:
    """Make `folder`, and know before any work that it can be written to. Raises ValueError where it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error.strerror}); choose another folder with out=") from None


def replace_folder(beside: Path, final: Path) -> None:
    """Give the finished folder `beside` the name `final`, whatever stood there."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    beside.rename(final)
    shutil.rmtree(old, ignore_errors=True)
