"""Prompt lookup (Saxena 2023; Yang et al. 2023): what followed the last few tokens where they stood before, follows again."""

from dataclasses import dataclass, field, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from models.drafter import Budget, Committed, Drafter
from models.ends import Ends
from models.sampling import Voice
from models.tree import TokenTree


@dataclass
class Text:
    """What one row has said so far, and where each of its n-grams was last gone on from."""

    sizes: range
    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> the place after its last occurrence

    def extend(self, tokens: list[int]) -> None:
        """Go on with `tokens`: what is spent on each does not depend on how long the text is."""
        for token in tokens:
            self.tokens.append(token)
            for size in self.sizes:
                if size <= len(self.tokens):
                    self.after[tuple(self.tokens[-size:])] = len(self.tokens)

    def guess(self, bonus: int, count: int) -> list[int]:
        """Up to `count` tokens that followed the most recent earlier occurrence of the longest known end of text and `bonus`."""
        for size in reversed(self.sizes):
            end = (*self.tokens[len(self.tokens) - size + 1 :], bonus) if size <= len(self.tokens) + 1 else ()
            if (start := self.after.get(end)) is not None:
                return [*self.tokens[start : start + count], bonus][:count]
        return []


class Ngram(Drafter):
    """A chain of what followed the last `longest` tokens when they stood in prompt or text before, else the last
    `longest` - 1, down to `shortest`; where none did, nothing. It is as long as the tree is deep, or, where none is
    named, has nodes.
    """

    needs_training = False

    def __init__(self, ends: Ends, longest: int = 4, shortest: int = 2):
        super().__init__()
        if not 1 <= shortest <= longest:
            raise ValueError(f"longest={longest} shortest={shortest}: shortest is at least 1 and at most longest")
        self.sizes = range(shortest, longest + 1)

    def begin(self, rows: int, capacity: int) -> list[Text]:
        """The text of every row."""
        return [Text(self.sizes) for _ in range(rows)]

    def propose(self, committed: Committed, state: list[Text], budget: Budget, voice: Voice) -> TokenTree:
        """One chain a row, of its own length."""
        depth = max(map(len, budget.paths)) if budget.paths else budget.nodes - 1
        lengths, bonus = committed.length.tolist(), committed.bonus.tolist()
        chains = []
        for row, fresh in enumerate(committed.fresh.tolist()):
            if fresh:
                state[row] = Text(self.sizes)
            state[row].extend(committed.tokens[row, : lengths[row]].tolist())
            chains.append([bonus[row], *state[row].guess(bonus[row], depth)])
        return chains_of(chains, committed.bonus.device)


def chains_of(chains: list[list[int]], device: torch.device) -> TokenTree:
    """One chain a row, root included; the nodes of shorter ones that nobody needs are not valid."""
    padded = pad_sequence([torch.tensor(chain) for chain in chains], batch_first=True).to(device)
    lengths = torch.tensor([len(chain) for chain in chains], device=device)
    used = torch.arange(padded.shape[1], device=device) < lengths[:, None]
    return replace(TokenTree.chains(padded), valid=used)
