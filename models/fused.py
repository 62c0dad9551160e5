"""What EAGLE-3 and P-EAGLE share: taps of the target fused into one feature, a first layer that reads it beside the
token's embedding, more layers above, a norm and an output matrix on a draft vocabulary.

D width, L taps, V draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from models.drafter import Committed
from models.ends import Ends
from models.layer import FusedLayer, Layer, PlainLayer, RMSNorm, layer_config
from models.stack import FeatureDrafter
from models.vocabulary import DraftVocabulary

PLACES = ("before_norm", "after_norm")
HEADS = ("rows", "random", "frozen")
EMBEDDINGS = ("frozen", "trained")


def default_taps(depth: int) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target `depth` layers deep; the last three hidden states of a shallow one."""
    return (2, depth // 2, depth - 3) if depth > 7 else tuple(range(max(depth - 2, 0), depth + 1))


def checked_taps(taps: Sequence[int] | None, config: PretrainedConfig) -> tuple[int, ...]:
    """The taps, or the default ones. Raises ValueError where the target has none such, or for another order."""
    depth = config.num_hidden_layers
    chosen = default_taps(depth) if taps is None else tuple(taps)
    if list(chosen) != sorted(set(chosen)) or not chosen:
        raise ValueError(f"taps {list(chosen)} must be named once each, in ascending order")
    if not 0 <= chosen[0] <= chosen[-1] <= depth:
        raise ValueError(f"taps {list(chosen)}: this target has hidden states 0 to {depth}")
    return chosen


def check_reach(window: int | None, stretch: float, depth: int) -> None:
    """Raise ValueError for a window that hides a drafter's own guesses, or a stretch that stretches nothing."""
    if window is not None and window <= depth:
        raise ValueError(f"window={window} would hide the drafter's own {depth} guesses; give more, or null for all")
    if not stretch >= 1:
        raise ValueError(f"stretch={stretch}: positions are divided by it; give at least 1")


class Fused(FeatureDrafter):
    """`head` rows: the output matrix starts as the target's rows; frozen: it stays so; random: it does not.

    `embedding` trained: it has an embedding of its own, which starts as the target's. `width` None is the target's;
    with another nothing of the target fits, so `head` is random and `embedding` trained. `window` and `stretch` change
    no weight: how far attention looks back, and what positions are divided by.
    """

    def __init__(
        self,
        ends: Ends,
        taps: Sequence[int] | None,
        vocabulary: int | None,
        *,
        layers: int,
        residual: str,
        head: str,
        embedding: str,
        window: int | None,
        stretch: float,
        depth: int,
        fc_norm: bool = False,
        width: int | None = None,
    ):
        super().__init__()
        check_knobs(ends.width, residual, head, embedding, width, layers)
        check_reach(window, stretch, depth)
        self.ends, self.head, self.window = ends, head, window
        self.taps = checked_taps(taps, ends.config)
        self.vocabulary = DraftVocabulary(vocabulary, ends.vocabulary)
        width = width or ends.width
        config = layer_config(ends.config, width)
        self.fc_norm = nn.ModuleList(RMSNorm(ends.width, config.rms_norm_eps) for _ in self.taps if fc_norm)
        self.fc = nn.Linear(len(self.taps) * ends.width, width, bias=False)
        self.midlayer = FusedLayer(config, residual, stretch)
        self.above = nn.ModuleList(PlainLayer(config, stretch) for _ in range(layers - 1))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, self.vocabulary.size, bias=False)
        self.lm_head.requires_grad_(head != "frozen")
        self.embed_tokens = own_embedding(ends, width) if embedding == "trained" else None
        self._from_target()

    @property
    def stack(self) -> Sequence[Layer]:
        return [self.midlayer, *(cast(Layer, layer) for layer in self.above)]

    def learn_vocabulary(self, counts: Tensor) -> None:
        """Draft only the tokens that the target said most."""
        self.vocabulary.learn(counts)
        self._from_target()

    def _from_target(self) -> None:
        """Start the output matrix from the target's."""
        if self.head != "random":
            self.lm_head.weight.data.copy_(self.vocabulary.rows(self.ends.head))

    def inherit(self, layer: Callable[[int], dict[str, Tensor]]) -> None:
        """Take the target's final norm, which its head expects."""
        final = self.theirs(layer(self.taps[-1])).get("norm.weight")
        if final is not None and final.shape == self.norm.weight.shape:
            self.norm.weight.data.copy_(final)

    def theirs(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The target's tensors as a Llama layer reads them: Gemma's norms store what is added to one."""
        gain = 1.0 if self.ends.config.model_type.startswith("gemma") else 0.0
        return {name: value + gain * name.endswith("norm.weight") for name, value in tensors.items()}

    def fused(self, features: Tensor) -> Tensor:
        """One feature [..., D] of the taps [..., L*D]."""
        features = features.to(self.norm.weight.dtype)
        if len(self.fc_norm):
            taps = features.split(self.ends.width, dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        return self.fc(features)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D], in this drafter's precision."""
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens)
        return self.ends.embed(tokens).to(self.norm.weight.dtype)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., V] of states [..., D] after the final norm."""
        return self.lm_head(normed)

    def known(self, committed: Committed) -> Tensor:
        return self.fused(committed.features)

    def inputs(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.inputs(self.embedded(tokens), feature)

    def says(self, state: Tensor) -> Tensor:
        return self.logits(self.norm(state))


def check_knobs(target_width: int, residual: str, head: str, embedding: str, width: int | None, layers: int) -> None:
    """Raise ValueError for knobs that mean nothing, or not together."""
    if residual not in PLACES:
        raise ValueError(f"residual={residual}: it is before_norm or after_norm")
    if head not in HEADS or embedding not in EMBEDDINGS:
        raise ValueError(
            f"head={head} embedding={embedding}: head is rows, random or frozen, embedding is frozen or trained"
        )
    if layers < 1:
        raise ValueError(f"layers={layers}: a drafter has at least 1")
    if width not in (None, target_width) and (head != "random" or embedding != "trained"):
        raise ValueError(
            f"width={width} is not the target's {target_width}, whose head and embedding do not fit; set head=random embedding=trained"
        )


def own_embedding(ends: Ends, width: int) -> nn.Embedding:
    """An embedding to train: the target's as its first layer reads it, or a random one of another width."""
    made = nn.Embedding(len(ends.embedding), width)
    if width == ends.width:
        made.weight.data.copy_(ends.embedding * ends.embedding_scale)
    else:
        nn.init.normal_(made.weight, std=0.02)  # as Llama starts
    return made
