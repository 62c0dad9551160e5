"""How much memory the loss takes beyond weights and their gradients: python scripts/bench_memory.py [--rows 8192]

Width 576, vocabulary 152,000, whole and taught; the target's head has as many rows. The gradient is made twice, so
that one is added to another. A process of its own: what is told is its highest resident set, by the kernel.
"""

import argparse
import resource
from pathlib import Path

import torch
from transformers import LlamaConfig

from models.drafter import FeatureBatch
from models.ends import Ends
from models.losses import Head, Objective
from models.questions import Questions
from models.vocabulary import DraftVocabulary

WIDTH, VOCABULARY = 576, 152_000


def resident() -> float:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description="How much memory the loss takes beyond weights and their gradients.")
    parser.add_argument("--rows", type=int, default=8192, help="guesses")
    parser.add_argument("--loss", default="kl")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows, length = asked.rows, asked.rows + 2
    ids, row = torch.randint(0, VOCABULARY, (1, length)), torch.zeros(1, length, dtype=torch.long)
    marked = torch.ones(1, length, dtype=torch.bool)
    hidden = torch.randn(1, length, WIDTH)
    batch = FeatureBatch(ids, marked, row, torch.arange(length)[None], hidden[..., :0], hidden)
    matrix = 0.02 * torch.randn(VOCABULARY, WIDTH)
    ends, weight = Ends(matrix, matrix, None, LlamaConfig()), matrix.clone().requires_grad_()
    states = torch.randn(rows, WIDTH, requires_grad=True)
    small = 100 * (matrix[:1] @ matrix[:64].T)  # wakes the libraries
    before, gradient = resident(), weight.nbytes + states.nbytes + 0 * small.nbytes
    loss = Objective(asked.loss).loss(
        batch, Questions.of(batch, 1), [states], Head(weight), ends, DraftVocabulary(None, VOCABULARY), measure=False
    )
    loss.total.backward()
    assert weight.grad is not None
    assert weight.grad.any()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{rows} guesses over {VOCABULARY} tokens: {(peak - before - gradient) / 1e9:.3f} GB beyond weights and gradients"
    )


if __name__ == "__main__":
    main()
