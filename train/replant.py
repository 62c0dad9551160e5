"""A new tree for a drafter that exists: what `python -m train.trees` does."""

import shutil
from pathlib import Path

from rich.console import Console

from conf.schema import Features, Run
from decode.opening import find_drafter, open_target
from models.drafter import Drafter
from models.shelf import (
    CARD,
    Card,
    family_class,
    load_drafter,
    make_folder,
    read_card,
    require_target,
    write_card,
)
from train.features import Live, Reader, Source
from train.job import conversations
from train.store import open_store
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
    if family_class(card.family, card.knobs).ranks is Drafter.ranks:
        raise ValueError(
            f"{card.family} grows its trees as it drafts and has no static one to search; use decode.tree=dynamic"
        )
    make_folder(out)
    target = open_target(run.target)
    require_target(card, found, target.identity)
    drafter = load_drafter(found, card, target.ends, target.dtype)
    target.tap(drafter.taps)
    _, _, held = conversations(run, quiet=False)
    reader: Reader = Live(target)
    if run.data.features is Features.cached:
        reader = open_store(run.data.store, target, held)
        reader.fill(target, held)
    turns = recommend(drafter, Source(held, reader, run.optim.batch, run.seed), card, max(NODES, run.decode.nodes))
    if len(turns) > 3:
        Console().print(compared(turns))
    if not here:
        for file in found.glob("*.safetensors"):
            shutil.copyfile(file, out / file.name)
    write_card(card, out)
    print(f"the tree of up to {len(card.tree) + 1} nodes is in {out / CARD}")
