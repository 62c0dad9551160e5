"""What theory says a drafter should buy, beside what it bought.

Three forecasts, each with less assumed than the one before: `alpha` knows one acceptance rate and takes verification
for free, `rates` knows how far rounds really got and what they really cost, `costs` takes the cost of verification from
the machine's own curve instead of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decode.cost import Cost
from decode.figures import Depth


@dataclass
class Prediction:
    """One forecast, and how far it is off: (forecast - measured) / measured."""

    method: str
    tau: float
    speedup: float
    tau_error: float
    speedup_error: float


@dataclass(frozen=True)
class Facts:
    """What was measured of one drafter."""

    tau: float
    speedup: float
    depths: list[Depth]
    by_node: list[int]
    passes: int  # rounds of all rows
    round_ms: dict[str, float]  # draft, verify, accept, keep
    plain_ms: dict[str, float]
    widths: list[int]  # nodes the target read, root included, round by round
    cost: Cost

    @property
    def round(self) -> float:
        """Milliseconds of a round."""
        return sum(self.round_ms.values())

    @property
    def plain(self) -> float:
        """Milliseconds of a plain round."""
        return sum(self.plain_ms.values())

    @property
    def other(self) -> float:
        """Milliseconds of a round that are neither drafting nor verifying."""
        return self.round_ms["accept"] + self.round_ms["keep"]

    def verify(self, nodes: int) -> float:
        """Milliseconds that verifying `nodes` nodes should take by the curve.

        The curve gives the ratio to a plain pass, the run the plain pass: a machine that was busier during one of the
        two does not matter.
        """
        return self.plain_ms["verify"] * self.cost.at(nodes) / self.cost.at(1)


def tau_of_alpha(alpha: float, gamma: int) -> float:
    """Expected tokens of a round with `gamma` guesses, each accepted with probability `alpha` (Leviathan et al. 2023, eq. 1)."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def pass_ms(weights: float, bandwidth: float, flops: float = float("inf"), nodes: int = 1, width: float = 2.0) -> float:
    """Milliseconds of one pass over `nodes` tokens on hardware one does not have, from its data sheet alone.

    Every byte of the `weights` is read once, at `bandwidth` bytes a second; each weight of `width` bytes is multiplied
    and added once for each node, at `flops` operations a second; the slower of the two counts. Context is left out.
    """
    return 1000 * max(weights / bandwidth, 2 * nodes * weights / width / flops)


def knee(bandwidth: float, flops: float, width: float = 2.0) -> float:
    """Nodes up to which a pass costs what one node costs: where arithmetic takes as long as reading the weights."""
    return width * flops / (2 * bandwidth)


def speedup_of_alpha(alpha: float, gamma: int, step: float) -> float:
    """Speed-up of `gamma` guesses, each drafted in `step` plain passes and accepted with probability `alpha`, where
    checking them costs one pass (Leviathan et al. 2023, theorem 3.8; `step` is the paper's c).
    """
    return tau_of_alpha(alpha, gamma) / (gamma * step + 1)


def tau_of_rates(rates: Sequence[float]) -> float:
    """Expected tokens of a round where depth k is accepted at `rates[k - 1]` once the depths before were."""
    tau, arrived = 1.0, 1.0
    for rate in rates:
        arrived *= rate
        tau += arrived
    return tau


def pooled_alpha(depths: Sequence[Depth]) -> float:
    """Accepted of all guesses that were tried, whatever their depth."""
    tried = sum(depth.tried for depth in depths)
    return sum(depth.alpha * depth.tried for depth in depths) / tried if tried else 0.0


def predictions(facts: Facts) -> list[Prediction]:
    """The three forecasts."""
    return [
        _prediction("alpha", *by_alpha(facts), facts),
        _prediction("rates", *by_rates(facts), facts),
        _prediction("costs", *by_costs(facts), facts),
    ]


def _prediction(method: str, tau: float, speedup: float, facts: Facts) -> Prediction:
    return Prediction(method, tau, speedup, tau / facts.tau - 1, speedup / facts.speedup - 1)


def by_alpha(facts: Facts) -> tuple[float, float]:
    """Tau and speed-up from the pooled rate, the tree's depth and c, as if a tree cost the target what one token does.

    The paper's c is one draft step over one target pass; the glossary's, used here, is a whole draft round over one
    target pass: it stands for the paper's gamma c.
    """
    tau = tau_of_alpha(pooled_alpha(facts.depths), len(facts.depths))
    return tau, tau / (facts.round_ms["draft"] / facts.plain_ms["verify"] + 1)


def by_rates(facts: Facts) -> tuple[float, float]:
    """Tau from each depth's own rate, speed-up from what draft, verification and the rest took.

    A depth's rate is how often the tree still had a guess there times how often it was right; no depth is taken to be
    independent of another. What remains as error is rounds that the end of a text cut short.
    """
    tau = tau_of_rates([depth.reach * depth.alpha for depth in facts.depths])
    return tau, tau * facts.plain / facts.round


def by_costs(facts: Facts) -> tuple[float, float]:
    """The same tau; verifying a tree costs as many plain passes as the machine's curve says, T(n)/T(1)."""
    tau, _ = by_rates(facts)
    verify = sum(map(facts.verify, facts.widths)) / len(facts.widths)
    return tau, tau * facts.plain / (facts.round_ms["draft"] + verify + facts.other)
