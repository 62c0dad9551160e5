"""What steps come to, and what of it ends a run before its last: a loss that is none, a gradient that rises, a signal."""

import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from models.transfer import fetched

if TYPE_CHECKING:
    from train.log import Journal

STEPS = 200  # gradients that are remembered
FEWEST = 20  # of them before any is called too large
RISE = 100.0  # times the median of those
SUSTAINED = 5  # steps in a row


class Watch:
    """Sees every step's loss and gradient."""

    def __init__(self) -> None:
        self.norms: deque[float] = deque(maxlen=STEPS)
        self.high = 0

    def see(self, step: int, loss: float, norm: float) -> None:
        """Raise ValueError, saying what to look at, where step number `step` shows that the run is lost."""
        if not (abs(loss) < float("inf") and norm < float("inf")):
            what = f"the loss is {loss}" if not abs(loss) < float("inf") else f"the gradient's norm is {norm}"
            raise ValueError(
                f"{what} at step {step}; lower optim.lr or lengthen optim.warmup, or look for broken rows in the data"
            )
        usual = statistics.median(self.norms) if len(self.norms) >= FEWEST else float("inf")
        self.high = self.high + 1 if norm > RISE * usual else 0
        if self.high >= SUSTAINED:
            raise ValueError(
                f"the gradient's norm has been over {RISE:.0f} times its median of {usual:.3g} for {SUSTAINED} steps, {norm:.3g} at step {step}; "
                "lower optim.lr or optim.clip, lengthen optim.warmup, or look at the rows that taught last"
            )
        if not self.high:
            self.norms.append(norm)


@dataclass
class Coming:
    """A step whose figures are on their way from the device."""

    step: int
    figures: Callable[[], list[float]]  # loss, ranks that were asked to stop, the gradient's norm
    tokens: int
    seconds: float
    waited: float


class Tidings:
    """Hears what a step came to once the next one is under way, so that the device always has something to do."""

    def __init__(self, journal: "Journal") -> None:
        self.journal, self.watch = journal, Watch()
        self.coming: Coming | None = None
        self.stop = False  # a rank was asked to

    def send(self, step: int, figures: Tensor, tokens: int, began: float, waited: float) -> None:
        """Step `step` is under way, its `figures` [3] with it; hear of the step before."""
        figures_here = fetched(figures)
        self.hear()
        self.coming = Coming(step, figures_here, tokens, time.perf_counter() - began, waited)

    def hear(self) -> None:
        """Wait for what is on its way. Raises ValueError where it shows that the run is lost."""
        if self.coming is None:
            return
        heard, self.coming = self.coming, None
        loss, asked, norm = heard.figures()
        self.stop = self.stop or asked > 0
        self.watch.see(heard.step, loss, norm)
        self.journal.step(heard.step, loss, norm, heard.tokens, heard.seconds, heard.waited)


class Stopped(SystemExit):
    """The run was asked to stop, and has saved."""


class Asked:
    """Within, SIGTERM does not kill: it is a wish that the loop grants after its step."""

    def __init__(self) -> None:
        self.stop = False

    def __enter__(self) -> "Asked":
        self.main = threading.current_thread() is threading.main_thread()  # no other may have handlers
        if self.main:
            self.before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.main:
            signal.signal(signal.SIGTERM, self.before)

    def _hear(self, number: int, frame: FrameType | None) -> Any:
        self.stop = True
