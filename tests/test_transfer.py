"""No step waits for the device. The device here is torch's `meta`, which has no numbers: whoever asks it for one fails."""

import contextlib
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch.utils._python_dispatch import TorchDispatchMode

from models.drafter import Drafter, FeatureBatch
from models.ends import Ends
from models.transfer import fetched, sent
from reference import marked_batch
from test_drafters import LEARNERS, conf_of, target

META = torch.device("meta")


class Hurried(TorchDispatchMode):
    """Counts what goes to the device, and refuses a copy that the host would wait for."""

    sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == META and args[0].device != META:
            assert kwargs.get("non_blocking"), "the host waits for this copy"
            self.sent += 1
        return func(*args, **kwargs)


def elsewhere(drafter: Drafter, ends: Ends) -> None:
    """Let a drafter and its target's ends be on the device; what they hold beside their weights, too."""
    drafter.to(META)
    ends.embedding, ends.head = (part.detach().to(META) for part in (ends.embedding, ends.head))


@pytest.mark.parametrize("family", LEARNERS)
def test_a_step_asks_the_device_for_nothing(family, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # this device knows no autocast
    monkeypatch.setattr(torch, "autocast", lambda *given, **told: contextlib.nullcontext())
    stock = target().ends
    ends = Ends(stock.embedding, stock.head, stock.bias, stock.config)
    ends.target = stock.target
    drafter: Drafter = instantiate(conf_of(family).drafter, _partial_=True)(ends)
    elsewhere(drafter, ends)
    host = marked_batch(
        ["0" * 24, "0" * 9 + "1" * 11 + "----"], ["." * 6 + "x" * 18, "." * 3 + "x" * 6 + ".." + "x" * 9 + "...."],
        ends.vocabulary, ends.width, len(drafter.taps), seed=0,
    )  # fmt: skip
    batch = FeatureBatch(
        host.input_ids.to(META),
        host.loss_mask,
        host.document,
        *(part.to(META) for part in (host.position, host.features, host.last_hidden)),
    )
    with Hurried() as seen:
        drafter.training_loss(batch).total.backward()
    assert seen.sent > 2
    assert all(weight.grad is not None for weight in drafter.parameters())


def test_the_device_would_tell(monkeypatch):
    """What the test above stands on: this device refuses to be asked."""
    with pytest.raises(RuntimeError):
        torch.ones(3, device=META).tolist()
    with pytest.raises(RuntimeError):
        torch.ones(3, device=META).nonzero()
    with Hurried(), pytest.raises(AssertionError, match="the host waits"):
        torch.ones(3).to(META)


def test_numbers_arrive():
    value = torch.tensor([1.0, 2.5])
    assert sent(value, torch.device("cpu")) is value
    assert fetched(value)() == [1.0, 2.5]
