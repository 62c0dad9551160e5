"""A drafter's files as other programs keep them, and what every layout does: one class maps our names and knobs to theirs, and back.

A layout names each tensor and writes every flag out, because the programs' defaults differ. It translates by meaning, not by
name, and reads strictly: every tensor that is missing, too many or of another shape is named.
V vocabulary, D width.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.drafter import Drafter
from models.ends import Ends
from models.shelf import family_class, misfits
from models.vocabulary import DraftVocabulary


@dataclass
class Served:
    """A drafter as another program keeps it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass
class Own:
    """A drafter as Outrider keeps it."""

    knobs: dict[str, Any]  # those that its tensors decide; training's have their defaults
    taps: list[int]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)  # what was mended on the way


class Layout:
    """One program's files for one family."""

    name: str  # as `layout=` says it
    family: str  # whose drafters it holds
    file = "model.safetensors"
    knobs: frozenset[str]  # those it can say, and those that only training asks; any other must have its default
    method: str | None = None  # vLLM's name of what it does with them; None: it does not read this layout
    told: ClassVar[dict[str, Any]] = {}  # what else vLLM is told

    def require_said(self, knobs: dict[str, Any]) -> None:
        """Raise ValueError where a drafter of `knobs` is something that this layout has no word for."""
        usual = inspect.signature(family_class(self.family, knobs)).parameters
        unsaid = sorted(key for key in knobs.keys() - self.knobs if knobs[key] != usual[key].default)
        if unsaid:
            told = ", ".join(f"{key}={knobs[key]}" for key in unsaid)
            raise ValueError(f"layout={self.name} has no word for {told}; train without, or choose another layout")

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        """Whether a folder with this config and these tensors is of this layout."""
        raise NotImplementedError

    def write(self, drafter: Drafter, tensors: dict[str, Tensor], ends: Ends, verifier: str) -> Served:
        """`tensors` of `drafter`, by our names, as this program reads them; `verifier` is where it finds the target."""
        raise NotImplementedError

    def read(self, served: Served, ends: Ends) -> Own:
        """What the files hold, as a drafter for the target whose ends are given. Raises ValueError where it does not fit."""
        raise NotImplementedError


def stored_dtype(tensors: dict[str, Tensor]) -> str:
    """What a config says of the weights: the type of most of their numbers."""
    sizes: dict[torch.dtype, int] = {}
    for value in tensors.values():
        if value.is_floating_point():
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.numel()
    return str(max(sizes, key=lambda kind: sizes[kind])).removeprefix("torch.")


def require_sound(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError where a tensor is empty or holds no numbers."""
    for name, value in tensors.items():
        if not value.numel():
            raise ValueError(f"{name} is empty; whoever saved it did not gather it from all ranks. Save it again")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(
                f"{name} holds NaN or infinity; the training went wrong, and nothing can be drafted with it"
            )


def fitted(drafter: Drafter, tensors: dict[str, Tensor], wanted: dict[str, str]) -> dict[str, Tensor]:
    """`tensors` by our names, `wanted` holding theirs by ours. Raises ValueError for any that does not fit `drafter`."""
    require_sound(tensors)
    own = drafter.state_dict()
    if wrong := misfits(tensors, {wanted[name]: value.shape for name, value in own.items()}):
        raise ValueError(f"the tensors do not fit the config: {'; '.join(wrong)}")
    found = {name: tensors[wanted[name]] for name in own}
    drafter.load_state_dict(found)
    for part in drafter.modules():
        if isinstance(part, DraftVocabulary):
            part.check()
    return found
