"""EAGLE-1 as SafeAILab publishes it, flat, which vLLM reads where fc has no bias.

The output matrix is the target's own, and so is the vocabulary.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from models.drafter import Drafter
from models.eagle import Eagle
from models.eagle3_files import llama_config, require_geometry, require_targets_embedding
from models.ends import Ends
from models.served import Layout, Own, Served, fitted, stored_dtype


class SafeEagle(Layout):
    """A Llama config of one layer, and whether fc has a bias."""

    name = "eagle"
    family = "models.eagle.Eagle"
    knobs = frozenset({"fc_bias", "noise", "cross"})
    method: str | None = None

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        held = set(names)
        return {"fc.weight", "layers.0.mlp.down_proj.weight"} <= held and "layers.0.hidden_norm.weight" not in held

    def write(self, drafter: Drafter, tensors: dict[str, Tensor], ends: Ends, verifier: str) -> Served:
        assert isinstance(drafter, Eagle)
        require_plain_embeddings(ends)
        config = {"architectures": ["LlamaForCausalLM"], **llama_config(ends, stored_dtype(tensors))}
        return Served({**config, "bias": drafter.fc.bias is not None}, dict(tensors))

    def read(self, served: Served, ends: Ends) -> Own:
        require_plain_embeddings(ends)
        tensors, notes = dict(served.tensors), list[str]()
        require_geometry(served.config, ends, notes)
        if (embedding := tensors.pop("embed_tokens.weight", None)) is not None:
            require_targets_embedding(embedding, ends)
        knobs = {"fc_bias": bool(served.config.get("bias", True))}
        own = Eagle(ends, **knobs)
        return Own(knobs, [], fitted(own, tensors, {name: name for name in own.state_dict()}), notes)


def require_plain_embeddings(ends: Ends) -> None:
    """Raise ValueError where the target scales its embeddings, as Gemma does: no norm stands before fc to undo it."""
    if ends.embedding_scale != 1:
        raise ValueError(
            f"this target reads its embeddings times {ends.embedding_scale:g}, and servers give EAGLE-1 those that are stored; use EAGLE-3, which norms them"
        )


class VllmEagle(SafeEagle):
    """The same without a bias, for which vLLM has no room."""

    name = "vllm"
    method = "eagle"

    def write(self, drafter: Drafter, tensors: dict[str, Tensor], ends: Ends, verifier: str) -> Served:
        if "fc.bias" in tensors:
            raise ValueError(
                "vLLM's EAGLE-1 has no bias on fc, and this drafter has one; train with drafter.fc_bias=false, or use layout=eagle"
            )
        return super().write(drafter, tensors, ends, verifier)
