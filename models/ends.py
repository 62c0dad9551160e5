"""The target without its body: the embedding that reads tokens and the head that turns hidden states into logits."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from models.packed import PackedLinear
from models.vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from models.target import Target


class Ends:
    """Embedding [V, D] and head [V, D] of a frozen target, with its scale and soft cap.

    Not a module: a drafter that holds it has nothing of the target in its parameters or its state dict.
    """

    def __init__(self, embedding: Tensor, head: Tensor, bias: Tensor | None, config: PretrainedConfig):
        self.embedding, self.head, self.bias = embedding, head, bias
        self.config = config
        self.scale = logit_scale(config)
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.embedding_scale = embedding_scale(config)
        self.target: Target | None = None  # whose ends these are, where it is loaded whole

    @property
    def width(self) -> int:
        return self.head.shape[1]

    @property
    def vocabulary(self) -> int:
        return self.head.shape[0]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Ends":
        """The ends of a loaded target, sharing its weights."""
        head = model.get_output_embeddings()
        embedding = cast(Tensor, model.get_input_embeddings().weight)
        bias = getattr(head, "bias", None)
        return cls(embedding, cast(Tensor, head.weight), bias, model.config.get_text_config(decoder=True))

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype | None = torch.float32, device: str = "cpu") -> "Ends":
        """The ends alone, read by name from the safetensors shards in `folder`; a tied head is the embedding.

        Without `dtype` they keep the precision they are stored in.
        """
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        name = {id(p): n for n, p in reversed(list(skeleton.named_parameters(remove_duplicate=False)))}
        embedding = name[id(skeleton.get_input_embeddings().weight)]
        output = skeleton.get_output_embeddings()
        head = next(n for n, m in skeleton.named_modules() if m is output)
        tied = output.weight is skeleton.get_input_embeddings().weight
        shards = tensor_files(folder)

        for tensor in (embedding, f"{head}.weight")[: 1 if tied else 2]:
            if tensor not in shards:
                raise ValueError(
                    f"{folder} holds no tensor {tensor!r}; it is no checkpoint of {config.model_type}, or a shard is missing"
                )

        def read(tensor: str) -> Tensor:
            with opened(shards[tensor], device) as file:
                found: Tensor = file.get_tensor(tensor)
                return found if dtype is None else found.to(dtype)

        weight = read(embedding)
        bias = read(f"{head}.bias") if f"{head}.bias" in shards else None
        return cls(
            weight,
            read(f"{head}.weight") if f"{head}.weight" in shards else weight,
            bias,
            config.get_text_config(decoder=True),
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of `ids` as the first layer reads them."""
        read = nn.functional.embedding(ids.to(self.embedding.device), self.embedding)
        read = read.to(self.head.device)  # a target spread over GPUs has its two ends apart
        return read if self.embedding_scale == 1 else read * self.embedding_scale

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits [..., V] of final hidden states [..., D]; `rows` [R] asks for those vocabulary entries only."""
        weight, bias = self.head, self.bias
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return self.finish(nn.functional.linear(hidden, weight, bias))

    def finish(self, raw: Tensor) -> Tensor:
        """What the target does to the head's product: its scale, then its soft cap."""
        scaled = raw if self.scale == 1.0 else raw * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


class FrozenHead:
    """The target's head on a draft vocabulary. Not a module: nothing of it is trained or saved."""

    def __init__(self, ends: Ends, vocabulary: DraftVocabulary):
        self.ends, self.vocabulary = ends, vocabulary
        self.forget()

    def forget(self) -> None:
        """The vocabulary is another one."""
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self._packed: PackedLinear | None = None

    def pack(self) -> None:
        """Lay the rows out for products of a few states."""
        self._packed = PackedLinear(*self.rows)

    @property
    def rows(self) -> tuple[Tensor, Tensor | None]:
        """The matrix [V, D] and the bias [V], as far as they are drafted; gathered once."""
        if self._rows is None:
            with torch.inference_mode(False):  # what is made while decoding could not teach
                bias = None if self.ends.bias is None else self.vocabulary.rows(self.ends.bias)
                self._rows = self.vocabulary.rows(self.ends.head).detach(), bias
        return self._rows

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states [..., D]."""
        states = hidden.to(self.ends.head.dtype)
        return self.ends.finish(self._packed(states) if self._packed else nn.functional.linear(states, *self.rows))


def layer_weights(folder: Path, number: int) -> dict[str, Tensor]:
    """The tensors of decoder layer `number` of the checkpoint in `folder` by their name within it, and the final norm's."""
    found = {}
    for name, file in tensor_files(folder).items():
        inner = re.fullmatch(rf"(?:.*\.)?layers\.{number}\.(.+)", name)
        final = re.fullmatch(r"(?:model\.|language_model\.)*(norm\.weight)", name)
        if match := inner or final:
            with opened(file) as tensors:
                found[match[1]] = tensors.get_tensor(name)
    return found


def logit_scale(config: PretrainedConfig) -> float:
    """The factor on the logits: Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        return float(scale)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    return 1.0


def embedding_scale(config: PretrainedConfig) -> float:
    """The factor on embeddings before the first layer: Gemma's sqrt(width), Granite's `embedding_multiplier`."""
    if config.model_type.startswith("gemma"):
        return config.hidden_size**0.5
    return float(getattr(config, "embedding_multiplier", 1.0))


@contextmanager
def opened(file: Path, device: str = "cpu") -> Iterator[Any]:
    """The safetensors `file`, open for reading. Raises ValueError where it is damaged."""
    try:
        with safe_open(file, framework="pt", device=device) as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); download the checkpoint again") from None


def tensor_files(folder: Path) -> dict[str, Path]:
    """The safetensors file of every tensor of the checkpoint in `folder`, one file or many."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text())["weight_map"]
        missing = sorted({file for file in shards.values() if not (folder / file).exists()})
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, named in its index; download the checkpoint again")
        return {tensor: folder / file for tensor, file in shards.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file; convert the checkpoint to safetensors first")
    found: dict[str, Path] = {}
    for file in files:
        with opened(file) as shard:
            found |= dict.fromkeys(shard.keys(), file)
    return found
