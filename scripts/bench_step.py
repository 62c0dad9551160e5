"""How fast one EAGLE-3 step is beside the products it cannot do without: python scripts/bench_step.py [--dtype bf16]

Width 576, intermediate 1536, 9 heads of which 3 hold keys, vocabulary 49,152, draft vocabulary 8,192; one sequence of
256 tokens whose first quarter is prompt; seven steps, forward and backward. One thread, process CPU time. The teacher's
product with its head is outside the clock. Counted are the 74 GFLOP of the products alone; the yardstick is what a
product of 512 rows reaches in the same run.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import LlamaConfig

from models.drafter import FeatureBatch
from models.eagle3 import Eagle3
from models.ends import Ends

WIDTH, INNER, HEADS, GROUPS, VOCABULARY, DRAFTED = 576, 1536, 9, 3, 49_152, 8_192
LENGTH, PROMPT, STEPS = 256, 64, 7
NECESSARY = 74e9  # floating-point operations


class Heard(Ends):
    """Ends whose products with the head were made before; a hidden state's first number is its place."""

    def remember(self, hidden: Tensor) -> None:
        self.known = super().logits(hidden)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        first = int(hidden[0, 0])  # neighbours ask together
        return self.known[first : first + len(hidden)]


def seconds(work: Callable[[], object], times: int) -> list[float]:
    """CPU seconds of each of `times` runs of `work`, the fastest first."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return sorted(taken)


def yardstick(dtype: torch.dtype) -> float:
    """Floating-point operations a second of products of 512 rows with the layer's largest matrix."""
    left, right = torch.randn(512, WIDTH, dtype=dtype), torch.randn(INNER, WIDTH, dtype=dtype)
    best = seconds(lambda: [linear(left, right) for _ in range(20)], 4)[0]
    return 20 * 2 * 512 * WIDTH * INNER / best


def given() -> tuple[Eagle3, FeatureBatch]:
    """A drafter of random weights and a random conversation."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_hidden_layers=30,
        vocab_size=VOCABULARY,
    )
    matrix = 0.05 * torch.randn(VOCABULARY, WIDTH)
    ends = Heard(matrix, matrix, None, config)
    drafter = Eagle3(ends, steps=STEPS, vocabulary=DRAFTED)
    place = torch.arange(LENGTH)
    hidden = torch.randn(1, LENGTH, WIDTH)
    ends.remember(hidden[0])
    hidden[0, :, 0] = place
    return drafter, FeatureBatch(
        torch.randint(0, DRAFTED, (1, LENGTH)),
        (place >= PROMPT)[None],
        torch.zeros(1, LENGTH, dtype=torch.long),
        place[None],
        torch.randn(1, LENGTH, len(drafter.taps) * WIDTH),
        hidden,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="How fast one EAGLE-3 step is beside the products it cannot do without."
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    drafter, batch = given()
    dtype = torch.bfloat16 if asked.dtype == "bf16" else torch.float32

    def step() -> None:
        drafter.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if asked.dtype == "bf16" else nullcontext():
            loss = drafter.training_loss(batch).total
        loss.backward()

    step()
    taken, speeds = [], []
    for _ in range(asked.times):  # side by side, as a machine's speed changes
        speeds.append(yardstick(dtype))
        taken.append(seconds(step, 1)[0])
    shares = sorted(NECESSARY / second / speed for second, speed in zip(taken, speeds, strict=True))
    print(f"a product of 512 rows reaches {min(speeds) / 1e9:.1f} to {max(speeds) / 1e9:.1f} GFLOP/s")
    print(f"a step takes {min(taken):.3f} to {max(taken):.3f} CPU seconds")
    print(
        f"its {NECESSARY / 1e9:.0f} GFLOP run at {median(shares):.1%} of the product's speed (median of {len(shares)}; {shares[0]:.1%} to {shares[-1]:.1%})"
    )
    if asked.profile:
        with torch.profiler.profile() as profile:
            step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


if __name__ == "__main__":
    main()
