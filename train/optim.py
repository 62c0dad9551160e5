"""The optimizer and how its rate rises and falls."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from conf.schema import Optim


def optimizer_for(parameters: Iterable[nn.Parameter], optim: Optim) -> torch.optim.AdamW:
    """AdamW over what is trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), weight_decay=optim.weight_decay
    )


def rate(optim: Optim, step: int) -> float:
    """The learning rate of `step`: a line up over the warm-up, then half a cosine down to zero."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    done = (step - optim.warmup) / max(optim.steps - optim.warmup, 1)
    return optim.lr * 0.5 * (1 + math.cos(math.pi * done))


def check(optim: Optim) -> None:
    """Raise ValueError for settings with which nothing would be learned."""
    if not (0 < optim.lr < math.inf):
        raise ValueError(f"optim.lr={optim.lr} teaches nothing; give a positive number")
    if optim.steps and optim.steps <= optim.warmup:
        raise ValueError(
            f"optim.steps={optim.steps} end within the warm-up of {optim.warmup} steps; give more steps or a shorter optim.warmup"
        )
    if min(optim.batch, optim.accumulate) < 1 or optim.clip <= 0:
        raise ValueError(
            f"optim.batch={optim.batch} optim.accumulate={optim.accumulate} optim.clip={optim.clip} must be positive"
        )
