"""A PEFT adapter that a target wears: which one it is, whether it fits, and the target with it, merged or not.

PEFT itself applies and merges it; what is known of it beforehand is read from its two files.
"""

import hashlib
import json
import re
import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from models.ends import opened
from models.files import made_once
from models.source import Identity, fetched
from models.target import differs, tolerance

SETTINGS, MATRICES = "adapter_config.json", "adapter_model.safetensors"  # as PEFT names them
BASE = "outrider.json"  # beside them in adapters that Outrider trained: the target that they belong to
PARTS = r"\.(?:lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|base_layer)(?:\.weight|\.bias)?$"


@dataclass(frozen=True)
class Worn:
    """An adapter on disk."""

    name: str  # as it was asked for
    folder: Path
    digest: str  # of its settings and matrices, wherever they lie

    @classmethod
    def of(cls, name: str) -> "Worn":
        """The LoRA adapter in the folder or Hub repository `name`. Raises ValueError where there is none."""
        folder = fetched(name, kind="adapter")
        settings, matrices = folder / SETTINGS, folder / MATRICES
        if missing := [file.name for file in (settings, matrices) if not file.exists()]:
            pickled = (
                "; its adapter_model.bin is a pickle, which is not opened" if list(folder.glob("adapter*.bin")) else ""
            )
            raise ValueError(
                f"{name} is no PEFT adapter: it holds no {' and no '.join(missing)}{pickled}. Name the folder that save_pretrained wrote"
            )
        try:
            told = json.loads(settings.read_text())
        except ValueError:
            raise ValueError(f"{settings} is no JSON; fetch the adapter again") from None
        if told.get("peft_type") != "LORA":
            raise ValueError(
                f"{name} is an adapter of the kind {told.get('peft_type')} and a target wears LoRA only; merge it with peft and give the result as target.name"
            )
        told.pop("base_model_name_or_path", None)  # a path, often of another machine
        told = {
            name: sorted(value) if isinstance(value, list) else value for name, value in told.items()
        }  # sets, to PEFT
        seen = hashlib.sha256(json.dumps(told, sort_keys=True).encode() + matrices.read_bytes())
        return cls(name, folder, seen.hexdigest()[:16])

    def shapes(self) -> dict[str, list[int]]:
        """The shape of every tensor, by the name of the module it belongs to and its own: no numbers are read."""
        with opened(self.folder / MATRICES) as file:
            names = file.keys()
            return {name.removeprefix("base_model.model."): file.get_slice(name).get_shape() for name in names}

    def modules(self) -> set[str]:
        """The modules that are changed, by their names in the model."""
        return {re.sub(PARTS + r"|\.(?:weight|bias)$", "", name) for name in self.shapes()}


def skeleton(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """A model of this configuration without its numbers."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def require_fit(worn: Worn, bare: PreTrainedModel, name: str) -> None:
    """Raise ValueError where the adapter changes nothing, or what the target `name`, whose skeleton is `bare`, has not."""
    modules, shapes = dict(bare.named_modules()), worn.shapes()
    if not shapes:
        raise ValueError(f"{worn.name} changes nothing: its targets matched no layer when it was made; train it again")
    strange = sorted(worn.modules() - modules.keys())
    if strange:
        raise ValueError(
            f"{worn.name} is an adapter for another model than {name}: it changes {strange[0]}, which is not there. Set target= to its base"
        )
    for tensor, shape in shapes.items():
        part = modules[re.sub(PARTS + r"|\.(?:weight|bias)$", "", tensor)]
        ours = wanted(tensor, shape, part)
        if ours is not None and ours != shape:
            raise ValueError(
                f"{worn.name} is an adapter for another model than {name}: {tensor} has shape {shape} and {ours} would fit. Set target= to its base"
            )


def wanted(tensor: str, shape: list[int], part: nn.Module) -> list[int] | None:
    """The shape that an adapter's `tensor` of this `shape` needs on `part`; None where only PEFT knows."""
    if type(part) not in (nn.Linear, nn.Embedding):
        return None
    out, into = part.weight.shape  # type: ignore[misc]
    if ".lora_A" in tensor:
        return [shape[0], into]
    if ".lora_B" in tensor:
        return [out, *shape[1:]]
    if ".lora_embedding_A" in tensor:
        return [shape[0], out]
    if ".lora_embedding_B" in tensor:
        return [into, shape[1]]
    return [out, into] if tensor.endswith(".weight") and "magnitude" not in tensor else None


def ends_changed(worn: Worn, bare: PreTrainedModel) -> list[str]:
    """The names of the target's embedding and head, as far as the adapter changes them."""
    ends = (bare.get_input_embeddings(), bare.get_output_embeddings())
    return sorted(name for name, part in bare.named_modules() if part in ends and name in worn.modules())


def wearing(base: Identity, worn: Worn) -> Identity:
    """Which target `base` with its adapter is, however it is applied. Raises ValueError where it was trained on another."""
    record = worn.folder / BASE
    if record.exists() and (theirs := json.loads(record.read_text()))["fingerprint"] != base.fingerprint:
        raise ValueError(
            f"{worn.name} is an adapter for {theirs['name']} (fingerprint {theirs['fingerprint']}) and {base.name} is another ({base.fingerprint}). Set target= to the former"
        )
    both = hashlib.sha256(f"{base.fingerprint} {worn.digest}".encode()).hexdigest()[:16]
    return replace(base, fingerprint=both, base=base.fingerprint, adapter=worn.name)


def merged_folder(folder: Path, identity: Identity, worn: Worn, trust_remote_code: bool = False) -> Path:
    """The checkpoint of the target in `folder` with its adapter added to its weights, `identity`: made once, in the user's cache."""
    return made_once(f"adapted-{identity.fingerprint}", lambda fresh: _merge(folder, worn, fresh, trust_remote_code))


def _merge(folder: Path, worn: Worn, fresh: Path, trust_remote_code: bool) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=trust_remote_code).eval()
    if ends_changed(worn, model):
        part_ends(model)
    dressed, ids = put_on(model, worn), torch.arange(8)[None] + 1
    with torch.inference_mode():
        apart = model(input_ids=ids, use_cache=False).logits
    model = dressed.merge_and_unload()
    with torch.inference_mode():
        together = model(input_ids=ids, use_cache=False).logits
    if not (error := differs(together, apart)) < tolerance(model.dtype):
        raise ValueError(
            f"{worn.name} cannot be merged: with it in the weights the target says something else (relative error {error:.1e}); apply it on the fly with target.merge=false"
        )
    save_whole(model, folder, fresh)


def save_whole(model: PreTrainedModel, folder: Path, fresh: Path) -> None:
    """Save `model` to `fresh`, with tokenizer, template and all else that the checkpoint in `folder` has beside its weights."""
    model.save_pretrained(fresh)
    for file in folder.iterdir():
        weights = file.suffix in (".bin", ".safetensors") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copy(file, fresh / file.name)


def part_ends(model: PreTrainedModel) -> None:
    """Give the head a matrix of its own where it is the embedding's: an adapter changes one of the two alone."""
    head = cast(nn.Linear, model.get_output_embeddings())
    head.weight = nn.Parameter(head.weight.detach().clone())
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False


def put_on(model: PreTrainedModel, worn: Worn) -> Any:
    """Let `model` compute with the adapter beside its weights, which stay as they are; the PeftModel that did it."""
    from peft import PeftModel  # takes seconds, and only such a target needs it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ends that were tied
        return PeftModel.from_pretrained(cast(Any, model), worn.folder)
