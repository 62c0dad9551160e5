"""A sweep ends with one table of its members."""

import yaml
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from runs import said
from train.sweep import Sweep


def card(tau: float) -> str:
    best = {"step": 7, "tau": tau, "low": tau - 0.1, "high": tau + 0.1, "decoded": None}
    return yaml.safe_dump({"training": {"best": best}, "acceptance": {"greedy": [0.5, 0.25]}})


def heard(capsys, folder, taus) -> list[list[str]]:
    sweep = Sweep()
    for at, tau in enumerate(taus):
        (folder / str(at)).mkdir()
        if tau is not None:
            (folder / str(at) / "drafter.yaml").write_text(card(tau))
        sweep.on_job_end(OmegaConf.create({"out": str(folder / str(at))}), JobReturn(overrides=[f"seed={at}"]))
    sweep.on_multirun_end(OmegaConf.create({}))
    return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("seed")]


def test_the_members_stand_side_by_side_the_best_first(capsys, tmp_path):
    assert heard(capsys, tmp_path, [1.2, 1.7, None]) == [
        ["seed=1", "1.70", "1.60-1.80", "7", "0.50", "0.25"],
        ["seed=0", "1.20", "1.10-1.30", "7", "0.50", "0.25"],
    ]


def test_one_member_is_no_table(capsys, tmp_path):
    assert heard(capsys, tmp_path, [1.2, None]) == []


def test_the_command_ends_with_it(tmp_path):
    words = ["--multirun", "conf=tiny", "optim.steps=2", "optim.warmup=1", "drafter.decay=0.5,0.9"]
    code, out, errors = said("-m", "train", *words, cwd=tmp_path)
    assert code == 0, errors
    members = [
        line
        for line in out.splitlines()
        if line.strip().startswith("conf=tiny optim.steps=2 optim.warmup=1 drafter.decay=")
    ]
    assert len(members) == 2
