"""Layouts: what is written is read back to the same bytes, every flag keeps its meaning, and whatever does not fit is named."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig

from models.drafter import Drafter
from models.eagle3 import Eagle3
from models.eagle3_files import VllmEagle3
from models.ends import Ends
from models.layouts import LAYOUTS, layout_for, recognised
from models.medusa import Medusa
from models.served import Layout, Own, Served
from models.shelf import family_class, packed
from test_eagle3 import Case, unrolled

GOLDEN = Path(__file__).parent / "golden"
V, D, DEPTH = 40, 16, 9
CONFIG = LlamaConfig(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=24,
    num_hidden_layers=DEPTH,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
    architectures=["LlamaForCausalLM"],
)
MEDUSA, EAGLE, EAGLE3 = "models.medusa.Medusa", "models.eagle.Eagle", "models.eagle3.Eagle3"
PEAGLE = "models.peagle.PEagle"


@functools.cache
def ends() -> Ends:
    draw = torch.Generator().manual_seed(0)
    return Ends(torch.randn(V, D, generator=draw), torch.randn(V, D, generator=draw), None, CONFIG)


def made(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **knobs: Any
) -> tuple[Drafter, dict[str, Tensor]]:
    """A drafter of random weights, and its tensors as they would be stored."""
    draw = torch.Generator().manual_seed(seed)
    drafter = family_class(family, knobs)(ends(), **knobs)
    drafter.learn_vocabulary(torch.rand(V, generator=draw))
    for parameter in drafter.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    state = drafter.state_dict()
    return drafter, {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}


def written(layout: Layout, *of: Any) -> Served:
    """What is served, by way of the bytes that a file would hold: JSON and safetensors."""
    served = layout.write(*of, ends(), "owner/target")
    assert all(value.dtype != torch.float64 for value in served.tensors.values())
    return Served(json.loads(json.dumps(served.config)), {key: value.clone() for key, value in served.tensors.items()})


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return packed(ours) == packed(theirs)


def round_trip(layout: Layout, drafter: Drafter, tensors: dict[str, Tensor], knobs: dict[str, Any]) -> None:
    served = written(layout, drafter, tensors)
    assert recognised(served, layout.name) is layout
    own = layout.read(served, ends())
    assert same(own.tensors, tensors)
    assert {key: own.knobs[key] for key in knobs} == knobs
    assert own.taps == list(drafter.taps)
    again = family_class(layout.family, own.knobs)(ends(), **own.knobs)
    again.load_state_dict(own.tensors)
    back = written(layout, again, own.tensors)
    assert same(back.tensors, served.tensors)
    assert back.config == served.config


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
EMBEDDINGS = st.sampled_from(["frozen", "trained"])
TAPS = st.lists(st.integers(0, DEPTH), min_size=1, max_size=4, unique=True).map(sorted) | st.just(
    [2, DEPTH // 2, DEPTH - 3]
)


@settings(max_examples=6, deadline=None)
@given(
    heads=st.integers(1, 3),
    layers=st.integers(1, 2),
    head=st.sampled_from(["own", "shared"]),
    vocabulary=st.none() | st.integers(1, V - 1),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_medusa_comes_back_from_every_layout_to_the_same_bytes(heads, layers, head, vocabulary, dtype, seed):
    knobs = {"heads": heads, "layers": layers, "head": head, "vocabulary": vocabulary}
    drafter, tensors = made(MEDUSA, seed, dtype, **knobs)
    says = {"vllm": vocabulary is None or head == "shared", "medusa": vocabulary is None}
    for name, whole in says.items():
        layout = layout_for(name, MEDUSA)
        if whole:
            round_trip(layout, drafter, tensors, knobs)
        else:
            with pytest.raises(ValueError, match=r"reduced vocabulary|a part of it"):
                written(layout, drafter, tensors)


@settings(max_examples=6, deadline=None)
@given(
    taps=TAPS,
    vocabulary=st.none() | st.integers(1, V - 1),
    fc_norm=st.booleans(),
    feedback=st.sampled_from(["before_norm", "after_norm"]),
    residual=st.sampled_from(["before_norm", "after_norm"]),
    layers=st.integers(1, 3),
    embedding=EMBEDDINGS,
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_eagle3_comes_back_from_every_layout_to_the_same_bytes(
    taps, vocabulary, fc_norm, feedback, residual, layers, embedding, dtype, seed
):
    knobs = {"taps": taps, "vocabulary": vocabulary, "fc_norm": fc_norm, "feedback": feedback, "residual": residual}
    more = {"layers": layers, "embedding": embedding}
    for name in ("vllm", "speculators"):
        round_trip(layout_for(name, EAGLE3), *made(EAGLE3, seed, dtype, **knobs, **more), {**knobs, **more})
    for name in ("sglang", "eagle"):
        told = [f"{key}={more[key]}" for key, usual in (("embedding", "frozen"), ("layers", 1)) if more[key] != usual]
        if told:
            with pytest.raises(ValueError, match=f"layout={name} has no word for {', '.join(told)};"):
                layout_for(name, EAGLE3).require_said(more)
    drafter, tensors = made(EAGLE3, seed, dtype, **knobs)
    before = feedback == residual == "before_norm"
    says = {
        "sglang": before and len(taps) == 3 and taps[0] > 0,
        "eagle": before and not fc_norm and taps == [2, DEPTH // 2, DEPTH - 3],
    }
    for name, whole in says.items():
        layout = layout_for(name, EAGLE3)
        if whole:
            round_trip(layout, drafter, tensors, knobs)
        else:
            with pytest.raises(ValueError, match=r"use (layout=vllm|another layout)"):
                written(layout, drafter, tensors)


@settings(max_examples=6, deadline=None)
@given(
    taps=TAPS,
    vocabulary=st.none() | st.integers(1, V - 1),
    residual=st.sampled_from(["before_norm", "after_norm"]),
    layers=st.integers(1, 3),
    embedding=EMBEDDINGS,
    mask_token=st.none() | st.integers(0, V - 2),
    depths=st.integers(1, 9),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_peagle_comes_back_from_every_layout_to_the_same_bytes(mask_token, depths, dtype, seed, **knobs):
    drafter, tensors = made(PEAGLE, seed, dtype, mask_token=mask_token, depths=depths, **knobs)
    masked = {} if mask_token is None else {"mask_token": mask_token}
    round_trip(layout_for("vllm", PEAGLE), drafter, tensors, {**knobs, **masked})
    round_trip(layout_for("speculators", PEAGLE), drafter, tensors, {**knobs, **masked, "depths": depths})


def test_a_p_eagle_that_does_not_fit_is_refused_with_what_is_wrong():
    small = {"vocabulary": 12, "taps": [2, 4, 6], "layers": 2}
    assert "the config has no mask_token_id" in broken(
        lambda files: files.config.pop("mask_token_id"), "vllm", PEAGLE, **small
    )
    assert "fc_norm: this drafter norms every tap" in broken(
        lambda files: files.config.update(fc_norm=True), "speculators", PEAGLE, **small
    )
    assert "mask_hidden is missing" in broken(
        lambda files: files.tensors.pop("mask_hidden"), "speculators", PEAGLE, **small
    )


def test_speculators_is_given_the_targets_embedding_and_vllms_own_layout_is_not():
    for family in (EAGLE3, PEAGLE):
        shipped = served("speculators", family, **{"vocabulary": 12, "taps": [2, 4, 6]}).tensors["embed_tokens.weight"]
        assert torch.equal(shipped, ends().embedding)
        assert "embed_tokens.weight" not in served("vllm", family, **{"vocabulary": 12, "taps": [2, 4, 6]}).tensors


@settings(max_examples=6, deadline=None)
@given(fc_bias=st.booleans(), dtype=DTYPES, seed=st.integers(0, 99))
def test_eagle_comes_back_from_both_layouts_to_the_same_bytes(fc_bias, dtype, seed):
    drafter, tensors = made(EAGLE, seed, dtype, fc_bias=fc_bias)
    round_trip(layout_for("eagle", EAGLE), drafter, tensors, {"fc_bias": fc_bias})
    if not fc_bias:
        return round_trip(layout_for("vllm", EAGLE), drafter, tensors, {"fc_bias": False})
    with pytest.raises(ValueError, match=r"no bias on fc, and this drafter has one; train with drafter\.fc_bias=false"):
        written(layout_for("vllm", EAGLE), drafter, tensors)


def test_a_reduced_vocabulary_has_no_word_in_eagles_layouts():
    with pytest.raises(ValueError, match="layout=vllm has no word for vocabulary=12"):
        layout_for("vllm", EAGLE).require_said({"vocabulary": 12})


def test_every_layout_is_of_a_family_that_there_is():
    assert all(issubclass(family_class(layout.family, []), Drafter) for layout in LAYOUTS)
    assert len({(layout.name, layout.family) for layout in LAYOUTS}) == len(LAYOUTS)


# --- what other programs wrote ---------------------------------------------------------------------------------------


def golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Served, Ends]:
    """Flags, all tensors, and the drafter as the program keeps it, with the ends of its target."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        told = {key: json.loads(value) for key, value in file.metadata().items()}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    draft = {key.removeprefix("draft."): value for key, value in tensors.items() if key.startswith("draft.")}
    draft = {key: value for key, value in draft.items() if not key.startswith("verifier_")}
    embedding = draft["embed_tokens.weight"]
    config = LlamaConfig(**told["config"] | {"num_hidden_layers": DEPTH})
    return told, tensors, Served(told["config"], draft), Ends(embedding, embedding, None, config)


def logits_of(own: Own, ends: Ends, told: dict[str, Any], tensors: dict[str, Tensor], steps: int) -> list[Tensor]:
    """What our drafter of these weights says at every step and position."""
    drafter = Eagle3(ends, **own.knobs)
    drafter.load_state_dict(own.tensors)
    return unrolled(Case(told, tensors, drafter), steps)


@pytest.mark.parametrize(
    "name", [*(f"eagle3_speculators_out{o}_res{r}" for o in (0, 1) for r in (0, 1)), "eagle31_speculators"]
)
def test_a_drafter_of_speculators_means_here_what_it_means_there(name):
    told, tensors, draft, target = golden(name)
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 128,
        "transformer_layer_config": draft.config,
        **told["flags"],
    }
    config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 6]
    own = layout_for("speculators", EAGLE3).read(Served(config, draft.tensors), target)
    for step, logits in enumerate(logits_of(own, target, told, tensors, 4)):
        wanted = tensors[f"expected.logits.{step}"]
        torch.testing.assert_close(logits[0, : len(wanted)], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["eagle3_ttt", "eagle3_fcnorm_ttt"])
def test_a_drafter_of_specforge_means_here_what_it_means_there(name):
    told, tensors, draft, target = golden(name)
    config = {**draft.config, "architectures": ["LlamaForCausalLMEagle3"], "norm_output": True, "draft_vocab_size": 128}
    config["fc_norm"] = "fcnorm" in name
    served = Served(config, draft.tensors)
    own = recognised(served).read(served, target)
    assert own.taps == [2, 4, 6]
    for step, logits in enumerate(logits_of(own, target, told, tensors, 7)):
        torch.testing.assert_close(logits, tensors[f"expected.logits.{step}"], atol=1e-5, rtol=1e-5)


# --- what does not fit ----------------------------------------------------------------------------------------------


def served(name: str, family: str, **knobs: Any) -> Served:
    """A good export."""
    return written(layout_for(name, family), *made(family, **knobs))


def refused(files: Served, name: str, family: str) -> str:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the sentence is what the caller looks at
        layout_for(name, family).read(files, ends())
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


SMALL = {"vocabulary": 12, "taps": [2, 4, 6]}


def test_every_tensor_that_does_not_fit_is_named_as_the_file_calls_it():
    files = served("vllm", EAGLE3, **SMALL)
    del files.tensors["layers.0.self_attn.q_proj.weight"]
    files.tensors |= {"extra": torch.ones(1), "norm.weight": torch.ones(D + 1)}
    said = refused(files, "vllm", EAGLE3)
    assert "layers.0.self_attn.q_proj.weight is missing" in said
    assert "extra is not part of this drafter" in said
    assert f"norm.weight has shape [{D + 1}] instead of [{D}]" in said


def broken(change: Callable[[Served], object], name: str = "vllm", family: str = EAGLE3, **knobs: Any) -> str:
    """How an export is refused once `change` has spoilt it."""
    files = served(
        name, family, **(knobs or (SMALL if family == EAGLE3 else {"heads": 2, "head": "shared", "vocabulary": 12}))
    )
    change(files)
    return refused(files, name, family)


def positions(files: Served) -> None:
    """d2t as ids instead of offsets."""
    files.tensors["d2t"] = files.tensors["d2t"] + torch.arange(12)


def unsorted(files: Served) -> None:
    """The first two draft tokens swapped."""
    ids = (files.tensors["d2t"] + torch.arange(12))[[1, 0, *range(2, 12)]]
    files.tensors["d2t"] = ids - torch.arange(12)


BROKEN_EAGLE3 = {
    "d2t is missing": lambda files: files.tensors.pop("d2t"),
    "d2t holds the target's token ids instead of offsets": positions,
    "d2t is not sorted": unsorted,
    "d2t leads out of range": lambda files: files.tensors["d2t"].add_(V),
    "t2d marks 40 tokens and d2t lists 12": lambda files: files.tensors["t2d"].fill_(True),
    "its taps mean hidden states \\[4, 2, 6\\]; they must ascend": lambda files: files.config.update(
        eagle_aux_hidden_state_layer_ids=[4, 2, 6]
    ),
    "fc.weight reads 3 hidden states and the config names 2": lambda files: files.config.update(
        eagle_aux_hidden_state_layer_ids=[2, 4]
    ),
    "head_dim 8 \\(target 4\\)": lambda files: files.config.update(head_dim=8),
    "rope_parameters says a rope_theta of 50000 and rope_theta says 10000": lambda files: files.config.update(
        rope_theta=1e4
    ),
    "rope_theta 10000.0 \\(target 50000.0\\)": lambda files: [
        files.config.pop(key) for key in ("rope_theta", "rope_parameters")
    ],
    "vocab_size is 12 and the target has 40": lambda files: files.config.update(vocab_size=12),
    "norm_before_fc": lambda files: files.config.update(norm_before_fc=True),
    "layers.1.mlp.down_proj.weight is missing": lambda files: files.config.update(num_hidden_layers=2),
    "norm.weight is empty": lambda files: files.tensors.update({"norm.weight": torch.empty(0, D)}),
    "norm.weight holds NaN or infinity": lambda files: files.tensors["norm.weight"].mul_(torch.nan),
    "embed_tokens.weight is not this target's embedding": lambda files: files.tensors.update(
        {"embed_tokens.weight": torch.ones(V, D)}
    ),
}


@pytest.mark.parametrize("message", BROKEN_EAGLE3)
def test_an_eagle3_that_does_not_fit_is_refused_with_what_is_wrong(message):
    assert re.search(message, broken(BROKEN_EAGLE3[message]))


BROKEN_MEDUSA = {
    "config.json says 5 heads of 1 layers and the file holds 2 of 1": lambda files: files.config.update(num_heads=5),
    "1 blocks are no 2 heads of 1 layers": lambda files: [
        files.tensors.pop(f"blocks.0.layers.0.{part}") for part in ("weight", "bias")
    ],
    "truncated_vocab_size is 40 of 40 tokens and token_map lists 12": lambda files: files.config.update(
        truncated_vocab_size=V
    ),
    "truncated_vocab_size is 12 of 40 tokens and token_map lists none": lambda files: files.tensors.pop("token_map"),
    "token_map leads out of range: 30 to": lambda files: files.tensors["token_map"].add_(
        30 - int(files.tensors["token_map"].min())
    ),
    "lm_head.weight is not the rows of this target's head": lambda files: files.tensors["lm_head.weight"].add_(1),
    "blocks.1.layers.0.bias holds NaN": lambda files: files.tensors["blocks.1.layers.0.bias"].fill_(torch.nan),
}


@pytest.mark.parametrize("message", BROKEN_MEDUSA)
def test_medusa_heads_that_do_not_fit_are_refused_with_what_is_wrong(message):
    assert re.search(message, broken(BROKEN_MEDUSA[message], "vllm", MEDUSA))


@pytest.mark.parametrize(
    ("head", "version", "message"),
    [("own", "2", "says version 2.* set version to 1"), ("shared", "1", "says version 1.* set version to 2")],
)
def test_a_file_of_one_medusa_version_in_a_folder_of_the_other_is_refused(head, version, message):
    said = broken(lambda files: files.config.update(version=version), "medusa", MEDUSA, heads=2, head=head)
    assert re.search(message, said)


def test_version_1_heads_are_counted_in_the_file_as_published_configs_count_wrong():
    files = served("medusa", MEDUSA, heads=3)
    files.config.update(medusa_num_heads=2)
    own = layout_for("medusa", MEDUSA).read(files, ends())
    assert own.knobs["heads"] == 3
    assert own.notes == ["config.json says 2 heads and the file holds 3: all 3 are taken"]


def test_blocks_without_bias_are_read_with_zeros():
    files = served("vllm", MEDUSA, heads=1)
    del files.tensors["blocks.0.layers.0.bias"]
    files.config.update(medusa_fc_bias=False)
    assert not layout_for("vllm", MEDUSA).read(files, ends()).tensors["blocks.0.0.linear.bias"].any()


def test_sglang_and_vllm_number_the_same_hidden_states_differently_in_one_file():
    files = served("sglang", EAGLE3, **SMALL)
    assert files.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert files.config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert "norm_output" not in files.config


def test_an_old_rope_spelling_alone_is_read_and_named():
    files = served("sglang", EAGLE3, **SMALL)
    del files.config["rope_parameters"]
    notes = layout_for("sglang", EAGLE3).read(files, ends()).notes
    assert [note for note in notes if "one spelling only" in note]


def test_a_drafter_made_for_fewer_positions_than_the_target_is_read_and_says_so():
    files = served("vllm", EAGLE3, **SMALL)
    files.config["max_position_embeddings"] = 32
    (note,) = layout_for("vllm", EAGLE3).read(files, ends()).notes
    assert note == "it was made for 32 positions and the target for 64: expect less beyond the shorter"


def test_a_missing_t2d_is_made_from_d2t():
    files = served("sglang", EAGLE3, **SMALL)
    t2d = files.tensors.pop("t2d")
    own = layout_for("sglang", EAGLE3).read(files, ends())
    assert torch.equal(own.tensors["vocabulary.t2d"], t2d)
    assert own.notes == ["t2d is missing and was made from d2t"]


def test_a_layout_that_the_family_does_not_have_is_refused():
    with pytest.raises(ValueError, match="Medusa has no layout 'sglang'; it has medusa, vllm"):
        layout_for("sglang", MEDUSA)
    for family in ("models.hydra.Hydra", "models.table.Table"):
        with pytest.raises(
            ValueError, match=r"no server known here reads this family: .*\(Eagle, Eagle3, Medusa, PEagle\)"
        ):
            layout_for("vllm", family)
    with pytest.raises(ValueError, match="there is no layout 'tgi'; use eagle, medusa, sglang, speculators, vllm"):
        recognised(served("vllm", EAGLE3, **SMALL), "tgi")
    with pytest.raises(ValueError, match="this is no known layout of a drafter: it holds a"):
        recognised(Served({}, {"a": torch.ones(1)}))


def test_a_knob_that_a_layout_has_no_word_for_is_refused_unless_it_is_as_usual():
    class Curt(VllmEagle3):
        knobs = frozenset({"taps"})

    Curt().require_said({"taps": [1, 2], "fc_norm": False})
    with pytest.raises(
        ValueError, match=r"layout=vllm has no word for fc_norm=True, residual=after_norm; train without"
    ):
        Curt().require_said({"taps": [1, 2], "fc_norm": True, "residual": "after_norm"})


def test_embeddings_that_the_target_scales_have_no_place_in_eagle_1s_layouts():
    scaled = Ends(ends().embedding, ends().head, None, CONFIG)
    scaled.embedding_scale = 4.0
    for name in ("eagle", "vllm"):
        with pytest.raises(ValueError, match=r"embeddings times 4, .* use EAGLE-3"):
            layout_for(name, EAGLE).write(*made(EAGLE, fc_bias=False), scaled, "")
        with pytest.raises(ValueError, match=r"embeddings times 4"):
            layout_for(name, EAGLE).read(served(name, EAGLE, fc_bias=False), scaled)


def test_a_bias_on_the_targets_head_has_no_place_in_vllms_shared_medusa():
    biased = Ends(ends().embedding, ends().head, torch.ones(V), CONFIG)
    drafter = Medusa(biased, 1, head="shared")
    with pytest.raises(ValueError, match=r"this target.s head has one; train with drafter\.head=own"):
        layout_for("vllm", MEDUSA).write(drafter, drafter.state_dict(), biased, "")
