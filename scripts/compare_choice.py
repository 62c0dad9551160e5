"""Whether decode.tune chose well: python scripts/compare_choice.py conf=medusa_smol [decode.prompts=3 decode.tokens=64]

Its choice for the run's batch and context against plain decoding and a sweep of chains and trees, all of them decoding
every prompt in turn. The last line is the choice's speed over the sweep's best, with its interval over prompts; the best
of many is lucky, so at equal worth that stands a little below 1. Run `python -m decode.tune` first, and nothing beside.
"""

from dataclasses import replace
from functools import partial

from rich.console import Console

from conf import command
from conf.schema import Run
from decode.arms import arms_of
from decode.engine import Run as Decoded
from decode.engine import generate
from decode.figures import Sample, Tally, bootstrap, plain_speed, speedup, tau
from decode.measure import in_turn
from decode.opening import open_drafter, open_target, open_tokenizer
from decode.progress import tracked
from decode.prompts import choose
from models.drafter import Budget, Drafter, Plain

CHAINS, SIZES, FLOORS = (1, 2, 3, 4), (3, 4, 6, 8, 10, 12, 16), (0.0, 0.03, 0.1)
PLAIN, CHOICE = "plain decoding", "the choice"


def swept(run: Run) -> dict[str, Budget]:
    """What the choice is compared with, by name."""
    how = run.decode
    chains = {f"chain of {depth}": Budget.chain(depth) for depth in CHAINS if depth <= how.depth}
    trees = {
        f"tree of {nodes}, paths of at least {floor:g}": Budget((), nodes, how.depth, how.branch, floor)
        for nodes in SIZES
        for floor in FLOORS
    }
    return chains | trees


def compare(run: Run) -> None:
    """Decode with every proposal in turn, and print what each was worth."""
    console, how = Console(), run.decode
    arm = arms_of(replace(run, decode=replace(how, tree="tuned", beside=[])))[0]
    budgets = {PLAIN: Budget(nodes=1), CHOICE: arm.budget, **swept(run)}
    chosen = choose(how.bench, open_tokenizer(run.target), how.prompts, how.longest, 1)
    prompts = [(bench, dialogue.prompt()) for bench, dialogues in chosen.items() for dialogue in dialogues]
    target = open_target(run.target)
    drafter = open_drafter(arm.folder, arm.card, target)
    guessers: list[tuple[Drafter, Budget]] = [
        (Plain() if name == PLAIN else drafter, budget) for name, budget in budgets.items()
    ]
    decode = partial(generate, target, limit=how.tokens)
    in_turn(partial(decode, limit=8), guessers, [prompts[0][1]], 1)  # first calls allocate
    written: list[dict[str, Decoded]] = []
    for number, (_, prompt) in enumerate(tracked(prompts, "decoding", console=console)):
        found = in_turn(decode, guessers, [prompt], number)
        written.append({name: found[at] for at, name in enumerate(budgets)})

    def against(name: str, other: str) -> Tally:
        pairs = zip(prompts, written, strict=True)
        return Tally.of([Sample(bench, runs[name], runs[other]) for (bench, _), runs in pairs])

    tallies = {name: against(name, PLAIN) for name in budgets if name != PLAIN}
    console.print(f"{PLAIN}: {plain_speed(tallies[CHOICE]).item():.1f} tokens/s over {len(prompts)} prompts")
    for name, tally in sorted(tallies.items(), key=lambda each: -speedup(each[1]).item()):
        console.print(f"{name}: speed-up {bootstrap(tally, speedup)}, tau {tau(tally).item():.2f}", highlight=False)
    best = max((name for name in tallies if name != CHOICE), key=lambda name: speedup(tallies[name]).item())
    console.print(
        f"the choice ({budgets[CHOICE]}) over the best of {len(tallies) - 1}, {best}: {bootstrap(against(CHOICE, best), speedup)}"
    )


main = command("compare_choice:compare")

if __name__ == "__main__":
    main()
