"""What a run shows: a progress line, acceptance at intervals, curves in wandb if asked."""

from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

import wandb
from rich.console import Console

from conf.schema import Run
from decode.progress import Bar
from train.optim import rate

if TYPE_CHECKING:
    from train.judge import Verdict


class Journal:
    """Shown on the first rank only; the others stay silent."""

    def __init__(self, run: Run, loud: bool, done: int, best: "Verdict | None"):
        self.console = Console(quiet=not loud)
        self.bar = Bar("train", run.optim.steps, done, self.console)
        self.optim, self.best, self.last = run.optim, best, best
        self.done = 0
        self.tokens, self.seconds, self.waited = 0, 0.0, 0.0
        mode: Any = run.log.wandb.value if loud else "disabled"
        told = {part: plain(getattr(run, part)) for part in ("target", "drafter", "data", "optim", "engine")}
        self.curves = None
        if mode != "disabled":
            self.curves = wandb.init(project=run.log.project, config=told, dir=run.out, mode=mode)

    def __enter__(self) -> "Journal":
        self.bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.__exit__(kind, error, trace)
        if self.done:
            self.console.print(self.summary())
        if self.curves is not None:
            self.curves.finish(exit_code=int(kind is not None))

    def step(self, done: int, loss: float, norm: float, tokens: int, seconds: float, waited: float) -> None:
        """After each step: its tokens on all ranks, the seconds it took, and those of them that waited for features."""
        self.done += 1
        self.tokens, self.seconds, self.waited = self.tokens + tokens, self.seconds + seconds, self.waited + waited
        tau = f"  tau {self.last.tau:.2f}" if self.last else ""
        self.bar.advance(says=f"loss {loss:.3f}  {tokens / seconds:,.0f} tokens/s{tau}")
        if self.curves is not None:
            now = {"loss": loss, "norm": norm, "tokens_per_second": tokens / seconds, "lr": rate(self.optim, done - 1)}
            self.curves.log({**now, "step_seconds": seconds, "wait_seconds": waited}, step=done)

    def verdict(self, verdict: "Verdict", best: "Verdict | None") -> None:
        """After each evaluation: first picks that were the target's, what sampling would accept, and the tau that follows.

        `best` is the best of all so far.
        """
        if verdict.moved:
            self.console.print(f"step {verdict.step}: {sentence(verdict.moved)}")
        first, second = (" ".join(f"{rate:.3f}" for rate in rates) for rates in (verdict.greedy, verdict.sampled))
        tau = f"tau {verdict.tau:.2f} ({verdict.low:.2f}-{verdict.high:.2f})"
        real = "" if verdict.decoded is None else f", {verdict.decoded:.2f} decoded"
        if verdict.positions:
            self.console.print(
                f"step {verdict.step}: held-out acceptance by depth, greedy {first}, sampled {second}; {tau}{real}"
            )
        self.last, self.best = verdict, best
        if self.curves is not None:
            by_depth = {"greedy": verdict.greedy, "sampled": verdict.sampled}
            curves = {f"{name}/{k}": rate for name, rates in by_depth.items() for k, rate in enumerate(rates, 1)}
            real_tau = {} if verdict.decoded is None else {"decoded": verdict.decoded}
            self.curves.log(curves | real_tau | (verdict.moved or {}) | {"tau": verdict.tau}, step=verdict.step)

    def summary(self) -> str:
        """What the steps of this process came to."""
        best = f"; best tau {self.best.tau:.2f} after step {self.best.step}" if self.best else ""
        return (
            f"{self.done:,} steps of {self.seconds / self.done:.3g} s, {self.tokens:,} tokens at {self.tokens / self.seconds:,.0f} tokens/s, "
            f"{self.waited / self.seconds:.1%} of it waiting for features{best}"
        )


def sentence(moved: dict[str, float]) -> str:
    """What became of the target, in words."""
    return (
        f"on held-out text the target's perplexity is {moved['perplexity']:.3f} ({moved['perplexity_before']:.3f} before), "
        f"KL {moved['kl']:.4f} nats a token, and its likeliest token is the old one in {moved['agreement']:.1%} of the places"
    )


def plain(part: Any) -> dict[str, Any]:
    """A part of the configuration as plain values."""
    told: dict[str, Any] = part if isinstance(part, dict) else asdict(part)
    return {key: getattr(value, "value", value) for key, value in told.items()}
