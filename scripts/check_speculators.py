"""What our drafter says of a text, for scripts/check_speculators.sh to compare with what the `speculators` library's class says.

`python scripts/check_speculators.py conf=NAME`: exports the drafter in that library's layout, asks it at every position of a
held-out conversation, and leaves ours.safetensors beside the export. `--compare FOLDER` then lays theirs beside it.
B rows, T positions, L taps, D width, V draft vocabulary.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf import command
from conf.schema import Run
from decode.opening import open_drafter, open_target
from models.drafter import Drafter, FeatureBatch
from models.eagle3 import Eagle3
from models.questions import Questions
from models.shelf import read_card
from models.target import Target
from train.data import load_examples
from train.export import export, trained
from train.sources import rows_of

STEPS, LONGEST = 4, 160
NEAR = 1e-5


def expect(run: Run) -> None:
    """Export, ask, and write down. CHECK_SPECULATORS names the folder."""
    home, source = Path(os.environ["CHECK_SPECULATORS"]), trained(run)
    run.layout, run.out, run.target.dtype = "speculators", str(home / "export"), "fp32"
    export(run)
    target = open_target(run.target)
    drafter = open_drafter(source, read_card(source), target)
    target.tap(drafter.taps)
    batch = text(run, target)
    found = {"input_ids": batch.input_ids, "features": batch.features}
    found |= {f"logits.{step}": logits for step, logits in enumerate(logits_of(drafter, batch))}
    save_file({name: value.contiguous().clone() for name, value in found.items()}, home / "ours.safetensors")


def text(run: Run, target: Target) -> FeatureBatch:
    """The last conversation, which training holds out, as the target reads it."""
    rows = list(rows_of(run.data, quiet=True))[-1:]
    (example,) = load_examples(rows, target.tokenizer, target.end_tokens, LONGEST, True)
    ids, mask = torch.tensor(example.input_ids), torch.tensor(example.loss_mask).bool()
    return target.features(ids[None], mask[None], torch.tensor([len(ids)]))


@torch.inference_mode()
def logits_of(drafter: Drafter, batch: FeatureBatch) -> list[Tensor]:
    """For each step [T - 1 - step, V]: what it says wherever the tokens that it reads are known."""
    at = torch.arange(batch.input_ids.shape[1])[None]
    where = [at < at.shape[1] - 1 - step for step in range(STEPS)]
    if not isinstance(drafter, Eagle3):
        raise ValueError(f"this checks EAGLE-3, and the drafter is a {type(drafter).__name__}; name another")
    return [drafter.logits(state) for state in drafter.unroll(batch, Questions.where(where))]


def compare(home: Path) -> int:
    """Print how far the two are apart at every step; 1 where it is more than NEAR of the largest logit."""
    ours, theirs = load_file(home / "ours.safetensors"), load_file(home / "theirs.safetensors")
    wrong = 0
    for step in range(STEPS):
        one, other = ours[f"logits.{step}"], theirs[f"logits.{step}"]
        largest = float(one.abs().max())
        apart = float((one - other).abs().max()) if one.shape == other.shape else torch.inf
        print(
            f"step {step + 1}: {list(one.shape)} logits of up to {largest:.2f}, at most {apart:.1e} apart, {apart / largest:.1e} of the largest"
        )
        wrong += not apart <= NEAR * largest  # a NaN is not near
    print("they are the same" if not wrong else f"error: {wrong} of {STEPS} steps differ")
    return int(bool(wrong))


main = command("check_speculators:expect")

if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.exit(compare(Path(sys.argv[2])))
    main()
