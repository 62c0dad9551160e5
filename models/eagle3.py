"""EAGLE-3 (Li et al. 2025): one layer on the target's features, taught on its own steps.

The pair of feature t and token t + 1 foretells token t + 2; from there on the drafter reads its own states.
B rows, T positions, Q asked positions, F growing nodes, D width, L taps, V draft vocabulary, G groups, C head width.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from models.drafter import Budget, Committed, Drafter, FeatureBatch, Loss, ahead, asked
from models.ends import Ends
from models.growth import grow
from models.layer import FusedLayer, Pair, layer_config
from models.losses import Teacher, overlap, soft_loss, summed
from models.sampling import Voice
from models.tree import TokenTree
from models.vocabulary import DraftVocabulary

PLACES = ("before_norm", "after_norm")


def default_taps(depth: int) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target `depth` layers deep; the last three hidden states of a shallow one."""
    return (2, depth // 2, depth - 3) if depth > 7 else tuple(range(max(depth - 2, 0), depth + 1))


class Eagle3(Drafter):
    """Three taps fused into one feature, one decoder layer, an output matrix of its own on a draft vocabulary.

    It is taught `steps` steps ahead, step s with weight `decay` ** s, each on the state of the step before
    (training-time test). EAGLE 3.1 is `fc_norm` (every tap is normed before they are fused) with `feedback` after_norm
    (the next step reads the state after the final norm, not before it). `residual` after_norm adds attention's output
    to the normed feature, as the `speculators` library's norm_before_residual does. `start` target copies the target's
    layer above the last tap, instead of random weights; the output matrix starts from the target's either way.
    """

    def __init__(
        self,
        ends: Ends,
        taps: Sequence[int] | None = None,
        steps: int = 7,
        vocabulary: int | None = None,
        decay: float = 0.8,
        fc_norm: bool = False,
        feedback: str = "before_norm",
        residual: str = "before_norm",
        start: str = "random",
    ):
        super().__init__()
        if start not in ("random", "target"):
            raise ValueError(f"start={start}: use random or target")
        if feedback not in PLACES or residual not in PLACES:
            raise ValueError(f"feedback={feedback} residual={residual}: each is before_norm or after_norm")
        self.ends, self.steps, self.decay, self.feedback = ends, steps, decay, feedback
        self.start = start
        self.taps = default_taps(ends.config.num_hidden_layers) if taps is None else tuple(taps)
        if list(self.taps) != sorted(set(self.taps)) or not self.taps:
            raise ValueError(f"taps {list(self.taps)} must be named once each, in ascending order")
        self.vocabulary = DraftVocabulary(vocabulary, ends.vocabulary)
        config = layer_config(ends.config, ends.width)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(ends.width, config.rms_norm_eps) for _ in self.taps if fc_norm)
        self.fc = nn.Linear(len(self.taps) * ends.width, ends.width, bias=False)
        self.midlayer = FusedLayer(config, residual)
        self.norm = nn.RMSNorm(ends.width, config.rms_norm_eps)
        self.lm_head = nn.Linear(ends.width, self.vocabulary.size, bias=False)
        self._from_target()

    def learn_vocabulary(self, counts: Tensor) -> None:
        """Draft only the tokens that the target said most."""
        self.vocabulary.learn(counts)
        self._from_target()

    def _from_target(self) -> None:
        """Start the output matrix from the target's."""
        self.lm_head.weight.data.copy_(self.vocabulary.rows(self.ends.head))

    def meaning(self) -> dict[str, str]:
        """Other libraries' norm_output is either which state is fed back or whether the head applies the norm."""
        back = "after" if self.feedback == "after_norm" else "before"
        base = "normed feature" if self.midlayer.residual == "after_norm" else "feature itself"
        norm = "passes an RMSNorm of its own" if len(self.fc_norm) else "goes as it is"
        return {
            "fc_norm": f"every tap {norm} into the fusion",
            "feedback": f"the next step reads the state {back} the final norm; the output matrix always reads it after the norm",
            "residual": f"attention's output is added to the {base}",
        }

    def inherit(self, layer: Callable[[int], dict[str, Tensor]]) -> None:
        """Take the target's final norm, which its head expects. With `start` target: fuse to the last tap alone, and be
        the layer that reads it; embeddings count as features."""
        gain = 1.0 if self.ends.config.model_type.startswith("gemma") else 0.0  # Gemma stores what is added to one
        theirs = {name: value + gain * name.endswith("norm.weight") for name, value in layer(self.taps[-1]).items()}
        final, width = theirs.get("norm.weight"), self.ends.width
        if final is not None and final.shape == self.norm.weight.shape:
            self.norm.weight.data.copy_(final)
        if self.start == "random":
            return
        for name, weight in self.midlayer.named_parameters():
            source = theirs.get(name.replace("hidden_norm", "input_layernorm"))
            if source is not None and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                source = torch.cat([source, source], dim=1)
            if source is None or source.shape != weight.shape:
                raise ValueError(
                    f"start=target: layer {self.taps[-1]} of this target has no {name} of shape {list(weight.shape)}; use start=random"
                )
            weight.data.copy_(source)
        self.fc.weight.data.zero_()
        self.fc.weight.data[:, -width:] = torch.eye(width)

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[K] positions at which each step is asked."""
        return torch.stack([where.sum() for where in asked(loss_mask, document, self.steps)])

    def fused(self, features: Tensor) -> Tensor:
        """One feature [..., D] of the taps [..., L*D]."""
        features = features.to(self.norm.weight.dtype)
        if len(self.fc_norm):
            taps = features.split(self.ends.width, dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        return self.fc(features)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [..., D], in this drafter's precision."""
        return self.ends.embed(tokens).to(self.norm.weight.dtype)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., V] of states [..., D] after the final norm."""
        return self.lm_head(normed)

    def unroll(self, batch: FeatureBatch, where: Sequence[Tensor]) -> Iterator[Tensor]:
        """For each step the states [R, D], final norm included, at the R positions that `where[step]` [B, T] marks.

        Step s at t reads the embedding of token t + 1 + s and the state of step s - 1 at t (the fused feature at
        first), stands at rotary position t + s, and sees the first step's keys up to t and one of its own for each
        later step. The positions of a step are among those of the step before; all others only lend their first keys.
        """
        attention = self.midlayer.self_attn
        feature = self.fused(batch.features)
        pair, _ = self.midlayer.inputs(self.embedded(ahead(batch.input_ids, 1)), feature)
        far = attention.pairs(pair, batch.position)
        most = int(where[0].sum(1).max())
        at = (~where[0]).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]  # [B, Q] padded with unmarked ones
        document, position = batch.document.gather(1, at), batch.position.gather(1, at)
        seen = torch.arange(where[0].shape[1], device=at.device) <= at[..., None]
        seen = seen & (batch.document[:, None] == document[..., None])
        state, own = feature[torch.arange(len(at), device=at.device)[:, None], at], []
        for step, marked in enumerate(where):
            tokens = ahead(batch.input_ids, step + 1).gather(1, at)
            pair, base = self.midlayer.inputs(self.embedded(tokens), state)
            if step:
                own.append(attention.pairs(pair, position + step))
            mixed = attention.mixed_with_own(attention.queries(pair, position + step), far, seen, own)
            state = self.midlayer.outputs(base, mixed)
            normed = self.norm(state)
            state = normed if self.feedback == "after_norm" else state
            yield normed[marked.gather(1, at)]

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Every step against the target's distribution, over what the draft vocabulary can say of it.

        Where the target's first choice is no draft token, nothing is taught, and no head arithmetic is spent.
        """
        where = list(asked(batch.loss_mask, batch.document, self.steps))
        row, at = where[0].nonzero(as_tuple=True)
        teacher = Teacher.of(self.ends, batch.last_hidden[row, at + 1], self.vocabulary.ids)
        number = torch.zeros_like(batch.input_ids)
        number[row, at + 1] = torch.arange(len(row), device=row.device)
        sums = []
        for step, (marked, states) in enumerate(zip(where, self.unroll(batch, where), strict=True)):
            row, at = marked.nonzero(as_tuple=True)
            lesson = number[row, at + 1 + step]
            label = self.vocabulary.to_draft(batch.input_ids[row, at + 2 + step])
            if self.training:
                taught = teacher.inside[lesson]
                states, lesson, label = states[taught], lesson[taught], label[taught]
            sums.append(summed(partial(self._grade, teacher), states, lesson, label))
        losses, hits, shared = torch.stack(sums, dim=1)
        seen = torch.stack([marked.sum() for marked in where]).float()
        weights = self.decay ** torch.arange(self.steps, device=losses.device)
        return Loss((weights * losses).sum(), seen[0], seen, hits.detach(), shared.detach())

    def _grade(self, teacher: Teacher, states: Tensor, lesson: Tensor, label: Tensor) -> Tensor:
        """[3] loss, hits and overlap at `states` [R, D], where the teacher's rows are `lesson` [R]."""
        draft_logits, taught = self.logits(states), teacher.at(lesson)
        hits = (draft_logits.argmax(-1) == label).sum()
        if self.training:
            loss = soft_loss(draft_logits, taught.log_probs)
            shared = torch.zeros_like(loss)  # measured only in evaluation
        else:
            inside = taught.inside
            loss, shared = soft_loss(draft_logits[inside], taught.log_probs[inside]), overlap(draft_logits, taught)
        return torch.stack([loss, hits.to(loss.dtype), shared.to(loss.dtype)])

    def begin(self, rows: int, capacity: int) -> "Memory":
        """Room for the keys and values of verified pairs."""
        return Memory(rows, capacity)

    @torch.inference_mode()
    def propose(self, committed: Committed, state: "Memory", budget: Budget, voice: Voice) -> TokenTree:
        """A chain, a static or a dynamic tree, grown on the drafter's own states below the last verified pair."""
        return grow(committed.bonus, Growing(self, committed, state), self.vocabulary, budget, voice)


class Memory:
    """Keys and values [B, G, capacity, C] of the pairs that the target has verified; guesses stand behind them."""

    def __init__(self, rows: int, capacity: int):
        self.length = torch.zeros(rows, dtype=torch.long)  # [B] verified pairs
        self.capacity = capacity
        self.pairs: Pair | None = None

    def write(self, pairs: Pair, slots: Tensor) -> Pair:
        """Put `pairs` [B, G, S, C] into `slots` [B, S] and return all up to the last of them."""
        end = int(slots.max()) + 1
        if self.pairs is None or end > self.pairs[0].shape[2]:
            self._grow(pairs[0], max(self.capacity, end + end // 2))
        assert self.pairs is not None
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        for store, new in zip(self.pairs, pairs, strict=True):
            store[rows, :, slots] = new.transpose(1, 2)
        return self.pairs[0][:, :, :end], self.pairs[1][:, :, :end]

    def _grow(self, like: Tensor, room: int) -> None:
        """Room for `room` pairs shaped as `like`; what was held stays."""
        rows, groups, _, width = like.shape
        grown = like.new_zeros(rows, groups, room, width), like.new_zeros(rows, groups, room, width)
        for store, held in zip(grown, self.pairs or (), strict=False):
            store[:, :, : held.shape[2]] = held
        self.pairs = grown


class Growing:
    """One round of drafting: answers what follows each node, level by level."""

    def __init__(self, drafter: Eagle3, committed: Committed, memory: Memory):
        self.drafter, self.memory = drafter, memory
        self.state = self._follow(committed)
        self.start = memory.length.clone()
        self.ancestors = torch.zeros(len(self.start), 1, 0, dtype=torch.bool, device=self.start.device)
        self.level = 0

    def _follow(self, committed: Committed) -> Tensor:
        """Read what was committed, and return the state [B, 1, D] at each row's last pair."""
        memory, drafter = self.memory, self.drafter
        device = committed.tokens.device
        memory.length = memory.length.to(device).masked_fill(committed.fresh, 0)
        row, last = torch.arange(len(committed.length), device=device), (committed.length - 1).clamp(min=0)
        tokens = ahead(committed.tokens, 1)
        tokens[row, last] = committed.bonus
        slots = memory.length[:, None] + torch.arange(tokens.shape[1], device=device)
        pair, base = drafter.midlayer.inputs(drafter.embedded(tokens), drafter.fused(committed.features))
        attention = drafter.midlayer.self_attn
        pairs = memory.write(attention.pairs(pair, slots), slots)
        queries = attention.queries(pair, slots)[row, :, last][:, :, None]  # all are made: they come with the keys
        memory.length = memory.length + committed.length
        seen = torch.arange(pairs[0].shape[2], device=device) <= slots[row, last][:, None]
        return self._step(queries, base[row, last][:, None], pairs, seen[:, None])

    def __call__(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Log-probabilities [B, F, V] of what follows `tokens` [B, F], children of the nodes at `places` [B, F]."""
        if self.level:
            self._descend(tokens, places)
        self.level += 1
        normed = self.drafter.norm(self.state)
        return self.drafter.logits(normed).float().log_softmax(-1)

    def _descend(self, tokens: Tensor, places: Tensor) -> None:
        """Take the states from the nodes that were asked last to their children `tokens`."""
        drafter, memory, (rows, count) = self.drafter, self.memory, tokens.shape
        row = torch.arange(rows, device=tokens.device)[:, None]
        state, above = self.state[row, places], self.ancestors[row, places]
        if drafter.feedback == "after_norm":
            state = drafter.norm(state)
        same = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        self.ancestors = torch.cat([above, same], dim=-1)
        slots = (self.start + above.shape[-1])[:, None] + torch.arange(count, device=tokens.device)
        position = (self.start + self.level - 1)[:, None].expand(-1, count)
        pair, base = drafter.midlayer.inputs(drafter.embedded(tokens), state)
        attention = drafter.midlayer.self_attn
        pairs = memory.write(attention.pairs(pair, position), slots)
        node = torch.arange(pairs[0].shape[2], device=tokens.device) - self.start[:, None]
        known = self.ancestors.shape[-1]
        index = node.clamp(0, known - 1)[:, None].expand(-1, count, -1)
        seen = torch.where((node < 0)[:, None], True, self.ancestors.gather(2, index) & (node < known)[:, None])
        self.state = self._step(attention.queries(pair, position), base, pairs, seen)

    def _step(self, queries: Tensor, base: Tensor, pairs: Pair, seen: Tensor) -> Tensor:
        layer = self.drafter.midlayer
        return layer.outputs(base, layer.self_attn.mixed(queries, pairs, seen))
