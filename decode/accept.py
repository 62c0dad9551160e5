"""The accept rules: which branch of a proposal becomes text. The text stays the target's own, but for typical acceptance.

B rows, N nodes, P path nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.sampling import Draw, Sampling, Voice
from models.tree import Node, TokenTree, path_to


@dataclass(frozen=True)
class Accepted:
    """For each row one path, and the target's own token after it; in main memory, where they are told from."""

    paths: list[list[int]]  # the nodes from the root on: tokens of the proposal that are committed
    bonus: list[int]


def accept_greedy(tree: TokenTree, logits: Tensor) -> Accepted:
    """The longest path on which every token is the target's first choice after its parent; ties go to the earlier node."""
    choices = first_of_largest(logits)
    paths = [_longest(nodes, said) for nodes, said in zip(tree.listed, choices, strict=True)]
    return Accepted(paths, [said[path[-1]] for path, said in zip(paths, choices, strict=True)])


def first_of_largest(logits: Tensor) -> list[list[int]]:
    """[B][N] where the largest of `logits` [B, N, V] stands, the first of equals.

    On a CPU numpy finds it twenty times as fast as torch, if 16-bit floats are read as integers: those above zero are in
    the order of their bits.
    """
    if logits.device.type != "cpu":
        return logits.max(-1).indices.tolist()  # of bf16 four times faster than argmax, and the first of equals as well
    if logits.dtype not in (torch.bfloat16, torch.float16):
        return logits.numpy().argmax(-1).tolist()
    bits = logits.view(torch.int16).numpy()
    found = bits.argmax(-1).tolist()
    above_zero = all(bits[row, node, at] > 0 for row, places in enumerate(found) for node, at in enumerate(places))
    return found if above_zero else logits.max(-1).indices.tolist()


def _longest(nodes: list[Node], said: list[int]) -> list[int]:
    """The path down to the deepest node that follows only what the target `said` after the node above."""
    depth, leaf = {0: 0}, 0
    for number, node in enumerate(nodes):
        if number and node.valid and node.parent in depth and node.token == said[node.parent]:
            depth[number] = depth[node.parent] + 1
            leaf = number if depth[number] > depth[leaf] else leaf
    return path_to(nodes, leaf)


def accept_sampled(tree: TokenTree, logits: Tensor, sampling: Sampling, draws: Sequence[Draw]) -> Accepted:
    """A path and a bonus token distributed as the target's own sampling, by recursive rejection (SpecInfer; EAGLE).

    Children that are top picks are certain proposals: accepted with the target's probability of the token, else that
    token is struck out. Children drawn from `child_probs` without replacement are accepted with min(1, target/draft),
    else the target's excess over the draft is what is left.
    """
    target_probs = sampling.probs(logits).cpu()
    paths, bonus = [], []
    for row, (nodes, draw) in enumerate(zip(tree.listed, draws, strict=True)):
        draft_probs = None if tree.child_probs is None else tree.child_probs[row].to(target_probs)
        path, last = _walk(nodes, target_probs[row], draft_probs, draw)
        paths.append(path)
        bonus.append(last)
    return Accepted(paths, bonus)


def _walk(nodes: list[Node], target_probs: Tensor, draft_probs: Tensor | None, draw: Draw) -> tuple[list[int], int]:
    children: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        if number and node.valid:
            children[node.parent].append(number)
    path = [0]
    while True:
        left = target_probs[path[-1]].clone()
        guess = None if draft_probs is None else draft_probs[path[-1]].clone()
        for child in children[path[-1]]:
            token = nodes[child].token
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
    leaves = leaf.tolist()
    bonus = [draw(probs[row, leaves[row]]) for row, draw in enumerate(voice.draws)]
    paths = [path_to(nodes, end) for nodes, end in zip(tree.listed, leaves, strict=True)]
    return Accepted(paths, bonus)


def accept(tree: TokenTree, logits: Tensor, voice: Voice, typical: Typical | None = None) -> Accepted:
    """The lossless rule for this temperature, or the lossy one that is asked for.

    At temperature 0 only the target's first choice has any probability, so that typical acceptance is greedy too.
    """
    if not voice.sampling.temperature:
        return accept_greedy(tree, logits)
    if typical is not None:
        return accept_typical(tree, logits, voice, typical)
    return accept_sampled(tree, logits, voice.sampling, voice.draws)
