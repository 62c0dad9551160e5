"""The target without its body: loaded alone it embeds and scores as the whole model does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conftest import stock_model, tiny_config
from models.ends import Ends, tensor_files

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "tied, half a layer a shard": ("qwen3", {"tie_word_embeddings": True, "shard": "20KB"}),
    "untied, half a layer a shard": ("llama", {"shard": "20KB"}),
    "soft cap and scaled embedding": ("gemma2", {"final_logit_softcapping": 3.0, "tie_word_embeddings": True}),
    "scaled embedding": ("gemma3_text", {}),
    "logit scale": ("cohere", {"logit_scale": 0.25}),
    "logit divisor and embedding multiplier": ("granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    "bias": ("phi", {"intermediate_size": 32}),
}


def saved(folder: Path, architecture: str, shard: str = "1GB", **changes: Any) -> PreTrainedModel:
    """A random model, a bias of its head included, written to `folder`."""
    torch.manual_seed(1)
    config = tiny_config(architecture, **changes)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
        torch.nn.init.normal_(bias)
    model.save_pretrained(folder, max_shard_size=shard)
    return stock_model(folder)


@pytest.mark.parametrize("kind", HEADS)
@torch.inference_mode()
def test_loaded_ends_equal_those_of_the_model_and_its_own_logits(kind: str, tmp_path: Path) -> None:
    architecture, changes = HEADS[kind]
    model = saved(tmp_path, architecture, **changes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == ("shard" in changes)
    loaded, shared = Ends.load(tmp_path), Ends.of(model)
    assert loaded.embedding.equal(shared.embedding)
    assert loaded.head.equal(shared.head)
    assert (loaded.bias is None) == (shared.bias is None)
    assert (loaded.width, loaded.vocabulary) == (32, 272)
    assert loaded.head.equal(loaded.embedding) == changes.get("tie_word_embeddings", False)
    ids = torch.randint(0, 272, (2, 7))
    whole = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    for ends in (loaded, shared):
        torch.testing.assert_close(ends.embed(ids), whole.hidden_states[0])
        torch.testing.assert_close(ends.logits(whole.hidden_states[-1]), whole.logits, rtol=1e-5, atol=1e-5)
        rows = torch.tensor([5, 0, 271])
        torch.testing.assert_close(
            ends.logits(whole.hidden_states[-1], rows), whole.logits[..., rows], rtol=1e-5, atol=1e-5
        )


def test_ends_share_the_weights_of_a_loaded_model(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama")
    assert Ends.of(model).head.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_ends_load_in_the_precision_asked_for(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama")
    ends = Ends.load(tmp_path, dtype=torch.bfloat16)
    assert ends.head.equal(model.get_output_embeddings().weight.bfloat16())
    assert ends.embedding.dtype == torch.bfloat16


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama", shard="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"lacks {gone.name}, named in its index; download the checkpoint again"):
        Ends.load(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no \.safetensors file; convert the checkpoint to safetensors first"):
        Ends.load(tmp_path)


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_checkpoint_without_one_of_its_ends_is_refused(tensor: str, tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    save_file(
        {name: weight for name, weight in load_file(file).items() if name != tensor}, file, metadata={"format": "pt"}
    )
    with pytest.raises(
        ValueError, match=f"holds no tensor '{tensor}'; it is no checkpoint of llama, or a shard is missing"
    ):
        Ends.load(tmp_path)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged \(.*\); download the checkpoint again"):
        Ends.load(tmp_path)


def test_every_tensor_is_found_in_the_file_that_holds_it(tmp_path: Path) -> None:
    saved(tmp_path, "llama", shard="20KB")
    by_index = tensor_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    assert set(by_index) == set(json.loads(index.read_text())["weight_map"])
    index.unlink()
    assert tensor_files(tmp_path) == by_index
