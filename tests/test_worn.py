"""A target that wears a PEFT adapter: merged or not it is the same target, another one than without, and says so."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from conf.schema import Run
from conftest import stock_model
from decode.arms import arms_of
from decode.engine import generate
from decode.opening import base_folder, called, identity_of, open_drafter, open_target, served_folder
from models.drafter import Budget, Plain
from models.ends import Ends
from models.shelf import read_card
from models.worn import BASE, MATRICES, SETTINGS
from runs import composed
from train import job
from train.answers import kept_in
from train.doctor import chart_of
from train.export import export
from train.regenerate import drafter_of
from train.store import Stamp

SMALL = ("target.dtype=fp32", "optim.precision=fp32", "target.random.initializer_range=0.3", "drafter.heads=2")
SHORT = ("optim.steps=2", "optim.warmup=1", "optim.batch=2", "log.evaluate_every=99", "log.save_every=99")
IDS = torch.tensor([[5, 99, 17, 3, 200, 41]])


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate refuses a second precision in one process."""
    yield
    AcceleratorState._reset_state(True)


def adapter(folder: Path, seed: int = 0, tied: bool = False, **how: Any) -> Path:
    """An adapter of random numbers for the target of `run_of`, written by PEFT."""
    torch.manual_seed(seed)
    model = stock_model(base_folder(run_of(tied=tied).target))
    settings = {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **how}
    worn = get_peft_model(model, LoraConfig(**settings))
    for name, parameter in worn.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn_like(parameter) * (0.3 if "lora" in name else 0.1))
    worn.save_pretrained(folder)
    return folder


def run_of(*words: str, tied: bool = False) -> Run:
    return composed(*SMALL, *SHORT, f"+target.random.tie_word_embeddings={str(tied).lower()}", *words)


@pytest.fixture(scope="module")
def worn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(tmp_path_factory.mktemp("worn") / "a")


def by_peft(folder: Path, tied: bool = False) -> torch.Tensor:
    """What PEFT's own model says, with the adapter beside the weights."""
    model = PeftModel.from_pretrained(stock_model(base_folder(run_of(tied=tied).target)), folder).eval()
    with torch.inference_mode():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("merge", [True, False])
def test_a_target_with_an_adapter_says_what_peft_says_with_it(worn: Path, merge: bool) -> None:
    target = open_target(run_of(f"target.adapter={worn}", f"target.merge={merge}").target)
    bare = open_target(run_of().target)
    with torch.inference_mode():
        ours = target.logits(target.documents(IDS, IDS > 0, IDS * 0, torch.arange(6)[None]).last_hidden)
        theirs = bare.logits(bare.documents(IDS, IDS > 0, IDS * 0, torch.arange(6)[None]).last_hidden)
    torch.testing.assert_close(ours, by_peft(worn), rtol=1e-4, atol=1e-4)
    assert float((ours - theirs).abs().max()) > 0.1
    prompts = [[5, 99, 17], [200, 3]]
    target.tap(())
    texts = generate(target, Plain(), prompts, 12, Budget(nodes=1)).generations
    model = PeftModel.from_pretrained(stock_model(base_folder(run_of().target)), worn).eval()
    for prompt, text in zip(prompts, texts, strict=True):
        said = model.generate(
            input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=256, pad_token_id=0
        )
        assert text.tokens == said[0, len(prompt) :].tolist()


def test_the_merged_checkpoint_is_weight_plus_scaled_product_and_nothing_else(worn: Path) -> None:
    run = run_of(f"target.adapter={worn}")
    before, after, thin = (
        load_file(folder)
        for folder in (
            base_folder(run.target) / "model.safetensors",
            served_folder(run.target) / "model.safetensors",
            worn / MATRICES,
        )
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "down_proj" in name}
    for name in changed:
        a, b = (thin[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"].double() for side in "AB")
        torch.testing.assert_close(after[name].double(), before[name].double() + 5 / 2 * b @ a, rtol=1e-6, atol=1e-6)
    names = {file.name for file in base_folder(run.target).iterdir()}
    assert {file.name for file in served_folder(run.target).iterdir()} == names


CHANGED_ENDS: dict[str, dict[str, Any]] = {
    "a tied head": {"target_modules": ["q_proj", "lm_head"]},
    "an embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "a whole head": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[pytest.mark.slow] * ("tied" not in name), id=name) for name, how in CHANGED_ENDS.items()],
)
def test_an_adapter_of_embedding_or_head_changes_that_one_alone(how: dict[str, Any], tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", tied=True, **how)
    run = run_of(f"target.adapter={folder}", tied=True)
    target, ends = open_target(run.target), Ends.load(served_folder(run.target))
    bare = Ends.load(base_folder(run.target))
    with torch.inference_mode():
        hidden = target.documents(IDS, IDS > 0, IDS * 0, torch.arange(6)[None]).last_hidden
        torch.testing.assert_close(ends.logits(hidden), by_peft(folder, tied=True), rtol=1e-4, atol=1e-4)
    moved = {
        "embedding": not torch.equal(ends.embedding, bare.embedding),
        "head": not torch.equal(ends.head, bare.head),
    }
    assert moved == {"embedding": "embed_tokens" in how.get("target_modules", ()), "head": "lm_head" in str(how)}
    with pytest.raises(ValueError, match=r"which drafters read by themselves; merge it with target\.merge=true"):
        open_target(replace(run.target, merge=False))


def test_the_identity_is_that_of_base_and_adapter_whatever_is_merged_and_wherever_it_lies(
    worn: Path, tmp_path: Path
) -> None:
    bare, merged, apart = (
        identity_of(run_of(*words).target)
        for words in ((), (f"target.adapter={worn}",), (f"target.adapter={worn}", "target.merge=false"))
    )
    assert merged == apart
    assert (merged.base, merged.adapter) == (bare.fingerprint, str(worn))
    assert merged.fingerprint != bare.fingerprint
    elsewhere = shutil.copytree(worn, tmp_path / "elsewhere")
    assert identity_of(run_of(f"target.adapter={elsewhere}").target).fingerprint == merged.fingerprint
    other = identity_of(run_of(f"target.adapter={adapter(tmp_path / 'b', seed=1)}").target)
    stamps = {Stamp(one.fingerprint, (1,), "float32").folder for one in (bare, merged, other)}
    assert len(stamps) == 3
    answers = {kept_in(run_of(*words), "answers") for words in ((), (f"target.adapter={worn}",))}
    assert len(answers) == 2


def tensors_of(change: Any) -> Any:
    def rewrite(folder: Path) -> None:
        save_file(change(load_file(folder / MATRICES)), folder / MATRICES)

    return rewrite


def settings(**values: Any) -> Any:
    def rewrite(folder: Path) -> None:
        (folder / SETTINGS).write_text(json.dumps(json.loads((folder / SETTINGS).read_text()) | values))

    return rewrite


UNFIT = {
    "no folder": (shutil.rmtree, r"there is no adapter folder '.*a', and it is no Hub name"),
    "no settings": (lambda folder: (folder / SETTINGS).unlink(), r"is no PEFT adapter: it holds no adapter_config.json. Name the folder that save_pretrained wrote"),
    "no matrices": (lambda folder: (folder / MATRICES).rename(folder / "adapter_model.bin"), r"holds no adapter_model.safetensors; its adapter_model.bin is a pickle, which is not opened"),
    "damaged matrices": (lambda folder: (folder / MATRICES).write_bytes(b"12345678901"), r"adapter_model.safetensors is damaged"),
    "damaged settings": (lambda folder: (folder / SETTINGS).write_text("{"), r"adapter_config.json is no JSON; fetch the adapter again"),
    "another kind": (settings(peft_type="IA3"), r"an adapter of the kind IA3 and a target wears LoRA only; merge it with peft"),
    "targets that match nothing": (tensors_of(lambda tensors: {}), r"changes nothing: its targets matched no layer when it was made; train it again"),
    "another architecture": (tensors_of(lambda tensors: {name.replace("q_proj", "c_attn"): value for name, value in tensors.items()}), r"an adapter for another model than tiny: it changes model.layers.0.self_attn.c_attn, which is not there. Set target= to its base"),
    "another width": (tensors_of(lambda tensors: {name: torch.cat([value, value], 1) if "q_proj.lora_A" in name else value for name, value in tensors.items()}), r"another model than tiny: model.layers.0.self_attn.q_proj.lora_A.weight has shape \[2, 128\] and \[2, 64\] would fit"),
    "another base": (lambda folder: (folder / BASE).write_text(json.dumps({"name": "big", "fingerprint": "0123"})), r"is an adapter for big \(fingerprint 0123\) and tiny is another \([0-9a-f]{16}\). Set target= to the former"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "sentence"), UNFIT.values(), ids=list(UNFIT))
def test_an_adapter_that_does_not_fit_is_refused_before_weights_load(
    spoil: Any, sentence: str, worn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(shutil.copytree(worn, tmp_path / "a"))
    for name in ("load_target", "merged_folder"):
        monkeypatch.setattr(f"decode.opening.{name}", None)
    run = run_of(f"target.adapter={tmp_path}/a", f"out={tmp_path}/out")
    for work in (lambda: open_target(run.target), lambda: job.train(run)):
        with pytest.raises(ValueError, match=sentence) as refusal:
            work()
        assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(worn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafters: bare for the target alone, merged for the target with its adapter."""
    home = tmp_path_factory.mktemp("trained")
    job.train(run_of(f"out={home}/bare"))
    cached = ("data.features=cached", f"data.store={home}/store")
    job.train(run_of(f"out={home}/merged", f"target.adapter={worn}", *cached))
    return home


def test_a_drafter_of_the_adapted_target_writes_that_targets_text(trained: Path, worn: Path) -> None:
    card = read_card(trained / "merged")
    assert (card.target["adapter"], card.target["base"]) == (
        str(worn),
        read_card(trained / "bare").target["fingerprint"],
    )
    assert [folder.name.split("-")[0] for folder in (trained / "store").iterdir()] == [card.target["fingerprint"]]
    for merge in (True, False):
        target = open_target(run_of(f"target.adapter={worn}", f"target.merge={merge}").target)
        drafter = open_drafter(trained / "merged", card, target)
        prompts = [[5, 99, 17], [200, 3]]
        plain, drafted = (
            [one.tokens for one in generate(target, who, prompts, 16, Budget(nodes=6, depth=2)).generations]
            for who in (Plain(), drafter)
        )
        assert drafted == plain


MISMATCHED = {
    "the bare target": ("merged", False, r"merged was trained for tiny with the adapter \S+a and this is tiny without an adapter. Set target.adapter=\S+a or train again"),
    "the adapted target": ("bare", True, r"bare was trained for tiny without an adapter and this is tiny with the adapter \S+a. Set target.adapter=null or train again"),
    "another adapter": ("merged", None, r"with the adapter \S+a and this is tiny with the adapter \S+b. Set target.adapter=\S+a or train again"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "wears", "sentence"), MISMATCHED.values(), ids=list(MISMATCHED))
def test_a_drafter_is_refused_on_another_wearing(
    name: str, wears: bool | None, sentence: str, trained: Path, worn: Path, tmp_path: Path
) -> None:
    chosen = {False: None, True: worn, None: tmp_path / "b"}[wears]
    if wears is None:
        adapter(tmp_path / "b", seed=1)
    words = [f"trained={trained / name}", *([f"target.adapter={chosen}"] if chosen else [])]
    with pytest.raises(ValueError, match=sentence) as refusal:
        arms_of(run_of(*words))
    assert "\n" not in str(refusal.value)


def test_a_drafter_of_the_bare_target_is_where_one_of_the_adapted_target_starts(
    trained: Path, worn: Path, tmp_path: Path
) -> None:
    words = (f"init_from={trained}/bare", "optim.steps=0")
    job.train(run_of(f"out={tmp_path}/out", f"target.adapter={worn}", *words))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", trained / "bare"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert read_card(tmp_path / "out").target == read_card(trained / "merged").target
    with pytest.raises(ValueError, match=r"merged was trained for tiny with the adapter"):
        job.train(run_of(f"out={tmp_path}/no", f"init_from={trained}/merged", "optim.steps=0"))


def test_an_export_names_the_merged_checkpoint_as_what_is_served(trained: Path, worn: Path, tmp_path: Path) -> None:
    run = run_of(
        f"trained={trained}/merged", f"target.adapter={worn}", "target.merge=false", "layout=vllm", f"out={tmp_path}/v"
    )
    out = export(run)
    assert f"vllm serve {served_folder(run.target)} " in (out / "serve.md").read_text()
    with pytest.raises(ValueError, match="with the adapter"):
        export(run_of(f"trained={trained}/merged", "layout=vllm", f"out={tmp_path}/w"))


def test_tables_call_the_adapted_target_another_one(worn: Path) -> None:
    assert [called(run_of(*words).target) for words in ((), (f"target.adapter={worn}",))] == [
        "tiny",
        f"tiny with {worn}",
    ]


@pytest.mark.slow
def test_a_drafter_learns_the_same_from_either_wearing(trained: Path, worn: Path, tmp_path: Path) -> None:
    job.train(run_of(f"out={tmp_path}/apart", f"target.adapter={worn}", "target.merge=false"))
    assert read_card(tmp_path / "apart").target == read_card(trained / "merged").target
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "apart", trained / "merged"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_the_doctor_and_regeneration_know_the_target_by_its_adapter(trained: Path, worn: Path, tmp_path: Path) -> None:
    words = (f"target.adapter={worn}", "layout=vllm")
    served = export(run_of(f"trained={trained}/merged", *words, f"out={tmp_path}/v"))
    ill, well = (
        [finding.name for finding in chart_of(run_of(*how), served).findings]
        for how in ((), (f"target.adapter={worn}",))
    )
    assert "target" in ill
    assert "target" not in well
    helped = run_of(f"regenerate.drafter={trained}/merged")
    with pytest.raises(ValueError, match=r"merged was trained for tiny with the adapter \S+a and this is tiny without"):
        drafter_of(helped)
