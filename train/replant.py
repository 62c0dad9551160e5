"""A new tree for a drafter that exists: what `python -m train.trees` does."""

import shutil
from pathlib import Path

from accelerate import Accelerator
from rich.console import Console

from conf.schema import Run
from decode.opening import find_drafter, open_target
from models.shelf import CARD, WEIGHTS, Card, load_drafter, make_folder, read_card, require_target, write_card
from train.features import Source
from train.job import conversations, reader_for
from train.trees import NODES, compared, recommend


def replant(run: Run) -> None:
    """The command: search the tree of the run's drafter on its held-out conversations, and write it into the card in run.out.

    The card keeps all else. A drafter from elsewhere, such as one that ships, is copied to run.out with its new card.
    """
    found, out = find_drafter(run), Path(run.out)
    if isinstance(found, Card):
        raise ValueError(f"{found.family} needs no training and has no card; set decode.tree to choose its tree")
    here = out.resolve() == found.resolve()
    if not here and (out / CARD).exists() and not run.overwrite:
        raise ValueError(f"{out} holds another drafter than {found}; choose out=, or overwrite=true to replace it")
    card = read_card(found)
    make_folder(out)
    target = open_target(run.target)
    require_target(card, found, target.identity)
    drafter = load_drafter(found, card, target.ends, target.dtype)
    target.tap(drafter.taps)
    _, _, held = conversations(run, target)
    source = Source(held, reader_for(run, target, held, Accelerator()), run.optim.batch, run.seed)
    turns = recommend(drafter, source, card, max(NODES, run.decode.nodes))
    if not turns:
        raise ValueError(
            f"{card.family} takes one step after the other and grows its trees as it drafts; it has no static one to search"
        )
    if len(turns) > 3:
        Console().print(compared(turns))
    if not here:
        shutil.copyfile(found / WEIGHTS, out / WEIGHTS)
    write_card(card, out)
    print(f"the tree of up to {len(card.tree) + 1} nodes is in {out / CARD}")
