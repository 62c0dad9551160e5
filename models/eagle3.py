"""EAGLE-3 (Li et al. 2025): one layer on the target's features, taught on its own steps.

The pair of feature t and token t + 1 foretells token t + 2; from there on the drafter reads its own states.
B rows, T positions, R questions of a step, Q seats of a padded row, D width, L taps, G groups, C head width.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from models.drafter import FeatureBatch, Loss, ahead, counted
from models.ends import Ends
from models.fused import PLACES, Fused
from models.layer import Pair, PlainLayer
from models.losses import Head, Objective
from models.questions import Questions, Seats
from models.sight import Sight


class Eagle3(Fused):
    """Three taps fused into one feature, one decoder layer or more, an output matrix of its own on a draft vocabulary.

    It is taught `steps` steps ahead, each on the state of the step before (training-time test); `loss` says what, and
    `decay` how steps weigh, as models.losses.Objective reads them. EAGLE 3.1 is `fc_norm` (every tap is normed before they are fused) with `feedback` after_norm
    (the next step reads the state after the final norm, not before it). `residual` after_norm adds attention's output
    to the normed feature, as the `speculators` library's norm_before_residual does. `start` target copies the target's
    layer above the last tap into the first one, instead of random weights. models/fused.py says what the other knobs are.
    """

    recomputed = ("step",)

    def __init__(
        self,
        ends: Ends,
        taps: Sequence[int] | None = None,
        steps: int = 7,
        vocabulary: int | None = None,
        loss: str | dict[str, float] = "kl",
        decay: float | str = 0.8,
        layers: int = 1,
        fc_norm: bool = False,
        feedback: str = "before_norm",
        residual: str = "before_norm",
        start: str = "random",
        head: str = "rows",
        embedding: str = "frozen",
        width: int | None = None,
        window: int | None = None,
        stretch: float = 1.0,
    ):
        if start not in ("random", "target"):
            raise ValueError(f"start={start}: use random or target")
        if feedback not in PLACES:
            raise ValueError(f"feedback={feedback}: it is before_norm or after_norm")
        super().__init__(
            ends,
            taps,
            vocabulary,
            layers=layers,
            fc_norm=fc_norm,
            residual=residual,
            head=head,
            embedding=embedding,
            width=width,
            window=window,
            stretch=stretch,
            depth=steps,
        )
        self.steps, self.feedback, self.start = steps, feedback, start
        self.objective = Objective(loss, decay)

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
        """Take the target's final norm. With `start` target: fuse to the last tap alone, and be the layer that reads it;
        embeddings count as features."""
        super().inherit(layer)
        if self.start == "random":
            return
        theirs, width = self.theirs(layer(self.taps[-1])), self.ends.width
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
        return counted(loss_mask, document, self.steps)

    def fed(self, state: Tensor) -> Tensor:
        return self.norm(state) if self.feedback == "after_norm" else state

    def unroll(self, batch: FeatureBatch, questions: Questions) -> Iterator[Tensor]:
        """For each step the states [R, D], final norm included, where `questions` ask.

        Step s at t reads the embedding of token t + 1 + s and the state of step s - 1 at t (the fused feature at
        first), stands at rotary position t + s, and sees the first step's keys up to t and one of its own for each
        later step. Positions that are not asked only lend their first keys. Attention alone is computed in padded
        rows, of Q queries; all else on the questions themselves.
        """
        feature = self.fused(batch.features)
        far = self.first_keys(batch, feature)
        own: list[tuple[Pair, ...]] = [() for _ in far]
        seats, device = Seats(batch, questions), feature.device
        sight = Sight(seats.asking, batch.document, self.window, device)
        questions = questions.on(device)
        state = feature[questions.places[0]]
        for step, (row, at) in enumerate(questions.places):
            if step:
                state = state[torch.searchsorted(questions.chain[step - 1], questions.chain[step])]
            if step and self.window is not None:
                sight = Sight(seats.asking, batch.document, self.window - step, device)
            tokens, position = ahead(batch.input_ids, step + 1)[row, at], (batch.position[row, at] + step)[None]
            state, own = self.step(step, tokens, position, state, far, own, sight, seats)
            normed = self.norm(state)
            state = normed if self.feedback == "after_norm" else state
            yield normed

    def step(
        self,
        step: int,
        tokens: Tensor,
        position: Tensor,
        state: Tensor,
        far: list[Pair],
        own: list[tuple[Pair, ...]],
        sight: Sight,
        seats: Seats,
    ) -> tuple[Tensor, list[tuple[Pair, ...]]]:
        """The state [R, D] above the stack where `tokens` [R] are read with `state` [R, D] at `position` [1, R].

        Each layer looks at the first step's keys, `far`, and those of its `own`, to which every later step adds.
        """
        pair, base = self.inputs(tokens, state)
        grown = []
        for layer, keys, mine in zip(self.stack, far, own, strict=True):
            if isinstance(layer, PlainLayer):
                pair, base = layer.inputs(state)
            attention = layer.self_attn
            if step:
                new = attention.pairs(pair[None], position)
                mine = (*mine, (seats.spread(new[0], step), seats.spread(new[1], step)))
            queries = seats.spread(attention.queries(pair[None], position), step)
            found = seats.gathered(attention.found_with_own(queries, keys, sight, mine), step)
            state = layer.outputs(base, found)
            grown.append(mine)
        return state, grown

    def first_keys(self, batch: FeatureBatch, feature: Tensor) -> list[Pair]:
        """For each layer the keys and values [B, G, T, C] of the first step, from the fused `feature` [B, T, D]."""
        pair, base = self.inputs(ahead(batch.input_ids, 1), feature)
        found = [self.midlayer.self_attn.pairs(pair, batch.position)]
        if not len(self.above):
            return found
        every = torch.arange(feature.shape[1]).expand(len(feature), -1)
        sight = Sight(every, batch.document, self.window, feature.device)
        for below, layer in itertools.pairwise(self.stack):
            assert isinstance(layer, PlainLayer)
            attention = below.self_attn
            heads = attention.found_with_own(attention.queries(pair, batch.position), found[-1], sight, [])
            state = below.outputs(base, heads.transpose(1, 2).flatten(2))
            pair, base = layer.inputs(state)
            found.append(layer.self_attn.pairs(pair, batch.position))
        return found

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Every step against what the target said, or would have said, as far as the draft vocabulary can say it."""
        questions = Questions.of(batch, self.steps)
        states = list(self.unroll(batch, questions))
        return self.objective.loss(
            batch, questions, states, Head(self.lm_head.weight), self.ends, self.vocabulary, measure=not self.training
        )
