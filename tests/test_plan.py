"""What a run is said to take: on paper for what no test machine can hold, and against memory that was measured."""

import re
import resource
from pathlib import Path

import pytest
import torch

from conf import command
from conf.schema import Kind
from decode.opening import target_folder
from runs import composed, forked
from train import job
from train.plan import Machine, Sizes, parts, verdict

GB = 1e9
LLAMA_70B = (
    "target.random={model_type: llama, vocab_size: 128256, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, "
    "num_attention_heads: 64, num_key_value_heads: 8, max_position_embeddings: 8192}"
)
PAPER = [LLAMA_70B, "target.dtype=bf16", "data.longest=2048", "optim.batch=1", "machine=8x80", "plan=true"]


def told(capsys, *words: str, conf: str = "tiny") -> str:
    capsys.readouterr()
    job.train(composed(*words, conf=conf))
    return " ".join(capsys.readouterr().out.split())


def test_a_70b_target_on_eight_gpus_is_planned_on_paper(capsys, monkeypatch):
    """Nothing of it is made: 70.6 billion parameters would not fit here. Medusa's heads: 4 x (8192^2 + 8192 + 32000 x 8192)."""
    monkeypatch.setattr(job, "open_target", lambda conf: pytest.fail("the weights were loaded"))
    heads = 4 * (8192 * 8192 + 8192 + 32000 * 8192)
    words = [*PAPER, "drafter.vocabulary=32000"]
    text = told(capsys, *words)
    assert f"{heads:,} parameters are trained, 70,553,706,496 of tiny are frozen" in text
    assert re.search(r"target 141\.11 ", text)
    assert re.search(rf"moments {8 * heads / GB:.2f} ", text)
    assert "no engine fits: each rank holds the target, 141.1 GB of 80.0" in text
    assert "not measured" in text
    cached = told(capsys, *words, "data.features=cached", "data.conversations=60000", "data.heldout=0")
    assert re.search(rf"target {2 * 2 * 128256 * 8192 / GB:.2f} ", cached)
    assert "engine=ddp fits" in cached
    assert f"60,000 conversations and 0 held out take up to {60000 * 2048 * 8192 * 2 / GB:.2f} GB" in cached
    assert "40 steps of up to 16,384 tokens" in cached


def test_the_engine_that_fits_is_named(capsys):
    """Whole output matrices for 128,256 tokens: 4.5 billion parameters, 71 GB of weights, gradients and moments alone."""
    text = told(capsys, *PAPER, "data.features=cached", "data.heldout=0")
    assert "engine=ddp does not fit; engine=zero1 does" in text
    assert "engine=zero2 fits" in told(capsys, *PAPER, "data.features=cached", "data.heldout=0", "engine=zero2")


def test_a_target_that_learns_is_planned_with_what_of_it_learns(capsys):
    """LoRA has r * (in + out) parameters a linear layer; the whole decoder is all but the two ends of 128256 x 8192."""
    heads = 4 * (8192 * 8192 + 8192 + 128256 * 8192)
    layer = 2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672)
    lora = told(capsys, *PAPER, "joint=lora")
    assert f"{heads + 80 * 32 * layer:,} parameters are trained, 70,553,706,496 of tiny are frozen" in lora
    decoder = 70_553_706_496 - 2 * 128256 * 8192
    full = told(capsys, *PAPER, "joint=full")
    assert f"{heads + decoder:,} parameters are trained, {2 * 128256 * 8192:,} of tiny are frozen" in full
    kept = 80 * 2048 * 4 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    kept += (2 * 80 + 1) * 2048 * 4 * 3 * 8192  # three times what each norm reads
    by_heads = 4 * 2048 * 4 * 4 * (8192 + 8192)  # at each of four depths
    assert re.search(rf"activations {(kept + by_heads) / GB:.2f} ", full)


def sizes(**changes: float) -> Sizes:
    given = {
        "trained": 100,
        "frozen": 1000,
        "target": 2000,
        "layers": 0,
        "gathered": 0,
        "row": 1,
        "batch": 10,
        "held": 5,
        "activations": 50,
        "process": 7,
        "aside": False,
        "multiplied": 0,
    }
    return Sizes(**{**given, **changes})


@pytest.mark.parametrize(
    ("kind", "ranks", "drafter", "gradients", "moments"),
    [
        (Kind.single, 1, 400, 400, 800),
        (Kind.ddp, 4, 400, 800, 800),
        (Kind.zero1, 4, 500, 400, 200),
        (Kind.zero2, 4, 500, 500, 200),
        (Kind.fsdp2, 4, 500, 500, 200),
        (Kind.zero3, 4, 600, 500, 200),
    ],
)
def test_parts_are_shared_as_the_engine_shares_them(kind, ranks, drafter, gradients, moments):
    found = parts(sizes(), kind, Machine(ranks, 80 * GB, torch.device("cuda")))
    assert (found["drafter"], found["gradients"], found["moments"]) == (drafter, gradients, moments)
    assert found["target"] == 2000
    assert (found["features"], found["held-out features"], found["activations"]) == (20, 5, 50)


def test_what_is_kept_in_main_memory_takes_none_of_a_gpus():
    found = parts(sizes(aside=True), Kind.zero3, Machine(4, 80 * GB, torch.device("cuda")))
    assert (found["drafter"], found["gradients"], found["moments"]) == (500, 500, 0)


def test_a_target_that_is_shared_out_fits_where_whole_ones_do_not(capsys):
    """Of 70.6 billion parameters 2 x 128256 x 8192 are embedding and head; a layer is an 80th of the rest, and two are gathered."""
    words = [*PAPER, "drafter.vocabulary=32000", "data.heldout=0", "engine=zero1", "engine.shard_target=true"]
    edges = 2 * 128256 * 8192
    layers = 70_553_706_496 - edges
    text = told(capsys, *words)
    assert re.search(rf"target {2 * (edges + layers / 8 + 2 * layers / 80) / GB:.2f} ", text)
    assert "engine=zero1 fits" in text


def test_where_nothing_fits_it_says_what_would_help():
    machine = Machine(2, 1000.0, torch.device("cuda"))
    assert "each rank holds the target" in verdict(sizes(), Kind.ddp, machine)
    assert "lower optim.batch" in verdict(sizes(target=1, activations=1000), Kind.ddp, machine)


def test_a_plan_for_this_machine_measures_a_step_and_makes_nothing(capsys, tmp_path):
    text = told(capsys, f"out={tmp_path / 'out'}", "plan=true")
    assert re.search(r"time: [\d.]+ minutes, from a step measured on this machine \([\d,]+ tokens/s a rank", text)
    assert "engine=single fits" in text
    assert not (tmp_path / "out").exists()


def test_a_machine_that_is_none_is_refused():
    with pytest.raises(ValueError, match="machine=big describes none; give ranks and the GB of each, such as 8x80"):
        job.train(composed("plan=true", "machine=big"))


def random_target(width: int, layers: int) -> str:
    heads = width // 64
    return (
        f"target.random={{model_type: llama, vocab_size: 257, hidden_size: {width}, intermediate_size: {2 * width}, num_hidden_layers: {layers}, "
        f"num_attention_heads: {heads}, num_key_value_heads: {heads}, max_position_embeddings: 2048, eos_token_id: 256, bos_token_id: 256}}"
    )


MEASURED = {
    "medusa, wide": ["drafter=medusa", "drafter.layers=4", random_target(1536, 1)],
    "eagle3": ["drafter=eagle3", "drafter.steps=3", random_target(1536, 3)],
    "a large target": ["drafter=medusa", random_target(1024, 8)],
    "a target that learns": ["drafter=medusa", "joint=full", random_target(1024, 8)],
    "a target with an adapter that learns": ["drafter=medusa", "joint=lora", random_target(1024, 8)],
}


def ran(folder: Path, *words: str) -> str:
    """What `python -m train` says in a process of its own, and the most memory that it took."""
    process = forked("test_plan", *words, log=folder / "said.log")
    process.join()
    text = (folder / "said.log").read_text()
    assert process.exitcode == 0, text
    return text


@pytest.mark.slow
@pytest.mark.parametrize("which", MEASURED)
def test_measured_peaks_are_within_a_seventh_of_the_plan(which, tmp_path, capsys):
    words = [
        *MEASURED[which],
        "target.dtype=fp32",
        "optim.precision=fp32",
        "optim.steps=2",
        "optim.warmup=1",
        "data.longest=64",  # as long as conversations are here, so that rows are what the plan takes them for
        f"out={tmp_path / 'out'}",
    ]
    target_folder(composed(*words).target)  # made here, so that the run that is measured only reads it
    foreseen = float(re.search(r"all\s+([\d.]+)", ran(tmp_path, "conf=tiny", "plan=true", *words))[1])
    measured = float(re.search(r"peak (\d+)", ran(tmp_path, "conf=tiny", *words))[1]) * 1024 / GB
    with capsys.disabled():
        print(f"\n{which}: planned {foreseen:.2f} GB, measured {measured:.2f} GB")
    assert measured == pytest.approx(foreseen, rel=0.15)


def main() -> None:
    """`python -m test_plan conf=...`: `python -m train conf=...`, and the most memory that it took, in kB."""
    command("train.job:train")()
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    main()
