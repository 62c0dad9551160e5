"""A trained drafter goes on to a domain: whole or with an adapter, and is refused where it does not belong."""

import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file

from conf.schema import Run
from decode.engine import generate
from decode.opening import open_drafter, open_target
from models.adapter import linear_layers
from models.drafter import Budget, Drafter
from models.shelf import load_drafter, read_card
from models.target import Target
from runs import composed
from train import job
from train.adapt import share
from train.chat import render

EXACT = ("target.dtype=fp32", "optim.precision=fp32", "target.random.initializer_range=0.3")
SHORT = ("optim.steps=3", "optim.warmup=1", "optim.batch=2", "log.evaluate_every=99", "log.save_every=99")
MADE = {
    "medusa": ("drafter=medusa", "drafter.heads=2", "drafter.vocabulary=40"),
    "eagle3": ("drafter=eagle3", "drafter.steps=2", "drafter.vocabulary=40"),
}


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate refuses a second precision in one process."""
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def target() -> Target:
    return open_target(composed(*EXACT).target)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained drafters, one of each family."""
    made = tmp_path_factory.mktemp("adapt")
    for family in MADE:
        job.train(run_of(family, made / family))
    return made


def run_of(family: str, out: Path, *overrides: str) -> Run:
    return composed(*EXACT, *MADE[family], *SHORT, f"out={out}", *overrides)


def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on drafters are saved in full precision."""
    save = job.save_drafter
    monkeypatch.setattr(job, "save_drafter", lambda drafter, card, out, dtype: save(drafter, card, out, torch.float32))


def opened(folder: Path, target: Target) -> Drafter:
    return load_drafter(folder, read_card(folder), target.ends, torch.float32)


def accepted(folder: Path, target: Target) -> list[tuple[list[int], list[int]]]:
    """What is decoded with the drafter in `folder`, and how much of each guess was accepted."""
    drafter = open_drafter(folder, read_card(folder), target)
    prompts = [render(target.tokenizer, [{"role": "user", "content": text}], True) for text in ("How are you?", "b")]
    target.tap(drafter.taps)
    done = generate(target, drafter, prompts, 24, Budget(nodes=8, depth=2, branch=3)).generations
    return [(one.tokens, one.accepted) for one in done]


@pytest.mark.parametrize("family", MADE)
def test_a_run_of_no_length_keeps_the_drafter_it_goes_on_from(family: str, home: Path, tmp_path: Path) -> None:
    how = ("drafter.vocabulary=30", "optim.steps=0")  # a smaller one than it has
    job.train(run_of(family, tmp_path / "out", f"init_from={home / family}", *how))
    assert read_card(tmp_path / "out").knobs["vocabulary"] == 40
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", home / family))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert read_card(tmp_path / "out").training["init_from"] == str(home / family)


@pytest.mark.parametrize("family", MADE)
def test_a_larger_draft_vocabulary_keeps_what_was_learned(
    family: str, home: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ("drafter.vocabulary=60", "optim.steps=0", f"init_from={home / family}")
    job.train(run_of(family, tmp_path / "out", *how))
    assert "its draft vocabulary grows from 40 to 60 tokens and covers " in capsys.readouterr().out
    before, after = opened(home / family, target), opened(tmp_path / "out", target)
    old, new = set(before.vocabulary.ids.tolist()), after.vocabulary.ids.tolist()
    assert old < set(new)
    assert len(new) == 60
    place = after.vocabulary.to_draft(before.vocabulary.ids)
    fresh = [row for row in range(60) if row not in place.tolist()]
    head = "lm_heads.1.weight" if family == "medusa" else "lm_head.weight"
    ours, theirs = after.state_dict(), before.state_dict()
    assert torch.equal(ours[head][place], theirs[head])
    wanted = target.ends.head[[new[row] for row in fresh]].bfloat16().float()
    assert torch.equal(ours[head][fresh], wanted)
    same = [name for name in ours if name != head and "lm_head" not in name and "vocabulary" not in name]
    assert all(torch.equal(ours[name], theirs[name]) for name in same)


@pytest.mark.parametrize("family", ["medusa", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_an_adapter_alone_decodes_as_the_merged_drafter(
    family: str,
    home: Path,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exactly(monkeypatch)
    how = (f"init_from={home / family}", "peft=lora", "peft.r=2", "optim.lr=0.05")
    job.train(run_of(family, tmp_path / "thin", *how))
    assert "an adapter of" in capsys.readouterr().out
    job.train(run_of(family, tmp_path / "sum", "peft.merge=true", *how))
    assert sorted(file.name for file in (tmp_path / "thin").iterdir()) == ["adapter.safetensors", "drafter.yaml"]
    ours, theirs = (opened(tmp_path / name, target).state_dict() for name in ("thin", "sum"))
    first = opened(home / family, target).state_dict()
    assert any(not torch.equal(value, first[name]) for name, value in theirs.items())
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-7)
    assert accepted(tmp_path / "thin", target) == accepted(tmp_path / "sum", target)
    frozen = [name for name in first if "norm" in name or name.startswith("vocabulary")]
    assert all(torch.equal(ours[name], first[name]) for name in frozen)


def test_an_adapter_is_what_peft_makes_of_it(home: Path, target: Target, tmp_path: Path) -> None:
    how = ("peft=lora", "peft.r=3", "peft.alpha=5", "peft.targets=[up_proj,fc]", f"init_from={home}/eagle3")
    job.train(run_of("eagle3", tmp_path / "out", *how, "optim.lr=0.05"))
    tensors = load_file(tmp_path / "out" / "adapter.safetensors")
    assert {name.rpartition(".")[0] for name in tensors} == {"fc", "midlayer.mlp.up_proj"}
    peer = opened(home / "eagle3", target)
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=5, target_modules=["up_proj", "fc"]), peer)
    for name in ("fc", "midlayer.mlp.up_proj"):
        layer = peer.get_submodule(name)
        layer.lora_A.default.weight.data.copy_(tensors[f"{name}.A"])
        layer.lora_B.default.weight.data.copy_(tensors[f"{name}.B"])
    ours = opened(tmp_path / "out", target)
    for states, layer in ((torch.randn(5, 192), "fc"), (torch.randn(5, 64), "midlayer.mlp.up_proj")):
        torch.testing.assert_close(
            ours.get_submodule(layer)(states), peer.get_submodule(layer)(states), rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
def test_one_adapter_stands_on_another(home: Path, target: Target, tmp_path: Path) -> None:
    lora = ("peft=lora", "optim.lr=0.05")
    job.train(run_of("medusa", tmp_path / "first", *lora, f"init_from={home}/medusa"))
    job.train(run_of("medusa", tmp_path / "second", *lora, f"init_from={tmp_path}/first", "seed=1"))
    weights = [
        opened(folder, target).state_dict() for folder in (home / "medusa", tmp_path / "first", tmp_path / "second")
    ]
    name = "blocks.0.0.linear.weight"
    assert not torch.equal(weights[0][name], weights[1][name])
    tensors = load_file(tmp_path / "second" / "adapter.safetensors")
    step = 2.0 * tensors["blocks.0.0.linear.B"].float() @ tensors["blocks.0.0.linear.A"].float()
    torch.testing.assert_close(weights[2][name], weights[1][name] + step)


@pytest.mark.slow
def test_a_run_that_was_stopped_before_it_saved_its_adapter_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ("peft=lora", f"init_from={home}/medusa", "optim.steps=4")
    job.train(run_of("medusa", tmp_path / "whole", *how))
    half = job.save_drafter

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "save_drafter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.train(run_of("medusa", tmp_path / "killed", *how))
    monkeypatch.setattr(job, "save_drafter", half)
    job.train(run_of("medusa", tmp_path / "killed", *how))
    ours, theirs = (load_file(tmp_path / name / "adapter.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


REFUSED = {
    "another family": (("init_from={home}/eagle3",), r"is a models\.eagle3\.Eagle3 and this run trains a models\.medusa\.Medusa; choose the conf"),
    "other knobs": (("init_from={home}/medusa", "drafter.heads=3"), r"was made otherwise: heads is 2 there and 3 here; set drafter\.heads=2"),
    "the whole vocabulary": (("init_from={home}/medusa", "drafter.vocabulary=null"), r"vocabulary is 40 there and None here; set drafter\.vocabulary=40"),
    "another target": (("init_from={home}/medusa", "target.random.initializer_range=0.2"), r"its tokenizer or its template are others"),
    "another width": (("init_from={home}/medusa", "target.random.hidden_size=32"), r"\(width 64\); tiny has width 32"),
    "no drafter": (("init_from=gone",), r"there is no drafter folder 'gone'"),
    "an adapter on nothing": (("peft=lora",), r"an adapter needs a trained drafter to stand on; name it with init_from="),
}  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_gone_on_from_is_refused_before_weights_load(
    words: tuple[str, ...], sentence: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "open_target", None)
    run = run_of("medusa", tmp_path / "out", *(word.format(home=home) for word in words))
    with pytest.raises(ValueError, match=sentence) as refusal:
        job.train(run)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_targets_that_match_nothing_are_told_what_there_is(home: Path, target: Target, tmp_path: Path) -> None:
    how = ("peft=lora", f"init_from={home}/medusa", "peft.targets=[linear,q_proj]")
    with pytest.raises(
        ValueError, match=r"peft.targets: q_proj is no linear layer of this drafter; it has blocks.0.0.linear, "
    ):
        job.train(run_of("medusa", tmp_path / "out", *how))
    assert linear_layers(opened(home / "medusa", target), ["0.linear"]) == ["blocks.0.0.linear", "blocks.1.0.linear"]


def test_an_adapter_is_refused_on_another_drafter_than_its_own(home: Path, target: Target, tmp_path: Path) -> None:
    shutil.copytree(home / "medusa", tmp_path / "base")
    job.train(run_of("medusa", tmp_path / "out", "peft=lora", f"init_from={tmp_path}/base"))
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    save_file(
        {**tensors, "blocks.0.0.linear.bias": tensors["blocks.0.0.linear.bias"] + 1},
        tmp_path / "base" / "model.safetensors",
    )
    with pytest.raises(
        ValueError, match=r"out is an adapter on another drafter than the one in .*base, whose weights have changed"
    ):
        opened(tmp_path / "out", target)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ValueError, match=r"out is an adapter on the drafter .*base: there is no drafter folder"):
        opened(tmp_path / "out", target)


@pytest.mark.slow
def test_a_drafter_that_is_only_counted_is_counted_anew(tmp_path: Path) -> None:
    how = composed(*EXACT, *SHORT, "drafter=bigram", "optim.steps=0", f"out={tmp_path}/first")
    job.train(how)
    again = composed(
        *EXACT, *SHORT, "drafter=bigram", "optim.steps=0", f"out={tmp_path}/out", f"init_from={tmp_path}/first"
    )
    with pytest.raises(ValueError, match="has no weights to adapt: it is only counted"):
        job.train(again)


def test_the_share_of_a_vocabulary_is_of_what_is_said(home: Path, target: Target) -> None:
    vocabulary = opened(home / "medusa", target).vocabulary
    counts = torch.ones(target.identity.vocabulary, dtype=torch.long)
    assert share(vocabulary, counts) == pytest.approx(40 / len(counts))
    counts[vocabulary.ids] = 3
    assert share(vocabulary, counts) == pytest.approx(120 / (120 + len(counts) - 40))
