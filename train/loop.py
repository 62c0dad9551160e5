"""fit(): one function from the first step to the last."""

import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from conf.schema import Run
from models.drafter import Drafter, FeatureBatch, Loss
from train.checkpoint import load_checkpoint, save_checkpoint
from train.features import Source
from train.log import Journal
from train.optim import optimizer_for, rate


class Trainee(nn.Module):
    """The one module that engines wrap: its forward pass is the drafter's loss."""

    def __init__(self, drafter: Drafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: FeatureBatch) -> Loss:
        return self.drafter.training_loss(batch)


def fit(
    drafter: Drafter, source: Source, heldout: Source, run: Run, accelerator: Accelerator, config: dict[str, Any]
) -> dict[str, Any]:
    """Train `drafter` for run.optim.steps steps, of which there may be none, and return its held-out acceptance by depth.

    Every loss is divided by the positions counted in the whole step, over micro-batches and ranks, before it is
    differentiated, so neither accumulation nor the number of ranks changes the gradient.
    """
    optim, out = run.optim, Path(run.out)
    if not optim.steps:
        return evaluate(drafter, heldout, accelerator)
    optimizer = optimizer_for(drafter.parameters(), optim)
    start = load_checkpoint(out, drafter, optimizer)
    trainee, optimizer = accelerator.prepare(Trainee(drafter), optimizer)
    ranks, rank, first = accelerator.num_processes, accelerator.process_index, accelerator.is_main_process
    acceptance = evaluate(drafter, heldout, accelerator) if start == optim.steps else {}
    with Journal(optim.steps, first, run.log.wandb, run.log.project, config, run.out) as journal:
        for step in range(start, optim.steps):
            began = time.perf_counter()
            numbers = [(step * optim.accumulate + micro) * ranks + rank for micro in range(optim.accumulate)]
            pieces = [source.piece(number) for number in numbers]
            later = source.piece(numbers[0] + optim.accumulate * ranks) if step + 1 < optim.steps else []
            counted = accelerator.reduce(count(drafter, source, pieces).to(accelerator.device), "sum").clamp(min=1)
            total = torch.zeros((), device=accelerator.device)
            for micro, (piece, then) in enumerate(zip(pieces, [*pieces[1:], later], strict=True)):
                with gradients(trainee, accelerator, last=micro + 1 == len(pieces)):
                    loss = trainee(source.features(piece, then)).total / counted
                    accelerator.backward(loss * ranks)  # data parallelism averages over ranks; this is a sum
                total += loss.detach()
            accelerator.clip_grad_norm_(trainee.parameters(), optim.clip)
            for group in optimizer.param_groups:
                group["lr"] = rate(optim, step)
            optimizer.step()
            optimizer.zero_grad()
            shown = finite(accelerator.reduce(total, "sum"), step)
            tokens = ranks * sum(source.lengths[at] for piece in pieces for at in piece)
            journal.step(step + 1, shown, tokens / (time.perf_counter() - began), rate(optim, step))
            done = step + 1
            if done % run.log.evaluate_every == 0 or done == optim.steps:
                acceptance = evaluate(drafter, heldout, accelerator)
                journal.acceptance(done, acceptance["greedy"], acceptance["sampled"])
            if first and (done % run.log.save_every == 0 or done == optim.steps):
                save_checkpoint(out, done, drafter, optimizer, config)
    return acceptance


def count(drafter: Drafter, source: Source, pieces: list[list[int]]) -> Tensor:
    """[] positions that this rank's share of a step is counted over, at the first depth."""
    return torch.stack([drafter.counts(*source.masks(piece))[0] for piece in pieces]).sum()


def gradients(trainee: nn.Module, accelerator: Accelerator, last: bool) -> Any:
    """Where gradients are only added up, ranks do not exchange them until the last micro-batch."""
    return accelerator.no_sync(trainee) if not last else torch.enable_grad()


def finite(loss: Tensor, step: int) -> float:
    """The loss as a number. Raises ValueError where it is none."""
    if not torch.isfinite(loss):
        raise ValueError(
            f"the loss is {loss.item()} at step {step + 1}; lower optim.lr or lengthen optim.warmup, or look for broken rows in the data"
        )
    return loss.item()


@torch.no_grad()
def evaluate(drafter: Drafter, heldout: Source, accelerator: Accelerator) -> dict[str, Any]:
    """Acceptance by depth on held-out conversations: greedy (first pick right) and sampled (overlap), and positions.

    Calls the drafter itself, not the module that engines wrap: ranks may have different numbers of batches.
    """
    pieces = heldout.everything()
    depths = len(drafter.counts(*heldout.masks(pieces[0])))
    sums = torch.zeros(3, depths, device=accelerator.device)
    drafter.eval()
    for piece in pieces[accelerator.process_index :: accelerator.num_processes]:
        with accelerator.autocast():
            loss = drafter.training_loss(heldout.features(piece))
        sums += torch.stack([loss.seen, loss.hits, loss.overlap])
    drafter.train()
    seen, hits, overlap = accelerator.reduce(sums, "sum").cpu()
    return {
        "greedy": rounded(hits / seen.clamp(min=1)),
        "sampled": rounded(overlap / seen.clamp(min=1)),
        "positions": [int(value) for value in seen],
    }


def rounded(rates: Tensor) -> list[float]:
    """Rates to four places, as a card shows them."""
    return [round(value, 4) for value in rates.tolist()]
