"""`python scripts/ask_speculators.py FOLDER`, in the environment of `speculators`: what its class makes of our export.

T positions, K steps, V draft vocabulary. Its pairs are of feature t and token t + 1, as ours are, with the tokens shifted
beforehand.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def ask(home: Path) -> None:
    """Write its logits at every step, as far as the tokens go, to theirs.safetensors."""
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.models.attention import create_float_mask

    given = load_file(home / "ours.safetensors")
    steps = sum(name.startswith("logits.") for name in given)
    config = SpeculatorModelConfig.from_pretrained(home / "export")
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = (
        SpeculatorModel.from_pretrained(str(home / "export"), config=config, dtype=torch.float32).float().eval()
    )
    model._create_mask_fn = lambda *args, **how: create_float_mask(*args, **{**how, "dtype": torch.float32})
    tokens, features = given["input_ids"][:, 1:], given["features"][:, :-1]
    found = eagle3(model, features, tokens, steps)
    save_file({f"logits.{step}": value.contiguous() for step, value in enumerate(found)}, home / "theirs.safetensors")


@torch.inference_mode()
def eagle3(model: Any, features: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
    """[T - step, V] of each step: it reads the true tokens and its own states."""
    heard: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: heard.append(call[-1][0]))
    model(features, tokens, torch.zeros_like(tokens), ttt_steps=steps)
    return [logits[: len(logits) - step].clone() for step, logits in enumerate(heard)]


if __name__ == "__main__":
    ask(Path(sys.argv[1]))
