"""Medusa in the layouts of vLLM and of FasterDecoding.

K heads, V vocabulary, D width.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from models.drafter import Drafter
from models.ends import Ends
from models.medusa import Medusa
from models.served import Layout, Own, Served, fitted, stored_dtype


def layers_of(drafter: Medusa) -> int:
    """Residual layers of a head."""
    return sum(1 for _ in drafter.blocks[0].children())


class MedusaLayout(Layout):
    """What vLLM's and FasterDecoding's files have in common: K heads of residual blocks."""

    family = "models.medusa.Medusa"
    knobs = frozenset({"heads", "layers", "head", "vocabulary", "loss", "decay"})
    method = "medusa"
    block = ""  # their name of a block's weight or bias, by head k and layer j

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        return bool(self._places(names))

    def _places(self, names: Iterable[str]) -> set[tuple[int, int]]:
        """Head and layer of every block in the file."""
        pattern = (
            re.escape(self.block).replace(r"\{k\}", r"(\d+)").replace(r"\{j\}", r"(\d+)").replace(r"\{part\}", "weight")
        )
        found = [re.fullmatch(pattern, name) for name in names]
        return {(int(match[1]), int(match[2])) for match in found if match}

    def _size(self, names: Iterable[str]) -> tuple[int, int]:
        """How many heads of how many layers stand in the file. Raises ValueError where one is left out."""
        places = self._places(names)
        heads, layers = (max(place[axis] for place in places) + 1 if places else 0 for axis in (0, 1))
        if not places or len(places) != heads * layers:
            raise ValueError(
                f"{len(places)} blocks are no {heads} heads of {layers} layers each; download the file again"
            )
        return heads, layers

    def _names(self, drafter: Medusa) -> dict[str, str]:
        """Their names of this drafter's tensors, by ours."""
        names = {}
        for ours in drafter.state_dict():
            if match := re.fullmatch(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)", ours):
                names[ours] = self.block.format(k=match[1], j=match[2], part=match[3])
            elif match := re.fullmatch(r"lm_heads\.(\d+)\.weight", ours):
                names[ours] = self._head(int(match[1]), layers_of(drafter))
            else:
                names[ours] = ours.removeprefix("vocabulary.")
        return names

    def _head(self, head: int, layers: int) -> str:
        """Their name of a head's own output matrix."""
        return f"lm_heads.{head}.weight"


class VllmMedusa(MedusaLayout):
    """vLLM's own names: `blocks.k.layers.j`, and an output matrix for each head or one for all.

    A reduced vocabulary stands as token_map, the target's ids; vLLM takes it with one matrix for all only. vLLM 0.32.0 then wants
    its check of loaded weights off: it takes the token_map that it has just read for a parameter that was not.
    """

    name = "vllm"
    block = "blocks.{k}.layers.{j}.{part}"

    def write(self, drafter: Drafter, tensors: dict[str, Tensor], ends: Ends, verifier: str) -> Served:
        assert isinstance(drafter, Medusa)
        shared, ids = not len(drafter.lm_heads), drafter.vocabulary.ids
        if ids is not None and not shared:
            raise ValueError(
                "vLLM reads a reduced vocabulary only where one output matrix serves all heads, and these have their own; train with drafter.head=shared or drafter.vocabulary=null"
            )
        if shared and ends.bias is not None:
            raise ValueError(
                "vLLM's Medusa has no bias on its output matrix, and this target's head has one; train with drafter.head=own"
            )
        out = {self._names(drafter)[name]: value for name, value in tensors.items() if "vocabulary" not in name}
        if shared:
            out["lm_head.weight"] = drafter.vocabulary.rows(ends.head)
        if ids is not None:
            out["token_map"] = ids
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": ends.width,
            "vocab_size": ends.vocabulary,
            "num_heads": len(drafter.blocks),
            "num_hidden_layers": layers_of(drafter),
            "medusa_fc_bias": True,
            "original_lm_head": shared,
            "truncated_vocab_size": drafter.vocabulary.size,
            "logit_scale": ends.scale,
            "tie_word_embeddings": False,
            "dtype": stored_dtype(tensors),
        }
        return Served(config, out)

    def read(self, served: Served, ends: Ends) -> Own:
        config, tensors = served.config, dict(served.tensors)
        heads, layers = self._size(tensors)
        said = config.get("num_heads", heads), config.get("num_hidden_layers", layers)
        if said != (heads, layers):
            raise ValueError(
                f"config.json says {said[0]} heads of {said[1]} layers and the file holds {heads} of {layers}; correct the one that is wrong"
            )
        if config.get("medusa_fc_bias") is False:
            tensors |= self._blank_biases(tensors)
        size = self._vocabulary(config, tensors, ends)
        own = Medusa(ends, heads, layers, "own" if "lm_heads.0.weight" in tensors else "shared", size)
        names = self._names(own)
        one = tensors.pop("lm_head.weight", None)
        found = fitted(own, tensors, names)
        if one is not None and not torch.equal(one, own.vocabulary.rows(ends.head).to(one.dtype)):
            raise ValueError(
                "lm_head.weight is not the rows of this target's head: the drafter belongs to another target, or was trained with it; name that target"
            )
        knobs = {"heads": heads, "layers": layers, "head": "own" if len(own.lm_heads) else "shared", "vocabulary": size}
        return Own(knobs, [], found)

    def _blank_biases(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Zeros for blocks without bias."""
        names = [self.block.format(k=k, j=j, part="{}") for k, j in sorted(self._places(tensors))]
        return {
            name.format("bias"): tensors[name.format("weight")].new_zeros(len(tensors[name.format("weight")]))
            for name in names
        }

    def _vocabulary(self, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends) -> int | None:
        """The size of the reduced vocabulary, whose token_map becomes d2t and t2d in `tensors`; None where it is whole."""
        ids, size = tensors.pop("token_map", None), config.get("truncated_vocab_size") or ends.vocabulary
        if (ids is None) != (size == ends.vocabulary) or (ids is not None and len(ids) != size):
            raise ValueError(
                f"truncated_vocab_size is {size} of {ends.vocabulary} tokens and token_map lists {'none' if ids is None else len(ids)}; the two must agree"
            )
        if ids is None:
            return None
        if not 0 <= int(ids.min()) <= int(ids.max()) < ends.vocabulary:
            raise ValueError(
                f"token_map leads out of range: {int(ids.min())} to {int(ids.max())} of {ends.vocabulary} tokens"
            )
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.zeros(ends.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
        return size


class FasterMedusa(MedusaLayout):
    """FasterDecoding's: version 1, in which every head has its own output matrix, and 2, whose heads share the target's."""

    name = "medusa"
    file = "medusa_lm_head.safetensors"
    block = "{k}.{j}.linear.{part}"

    def _head(self, head: int, layers: int) -> str:
        return f"{head}.{layers}.weight"

    def write(self, drafter: Drafter, tensors: dict[str, Tensor], ends: Ends, verifier: str) -> Served:
        assert isinstance(drafter, Medusa)
        if drafter.vocabulary.ids is not None:
            raise ValueError(
                "FasterDecoding's Medusa speaks the target's whole vocabulary, and these heads a part of it; use layout=vllm, or train with drafter.vocabulary=null"
            )
        names = self._names(drafter)
        config = {
            "base_model_name_or_path": verifier,
            "medusa_num_heads": len(drafter.blocks),
            "medusa_num_layers": layers_of(drafter),
            "version": "1" if len(drafter.lm_heads) else "2",
        }
        return Served(config, {names[name]: value for name, value in tensors.items()})

    def read(self, served: Served, ends: Ends) -> Own:
        tensors = {re.sub(r"^medusa_heads?\.", "", name): value for name, value in served.tensors.items()}
        heads, layers = self._size(tensors)
        version, has = str(served.config.get("version", "1")), self._head(0, layers) in tensors
        if has and version == "2":
            raise ValueError(
                "config.json says version 2, whose heads share the target's output matrix, and the file brings one for each, as version 1 does; set version to 1"
            )
        if not has and version == "1":
            raise ValueError(
                "config.json says version 1, whose heads have output matrices of their own, and the file has none, as version 2 does; set version to 2"
            )
        notes = []
        said = served.config.get("medusa_num_heads", heads)
        if said != heads:
            notes.append(f"config.json says {said} heads and the file holds {heads}: all {heads} are taken")
        own = Medusa(ends, heads, layers, "own" if has else "shared")
        found = fitted(own, tensors, self._names(own))
        return Own(
            {"heads": heads, "layers": layers, "head": "own" if has else "shared", "vocabulary": None}, [], found, notes
        )
