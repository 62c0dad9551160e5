"""The command line: every conf is sound, and a mistake ends in one message before anything heavy is loaded."""

from pathlib import Path

import pytest
from hydra.types import RunMode

from conf import run_folder
from conf.schema import Run
from models.shelf import family_class
from runs import ROOT, composed, said

CONFS = sorted(file.stem for file in (ROOT / "conf").glob("*.yaml"))
PARTS = sorted(f"{file.parent.name}={file.stem}" for file in (ROOT / "conf").glob("*/*.yaml"))
DOOR = "from conf import command; command('runs:show')()"  # a command whose job is done at once
MINE = "# @package _global_\ndefaults:\n  - /target: tiny\n  - /drafter: medusa\n  - /data: tiny\n  - _self_\n"


def told(*words: str, cwd: Path) -> list[list[str]]:
    """What `show` said about each run that the command line means."""
    code, out, errors = said("-c", DOOR, *words, cwd=cwd)
    assert code == 0, errors
    return [line.split()[1:] for line in out.splitlines() if line.startswith("told")]


def own(folder: Path, text: str) -> Path:
    """A user's folder of confs."""
    (folder / "own" / "conf").mkdir(parents=True)
    (folder / "own" / "conf" / "mine.yaml").write_text(text)
    return folder / "own"


@pytest.mark.parametrize("conf", CONFS)
def test_every_conf_is_a_run(conf):
    run = composed(conf=conf)
    assert isinstance(run, Run)
    assert run.target.name
    assert run.data.path
    assert run.optim.steps > run.optim.warmup or run.optim.steps == 0
    family_class(run.drafter["_target_"], [knob for knob in run.drafter if not knob.startswith("_")])


@pytest.mark.parametrize("part", PARTS)
def test_every_part_fits_a_run(part):
    assert isinstance(composed(part), Run)


def test_there_are_confs_to_test():
    assert {"tiny", "medusa_smol"} <= set(CONFS)
    assert {"target=tiny", "drafter=medusa", "data=tiny"} <= set(PARTS)


def test_defaults_of_the_schema_reach_the_run_and_overrides_go_before_them():
    run = composed("optim.lr=0.5", "data.features=cached", "drafter.heads=2")
    assert (run.optim.lr, run.data.features.value, run.drafter["heads"]) == (0.5, "cached", 2)
    assert (run.optim.clip, run.seed, run.trained) == (1.0, 0, None)
    assert type(run.drafter) is dict
    assert type(run.decode.bench) is list


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("conf=nope", ["Could not find 'conf/nope'", "medusa_smol", "tiny"]),
        ("optim.lrr=1", ["'lrr' not in 'Optim'"]),
        ("log.wandb=maybe", ["maybe", "disabled, offline, online"]),
        ("drafter.headz=3", ["headz"]),
    ],
)
def test_a_mistake_is_named_before_torch_is_loaded(word, names, tmp_path):
    code, out, errors = said("-X", "importtime", "-m", "train", word, cwd=tmp_path)
    assert code != 0
    loaded = [line.split("|")[-1].strip() for line in errors.splitlines() if line.startswith("import time:")]
    message = "\n".join(line for line in errors.splitlines() if not line.startswith("import time:"))
    assert all(name in message for name in names)
    assert "Traceback" not in message + out
    assert "hydra" in loaded
    assert "torch" not in loaded
    assert list(tmp_path.iterdir()) == []


def test_help_shows_confs_parts_and_settings(tmp_path):
    code, out, errors = said("-m", "train", "--help", cwd=tmp_path)
    assert code == 0, errors
    assert f"conf: {', '.join(CONFS)}" in out
    assert "drafter: " in out
    assert "weight_decay: 0.0" in out
    assert list(tmp_path.iterdir()) == []


def test_a_users_own_conf_is_found_in_a_folder_of_theirs(tmp_path):
    """Trained from a process of its own in test_train.py."""
    folder = own(tmp_path, MINE + "optim: {steps: 7, warmup: 1}\n")
    assert told("--config-dir", str(folder), "conf=mine", "seed=3", cwd=tmp_path) == [
        ["mine", "outputs/mine", "3", "tiny", "7"]
    ]


def test_a_setting_that_a_conf_leaves_out_is_named(tmp_path):
    folder = own(tmp_path, MINE.replace("  - /target: tiny\n", ""))
    code, _, errors = said("-c", DOOR, "--config-dir", str(folder), "conf=mine", cwd=tmp_path)
    assert code == 1
    assert errors.startswith("error: target.name is not set; give it on the command line or in your conf\n")
    assert "Traceback" not in errors
    assert not (tmp_path / "outputs").exists()
    assert told("--config-dir", str(folder), "conf=mine", "target.name=a/b", cwd=tmp_path)[0][3] == "a/b"


def test_every_run_of_a_sweep_has_a_folder_of_its_own(tmp_path):
    runs = told("--multirun", "conf=tiny,medusa_smol", "seed=0,1", cwd=tmp_path)
    assert {(conf, seed) for conf, _, seed, *_ in runs} == {
        (conf, seed) for conf in ("tiny", "medusa_smol") for seed in "01"
    }
    folders = [out for _, out, *_ in runs]
    assert len(set(folders)) == 4
    assert all(out.startswith(f"outputs/{conf}/") for conf, out, *_ in runs)
    assert run_folder("tiny", RunMode.RUN, "seed=1") == run_folder("tiny", RunMode.MULTIRUN, "") == "outputs/tiny"


def test_a_mistake_that_only_the_job_sees_ends_in_its_sentence(tmp_path):
    failing = "import conf, runs\ndef fail(run): raise ValueError('tea is cold; warm it')\nruns.show = fail\n"
    code, _, errors = said("-c", failing + DOOR, cwd=tmp_path)
    assert (code, errors) == (1, "error: tea is cold; warm it\n(HYDRA_FULL_ERROR=1 shows where)\n")
