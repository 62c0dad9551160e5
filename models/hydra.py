"""Hydra heads (Ankner et al. 2024): Medusa heads that also read the tokens drafted before them.

Head k reads the final hidden state at t and tokens t + 1 to t + k, and foretells token t + 1 + k.
B rows, T positions, P committed tokens, F growing nodes, D width, R supervised positions.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from models.drafter import Committed, FeatureBatch
from models.ends import Ends
from models.growth import Ask
from models.layer import PlainLayer, layer_config
from models.medusa import Medusa, Residual
from models.stack import Memory, read
from models.transfer import sent


class Grafted(nn.Module):
    """x + SiLU(W [x, embeddings] + b), where x is the first `width` of what it reads; the identity in x at the start."""

    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.width = width
        self.linear = nn.Linear((1 + tokens) * width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, read: Tensor) -> Tensor:
        return read[..., : self.width] + nn.functional.silu(self.linear(read))


class Prefix(PlainLayer):
    """A decoder layer over the target's final hidden states (Hydra++): the heads see the text, not its last state alone.

    It adds nothing at the start.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)


class Hydra(Medusa):
    """Medusa whose head k also reads the embeddings of the k tokens before its guess.

    Embeddings, which are small, are scaled to a mean square of 1; the authors read them as they are.
    `prefix`: a decoder layer of its own reads the text, and the heads its states (Hydra++, which also has loss=kl
    and layers=4). The other knobs are Medusa's.
    """

    def __init__(
        self,
        ends: Ends,
        heads: int = 4,
        layers: int = 1,
        head: str = "own",
        vocabulary: int | None = None,
        loss: str | dict[str, float] = "ce",
        decay: float | str = 0.8,
        prefix: bool = False,
    ):
        super().__init__(ends, heads, layers, head, vocabulary, loss, decay)
        self.prefix = Prefix(layer_config(ends.config, ends.width)) if prefix else None

    def block(self, head: int, layers: int) -> nn.Module:
        width = self.ends.width
        return nn.Sequential(Grafted(width, head + 1), *(Residual(width) for _ in range(layers - 1)))

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] with a mean square of 1, in this drafter's precision."""
        embeddings = self.ends.embed(tokens)
        return nn.functional.rms_norm(embeddings, embeddings.shape[-1:]).to(next(self.parameters()).dtype)

    def read(self, batch: FeatureBatch) -> Tensor:
        hidden = super().read(batch)
        if self.prefix is None:
            return hidden
        earlier = batch.position[:, None] <= batch.position[..., None]
        document = sent(batch.document, hidden.device)
        seen = earlier & (document[:, None] == document[..., None])
        return self.prefix.through(self.prefix.inputs(hidden), batch.position, seen)

    def states(self, head: int, batch: FeatureBatch, read: Tensor, row: Tensor, at: Tensor) -> Tensor:
        path = at[:, None] + 1 + torch.arange(head + 1, device=at.device)
        tokens = self.embedded(batch.input_ids[row[:, None], path]).flatten(1)
        return self.blocks[head](torch.cat([read[row, at], tokens], dim=-1))

    def begin(self, rows: int, capacity: int) -> Memory | None:
        """Room for the keys and values of the text, where heads read it."""
        return Memory(rows, capacity) if self.prefix is not None else None

    def asking(self, committed: Committed, state: Memory | None, depth: int) -> Ask:
        """Heads say something else below every node; only nodes with children are asked."""
        last = committed.last_hidden if state is None else self._follow(committed, state)
        return Growing(self, last)

    def _follow(self, committed: Committed, memory: Memory) -> Tensor:
        """Let the prefix layer read what was committed: its state [B, D] at each row's last token."""
        assert self.prefix is not None
        last = (committed.length - 1).clamp(min=0)[:, None]
        memory.seat(committed)
        return read([self.prefix], memory, self.prefix.inputs(committed.hidden), last)[:, 0]


class Growing:
    """One round of drafting: what the next head says below every node that grows."""

    def __init__(self, drafter: Hydra, hidden: Tensor):
        self.drafter, self.head = drafter, 0
        self.read = hidden[:, None]  # [B, F, (1 + head) * D] the hidden state, and the path down to each node

    def __call__(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits [B, F, V] of what follows `tokens` [B, F], children of the nodes at `places` [B, F]."""
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        self.read = torch.cat([self.read[row, places], self.drafter.embedded(tokens)], dim=-1)
        states = self.drafter.blocks[self.head](self.read)
        said = self.drafter.head_logits(self.head, states)
        self.head += 1
        return said
