"""What the tests of EAGLE's families start from: a small target's ends, a small batch, and drafters of random weights."""

from typing import Any, TypeVar

import torch
from transformers import LlamaConfig

from models.drafter import Drafter, FeatureBatch
from models.ends import Ends
from reference import marked_batch

# one row of two documents and padding, one that is all one document; where the target speaks
DOCUMENTS = ["0" * 9 + "1" * 9 + "-" * 4, "0" * 22]
SPOKEN = ["...xxx...." + "..xxxxxx" + "....", "....xxxxx...xxxxxxx..x"]
WIDTH, VOCABULARY = 16, 20
CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Family = TypeVar("Family", bound=Drafter)


def small_ends(bias: bool = False, cap: float | None = None) -> Ends:
    """The ends of a target of 8 layers, whose head may have a bias and a soft cap; the same every time."""
    torch.manual_seed(5)
    config = LlamaConfig(**CONFIG, num_hidden_layers=8)
    config.final_logit_softcapping = cap
    embedding, head = torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY, WIDTH)
    return Ends(embedding, head, torch.randn(VOCABULARY) if bias else None, config)


def shaken(drafter: Family) -> Family:
    """`drafter` with a draft vocabulary, and weights that are no longer those it starts with."""
    drafter.learn_vocabulary(torch.arange(VOCABULARY) % 7)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter


def small_batch(taps: int) -> FeatureBatch:
    """The batch that DOCUMENTS and SPOKEN draw."""
    return marked_batch(DOCUMENTS, SPOKEN, VOCABULARY, WIDTH, taps=taps, seed=2)
