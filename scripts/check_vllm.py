"""What our decoder writes and counts in chain mode, for scripts/check_vllm.sh to compare with vLLM's.

`python scripts/check_vllm.py conf=NAME`: exports the drafter in every layout of its that vLLM reads, decodes the prompts, and
leaves expected.json beside them. A draft model, which needs no export, is served as it is, or written out where it is the
target's own first layers. `--compare FOLDER` then lays what vLLM left beside it: in fp32 (CHECK_DTYPE) both must be equal. In
bf16 two programs round differently and their texts part, so acceptance must be, within TOLERANCE at every depth.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from conf import command
from conf.schema import Run
from decode.engine import Generation, generate
from decode.opening import open_drafter, open_target, open_tokenizer, served_folder
from decode.prompts import choose
from models.drafter import Budget, Plain
from models.layouts import LAYOUTS
from models.shelf import Card, read_card, untrained
from models.source import from_hub
from models.tree import chain
from train.export import export, guesses, trained

TOKENS = 64
TOLERANCE = 0.05  # in the share of rounds that accept so deep: over 20 prompts chance alone makes about 0.02
ROWS = 5  # side by side, to save time; each is decoded as if alone
COUNTERS = ("drafts", "drafted", "accepted", "per_position")


def expect(run: Run) -> None:
    """Export, decode, and write down the texts and the counters. CHECK_VLLM names the folder, CHECK_PROMPTS how many a set."""
    home, card = Path(os.environ["CHECK_VLLM"]), untrained(run.drafter)
    folder = None if card else trained(run)
    card = card or read_card(trained(run))
    served = exported(run, card, home) if folder else {"vllm": draft_model(run, home / "vllm")}
    depth = run.decode.depth = guesses(card)
    prompts = chosen(run, int(os.environ["CHECK_PROMPTS"]))
    run.target.dtype = os.environ["CHECK_DTYPE"]
    target = open_target(run.target)
    target.tokenizer.eos_token = None  # the end token is ignored
    assert target.model.generation_config is not None
    target.model.generation_config.eos_token_id = None
    plain = [one.tokens for one in generate(target, Plain(), prompts, TOKENS, Budget(nodes=1), rows=ROWS).generations]
    drafter = open_drafter(folder, card, target)
    # decoded further than the limit, so that the round which passes it counts whole
    drafted = generate(
        target, drafter, prompts, TOKENS + depth, Budget(tuple(chain(depth)), depth + 1, depth), rows=ROWS
    )
    found = {
        "target": str(served_folder(run.target)),
        "served": {layout: {**told, "num_speculative_tokens": depth} for layout, told in served.items()},
        "depth": depth,
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokens": TOKENS,
        "prompts": prompts,
        "texts": plain,
        "equal": [one.tokens[:TOKENS] for one in drafted.generations] == plain,
        "counters": counted(drafted.generations, depth),
    }
    (home / "expected.json").write_text(json.dumps(found))


def exported(run: Run, card: Card, home: Path) -> dict[str, dict[str, Any]]:
    """Every layout that CHECK_LAYOUTS names and vLLM reads, written below `home`, with what vLLM is told."""
    served = {}
    for layout in LAYOUTS:
        if layout.family == card.family and layout.method and layout.name in os.environ["CHECK_LAYOUTS"].split(","):
            run.layout, run.out = layout.name, str(home / layout.name)
            served[layout.name] = {"method": layout.method, "model": str(export(run)), **layout.told}
    if not served:
        raise ValueError(f"{card.family} has none of LAYOUTS={os.environ['CHECK_LAYOUTS']} that vLLM reads")
    return served


def draft_model(run: Run, out: Path) -> dict[str, Any]:
    """What vLLM is told of a draft model: where it is, or, of the target's first layers, where they were written out."""
    knobs = run.drafter
    if knobs["name"]:
        return {"method": "draft_model", "model": str(from_hub(knobs["name"], knobs["revision"], kind="draft model"))}
    first = AutoModelForCausalLM.from_pretrained(served_folder(run.target), num_hidden_layers=knobs["layers"])
    first.save_pretrained(out)
    return {"method": "draft_model", "model": str(out)}


def chosen(run: Run, count: int) -> list[list[int]]:
    """`count` prompts, as evenly from the protocol's sets as they go."""
    sets = run.decode.bench
    found = choose(sets, open_tokenizer(run.target), -(-count // len(sets)), run.decode.longest)
    return [dialogue.prompt() for dialogues in zip(*found.values(), strict=True) for dialogue in dialogues][:count]


def counted(generations: list[Generation], depth: int) -> dict[str, Any]:
    """vLLM's counters: every round that began before the limit, the last one whole."""
    paths = []
    for one in generations:
        written = 1
        for step in one.steps:
            if written >= TOKENS:
                break
            paths.append(len(step.path))
            written += step.committed
    by_depth = [sum(path > place for path in paths) for place in range(depth)]
    return dict(zip(COUNTERS, (len(paths), depth * len(paths), sum(paths), by_depth), strict=True))


def compare(home: Path) -> int:
    """Print both rows for every layout that was served; 1 where they differ by more than they may."""
    ours, wrong = json.loads((home / "expected.json").read_text()), 0
    strict = ours["dtype"] == "float32"
    print(
        f"{len(ours['prompts'])} prompts, {TOKENS} tokens, chains of {ours['depth']}, {ours['dtype']}, greedy, one sequence at a time"
    )
    print(f"{'':24} text     " + " ".join(f"{name:>12}" for name in COUNTERS))
    print(row("ours", ours["equal"], ours["counters"]))
    for file in sorted(home.glob("served_*.json")):
        theirs = json.loads(file.read_text())
        same = theirs["texts"] == ours["texts"]
        print(row(f"vLLM {theirs['version']}, {file.stem.removeprefix('served_')}", same, theirs["counters"]))
        exact = same and ours["equal"] and theirs["counters"] == ours["counters"]
        wrong += not (exact if strict else alike(ours["counters"], theirs["counters"]))
    fine = "they are the same" if strict else f"no depth is accepted in {TOLERANCE:.0%} more rounds of one"
    print(fine if not wrong else f"error: {wrong} of them differ")
    return int(bool(wrong))


def alike(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether as large a share of rounds accepts every depth, within TOLERANCE."""
    shares = ([count / one["drafts"] for count in one["per_position"]] for one in (ours, theirs))
    return all(abs(mine - other) <= TOLERANCE for mine, other in zip(*shares, strict=True))


def row(name: str, same: bool, counters: dict[str, Any]) -> str:
    """One line of the table; the text is compared with the target's own."""
    return f"{name:24} {'equal' if same else 'DIFFERS':8} " + " ".join(f"{counters[key]!s:>12}" for key in COUNTERS)


main = command("check_vllm:expect")

if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.exit(compare(Path(sys.argv[2])))
    main()
