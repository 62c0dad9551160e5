"""The accept rules: which branch of a proposal becomes text. The text stays the target's own, but for typical acceptance.

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
    choice = logits.max(-1).indices  # of bf16 four times faster than argmax, and the first of equals as well
    expected = choice.gather(1, tree.parents.clamp(min=0))
    right = tree.valid & (tree.tokens == expected)
    right[:, 0] = True
    reached = (right[:, None] | ~tree.mask).all(-1)
    leaf = torch.where(reached, tree.depth, -1).argmax(-1)
    return Accepted(*_path_to(tree, leaf), choice.gather(1, leaf[:, None])[:, 0])


def _path_to(tree: TokenTree, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes from the root down to `leaf` [B], padded with 0, and how many they are."""
    on_path = tree.mask[torch.arange(len(leaf), device=leaf.device), leaf]
    length = on_path.sum(-1)
    path = (
        (~on_path).to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(length.max())]
    )  # parents come first, so index order is path order
    return path.where(torch.arange(path.shape[1], device=path.device) < length[:, None], 0), length


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


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Cai et al. 2024): lossy. Whatever the target finds not too unlikely stands, however unlikely it is to say it.

    A guess is too unlikely where its probability is at most `epsilon`, and at most `delta` * exp(-entropy) where the
    target is unsure. Both so large that no probability is above them make it plain decoding.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1 or not 0 < self.delta < float("inf"):
            raise ValueError(
                f"epsilon={self.epsilon} delta={self.delta} is no typical acceptance: epsilon is in (0, 1], delta is above 0"
            )


def accept_typical(tree: TokenTree, logits: Tensor, voice: Voice, typical: Typical) -> Accepted:
    """The longest path of typical guesses; of equally long ones the likeliest, then the one of the earlier node.

    Probabilities are those of the row's sampling: temperature and truncation included. The bonus token is drawn from the
    target at the end of the path, as is the first token of the text; the authors' code takes the target's first choice
    for both by default, which is no sampling at all.
    """
    probs = voice.sampling.probs(logits)
    above = tree.parents.clamp(min=0)
    odds = probs[torch.arange(len(probs), device=probs.device)[:, None], above, tree.tokens]
    least = (typical.delta * torch.special.entr(probs).sum(-1).neg().exp()).clamp(max=typical.epsilon)
    right = tree.valid & (odds > least.gather(1, above))
    right[:, 0], odds[:, 0] = True, 1.0
    reached = (right[:, None] | ~tree.mask).all(-1)
    longest = torch.where(reached, tree.depth, -1)
    worth = torch.where(tree.mask, odds.log()[:, None], 0.0).sum(-1)
    leaf = worth.masked_fill(longest < longest.max(-1, keepdim=True).values, -torch.inf).argmax(-1)
    bonus = [draw(probs[row, leaf[row]]) for row, draw in enumerate(voice.draws)]
    return Accepted(*_path_to(tree, leaf), torch.tensor(bonus, device=leaf.device))


def accept(tree: TokenTree, logits: Tensor, voice: Voice, typical: Typical | None = None) -> Accepted:
    """The lossless rule for this temperature, or the lossy one that is asked for.

    At temperature 0 only the target's first choice has any probability, so that typical acceptance is greedy too.
    """
    if not voice.sampling.temperature:
        return accept_greedy(tree, logits)
    if typical is not None:
        return accept_typical(tree, logits, voice, typical)
    return accept_sampled(tree, logits, voice.sampling, voice.draws)
