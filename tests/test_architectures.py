"""Every feature drafter learns from and drafts for every architecture, and hears exactly what the target says."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import ARCHITECTURES, Family, family_of, stock_model, tiny_config
from decode.engine import generate
from models.drafter import Budget, Drafter
from models.losses import Teacher
from models.source import byte_tokenizer
from models.target import load_target
from runs import composed

DRAFTERS = {"eagle": [], "eagle3": ["drafter.steps=3"], "peagle": ["drafter.depths=3", "drafter.layers=2"]}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "in shards": ("qwen3", {"shard": "20KB"}),
    "heads wider than their share of the width": ("qwen3", {"head_dim": 16}),
    "soft cap": ("gemma2", {"final_logit_softcapping": 3.0}),
    "logit scale": ("cohere", {"logit_scale": 0.25}),
    "logit divisor": ("granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
}
PROMPTS = [[7, 30, 99, 4, 61], [200, 3, 3, 8, 120, 11, 45, 90, 2, 17, 250, 33]]  # one outgrows the windows


@functools.cache
def headed(kind: str, folder: Path) -> Family:
    """A target whose head or whose files are special."""
    architecture, changes = HEADS[kind]
    config = tiny_config(architecture, **{key: value for key, value in changes.items() if key != "shard"})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(folder, max_shard_size=changes.get("shard", "1GB"))
    byte_tokenizer().save_pretrained(folder)
    return Family(load_target(folder, kind, dtype="fp32", device="cpu"), stock_model(folder))


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *HEADS])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Each architecture in turn, then each special head."""
    if request.param in ARCHITECTURES:
        return family_of(request.param)
    return headed(request.param, tmp_path_factory.mktemp("headed"))


def made(family: str, subject: Family) -> Drafter:
    torch.manual_seed(0)
    conf = composed(f"drafter={family}", *DRAFTERS[family]).drafter
    drafter: Drafter = instantiate(conf, _partial_=True)(subject.target.ends)
    subject.target.tap(drafter.taps)
    return drafter


@pytest.mark.parametrize("family", DRAFTERS)
def test_it_learns_and_drafts_and_the_text_is_transformers_own(family: str, subject: Family) -> None:
    drafter = made(family, subject)
    ids = torch.tensor([PROMPTS[1] + subject.says(PROMPTS[1], 12)])
    batch = subject.target.features(ids, torch.arange(ids.shape[1])[None] >= 8, torch.tensor([ids.shape[1]]))
    batch = type(batch)(*(value.clone() for value in vars(batch).values()))
    heard = Teacher.of(subject.target.ends, batch.last_hidden[0], None).probs
    with torch.inference_mode():
        said = subject.stock(input_ids=ids).logits[0].softmax(-1)
    torch.testing.assert_close(heard, said, rtol=1e-3, atol=1e-6)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3)
    losses = []
    for _ in range(5):
        torch.manual_seed(3)  # the same noise and the same places at every step
        loss = drafter.training_loss(batch)
        (loss.total / loss.counted).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.total.item())
    assert losses[-1] < 0.9 * losses[0]
    drafter.eval()
    texts = [subject.says(prompt, 12) for prompt in PROMPTS]
    drafted = generate(subject.target, drafter, PROMPTS, 12, Budget(nodes=8, depth=3, branch=3), rows=2)
    assert [one.tokens for one in drafted.generations] == texts
