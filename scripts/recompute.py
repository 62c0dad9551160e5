"""Recompute a report's figures from the raw log alone: python scripts/recompute.py outputs/.../trace.jsonl

It imports nothing of the package, so that a mistake there is not repeated here.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def recompute(file: Path) -> dict[str, dict[str, Any]]:
    """For each drafter in the log: tau, alpha by depth, vLLM's counters, tokens per second and speed-up over plain decoding."""
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_arm[row["arm"]].append(row)
    plain = speed([row for row in by_arm.pop("plain") if "round" in row])
    found = {}
    for arm, rows in by_arm.items():
        rounds = [row for row in rows if "round" in row]
        found[arm] = {
            "tokens": sum(len(row["tokens"]) for row in rounds),
            "tau": sum(len(row["tokens"]) for row in rounds) / len(rounds),
            "alpha": alpha(rounds),
            **counters(rounds),
            "tokens_per_second": speed(rounds),
            "plain_tokens_per_second": plain,
            "speedup": speed(rounds) / plain,
        }
    return found


def speed(rounds: list[dict[str, Any]]) -> float:
    """Tokens per second; rows that were decoded side by side share the seconds of their round."""
    seconds = {(row["batch"], row["round"]): sum(row["seconds"].values()) for row in rounds}
    return sum(len(row["tokens"]) for row in rounds) / sum(seconds.values())


def alpha(rounds: list[dict[str, Any]]) -> list[float]:
    """At each depth, accepted of those that had a guess there which could still count."""
    rates, depth = [], 1
    while tried := [row for row in rounds if row["offered"] >= depth]:
        rates.append(sum(len(row["path"]) >= depth for row in tried) / len(tried))
        depth += 1
    return rates


def counters(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What vLLM would have counted."""
    per_position = [0] * max(row["offered"] for row in rounds)
    for row in rounds:
        for position in range(len(row["path"])):
            per_position[position] += 1
    return {
        "num_drafts": len([row for row in rounds if row["nodes"]]),
        "num_draft_tokens": sum(row["nodes"] for row in rounds),
        "num_accepted_tokens": sum(per_position),
        "num_accepted_tokens_per_pos": per_position,
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give one trace.jsonl, as decode/run.py writes with decode.trace=true")
    print(json.dumps(recompute(Path(sys.argv[1])), indent=1))
