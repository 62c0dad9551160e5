"""The target: a frozen Hugging Face causal LM that reads text or a tree and says features and logits.

B rows, T text tokens, N tree nodes, D width, L taps, V vocabulary.
"""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from models.attention import share_keys, wants_whole
from models.cache import KVCache
from models.drafter import FeatureBatch, Reading
from models.ends import Ends
from models.native import compiles
from models.packed import PackedLinear, pack, packs, same_input
from models.quick import Single, quicken
from models.source import Identity, identify
from models.transfer import sent
from models.tree import TokenTree, seen_behind


class Target:
    """A frozen causal LM in eval mode, with taps on its layers.

    Taps are numbered as Hugging Face numbers `hidden_states`: 0 is the embedding, i the output of decoder layer
    i - 1, so the number of layers is the last layer's output before the final norm.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        identity: Identity,
        hasten: bool = True,
        compile: bool = False,
    ):
        refuse_unfit(model)
        self.model = model.eval().requires_grad_(False)
        self.body = model.base_model
        self.tokenizer, self.identity = tokenizer, identity
        self.config: PretrainedConfig = model.config.get_text_config(decoder=True)
        self.ends = Ends.of(model)
        self.ends.target = self
        self.device, self.dtype = self.ends.head.device, self.ends.head.dtype
        self.layers = decoder_layers(model, self.config.num_hidden_layers)
        self.taps: tuple[int, ...] = ()
        self._hooks: list[Any] = []
        self._caught: dict[int, Tensor] = {}
        self.product: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        self.repeats = 1  # of a mask's rows
        self.single = False  # whether every layer is one operation
        self.compiled = compile
        lowest = torch.finfo(self.dtype).min
        self._open, self._shut = torch.tensor([0.0, lowest], dtype=self.dtype, device=self.device)  # what a mask adds
        if hasten and packs(self.device, self.dtype) and not spread_out(self.layers):
            self._hasten()
        probe(self)

    @torch.inference_mode()
    def _hasten(self) -> None:
        """Fewer and larger products from packed weights, attention that copies no keys, fewer operations; what comes out stays."""
        ids = torch.arange(4)[None]
        position = torch.tensor([[0, 1, 2, self.context - 1]])  # some rules change with the position
        before = torch.ones(4, 4, dtype=torch.bool).tril()[None]

        def run() -> Tensor:
            masks = self._masks(before, position, lambda: position, single=False)
            return self._run(input_ids=ids, attention_mask=masks, position_ids=position, use_cache=False)

        stock: list[Tensor] = []
        joined = same_input(self.body, lambda: stock.append(run()))
        pack(self.body, joined)
        self.product = PackedLinear(self.ends.head, self.ends.bias)
        self.repeats = share_keys(self.model)
        apart = differs(run(), stock[0])
        if not apart < tolerance(self.dtype):
            raise ValueError(
                f"{type(self.model).__name__} answers differently once its linear layers that read one input are joined "
                f"(relative error {apart:.1e}): it changes that input in place, so it cannot be a target"
            )
        within = tolerance(self.dtype) / 10  # part by part: a whole pass in bf16 piles roundings up
        quicken(self.body, run, within, self.compiled)
        self.single = all(isinstance(layer, Single) for layer in self.layers)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together that the target was made for."""
        return context(self.config)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn: the model's own list and the tokenizer's."""
        listed = self.model.generation_config.eos_token_id if self.model.generation_config else None
        return end_tokens(listed, self.tokenizer)

    def tap(self, taps: tuple[int, ...]) -> None:
        """From now on let readings carry the hidden states of `taps` as features."""
        depth = len(self.layers)
        wrong = [tap for tap in taps if not 0 <= tap <= depth]
        if wrong or list(taps) != sorted(set(taps)):
            raise ValueError(
                f"taps {list(taps)} do not fit {self.identity.name}: it has hidden states 0 to {depth}, named once each in ascending order"
            )
        for hook in self._hooks:
            hook.remove()
        self.taps, self._hooks = taps, []
        for tap in taps:
            if tap == 0:
                self._hooks.append(
                    self.layers[0].register_forward_pre_hook(lambda _, args: self._caught.__setitem__(0, args[0]))
                )
            else:
                self._hooks.append(self.layers[tap - 1].register_forward_hook(self._catcher(tap)))

    def _catcher(self, tap: int) -> Callable[..., None]:
        def catch(module: nn.Module, args: Any, output: Any) -> None:
            self._caught[tap] = output[0] if isinstance(output, tuple) else output

        return catch

    def shallow(self, layers: int) -> "Target":
        """This target's own first `layers` under its norm and head, as a small target that shares every weight with it."""
        if not 0 < layers < len(self.layers):
            raise ValueError(
                f"layers={layers}: {self.identity.name} has {len(self.layers)} layers; take at least 1 and not all"
            )
        if "forward" in vars(self.body):  # bound to the whole body by those who spread it over devices
            raise ValueError(
                f"the layers of {self.identity.name} are spread by device_map; name= a draft model instead"
            )
        twin = copy.copy(self)
        twin.body = shortened(self.body, self.layers, layers)
        twin.layers = self.layers[:layers]
        twin.taps, twin._hooks, twin._caught = (), [], {}
        return twin

    def cache(self, rows: int, capacity: int) -> KVCache:
        """Room for `rows` sequences of `capacity` tokens. Raises ValueError where memory has not that much."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        row, free = 2 * len(self.layers) * heads * width * capacity * self.dtype.itemsize, free_memory(self.device)
        whole = self.repeats > 1 and not self.single and wants_whole(self.device, self.dtype, rows * capacity)
        row *= 2 if whole else 1  # while it grows, old and new stand side by side
        if rows * row > free:
            raise ValueError(
                f"{rows} rows of {capacity:,} tokens need {rows * row / 1e9:.1f} GB for keys and values and {free / 1e9:.1f} GB are free; "
                f"at most {free // row} rows fit"
            )
        return KVCache(len(self.layers), rows, capacity, self.device, whole)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states [..., D]."""
        return self.ends.finish(self.product(hidden))

    @torch.inference_mode()
    def prefill(self, ids: Tensor, lengths: Tensor, cache: KVCache, rows: Tensor | None = None) -> Reading:
        """Read prompts `ids` [B, T], padded on the right to their `lengths` [B], into `rows` of the cache (all of them).

        The reading's logits [B, 1, V] are those of each prompt's last token.
        """
        cache.fill(torch.arange(len(ids)) if rows is None else rows, lengths)
        hidden = self._run(input_ids=ids.to(self.device), cache=cache)
        last = hidden[torch.arange(len(ids)), lengths.to(self.device) - 1]
        return Reading(self._features(hidden), hidden, self.logits(last)[:, None])

    @torch.inference_mode()
    def read(self, tree: TokenTree, cache: KVCache, known: int = 0) -> Reading:
        """Read every node of `tree` after what each row of the cache holds: one pass, logits [B, N, V] for all nodes.

        The first `known` nodes were read by the passes before, since anything was kept: they are not read again.
        """
        count, new = tree.tokens.shape[1], slice(known, None)
        cache.open(count - known, known)
        ends = [start - known for start in cache.starts]
        told = [[end + sees.bit_count() - 1 for sees in row] for end, row in zip(ends, tree.sights, strict=True)]
        position = torch.tensor(told, device=self.device)
        sights = [row[new] for row in tree.sights]
        seen = seen_behind(ends, sights, count, [0] * len(ends), cache.seen).to(self.device)

        def there() -> Tensor:
            slot = torch.arange(cache.seen, device=self.device).repeat(len(ends), 1)
            where = torch.tensor(ends, device=self.device)[:, None] + torch.arange(count, device=self.device)
            return slot.scatter_(1, where, position)

        masks = self._masks(seen, position[:, new], there, self.single)
        hidden = self._run(
            input_ids=tree.tokens[:, new], attention_mask=masks, position_ids=position[:, new], cache=cache
        )
        return Reading(self._features(hidden), hidden, self.logits(hidden))

    def features(self, ids: Tensor, loss_mask: Tensor, lengths: Tensor) -> FeatureBatch:
        """What a drafter learns from: `ids` [B, T], padded on the right to `lengths` [B], and what the target made of them."""
        position = torch.arange(ids.shape[1]).expand_as(ids)
        return self.documents(ids, loss_mask, torch.where(position < lengths.cpu()[:, None], 0, -1), position)

    def documents(self, ids: Tensor, loss_mask: Tensor, document: Tensor, position: Tensor) -> FeatureBatch:
        """What a drafter learns from rows `ids` [B, T] of one `document` or several, each of which is read by itself."""
        with torch.inference_mode():
            return self.studied(ids, loss_mask, document, position)

    def studied(self, ids: Tensor, loss_mask: Tensor, document: Tensor, position: Tensor) -> FeatureBatch:
        """The same, by a target that may itself be learning from them."""
        ids, position = (sent(part, self.device) for part in (ids, position))
        loss_mask, document, masks = loss_mask.cpu(), document.cpu(), {}
        if bool((document > 0).any()):
            mine = sent(document, self.device)
            before = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=self.device).tril()
            seen = before & (mine[:, :, None] == mine[:, None])
            masks = {
                "attention_mask": self._masks(seen, position, lambda: position, single=False),
                "position_ids": position,
            }
        hidden = self._run(input_ids=ids, use_cache=False, **masks)
        return FeatureBatch(ids, loss_mask, document, position, self._features(hidden), hidden)

    def _run(self, **inputs: Any) -> Tensor:
        self._caught.clear()
        return self.body(**inputs).last_hidden_state

    def _features(self, hidden: Tensor) -> Tensor:
        if not self.taps:
            return hidden.new_empty(*hidden.shape[:2], 0)
        return torch.cat([self._caught[tap].to(hidden.device) for tap in self.taps], dim=-1)

    def _masks(
        self, seen: Tensor, here: Tensor, there: Callable[[], Tensor], single: bool
    ) -> Tensor | dict[str, Tensor]:
        """Masks from who may see whom `seen` [B, N, S], at the positions `here` [B, N] and `there` [B, S], which only a window
        asks for: one for each kind of layer where the config lists kinds.

        They are added to scores, [B, 1, repeats * N, S]; where every layer is a `single` operation they say what is seen."""
        window = sliding_window(self.config)

        def told(allowed: Tensor) -> Tensor:
            if single:
                return allowed[:, None]
            rows = allowed.repeat(1, self.repeats, 1) if self.repeats > 1 else allowed
            return torch.where(rows, self._open, self._shut)[:, None]

        inside = seen if window is None else seen & (here[..., None] - there()[:, None] < window)
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            return told(inside)
        return {kind: told(inside if kind == "sliding_attention" else seen) for kind in set(kinds)}


def load_target(
    folder: Path,
    name: str,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    identity: Identity | None = None,
    spread: Callable[[PreTrainedModel], None] | None = None,
    change: Callable[[PreTrainedModel], object] | None = None,
    hasten: bool = True,
    compile: bool | None = None,
    **how: Any,
) -> Target:
    """The target in `folder`. `dtype` auto is bf16 where the machine computes in it, else fp32; `device` auto is a GPU
    where there is one. `spread` takes the model from main memory to the devices of several processes. `how` goes to
    `from_pretrained` (device_map, quantization_config, attn_implementation, trust_remote_code).

    A model that `change` has changed has an `identity` of its own. Its layers, and those of one that `hasten` does not
    allow to be packed, stay as they are. `compile` makes each layer one operation, None where this machine can.
    """
    where = device_of(device)
    kind = resolve_dtype(dtype, where)
    hasten = hasten and change is None
    compile = hasten and compiles(compile, where, kind)
    remote = bool(how.get("trust_remote_code"))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, **how)
    except Exception as error:
        if "safetensor" in type(error).__module__.lower() or "safetensor" in type(error).__name__.lower():
            raise ValueError(
                f"{folder} holds a damaged .safetensors file ({error}); download the checkpoint again"
            ) from None
        raise
    if spread is not None:
        spread(model)
    elif not how.get("device_map") and not how.get("quantization_config"):
        model = model.to(where)
    if change:
        change(model)
    return Target(model, tokenizer, identity or identify(folder, name, remote), hasten, compile)


def context(config: PretrainedConfig) -> int:
    """Tokens that a model of this configuration was made for."""
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def end_tokens(listed: list[int] | int | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end tokens that a model's configuration lists, and the tokenizer's own."""
    every = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
    return frozenset(token for token in every if token is not None)


def free_memory(device: torch.device) -> int:
    """Bytes that `device` can still give; where the system does not say, no end of them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    listed = Path("/proc/meminfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    told = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return told[0] if told else 1 << 62


def device_of(name: str) -> torch.device:
    """The device called `name`; auto is a GPU where there is one."""
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype called `dtype`; auto is bf16 on a GPU and on a CPU with bf16 instructions, else fp32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        native = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    known = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64}
    if dtype not in known:
        raise ValueError(f"dtype={dtype} is unknown; use auto, {', '.join(known)}")
    return known[dtype]


def decoder_layers(model: PreTrainedModel, depth: int) -> nn.ModuleList:
    """The decoder's layers: the first list of modules as long as the config says the model is deep."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {depth} decoder layers to tap; choose another target")


def spread_out(layers: nn.ModuleList) -> bool:
    """Whether several processes hold a part each of these layers: every pass is a pass of them all."""
    return any(isinstance(parameter, DTensor) for parameter in layers.parameters())


def shortened(module: nn.Module, layers: nn.ModuleList, count: int) -> nn.Module:
    """`module` with the first `count` of its `layers`; all parts are shared."""
    twin = copy.copy(module)
    twin._modules = {
        name: layers[:count] if child is layers else shortened(child, layers, count) if child is not None else None
        for name, child in module._modules.items()
    }
    return twin


def sliding_window(config: PretrainedConfig) -> int | None:
    """How far back a sliding layer looks, where this architecture has such layers at all."""
    declared = "sliding_window" in getattr(type(config), "__dataclass_fields__", {})
    if not declared or getattr(config, "use_sliding_window", True) is False:
        return None
    return config.sliding_window


def rope_types(config: PretrainedConfig) -> set[str]:
    """The kinds of rotary embedding in use: one for all layers, or one for each kind of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    each = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    return {rope.get("rope_type", "default") for rope in each}


def refuse_unfit(model: PreTrainedModel) -> None:
    """Raise ValueError for a target that cannot read a tree: no explicit mask or positions, or state that is no cache of tokens."""
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    lacking = {"attention_mask", "position_ids", "cache"} - set(inspect.signature(model.forward).parameters)
    kinds = set(getattr(config, "layer_types", None) or ())
    rope = rope_types(config) & {"dynamic", "longrope"}
    why = None
    if lacking:
        why = f"its forward takes no {', '.join(sorted(lacking))}"
    elif getattr(model, "_is_stateful", False) or not kinds <= {"full_attention", "sliding_attention"}:
        why = "it has recurrent, linear or chunked attention layers, whose state cannot hold the branches of a tree"
    elif getattr(config, "alibi", False):
        why = "its ALiBi attention takes no explicit mask"
    elif rope:
        why = f"its {min(rope)} rotary embedding changes with the longest row of a batch"
    elif any(
        type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=config).layers
    ):
        why = "its layers keep more than keys and values"
    if why:
        raise ValueError(f"{name} cannot be a target: {why}. Choose a target with ordinary softmax attention")


@torch.inference_mode()
def probe(target: Target) -> None:
    """Read a small tree in two rows of unequal length, and compare with plain passes over each path.

    Names and signatures can lie; logits do not. Raises ValueError where the two disagree.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.config.vocab_size, (2, 9), generator=generator)
    lengths, parents = torch.tensor([5, 3]), torch.tensor([[-1, 0, 0, 1]] * 2)
    cache = target.cache(rows=2, capacity=9)
    target.prefill(ids[:, :5], lengths, cache)
    tree = TokenTree(
        ids[:, 5:].to(target.device),
        parents.to(target.device),
        torch.ones_like(parents, dtype=torch.bool, device=target.device),
    )
    logits = target.read(tree, cache).logits
    assert logits is not None
    for row in range(2):
        for path in ([0, 1, 3], [0, 2]):
            text = torch.cat([ids[row, : lengths[row]], ids[row, 5:][path]])[None].to(target.device)
            plain = target.model(input_ids=text, use_cache=False).logits[0, -len(path) :].float()
            if not (apart := differs(logits[row, path], plain)) < tolerance(target.dtype):
                raise ValueError(
                    f"{type(target.model).__name__} reads a tree differently from plain text (relative error {apart:.1e}), so its answers "
                    f"would change; it cannot be a target"
                )


def differs(ours: Tensor, theirs: Tensor) -> float:
    """How far `ours` is from `theirs`, relative to how large that is."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference that rounding alone may make in a whole pass."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
