"""Features on disk: the target's own, found by the text, whole or refused by name."""

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import Family
from models.drafter import FeatureBatch
from models.target import Target
from runs import composed, forked, together
from train import job, store
from train.chat import Example
from train.features import Live, Source
from train.store import Stamp, Store, open_store, shards, stamp_of

TAPS = (1, 2)


def talk(*lengths: int, seed: int = 0) -> list[Example]:
    """Random conversations; the target speaks in the second half of each."""
    chance = random.Random(seed)
    return [
        Example([chance.randrange(256) for _ in range(length)], [at >= length // 2 for at in range(length)])
        for length in lengths
    ]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD", 30)
    monkeypatch.setattr(store, "TOGETHER", 2)


def filled(target: Target, examples: list[Example], home: Path, taps: tuple[int, ...] = TAPS) -> Store:
    """A store in `home` that holds `examples`; the taps stay set."""
    target.tap(taps)
    made = open_store(str(home), target, examples)
    made.fill(target, examples)
    target.tap(taps)
    return made


def same(made: Store, target: Target, examples: list[Example]) -> None:
    """The store says of `examples` what the target says, padding aside."""
    rows = [[example] for example in examples]
    ours, theirs = made.read(rows), Live(target).read(rows)
    real = theirs.document >= 0
    for name in ("input_ids", "loss_mask", "document", "position"):
        assert getattr(ours, name).equal(getattr(theirs, name)), name
    for name in ("features", "last_hidden"):
        torch.testing.assert_close(getattr(ours, name)[real], getattr(theirs, name)[real], rtol=1e-4, atol=1e-5)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.usefixtures("small_shards")
def test_a_store_gives_what_the_target_says(llama: Family, tmp_path: Path) -> None:
    examples = talk(9, 20, 14, 3, 20, 31)
    made = filled(llama.target, examples, tmp_path)
    assert len(made.files) == 2
    for group in ([0, 3], [5, 1, 2], [4]):
        same(made, llama.target, [examples[at] for at in group])


@pytest.mark.usefixtures("small_shards")
def test_a_conversation_is_read_once_whoever_asks(llama: Family, tmp_path: Path) -> None:
    examples = talk(9, 20, 14)
    before = filled(llama.target, [*examples, examples[0]], tmp_path).files
    again = filled(llama.target, list(reversed(examples)), tmp_path)
    assert again.files == before
    more = filled(llama.target, [*examples, *talk(12, seed=1)], tmp_path)
    assert len(more.files) == len(before) + 1


def test_a_store_of_more_taps_serves_fewer(llama: Family, tmp_path: Path) -> None:
    examples = talk(9, 20)
    filled(llama.target, examples, tmp_path, taps=(0, 1, 3))
    for taps in ((), (1,), (0, 3)):
        served = filled(llama.target, examples, tmp_path, taps=taps)
        assert served.stamp.taps == (0, 1, 3)
        same(served, llama.target, examples)
    assert filled(llama.target, examples, tmp_path, taps=(2,)).stamp.taps == (2,)


def test_the_stamp_of_a_store_is_in_its_name() -> None:
    for taps in ((), (2,), (2, 15, 27)):
        stamp = Stamp("f7d8a5e9f57656f8", taps, "bfloat16")
        assert stamp_of(Path("home", stamp.folder)) == stamp
    assert stamp_of(Path("home", "f7d8-notes-2")) is None


@pytest.mark.usefixtures("small_shards")
def test_shards_end_where_their_tokens_are_enough() -> None:
    examples = talk(9, 20, 14, 16, 3)
    assert [[len(each.input_ids) for each in part] for part in shards(examples)] == [[9, 20, 14], [16, 3]]


@pytest.mark.usefixtures("small_shards")
def test_several_processes_leave_the_files_of_one(llama: Family, tmp_path: Path) -> None:
    examples = talk(9, 20, 14, 3, 20, 31, 8, 17)
    alone = filled(llama.target, examples, tmp_path / "one")
    llama.target.tap(TAPS)
    ranks = [open_store(str(tmp_path / "two"), llama.target, examples) for _ in range(2)]
    for rank, each in reversed(list(enumerate(ranks))):
        each.fill(llama.target, examples, rank, 2)
    assert contents(alone.folder) == contents(ranks[0].folder)


@pytest.mark.usefixtures("small_shards")
def test_a_store_that_lost_shards_is_mended_to_the_same_files(llama: Family, tmp_path: Path) -> None:
    examples = talk(9, 20, 14, 3, 20, 31, 8, 17)
    whole = contents(filled(llama.target, examples, tmp_path).folder)
    for lost in range(1, len(whole)):
        for name in random.Random(lost).sample(sorted(whole), lost):
            (filled(llama.target, examples, tmp_path).folder / name).unlink()
        assert contents(filled(llama.target, examples, tmp_path).folder) == whole


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def of_another_target(file: Path) -> None:
    save_file(load_file(file), file, {"stamp": Stamp("another", TAPS, "float32").said()})


def of_other_taps(file: Path) -> None:
    save_file(load_file(file), file, {"stamp": Stamp(file.parent.name.partition("-")[0], (0, 1), "float32").said()})


def unmarked(file: Path) -> None:
    save_file(load_file(file), file)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (truncated, "is damaged .*; delete it, and the next run writes it again"),
        (
            of_another_target,
            r"holds features of schema 1, target another, taps \[1, 2\], float32 in the folder of .*; move it",
        ),
        (of_other_taps, r"holds features of schema 1, target \w+, taps \[0, 1\], float32 in the folder of"),
        (unmarked, "holds features of who knows what in the folder of"),
    ],
)
def test_a_shard_that_is_not_what_it_should_be_is_named(
    harm: Callable[[Path], None], sentence: str, llama: Family, tmp_path: Path
) -> None:
    examples = talk(9, 20)
    (file,) = filled(llama.target, examples, tmp_path).files
    harm(file)
    with pytest.raises(ValueError, match=f"{file} {sentence}"):
        open_store(str(tmp_path), llama.target, examples)


def test_a_target_that_says_no_numbers_is_told(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = llama.target.body.norm.forward
    monkeypatch.setattr(llama.target.body.norm, "forward", lambda hidden: forward(hidden) * torch.nan)
    with pytest.raises(ValueError, match="hidden states are not finite for one of the conversations that begin"):
        filled(llama.target, talk(9), tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_tap_that_is_no_number_is_told(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer may overflow whose effect the layers above it hide."""
    read = Live.read

    def broken(self: Live, rows: list) -> FeatureBatch:
        batch = read(self, rows)
        batch.features[0, 2, 5] = torch.inf
        return batch

    monkeypatch.setattr(Live, "read", broken)
    with pytest.raises(ValueError, match="hidden states are not finite for one of the conversations that begin"):
        filled(llama.target, talk(9), tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_disk_that_is_too_small_is_known_before_anything_is_read(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = store.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: free._replace(free=1000))
    with pytest.raises(
        ValueError, match=r"take 0\.00 GB in .*, where 0\.00 GB are free; choose another disk with data\.store="
    ):
        filled(llama.target, talk(99), tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_disk_that_fills_up_ends_in_a_sentence_and_leaves_whole_shards(llama: Family, tmp_path: Path) -> None:
    """The system itself refuses to write more than 20,000 bytes to a file."""
    small, big = talk(9), talk(200, seed=1)
    filled(llama.target, small, tmp_path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot be written \(File too large\); the shards before it stay"):
            filled(llama.target, big, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (folder,) = tmp_path.iterdir()
    assert len(contents(folder)) == 1
    assert not filled(llama.target, big, tmp_path).missing(small + big)


def test_what_comes_next_is_read_meanwhile(llama: Family, tmp_path: Path) -> None:
    examples = talk(9, 20, 14, 16)
    source = Source(examples, filled(llama.target, examples, tmp_path), size=2, seed=0)
    first = source.features([0, 1], then=[2, 3])
    coming = source._coming[2, 3]
    second = source.features([2, 3])
    assert second is coming.result()
    assert first.input_ids.shape == (2, 20)
    assert second.features.equal(source.reader.read([[examples[2]], [examples[3]]]).features)
    live = Source(examples, Live(llama.target), size=2, seed=0)
    live.features([0, 1], then=[2, 3])
    assert not live._coming  # the target itself is not asked twice at a time


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_an_extraction_killed_at_any_moment_goes_on_to_the_same_files(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kill comes a little later in the run, all on one store; then it finishes."""
    words = ["data.conversations=16", "drafter=eagle3"]
    monkeypatch.setattr(store, "SHARD", 60)
    monkeypatch.setattr(store, "TOGETHER", 2)
    job.extract(composed(*words, f"data.store={tmp_path}/whole"))
    (whole,) = (tmp_path / "whole").iterdir()
    for attempt in range(kills + 1):
        log = tmp_path / f"{attempt}.log"
        process = forked("test_store", *words, f"data.store={tmp_path}/killed", log=log)
        if attempt == kills:
            process.join()
            assert process.exitcode == 0, log.read_text()
            break
        deadline = time.time() + 60
        while "take" not in log.read_text() if log.exists() else True:  # until it has said what it will write
            assert time.time() < deadline
            if not process.is_alive():
                break
            time.sleep(0.002)
        time.sleep(0.004 * attempt)
        if process.pid and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    (killed,) = (tmp_path / "killed").iterdir()
    left = {name: held for name, held in contents(killed).items() if not name.startswith(".")}
    assert left == contents(whole)
    assert len(left) > 3


def test_two_processes_share_the_work_of_an_extraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment that torchrun gives its workers: each writes shards, none is written twice, and only one speaks."""
    words = ["data.conversations=16", "drafter=eagle3"]
    monkeypatch.setattr(store, "SHARD", 60)
    monkeypatch.setattr(store, "TOGETHER", 2)
    job.extract(composed(*words, f"data.store={tmp_path}/one"))
    logs = together(2, "test_store", *words, f"data.store={tmp_path}/two", folder=tmp_path, name="rank")
    (one,), (two,) = ((tmp_path / name).iterdir() for name in ("one", "two"))
    assert contents(two) == contents(one)
    wrote = [log.count("a shard\n") for log in logs]
    assert sum(wrote) == len(list(two.glob("*.safetensors")))
    assert min(wrote) > 0
    assert [log.count("target reads") for log in logs] == [1, 0]


def main() -> None:
    """`python -m test_store data.store=...`: scripts/extract.py with small shards, of each of which it speaks."""
    store.SHARD, store.TOGETHER = 60, 2
    write = Store._write

    def told(*args: object) -> None:
        print("a shard", flush=True)
        write(*args)  # type: ignore[arg-type]

    Store._write = told  # type: ignore[method-assign]
    job.extract(composed(*sys.argv[1:]))


if __name__ == "__main__":
    main()
