"""What the target says about text once it is written: would it have shared the drafter's view, was a difference a near-tie.

B rows, T tokens, K depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.engine import Generation
from decode.figures import Sample
from models.drafter import Drafter
from models.target import Target

BATCH = 4  # texts read at once: their features and logits exist together


@dataclass
class Divergence:
    """Where an output first differs from plain decoding's, and how sure the target was there."""

    bench: str
    prompt: int
    at: int  # position in the written text
    ours: int  # token ids
    plain: int
    gap: float  # between the target's top two logits: near 0 it is a tie that rounding decides, else a fault


@torch.inference_mode()
def divergences(target: Target, samples: Sequence[Sample]) -> list[Divergence]:
    """One for each output that is not plain decoding's; only greedy decoding has such."""
    target.tap(())
    found = []
    for sample in samples:
        for number, (ours, plain) in enumerate(sample.texts()):
            if ours == plain:
                continue
            at = next(at for at, pair in enumerate(zip(ours, plain, strict=False)) if pair[0] != pair[1])
            gap = top_gap(target, [*sample.prompts[number], *plain[:at]])
            found.append(Divergence(sample.bench, sample.start + number, at, ours[at], plain[at], gap))
    return found


def top_gap(target: Target, text: list[int]) -> float:
    """The distance of the target's top two logits after `text`, by one ordinary pass."""
    reading = target.prefill(torch.tensor([text]), torch.tensor([len(text)]), target.cache(1, len(text)))
    assert reading.logits is not None
    first, second = reading.logits[0, 0].float().topk(2).values.tolist()
    return first - second


@torch.inference_mode()
def overlap_by_depth(target: Target, drafter: Drafter, samples: Sequence[Sample]) -> list[float]:
    """Analytic acceptance by depth: the mean of sum_v min(target, draft) over the text that plain decoding wrote.

    Both distributions at temperature 1. It is what sampled guesses would be accepted with along that text, without the
    noise of counting; [] for drafters that have no distribution.
    """
    target.tap(drafter.taps)
    texts = [
        (prompt, generation.tokens)
        for sample in samples
        for prompt, generation in zip(sample.prompts, sample.plain.generations, strict=True)
    ]
    sums: Tensor = torch.zeros(2, 1)
    try:
        for start in range(0, len(texts), BATCH):
            loss = drafter.eval().training_loss(target.features(*padded(texts[start : start + BATCH])))
            sums = sums + torch.stack([loss.overlap, loss.seen]).cpu()
    except NotImplementedError:
        return []
    return [shared / seen for shared, seen in sums.T.tolist() if seen]


def padded(texts: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B, T], which of them the target wrote [B, T], and lengths [B], of prompts with what was written after them."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor([*prompt, *written]) for prompt, written in texts], batch_first=True)
    said = [torch.tensor([False] * len(prompt) + [True] * len(written)) for prompt, written in texts]
    return ids, pad(said, batch_first=True), torch.tensor([len(one) for one in said])


def sample_text(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> dict[str, Any]:
    """The first prompt and its drafted answer, in pieces that say who wrote them."""
    first = samples[0]
    written = first.drafted.generations[0]
    parts = zip(pieces(tokenizer, written.tokens), authors(written), strict=True)
    return {
        "bench": first.bench,
        "prompt": tokenizer.decode(first.prompts[0]),
        "pieces": [{"text": text, "by": by} for text, by in parts],
    }


def authors(written: Generation) -> list[int]:
    """For each token 0 where the target itself said it, k where it is an accepted guess at depth k."""
    by = [0]
    for step in written.steps:
        guessed = range(1, len(step.path) + 1)
        by += [*guessed, 0][: step.committed]
    return by


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text of each token, such that they join to the whole; a token that ends inside a letter gives its part to the next."""
    shown, told = "", list[str]()
    for count in range(1, len(tokens) + 1):
        whole = cast(str, tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False))
        unfinished = whole.endswith("\ufffd") and count < len(tokens)
        told.append("" if unfinished else whole[len(shown) :])
        shown = shown if unfinished else whole
    return told
