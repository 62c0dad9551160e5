"""Attention in blocks, and keys of one's own merged into it, against a softmax over all keys for each query by itself."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import models.sight
from models.layer import Attention
from models.sight import Looking, Sight
from reference import attention_by_query

B, Q, T, H, G, C = 2, 7, 16, 6, 2, 4
DOCUMENT = torch.tensor([[0] * 6 + [1] * 7 + [-1] * 3, [0] * 16])
AT = torch.tensor([[2, 3, 5, 6, 9, 12, 0], [0, 1, 7, 8, 11, 14, 15]])  # of the first row, the last seat is empty


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("block", [1, 3, 128])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_blocks_and_own_keys_are_one_softmax_with_its_gradients(block, steps, monkeypatch):
    monkeypatch.setattr(models.sight, "BLOCK", block)
    torch.manual_seed(1)
    attention = Attention(LlamaConfig(num_attention_heads=H, num_key_value_heads=G, head_dim=C, hidden_size=H * C), 8)
    queries, keys, values = drawn(B, H, Q, C), drawn(B, G, T, C), drawn(B, G, T, C)
    own = [(drawn(B, G, Q, C), drawn(B, G, Q, C)) for _ in range(steps)]
    learners = [queries, keys, values, *(one for pair in own for one in pair)]
    found = attention.found_with_own(queries, (keys, values), Sight(AT, DOCUMENT), own)
    wanted = attention_by_query(queries, (keys, values), AT, DOCUMENT, own)
    torch.testing.assert_close(found, wanted)
    push = torch.randn(B, H, Q, C, dtype=torch.float64)
    slopes = (torch.autograd.grad((push * one).sum(), learners) for one in (found, wanted))
    torch.testing.assert_close(*slopes)


def test_gradients_of_what_is_found_and_of_its_mass_are_those_of_finite_differences(monkeypatch):
    monkeypatch.setattr(models.sight, "BLOCK", 3)
    torch.manual_seed(1)
    sight = Sight(AT, DOCUMENT)
    given = drawn(B, H, Q, C), drawn(B, G, T, C), drawn(B, G, T, C)
    assert torch.autograd.gradcheck(lambda *these: Looking.apply(*these, sight), given, fast_mode=True)


def test_no_block_reads_keys_beyond_its_last_query(monkeypatch):
    monkeypatch.setattr(models.sight, "BLOCK", 3)
    assert [block.stop for block in Sight(AT, DOCUMENT).blocks] == [8, 15, 16]
