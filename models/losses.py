"""What a draft distribution is taught against the target's, and how depths weigh.

R guesses, C chains, K depths, S places where the target speaks, D width, V draft vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.drafter import FeatureBatch, Loss
from models.ends import Ends
from models.questions import Questions
from models.transfer import sent
from models.vocabulary import OUTSIDE, DraftVocabulary

CACHED, FILLING = 2**21, 2**27  # logits that exist at the same time: what stays in a CPU's cache, what fills a GPU
FEWEST = 64  # guesses a head at the same time, however large the vocabulary: fewer make slow products
PANEL = 2048  # rows of a head that a CPU multiplies at a time: what it reads again and again stays in its cache
TINY = 1e-30  # the smallest probability whose logarithm is taken
SHARPNESS = 3.0  # eta of LK-hybrid
SMOOTHING = 0.5  # alpha of D-PACE


def wide(values: Tensor) -> Tensor:
    """`values` in at least fp32, in which every loss is computed."""
    return values if values.dtype == torch.float64 else values.float()


class Head(NamedTuple):
    """What turns states [R, D] into logits [R, V]."""

    weight: Tensor  # [V, D] it is taught where it requires a gradient
    bias: Tensor | None = None  # [V] never taught
    finish: Callable[[Tensor], Tensor] | None = None  # what is done to the product: the target's scale and soft cap

    def __call__(self, product: Tensor) -> Tensor:
        """Logits of the product with the weight."""
        raw = product if self.bias is None else product + self.bias
        return raw if self.finish is None else self.finish(raw)


class Teacher(NamedTuple):
    """What the target would have said in R places, seen through a draft vocabulary.

    Its probabilities are those of the whole vocabulary: what the drafter cannot say is missing from their sum, the
    reach, and never handed to other tokens.
    """

    probs: Tensor  # [R, V]
    reach: Tensor  # [R] their sum: more cannot be accepted
    known: Tensor  # [R] sum of probs * log(probs / reach): what a divergence is measured from

    @classmethod
    @torch.no_grad()
    def of(cls, ends: Ends, hidden: Tensor, draft_ids: Tensor | None) -> "Teacher":
        """The teacher at final hidden states `hidden` [R, D]; `draft_ids` [V] are the target's ids, None all of them."""
        return cls.saying(wide(ends.logits(hidden.to(ends.head.dtype))), draft_ids)

    @classmethod
    def saying(cls, logits: Tensor, draft_ids: Tensor | None) -> "Teacher":
        """The teacher whose logits over the target's whole vocabulary are `logits`."""
        probs = logits.softmax(-1)
        if draft_ids is not None:
            probs = probs.index_select(1, draft_ids)
        reach = probs.sum(-1)
        return cls(probs, reach, -torch.special.entr(probs).sum(-1) + torch.special.entr(reach))

    def at(self, rows: Tensor) -> "Teacher":
        """The teacher in the places `rows`, by number."""
        return Teacher(*(part.index_select(0, rows) for part in self))

    def beyond(self, rows: int) -> "Teacher":
        """The teacher without the first `rows` places."""
        return Teacher(*(part[rows:] for part in self))

    def joined(self, other: "Teacher") -> "Teacher":
        """The places of both."""
        return Teacher(*(torch.cat(parts) for parts in zip(self, other, strict=True)))


class Guess:
    """What the drafter says in R places, beside what it is taught: every term is a value [R] for each."""

    def __init__(self, logits: Tensor, labels: Tensor, teacher: Teacher | None):
        self.log_probs = wide(logits).log_softmax(-1)
        self.labels, self.heard = labels, teacher

    @property
    def teacher(self) -> Teacher:
        assert self.heard is not None
        return self.heard

    @cached_property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    def ce(self) -> Tensor:
        """-log draft(label): cross-entropy with the token that was said; 0 where the draft vocabulary lacks it."""
        found = self.log_probs.gather(1, self.labels.clamp(min=0)[:, None])[:, 0]
        return -found.masked_fill(self.labels == OUTSIDE, 0.0)

    def kl(self) -> Tensor:
        """KL(target || draft) = sum_v target(v) log(target(v) / (reach * draft(v))) over the draft vocabulary.

        The target's whole divergence from a drafter is, by the chain rule, that of being inside the vocabulary or not,
        plus `reach` times that within it, plus what no drafter can change. This is the middle term: a place whose mass
        lies outside teaches less.
        """
        return self.teacher.known - torch.linalg.vecdot(self.teacher.probs, self.log_probs)

    def reverse_kl(self) -> Tensor:
        """KL(draft || target) = sum_v draft(v) log(draft(v) / target(v)), over the whole vocabulary: the draft's share outside is 0."""
        return torch.linalg.vecdot(self.probs, self.log_probs - self.teacher.probs.clamp(min=TINY).log())

    @cached_property
    def acceptance(self) -> Tensor:
        """alpha = sum_v min(target(v), draft(v)): the chance that a drawn guess stands (Leviathan et al. 2023, 3.4)."""
        return torch.minimum(self.teacher.probs, self.probs).sum(-1)

    def tv(self) -> Tensor:
        """1 - alpha: total variation over the whole vocabulary. Its gradient fades where the two hardly overlap."""
        return 1 - self.acceptance

    def lk_alpha(self) -> Tensor:
        """-log alpha: the gradient of tv over alpha, which does not fade (LK losses, arXiv 2602.23881)."""
        return -self.acceptance.clamp(min=TINY).log()

    def lk_hybrid(self) -> Tensor:
        """w KL + (1 - w) TV with w = exp(-3 alpha) of each guess, not differentiated (the same paper, eta = 3)."""
        weight = (-SHARPNESS * self.acceptance.detach()).exp()
        return weight * self.kl() + (1 - weight) * self.tv()

    def hits(self) -> Tensor:
        """1 where the first pick is the token that was said, else 0."""
        return (self.log_probs.argmax(-1) == self.labels).to(self.log_probs.dtype)

    def chance(self) -> Tensor:
        """draft(label): 0 where the draft vocabulary lacks it."""
        return (-self.ce()).exp().masked_fill(self.labels == OUTSIDE, 0.0)


TERMS: dict[str, Callable[[Guess], Tensor]] = {
    "ce": Guess.ce,
    "kl": Guess.kl,
    "reverse_kl": Guess.reverse_kl,
    "tv": Guess.tv,
    "lk_alpha": Guess.lk_alpha,
    "lk_hybrid": Guess.lk_hybrid,
}
WHOLE = "acceptance"  # the one loss that looks at a whole chain


def shortfall(alpha: Tensor, counted: Tensor) -> Tensor:
    """Sum over chains of 1 - mean_k prod_{i<=k} alpha_i: how much of its depth a drawn chain is not accepted on average.

    `alpha` and `counted` [C, K]: a depth that is not asked adds nothing. The product weighs the depths by itself
    (the end-to-end total variation loss of AngelSpec).
    """
    return ((1 - products(alpha)) * counted).sum() / alpha.shape[1]


def products(values: Tensor) -> Tensor:
    """Running products along each row of [C, K]: K is small, and a zero among them needs no special gradient."""
    running = [values[:, 0]]
    for column in values.unbind(1)[1:]:
        running.append(running[-1] * column)
    return torch.stack(running, dim=1)


def paces(chance: Tensor, counted: Tensor) -> Tensor:
    """D-PACE weights [C, K]: w_k = sum_{j>=k} prod_{i<=j} s_i with s = (1 - a) draft(label) + a, a = 0.5 (arXiv 2605.18810).

    w_k is the slope of the expected accepted length in log s_k, and is not differentiated itself.
    """
    reached = products((1 - SMOOTHING) * chance.detach() + SMOOTHING) * counted
    return reached.flip(1).cumsum(1).flip(1)


class Objective:
    """What a drafter is taught: `loss`, a name or {name: weight}, and how depths weigh, `decay`.

    Depth k = 1, 2, ... weighs decay ** (k - 1), or with dpace what D-PACE gives it in its chain; the loss called
    acceptance looks at whole chains and weighs them itself.
    """

    def __init__(self, loss: str | Mapping[str, float] = "kl", decay: float | str = 0.8):
        self.mix = {loss: 1.0} if isinstance(loss, str) else dict(loss)
        known = [*TERMS, WHOLE]
        if not self.mix or not set(self.mix) <= set(known) or not all(self._weighs(one) for one in self.mix.values()):
            raise ValueError(f"loss={loss}: use one of {', '.join(known)}, or a mix such as {{ce: 0.1, tv: 0.9}}")
        if decay != "dpace" and not (self._weighs(decay) and float(decay) <= 1):
            raise ValueError(f"decay={decay}: use a number above 0 and up to 1, or dpace")
        self.decay = decay
        self.soft = set(self.mix) != {"ce"}  # it asks the target for its distribution, not only for what it said

    @staticmethod
    def _weighs(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")

    def loss(
        self,
        batch: FeatureBatch,
        questions: Questions,
        states: Sequence[Tensor],
        heads: Head | Sequence[Head],
        ends: Ends,
        vocabulary: DraftVocabulary,
        measure: bool,
    ) -> Loss:
        """The loss of all questions, whose guesses `heads` read off `states`, K times [R, D]; one head may serve all depths.

        With `measure` also where first picks were right and what drawn ones have in common with the target. Logits
        exist by chunks, in both passes.
        """
        work = Work(self, batch, questions, heads, ends, vocabulary, measure)
        flat = torch.cat(list(states))[work.order]
        total, *measured = Chunked.apply(work, torch.is_grad_enabled(), flat, *(head.weight for head in work.heads))
        seen = sent(questions.seen, total.device)
        return Loss(total, seen[0], seen, *measured)

    def total(self, guesses: Sequence[Guess], chain: Tensor, depth: Tensor, chains: int, depths: int) -> Tensor:
        """[] the loss of guesses of whole chains: their rows, one after the other, are at `chain` and `depth` [R], from 0."""

        def table(parts: list[Tensor]) -> Tensor:
            values = torch.cat(parts)
            return values.new_zeros(chains, depths).index_put((chain, depth), values)

        counted = table([torch.ones_like(guess.log_probs[:, 0]) for guess in guesses])
        sums = []
        for name, share in self.mix.items():
            if name == WHOLE:
                sums.append(share * shortfall(table([guess.acceptance for guess in guesses]), counted))
                continue
            values = table([TERMS[name](guess) for guess in guesses])
            if self.decay == "dpace":
                weights = paces(table([guess.chance() for guess in guesses]), counted)
            else:
                weights = float(self.decay) ** torch.arange(depths, dtype=values.dtype, device=values.device)
            sums.append(share * (weights * values).sum())
        return torch.stack(sums).sum()


class Chunk(NamedTuple):
    """Whole chains whose guesses are taught together."""

    parts: list[slice]  # of the guesses, one for each head
    first: int  # number of the first chain
    teacher: Teacher | None  # in the places from the first chain's on


class Work:
    """The guesses of a batch, sorted so that those of whole chains stand together, and within them by depth."""

    def __init__(
        self,
        objective: Objective,
        batch: FeatureBatch,
        questions: Questions,
        heads: Head | Sequence[Head],
        ends: Ends,
        vocabulary: DraftVocabulary,
        measure: bool,
    ):
        self.objective, self.ends, self.vocabulary, self.measure = objective, ends, vocabulary, measure
        self.heads = [heads] if isinstance(heads, Head) else list(heads)
        self.depths = len(questions.chain)
        device = batch.input_ids.device
        row, at = (sent(part, device) for part in questions.places[0])
        self.heard = batch.last_hidden[row, at + 1] if objective.soft or measure else None
        self.labels = vocabulary.to_draft(batch.input_ids[row, at + 2])
        room = (CACHED if device.type == "cpu" else FILLING) // len(self.heads[0].weight)
        many = max(FEWEST * len(self.heads), room)
        self.chains = max(1, many // self.depths)
        chain = torch.cat(questions.chain)
        depth = torch.cat([torch.full_like(one, k) for k, one in enumerate(questions.chain)])
        key = chain // self.chains * self.depths + depth
        order = key.argsort(stable=True)
        self.order, self.chain, self.depth = (sent(one, device) for one in (order, chain[order], depth[order]))
        count = -(-len(row) // self.chains) * self.depths
        self.sizes = key.bincount(minlength=count).view(-1, self.depths).tolist()

    def chunks(self) -> Iterator[Chunk]:
        """All chains, so many at a time. A place that two chunks listen to is heard once."""
        start, teacher = 0, None
        for number, sizes in enumerate(self.sizes):
            first = number * self.chains
            if self.heard is not None:
                known = 0 if teacher is None else len(teacher.reach) - self.chains
                new = self.heard[first + known : first + self.chains + self.depths - 1]
                heard = Teacher.of(self.ends, new, self.vocabulary.ids)
                teacher = heard if teacher is None else teacher.beyond(self.chains).joined(heard)
            parts = []
            for size in [sum(sizes)] if len(self.heads) == 1 else sizes:
                parts.append(slice(start, start + size))
                start += size
            yield Chunk(parts, first, teacher)

    def guesses(self, chunk: Chunk, products: Sequence[Tensor]) -> list[Guess]:
        """What the heads say, from their products with the states."""
        found = []
        for part, head, product in zip(chunk.parts, self.heads, products, strict=True):
            place = self.chain[part] + self.depth[part]
            teacher = None if chunk.teacher is None else chunk.teacher.at(place - chunk.first)
            found.append(Guess(head(product), self.labels[place], teacher))
        return found

    def total(self, chunk: Chunk, guesses: list[Guess]) -> Tensor:
        """[] the objective's loss of one chunk."""
        rows = slice(chunk.parts[0].start, chunk.parts[-1].stop)
        return self.objective.total(guesses, self.chain[rows] - chunk.first, self.depth[rows], self.chains, self.depths)

    @torch.no_grad()
    def measured(self, chunk: Chunk, guesses: list[Guess]) -> Tensor:
        """[2, K] first picks that were right, and the sum of acceptances."""
        rows = slice(chunk.parts[0].start, chunk.parts[-1].stop)
        values = torch.stack(
            [torch.cat([one.hits() for one in guesses]), torch.cat([one.acceptance for one in guesses])]
        )
        return values.new_zeros(2, self.depths).index_add_(1, self.depth[rows], values)


class Chunked(torch.autograd.Function):
    """Loss and gradients chunk by chunk in the forward pass, so that no logits wait for the backward pass.

    A chunk's logits are made, graded, differentiated in a graph of their own, and multiplied back into states and
    weights: three products in all, and nothing is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, work: Work, learn: bool, states: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """The total [], hits and overlap [K], of states [R, D] in the order of `work`; the heads' weights [V, D]."""
        device = states.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
        ctx.slopes = [torch.zeros_like(one) if learn and one.requires_grad else None for one in (states, *weights)]
        ready, used = states.to(cast), [weight.to(cast) for weight in weights]
        total, measured = wide(states.new_zeros(())), wide(states.new_zeros(2, work.depths))
        with torch.autocast(device, enabled=False):
            for chunk in work.chunks():
                leaves = [product(ready[part], weight) for part, weight in zip(chunk.parts, used, strict=True)]
                with torch.set_grad_enabled(learn):
                    guesses = work.guesses(chunk, [leaf.requires_grad_(learn) for leaf in leaves])
                    loss = work.total(chunk, guesses)
                total += loss.detach()
                if work.measure:
                    measured += work.measured(chunk, guesses)
                if learn:
                    give_back(ctx.slopes, chunk.parts, torch.autograd.grad(loss, leaves), ready, used)
        hits, overlap = measured
        ctx.mark_non_differentiable(hits, overlap)
        return total, hits, overlap

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """The gradients that the forward pass left, which nobody else holds: scaled where they lie."""
        slopes, ctx.slopes = ctx.slopes, None
        return None, None, *(None if slope is None else slope.mul_(grad) for slope in slopes)


def product(states: Tensor, weight: Tensor) -> Tensor:
    """[R, V] states times weight."""
    if states.device.type != "cpu":
        return states @ weight.T
    room = states.new_empty(len(states), len(weight))
    for panel, part in zip(weight.split(PANEL), room.split(PANEL, dim=1), strict=True):
        torch.mm(states, panel.T, out=part)
    return room


def give_back(
    slopes: Sequence[Tensor | None],
    parts: Sequence[slice],
    grads: Sequence[Tensor],
    states: Tensor,
    weights: Sequence[Tensor],
) -> None:
    """Add to `slopes`, of the states and of every weight, what the logits' gradients `grads` mean for them."""
    for part, grad, weight, slope in zip(parts, grads, weights, slopes[1:], strict=True):
        if slopes[0] is not None:
            slopes[0][part] = grad @ weight
        if slope is None:
            continue
        if slope.dtype == grad.dtype:
            slope.addmm_(grad.T, states[part])
            continue
        for panel, columns in zip(slope.split(PANEL), grad.split(PANEL, dim=1), strict=True):
            panel += columns.T @ states[part]  # what is added exists twice more, in both precisions


@torch.no_grad()
def first_depth(
    batch: FeatureBatch, ends: Ends, vocabulary: DraftVocabulary, logits_at: Callable[[Tensor, Tensor], Tensor]
) -> Loss:
    """What the first guess of a drafter without weights of its own is worth on `batch`; the loss itself is 0.

    `logits_at` gives what it says [R, V] after token `at` [R] of `row` [R].
    """
    questions = Questions.of(batch, 1).on(batch.input_ids.device)
    ((rows, places),) = questions.places
    sums = torch.zeros(2, device=rows.device)
    for row, at in zip(rows.split(FEWEST), (places + 1).split(FEWEST), strict=True):
        teacher = Teacher.of(ends, batch.last_hidden[row, at], vocabulary.ids)
        guess = Guess(logits_at(row, at), vocabulary.to_draft(batch.input_ids[row, at + 1]), teacher)
        sums += torch.stack([guess.hits().sum(), guess.acceptance.sum()])
    return Loss(torch.zeros_like(sums[0]), questions.seen[0], questions.seen, sums[:1], sums[1:])
