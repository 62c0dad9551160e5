"""EAGLE-3 (Li et al. 2025): one layer on the target's features, taught on its own steps.

The pair of feature t and token t + 1 foretells token t + 2; from there on the drafter reads its own states.
B rows, T positions, Q asked positions, F growing nodes, D width, L taps, V draft vocabulary, G groups, C head width.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from models.drafter import FeatureBatch, Loss, ahead, asked
from models.ends import Ends
from models.fused import PLACES, Fused
from models.losses import Teacher, overlap, soft_loss, summed


class Eagle3(Fused):
    """Three taps fused into one feature, one decoder layer or more, an output matrix of its own on a draft vocabulary.

    It is taught `steps` steps ahead, step s with weight `decay` ** s, each on the state of the step before
    (training-time test). EAGLE 3.1 is `fc_norm` (every tap is normed before they are fused) with `feedback` after_norm
    (the next step reads the state after the final norm, not before it). `residual` after_norm adds attention's output
    to the normed feature, as the `speculators` library's norm_before_residual does. `start` target copies the target's
    layer above the last tap into the first one, instead of random weights. models/fused.py says what the other knobs are.
    """

    def __init__(
        self,
        ends: Ends,
        taps: Sequence[int] | None = None,
        steps: int = 7,
        vocabulary: int | None = None,
        decay: float = 0.8,
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
            ends, taps, vocabulary, layers, fc_norm, residual, head, embedding, width, window, stretch, steps
        )
        self.steps, self.decay, self.feedback, self.start = steps, decay, feedback, start

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
        return torch.stack([where.sum() for where in asked(loss_mask, document, self.steps)])

    def fed(self, state: Tensor) -> Tensor:
        return self.norm(state) if self.feedback == "after_norm" else state

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
