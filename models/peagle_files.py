"""P-EAGLE in the layouts of vLLM and speculators: EAGLE-3's, with the learned feature and the token beside it.

vLLM reads either with `parallel_drafting`: the mask token in a round's later places, and the feature fused once.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from models.eagle3_files import VllmEagle3, flat_config, speculators_config
from models.ends import Ends
from models.peagle import PEagle

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # vLLM's names of the mask token, in the order of its reader


class VllmPEagle(VllmEagle3):
    """A flat config with vLLM's flags."""

    family = "models.peagle.PEagle"
    knobs = frozenset(
        {"taps", "vocabulary", "residual", "layers", "embedding", "mask_token"}
        | {"depths", "loss", "decay", "keep", "least", "head"}
    )
    told: ClassVar[dict[str, Any]] = {"parallel_drafting": True}
    trains_embedding = True

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        return "speculators_model_type" not in config and "mask_hidden" in set(names)

    def config(self, drafter: PEagle, ends: Ends, verifier: str, dtype: str) -> dict[str, Any]:
        return {**flat_config(drafter, ends, dtype, flags_of(drafter)), "mask_token_id": drafter.mask_token}

    def more_knobs(self, config: dict[str, Any], flags: dict[str, bool], ends: Ends) -> dict[str, Any]:
        """The mask token, where it is not the last of the vocabulary, which is meant anyway."""
        if flags["fc_norm"]:
            raise ValueError(
                "fc_norm: this drafter norms every tap before they are fused, which neither Outrider's P-EAGLE nor vLLM's reader of this layout does; it cannot be converted"
            )
        mask = next((config[name] for name in MASKS if config.get(name) is not None), None)
        if mask is None:
            raise ValueError(
                f"the config has no {MASKS[0]}, and a guess is only as good as the token it was trained beside; write it there"
            )
        return {} if mask == ends.vocabulary - 1 else {"mask_token": mask}


class SpeculatorsPEagle(VllmPEagle):
    """The `speculators` library's config around the same tensors; vLLM reads it too."""

    name = "speculators"
    ships_embedding = True  # as for EAGLE-3

    def claims(self, config: dict[str, Any], names: Iterable[str]) -> bool:
        return config.get("speculators_model_type") == "peagle"

    def config(self, drafter: PEagle, ends: Ends, verifier: str, dtype: str) -> dict[str, Any]:
        flags = flags_of(drafter)
        told = speculators_config("PEagleDraftModel", "peagle", drafter.depths, verifier, drafter, ends, dtype, flags)
        return {**told, "mask_token_id": drafter.mask_token}

    def more_knobs(self, config: dict[str, Any], flags: dict[str, bool], ends: Ends) -> dict[str, Any]:
        proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        depths = {"depths": tokens} if (tokens := proposals[0].get("speculative_tokens")) else {}
        return {**super().more_knobs(config, flags, ends), **depths}

    def llama(self, config: dict[str, Any]) -> dict[str, Any]:
        return config.get("transformer_layer_config") or {}


def flags_of(drafter: PEagle) -> dict[str, bool]:
    """EAGLE-3's switches: P-EAGLE has one of them, and no state that it could feed back."""
    return {
        "norm_before_residual": drafter.midlayer.residual == "after_norm",
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": False,
    }
