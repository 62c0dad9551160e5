"""Measurements written by hand: what every round accepted, offered and committed, and how long it took."""

from decode.cost import Cost
from decode.engine import PHASES, Generation, Round, Run, Step
from decode.figures import Sample

SHARE = (1 / 8, 1 / 2, 1 / 8, 1 / 4)  # of a round's seconds, by phase
NODES = 5
COST = Cost([1, 2, 4, 8, 16], [100.0, 100.0, 110.0, 150.0, 250.0])

Turn = tuple[int, int, int]  # accepted, offered, committed


def drafted(generations: list[list[Turn]], seconds: float, prefill: float = 0.5, nodes: int = NODES) -> Run:
    """A run whose prompts were decoded one after the other; accepted nodes are 1, 2, ... of `nodes`."""
    made, turns = [], []
    count = sum(map(len, generations))
    for prompt, given in enumerate(generations):
        steps = [
            Step(nodes, tuple(range(1, accepted + 1)), offered, committed) for accepted, offered, committed in given
        ]
        made.append(Generation(prompt, list(range(1 + sum(step.committed for step in steps))), False, steps))
        for _ in steps:
            spent = {phase: share * seconds / count for phase, share in zip(PHASES, SHARE, strict=True)}
            turns.append(Round(spent, 0.0, nodes + 1, [made[-1]], []))
    return Run(made, [Round(dict.fromkeys(PHASES, 0.0), prefill, 0, [], []), *turns])


def plain(tokens: list[int], seconds: float, prefill: float = 0.25) -> Run:
    """Plain decoding of texts of so many tokens."""
    return drafted([[(0, 0, 1)] * (count - 1) for count in tokens], seconds, prefill, nodes=0)


CUT: list[Turn] = [(2, 3, 3), (0, 1, 1), (2, 2, 2)]  # the last round stands at the limit: its bonus token is beyond it
SHORT: list[Turn] = [(4, 4, 5), (1, 1, 1)]  # the last round ends the text with a guess
SAMPLES = [
    Sample("a", drafted([CUT], 2.0), plain([7], 3.0)),
    Sample("a", drafted([SHORT], 1.0), plain([7], 4.0)),
    Sample("b", drafted([[(0, 1, 1)], CUT], 4.0), plain([2, 7], 5.0)),
    Sample("b", drafted([[]], 0.0), plain([1], 0.0)),  # its very first token ended the text
]
TURNS = [*CUT, *SHORT, (0, 1, 1), *CUT]
