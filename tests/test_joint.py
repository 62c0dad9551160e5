"""A target that learns, with its heads or alone: its loss, what stays, what is saved, and that what is decoded is the new target's."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from conf.schema import Balance, Joint, Run, Teacher
from conftest import stock_model
from decode.arms import arms_of
from decode.engine import generate
from decode.opening import base_folder, open_drafter, open_target
from models.drafter import Budget, Drafter, Plain
from models.hydra import Hydra
from models.medusa import Medusa
from models.shelf import read_card
from models.target import Target
from reference import joint_by_hand
from runs import changed, composed
from train import checkpoint, job
from train.chat import Example
from train.data import write_rows
from train.joint import Moving, Unread
from train.trainee import Trainee

EXACT = ("target.dtype=fp32", "optim.precision=fp32", "target.random.initializer_range=0.3", "drafter.heads=2")
SHORT = (
    "optim.steps=8",
    "optim.warmup=1",
    "optim.batch=2",
    "optim.lr=0.01",
    "log.evaluate_every=4",
    "log.save_every=4",
)
LORA = ("joint=lora", "joint.r=2", "joint.heads_first=0.25", "joint.teacher=data", "joint.weight=0.2")
CONVERSATIONS = [
    [Example(list(range(40, 60)), [False] * 6 + [True] * 5 + [False] * 3 + [True] * 6)],
    [Example([7, 9, 200, 31, 256], [False, True, True, True, True])],
]


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate refuses a second precision in one process."""
    yield
    AcceleratorState._reset_state(True)


def run_of(out: Path, *words: str) -> Run:
    return composed(*EXACT, *SHORT, f"out={out}", *words)


def learning(family: type[Drafter] = Medusa, **how: Any) -> tuple[Trainee, Moving]:
    """Two heads and a target whose LoRA, where it has one, is not nothing."""
    torch.manual_seed(0)
    target = open_target(composed(*EXACT).target, hasten=False)
    drafter = Plain() if family is Plain else family(target.ends, heads=2)
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    moving = Moving(
        target, Joint(**{"r": 2, "heads_first": 0.0, "balance": Balance.constant, "weight": 0.3, **how}), steps=10
    )
    for name, parameter in moving.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return Trainee(drafter, moving=moving), moving


def by_hand(trainee: Trainee, moving: Moving) -> Tensor:
    """The loss of all conversations, from logits that transformers' model makes of each by itself."""
    total, drafter, model = torch.zeros(()), trainee.drafter, moving.target.model
    for (example,) in CONVERSATIONS:
        ids, before = torch.tensor([example.input_ids]), None
        if moving.how.teacher is Teacher.self:
            with torch.no_grad(), moving.without():
                before = model(input_ids=ids, use_cache=False).logits[0]
        hidden = moving.target.body(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = torch.nn.functional.linear(hidden, moving.target.ends.head)
        heads = [drafter.head_logits(k, drafter.blocks[k](hidden)) for k in range(2)]
        total = total + joint_by_hand(
            example.input_ids, example.loss_mask, before, logits, heads, moving.how.weight, 0.8
        )
    return total


@pytest.mark.parametrize(
    "how", [{"teacher": Teacher.self}, {"teacher": Teacher.data, "r": None}], ids=["adapter", "whole"]
)
def test_loss_and_gradients_are_those_of_every_token_by_itself(how: dict[str, Any]) -> None:
    trainee, moving = learning(**how)
    batch = Unread(torch.device("cpu")).read(CONVERSATIONS)
    trained = {name: p for name, p in trainee.named_parameters() if p.requires_grad}
    ours, theirs = trainee(batch).total, by_hand(trainee, moving)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for name, mine, other in zip(
        trained,
        torch.autograd.grad(ours, trained.values()),
        torch.autograd.grad(theirs, trained.values()),
        strict=True,
    ):
        if name.startswith("drafter."):
            other = other / moving.how.weight
        assert float(other.abs().max()) > 0, name
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()), msg=name)
    assert int(trainee.counted(batch.loss_mask, batch.document)) == sum(sum(one.loss_mask) for (one,) in CONVERSATIONS)


def test_packed_conversations_have_the_loss_of_single_ones() -> None:
    trainee, _ = learning()
    single, together = ([[one] for (one,) in CONVERSATIONS], [[one for (one,) in CONVERSATIONS]])
    losses = [trainee(Unread(torch.device("cpu")).read(rows)).total for rows in (single, together)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [Medusa, Hydra])
def test_the_heads_learn_alone_at_first(family: type[Drafter]) -> None:
    trainee, moving = learning(family, heads_first=0.5)
    batch = Unread(torch.device("cpu")).read(CONVERSATIONS)
    for step, moves in ((4, False), (5, True)):
        trainee.at(step)
        trainee.zero_grad()
        trainee(batch).total.backward()
        assert all(p.grad is not None for p in trainee.drafter.parameters())
        assert [p.grad is not None for p in moving.trained()] == [moves] * len(moving.trained())


def test_the_heads_weigh_more_and_more_or_always_the_same() -> None:
    _, moving = learning(heads_first=0.2, balance=Balance.sine)
    weights = []
    for step in (2, 6, 8, 10):
        moving.step = step
        weights.append(moving.weight())
    assert weights == pytest.approx([0, 0.3 * math.sqrt(0.5), 0.3 * math.sin(math.pi * 3 / 8), 0.3])
    moving.how = replace(moving.how, balance=Balance.constant)
    assert moving.weight() == 0.3


def test_groups_give_the_heads_a_rate_of_their_own_and_leave_the_ends_alone() -> None:
    trainee, moving = learning(r=None, teacher=Teacher.data, heads_rate=4.0)
    (one, target), (four, heads) = trainee.groups()
    assert (one, four) == (1.0, 4.0)
    assert {id(p) for p in heads} == {id(p) for p in trainee.drafter.parameters()}
    ends = moving.target.ends
    assert not {id(p) for p in target} & {id(ends.embedding), id(ends.head)}
    names = {name for name, p in moving.target.model.named_parameters() if not p.requires_grad}
    assert names == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs leave: heads with an adapter alone, with the sum, with the whole decoder; and no heads at all."""
    home = tmp_path_factory.mktemp("joint")
    for name in ("thin", "full"):
        job.train(run_of(home / name, *WAYS[name]))
    return home


@pytest.fixture(scope="module")
def total(made: Path) -> None:
    """The sum as well."""
    job.train(run_of(made / "sum", *WAYS["sum"]))


WAYS = {
    "thin": LORA,
    "sum": (*LORA, "joint.merge=true"),
    "full": ("joint=full", "joint.heads_first=0.25"),
}


def opened(made: Path, name: str) -> Run:
    """A run whose target is the one that was made."""
    folder = made / name / "target"
    if name == "thin":
        return run_of(made / name, f"target.adapter={folder}")
    run = changed(run_of(made / name), "target.random", None)
    return changed(run, "target.name", str(folder))


def written(target: Target, who: Drafter) -> list[list[int]]:
    prompts = [[5, 99, 17], [200, 3, 41, 7]]
    target.tap(who.taps)
    return [one.tokens for one in generate(target, who, prompts, 20, Budget(nodes=6, depth=2)).generations]


@pytest.mark.parametrize("name", ["thin", "full", pytest.param("sum", marks=pytest.mark.slow)])
def test_what_is_decoded_is_the_new_targets_text(made: Path, name: str, request: pytest.FixtureRequest) -> None:
    if name == "sum":
        request.getfixturevalue("total")
    run = opened(made, name)
    target = open_target(run.target)
    (arm,) = arms_of(run)
    drafter = open_drafter(arm.folder, arm.card, target)
    assert written(target, drafter) == written(target, Plain())
    assert written(target, Plain()) != written(open_target(run_of(made).target), Plain())


@pytest.mark.slow
def test_adapter_and_sum_are_the_same_target_with_the_same_heads(made: Path, total: None) -> None:
    thin, whole = (load_file(made / name / "model.safetensors") for name in ("thin", "sum"))
    assert all(torch.equal(value, whole[name]) for name, value in thin.items())
    targets = [open_target(opened(made, name).target) for name in ("thin", "sum")]
    ids = torch.tensor([[5, 99, 17, 3]])
    hidden = [one.documents(ids, ids > 0, ids * 0, torch.arange(4)[None]).last_hidden for one in targets]
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-4, atol=1e-4)
    assert sorted(file.name for file in (made / "thin" / "target").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "outrider.json"
    ]  # fmt: skip


def test_the_card_says_how_far_the_target_has_moved(made: Path) -> None:
    run = opened(made, "thin")
    _, _, held = job.conversations(run, quiet=True)
    old = stock_model(base_folder(run.target))
    new = PeftModel.from_pretrained(stock_model(base_folder(run.target)), made / "thin" / "target").eval()
    terms = []
    for example in held:
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            before, now = (model(input_ids=ids).logits[0].double().log_softmax(-1) for model in (old, new))
        for t in range(len(example.input_ids) - 1):
            if example.loss_mask[t + 1]:
                token = example.input_ids[t + 1]
                apart = (before[t].exp() * (before[t] - now[t])).sum()
                terms.append([before[t, token], now[t, token], apart, float(before[t].argmax() == now[t].argmax())])
    first, second, kl, same = torch.tensor(terms).double().mean(0).tolist()
    told = read_card(made / "thin").training["target"]
    assert told["perplexity_before"] == pytest.approx(math.exp(-first), rel=1e-3)
    assert told["perplexity"] == pytest.approx(math.exp(-second), rel=1e-3)
    assert told["kl"] == pytest.approx(kl, rel=1e-2)
    assert told["agreement"] == pytest.approx(same, abs=1e-3)
    assert told["kl"] > 0.01


def test_the_drafter_is_refused_on_the_target_as_it_was(made: Path) -> None:
    with pytest.raises(ValueError, match=r"was trained for tiny with the adapter \S+target and this is tiny without"):
        arms_of(run_of(made / "thin"))
    with pytest.raises(ValueError, match=r"target \(fingerprint .* are others"):
        arms_of(run_of(made / "full"))


def test_a_run_that_was_stopped_goes_on_to_the_same_target_and_heads(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoint.Keeper.save

    def once(*given: Any) -> None:
        save(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.Keeper, "save", once)
    with pytest.raises(KeyboardInterrupt):
        job.train(run_of(tmp_path / "out", *LORA))
    monkeypatch.setattr(checkpoint.Keeper, "save", save)
    with pytest.raises(
        ValueError, match=r"holds an unfinished run of another configuration \(joint: .*weight=0.2.* then"
    ):
        job.train(run_of(tmp_path / "out", *LORA, "joint.weight=0.3"))
    job.train(run_of(tmp_path / "out", *LORA))
    for file in ("model.safetensors", "target/adapter_model.safetensors"):
        ours, theirs = (load_file(folder / file) for folder in (tmp_path / "out", made / "thin"))
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_target_learns_a_domain_without_any_heads(tmp_path: Path) -> None:
    """Then a drafter is trained for it: the way of docs/domain.md."""
    row = {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "tea is served"}]}
    write_rows(tmp_path / "ours.jsonl", [row] * 4)
    alone = composed(
        *EXACT[:3], *SHORT, f"out={tmp_path}/domain", f"data.path={tmp_path}/ours.jsonl",
        "joint=lora", "joint.r=8", "joint.teacher=data", "joint.heads_first=0", "optim.steps=12", "optim.lr=0.03",
    )  # fmt: skip
    alone.drafter = composed(conf="lora_smol").drafter
    job.train(alone)
    card = read_card(tmp_path / "domain")
    assert card.training["target"]["perplexity"] < 2 < card.training["target"]["perplexity_before"]
    assert card.training["best"]["step"] == 12
    words = (f"target.adapter={tmp_path}/domain/target", f"data.path={tmp_path}/ours.jsonl")
    job.train(run_of(tmp_path / "heads", *words))
    target = open_target(run_of(tmp_path, *words).target)
    prompt = target.tokenizer("user:b<|end|>assistant:").input_ids
    drafter = open_drafter(tmp_path / "heads", read_card(tmp_path / "heads"), target)
    for who in (Plain(), drafter):
        (text,) = generate(target, who, [prompt], 20, Budget(nodes=6, depth=2)).generations
        assert target.tokenizer.decode(text.tokens) == "tea is served<|end|>"


REFUSED = {
    "another family": (("drafter=eagle3", "~drafter.heads"), r"Eagle3 reads a frozen target; joint= trains Medusa and Hydra heads"),
    "cached features": (("data.features=cached",), r"features of a target that learns change with every step; set data.features=online"),
    "an engine": (("engine=fsdp2",), r"a target that learns is trained by one process; start one, with engine=single"),
    "an adapter on the drafter": (("peft=lora", "init_from={made}/thin"), r"was trained for tiny with|leave peft out"),
    "a quantized target": (("target.quantization=4bit",), r"is loaded as it is, on one device; leave target.quantization and target.device_map out"),
    "no rank": (("joint.r=0",), r"joint.r=0 joint.alpha=16.0: r is at least 1"),
    "no rate": (("joint.heads_rate=0",), r"the weight is not below 0 and the rate above 0"),
    "no step left": (("joint.heads_first=1",), r"joint.heads_first=1.0: it is the share of optim.steps=8 before the target moves"),
    "no teacher": (("joint.r=null", "joint.teacher=self"), r"is the target with its adapter off; set joint.r, or joint.teacher=data"),
    "half a precision": (("joint.r=null", "target.dtype=bf16"), r"trains the target's own weights, in full precision; set target.dtype=fp32"),
    "an adapter on an adapter": (("target.adapter={made}/thin/target",), r"learns with that merged, and is saved whole; set target.merge=true joint.merge=true"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_learn_is_refused_before_weights_load(
    words: tuple[str, ...], sentence: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "open_target", None)
    monkeypatch.setenv("WORLD_SIZE", "2" if "engine=fsdp2" in words else "1")
    given = [word.format(made=made) for word in words if not word.startswith("~")]
    exact = EXACT[:3] if "~drafter.heads" in words else EXACT
    with pytest.raises(ValueError, match=sentence) as refusal:
        job.train(composed(*exact, *SHORT, *LORA, f"out={tmp_path}/out", *given))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_targets_that_match_nothing_are_told_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"joint.targets: lm_head is no linear layer of the target's decoder; it has "):
        job.train(run_of(tmp_path / "out", *LORA, "joint.targets=[q_proj,lm_head]"))
