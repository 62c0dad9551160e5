"""From a trained drafter to a served one and back: the commands, their folders, the Hub, and whatever they refuse."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import hub as stand_in
from conf.schema import Run
from decode.choice import Point, keep, place_of
from decode.cost import Cost
from decode.engine import Generation, Step
from decode.opening import target_folder
from models.ends import Ends
from models.shelf import Card, family_class, read_card, save_drafter
from models.source import identify
from runs import ROOT, composed, said
from train.convert import convert
from train.export import export, guesses
from train.upload import share, upload

MEDUSA = {"heads": 2, "layers": 1, "head": "shared", "vocabulary": 50, "loss": "kl", "decay": 0.8}
EAGLE3 = {"taps": [0, 1, 2], "vocabulary": 50, "fc_norm": True, "feedback": "after_norm", "steps": 2}
TARGET = "target.random.initializer_range=0.3"


def run_of(*overrides: str) -> Run:
    return composed(TARGET, *overrides)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved drafter of each family."""
    home = tmp_path_factory.mktemp("drafters")
    run = run_of()
    folder = target_folder(run.target)
    ends, identity = Ends.load(folder), identify(folder, run.target.name)
    for family, knobs in (("models.medusa.Medusa", MEDUSA), ("models.eagle3.Eagle3", EAGLE3)):
        torch.manual_seed(0)
        drafter = family_class(family, knobs)(ends, **knobs)
        drafter.learn_vocabulary(torch.rand(ends.vocabulary))
        for parameter in drafter.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        training = {
            "conf": "tiny",
            "data": "some.jsonl",
            "conversations": 4,
            "answer_tokens": 99,
            "optim": {"steps": 7, "batch": 2, "lr": 0.1},
            "seed": 0,
            "outrider": "0.1.0",
        }
        card = Card(family, knobs, vars(identity), list(drafter.taps), [[0], [0, 0]], training, {"greedy": [0.5, 0.4]})
        save_drafter(drafter, card, home / family.split(".")[1], torch.bfloat16)
    return home


def exported(drafters: Path, family: str, layout: str, out: Path) -> Path:
    return export(run_of(f"trained={drafters / family}", f"layout={layout}", f"out={out}"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(("family", "layout"), [("medusa", "vllm"), ("eagle3", "vllm"), ("eagle3", "speculators")])
def test_an_export_is_the_same_bytes_every_time_and_comes_back_as_the_drafter_it_was(
    drafters, tmp_path, family, layout
):
    first = exported(drafters, family, layout, tmp_path / "first")
    assert contents(first) == contents(exported(drafters, family, layout, tmp_path / "second"))
    assert {"config.json", "model.safetensors", "outrider.yaml", "serve.json", "serve.md"} == set(contents(first))
    convert(run_of(f"trained={first}", f"out={tmp_path / 'back'}"))
    assert contents(tmp_path / "back") == contents(drafters / family)


def test_a_drafter_without_our_record_comes_back_with_a_card_of_its_own(drafters, tmp_path):
    foreign = exported(drafters, "eagle3", "speculators", tmp_path / "foreign")
    (foreign / "outrider.yaml").unlink()
    convert(run_of(f"trained={foreign}", f"out={tmp_path / 'back'}"))
    card = read_card(tmp_path / "back")
    assert (card.taps, card.knobs["feedback"], card.training["converted"]) == ([0, 1, 2], "after_norm", "speculators")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        drafters / "eagle3" / "model.safetensors"
    ).read_bytes()


def test_the_shipped_name_and_the_runs_own_folder_say_where_an_export_goes(drafters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()
    Path("outputs/tiny").symlink_to(drafters / "medusa", target_is_directory=True)
    assert export(run_of("layout=vllm")) == Path("outputs/tiny/vllm")
    for file in Path("outputs/tiny/vllm").iterdir():
        file.unlink()
    Path("outputs/tiny/vllm").rmdir()


def test_an_existing_folder_a_foreign_layout_and_another_target_are_refused_before_anything_loads(
    drafters, tmp_path, monkeypatch
):
    monkeypatch.setattr(Ends, "load", lambda *how: pytest.fail("weights were loaded"))
    medusa = f"trained={drafters / 'medusa'}"
    for wrong, message in (
        ((medusa, "layout=vllm", f"out={tmp_path}"), "exists already; choose another folder with out="),
        ((medusa, "layout=sglang", f"out={tmp_path}/x"), "has no layout 'sglang'; it has medusa, vllm"),
        ((medusa, f"out={tmp_path}/x"), "layout= is not set"),
        ((f"trained={tmp_path}", "layout=vllm", f"out={tmp_path}/x"), "holds no drafter.yaml"),
        ((medusa, "layout=vllm", f"out={tmp_path}/x", "target.random.num_hidden_layers=3"), "was trained for tiny"),
        (("layout=vllm", f"out={tmp_path}/x"), "there is no trained drafter of tiny"),
        (
            ("drafter=ngram", "layout=vllm", f"out={tmp_path}/x"),
            "a Ngram is never trained, so there is nothing to export",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            export(run_of(*wrong))
    assert list(tmp_path.iterdir()) == []


def test_chains_are_as_long_as_guesses_are_reached_often_enough():
    rates = lambda *greedy: Card("", {}, {}, [], acceptance={"greedy": list(greedy)})  # noqa: E731
    assert guesses(rates(0.5, 0.4, 0.3, 0.9)) == 4
    assert guesses(rates(0.5, 0.4, 0.2, 0.9)) == 2
    for family, rate, depth in (("eagle.Eagle", 0.5, 3), ("eagle.Eagle", 0.3, 2), ("eagle.Eagle", 0.01, 1)):
        assert guesses(Card(f"models.{family}", {}, {}, [], acceptance={"greedy": [rate]})) == depth
    assert guesses(Card("models.medusa.Medusa", {"heads": 1}, {}, [], acceptance={"greedy": [0.5]})) == 1
    assert guesses(Card("", {}, {}, [])) == 3


def test_what_passes_cost_on_this_machine_says_how_much_vllm_guesses_at_each_batch_size(drafters, tmp_path):
    card = read_card(drafters / "medusa")
    here = {
        "processor": "some machine",
        "target": "tiny",
        "drafter": {"family": card.family, "knobs": card.knobs, "training": card.training},
    }
    cheap, dear = Cost([1, 4], [100.0, 103.0]), Cost([1, 4], [100.0, 400.0])
    points = [Point(rows, 64, dear if rows == 8 else cheap, {"chain": [1.0, 2.0]}, 1.0) for rows in (1, 2, 8)]

    def settings(name: str, holds_for: dict[str, Any]) -> tuple[dict[str, Any], str]:
        keep("tiny", holds_for, points, [])
        out = exported(drafters, "medusa", "vllm", tmp_path / name)
        return json.loads((out / "serve.json").read_text())["vllm"], (out / "serve.md").read_text()

    try:
        told, recipe = settings("here", here)
        assert told["num_speculative_tokens_per_batch_size"] == [[1, 7, 2], [8, 8, 0]]
        assert told["num_speculative_tokens"] == 2
        assert "measured (some machine)" in recipe
        told, recipe = settings("another", {**here, "target": "another"})
        assert "num_speculative_tokens_per_batch_size" not in told
        assert "decode.tune" not in recipe
        place_of("tiny").write_text("{")
        assert exported(drafters, "medusa", "vllm", tmp_path / "damaged")
    finally:
        place_of("tiny").unlink()


def test_the_check_against_vllm_counts_every_round_that_began_before_the_limit_and_the_last_one_whole():
    counted = runpy.run_path(str(ROOT / "scripts" / "check_vllm.py"))["counted"]
    paths = [2, 0, 1, *[2] * 30]
    steps = [Step(2, tuple(range(1, path + 1)), 2, path + 1) for path in paths]
    rounds = 3 + 19  # 1 from the prompt, 6 in three rounds, then 3 in each: the twentieth begins at 64
    assert counted([Generation(0, steps=steps)], 2) == {
        "drafts": rounds,
        "drafted": 2 * rounds,
        "accepted": 3 + 2 * 19,
        "per_position": [2 + 19, 1 + 19],
    }


# --- pickles ----------------------------------------------------------------------------------------------------------


def pickled(drafters: Path, tmp_path: Path, more: dict[str, Any]) -> Path:
    """An EAGLE-3 as it used to be published: pytorch_model.bin."""
    folder = exported(drafters, "eagle3", "speculators", tmp_path / "old")
    torch.save({**load_file(folder / "model.safetensors"), **more}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


class Trap:
    """What a pickle runs when it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("the pickle ran",)


def test_a_pickle_is_read_when_asked_for_and_never_run(drafters, tmp_path):
    folder = pickled(drafters, tmp_path, {})
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a pickle.*read it with allow_pickle=true"):
        convert(run_of(f"trained={folder}", f"out={tmp_path / 'back'}"))
    convert(run_of(f"trained={folder}", f"out={tmp_path / 'back'}", "allow_pickle=true"))
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        drafters / "eagle3" / "model.safetensors"
    ).read_bytes()
    torch.save({"a": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is no pickle of tensors"):
        convert(run_of(f"trained={folder}", f"out={tmp_path / 'again'}", "allow_pickle=true"))
    torch.save({"a": "text"}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds more than tensors by name"):
        convert(run_of(f"trained={folder}", f"out={tmp_path / 'again'}", "allow_pickle=true"))


def test_what_is_no_foreign_drafter_is_refused(drafters, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    out = f"out={tmp_path / 'back'}"
    for folder, message in (
        (empty, "holds no config.json"),
        (drafters / "medusa", "is a drafter of Outrider's already"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(run_of(f"trained={folder}", out))
    (empty / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is no JSON object"):
        convert(run_of(f"trained={empty}", out))
    (empty / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no \.safetensors file"):
        convert(run_of(f"trained={empty}", out))
    save_file({"a": torch.ones(1)}, empty / "model.safetensors")
    with pytest.raises(ValueError, match="this is no known layout of a drafter"):
        convert(run_of(f"trained={empty}", out))
    with pytest.raises(ValueError, match="name the folder or Hub name"):
        convert(run_of(out))
    with pytest.raises(ValueError, match="exists already"):
        convert(run_of(f"trained={empty}", f"out={empty}"))


def test_a_record_that_contradicts_the_config_is_refused(drafters, tmp_path):
    folder = exported(drafters, "eagle3", "vllm", tmp_path / "there")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "norm_output": False}))
    with pytest.raises(ValueError, match="disagree: feedback after_norm there and before_norm in the config"):
        convert(run_of(f"trained={folder}", f"out={tmp_path / 'back'}"))


# --- the Hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[stand_in.Hub]:
    """A Hub of this test's own, and a cache for what comes from it."""
    with stand_in.standing() as standing:
        monkeypatch.setattr(constants, "ENDPOINT", standing.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", standing.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
        yield standing


def test_an_export_goes_to_the_hub_private_and_whole_and_comes_back_by_its_name_and_commit(
    drafters, tmp_path, hub, capsys
):
    hub.breaking = 0
    share(run_of(f"trained={drafters / 'medusa'}", "layout=vllm", f"out={tmp_path / 'out'}", "hub=me/drafter"))
    assert hub.private == {"me/drafter": True}
    assert hub.files["me/drafter"] == contents(tmp_path / "out")
    assert f"me/drafter is at commit {hub.commit}" in capsys.readouterr().out
    convert(run_of(f"trained=me/drafter@{hub.commit}", f"out={tmp_path / 'back'}"))
    assert contents(tmp_path / "back") == contents(drafters / "medusa")
    with pytest.raises(ValueError, match=r"me/drafter has no revision 'nope'"):
        convert(run_of("trained=me/drafter@nope", f"out={tmp_path / 'again'}"))


def test_a_dry_run_writes_the_card_and_sends_nothing(drafters, tmp_path, hub, capsys):
    share(
        run_of(
            f"trained={drafters / 'eagle3'}",
            "layout=speculators",
            f"out={tmp_path / 'out'}",
            "hub=me/drafter",
            "dry_run=true",
        )
    )
    assert not hub.files
    assert not hub.private
    assert "would send model.safetensors" in capsys.readouterr().out
    text = (tmp_path / "out" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "tiny"
    for fact in (
        "some.jsonl, 4 conversations, 99 answer tokens",
        "7 of 2 conversations",
        "0.500, 0.400",
        "vllm serve",
        "me/drafter",
        "Outrider 0.1.0",
    ):
        assert fact in text
    assert "<this folder>" not in text


def test_a_hub_name_that_is_not_there_or_not_shown_is_refused(hub, tmp_path):
    with pytest.raises(ValueError, match=r"the Hub shows no drafter 'me/nothing': check the spelling, or log in"):
        convert(run_of("trained=me/nothing", f"out={tmp_path / 'back'}"))


def test_an_interrupted_upload_is_called_so_and_goes_on(drafters, tmp_path, hub, monkeypatch):
    exported(drafters, "medusa", "vllm", tmp_path / "out")
    again = run_of(f"trained={tmp_path / 'out'}", "hub=me/drafter")
    hub.denied = True
    with pytest.raises(ValueError, match=r"does not let you write to me/drafter.*log in"):
        upload(again)
    hub.denied, hub.breaking = False, 99
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ValueError, match=r"was interrupted \(500\); run outrider-upload .* hub=me/drafter again"):
        upload(again)
    assert not hub.files
    hub.breaking = 0
    upload(again)
    assert hub.files["me/drafter"] == contents(tmp_path / "out")


def test_what_cannot_be_uploaded_is_refused_before_anything_is_sent(drafters, tmp_path):
    for wrong, message in (
        (("hub=me/drafter",), "name the folder of the export"),
        ((f"trained={drafters / 'medusa'}", "hub=me/drafter"), "so it is no export"),
        ((f"trained={drafters / 'medusa'}", "hub=drafter"), "is no Hub name of the form owner/name"),
    ):
        with pytest.raises(ValueError, match=message):
            upload(run_of(*wrong))
    with pytest.raises(ValueError, match="is no Hub name"):
        share(run_of(f"trained={drafters / 'medusa'}", "layout=vllm", f"out={tmp_path / 'out'}", "hub=a/b/c"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_takes_a_folder_as_its_first_word_and_ends_in_one_sentence(tmp_path):
    code, out, error = said(
        str(Path(__file__).parent.parent / "scripts" / "convert.py"), str(tmp_path), "out=back", cwd=tmp_path
    )
    assert (code, out) == (1, "")
    assert error.startswith(f"error: {tmp_path} holds no config.json")
    assert "Traceback" not in error
