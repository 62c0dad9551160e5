"""Numbers on their way between main memory and a device, while nobody waits for what the device still has to do."""

from collections.abc import Callable

import torch
from torch import Tensor


def sent(value: Tensor, device: torch.device) -> Tensor:
    """`value` on `device`: there in time for whatever the device is told next."""
    if value.device.type == "cpu" and device.type == "cuda":
        value = value.pin_memory()  # other memory is copied in the host's own time
    return value.to(device, non_blocking=True)


def fetched(value: Tensor) -> Callable[[], list[float]]:
    """Start [R] `value` on its way to main memory; what is returned waits for it and says it."""
    here = value.detach().to("cpu", non_blocking=True)
    if value.device.type != "cuda":
        return here.tolist
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        said: list[float] = here.tolist()
        return said

    return read
