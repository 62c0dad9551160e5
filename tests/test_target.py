"""The target reads text and trees as transformers' own model reads plain text, whatever the architecture."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from conftest import WINDOW, Family, stock_model, tiny_config, tiny_target
from decode.engine import generate
from models.attention import MANY, by_blocks, by_products, reads_text
from models.drafter import Budget, Plain
from models.source import Identity, byte_tokenizer, from_random
from models.target import Target, load_target, resolve_dtype
from models.tree import TokenTree
from reference import Guesser, read_paths

CHANCE = random.Random(1)
PROMPTS = [[CHANCE.randrange(256) for _ in range(length)] for length in (21, 5, 13)]  # two outgrow the window of 8
LIMIT = 24
NODES = 8


def padded(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, T], padded with 0, and their lengths."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    return ids, torch.tensor([len(text) for text in texts])


@pytest.mark.exact
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_tree_decoding_equals_transformers_generate(family: Family, rows: int) -> None:
    texts = {tuple(prompt): family.says(prompt, LIMIT) for prompt in PROMPTS}
    assert min(len(set(text)) for text in texts.values()) > 2  # a text of one token would not tell positions apart
    run = generate(family.target, Guesser(texts, NODES), PROMPTS, LIMIT, Budget(nodes=NODES), rows=rows)
    assert [generation.tokens for generation in run.generations] == list(texts.values())
    assert sum(sum(generation.accepted) for generation in run.generations) > 15


@pytest.mark.exact
def test_plain_decoding_equals_transformers_generate(family: Family) -> None:
    run = generate(family.target, Plain(), PROMPTS, LIMIT, Budget(), rows=3)
    assert [generation.tokens for generation in run.generations] == [family.says(prompt, LIMIT) for prompt in PROMPTS]


def test_a_tree_pass_equals_a_plain_pass_over_each_path(family: Family) -> None:
    """In three rows of unequal length at once: a wide tree, then, where keys and values have moved, one deeper than the window."""
    target = family.target
    ids, lengths = padded(PROMPTS)
    cache = target.cache(3, 50)
    target.prefill(ids, lengths, cache)
    texts = [list(prompt) for prompt in PROMPTS]
    for nodes, reach in ((NODES, NODES), (18, 2)):
        chance = random.Random(nodes)
        parents = [[-1, *(chance.randrange(max(node - reach, 0), node) for node in range(1, nodes))] for _ in texts]
        tokens = [[chance.randrange(256) for _ in range(nodes)] for _ in texts]
        tree = TokenTree(torch.tensor(tokens), torch.tensor(parents), torch.ones(3, nodes, dtype=torch.bool))
        logits = target.read(tree, cache).logits
        assert logits is not None
        for row, text in enumerate(texts):
            torch.testing.assert_close(
                logits[row], read_paths(family.stock, text, tokens[row], parents[row]), rtol=1e-3, atol=1e-3
            )
        paths = [row[-1].nonzero()[:, 0].tolist() for row in tree.mask]  # keep the path to the last node
        cache.keep(paths)
        for row, text in enumerate(texts):
            text += [tokens[row][node] for node in paths[row]]
    assert cache.lengths == [len(text) for text in texts]
    assert tree.depth.max() > WINDOW


@torch.inference_mode()
def test_taps_equal_the_hidden_states_of_transformers(family: Family) -> None:
    """The last tap is the last layer's output before the final norm, which Hugging Face shows after it only."""
    target, depth = family.target, family.stock.config.num_hidden_layers
    target.tap(tuple(range(depth + 1)))
    ids, lengths = padded(PROMPTS)
    batch = target.features(ids, torch.ones_like(ids), lengths)
    reading = target.prefill(ids, lengths, target.cache(3, 30))
    for row, prompt in enumerate(PROMPTS):
        stock = family.stock(input_ids=torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
        for features, hidden in ((batch.features, batch.last_hidden), (reading.features, reading.hidden)):
            taps = list(features[row, : len(prompt)].split(32, dim=-1))
            taps[-1] = family.stock.model.norm(taps[-1])
            for ours, theirs in zip(taps, stock.hidden_states, strict=True):
                torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(hidden[row, : len(prompt)], stock.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
        assert reading.logits is not None
        torch.testing.assert_close(reading.logits[row, 0], stock.logits[0, -1], rtol=1e-4, atol=1e-4)


def test_a_tree_reading_has_features_of_every_node(llama: Family) -> None:
    llama.target.tap((0, 2))
    cache = llama.target.cache(1, 10)
    llama.target.prefill(torch.tensor([[5, 6, 7]]), torch.tensor([3]), cache)
    tree = TokenTree(torch.tensor([[8, 9, 10]]), torch.tensor([[-1, 0, 0]]), torch.ones(1, 3, dtype=torch.bool))
    features = llama.target.read(tree, cache).features
    for node, text in enumerate(([8], [8, 9], [8, 10])):
        states = llama.stock(input_ids=torch.tensor([[5, 6, 7, *text]]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(
            features[0, node], torch.cat([states[0][0, -1], states[2][0, -1]]), rtol=1e-4, atol=1e-4
        )


def test_features_mark_the_padding_and_pass_the_loss_mask_on(llama: Family) -> None:
    mask = torch.tensor([[False, True, True], [True, False, False]])
    batch = llama.target.features(torch.tensor([[5, 6, 7], [8, 0, 0]]), mask, torch.tensor([3, 1]))
    assert batch.document.tolist() == [[0, 0, 0], [0, -1, -1]]
    assert batch.position.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.loss_mask.equal(mask)
    assert batch.features.shape == (2, 3, 0)
    assert batch.last_hidden.shape == (2, 3, 32)


@pytest.mark.parametrize("taps", [(4,), (-1, 2), (2, 1), (1, 1)])
def test_taps_that_the_target_does_not_have_are_refused(llama: Family, taps: tuple[int, ...]) -> None:
    sentence = r"do not fit llama: it has hidden states 0 to 3, named once each in ascending order"
    with pytest.raises(ValueError, match=sentence):
        llama.target.tap(taps)
    assert llama.target.taps == ()


def test_new_taps_replace_the_old(llama: Family) -> None:
    for taps in ((0, 1), (3,), ()):
        llama.target.tap(taps)
        reading = llama.target.prefill(torch.tensor([[5, 6]]), torch.tensor([2]), llama.target.cache(1, 4))
        assert reading.features.shape == (1, 2, 32 * len(taps))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in llama.target.layers)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": (
        {"model_type": "mamba", "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 272},
        "its forward takes no .*position_ids",
    ),
    "recurrent_gemma": (
        tiny_config("recurrent_gemma", lru_width=32, num_key_value_heads=1),
        "recurrent, linear or chunked attention layers",
    ),
    "linear attention": (
        tiny_config(
            "qwen3_next",
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
        ),
        "recurrent, linear or chunked attention layers",
    ),
    "convolution": (
        tiny_config("lfm2", layer_types=["conv", "full_attention", "conv"]),
        "recurrent, linear or chunked attention layers",
    ),
    "bloom": (
        {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 272},
        "its forward takes no position_ids",
    ),
    "alibi": (
        {
            "model_type": "falcon",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 272,
            "alibi": True,
        },
        "its ALiBi attention takes no explicit mask",
    ),
    "dynamic rope": (
        tiny_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        "its dynamic rotary embedding changes with the longest row",
    ),
    "dynamic rope of one kind of layer": (
        tiny_config(
            "gemma3_text",
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            },
        ),
        "its dynamic rotary embedding changes with the longest row",
    ),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_models_that_cannot_read_a_tree_are_refused_with_the_reason(kind: str) -> None:
    config, reason = UNFIT[kind]
    folder = from_random(config)
    with pytest.raises(
        ValueError, match=f"cannot be a target: .*{reason}.*Choose a target with ordinary softmax attention"
    ):
        load_target(folder, kind, dtype="fp32", device="cpu")


class Positionless(LlamaModel):
    """Says that it takes positions, and counts for itself."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Maskless(LlamaModel):
    """Says that it takes a mask, and lets every node see its cousins."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("lie", [Positionless, Maskless])
def test_a_model_that_ignores_what_it_is_told_is_found_out(lie: type[LlamaModel]) -> None:
    config = tiny_config("llama")
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"}))
    model.model.__class__ = lie
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM reads a tree differently from plain text .*it cannot be a target"
    ):
        Target(model, byte_tokenizer(), Identity("liar", "0", 32, 272))


@pytest.mark.parametrize("cut", [100, 10_000])
def test_truncated_safetensors_are_refused(cut: int, tmp_path: Path) -> None:
    config = tiny_config("llama")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"damaged .*download the checkpoint again"):
        load_target(tmp_path, "broken", dtype="fp32", device="cpu")


def test_a_target_knows_its_name_size_context_and_end_tokens(llama: Family) -> None:
    identity = llama.target.identity
    assert (identity.name, identity.width, identity.vocabulary) == ("llama", 32, 272)
    assert llama.target.context == 256
    assert llama.target.end_tokens == {256}
    assert tiny_target("llama", eos_token_id=[3, 4]).end_tokens == {3, 4, 256}
    assert tiny_target("llama", eos_token_id=7).end_tokens == {7, 256}


def test_a_frozen_target_wants_no_gradient(llama: Family) -> None:
    assert not llama.target.model.training
    assert not any(parameter.requires_grad for parameter in llama.target.model.parameters())


@pytest.mark.parametrize("capacity", [40, MANY], ids=["by torch's attention", "by products of all there is room for"])
def test_bf16_decoding_of_a_tree_stays_near_fp32(llama: Family, capacity: int) -> None:
    folder = from_random(tiny_config("llama"))
    target = load_target(folder, "llama", dtype="bf16", device="cpu")
    assert target.dtype == torch.bfloat16
    assert target.identity.fingerprint == llama.target.identity.fingerprint
    cache = target.cache(1, capacity)
    assert cache.whole == (capacity == MANY)
    target.prefill(torch.tensor([PROMPTS[0]]), torch.tensor([21]), cache)
    parents, tokens = [-1, 0, 1, 0], [5, 6, 7, 8]
    tree = TokenTree(torch.tensor([tokens]), torch.tensor([parents]), torch.ones(1, 4, dtype=torch.bool))
    ours = target.read(tree, cache).logits
    assert ours is not None
    exact = read_paths(stock_model(folder), PROMPTS[0], tokens, parents)
    assert ((ours[0].float() - exact).norm() / exact.norm()).item() < 0.1


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype=int3 is unknown; use auto, bf16, fp32, fp16, fp64"):
        resolve_dtype("int3", torch.device("cpu"))


def test_attention_written_out_is_torchs() -> None:
    query, key, value = (torch.randn(2, 3, count, 8, dtype=torch.float64) for count in (6, 11, 11))
    mask = torch.zeros(2, 1, 6, 11, dtype=torch.float64)
    mask[..., 1:].masked_fill_(torch.rand(2, 1, 6, 10) < 0.5, torch.finfo(torch.float64).min)
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(by_products(query, key, value, mask, 0.3), theirs)


@pytest.mark.parametrize("count", [2, 64, 65, 256, 300])
def test_a_text_reads_itself_in_blocks_as_at_once(count: int) -> None:
    query, (key, value) = torch.randn(2, 6, count, 8, dtype=torch.float64), torch.randn(2, 2, 3, count, 8).double()
    every = (each.repeat_interleave(2, 1) for each in (key, value))
    theirs = torch.nn.functional.scaled_dot_product_attention(query, *every, is_causal=True, scale=0.3)
    torch.testing.assert_close(by_blocks(query, key, value, 0.3), theirs.transpose(1, 2))


def test_a_text_is_read_in_blocks_in_bf16_where_nobody_differentiates() -> None:
    module, text, later = torch.nn.Module(), torch.randn(1, 2, 5, 8).bfloat16(), torch.randn(1, 2, 1, 8).bfloat16()
    with torch.inference_mode():
        assert reads_text(module, text, text)
        assert not reads_text(module, later, text)
        assert not reads_text(module, text.float(), text.float())
    assert not reads_text(module, text, text)


def test_a_tree_reads_every_key_once_for_all_the_heads_that_share_it(
    llama: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' own way is not taken, and its text is (the other tests here)."""
    shapes: list[tuple[torch.Size, torch.Size]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, key: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        shapes.append((query.shape, key.shape))
        return attend(query, key, *args, **how)

    cache = llama.target.cache(1, 12)
    llama.target.prefill(torch.tensor([PROMPTS[1]]), torch.tensor([5]), cache)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    llama.target.read(TokenTree.chains(torch.tensor([[8, 9, 10]])), cache)
    assert shapes == [((1, 2, 2 * 3, 8), (1, 2, 8, 8))] * 3


def test_a_batch_beyond_memory_is_refused_with_the_size_that_fits(llama: Family) -> None:
    with pytest.raises(ValueError, match=r"10000000000 rows of 100 tokens need .* GB for keys .* at most \d+ rows fit"):
        llama.target.cache(10**10, 100)


def test_a_model_that_changes_what_its_layers_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined to one product, both layers would see what only the first is to see."""

    def forward(mlp: Any, states: torch.Tensor) -> torch.Tensor:
        gate = mlp.act_fn(mlp.gate_proj(states))
        return mlp.down_proj(gate * mlp.up_proj(states.mul_(3)))

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", forward)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM answers differently once its linear layers .* changes that"
    ):
        tiny_target("llama")
