"""Where weights come from, and which weights they are."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import tiny_config
from models.files import cache_home, made_once
from models.source import Identity, byte_tokenizer, fingerprint, from_hub, from_random, identify


@pytest.fixture(scope="module")
def folder() -> Path:
    """A random Llama with a byte tokenizer."""
    return from_random(tiny_config("llama"))


def rewritten(folder: Path, to: Path, shard: str = "1GB", dtype: torch.dtype = torch.float32) -> Path:
    """A copy of `folder` with its weights written anew."""
    shutil.copytree(folder, to)
    (to / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(to, max_shard_size=shard)
    return to


def test_the_fingerprint_does_not_depend_on_name_shards_or_precision(folder: Path, tmp_path: Path) -> None:
    ours = fingerprint(folder)
    assert fingerprint(shutil.copytree(folder, tmp_path / "another name")) == ours
    shards = rewritten(folder, tmp_path / "shards", shard="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert fingerprint(shards) == ours
    assert fingerprint(rewritten(folder, tmp_path / "bf16", dtype=torch.bfloat16)) == ours


def other_seed(to: Path) -> None:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(to)).save_pretrained(to)


def one_row(to: Path) -> None:
    """What a short finetune does: every row moves a little."""
    model = AutoModelForCausalLM.from_pretrained(to)
    weight = model.model.layers[2].mlp.down_proj.weight
    weight.data += 0.01 * torch.randn_like(weight)
    model.save_pretrained(to)


def other_template(to: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(to)
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(to)


def other_token(to: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(to)
    tokenizer.add_tokens(["<|tool|>"])
    tokenizer.save_pretrained(to)


@pytest.mark.parametrize("change", [other_seed, one_row, other_template, other_token])
def test_the_fingerprint_tells_other_weights_tokens_and_templates_apart(
    change: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy)
    assert fingerprint(copy) != fingerprint(folder)


def test_a_target_is_identified_without_loading_it(folder: Path) -> None:
    assert identify(folder, "tiny") == Identity("tiny", fingerprint(folder), width=32, vocabulary=272)


def test_a_random_target_is_the_same_in_every_cache_and_leaves_the_random_numbers_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    state = torch.random.get_rng_state()
    again = from_random(tiny_config("llama"))
    assert torch.random.get_rng_state().equal(state)
    assert again.parent == tmp_path / "targets" == cache_home() / "targets"
    assert fingerprint(again) == fingerprint(folder)
    assert from_random(tiny_config("llama")) == again
    assert from_random(tiny_config("llama", initializer_range=0.1)) != again
    assert [path for path in (tmp_path / "targets").iterdir() if path.name.startswith(".")] == []


def test_what_failed_half_way_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("a file")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        made_once("thing", fail)
    assert list((tmp_path / "targets").iterdir()) == []


def test_the_byte_tokenizer_spells_any_text_in_bytes() -> None:
    tokenizer = byte_tokenizer()
    text = "A zebra, naïve: 斑馬\n<|end|>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.removesuffix("<|end|>").encode()) + 1
    assert ids[-1] == tokenizer.eos_token_id == 256
    assert tokenizer.decode(ids) == text
    spoken = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert spoken == "user:hi<|end|>assistant:"


def test_a_local_folder_is_taken_as_it_is(folder: Path) -> None:
    assert from_hub(str(folder)) == folder


@pytest.mark.parametrize("name", ["no-such-folder", "./no/such", "/no/such", "a/b/c"])
def test_what_is_neither_folder_nor_hub_name_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"there is no drafter folder '{name}', and it is no Hub name of the form owner/name"
    ):
        from_hub(name, kind="drafter")


def test_a_hub_name_that_is_not_cached_is_refused_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"nobody/nothing is not in the local cache and the Hub cannot be reached .*; connect once, or pass the folder",
    ):
        from_hub("nobody/nothing")
