"""The accept rules: which branch of a proposal becomes text, so that the text stays the target's own.

B rows, N nodes, P path nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.sampling import Draw, Sampling, Voice
from models.tree import TokenTree


@dataclass(frozen=True)
class Accepted:
    """One path a row, from the root on, and the target's own token after it."""

    path: Tensor  # [B, P] node indices, padded with 0
    length: Tensor  # [B] nodes on the path, root included: tokens of the proposal that are committed
    bonus: Tensor  # [B]


def accept_greedy(tree: TokenTree, logits: Tensor) -> Accepted:
    """The longest path on which every token is the target's first choice after its parent; ties go to the earlier node."""
    choice = logits.argmax(-1)
    expected = choice.gather(1, tree.parents.clamp(min=0))
    right = tree.valid & (tree.tokens == expected)
    right[:, 0] = True
    reached = (right[:, None] | ~tree.mask).all(-1)
    leaf = torch.where(reached, tree.depth, -1).argmax(-1)
    rows = torch.arange(len(leaf), device=leaf.device)
    on_path = tree.mask[rows, leaf]
    length = on_path.sum(-1)
    path = (
        (~on_path).to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(length.max())]
    )  # parents come first, so index order is path order
    return Accepted(
        path.where(torch.arange(path.shape[1], device=path.device) < length[:, None], 0), length, choice[rows, leaf]
    )


def accept_sampled(tree: TokenTree, logits: Tensor, sampling: Sampling, draws: Sequence[Draw]) -> Accepted:
    """A path and a bonus token distributed as the target's own sampling, by recursive rejection (SpecInfer; EAGLE).

    Children that are top picks are certain proposals: accepted with the target's probability of the token, else that
    token is struck out. Children drawn from `child_probs` without replacement are accepted with min(1, target/draft),
    else the target's excess over the draft is what is left.
    """
    target_probs = sampling.probs(logits).cpu()
    parents, tokens, valid = tree.parents.tolist(), tree.tokens.tolist(), tree.valid.tolist()
    paths, bonus = [], []
    for row, draw in enumerate(draws):
        children: list[list[int]] = [[] for _ in parents[row]]
        for node, parent in enumerate(parents[row]):
            if node and valid[row][node]:
                children[parent].append(node)
        draft_probs = None if tree.child_probs is None else tree.child_probs[row].to(target_probs)
        path, last = _walk(children, tokens[row], target_probs[row], draft_probs, draw)
        paths.append(torch.tensor(path))
        bonus.append(last)
    padded = torch.nn.utils.rnn.pad_sequence(paths, batch_first=True)
    length = torch.tensor([len(path) for path in paths])
    device = tree.tokens.device
    return Accepted(padded.to(device), length.to(device), torch.tensor(bonus, device=device))


def _walk(
    children: list[list[int]], tokens: list[int], target_probs: Tensor, draft_probs: Tensor | None, draw: Draw
) -> tuple[list[int], int]:
    path = [0]
    while True:
        left = target_probs[path[-1]].clone()
        guess = None if draft_probs is None else draft_probs[path[-1]].clone()
        for child in children[path[-1]]:
            token = tokens[child]
            if guess is not None and not guess[token]:
                continue  # it cannot have been drawn: the drafter had run out of tokens
            odds = left[token] / left.sum()  # exactly 1 where nothing else is left
            if guess is not None:
                odds = (odds / (guess[token] / guess.sum())).clamp(max=1.0)
            if draw(torch.stack([1 - odds, odds])):
                path.append(child)
                break
            if guess is None:
                left[token] = 0.0
            else:
                excess = (left / left.sum() - guess / guess.sum()).clamp(min=0.0)
                left = excess if excess.any() else left  # no excess: the two differ by rounding only
                guess[token] = 0.0
        else:
            return path, draw(left)


def accept(tree: TokenTree, logits: Tensor, voice: Voice) -> Accepted:
    """The lossless rule for this temperature."""
    if voice.sampling.temperature:
        return accept_sampled(tree, logits, voice.sampling, voice.draws)
    return accept_greedy(tree, logits)
