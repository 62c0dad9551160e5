"""EAGLE-3 in the layouts of vLLM, speculators, SGLang (SpecForge) and SafeAILab.

Some words mean two things:
  norm_output     vLLM and speculators: the next step reads the state after the final norm. SpecForge: the head applies that
                  norm, and the next step reads the state before it, always.
  eagle_aux_hidden_state_layer_ids     vLLM and speculators number hidden states as we do, 0 the embedding; SGLang counts
                  layers, so that its number is one less.
V vocabulary, Vd draft vocabulary, D width, L taps.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from models.drafter import Drafter
from models.eagle3 import Eagle3
from models.ends import Ends
from models.fused import Fused
from models.layer import layer_config
from models.served import Layout, Own, Served, fitted, stored_dtype
from models.shelf import family_class

FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
GEOMETRY = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)


class Eagle3Layout(Layout):
    """What the layouts of EAGLE-3 have in common: one set of tensors, under two names for the layer, and a Llama config.

    P-EAGLE's (models/peagle_files.py) are the same with a learned feature more.
    """

    family = "models.eagle3.Eagle3"
    knobs = frozenset(
        {"taps", "vocabulary", "fc_norm", "feedback", "residual", "steps", "loss", "decay", "start", "head"}
    )
    method: str | None = "eagle3"
    layer = "midlayer."
    maps_all = False  # whether d2t and t2d stand there for a whole vocabulary too
    ships_embedding = False  # whether the target's embedding stands there, where the drafter reads that
    trains_embedding = False  # whether an embedding in the file is the drafter's own where the config does not say

    def write(self, drafter: Drafter, tensors: dict[str, Tensor], ends: Ends, verifier: str) -> Served:
        assert isinstance(drafter, Fused)
        self.require(drafter, ends)
        names = self._names(drafter)
        out = {names[name]: value for name, value in tensors.items()}
        if self.maps_all and drafter.vocabulary.ids is None:
            out["d2t"] = torch.zeros(ends.vocabulary, dtype=torch.long)
            out["t2d"] = torch.ones(ends.vocabulary, dtype=torch.bool)
        if self.ships_embedding and drafter.embed_tokens is None:
            out["embed_tokens.weight"] = ends.embedding
        return Served(self.config(drafter, ends, verifier, stored_dtype(tensors)), out)

    def require(self, drafter: Any, ends: Ends) -> None:
        """Raise ValueError for what this layout cannot say."""

    def config(self, drafter: Any, ends: Ends, verifier: str, dtype: str) -> dict[str, Any]:
        """config.json, every flag written out."""
        raise NotImplementedError

    def flags(self, config: dict[str, Any]) -> dict[str, bool]:
        """FLAGS in vLLM's meaning, with the defaults that its reader takes."""
        return {flag: bool(config.get(flag, False)) for flag in FLAGS}

    def taps(self, config: dict[str, Any], ends: Ends) -> list[int]:
        """The hidden states it reads in our numbers."""
        raise NotImplementedError

    def llama(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of the config that describes the layer."""
        return config

    def read(self, served: Served, ends: Ends) -> Own:
        config, tensors, notes = served.config, dict(served.tensors), list[str]()
        flags, taps = self.flags(config), self.taps(config, ends)
        if flags["norm_before_fc"]:
            raise ValueError(
                "norm_before_fc: this drafter norms all taps together before they are fused, which Outrider's EAGLE-3 does not; it cannot be converted"
            )
        if taps != sorted(set(taps)) or not all(0 <= tap <= ends.config.num_hidden_layers for tap in taps):
            raise ValueError(
                f"its taps mean hidden states {taps}; they must ascend within 0 to {ends.config.num_hidden_layers}, as vLLM sorts them and fc's columns follow"
            )
        require_geometry(self.llama(config), ends, notes, several="layers" in self.knobs)
        size = config.get("draft_vocab_size") or ends.vocabulary
        self._vocabulary(size, tensors, ends, notes)
        knobs: dict[str, Any] = {
            "taps": taps,
            "vocabulary": None if size == ends.vocabulary else size,
            "residual": "after_norm" if flags["norm_before_residual"] else "before_norm",
            "layers": self.llama(config).get("num_hidden_layers", 1),
            "embedding": self._embedding(config, tensors, ends),
            **self.more_knobs(config, flags, ends),
        }
        if (fused := tensors.get("fc.weight")) is not None and fused.shape[-1] != len(taps) * ends.width:
            raise ValueError(
                f"fc.weight reads {fused.shape[-1] / ends.width:g} hidden states and the config names {len(taps)}: {taps}; correct the one that is wrong"
            )
        own = family_class(self.family, knobs)(ends, **knobs)
        return Own(knobs, taps, fitted(own, tensors, self._names(own)), notes)

    def more_knobs(self, config: dict[str, Any], flags: dict[str, bool], ends: Ends) -> dict[str, Any]:
        """Those that EAGLE-3 alone has."""
        feedback = "after_norm" if flags["norm_output"] else "before_norm"
        return {"fc_norm": flags["fc_norm"], "feedback": feedback}

    def _names(self, drafter: Drafter) -> dict[str, str]:
        """Their names of this drafter's tensors, by ours."""

        def theirs(name: str) -> str:
            name = re.sub(r"^midlayer\.", self.layer, name.removeprefix("vocabulary."))
            return re.sub(r"^above\.(\d+)\.", lambda match: f"layers.{int(match[1]) + 1}.", name)

        return {name: theirs(name) for name in drafter.state_dict()}

    def _embedding(self, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends) -> str:
        """Whose embedding it reads; a copy of the target's leaves `tensors`."""
        own = bool(config.get("embed_requires_grad", self.trains_embedding)) and "embedding" in self.knobs
        if own and "embed_tokens.weight" in tensors:
            return "trained"
        if (embedding := tensors.pop("embed_tokens.weight", None)) is not None:
            require_targets_embedding(embedding, ends)
        return "frozen"

    def _vocabulary(self, size: int, tensors: dict[str, Tensor], ends: Ends, notes: list[str]) -> None:
        """Check that d2t is there where it must be, make t2d of it where it is not, and drop both where they say nothing."""
        d2t = tensors.get("d2t")
        if size == ends.vocabulary:
            if tensors.pop("d2t", torch.zeros(1)).any() or not tensors.pop("t2d", torch.ones(1)).all():
                raise ValueError(
                    "d2t or t2d moves tokens though the draft vocabulary is the target's whole; correct draft_vocab_size"
                )
        elif d2t is None:
            raise ValueError(
                f"d2t is missing, and without it the {size} draft tokens would be taken for the target's first {size}"
            )
        elif "t2d" not in tensors:
            ids = d2t + torch.arange(len(d2t))
            tensors["t2d"] = torch.zeros(ends.vocabulary, dtype=torch.bool).index_fill(
                0, ids.clamp(0, ends.vocabulary - 1), True
            )
            notes.append("t2d is missing and was made from d2t")


class VllmEagle3(Eagle3Layout):
    """A flat config with vLLM's flags; the layer is called layers.0."""

    name = "vllm"
    knobs = Eagle3Layout.knobs | {"layers", "embedding"}
    layer = "layers.0."

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        held = set(names)
        flat = "speculators_model_type" not in config and "mask_hidden" not in held
        return flat and {"fc.weight", "layers.0.hidden_norm.weight"} <= held

    def config(self, drafter: Any, ends: Ends, verifier: str, dtype: str) -> dict[str, Any]:
        return flat_config(drafter, ends, dtype, vllm_flags(drafter))

    def taps(self, config: dict[str, Any], ends: Ends) -> list[int]:
        return [int(tap) for tap in config.get("eagle_aux_hidden_state_layer_ids") or usual_taps(ends)]


class SpeculatorsEagle3(VllmEagle3):
    """The `speculators` library's config around the same tensors; vLLM reads it too.

    The target's embedding is written out: speculators 0.9.0 under transformers 5.19 reads zeros where it is left out, without
    a word, though it means to take the target's. vLLM shares it with the target, having compared the two.
    """

    name = "speculators"
    ships_embedding = True

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        return config.get("speculators_model_type") == "eagle3"

    def config(self, drafter: Any, ends: Ends, verifier: str, dtype: str) -> dict[str, Any]:
        return speculators_config("Eagle3DraftModel", "eagle3", 3, verifier, drafter, ends, dtype, vllm_flags(drafter))

    def flags(self, config: dict[str, Any]) -> dict[str, bool]:
        return {**super().flags(config), "norm_before_residual": bool(config.get("norm_before_residual", True))}

    def llama(self, config: dict[str, Any]) -> dict[str, Any]:
        return config.get("transformer_layer_config") or {}


class SglangEagle3(Eagle3Layout):
    """SpecForge's flat config as SGLang serves it: three taps, and what is fed back is the state before the final norm."""

    name = "sglang"
    maps_all = True

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        return "midlayer.hidden_norm.weight" in set(names) and config.get("architectures") == ["LlamaForCausalLMEagle3"]

    def require(self, drafter: Eagle3, ends: Ends) -> None:
        if drafter.feedback == "after_norm":
            raise ValueError(
                "SGLang feeds back the state before the final norm, and this drafter was trained on the one after it; use layout=vllm or speculators, or train with drafter.feedback=before_norm"
            )
        if drafter.midlayer.residual == "after_norm":
            raise ValueError(
                "SGLang adds attention's output to the feature before its norm, and this drafter was trained with drafter.residual=after_norm; use layout=vllm or speculators"
            )
        if len(drafter.taps) != 3 or drafter.taps[0] == 0:
            raise ValueError(
                f"SGLang reads three hidden states above the embedding, and this drafter {list(drafter.taps)}; use layout=vllm or speculators"
            )

    def config(self, drafter: Eagle3, ends: Ends, verifier: str, dtype: str) -> dict[str, Any]:
        # no norm_output: it would be true here, in SpecForge's meaning, and vLLM, which reads this file too, takes it in its own
        layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in drafter.taps]}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **llama_config(ends, dtype),
            "draft_vocab_size": drafter.vocabulary.size,
            "target_hidden_size": ends.width,
            "norm_before_residual": False,
            "fc_norm": bool(len(drafter.fc_norm)),
            "eagle_config": layers,
            "eagle_aux_hidden_state_layer_ids": list(drafter.taps),  # vLLM looks here first, and numbers as we do
            "num_aux_hidden_states": len(drafter.taps),
        }

    def flags(self, config: dict[str, Any]) -> dict[str, bool]:
        if config.get("norm_output") is False:
            raise ValueError(
                "norm_output is false, in SpecForge's meaning: its head reads the state before the final norm, which Outrider's EAGLE-3 does not; it cannot be converted"
            )
        return {**super().flags(config), "norm_output": False}

    def taps(self, config: dict[str, Any], ends: Ends) -> list[int]:
        layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return usual_taps(ends) if layers is None else [int(layer) + 1 for layer in layers]


class SafeEagle3(Eagle3Layout):
    """SafeAILab's: the usual three taps, no flags, a head width of the width over the heads."""

    name = "eagle"
    maps_all = True

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        return "midlayer.hidden_norm.weight" in set(names)

    def require(self, drafter: Eagle3, ends: Ends) -> None:
        layer = layer_config(ends.config, ends.width)
        plain = drafter.feedback == drafter.midlayer.residual == "before_norm" and not len(drafter.fc_norm)
        if not plain:
            raise ValueError(
                "SafeAILab's EAGLE-3 has no fc_norm, and norms after what it feeds back and adds to; this drafter was trained otherwise: use layout=vllm or speculators"
            )
        if list(drafter.taps) != usual_taps(ends):
            raise ValueError(
                f"SafeAILab's EAGLE-3 reads hidden states {usual_taps(ends)} of this target, and this drafter {list(drafter.taps)}; use another layout"
            )
        if layer.head_dim != ends.width // layer.num_attention_heads:
            raise ValueError(
                f"SafeAILab's EAGLE-3 has heads of width / heads = {ends.width // layer.num_attention_heads}, and this target's are {layer.head_dim} wide; use another layout"
            )

    def config(self, drafter: Eagle3, ends: Ends, verifier: str, dtype: str) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            **llama_config(ends, dtype),
            "draft_vocab_size": drafter.vocabulary.size,
        }

    def flags(self, config: dict[str, Any]) -> dict[str, bool]:
        return dict.fromkeys(FLAGS, False)

    def taps(self, config: dict[str, Any], ends: Ends) -> list[int]:
        return usual_taps(ends)


def flat_config(drafter: Fused, ends: Ends, dtype: str, flags: dict[str, bool]) -> dict[str, Any]:
    """config.json as vLLM reads it where no program's name is in it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_config(ends, dtype, len(drafter.stack)),
        "draft_vocab_size": drafter.vocabulary.size,
        "target_hidden_size": ends.width,
        "eagle_aux_hidden_state_layer_ids": list(drafter.taps),
        "num_aux_hidden_states": len(drafter.taps),  # without it vLLM takes fc for three
        **flags,
        "embed_requires_grad": drafter.embed_tokens is not None,
    }


def speculators_config(
    architecture: str,
    kind: str,
    tokens: int,
    verifier: str,
    drafter: Fused,
    ends: Ends,
    dtype: str,
    flags: dict[str, bool],
) -> dict[str, Any]:
    """config.json as `speculators` writes it for its class `architecture`."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    layer = llama_config(ends, dtype, len(drafter.stack))
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": list(ends.config.architectures or [])},
        },
        "draft_vocab_size": drafter.vocabulary.size,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": list(drafter.taps),
        **flags,
        "embed_requires_grad": drafter.embed_tokens is not None,
        # vLLM hands these keys to its model, which otherwise takes fc for three hidden states
        "transformer_layer_config": {**layer, "num_aux_hidden_states": len(drafter.taps)},
    }


def vllm_flags(drafter: Eagle3) -> dict[str, bool]:
    """FLAGS in vLLM's meaning."""
    values = (
        drafter.midlayer.residual == "after_norm",
        False,
        drafter.feedback == "after_norm",
        bool(len(drafter.fc_norm)),
    )
    return dict(zip(FLAGS, values, strict=True))


def usual_taps(ends: Ends) -> list[int]:
    """What every server taps where a config does not say."""
    depth = ends.config.num_hidden_layers
    return [2, depth // 2, depth - 3]


def llama_config(ends: Ends, dtype: str, layers: int = 1) -> dict[str, Any]:
    """The drafter's layers as a Llama config, its rotary embedding in both spellings; the vocabulary is the target's."""
    layer, target = layer_config(ends.config, ends.width), ends.config
    rope = rope_of(layer.to_dict())
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "vocab_size": ends.vocabulary,
        **{key: getattr(layer, key) for key in GEOMETRY},
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "max_position_embeddings": layer.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pretraining_tp": 1,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        "use_cache": True,
        "dtype": dtype,
    }


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config, in whichever spelling. Raises ValueError where its two spellings disagree."""
    new, theta = config.get("rope_parameters") or {}, config.get("rope_theta")
    old = {key: value for key, value in (config.get("rope_scaling") or {}).items() if key != "type"}
    old |= {"rope_type": old.get("rope_type") or (config.get("rope_scaling") or {}).get("type", "default")}
    if new and theta is not None and float(new.get("rope_theta", theta)) != float(theta):
        raise ValueError(
            f"rope_parameters says a rope_theta of {new['rope_theta']:g} and rope_theta says {theta:g}; correct the one that is wrong"
        )
    chosen = {"rope_type": "default", **(new or old)}
    return {**chosen, "rope_theta": float(chosen.get("rope_theta", 10000.0 if theta is None else theta))}


def require_geometry(config: dict[str, Any], ends: Ends, notes: list[str], several: bool = False) -> None:
    """Raise ValueError where a foreign layer is not of the shape that ours takes from the target.

    `several`: there may be more than one.
    """
    layer = layer_config(ends.config, ends.width)
    if config.get("vocab_size", ends.vocabulary) != ends.vocabulary:
        raise ValueError(
            f"vocab_size is {config['vocab_size']} and the target has {ends.vocabulary} tokens; the drafter belongs to another target"
        )
    heads, width = config.get("num_attention_heads", layer.num_attention_heads), config.get("hidden_size", ends.width)
    theirs = {
        "head_dim": width // heads,
        "num_key_value_heads": heads,
        **{key: value for key, value in config.items() if value is not None},
    }
    apart = [
        f"{key} {theirs[key]} (target {getattr(layer, key)})"
        for key in GEOMETRY
        if key in theirs and theirs[key] != getattr(layer, key)
    ]
    ours, rope = rope_of(layer.to_dict()), rope_of(config)
    apart += [
        f"{key} {rope.get(key)} (target {ours.get(key)})"
        for key in sorted(ours.keys() | rope.keys())
        if rope.get(key) != ours.get(key)
    ]
    if config.get("num_hidden_layers", 1) != 1 and not several:
        apart.append(f"{config['num_hidden_layers']} layers (in this layout it has 1)")
    if config.get("attention_bias") or config.get("mlp_bias"):
        apart.append("biases (Outrider's has none)")
    if apart:
        raise ValueError(
            f"the drafter's layer differs from what Outrider takes from this target: {', '.join(apart)}; it cannot be converted for it"
        )
    if ("rope_parameters" in config) != ("rope_theta" in config):
        notes.append(
            "its config has the rotary settings in one spelling only, which older or newer servers do not read; export it again to write both"
        )
    if (most := config.get("max_position_embeddings")) not in (None, layer.max_position_embeddings):
        notes.append(
            f"it was made for {most} positions and the target for {layer.max_position_embeddings}: expect less beyond the shorter"
        )


def require_targets_embedding(embedding: Tensor, ends: Ends) -> None:
    """Raise ValueError where a drafter brings an embedding that is not the target's."""
    if embedding.shape != ends.embedding.shape or not torch.equal(embedding, ends.embedding.to(embedding.dtype)):
        raise ValueError(
            "embed_tokens.weight is not this target's embedding, and the config does not say that the drafter trained its own (embed_requires_grad); it belongs to another target"
        )
