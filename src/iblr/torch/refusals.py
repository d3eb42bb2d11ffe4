"""Steps that were not taken since a gradient was not finite: counted, and told.

On the CPU this is known at once. On a GPU the step itself looks, and the host, which is ahead of
it, hears of it later, so as not to wait.
"""

import sys
import warnings

import torch
from torch import Tensor

OURS = ("iblr.torch", "torch.", "contextlib")
LOOK = 8  # steps on a GPU between two looks at the count


class Refusals:
    """A count of refused steps.

    Args:
        optimizer: its name, for the warning.
        count: of earlier ones.
    """

    def __init__(self, optimizer: str, count: int = 0):
        self._optimizer = optimizer
        self._told = self._known = count
        self._on_device: dict[torch.device, Tensor] = {}
        self._steps = 0
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def count(self) -> int:
        """All of them; waits for the GPU."""
        return self._known + sum(int(count) for count in self._on_device.values())

    def add(self) -> None:
        """One that is known."""
        self._known += 1
        self._tell(self._known)

    def add_on_device(self, flag: Tensor) -> None:
        """One if the flag is 1, which may not have been computed yet."""
        if flag.device not in self._on_device:
            self._on_device[flag.device] = torch.zeros_like(flag)
        total = self._on_device[flag.device].add_(flag)
        self._steps += 1
        if self._steps % LOOK:
            return
        if self._arriving is None:
            host = torch.empty_like(total, device="cpu", pin_memory=True)
            host.copy_(total, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(flag.device))
            self._arriving = host, event
        elif self._arriving[1].query():
            host, self._arriving = self._arriving[0], None
            self._tell(self._known + int(host))

    def _tell(self, count: int) -> None:
        if count <= self._told:
            return
        self._told = count
        warnings.warn(
            f"{self._optimizer}.step(): a gradient was not finite, and the step was refused: "
            f"nothing was changed but the noise ({count} refused so far). Lower the learning "
            "rate, clip gradients, or look for what the loss cannot take.",
            RuntimeWarning,
            stacklevel=_outside(),
        )


def _outside() -> int:
    """The level of the first caller that is neither ours nor PyTorch's."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        level, frame = level + 1, frame.f_back
    return level
