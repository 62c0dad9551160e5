"""Where a round's time goes: python scripts/bench_round.py conf=eagle3_smol [decode.prompts=4 decode.nodes=10]

What a round takes beyond the bare calls of the same modules with the same shapes; a round with the drafter against a
plain one; plain decoding against transformers' generate. Every figure on two clocks: wall time, which wants an idle
machine, and processor time, which with OMP_NUM_THREADS=1 bears a busy one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, PreTrainedModel

from conf import command
from conf.schema import Run
from decode.arms import arms_of
from decode.engine import generate, rounds
from decode.opening import open_drafter, open_target, open_tokenizer, served_folder
from decode.progress import tracked
from decode.prompts import choose
from models import stack
from models.cache import KVCache
from models.drafter import Budget, Drafter, Plain
from models.target import Target

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
SKIPPED = 2  # rounds at first: the prompt, and what is allocated once
REPEATS = 3  # runs of each arm against generate, one after the other in turn
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Times = dict[str, float]


def timed(work: Callable[[], object]) -> Times:
    """Milliseconds of `work` on both clocks."""
    before = {name: clock() for name, clock in CLOCKS.items()}
    work()
    return {name: 1000 * (clock() - before[name]) for name, clock in CLOCKS.items()}


@contextmanager
def outermost() -> Iterator[list[Call]]:
    """The calls that stand in no other, in order: of modules, and of a drafter's whole stack of layers."""
    calls: list[Call] = []
    deep = 0

    def enter(call: Callable[..., Any], args: Any) -> None:
        nonlocal deep
        if not deep:
            calls.append((call, args, {}))
        deep += 1

    def leave(call: Callable[..., Any], args: Any, kwargs: Any, output: Any) -> None:
        nonlocal deep
        deep -= 1
        if not deep:
            calls[-1] = (call, args, kwargs)

    def climbing(*args: Any) -> Tensor:
        enter(climb, args)
        state = climb(*args)
        leave(climb, args, {}, state)
        return state

    climb, stack.climb = stack.climb, climbing
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, with_kwargs=True)]
    try:
        yield calls
    finally:
        stack.climb = climb
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def replay(calls: list[Call], target: Target) -> Times:
    """The same calls again, nothing between them; what they write to the target's cache is put back."""
    caches = [value for _, _, how in calls for value in how.values() if isinstance(value, KVCache)]
    stores = [cache.store for cache in caches if cache.store is not None]
    held = [store.clone() for store in stores]

    def again() -> None:
        for call, args, how in calls:
            call(*args, **how)

    times = timed(again)
    for store, before in zip(stores, held, strict=True):
        store.copy_(before)
    return times


@dataclass
class Parts:
    """Milliseconds of rounds and of their bare module calls, round by round."""

    rounds: list[Times] = field(default_factory=list)
    bare: list[Times] = field(default_factory=list)

    def round(self, clock: str) -> float:
        return median(one[clock] for one in self.rounds)

    def overhead(self, clock: str) -> float:
        """Share of a round that is not its modules' own."""
        return 1 - median(one[clock] for one in self.bare) / self.round(clock)


def take_apart(target: Target, drafter: Drafter, budget: Budget, prompt: list[int], limit: int, parts: Parts) -> None:
    """Add to `parts` rounds as they are, then the module calls of one like them alone, in turn.

    Hooks would slow the round that is timed, so rounds are timed and listened to alternately.
    """
    turns = rounds(target, drafter, [prompt], limit, budget)
    for _ in range(SKIPPED):
        next(turns, None)
    while True:
        try:
            took = timed(lambda: next(turns))
            with outermost() as calls:
                next(turns)
        except StopIteration:
            return
        parts.rounds.append(took)
        parts.bare.append(replay(calls, target))


def by_generate(stock: PreTrainedModel, target: Target, prompt: list[int], count: int, cache: str | None) -> list[int]:
    """Up to `count` tokens after `prompt` by transformers' own greedy generation, with its dynamic cache where `cache` is None."""
    how = {"do_sample": False, "eos_token_id": sorted(target.end_tokens), "pad_token_id": 0, "disable_compile": True}
    how |= {"cache_implementation": cache} if cache else {}
    return stock.generate(torch.tensor([prompt]), max_new_tokens=count, **how)[0, len(prompt) :].tolist()  # type: ignore[operator]


def against_generate(target: Target, stock: PreTrainedModel, prompt: list[int], limit: int) -> dict[str, Times]:
    """Milliseconds a token of our plain decoding and of transformers' generate with either cache, after the first token.

    Reading the prompt is in all of them; it is taken off as the time of one token alone.
    """
    arms: dict[str, Callable[[int], list[int]]] = {
        "ours": lambda count: generate(target, Plain(), [prompt], count, Budget(nodes=1)).generations[0].tokens,
        "dynamic cache": lambda count: by_generate(stock, target, prompt, count, None),
        "static cache": lambda count: by_generate(stock, target, prompt, count, "static"),
    }
    texts = {name: arm(limit) for name, arm in arms.items()}
    if len({tuple(text) for text in texts.values()}) > 1:
        print("note: the texts differ (in fp32 they should not, but for ties)")
    spent: dict[str, list[Times]] = {name: [] for name in arms}
    for _ in range(REPEATS):
        for name, arm in arms.items():
            first, whole = timed(lambda arm=arm: arm(1)), timed(lambda arm=arm: arm(limit))  # type: ignore[misc]
            count = max(len(texts[name]) - 1, 1)
            spent[name].append({clock: (whole[clock] - first[clock]) / count for clock in CLOCKS})
    return {name: {clock: median(one[clock] for one in times) for clock in CLOCKS} for name, times in spent.items()}


def bench(run: Run) -> None:
    """Print the three comparisons for the run's drafter: rounds of both arms on its prompts in turn, generate's on the first."""
    arm, how = arms_of(run)[0], run.decode
    chosen = choose(how.bench, open_tokenizer(run.target), how.prompts, how.longest, 1)
    prompts = [script.prompt() for scripts in chosen.values() for script in scripts]
    target = open_target(run.target)
    drafter = open_drafter(arm.folder, arm.card, target)
    print(f"{arm.name} on {run.target.name}, {target.dtype}, {torch.get_num_threads()} threads, {len(prompts)} prompts")
    drafted, plain = Parts(), Parts()
    for prompt in tracked(prompts, "rounds"):
        take_apart(target, drafter, arm.budget, prompt, how.tokens, drafted)
        take_apart(target, Plain(), Budget(nodes=1), prompt, how.tokens, plain)
    stock = AutoModelForCausalLM.from_pretrained(served_folder(run.target), dtype=target.dtype)
    ours = against_generate(target, stock.eval(), prompts[0], how.tokens)
    for clock in CLOCKS:
        faster = min("dynamic cache", "static cache", key=lambda name: ours[name][clock])
        print(
            f"{clock} time: a round of {arm.budget.nodes} nodes {drafted.round(clock):.1f} ms, of it overhead {drafted.overhead(clock):.1%}; "
            f"a plain round {plain.round(clock):.1f} ms, overhead {plain.overhead(clock):.1%}; "
            f"round / plain {drafted.round(clock) / plain.round(clock):.2f}; "
            f"plain decoding {ours[faster][clock] / ours['ours'][clock]:.2f} times generate ({faster}, {ours[faster][clock]:.1f} ms a token)"
        )


main = command("bench_round:bench")

if __name__ == "__main__":
    main()
