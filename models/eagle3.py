"""EAGLE-3 (Li et al. 2025): one layer on the target's features, taught on its own steps.

The pair of feature t and token t + 1 foretells token t + 2; from there on the drafter reads its own states.
B rows, T positions, R questions of a step, Q seats of a padded row, F growing nodes, D width, L taps, V draft vocabulary, G groups, C head width.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from models.drafter import Budget, Committed, Drafter, FeatureBatch, Loss, ahead, asked
from models.ends import Ends
from models.growth import grow
from models.layer import FusedLayer, Pair, layer_config
from models.losses import Head, Objective
from models.questions import Questions
from models.sampling import Voice
from models.sight import Sight
from models.tree import TokenTree
from models.vocabulary import DraftVocabulary

PLACES = ("before_norm", "after_norm")


def default_taps(depth: int) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target `depth` layers deep; the last three hidden states of a shallow one."""
    return (2, depth // 2, depth - 3) if depth > 7 else tuple(range(max(depth - 2, 0), depth + 1))


class Eagle3(Drafter):
    """Three taps fused into one feature, one decoder layer, an output matrix of its own on a draft vocabulary.

    It is taught `steps` steps ahead, each on the state of the step before (training-time test); `loss` says what, and
    `decay` how steps weigh, as models.losses.Objective reads them. EAGLE 3.1 is `fc_norm` (every tap is normed before they are fused) with `feedback` after_norm
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
        loss: str | dict[str, float] = "kl",
        decay: float | str = 0.8,
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
        self.ends, self.steps, self.feedback, self.objective = ends, steps, feedback, Objective(loss, decay)
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

    def unroll(self, batch: FeatureBatch, questions: Questions) -> Iterator[Tensor]:
        """For each step the states [R, D], final norm included, where `questions` ask.

        Step s at t reads the embedding of token t + 1 + s and the state of step s - 1 at t (the fused feature at
        first), stands at rotary position t + s, and sees the first step's keys up to t and one of its own for each
        later step. Positions that are not asked only lend their first keys. Attention alone is computed in padded
        rows, of Q queries; all else on the questions themselves.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        feature = self.fused(batch.features)
        pair, _ = layer.inputs(self.embedded(ahead(batch.input_ids, 1)), feature)
        far = attention.pairs(pair, batch.position)
        seats = Seats(batch, questions)
        sight = Sight(seats.padded(questions.places[0][1][:, None], 0)[..., 0], batch.document)
        state, own = feature[questions.places[0]], []
        for step, (row, at) in enumerate(questions.places):
            if step:
                state = state[torch.searchsorted(questions.chain[step - 1], questions.chain[step])]
            pair, base = layer.inputs(self.embedded(ahead(batch.input_ids, step + 1)[row, at]), state)
            position = batch.position[row, at] + step
            if step:
                keys, values = attention.pairs(pair[None], position[None])
                own.append((seats.spread(keys, step), seats.spread(values, step)))
            queries = seats.spread(attention.queries(pair[None], position[None]), step)
            found = seats.gathered(attention.found_with_own(queries, far, sight, own), step)
            state = layer.outputs(base, attention.o_proj(found))
            normed = self.norm(state)
            state = normed if self.feedback == "after_norm" else state
            yield normed

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Every step against what the target said, or would have said, as far as the draft vocabulary can say it."""
        questions = Questions.of(batch, self.steps)
        states = list(self.unroll(batch, questions))
        return self.objective.loss(
            batch, questions, states, Head(self.lm_head.weight), self.ends, self.vocabulary, measure=not self.training
        )

    def begin(self, rows: int, capacity: int) -> "Memory":
        """Room for the keys and values of verified pairs."""
        return Memory(rows, capacity)

    @torch.inference_mode()
    def propose(self, committed: Committed, state: "Memory", budget: Budget, voice: Voice) -> TokenTree:
        """A chain, a static or a dynamic tree, grown on the drafter's own states below the last verified pair."""
        return grow(committed.bonus, Growing(self, committed, state), self.vocabulary, budget, voice)


class Seats:
    """Where the questions of a batch sit when its rows are padded to Q seats, the most that any row needs."""

    def __init__(self, batch: FeatureBatch, questions: Questions):
        number = torch.zeros_like(batch.input_ids)
        number[questions.places[0]] = 1
        number = number.cumsum(1) - 1
        self.seats = [(row, number[row, at]) for row, at in questions.places]
        self.shape = len(batch.input_ids), questions.widest

    def padded(self, values: Tensor, step: int) -> Tensor:
        """[B, Q, ...] of `values` [R, ...] of one step; empty seats hold zeros."""
        return values.new_zeros(*self.shape, *values.shape[1:]).index_put(self.seats[step], values)

    def spread(self, heads: Tensor, step: int) -> Tensor:
        """[B, H, Q, C] of heads [1, H, R, C]."""
        return self.padded(heads[0].transpose(0, 1), step).transpose(1, 2)

    def gathered(self, heads: Tensor, step: int) -> Tensor:
        """[R, H * C] of heads [B, H, Q, C]."""
        return heads.transpose(1, 2)[self.seats[step]].flatten(1)


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
        pairs = memory.write(drafter.midlayer.self_attn.pairs(pair, slots), slots)
        memory.length = memory.length + committed.length
        at = slots[row, last]
        seen = torch.arange(pairs[0].shape[2], device=device) <= at[:, None]
        return self._step(pair[row, last][:, None], base[row, last][:, None], at[:, None], pairs, seen[:, None])

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
        pairs = memory.write(drafter.midlayer.self_attn.pairs(pair, position), slots)
        node = torch.arange(pairs[0].shape[2], device=tokens.device) - self.start[:, None]
        known = self.ancestors.shape[-1]
        index = node.clamp(0, known - 1)[:, None].expand(-1, count, -1)
        seen = torch.where((node < 0)[:, None], True, self.ancestors.gather(2, index) & (node < known)[:, None])
        self.state = self._step(pair, base, position, pairs, seen)

    def _step(self, pair: Tensor, base: Tensor, position: Tensor, pairs: Pair, seen: Tensor) -> Tensor:
        layer = self.drafter.midlayer
        mixed = layer.self_attn.mixed(layer.self_attn.queries(pair, position), pairs, seen)
        return layer.outputs(base, mixed)
