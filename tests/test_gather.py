"""Reports of several measurements laid side by side, from the folders that hold them to the README."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decode import report as writer
from decode.gather import VERSION, beside, command, differences, distinct, find, gather, read, show, wide
from decode.words import grid
from reports import family, told
from runs import ROOT, said


def put(folder: Path, *reports: dict[str, Any]) -> Path:
    """A measurement of `reports` in `folder`, as decode/run.py leaves one."""
    folder.mkdir(parents=True)
    for number, report in enumerate(reports):
        name = f"report_{report['settings']['drafter']}.json" if number else "report.json"
        (folder / name).write_text(json.dumps(report))
    return folder


@pytest.fixture
def run_folder(tmp_path):
    """outputs/x with three measurements, the last of them not finished."""
    out = tmp_path / "outputs" / "x"
    put(out / "measure" / "2026-11-28_10-00-00", told("old"))
    put(out / "measure" / "2026-11-29_10-00-00", told("new"), told("beside"))
    (out / "measure" / "2026-11-30_10-00-00").mkdir()
    return out


def test_a_runs_folder_means_its_newest_finished_measurement(run_folder):
    newest = run_folder / "measure" / "2026-11-29_10-00-00"
    wanted = [newest / "report.json", newest / "report_beside.json"]
    assert find(run_folder) == find(newest) == wanted
    assert find(wanted[1]) == wanted[1:]


def test_reports_keep_their_order_and_none_stands_twice(run_folder, tmp_path):
    other = put(tmp_path / "other", told("other"))
    newest = run_folder / "measure" / "2026-11-29_10-00-00"
    assert list(gather([other, run_folder, newest])) == ["other", "new", "beside"]
    assert gather([newest])["beside"] == told("beside")


def test_names_tell_reports_apart():
    files = [Path("a/m/report.json"), Path("a/m/report_y.json"), Path("b/n/report.json"), Path("c/n/report.json")]

    def names(*drafters: str) -> list[str]:
        return distinct([told(name) for name in drafters], files)

    assert names("x", "y", "z", "w") == ["x", "y", "z", "w"]
    assert names("x", "y", "x", "z") == ["x [m]", "y", "x [n]", "z"]
    assert names("x", "y", "x", "x") == ["x [m]", "y", "x [b/n/report.json]", "x [c/n/report.json]"]


# ---- what cannot be laid side by side


def refused(*places: Path) -> str:
    with pytest.raises(ValueError, match=r".") as refusal:
        gather(places)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_places_without_a_report_are_refused(tmp_path):
    assert refused(tmp_path) == (
        f"{tmp_path} holds no report.json; give a folder that decode/run.py wrote, such as outputs/<conf>, or a report.json"
    )
    assert refused(tmp_path / "gone").startswith(f"{tmp_path}/gone does not exist; give a folder")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 1, "lines": []}', "is a report of version 1, and this Outrider reads 3; measure again"),
        ('{"version": 4}', "is a report of version 4, and this Outrider reads 3; measure again"),
        ('{"version": 3, "lines": []}', "is no report of decode/run.py"),
        ('{"rows": 1}', "is no report of decode/run.py"),
        ("[1]", "is no report of decode/run.py"),
        ("{", "is no JSON; measure again with decode/run.py"),
        (b"\xff\xfe", "is no JSON; measure again with decode/run.py"),
    ],
)
def test_files_that_are_no_report_of_this_version_are_refused(tmp_path, text, words):
    file = tmp_path / "report.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=re.escape(f"{file} {words}")):
        read(file)


def test_reports_of_two_targets_are_refused(tmp_path):
    one, other = put(tmp_path / "a", told()), put(tmp_path / "b", told(target="Qwen/Qwen3-8B"))
    assert refused(one, other) == (
        f"{one}/report.json measured HuggingFaceTB/SmolLM2-135M-Instruct and {other}/report.json Qwen/Qwen3-8B; "
        "lay reports of one target side by side"
    )


FAIR = {
    "dtype": "bfloat16",
    "compiled": True,
    "tokens": 64,
    "temperature": 0.7,
    "rows": 4,
    "cpu": "other",
    "threads": 1,
    "cores": 64,
}


@pytest.mark.parametrize("setting", FAIR)
def test_what_was_not_measured_alike_is_said(setting):
    reports = {"a": told(), "b": told(), "c": told(**{setting: FAIR[setting]})}
    before = told()["settings"][setting]
    assert differences(reports) == [f"Not measured alike: {setting} is {before} for a and b, {FAIR[setting]} for c."]


def test_what_may_differ_between_drafters_is_not_held_against_them():
    assert differences(family()) == []
    assert differences({"a": told(), "b": told(nodes=5, tree=[[0]], folder="f", taken="2026-12-01T00:00:00")}) == []
    (said,) = differences({"a": told(), "b": told(sets=("gsm8k",))})
    assert said.startswith("Not measured alike: the sets or the numbers of prompts differ")


def test_what_is_read_is_what_is_written():
    assert VERSION == writer.VERSION


# ---- the table


def shown(reports: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(console, reports, differences(reports))
    return console.export_text()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("sets", [1, 3, 13])
def test_every_figure_is_printed_whole_however_narrow_the_terminal(width, sets):
    names = ["medusa_smol", "eagle3_smol_long", "x"]
    reports = {
        name: told(name, sets=tuple(f"set_{at}" for at in range(sets)), cost=1.2 + at / 9)
        for at, name in enumerate(names)
    }
    text = shown(reports, width)
    words = text.split()
    for row in grid(reports)[1:]:
        for cell in row[1:]:
            assert cell in words or not cell
    across = [line for line in text.splitlines() if line.startswith(" plain ")]
    assert len(across) == (
        wide([[head.replace("tau ", "tau\n") for head in grid(reports)[0]], *grid(reports)[1:]]) <= width
    )


def test_three_drafters_on_three_sets_fit_80_columns():
    text = shown(family())
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"^ (plain|medusa_smol|eagle3_smol_long|typical \(lossy\)) ", text, re.MULTILINE) == [
        "plain", "medusa_smol", "eagle3_smol_long", "typical (lossy)",
    ]  # fmt: skip
    assert "AMD EPYC 7B13, 2 threads on 2 cores" in " ".join(text.split())


def test_plain_speeds_of_several_runs_are_a_range():
    slow = told("slow")
    slow["lines"][-1]["plain_tokens_per_second"] = 8.04
    assert [grid(reports)[1][3] for reports in ({"a": told()}, {"a": told(), "b": slow})] == ["10.4", "8.0-10.4"]


# ---- the command


def test_the_page_goes_beside_the_reports_unless_a_file_is_named(run_folder, tmp_path):
    newest = run_folder / "measure" / "2026-11-29_10-00-00"
    assert beside([run_folder]) == newest / "report.html"
    assert beside([run_folder, tmp_path]) == newest / "side_by_side.html"


def test_python_m_decode_report_prints_one_table_and_writes_the_page(run_folder, tmp_path):
    put(tmp_path / "outputs" / "y", told("other", dtype="bfloat16"))
    words = ("-m", "decode.report", "outputs/x", "outputs/y", "--html", "pages/both.html")
    code, out, err = said(*words, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert re.findall(r"^ (plain|new|beside|other) ", out, re.MULTILINE) == ["plain", "new", "beside", "other"]
    assert "Not measured alike: dtype is float32 for new and beside, bfloat16 for other." in out
    assert out.endswith("written to pages/both.html\n")
    page = (tmp_path / "pages" / "both.html").read_text()
    assert all(f"<h2>{name}</h2>" in page for name in ("new", "beside", "other"))
    assert '<p class="note">Not measured alike: dtype is' in page


def test_a_mistake_ends_in_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "a", told())
    put(tmp_path / "b", told("b"))
    with pytest.raises(SystemExit, match=r"^error: gone does not exist; give a folder"):
        command(["gone"])
    with pytest.raises(SystemExit, match=r"^error: --html b is a folder; name a file such as b/report.html, or put"):
        command(["a", "--html", "b"])
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["a", "b", "report.json", "report.json"]


# ---- the README

README = "# x\n\nbefore\n\n<!-- results: written by scripts/results.py -->\nold\n<!-- end of results -->\n\nafter\n"


def written(readme: Path, *places: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "results.py"), *map(str, places), "--readme", str(readme)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=120)


def test_the_readmes_table_is_written_from_the_reports(tmp_path):
    readme, folder = tmp_path / "README.md", put(tmp_path / "a", *family().values())
    readme.write_text(README)
    assert written(readme, folder).returncode == 0
    text = readme.read_text()
    before, block = text.split("<!-- results: written by scripts/results.py -->\n")
    block, after = block.split("\n<!-- end of results -->")
    assert (before, after) == ("# x\n\nbefore\n\n", "\n\nafter\n")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")
    ]
    wanted = grid(family())
    wanted[-2], wanted[-1] = wanted[-2], ["typical (lossy)", *wanted[-1][1:]]
    assert sorted(rows[:1] + rows[2:]) == sorted(wanted)
    assert "on AMD EPYC 7B13, 2 threads on 2 cores, torch 2.13.0+cpu; 30 prompts" in block
    assert "2026-11-29" in block
    assert written(readme, folder).returncode == 0
    assert readme.read_text() == text


@pytest.mark.parametrize("broken", ["# x\n", README * 2, "\n".join(reversed(README.splitlines()))])
def test_a_readme_without_the_two_markers_is_left_alone(tmp_path, broken):
    readme, folder = tmp_path / "README.md", put(tmp_path / "a", told())
    readme.write_text(broken)
    done = written(readme, folder)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {readme} needs the lines <!-- results")
    assert readme.read_text() == broken


def test_our_own_readme_has_the_markers():
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- results: written by scripts/results.py -->") == text.count("<!-- end of results -->") == 1
