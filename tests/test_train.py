"""A training run: bit for bit the same however it got there, and complaints before anything is spent."""

import json
import math
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from conf.schema import Optim, Run
from decode.opening import open_target
from models.ends import Ends
from models.medusa import Medusa
from models.search import best_tree
from models.shelf import read_card
from models.source import byte_tokenizer
from models.tree import ordered_paths
from runs import changed, composed, forked, said, together
from train import checkpoint, job
from train.chat import Example
from train.data import write_rows
from train.features import Live, Source
from train.loop import count
from train.optim import rate
from train.sources import conversations_of
from train.trainee import Trainee
from train.trees import NODES, WIDTH

STEPS = 40
EXACT = ("target.dtype=fp32", "optim.precision=fp32")
MINE = f"""# @package _global_
defaults:
  - /target: tiny
  - /drafter: medusa
  - /data: tiny
  - _self_
target: {{dtype: fp32}}
drafter: {{heads: 2}}
data: {{heldout: 2}}
optim: {{lr: 3.0e-3, steps: {STEPS}, batch: 3, warmup: 4, precision: fp32}}
log: {{evaluate_every: 1, save_every: 5}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file stand, and a user's own conf."""
    made = tmp_path_factory.mktemp("train")
    (made / "own" / "conf").mkdir(parents=True)
    (made / "own" / "conf" / "mine.yaml").write_text(MINE)
    return made


def mine(folder: Path, out: str, *overrides: str) -> Run:
    return composed(f"hydra.searchpath=[file://{folder}/own]", f"out={folder / out}", *overrides, conf="mine")


@pytest.fixture(scope="module")
def killed(folder: Path) -> Path:
    """The folder of a process that was killed after its first checkpoint."""
    process = forked("train", "--config-dir", "own", "conf=mine", log=folder / "killed.log")
    out = folder / "outputs" / "mine"
    while checkpoint.found(out) is None and process.is_alive():
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, (folder / "killed.log").read_text()
    return out


def left(out: Path) -> dict[str, Tensor]:
    """Weights and moments of the last checkpoint in `out`."""
    folder = checkpoint.found(out)
    assert folder is not None
    return load_file(folder / checkpoint.TENSORS)


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\d+\.\d{3})", text)


def test_a_killed_and_resumed_run_equals_the_unbroken_one(folder, killed, monkeypatch, capsys):
    assert not (killed / "drafter.yaml").exists()
    done = json.loads((checkpoint.found(killed) / "state.json").read_text())["step"]
    assert 0 < done < STEPS
    resumed, whole = folder / "resumed", folder / "whole"
    shutil.copytree(killed, resumed)
    (resumed / "checkpoints" / ".part").mkdir(exist_ok=True)
    (resumed / "checkpoints" / ".part" / "state.json").write_text("{half a")
    job.train(mine(folder, "whole"))
    assert [file.name for file in sorted(whole.iterdir())] == ["drafter.yaml", "model.safetensors"]
    capsys.readouterr()
    job.train(mine(folder, "resumed"))
    evaluated = [int(step) for step in re.findall(r"step (\d+):", capsys.readouterr().out)]
    assert evaluated == list(range(done + 1, STEPS + 1))  # it went on, and did not begin again
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert read_card(resumed).acceptance == read_card(whole).acceptance
    assert [file.name for file in sorted(resumed.iterdir())] == ["drafter.yaml", "model.safetensors"]


def test_an_unfinished_run_is_not_continued_as_another(folder, killed):
    with pytest.raises(ValueError, match="holds an unfinished run of another configuration") as refusal:
        job.train(mine(folder, killed, "optim.lr=0.1", "seed=5", "drafter.heads=3", "log.save_every=7"))
    assert "(drafter.heads: 2 then, 3 now; optim.lr: 0.003 then, 0.1 now; seed: 0 then, 5 now)" in str(refusal.value)
    assert checkpoint.found(killed) is not None


def test_a_setting_that_an_older_run_did_not_know_is_null_there(tmp_path):
    kept = tmp_path / checkpoint.HOME / "step_3"
    kept.mkdir(parents=True)
    (kept / checkpoint.REST).write_text(json.dumps({"config": {"seed": "0"}}))
    checkpoint.require_same(tmp_path, {"seed": "0", "optim.new": "None"})
    with pytest.raises(ValueError, match=r"another configuration \(optim\.new: None then, 3 now\)"):
        checkpoint.require_same(tmp_path, {"seed": "0", "optim.new": "3"})


def test_a_finished_run_is_kept_unless_told_to_overwrite_it(folder, killed, tmp_path):
    shutil.copytree(killed, tmp_path / "out")
    short = ("optim.steps=2", "optim.warmup=1", "overwrite=true")
    job.train(mine(folder, tmp_path / "out", *short, "seed=1"))  # overwrites an unfinished one
    finished = (tmp_path / "out" / "model.safetensors").read_bytes()
    job.train(mine(folder, tmp_path / "fresh", *short, "seed=1"))
    assert (tmp_path / "fresh" / "model.safetensors").read_bytes() == finished
    with pytest.raises(ValueError, match="holds a finished drafter; choose out=, or overwrite=true"):
        job.train(mine(folder, tmp_path / "out", *short[:2], "seed=2"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == finished
    job.train(mine(folder, tmp_path / "out", *short, "seed=2", "optim.lr=0.1"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != finished


def test_the_card_says_what_was_trained(folder, killed):
    out = folder / "carded"
    job.train(mine(folder, out.name, "optim.steps=2", "optim.warmup=1", "decode.nodes=6"))
    card = read_card(out)
    assert card.family == "models.medusa.Medusa"
    assert card.knobs["heads"] == 2
    assert not any(knob.startswith("_") for knob in card.knobs)
    assert (card.target["name"], card.target["width"], card.target["vocabulary"]) == ("tiny", 64, 257)
    assert (card.training["conf"], card.training["conversations"], card.training["optim"]["steps"]) == ("mine", 8, 2)
    assert sorted(map(list, ordered_paths(card.tree))) == sorted(card.tree)
    assert 0 < len(card.tree) < NODES
    assert all(len(values) == 2 for values in card.acceptance.values())
    assert card.acceptance["positions"] > [0, 0]


# Four conversations are taught, so that every step sees all of them, whoever reads which; with this seed, epochs begin
# with different ones.
TALKS = [("a?", "The first answer is rather long."), ("bc", "xyz"), ("defg", "Short one."), ("h", "y")]
TOGETHER = [
    *EXACT, "seed=9", "data.heldout=1", "optim.steps=3", "optim.warmup=1", "optim.lr=1e-4", "optim.clip=1e9", "drafter.heads=2",
    "log.evaluate_every=100",
]  # fmt: skip


@pytest.fixture(scope="module")
def talks(folder: Path) -> Path:
    rows = []
    for question, answer in [*TALKS, ("held", "out and apart")]:
        ids = {"ids": [answer.encode()[0]]} if len(answer) == 1 else {}
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **ids}]
        rows.append({"messages": messages})
    write_rows(folder / "talks.jsonl", rows)
    return folder / "talks.jsonl"


def kept(
    out: Path, talks: Path, capsys: pytest.CaptureFixture[str], *overrides: str
) -> tuple[dict[str, Tensor], list[str]]:
    """The last checkpoint of a run, which stays, and the last loss that it showed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "forget", lambda out: None)
        capsys.readouterr()
        job.train(composed(f"out={out}", f"data.path={talks}", *TOGETHER, *overrides))
    return left(out), losses(capsys.readouterr().out)


@pytest.fixture
def one_batch(folder, talks, capsys) -> tuple[dict[str, Tensor], list[str]]:
    """The run to which others are compared: one process, four conversations in one batch."""
    if (folder / "one" / "shown").exists():
        return left(folder / "one"), (folder / "one" / "shown").read_text().split()
    state, shown = kept(folder / "one", talks, capsys, "optim.batch=4")
    (folder / "one" / "shown").write_text(" ".join(shown))
    return state, shown


def same(state: dict[str, Tensor], other: dict[str, Tensor], within: float) -> None:
    """Weights agree absolutely, and moments relatively: they scale with the gradient, which AdamW's steps do not."""
    assert state.keys() == other.keys()
    for name, value in state.items():
        scale = 1.0 if name.startswith("model") else value.double().abs().max().item() or 1.0
        apart = (value.double() - other[name].double()).abs().max().item() / scale
        assert apart <= within, (name, apart)


def test_micro_batches_add_up_to_the_batch(folder, talks, one_batch, capsys):
    state, shown = kept(folder / "two", talks, capsys, "optim.batch=2", "optim.accumulate=2")
    assert shown == one_batch[1] != []
    same(one_batch[0], state, 1e-5)


def test_features_from_the_disk_teach_what_features_on_the_fly_teach(folder, talks, one_batch, capsys):
    state, shown = kept(folder / "cached", talks, capsys, "optim.batch=4", "data.features=cached")
    assert shown == one_batch[1]
    same(one_batch[0], state, 1e-6)


def test_packed_rows_teach_what_single_ones_teach(folder, talks, one_batch, capsys):
    for features in ("online", "cached"):
        words = ("optim.batch=4", "data.packing=100", "data.longest=100", f"data.features={features}")
        state, shown = kept(folder / f"packed-{features}", talks, capsys, *words)
        assert shown == one_batch[1]
        same(one_batch[0], state, 1e-5)


def test_two_ranks_add_up_to_one_process(folder, talks, one_batch):
    """With the environment that torchrun gives its workers."""
    words = ["out=ranks", f"data.path={talks}", *TOGETHER, "optim.batch=2"]
    first, second = together(2, "runs", *words, folder=folder, name="ranks")
    assert losses(first) == one_batch[1]
    assert losses(second) == []  # the second rank is silent
    same(one_batch[0], left(folder / "ranks"), 1e-5)
    assert sorted(file.name for file in (folder / "ranks").iterdir()) == [
        "checkpoints",
        "drafter.yaml",
        "model.safetensors",
    ]
    assert read_card(folder / "ranks").acceptance == read_card(folder / "one").acceptance


@pytest.mark.slow
def test_torchrun_on_two_ranks_equals_one_process(folder, talks, one_batch):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "runs", "out=torchrun"]
    code, out, errors = said(*words, f"data.path={talks}", *TOGETHER, "optim.batch=2", cwd=folder)
    assert code == 0, errors
    assert losses(out) == one_batch[1]
    same(one_batch[0], left(folder / "torchrun"), 1e-5)


def test_a_share_of_a_step_that_asks_nothing_counts_nothing():
    """One token that the target said is no question to any head; and a clamp before ranks add up would count one."""
    examples = [Example([5, 6, 7], [False, False, True])] * 2 + [Example([5] * 9, [True] * 9)] * 2
    source = Source(examples, Live(None), size=2, seed=0)
    trainee = Trainee(Medusa(Ends(torch.ones(9, 4), torch.ones(9, 4), None, LlamaConfig()), heads=2))
    assert [int(count(trainee, source, [piece])) for piece in ([0, 1], [2, 3], [1, 2])] == [0, 14, 7]
    assert int(count(trainee, source, [[0, 1], [2, 3]])) == 14


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("head", ["own", "shared"])
def test_a_target_in_bf16_is_trained_for_to_the_end(tmp_path, precision, head):
    knobs = [
        f"drafter.head={head}",
        "drafter.vocabulary=100",
        "drafter.loss=kl",
        "optim.steps=1",
        "optim.warmup=0",
    ]
    job.train(composed(f"out={tmp_path}", "target.dtype=bf16", f"optim.precision={precision}", *knobs))
    stored = load_file(tmp_path / "model.safetensors")
    assert all(value.isfinite().all() for value in stored.values())
    assert any(name.startswith("lm_heads") for name in stored) == (head == "own")


def by_hand(rows: Path) -> list[tuple[list[int], int]]:
    """Token ids of conversations of two messages, and where the answer begins."""
    tokenizer, made = byte_tokenizer(), []
    for row in conversations_of(rows):
        question, said = row["messages"]
        before = tokenizer.encode(f"user:{question['content']}<|end|>assistant:")
        made.append((before + said.get("ids", tokenizer.encode(said["content"] + "<|end|>")), len(before)))
    return made


def test_the_draft_vocabulary_is_learned_from_what_the_target_says(talks, tmp_path):
    job.train(composed(f"out={tmp_path}", f"data.path={talks}", *TOGETHER, "optim.batch=4", "drafter.vocabulary=9"))
    offsets = load_file(tmp_path / "model.safetensors")["vocabulary.d2t"].tolist()
    said = Counter(token for ids, start in by_hand(talks)[:-1] for token in ids[start:])
    assert [place + offset for place, offset in enumerate(offsets)] == sorted(
        sorted(said, key=lambda token: (-said[token], token))[:9]
    )


def test_fewer_conversations_are_taken_evenly_over_the_file(talks, tmp_path):
    job.train(composed(f"out={tmp_path}", f"data.path={talks}", *TOGETHER, "optim.batch=2", "data.conversations=2"))
    taught = [by_hand(talks)[at] for at in (0, 2)]
    training = read_card(tmp_path).training
    assert (training["conversations"], training["tokens"]) == (2, sum(len(ids) for ids, _ in taught))
    assert training["answer_tokens"] == sum(len(ids) - start for ids, start in taught)


def test_acceptance_and_tree_are_those_of_the_conversations_held_out(talks, tmp_path, capsys):
    """Each counted position by position, from the weights that the checkpoint holds."""
    held = ("data.heldout=3", "optim.batch=2", "drafter.heads=2", "decode.nodes=5")
    state, _ = kept(tmp_path, talks, capsys, *held)
    target = open_target(composed(*EXACT).target)
    drafter = Medusa(target.ends, heads=2)
    drafter.load_state_dict(
        {name.removeprefix("model.drafter."): value for name, value in state.items() if name.startswith("model.")}
    )
    seen, hits, shared = [0, 0], [0, 0], [0.0, 0.0]
    ranks: dict[tuple[int, int], list[int]] = {}
    for talk, (ids, start) in enumerate(by_hand(talks)[-3:]):
        hidden = target.body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        logits = target.logits(hidden)
        for k in (1, 2):
            for at in range(start - 1, len(ids) - k - 1):
                draft = drafter.head_logits(k - 1, drafter.blocks[k - 1](hidden[at]))
                seen[k - 1] += 1
                hits[k - 1] += int(draft.argmax()) == ids[at + k + 1]
                shared[k - 1] += torch.minimum(draft.softmax(0), logits[at + k].softmax(0)).sum().item()
                right = (draft.topk(WIDTH).indices == ids[at + k + 1]).nonzero().flatten().tolist()
                ranks.setdefault((talk, at), [-1, -1])[k - 1] = right[0] if right else -1
    turns = [torch.tensor([found for (talk, _), found in ranks.items() if talk == one]) for one in range(3)]
    card = read_card(tmp_path)
    assert card.acceptance["positions"] == seen
    assert card.acceptance["greedy"] == pytest.approx([hit / n for hit, n in zip(hits, seen, strict=True)], abs=1e-4)
    assert card.acceptance["sampled"] == pytest.approx(
        [mass / n for mass, n in zip(shared, seen, strict=True)], abs=2e-4
    )
    assert card.tree == [list(path) for path in best_tree(turns, NODES)]


def test_the_gradient_is_clipped_as_a_whole(talks, tmp_path, capsys):
    state, _ = kept(tmp_path, talks, capsys, "optim.batch=4", "optim.steps=1", "optim.warmup=0", "optim.clip=0.01")
    moments = [value for name, value in state.items() if name.endswith(".exp_avg")]
    norm = math.sqrt(sum(float(moment.square().sum()) for moment in moments))
    assert norm == pytest.approx((1 - 0.9) * 0.01, rel=1e-3)


REFUSED = [
    ("optim.lr", 0.0, "optim.lr=0.0 teaches nothing"),
    ("optim.lr", math.nan, "optim.lr=nan teaches nothing"),
    ("optim.lr", math.inf, "optim.lr=inf teaches nothing"),
    ("optim.steps", 4, "optim.steps=4 end within the warm-up of 4 steps"),
    ("optim.batch", 0, "optim.batch=0"),
    ("optim.accumulate", 0, "optim.accumulate=0"),
    ("optim.clip", 0.0, "optim.clip=0.0"),
    ("optim.precision", "fp7", "fp7 is unknown"),
    ("target.dtype", "fp7", "dtype=fp7 is unknown"),
    ("log.save_every", 0, "log.evaluate_every and log.save_every count steps"),
    ("log.evaluate_every", 0, "log.evaluate_every and log.save_every count steps"),
    ("data.path", "gone.jsonl", "there is no data file gone.jsonl; check data.path"),
    ("data.heldout", 10, "data.heldout=10 of 10 conversations leaves none to train on"),
    ("data.conversations", 0, "data.conversations=0 leaves nothing to train on"),
    ("data.heldout", 0, "data.heldout=0 of 10 conversations leaves none to evaluate with"),
    ("data.longest", 3, "within data.longest=3 tokens"),
    ("drafter.headz", 3, "models.medusa.Medusa has no knob headz; it has heads, layers"),
    (
        "drafter",
        {"_target_": "models.ngram.Ngram"},
        "models.ngram.Ngram needs no training; measure it: python decode/run.py",
    ),
    (
        "drafter",
        {"_target_": "models.table.Table"},
        "models.table.Table has no weights to train: it is only counted. Set optim.steps=0",
    ),
    ("drafter._target_", "os.system", "os.system is no drafter family"),
    ("drafter", {}, "no drafter is chosen"),
    ("drafter.head", "both", "head=both"),
    ("drafter.vocabulary", 999, "a draft vocabulary of 999 is no part of the target's 257 tokens"),
]


@pytest.mark.parametrize(
    ("setting", "value", "message"), REFUSED, ids=[f"{name}={value}" for name, value, _ in REFUSED]
)
def test_a_bad_setting_ends_in_one_sentence(setting, value, message, tmp_path):
    run = composed()
    run.out = str(tmp_path / "out")
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        job.train(changed(run, setting, value))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out" / "drafter.yaml").exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match=r"out cannot be written to \(File exists\); choose another folder with out="):
        job.train(composed(f"out={tmp_path / 'out'}", "overwrite=true"))
    assert (tmp_path / "out").read_text() == "mine"


def test_what_is_to_be_overwritten_stays_until_the_new_run_begins(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "drafter.yaml").write_text("mine")
    with pytest.raises(ValueError, match="leaves none to train on"):
        job.train(composed(f"out={tmp_path / 'out'}", "overwrite=true", "data.heldout=9999"))
    assert (tmp_path / "out" / "drafter.yaml").read_text() == "mine"


def test_taps_that_the_target_does_not_have_are_refused(llama):
    with pytest.raises(ValueError, match=r"taps \[1, 99\] do not fit llama: it has hidden states 0 to 3"):
        llama.target.tap((1, 99))


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step \d; lower optim\.lr"):
        job.train(composed(f"out={tmp_path}", *EXACT, "optim.lr=1e30", "optim.steps=9", "optim.warmup=1"))
    assert not (tmp_path / "drafter.yaml").exists()


def test_the_rate_rises_in_a_line_and_falls_as_half_a_cosine():
    optim = Optim(lr=2.0, steps=14, warmup=4)
    assert [rate(optim, step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    falling = [2.0 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert [rate(optim, step) for step in range(4, 14)] == pytest.approx(falling)


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_writes_under_the_run_or_nothing(tmp_path, mode, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job.train(composed("out=out", *EXACT, "optim.steps=2", "optim.warmup=1", f"log.wandb={mode}"))
    written = list(tmp_path.rglob("*.wandb"))
    assert len(written) == (mode == "offline")
    assert all(file.is_relative_to(tmp_path / "out" / "wandb") and file.stat().st_size for file in written)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
