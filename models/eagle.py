"""EAGLE-1 (Li et al. 2024): the target's final state at t with token t + 1 foretells its final state at t + 1.

The target's own head turns what is foretold into logits. B rows, T positions, R questions, D width, V draft
vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from models.drafter import Committed, FeatureBatch, Loss, ahead, counted
from models.ends import Ends, FrozenHead
from models.fused import check_reach
from models.layer import Layer, PlainLayer, layer_config
from models.losses import Head, Objective
from models.questions import Questions, Seats
from models.sight import Sight
from models.stack import FeatureDrafter
from models.transfer import sent
from models.vocabulary import DraftVocabulary


class Eagle(FeatureDrafter):
    """A fusion of embedding and state, one decoder layer without a norm before attention, and the target's frozen head.

    The loss is smooth L1 between foretold and true state, plus `cross` times the divergence of what the head makes of the
    two (Li et al. have the cross-entropy, which differs by what no drafter can change). While it learns, states carry uniform noise of up to `noise` times 512 / (tokens of the conversation), so
    that it also reads its own, less exact ones. `fc_bias` False where vLLM is to serve it. `window` and `stretch`
    change no weight: how far attention looks back, and what positions are divided by.
    """

    def __init__(
        self,
        ends: Ends,
        vocabulary: int | None = None,
        fc_bias: bool = True,
        noise: float = 0.1,
        cross: float = 0.1,
        window: int | None = None,
        stretch: float = 1.0,
    ):
        super().__init__()
        if min(noise, cross) < 0:
            raise ValueError(f"noise={noise} cross={cross}: neither may be below 0")
        check_reach(window, stretch, 1)
        self.ends, self.noise, self.cross, self.window = ends, noise, cross, window
        self.objective = Objective()
        self.vocabulary = DraftVocabulary(vocabulary, ends.vocabulary)
        config = layer_config(ends.config, ends.width)
        self.fc = nn.Linear(2 * ends.width, ends.width, bias=fc_bias)
        self.layers = nn.ModuleList([PlainLayer(config, stretch, normed=False)])
        self.head = FrozenHead(ends, self.vocabulary)

    @property
    def stack(self) -> Sequence[Layer]:
        return [self.layer]

    @property
    def layer(self) -> PlainLayer:
        """The one layer, under the name that its published checkpoints give it."""
        (layer,) = self.layers
        assert isinstance(layer, PlainLayer)
        return layer

    def learn_vocabulary(self, counts: Tensor) -> None:
        """Draft only the tokens that the target said most."""
        self.vocabulary.learn(counts)
        self.head.forget()

    def ready(self, compiled: bool = False) -> None:
        super().ready(compiled)
        self.head.pack()

    def known(self, committed: Committed) -> Tensor:
        return committed.hidden

    def inputs(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        kind = self.layer.post_attention_layernorm.weight.dtype
        return self.layer.inputs(self.fc(torch.cat([self.ends.embed(tokens).to(kind), feature.to(kind)], dim=-1)))

    def fed(self, state: Tensor) -> Tensor:
        return state

    def says(self, state: Tensor) -> Tensor:
        return self.head(state)

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[1] positions at which a state is foretold."""
        return counted(loss_mask, document, 1)

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Every state that says a token of the target's, foretold from the true states before it."""
        questions = Questions.of(batch, 1)
        ((row, at),) = questions.on(batch.input_ids.device).places
        foretold = self.foretold(batch, questions)
        crossed = self.objective.loss(
            batch,
            questions,
            [foretold],
            Head(*self.head.rows, self.ends.finish),
            self.ends,
            self.vocabulary,
            measure=not self.training,
        )
        true = batch.last_hidden[row, at + 1].float()
        apart = smooth_l1_loss(foretold.float(), true, reduction="none").mean(-1).sum()
        return crossed._replace(total=apart + self.cross * crossed.total)

    def foretold(self, batch: FeatureBatch, questions: Questions) -> Tensor:
        """[R, D] the states that follow the places where `questions` ask."""
        state = batch.last_hidden + self._noise(batch) if self.training else batch.last_hidden
        pair, base = self.inputs(ahead(batch.input_ids, 1), state)
        attention, seats, device = self.layer.self_attn, Seats(batch, questions), pair.device
        ((row, at),) = questions.on(device).places
        sight = Sight(seats.asking, batch.document, self.window, device)
        queries = seats.spread(attention.queries(pair[row, at][None], batch.position[row, at][None]), 0)
        found = attention.found_with_own(queries, attention.pairs(pair, batch.position), sight, [])
        return self.layer.outputs(base[row, at], seats.gathered(found, 0))

    def _noise(self, batch: FeatureBatch) -> Tensor:
        """[B, T, D] drawn on the CPU, whose generator a checkpoint keeps; padding is alone and reads nothing."""
        device = batch.last_hidden.device
        drawn = sent(torch.rand(batch.last_hidden.shape), device).to(batch.last_hidden.dtype) * 2 - 1
        document = sent(batch.document, device)
        tokens = (document[:, None] == document[..., None]).sum(-1, keepdim=True)
        return drawn * (self.noise * 512 / tokens).to(drawn.dtype)
