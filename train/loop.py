"""fit(): one function from the first step to the last."""

import time

import torch
from torch import Tensor

from conf.schema import Run
from train.alarm import Asked, Stopped, Tidings
from train.checkpoint import Keeper, Progress, throw
from train.engines import Engine
from train.features import Source
from train.judge import Judge
from train.log import Journal
from train.optim import rate
from train.trainee import Trainee


def fit(trainee: Trainee, source: Source, judge: Judge, run: Run, engine: Engine, keeper: Keeper) -> Progress:
    """Train for run.optim.steps steps, of which there may be none, and say how far that came and what was best.

    Every loss is divided by the positions counted in the whole step, over micro-batches and ranks, before it is
    differentiated, so neither accumulation nor the number of ranks changes the gradient.
    """
    optim = run.optim
    if not optim.steps:
        return Progress(0, judge(trainee, 0))
    progress, tensors, dice = keeper.open(trainee)
    engine.start(trainee, optim)
    engine.recall(tensors)
    throw(dice, engine)
    with Journal(run, engine.first, progress.step, progress.best) as journal, Asked() as asked:
        tidings = Tidings(journal)
        while progress.step < optim.steps and not (optim.patience and progress.behind >= optim.patience):
            began, waited = time.perf_counter(), source.waited
            first = progress.step * optim.accumulate
            numbers = [(first + micro) * engine.ranks + engine.rank for micro in range(optim.accumulate)]
            pieces = [source.piece(number) for number in numbers]
            later = (
                source.piece(numbers[0] + optim.accumulate * engine.ranks) if progress.step + 1 < optim.steps else []
            )
            counted = engine.sum(count(trainee, source, pieces)).clamp(min=1)
            trainee.at(progress.step)
            total = torch.zeros((), device=engine.device)
            for micro, (piece, then) in enumerate(zip(pieces, [*pieces[1:], later], strict=True), start=1):
                total += engine.learn(source.features(piece, then), counted, last=micro == len(pieces))
            norm = engine.step(rate(optim, progress.step), optim)
            progress.step += 1
            sums = engine.sum(torch.stack([total, torch.full_like(total, asked.stop)]))
            tokens = engine.ranks * sum(source.lengths[at] for piece in pieces for at in piece)
            tidings.send(progress.step, torch.cat([sums, norm[None]]), tokens, began, source.waited - waited)
            judged, kept = (
                due(progress.step, every, optim.steps) for every in (run.log.evaluate_every, run.log.save_every)
            )
            if judged or kept or tidings.stop:
                tidings.hear()  # what is judged or kept came to numbers
            if judged:
                progress.hear(verdict := judge(trainee, progress.step), engine)
                journal.verdict(verdict, progress.best)
            if kept or tidings.stop:
                keeper.save(engine, progress)
            if tidings.stop:
                raise Stopped(
                    f"stopped after step {progress.step} of {optim.steps} and saved; the same command goes on"
                )
    return progress


def due(step: int, interval: int, last: int) -> bool:
    """Whether what is done every `interval` steps is done after `step`; after the `last` it always is."""
    return step % interval == 0 or step == last


def count(trainee: Trainee, source: Source, pieces: list[list[int]]) -> Tensor:
    """[] positions that this rank's share of a step is counted over."""
    return torch.stack([trainee.counted(*source.masks(piece)) for piece in pieces]).sum()
