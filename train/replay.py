"""A drafter's files as a server takes them, replayed over text: an arithmetic of its own, none of the writer's or trainer's.

T positions, K depths, L taps, D width, H heads, G key-value heads, C head width, Vd draft vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True)
class Text:
    """One conversation, and what the target made of it."""

    ids: Tensor  # [T]
    mask: Tensor  # [T] true where the target speaks
    states: Mapping[int, Tensor]  # hidden states [T, D] by number
    last: Tensor  # [T, D] after the final norm
    embedded: Tensor  # [T, D]


@dataclass(frozen=True)
class Patient:
    """What decides a guess. A suspicion is a patient with one thing changed."""

    tensors: Mapping[str, Tensor]  # by vLLM's names
    ids: Tensor | None  # [Vd] the target's ids of the draft tokens; None where they are the target's own
    depth: int
    layers: int = 0  # decoder layers; Medusa has none
    taps: tuple[int, ...] = ()  # none: EAGLE-1, which reads the last hidden state
    order: tuple[int, ...] = ()  # which part of fc belongs to which tap; EAGLE-1: to embedding and state
    mask: Tensor | None = None  # [D] P-EAGLE's mask token, embedded
    rope: Mapping[str, Any] | None = None
    eps: float = 1e-5
    width: int = 0  # of a head
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    shift: int = 0  # how much further than it should a guess looks


def hits(patient: Patient, texts: list[Text]) -> Tensor:
    """[2, K] how often the first pick at each depth was what the target said, and how often it could have been."""
    total = torch.zeros(2, patient.depth)
    for text in texts:
        guess = eagle if patient.layers else medusa
        for depth, picks in enumerate(guess(patient, text)):
            where = answered(text.mask, depth)
            said = text.ids.roll(-(2 + depth + patient.shift))
            total[0, depth] += (where & (picks == said)).sum()
            total[1, depth] += where.sum()
    return total


def answered(mask: Tensor, depth: int) -> Tensor:
    """[T] positions whose next token and `depth` + 1 after it the target says."""
    where = torch.ones_like(mask)
    for ahead in range(1, depth + 3):
        later = mask.roll(-ahead)
        later[len(mask) - ahead :] = False
        where = where & later
    return where


def medusa(patient: Patient, text: Text) -> Iterator[Tensor]:
    """[T] what each head picks after every position."""
    held = patient.tensors
    for head in range(patient.depth):
        state, layer = text.last, 0
        while (weight := held.get(f"blocks.{head}.layers.{layer}.weight")) is not None:
            bias = held.get(f"blocks.{head}.layers.{layer}.bias")
            state = state + torch.nn.functional.silu(torch.nn.functional.linear(state, weight, bias))
            layer += 1
        matrix = held["lm_head.weight"] if "lm_head.weight" in held else held[f"lm_heads.{head}.weight"]
        yield said(patient, state @ matrix.T)


def eagle(patient: Patient, text: Text) -> Iterator[Tensor]:
    """[T] what the layers pick after every position at each step.

    A step reads the true token and its own last state, P-EAGLE's later ones the mask token and its learned feature.
    """
    held = patient.tensors
    state = fused(patient, [text.states[tap] for tap in patient.taps]) if patient.taps else text.last
    seen: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(patient.layers)]
    for step in range(patient.depth):
        token = text.embedded.roll(-(1 + step), 0)
        if step and patient.mask is not None:
            token = patient.mask.expand_as(token)
            state = fused(patient, held["mask_hidden"].flatten().chunk(len(patient.taps))).expand_as(state)
        pair, base = entering(patient, token, state)
        for number, (keys, values) in enumerate(seen):
            if number:
                pair, base = rms(state, held[f"layers.{number}.input_layernorm.weight"], patient.eps), state
            state = through(patient, number, (pair, base), keys, values)
        final = rms(state, held["norm.weight"], patient.eps) if "norm.weight" in held else state
        yield said(patient, final @ held["lm_head.weight"].T + held.get("lm_head.bias", torch.zeros(())))
        state = final if patient.norm_output else state


def entering(patient: Patient, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What the first layer's attention reads of `token` and `state` [T, D], and what its output is added to."""
    held = patient.tensors
    if not patient.taps:
        parts = [token, state]
        joined = torch.cat([parts[place] for place in patient.order or (0, 1)], dim=-1)
        both = joined @ held["fc.weight"].T + held.get("fc.bias", torch.zeros(()))
        return both, both
    normed = rms(state, held["layers.0.hidden_norm.weight"], patient.eps)
    pair = torch.cat([rms(token, held["layers.0.input_layernorm.weight"], patient.eps), normed], dim=-1)
    return pair, normed if patient.norm_before_residual else state


def through(
    patient: Patient, number: int, entering: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """[T, D] what layer `number` makes of a step, whose keys and values join those of the steps before."""
    pair, base = entering
    held, name, time = patient.tensors, f"layers.{number}", torch.arange(len(pair)) + len(keys)
    query, key, value = (heads_of(patient, pair @ held[f"{name}.self_attn.{part}_proj.weight"].T) for part in "qkv")
    keys.append(turned(patient, key, time))
    values.append(value)
    state = base + attended(turned(patient, query, time), keys, values) @ held[f"{name}.self_attn.o_proj.weight"].T
    inner = rms(state, held[f"{name}.post_attention_layernorm.weight"], patient.eps)
    gate, up, down = (held[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return state + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T


def fused(patient: Patient, taps: Sequence[Tensor]) -> Tensor:
    """[..., D] one feature of the taps."""
    if patient.fc_norm:
        taps = [rms(tap, patient.tensors[f"fc_norm.{place}.weight"], patient.eps) for place, tap in enumerate(taps)]
    taps = [taps[place] for place in patient.order or range(len(taps))]
    joined = torch.cat(taps, dim=-1)
    if patient.norm_before_fc:
        joined = rms(joined, patient.tensors["input_norm.weight"], patient.eps)
    return joined @ patient.tensors["fc.weight"].T


def attended(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[T, H*C] each query sees the first step's keys up to itself, and one of its own for each later step."""
    repeat = len(query) // len(keys[0])
    keys, values = ([one.repeat_interleave(repeat, 0) for one in every] for every in (keys, values))
    scale = query.shape[-1] ** -0.5
    far = (query @ keys[0].transpose(-1, -2) * scale).masked_fill(
        torch.ones(len(query[0]), len(query[0])).triu(1) > 0, -torch.inf
    )
    near = [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    weight = torch.cat([far, *near], dim=-1).softmax(-1)
    out = weight[..., : far.shape[-1]] @ values[0]
    for place, value in enumerate(values[1:], start=far.shape[-1]):
        out = out + weight[..., place : place + 1] * value
    return out.transpose(0, 1).flatten(1)


def heads_of(patient: Patient, states: Tensor) -> Tensor:
    """[H, T, C] of [T, H*C]."""
    return states.unflatten(-1, (-1, patient.width)).transpose(0, 1)


def turned(patient: Patient, heads: Tensor, position: Tensor) -> Tensor:
    """`heads` [H, T, C] rotated by their positions."""
    config = LlamaConfig(
        head_dim=patient.width,
        num_attention_heads=1,
        hidden_size=patient.width,
        rope_parameters=dict(patient.rope or {}),
    )
    cos, sin = LlamaRotaryEmbedding(config)(heads, position[None])
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-right, left], dim=-1) * sin


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm."""
    return states * (states.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def said(patient: Patient, logits: Tensor) -> Tensor:
    """The target's ids of the likeliest draft tokens."""
    picks = logits.argmax(-1)
    return picks if patient.ids is None else patient.ids[picks]
