"""A drafter on disk: what is saved is what is loaded, and whatever does not fit is named."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from models.drafter import Budget, Committed
from models.ends import Ends
from models.medusa import Medusa
from models.sampling import Voice
from models.shelf import Card, family_class, load_drafter, read_card, require_target, save_drafter
from models.source import Identity

V, D = 20, 8
ENDS = Ends(torch.randn(V, D), torch.randn(V, D), None, LlamaConfig())
KNOBS = {"heads": 2, "vocabulary": 7}


def card(**changes: object) -> Card:
    target = {"name": "tiny", "fingerprint": "0123", "width": D, "vocabulary": V}
    return Card(**{"family": "models.medusa.Medusa", "knobs": KNOBS, "target": target, "taps": [], **changes})


def trained() -> Medusa:
    """A drafter whose weights are nothing that a new one has."""
    drafter = Medusa(ENDS, **KNOBS).eval()
    drafter.learn_vocabulary(torch.arange(V))
    for parameter in drafter.parameters():
        parameter.data = torch.randn_like(parameter)
    return drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved drafter."""
    save_drafter(trained(), card(), tmp_path / "drafter")
    return tmp_path / "drafter"


def proposed(drafter: Medusa) -> list[int]:
    hidden = torch.randn(9, 1, D, generator=torch.Generator().manual_seed(0))
    rows = torch.ones(9, dtype=torch.long)
    return drafter.propose(
        Committed(rows[:, None], rows, torch.empty(9, 1, 0), hidden, rows, rows > 0), None, Budget(), Voice()
    ).tokens.tolist()


def rewrite(folder: Path, **changes: object) -> None:
    """Change fields of the card; None drops one."""
    fields = {**yaml.safe_load((folder / "drafter.yaml").read_text()), **changes}
    (folder / "drafter.yaml").write_text(
        yaml.safe_dump({key: value for key, value in fields.items() if value is not None})
    )


def refused(folder: Path) -> str:
    """The one sentence in which the drafter is refused."""
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the sentence is what the caller looks at
        load_drafter(folder, read_card(folder), ENDS, torch.float32)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    drafter, written = trained(), card(tree=[[0], [0, 0]], training={"seed": 1}, acceptance={"greedy": [0.5]})
    save_drafter(drafter, written, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["drafter.yaml", "model.safetensors"]
    assert read_card(tmp_path) == written
    loaded = load_drafter(tmp_path, read_card(tmp_path), ENDS, torch.float32)
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert proposed(loaded) == proposed(drafter)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_saving_in_bf16_rounds_weights_and_leaves_ids_alone(tmp_path):
    drafter = trained()
    save_drafter(drafter, card(), tmp_path, torch.bfloat16)
    stored, own = load_file(tmp_path / "model.safetensors"), drafter.state_dict()
    assert stored["vocabulary.d2t"].dtype == torch.long
    assert stored["vocabulary.t2d"].dtype == torch.bool
    assert {value.dtype for name, value in stored.items() if "vocabulary" not in name} == {torch.bfloat16}
    assert all(torch.equal(stored[name], own[name].to(stored[name].dtype)) for name in own)
    assert load_drafter(tmp_path, card(), ENDS, torch.float32).lm_heads[0].weight.dtype == torch.float32


def test_every_tensor_that_does_not_fit_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["blocks.0.0.linear.bias"], tensors["vocabulary.d2t"]
    tensors |= {"lm_heads.0.weight": torch.zeros(3, 2), "extra.weight": torch.zeros(1)}
    save_file(tensors, folder / "model.safetensors")
    said = refused(folder)
    assert "blocks.0.0.linear.bias is missing" in said
    assert "vocabulary.d2t is missing" in said
    assert "extra.weight is not part of this drafter" in said
    assert "lm_heads.0.weight has shape [3, 2] instead of [7, 8]" in said
    assert "lm_heads.1" not in said


def test_a_truncated_file_is_called_damaged(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    assert "model.safetensors is damaged" in refused(folder)


def test_a_pickle_under_the_name_of_safetensors_is_not_opened(folder):
    torch.save(trained().state_dict(), folder / "model.safetensors")
    assert "is damaged or no safetensors file" in refused(folder)


def test_missing_weights_are_named(folder):
    (folder / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refused(folder)


def test_a_folder_of_pickles_is_no_drafter(tmp_path):
    torch.save(trained().state_dict(), tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin there is a pickle, which Outrider does not open" in refused(tmp_path)


def test_an_empty_or_missing_folder_is_no_drafter(tmp_path):
    assert "holds no drafter.yaml, so it is no trained drafter. Name a folder" in refused(tmp_path)
    assert "holds no drafter.yaml" in refused(tmp_path / "gone")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 99}, "has schema 99 and this version of Outrider reads 1"),
        ({"schema": None}, "has schema None"),
        ({"knobs": None, "taps": None}, "it lacks knobs, it lacks taps"),
        ({"shape": 3}, "shape is unknown"),
        ({"target": {"name": "tiny", "width": D}}, "its target lacks fingerprint"),
        ({"knobs": {"heads": 2, "headz": 2}}, "models.medusa.Medusa has no knob headz; it has heads, layers"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(folder, changes, message):
    rewrite(folder, **changes)
    assert message in refused(folder)


@pytest.mark.parametrize("text", ["", "- a\n", "just words", "{a: [", "\t:"])
def test_a_card_that_is_none_is_refused(folder, text):
    (folder / "drafter.yaml").write_text(text)
    assert "drafter.yaml" in refused(folder)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("os.system", "os.system is no drafter family"),
        ("models.medusa.Residual", "models.medusa.Residual is no drafter family"),
        ("builtins.eval", "builtins.eval is no drafter family"),
        ("models.nope.Nope", "there is no drafter family 'models.nope.Nope'"),
        ("models.medusa.Nope", "there is no drafter family"),
        ("Medusa", "there is no drafter family 'Medusa'"),
        ("", "there is no drafter family ''"),
    ],
)
def test_a_family_that_is_no_drafter_is_refused(folder, family, message):
    rewrite(folder, family=family)
    assert message in refused(folder)


def test_a_family_is_found_by_its_name():
    assert family_class("models.medusa.Medusa", ["heads"]) is Medusa


def test_a_drafter_of_another_target_is_refused():
    require_target(card(), Path("here"), Identity("any name", "0123", D, V))
    with pytest.raises(
        ValueError, match=r"here was trained for tiny \(width 8\); big has width 16. Set target= to the former"
    ):
        require_target(card(), Path("here"), Identity("big", "0123", 16, V))
    with pytest.raises(
        ValueError, match=r"here was trained for tiny \(fingerprint 0123\); these weights of twin.* are others \(4567\)"
    ):
        require_target(card(), Path("here"), Identity("twin", "4567", D, V))


def test_a_save_that_fails_half_way_leaves_no_card(tmp_path):
    (tmp_path / ".drafter.yaml.part").mkdir()  # the card cannot be written, after the weights were
    with pytest.raises(OSError, match="directory"):
        save_drafter(trained(), card(), tmp_path)
    assert not (tmp_path / "drafter.yaml").exists()
    assert "holds no drafter.yaml" in refused(tmp_path)


def test_a_save_that_fails_half_way_leaves_the_former_drafter_whole(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(yaml.YAMLError):
        save_drafter(trained(), card(training={"seed": object()}), folder)
    assert {name: (folder / name).read_bytes() for name in before} == before
