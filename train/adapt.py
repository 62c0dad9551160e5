"""A drafter that goes on from a trained one: whole, or with an adapter on it. V tokens."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import Run
from decode.opening import identity_of, trained_by
from models.adapter import attach
from models.drafter import Drafter
from models.ends import Ends
from models.shelf import digest, family_class, knobs_of, load_drafter, read_card, require_target
from models.source import from_hub
from models.vocabulary import DraftVocabulary


def known_start(run: Run) -> Path | None:
    """Where `init_from` is a conf: what that trained, or the drafter that ships for it."""
    return trained_by(str(run.init_from), Path("outputs", str(run.init_from)))


def start_folder(run: Run) -> Path:
    """The folder of the drafter that `init_from` names: a conf's, else a folder or Hub name."""
    return known_start(run) or from_hub(str(run.init_from), kind="drafter")


def settle_start(run: Run) -> None:
    """Raise ValueError where `init_from` names no drafter of this family, with these knobs and for this target.

    Its draft vocabulary may differ: a smaller one is extended, and a larger one kept, which the run is told.
    """
    if run.init_from is None:
        if run.peft:
            raise ValueError("an adapter needs a trained drafter to stand on; name it with init_from=")
        return
    folder = start_folder(run)
    card = read_card(folder)
    if card.family != run.drafter["_target_"]:
        raise ValueError(
            f"init_from={run.init_from} is a {card.family} and this run trains a {run.drafter['_target_']}; choose the conf of the former"
        )
    there, here = (with_defaults(card.family, knobs) for knobs in (card.knobs, knobs_of(run.drafter)))
    if here.get("vocabulary"):
        whole = there["vocabulary"] is None
        run.drafter["vocabulary"] = None if whole else max(here["vocabulary"], there["vocabulary"])
        here["vocabulary"] = there["vocabulary"]
    if differing := [name for name in there if there[name] != here[name]]:
        told = ", ".join(f"{name} is {there[name]} there and {here[name]} here" for name in differing)
        raise ValueError(
            f"init_from={run.init_from} was made otherwise: {told}; set {' '.join(f'drafter.{name}={there[name]}' for name in differing)}"
        )
    identity = identity_of(run.target)
    if card.target["fingerprint"] != identity.base:  # a drafter of the same target without its adapter is a start
        require_target(card, folder, identity)


def with_defaults(family: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """All knobs of `family`, those that are not set at their defaults."""
    known = list(inspect.signature(family_class(family, knobs)).parameters.values())[1:]
    return {one.name: knobs.get(one.name, one.default) for one in known}


def go_on_from(run: Run, drafter: Drafter, ends: Ends, counts: Tensor, quiet: bool = False) -> None:
    """Give `drafter` the weights that `init_from` names, and an adapter where one is asked for.

    A larger draft vocabulary keeps the tokens there were and takes those that the target says most, by `counts` [V].
    """
    if not any(True for _ in drafter.parameters()):
        raise ValueError(
            f"{run.drafter['_target_']} has no weights to adapt: it is only counted. Train it on the new data without init_from"
        )
    folder = start_folder(run)
    before = load_drafter(folder, read_card(folder), ends, torch.float32)
    told = extend(drafter, before, counts)
    if run.peft:
        names = attach(drafter, run.peft.r, run.peft.alpha, run.peft.targets)
        drafter.to(ends.head.device)
        few = sum(each.numel() for each in drafter.parameters() if each.requires_grad)
        many = sum(each.numel() for each in before.parameters())
        told += f"; an adapter of {few:,} weights on {len(names)} layers, {few / many:.1%} of the drafter's"
    if not quiet:
        print(f"going on from {folder}{told}")


def extend(drafter: Drafter, before: Drafter, counts: Tensor) -> str:
    """Copy what `before` has learned to `drafter`, whose draft vocabulary may be larger; what that means, in words."""
    old, new = vocabulary_of(before), vocabulary_of(drafter)
    if old is None or new is None or old.size == new.size:
        drafter.load_state_dict(before.state_dict())
        return (
            ""
            if old is None or not old.reduced
            else f"; its draft vocabulary of {old.size:,} tokens covers {share(old, counts):.1%} of what the target says here"
        )
    known = old.t2d.to(counts.device)
    drafter.learn_vocabulary(counts + known * (counts.max() + 1))  # whatever was in it comes first
    assert old.ids is not None
    place, theirs = new.to_draft(old.ids), before.state_dict()
    kept = {id(new.d2t), id(new.t2d)}
    for name, value in drafter.state_dict(keep_vars=True).items():
        if id(value) not in kept and value.shape == theirs[name].shape:
            value.data.copy_(theirs[name])
        elif id(value) not in kept:
            value.data[place] = theirs[name]  # the rows of new tokens stay as they begin: the target's
    return f"; its draft vocabulary grows from {old.size:,} to {new.size:,} tokens and covers {share(new, counts):.1%} of what the target says here, {share(old, counts):.1%} before"


def vocabulary_of(drafter: Drafter) -> DraftVocabulary | None:
    return next((part for part in drafter.modules() if isinstance(part, DraftVocabulary)), None)


def share(vocabulary: DraftVocabulary, counts: Tensor) -> float:
    """Which share of what the target said, `counts` [V], the draft vocabulary can say."""
    said = counts if vocabulary.ids is None else counts[vocabulary.ids.to(counts.device)]
    return float(said.sum() / counts.sum())


def adapter_of(run: Run) -> dict[str, Any]:
    """What the card says of an adapter that is saved alone: nothing where there is none."""
    if run.peft is None or run.peft.merge or run.init_from is None:
        return {}
    folder = start_folder(run)
    return {
        "r": run.peft.r,
        "alpha": run.peft.alpha,
        "targets": run.peft.targets,
        "of": str(known_start(run) or run.init_from),
        "digest": digest(folder, read_card(folder)),
    }
