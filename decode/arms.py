"""The drafters under measurement: where each is, whose it is, and what it may propose; all known before weights load."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conf.schema import Decode, Proposal, Run
from decode.choice import PLAIN, STATIC, recall
from decode.opening import called, find_beside, find_drafter, identity_of
from models.drafter import Budget
from models.native import compiles
from models.shelf import Card, family_class, read_card, require_target
from models.target import device_of, resolve_dtype
from models.tree import chain, ordered_paths, published_trees


@dataclass
class Arm:
    """One drafter under measurement."""

    name: str
    folder: Path | None  # None: it needs no training
    card: Card
    budget: Budget


def arms_of(run: Run) -> list[Arm]:
    """The run's drafter and those beside it, checked against the target."""
    how = run.decode
    found = [(run.conf_name, find_drafter(run)), *((Path(name).name, find_beside(name)) for name in how.beside)]
    arms = [arm_of(name, where, as_tuned(run, name, where) if how.tree == "tuned" else how) for name, where in found]
    identity = identity_of(run.target)
    for arm in arms:
        if arm.folder is not None:
            require_target(arm.card, arm.folder, identity)
    return arms


def arm_of(name: str, found: Path | Card, how: Decode) -> Arm:
    """The drafter that was found, in a folder or as a card alone, and what it may propose."""
    folder, card = (None, found) if isinstance(found, Card) else (found, read_card(found))
    budget = budget_for(how, card)
    require_reach(card, budget)
    return Arm(name, folder, card, budget)


def require_reach(card: Card, budget: Budget) -> None:
    """Raise ValueError where the static tree is deeper than the drafter guesses."""
    reach = family_class(card.family, card.knobs).reach(card.knobs)
    depth = max(map(len, budget.paths), default=0)
    if reach is not None and depth > reach:
        raise ValueError(
            f"the tree is {depth} deep and this drafter has {reach} heads; choose a shallower tree with decode.tree= or decode.depth="
        )


def as_tuned(run: Run, name: str, found: Path | Card) -> Decode:
    """`run.decode` with the tree that decode.tune chose for the drafter `name` on this machine."""
    how = run.decode
    arm = arm_of(name, found, replace(how, tree="auto"))
    choice = recall(name, holds_for(run, arm), how.rows, (how.longest + how.tokens) // 2)
    option = choice.option
    if option.kind == PLAIN:
        raise ValueError(
            f"decode.tree=tuned: with decode.rows={how.rows} no tree of {name} pays on this machine, so plain decoding was chosen "
            f"and there is nothing to measure; decode.tree=auto shows by how much"
        )
    how = replace(how, nodes=option.nodes, depth=option.depth, least=option.least)
    if option.kind == STATIC:
        return replace(how, tree=[path for path in arm.card.tree[: option.nodes - 1] if len(path) <= option.depth])
    return replace(how, tree=option.kind)


def holds_for(run: Run, arm: Arm) -> dict[str, Any]:
    """The hardware and settings that a curve belongs to."""
    device = device_of(run.target.device)
    kind = resolve_dtype(run.target.dtype, device)
    return {
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(kind),
        "compiled": compiles(run.target.compile, device, kind),
        "target": called(run.target),
        "drafter": {"family": arm.card.family, "knobs": arm.card.knobs, "training": arm.card.training},
        "branch": run.decode.branch,
    }


def cpu_name() -> str:
    """What the processor calls itself."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def budget_for(how: Decode, card: Card) -> Budget:
    """How much may be proposed: the tree that `decode.tree` names, checked before weights load."""
    sampled = how.proposal is Proposal.sampled
    if how.least and how.tree not in ("auto", "chain", "dynamic"):
        raise ValueError(
            "decode.least chooses among paths by their probability; take decode.tree=dynamic or chain with it"
        )
    if how.tree == "dynamic" or (how.tree == "auto" and (how.least or not card.tree)):
        return Budget((), how.nodes, how.depth, how.branch, how.least, sampled)
    if how.tree == "chain" and how.least:
        return Budget.chain(how.depth, how.least)
    if how.tree == "auto":
        paths = ordered_paths(card.tree[: how.nodes - 1])
    elif how.tree == "chain":
        paths = chain(how.depth)
    elif isinstance(how.tree, str) and how.tree in (published := published_trees()):
        paths = ordered_paths(published[how.tree])
    elif how.tree and isinstance(how.tree, list) and all(isinstance(path, list) for path in how.tree):
        paths = ordered_paths(how.tree)
    else:
        raise ValueError(
            f"decode.tree={how.tree}; use auto, chain, dynamic, tuned, or a list of paths such as [[0],[1],[0,0]], or a published tree: {', '.join(published_trees())}"
        )
    return Budget(tuple(paths), max(how.nodes, len(paths) + 1), how.depth, sampled=sampled)


def require_least(part: str, how: Any, least: Mapping[str, int]) -> None:
    """Raise ValueError where a setting of `part`, or a number that it lists, is below what measures anything."""
    for name, value in least.items():
        given = getattr(how, name)
        if isinstance(given, list):
            if not given or min(given) < value:
                raise ValueError(f"{part}.{name}={given} measures nothing; name numbers of at least {value}")
        elif given < value:
            raise ValueError(f"{part}.{name}={given} measures nothing; give at least {value}")


def beyond(arm: Arm, tokens: int) -> str | None:
    """What to say where texts of `tokens` tokens are longer than any that a drafter which attends to them learned from."""
    longest, knobs = arm.card.training.get("longest"), arm.card.knobs
    if not longest or tokens <= longest or "window" not in knobs:
        return None
    if (knobs["window"] or tokens) <= longest or tokens <= longest * knobs.get("stretch", 1.0):
        return None
    return (
        f"{arm.name}: texts of up to {tokens} tokens, and it learned from none longer than {longest}, so its later guesses may be worse. "
        f"`window: {longest}` in its drafter.yaml lets it look back no further; python -m train.long_context measures what that is worth"
    )


def widest(arms: Sequence[Arm]) -> int:
    """Nodes of the largest tree that may be proposed."""
    return max(max(arm.budget.nodes, len(arm.budget.paths) + 1) for arm in arms)
