"""A small causal LM drafts for a large one (Leviathan et al. 2023), or the target's own first layers do.

B rows, P committed tokens, N nodes, F growing nodes, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoTokenizer

from models.cache import KVCache
from models.drafter import Budget, Committed, Drafter, FeatureBatch, Loss, counted
from models.ends import Ends
from models.growth import grow
from models.losses import first_depth
from models.sampling import Voice
from models.source import from_hub
from models.target import Target, load_target
from models.tree import TokenTree
from models.vocabulary import DraftVocabulary


class DraftModel(Drafter):
    """The causal LM `name`, a folder or Hub name, at `revision`; without a name, the target's own first `layers`.

    It is read as a target is, with a cache of its own. Nothing of it is trained or saved.
    """

    needs_training = False

    def __init__(self, ends: Ends, name: str | None = None, layers: int = 4, revision: str | None = None):
        super().__init__()
        assert ends.target is not None, "a draft model stands beside a target that is loaded whole"
        self.ends = ends
        self.model = ends.target.shallow(layers) if name is None else beside(ends.target, name, revision)
        size = min(self.model.ends.vocabulary, ends.vocabulary)  # either head may be padded beyond the tokenizer
        self.vocabulary = DraftVocabulary(size if size < ends.vocabulary else None, ends.vocabulary)

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[1] positions at which its first guess is asked."""
        return counted(loss_mask, document, 1)

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """What its first guess is worth on `batch`; there is nothing to train."""
        ids = self.readable(batch.input_ids)
        hidden = self.model.documents(ids, batch.loss_mask, batch.document, batch.position).last_hidden
        return first_depth(batch, self.ends, self.vocabulary, lambda row, at: self._logits(hidden[row, at]))

    def readable(self, tokens: Tensor) -> Tensor:
        """`tokens`, where those beyond a smaller embedding, which no text holds, become its last."""
        return tokens.clamp(max=self.model.ends.vocabulary - 1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)[..., : self.vocabulary.size]

    def begin(self, rows: int, capacity: int) -> "Memory":
        """Room for what it has read, made when the first tree is grown."""
        return Memory(rows, capacity)

    @torch.inference_mode()
    def propose(self, committed: Committed, state: "Memory", budget: Budget, voice: Voice) -> TokenTree:
        """A chain, a static or a dynamic tree, grown below what the target has verified."""
        return grow(
            committed.bonus, Growing(self, committed, state.cache(self.model, budget)), self.vocabulary, budget, voice
        )


def beside(target: Target, name: str, revision: str | None) -> Target:
    """The draft model `name`, loaded as the target is. Raises ValueError where it has another vocabulary."""
    folder = from_hub(name, revision, kind="draft model")
    ours, theirs = target.tokenizer.get_vocab(), AutoTokenizer.from_pretrained(folder).get_vocab()
    if differing := ours.items() ^ theirs.items():
        token = min(differing)[0]
        raise ValueError(
            f"{name} has another vocabulary than {target.identity.name} ({token!r} is {theirs.get(token)} there and {ours.get(token)} here); "
            f"a draft model needs the target's tokenizer"
        )
    return load_target(folder, name, target.dtype, str(target.device), compile=target.compiled)


@dataclass
class Memory:
    """What the draft model remembers of `rows` texts of up to `capacity` tokens."""

    rows: int
    capacity: int
    held: KVCache | None = None

    def cache(self, model: Target, budget: Budget) -> KVCache:
        """Its keys and values, with room for a text and one round: the tree before, the bonus token and the tree to come."""
        if self.held is None:
            growing = max(budget.nodes, len(budget.paths) + 1, 1 + budget.depth * budget.branch)
            self.held = model.cache(self.rows, self.capacity + 1 + growing)
        return self.held


class Growing:
    """One round of drafting: what the draft model says after each node, every node being read once."""

    def __init__(self, drafter: DraftModel, committed: Committed, cache: KVCache):
        self.drafter, self.cache = drafter, cache
        self.logits: Tensor | None = self._follow(committed)
        self.tree = TokenTree.roots(committed.bonus)
        self.begin = 0  # the number of the first node that was asked last

    def _follow(self, committed: Committed) -> Tensor:
        """Read what was committed, and the bonus token, which from now on stands behind each text as the root: [B, 1, V]."""
        model, cache, length = self.drafter.model, self.cache, committed.length.cpu().clone()
        rows = torch.arange(len(length), device=committed.tokens.device)
        cache.reset((length == 0).nonzero()[:, 0])  # nobody sits there
        fresh = (committed.fresh.cpu() & (length > 0)).nonzero()[:, 0]
        if len(fresh):
            prompts = committed.tokens[fresh.to(rows.device), : int(length[fresh].max())]
            model.prefill(self.drafter.readable(prompts), length[fresh], cache, fresh)
            length[fresh] = 0
        last = length.to(rows.device)
        tokens = torch.cat([committed.tokens[:, : int(length.max())], committed.bonus[:, None]], dim=1)
        tokens[rows, last] = committed.bonus
        logits = model.read(TokenTree.chains(self.drafter.readable(tokens)), cache).logits
        assert logits is not None
        cache.keep([range(count) for count in length.tolist()])
        return logits[rows, last][:, None]

    def __call__(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits [B, F, V] of what follows `tokens` [B, F], children of the nodes at `places` [B, F]."""
        if self.logits is None:
            known, tree = self.tree.tokens.shape[1], self.tree
            self.tree = TokenTree(
                torch.cat([tree.tokens, tokens], dim=1),
                torch.cat([tree.parents, self.begin + places], dim=1),
                torch.cat([tree.valid, torch.ones_like(tokens, dtype=torch.bool)], dim=1),
            )
            self.begin, self.logits = known, self.drafter.model.read(self.tree, self.cache, known).logits
        logits, self.logits = self.logits, None
        assert logits is not None
        return logits[..., : self.drafter.vocabulary.size]
