"""The doctor against planted mismatches: a drafter that was taught answers by heart is exported, spoilt, and examined."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.schema import Run
from decode.engine import generate
from decode.opening import open_target
from models.drafter import Budget, Plain
from models.shelf import load_drafter, read_card, write_card
from runs import composed
from train import job
from train.chat import render
from train.data import load_examples, write_rows
from train.doctor import Chart, chart_of, examine
from train.export import export
from train.sources import rows_of

EXACT = [
    "target.dtype=fp32",
    "optim.precision=fp32",
    "target.random.initializer_range=0.3",
    "target.random.num_hidden_layers=5",
]
QUESTIONS = ["How are you?", "b", "Name some colours.", "What is one and one and one?"]
EAGLE3 = [
    "drafter=eagle3",
    "drafter.taps=[1,2,3]",
    "drafter.vocabulary=200",
    "drafter.steps=3",
    "drafter.fc_norm=true",
    "drafter.feedback=after_norm",
]
EAGLE = ["drafter=eagle", "drafter.fc_bias=false", "drafter.vocabulary=null"]
PEAGLE = ["drafter=peagle", "drafter.taps=[1,2,3]", "drafter.vocabulary=200", "drafter.depths=3", "drafter.layers=2"]
MEDUSA = ["drafter=medusa", "drafter.heads=3", "drafter.head=shared", "drafter.vocabulary=200"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with answers of the target, each there twice: once to learn from, and once held out."""
    folder = tmp_path_factory.mktemp("doctor")
    target = open_target(composed(*EXACT).target)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [render(target.tokenizer, question, speak=True) for question in asked]
    answers = generate(target, Plain(), prompts, 25, Budget(nodes=1)).generations
    rows = [
        {"messages": [*question, {"role": "assistant", "content": "", "ids": answer.tokens}]}
        for question, answer in zip(asked, answers, strict=True)
    ]
    write_rows(folder / "answers.jsonl", [*rows, *rows])
    return folder


def run_of(home: Path, *overrides: str) -> Run:
    how = [
        "data.heldout=4",
        "optim.steps=120",
        "optim.lr=1e-2",
        "optim.batch=4",
        "optim.warmup=10",
        "data.features=cached",
    ]
    return composed(
        *EXACT, f"data.path={home}/answers.jsonl", *how, "log.evaluate_every=1000", "log.save_every=1000", *overrides
    )


def taught(home: Path, family: list[str]) -> Path:
    """The taught drafter as Outrider saved it; taught once."""
    trained = home / family[0].split("=")[1]
    if not trained.exists():
        job.train(run_of(home, *family, f"out={trained}"))
    return trained


def exported(home: Path, family: list[str], layout: str) -> Path:
    """The taught drafter as it is served."""
    trained = taught(home, family)
    out = home / f"{trained.name}_{layout}"
    if not out.exists():
        export(run_of(home, *family, f"trained={trained}", f"layout={layout}", f"out={out}"))
    return out


Files = tuple[dict[str, Any], dict[str, Tensor]]


def spoilt(
    home: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, Tensor]], object],
    family: list[str] = EAGLE3,
    layout: str = "vllm",
) -> Chart:
    """What the doctor finds once `change` has been at config and tensors."""
    folder = tmp_path / "ill"
    shutil.copytree(exported(home, family, layout), folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return chart_of(run_of(home), folder)


def names(chart: Chart) -> list[str]:
    return [finding.name for finding in chart.findings]


def counted(home: Path, family: list[str]) -> tuple[list[float], list[float]]:
    """By depth, how often the drafter itself finds what the target said in all texts, and how often it is asked."""
    folder, target = taught(home, family), open_target(run_of(home).target)
    drafter = load_drafter(folder, read_card(folder), target.ends, torch.float32)
    target.tap(drafter.taps)
    losses = []
    for example in load_examples(list(rows_of(run_of(home).data)), target.tokenizer, target.end_tokens, 256, True):
        ids, mask = torch.tensor(example.input_ids), torch.tensor(example.loss_mask).bool()
        losses.append(drafter.training_loss(target.features(ids[None], mask[None], torch.tensor([len(ids)]))))
    return sum(loss.hits for loss in losses).tolist(), sum(loss.seen for loss in losses).tolist()


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        (EAGLE3, "vllm"),
        pytest.param(EAGLE3, "speculators", marks=pytest.mark.slow),
        pytest.param(MEDUSA, "vllm", marks=pytest.mark.slow),
        pytest.param(EAGLE, "vllm", marks=pytest.mark.slow),
        pytest.param(EAGLE, "eagle", marks=pytest.mark.slow),
        pytest.param(PEAGLE, "vllm", marks=pytest.mark.slow),
        pytest.param(PEAGLE, "speculators", marks=pytest.mark.slow),
        (EAGLE3, None),
        pytest.param(MEDUSA, None, marks=pytest.mark.slow),
        pytest.param(EAGLE, None, marks=pytest.mark.slow),
        pytest.param(PEAGLE, None, marks=pytest.mark.slow),
    ],
)
def test_a_sound_drafter_exported_or_not_accepts_what_training_measured(home, family, layout):
    chart = chart_of(run_of(home), exported(home, family, layout) if layout else taught(home, family))
    assert chart.findings == []
    assert chart.recorded[0] > 0.7
    hits, seen = counted(home, family)
    assert chart.seen[: len(seen)] == seen
    for now, count, asked in zip(chart.measured, hits, seen, strict=False):  # EAGLE-1 learns one depth
        assert now * asked == pytest.approx(count, abs=1.01)  # arithmetic in another order may turn one pick


def columns(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Two taps of fc change places."""
    first, second, third = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([second, first, third], dim=1)


def another_head(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The rows of the output matrix belong to other tokens."""
    tensors["lm_head.weight"] = tensors["lm_head.weight"][
        torch.randperm(200, generator=torch.Generator().manual_seed(0))
    ]


def underflowed(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Stored in fp16 after a division that left its small numbers below what fp16 has."""
    tensors["fc.weight"] = ((tensors["fc.weight"].float() * 1e-7).half().float() * 1e7).half()


PLANTED: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], object]] = {
    "taps": lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
    "d2t as identity": lambda config, tensors: tensors["d2t"].zero_(),
    "d2t as positions": lambda config, tensors: tensors["d2t"].add_(torch.arange(200)),
    "d2t missing": lambda config, tensors: [tensors.pop(name) for name in ("d2t", "t2d")],
    "norm_before_residual": lambda config, tensors: config.update(norm_before_residual=True),
    "fc_norm": lambda config, tensors: config.update(fc_norm=False),
    "fc columns": columns,
    "rope": lambda config, tensors: config.update(rope_theta=10.0, rope_parameters=None),
    "embedding": lambda config, tensors: tensors.update(
        {"embed_tokens.weight": torch.randn(257, 64, generator=torch.Generator().manual_seed(1))}
    ),
    "head": another_head,
    "underflow": underflowed,
    "fc": lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[1, 2]),
    "head_dim": lambda config, tensors: config.update(head_dim=8),
    "numbers": lambda config, tensors: tensors["norm.weight"].fill_(torch.nan),
    "tensors": lambda config, tensors: tensors.pop("norm.weight"),
}


QUICK = {
    "taps",
    "d2t as identity",
    "d2t as positions",
    "d2t missing",
    "numbers",
}  # the others are proofs that take a minute


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in PLANTED]
)
def test_a_planted_mismatch_is_named(home, tmp_path, fault):
    assert fault in names(spoilt(home, tmp_path, PLANTED[fault]))


@pytest.mark.slow
def test_a_flipped_feedback_is_named_at_the_depths_that_it_reaches(home, tmp_path):
    chart = spoilt(home, tmp_path, lambda config, tensors: config.update(norm_output=False))
    assert names(chart) == ["norm_output"]


def swapped(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """EAGLE-1's fc reads the state before the embedding."""
    tensors["fc.weight"] = torch.cat([*tensors["fc.weight"].chunk(2, dim=1)][::-1], dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fault", "name"),
    [
        (EAGLE, swapped, "fc columns"),
        (EAGLE, lambda config, tensors: config.update(rope_theta=10.0, rope_parameters=None), "rope"),
        (EAGLE, lambda config, tensors: tensors.pop("layers.0.mlp.up_proj.weight"), "tensors"),
        (PEAGLE, lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]), "taps"),
        (PEAGLE, lambda config, tensors: config.pop("mask_token_id"), "mask token"),
        (PEAGLE, lambda config, tensors: tensors.pop("layers.1.input_layernorm.weight"), "tensors"),
    ],
)
def test_a_planted_mismatch_of_the_other_eagles_is_named(home, tmp_path, family, fault, name):
    assert name in names(spoilt(home, tmp_path, fault, family))


def test_what_the_doctor_cannot_replay_it_says(home, tmp_path):
    card = read_card(taught(home, EAGLE3))
    for change, message in (
        (
            {"family": "models.hydra.Hydra"},
            "the doctor replays models.medusa.Medusa, .*and this is a models.hydra.Hydra",
        ),
        ({"knobs": {**card.knobs, "window": 8}}, "the doctor replays no drafter with window=8; measure it instead"),
        ({"adapter": {"r": 8}}, "it holds an adapter alone; export it"),
    ):
        write_card(replace(card, **change), tmp_path)
        with pytest.raises(ValueError, match=message):
            chart_of(run_of(home), tmp_path)


@pytest.mark.slow
def test_heads_that_stand_one_place_too_early_are_called_shifted_labels(home, tmp_path):
    def shifted(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for part in ("weight", "bias"):
            blocks = [tensors[f"blocks.{head}.layers.0.{part}"] for head in (1, 2, 0)]
            tensors.update({f"blocks.{head}.layers.0.{part}": block for head, block in enumerate(blocks)})

    assert names(spoilt(home, tmp_path, shifted, MEDUSA)) == ["labels"]


def test_a_truncated_shard_is_named(home, tmp_path):
    folder = tmp_path / "ill"
    shutil.copytree(exported(home, EAGLE3, "vllm"), folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    chart = chart_of(run_of(home), folder)
    assert names(chart) == ["files"]
    assert "is damaged" in chart.findings[0].sentence


@pytest.mark.slow
def test_another_template_and_another_target_are_told_apart(home, tmp_path):
    folder = exported(home, EAGLE3, "vllm")
    other = chart_of(run_of(home, "target.random.intermediate_size=96"), folder)
    assert names(other)[0] == "target"
    twin = tmp_path / "twin"
    shutil.copytree(open_target(composed(*EXACT).target).model.config._name_or_path, twin)
    (twin / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert names(chart_of(run_of(home, f"target.name={twin}", "target.random=null"), folder))[0] == "template"


def test_the_command_refuses_an_ill_drafter_with_its_illness(home, tmp_path, capsys):
    folder = exported(home, EAGLE3, "vllm")
    examine(run_of(home, f"trained={folder}"))
    assert "is sound" in capsys.readouterr().out
    with pytest.raises(ValueError, match="name the folder or Hub name"):
        examine(run_of(home))
    with pytest.raises(ValueError, match=r"is ill: files"):
        examine(run_of(home, f"trained={home}"))
