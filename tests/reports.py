"""Reports of measurements that never were: rounds drawn from given rates, and every figure counted from those rounds."""

import random
from typing import Any

SETS = ("gsm8k", "humaneval", "mt_bench")
Turn = tuple[int, list[int]]  # accepted in a round, and the tree nodes of what was
WORDS = ["The", " cat", " sat", " <b>", " on", " the", " mat", " & then", ".", "\n", " It", ' said "no"', " é", " <"]


def around(value: float, wide: float) -> dict[str, float]:
    return {"value": value, "low": value * (1 - wide), "high": value * (1 + 1.2 * wide)}


def drawn(rates: list[float], rounds: int, rng: random.Random) -> list[int]:
    """How deep each round went: depth k is accepted with its rate when those before were."""
    return [next((k for k, rate in enumerate(rates) if rng.random() > rate), len(rates)) for _ in range(rounds)]


def line(bench: str, accepted: list[int], prompts: int, equal: int, cost: float) -> dict[str, Any]:
    tokens = sum(accepted) + len(accepted)
    tau = tokens / len(accepted)
    return {
        "bench": bench, "prompts": prompts, "tokens": tokens, "rounds": len(accepted), "tau": around(tau, 0.06),
        "tau_per_prompt": around(tau * 1.01, 0.07), "speedup": around(tau / cost, 0.05),
        "speedup_per_prompt": around(tau / cost * 1.02, 0.06), "speedup_with_prompts": tau / cost * 0.97,
        "plain_tokens_per_second": 10.437, "tokens_per_second": 10.437 * tau / cost, "equal": equal, "looped": 0.137,
    }  # fmt: skip


def sample(accepted: list[int], rng: random.Random) -> dict[str, Any]:
    written = [by for deep in accepted[:30] for by in [*range(1, deep + 1), 0]]
    pieces = [{"text": rng.choice(WORDS), "by": by} for by in written]
    return {"bench": SETS[0], "prompt": 'Is 3 < 4 & "5" > 4?\n<script>alert(1)</script>', "pieces": pieces}


def told(
    name: str = "medusa_smol",
    rates: tuple[float, ...] = (0.62, 0.48, 0.35),
    cost: float = 1.55,
    sets: tuple[str, ...] = SETS,
    apart: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """A report of version 2: `cost` is that of a round in plain rounds; `apart` outputs differ from plain decoding's."""
    rng = random.Random(name)
    each = {bench: drawn(list(rates), 120, rng) for bench in sets}
    lines = [
        line(bench, accepted, 10, 10 - apart * (not at), cost) for at, (bench, accepted) in enumerate(each.items())
    ]
    every = [deep for accepted in each.values() for deep in accepted]
    if len(sets) > 1:
        lines.append(line("all", every, 10 * len(sets), 10 * len(sets) - apart, cost))
    reached = [sum(deep >= k for deep in every) for k in range(len(rates) + 1)]
    depths = [
        {"depth": k, "tried": reached[k - 1], "alpha": reached[k] / max(reached[k - 1], 1), "joint": reached[k] / len(every)}
        for k in range(1, len(rates) + 1)
    ]  # fmt: skip
    drafted = len(rates) * len(every)
    speed = lines[-1]["speedup"]["value"]
    return {
        "version": 3,
        "settings": {
            "drafter": name, "folder": name, "target": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "float32", "compiled": False,
            "tokens": 96, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "rows": 1, "longest": 400,
            "tree": [[0], [1], [0, 0], [0, 0, 0]], "nodes": 10, "accept": "lossless", "threads": 2, "cores": 2,
            "cpu": "AMD EPYC 7B13", "torch": "2.13.0+cpu", "taken": "2026-11-29T18:04:11", **settings,
        },
        "lines": lines,
        "depths": depths,
        "by_node": [count for deep in reached[1:] for count in (deep - deep // 9, deep // 9)],
        "counters": {
            "num_drafts": len(every), "num_draft_tokens": drafted, "num_accepted_tokens": sum(every),
            "num_accepted_tokens_per_pos": reached[1:],
        },
        "draft_acceptance_rate": sum(every) / drafted,
        "overlap": [rate * 0.93 for rate in rates],
        "round_ms": {"draft": 95.8 * (cost - 1.4), "verify": 95.8 * 1.33, "accept": 3.31, "keep": 3.42},
        "plain_round_ms": 95.8,
        "cost": {"nodes": [1, 2, 4, 8, 16, 32], "ms": [95.1, 103.2, 114.9, 133.7, 178.4, 291.6]},
        "predictions": [
            {"method": method, "tau": lines[-1]["tau"]["value"] * (1 + error / 2), "tau_error": error / 2,
             "speedup": speed * (1 + error), "speedup_error": error}
            for method, error in (("alpha", 0.081), ("rates", 0.032), ("costs", -0.046))
        ],
        "divergences": [
            {"bench": sets[0], "prompt": at, "at": 31 + at, "ours": 284 + at, "plain": 198, "gap": 0.00413 * (at + 1)}
            for at in range(apart)
        ],
        "explanation": [
            "Verification takes 1.33 plain passes, and a round yields <too little> to pay for it.",
            f"Drafting takes {cost - 1.4:.2f} of a plain pass.",
        ],
        "sample": sample(every, rng),
    }  # fmt: skip


def family() -> dict[str, dict[str, Any]]:
    """Three drafters of one run: one with divergences, one lossless and fast, one lossy."""
    return {
        "medusa_smol": told("medusa_smol"),
        "eagle3_smol_long": told("eagle3_smol_long", (0.71, 0.62, 0.55, 0.5), 1.95, apart=2),
        "typical": told("typical", (0.8, 0.7, 0.6), 1.6, apart=9, accept="typical") | {"overlap": []},
    }
