"""Tiny random targets, one for each architecture, made once a session in a folder of their own."""

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from decode.prompts import choose
from models.source import from_random
from models.target import Target, load_target

torch.set_num_threads(1)  # these models are too small to share

WINDOW = 8
SMALL: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide enough that greedy text does not repeat one token
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW},
    "gemma3_text": {"head_dim": 8, "sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
}


def tiny_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """What `from_random` needs for a small model of `architecture`."""
    return {"model_type": architecture, **SMALL, **ARCHITECTURES.get(architecture, {}), **changes}


def tiny_target(architecture: str, **changes: Any) -> Target:
    """A small random target of `architecture` in fp32."""
    return load_target(from_random(tiny_config(architecture, **changes)), architecture, dtype="fp32", device="cpu")


def stock_model(folder: Path) -> PreTrainedModel:
    """The model in `folder` as transformers runs it, untouched by ours."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def bench_prompts(
    names: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int, longest: int
) -> dict[str, list[list[int]]]:
    """The prompts of the conversations that `choose` takes: their first turns, as the protocol has it."""
    chosen = choose(names, tokenizer, count, longest)
    return {name: [dialogue.prompt() for dialogue in dialogues] for name, dialogues in chosen.items()}


@dataclass
class Family:
    """One architecture: our target, transformers' own model of the same weights, and what that model says."""

    target: Target
    stock: Any  # a PreTrainedModel
    said: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def says(self, prompt: list[int], limit: int) -> list[int]:
        """Up to `limit` tokens after `prompt` by transformers' own greedy generation."""
        key = (tuple(prompt), limit)
        if key not in self.said:
            ends = sorted(self.target.end_tokens)
            out = self.stock.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=limit, eos_token_id=ends, pad_token_id=0
            )
            self.said[key] = out[0, len(prompt) :].tolist()
        return self.said[key]


@dataclass
class Notes:
    """What the proofs measured, for the end of the run."""

    worst: dict[str, tuple[int, float]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    equal: int = 0  # greedy texts of tiny targets that were plain decoding's

    def error(self, kind: str, value: float) -> float:
        """Remember the largest error of its kind, and how many there were."""
        self._count(kind, 1, value)
        return value

    def add(self, other: dict[str, Any]) -> None:
        """Take in what another process noted, its fields as a dictionary."""
        for kind, (count, most) in other["worst"].items():
            self._count(kind, count, most)
        self.lines += other["lines"]
        self.equal += other["equal"]

    def _count(self, kind: str, count: int, value: float) -> None:
        before, most = self.worst.get(kind, (0, 0.0))
        self.worst[kind] = (before + count, max(most, value))


NOTES = pytest.StashKey[Notes]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOTES] = Notes()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what was noted to the process that prints it, where this is one of several that share the tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["notes"] = asdict(session.config.stash[NOTES])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take in what such a process noted, if it lived to hand it over."""
    if hasattr(node, "workeroutput"):
        node.config.stash[NOTES].add(node.workeroutput["notes"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the proofs measured."""
    notes = config.stash[NOTES]
    if notes.worst or notes.lines:
        terminalreporter.section("proofs")
    for kind, (count, most) in sorted(notes.worst.items()):
        terminalreporter.write_line(f"{kind}: {count} laws counted out, total variation at most {most:.1e}")
    if notes.equal:
        terminalreporter.write_line(f"greedy, tiny targets: {notes.equal} of {notes.equal} texts are plain decoding's")
    for line in notes.lines:
        terminalreporter.write_line(line)


@pytest.fixture
def notes(request: pytest.FixtureRequest) -> Notes:
    """Where a proof says what it measured."""
    return request.config.stash[NOTES]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests make their targets in a folder of the session, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OUTRIDER_CACHE", str(tmp_path_factory.mktemp("outrider")))
        yield


@functools.cache
def family_of(architecture: str) -> Family:
    """The family of `architecture`, built when first asked for."""
    folder = from_random(tiny_config(architecture))
    return Family(load_target(folder, architecture, dtype="fp32", device="cpu"), stock_model(folder))


@pytest.fixture(params=ARCHITECTURES)
def family(request: pytest.FixtureRequest) -> Family:
    """Each architecture in turn, with no taps set."""
    made = family_of(request.param)
    made.target.tap(())
    return made


@pytest.fixture
def llama() -> Family:
    """An ordinary target, with no taps set."""
    made = family_of("llama")
    made.target.tap(())
    return made
