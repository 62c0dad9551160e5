"""Trees grown level by level, for drafters whose guesses depend on the branch they stand on.

B rows, F nodes that grow at a level, W children of each, V draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.drafter import Budget
from models.tree import Path, TokenTree, parents_of

# tokens [B, F] and where their parents stood [B, F] among the nodes that grew before
# -> log-probabilities [B, F, V] of what follows, and the target's id of each draft token comes from `spell`
Ask = Callable[[Tensor, Tensor], Tensor]
Spell = Callable[[Tensor], Tensor]


def grow(root: Tensor, ask: Ask, spell: Spell, budget: Budget) -> TokenTree:
    """A tree below the tokens `root` [B]: the static one of `budget.paths`, or a dynamic one where there are none."""
    if budget.paths:
        return grow_static(root, ask, spell, budget.paths)
    return grow_dynamic(root, ask, spell, budget.depth, budget.branch, budget.nodes)


def grow_static(root: Tensor, ask: Ask, spell: Spell, paths: tuple[Path, ...]) -> TokenTree:
    """The tree of `paths`: only nodes with children are asked what follows."""
    inner = sorted({path[:-1] for path in paths}, key=lambda path: (len(path), path))
    found: dict[Path, Tensor] = {(): root}
    before: dict[Path, int] = {(): 0}
    for depth in range(len(inner[-1]) + 1):
        growing = [path for path in inner if len(path) == depth]
        width = 1 + max(path[-1] for path in paths if len(path) == depth + 1)
        tokens = torch.stack([found[path] for path in growing], dim=1)
        places = torch.tensor([before[path[:-1]] for path in growing], device=root.device)
        log_probs = ask(tokens, places.expand_as(tokens))
        if width > log_probs.shape[-1]:
            raise ValueError(
                f"the tree takes the {width}th pick of a draft vocabulary of {log_probs.shape[-1]} tokens; choose a narrower tree"
            )
        picks = spell(log_probs.topk(width).indices)
        before = {path: place for place, path in enumerate(growing)}
        for path in paths:
            if len(path) == depth + 1:
                found[path] = picks[:, before[path[:-1]], path[-1]]
    tokens = torch.stack([root, *(found[path] for path in paths)], dim=1)
    parents = torch.tensor(parents_of(paths), device=root.device).expand_as(tokens)
    return TokenTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))


def grow_dynamic(root: Tensor, ask: Ask, spell: Spell, depth: int, branch: int, nodes: int) -> TokenTree:
    """The `nodes` nodes, root included, with the most probable paths among all that were drafted (EAGLE-2, section 4).

    At each of `depth` levels the `branch` most probable nodes of the level before grow, by as many children each.
    A child is never more probable than its parent and is made after it, so a stable sort takes the parent first.
    """
    tokens, places, scores = root[:, None], torch.zeros_like(root)[:, None], torch.zeros_like(root).float()[:, None]
    made = torch.zeros_like(tokens)  # [B, F] each growing node's number among all candidates, the root being 0
    every: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and scores of the candidates of each level
    count = 1
    for _ in range(depth):
        log_probs = ask(tokens, places)
        best = log_probs.topk(min(branch, log_probs.shape[-1]))
        width = best.indices.shape[-1]
        children = spell(best.indices).flatten(1)
        worth = (scores[..., None] + best.values).flatten(1)
        every.append((children, made.repeat_interleave(width, dim=1), worth))
        top = worth.topk(min(branch, worth.shape[1]))
        tokens, places, scores = children.gather(1, top.indices), top.indices // width, top.values
        made = count + top.indices
        count += children.shape[1]
    candidates, parents, worth = (torch.cat(part, dim=1) for part in zip(*every, strict=True))
    chosen = worth.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1].sort(dim=1).values
    number = torch.zeros(len(root), count, dtype=torch.long, device=root.device)
    number.scatter_(1, chosen + 1, torch.arange(1, chosen.shape[1] + 1, device=root.device).expand_as(chosen))
    above = number.gather(1, parents.gather(1, chosen))
    return TokenTree(
        torch.cat([root[:, None], candidates.gather(1, chosen)], dim=1),
        torch.cat([torch.full_like(root, -1)[:, None], above], dim=1),
        torch.ones(len(root), chosen.shape[1] + 1, dtype=torch.bool, device=root.device),
    )
