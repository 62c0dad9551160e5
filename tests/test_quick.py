"""Parts in fewer operations say what the stock parts say, and stand nowhere else."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from conftest import ARCHITECTURES, Family, stock_model, tiny_config, tiny_target
from models.packed import pack, packs, same_input
from models.quick import Attention, Gated, Norm, quicken, turn
from models.source import from_random
from models.target import differs, load_target

pytestmark = pytest.mark.skipif(not packs(torch.device("cpu"), torch.float32), reason="oneDNN is not available")

PLAIN = ("LlamaModel", "Qwen2Model", "MistralModel")  # no norms of heads, soft caps or partial rotation


def test_every_norm_has_a_twin_and_plain_layers_as_a_whole(family: Family) -> None:
    kinds = Counter(type(part).__name__ for part in family.target.body.modules())
    stock = Counter(type(part).__name__ for part in family.stock.base_model.modules())
    assert kinds["Norm"] == sum(count for kind, count in stock.items() if "RMSNorm" in kind)
    expected = len(family.target.layers) if type(family.target.body).__name__ in PLAIN else 0
    assert kinds["Attention"] == kinds["Block"] == expected


@torch.inference_mode()
def test_quick_parts_answer_as_transformers_does_far_into_the_context(family: Family) -> None:
    ids = torch.randint(family.target.config.vocab_size, (2, 130), generator=torch.Generator().manual_seed(1))
    ours = family.target.features(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([130, 130])).last_hidden
    theirs = family.stock.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not packs(torch.device("cpu"), torch.bfloat16), reason="no kernels for bf16 here")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_in_bf16_no_part_rounds_worse_than_the_stock_one(architecture: str) -> None:
    folder = from_random(tiny_config(architecture))
    ours = load_target(folder, architecture, dtype="bf16", device="cpu")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.randint(3, ours.config.vocab_size, (1, 20), generator=torch.Generator().manual_seed(0))
    exact = stock_model(folder)(input_ids=ids, use_cache=False).logits
    quick = ours.logits(ours.body(input_ids=ids, use_cache=False).last_hidden_state)
    assert differs(quick, exact) < 1.5 * differs(stock(input_ids=ids, use_cache=False).logits, exact)


@torch.inference_mode()
def test_turning_is_multiplying_by_the_complex_unit_of_each_angle() -> None:
    states, angles = torch.randn(2, 5, 3, 8, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    both = torch.cat([angles, angles], dim=-1)
    unit = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    turned = torch.complex(states[..., :4], states[..., 4:]) * unit
    torch.testing.assert_close(turn(states, both.cos(), both.sin()), torch.cat([turned.real, turned.imag], dim=-1))


@pytest.mark.parametrize("rows", [1, 5, 32, 33, 200])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
@torch.inference_mode()
def test_a_norm_of_few_rows_is_the_norm_of_many(rows: int, eps: float) -> None:
    weight, states = torch.rand(16, dtype=torch.float64), torch.randn(1, rows, 16, dtype=torch.float64)
    found = Norm(weight, eps)(states)
    torch.testing.assert_close(found, weight * states * (states.pow(2).mean(-1, keepdim=True) + eps).rsqrt())


class Doubtful(nn.Module):
    """Looks like a gated MLP, and its gate may be the other product."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down_proj, self.act_fn, self.swapped = nn.Linear(32, 16, bias=False), nn.SiLU(), swapped

    def forward(self, states: Tensor) -> Tensor:
        gate, up = self.gate_proj(states), self.up_proj(states)
        return self.down_proj(self.act_fn(up) * gate if self.swapped else self.act_fn(gate) * up)


@pytest.mark.parametrize(("swapped", "twin"), [(False, Gated), (True, Doubtful)])
@torch.inference_mode()
def test_an_mlp_that_opens_the_other_way_stays(swapped: bool, twin: type) -> None:
    model, states = nn.Sequential(Doubtful(swapped)), torch.randn(1, 4, 16)
    pack(model, same_input(model, lambda: model(states)))
    quicken(model, lambda: model(states), within=1e-5)
    assert type(model[0]) is twin


class Odd(nn.Module):
    """Looks like a norm by root mean square, and computes something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.eps, self.kind = nn.Parameter(torch.rand(16)), 1e-6, kind

    def forward(self, states: Tensor) -> Tensor:
        if self.kind == "mean taken off":
            states = states - states.mean(-1, keepdim=True)
        eps = 0.0 if self.kind == "no epsilon" else self.eps
        power = 1 if self.kind == "by magnitude" else 2
        return self.weight * states * (states.abs().pow(power).mean(-1, keepdim=True) + eps).pow(-1 / power)


@pytest.mark.parametrize("kind", ["mean taken off", "by magnitude", "no epsilon", "the norm itself"])
@torch.inference_mode()
def test_a_part_that_only_looks_like_a_norm_stays(kind: str) -> None:
    model, states = nn.Sequential(Odd(kind)), torch.randn(1, 4, 16)
    quicken(model, lambda: model(states), within=1e-5)
    assert isinstance(model[0], Norm if kind == "the norm itself" else Odd)


@torch.inference_mode()
def test_attention_that_changes_with_the_position_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models weigh queries by how far into the text they stand: near its beginning nobody sees it."""
    plain = modeling_llama.apply_rotary_pos_emb

    def weighed(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        query, key = plain(query, key, cosine, sine)
        far = cosine[..., -1:] < 0.999  # the slowest angle: from the 45th token on
        return torch.where(far[:, None], 1.1 * query, query), key

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", weighed)
    target = tiny_target("llama", max_position_embeddings=512)
    assert not any(isinstance(part, Attention) for part in target.body.modules())
