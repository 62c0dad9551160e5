"""LoRA (Hu et al. 2021): what a domain changes in a trained drafter, as two thin matrices for each of its linear layers.

A weight [out, in] becomes weight + alpha / r * B @ A, with A [r, in] and B [out, r].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEYS = {"r", "alpha", "targets", "of", "digest"}  # what a card says of an adapter


def linear_layers(
    module: nn.Module, targets: Sequence[str] | None, knob: str = "peft.targets", whose: str = "this drafter"
) -> list[str]:
    """The names of all linear layers under `module`, or of those whose name is or ends with one of `targets`.

    Raises ValueError, in terms of the `knob` that gave them and `whose` layers they are, where one matches nothing.
    """
    names = [name for name, part in module.named_modules() if type(part) is nn.Linear]
    idle = [each for each in targets or () if not any(_means(each, name) for name in names)]
    if idle or not names:
        raise ValueError(
            f"{knob}: {', '.join(idle) or 'nothing'} is no linear layer of {whose}; it has {', '.join(names) or 'none'}"
        )
    return [name for name in names if targets is None or any(_means(each, name) for each in targets)]


def _means(target: str, name: str) -> bool:
    return f".{name}".endswith(f".{target}")


def attach(module: nn.Module, r: int, alpha: float, targets: Sequence[str] | None) -> list[str]:
    """Put an adapter, which changes nothing yet, on linear layers of `module`; it alone is trained. Their names."""
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds, and only such a run needs it

    if r < 1 or alpha <= 0:
        raise ValueError(f"peft.r={r} peft.alpha={alpha}: r is at least 1 and alpha above 0")
    names = linear_layers(module, targets)
    inject_adapter_in_model(LoraConfig(r=r, lora_alpha=alpha, target_modules=names), module)  # type: ignore[arg-type]
    return names


def thin(module: nn.Module) -> dict[str, Tensor]:
    """The adapter's matrices in `module`, by layer: `fc.A` and `fc.B`."""
    found = {}
    for name, part in module.named_modules():
        if hasattr(part, "lora_A"):
            found[f"{name}.A"], found[f"{name}.B"] = part.lora_A.default.weight, part.lora_B.default.weight
    return found


def merge(module: nn.Module) -> None:
    """Add the adapter in `module` to its weights for good."""
    for name, part in list(module.named_modules()):
        if hasattr(part, "lora_A"):
            part.merge()
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent).register_module(last, part.get_base_layer())


@torch.no_grad()
def add(module: nn.Module, tensors: Mapping[str, Tensor], how: Mapping[str, Any], where: str) -> None:
    """Add a saved adapter to the weights of `module`. Raises ValueError where the two do not fit."""
    layers = {name.rpartition(".")[0] for name in tensors}
    there = dict(module.named_modules())
    for name in sorted(layers):
        part, down, up = there.get(name), tensors.get(f"{name}.A"), tensors.get(f"{name}.B")
        fits = type(part) is nn.Linear and down is not None and up is not None
        if not fits or (len(up), down.shape[1]) != tuple(part.weight.shape) or len(down) != up.shape[1]:  # type: ignore[arg-type, union-attr]
            raise ValueError(f"{where} has an adapter for {name} that does not fit this drafter; train it again")
        assert isinstance(part, nn.Linear)
        part.weight += how["alpha"] / how["r"] * (up.to(part.weight) @ down.to(part.weight))  # type: ignore[union-attr]
