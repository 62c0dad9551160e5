"""The module that is trained, and what may be done to its layers to save memory or time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conf.schema import Engine as How
from models.drafter import Drafter, FeatureBatch, Loss
from train.optim import Groups


class Trainee(nn.Module):
    """The one module that engines wrap: its forward pass is the drafter's loss, in bf16 autocast or not."""

    def __init__(self, drafter: Drafter, bf16: bool = False):
        super().__init__()
        self.drafter, self.bf16 = drafter, bf16

    def forward(self, batch: FeatureBatch) -> Loss:
        with self.autocast():
            return self.drafter.training_loss(batch)

    def autocast(self) -> torch.autocast:
        """The precision of what is computed."""
        device = next((parameter.device.type for parameter in self.parameters()), "cpu")
        return torch.autocast(device, torch.bfloat16, enabled=self.bf16)

    def groups(self) -> Groups:
        """What is trained, and by what its learning rate is multiplied."""
        return self.drafter.groups()


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules below `module` that hold others and are called as they are: an MLP, a Medusa block."""
    for child in module.children():
        if any(True for _ in child.children()) and type(child).forward is not nn.Module.forward:
            yield child
        else:
            yield from layers(child)


def apply(how: How, drafter: Drafter) -> None:
    """Compute the drafter's steps or layers again in the backward pass instead of keeping what is inside, and compile its
    layers, as asked.
    """
    for layer in layers(drafter):
        if how.compile:
            layer.compile(dynamic=True)
        if how.checkpointing and not drafter.recomputed:
            layer.forward = forgetting(layer.forward)
    for name in drafter.recomputed if how.checkpointing else ():
        setattr(drafter, name, forgetting(getattr(drafter, name)))


def forgetting(forward: Any) -> Any:
    """`forward`, of which only the inputs stay for the backward pass."""
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)
