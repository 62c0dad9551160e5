"""The optimizer and how its rate rises and falls."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from conf.schema import Optim, Schedule

Groups = Sequence[tuple[float, list[nn.Parameter]]]  # what is trained, and by what its learning rate is multiplied


def optimizer_for(groups: Groups, optim: Optim) -> torch.optim.AdamW:
    """AdamW over what is trained; every group remembers its own scale of the learning rate."""
    told = [{"params": parameters, "scale": scale, "lr": optim.lr * scale} for scale, parameters in groups]
    betas = optim.betas[0], optim.betas[1]
    return torch.optim.AdamW(told, lr=optim.lr, betas=betas, weight_decay=optim.weight_decay, fused=True)


def rate(optim: Optim, step: int) -> float:
    """The learning rate of `step`: a line up over the warm-up, then half a cosine or a line down to zero."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    done = (step - optim.warmup) / max(optim.steps - optim.warmup, 1)
    left = 1 - done if optim.schedule is Schedule.linear else 0.5 * (1 + math.cos(math.pi * done))
    return optim.lr * left


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
    if optim.clip_value is not None and optim.clip_value <= 0:
        raise ValueError(f"optim.clip_value={optim.clip_value} must be positive; or null for no such limit")
    if optim.patience is not None and optim.patience < 1:
        raise ValueError(
            f"optim.patience={optim.patience} evaluations would stop the run at once; give at least 1, or null for never"
        )


def accumulated(optim: Optim, ranks: int) -> int:
    """Micro-batches a rank and step, so that the ranks together take `optim.together` conversations."""
    if optim.together is None:
        return optim.accumulate
    if optim.together < 1 or optim.together % (optim.batch * ranks):
        raise ValueError(
            f"optim.together={optim.together} conversations a step do not divide into batches of optim.batch={optim.batch} on {ranks} processes; "
            f"change one of them (a multiple of {optim.batch * ranks} would do)"
        )
    return optim.together // (optim.batch * ranks)
