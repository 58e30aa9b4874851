"""Reading a device's numbers on the host without making it wait."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class HostRead:
    """Copies a few numbers to the host once a step, to be read at the next step's end on a GPU.

    By then the device is past the copy, so that reading it stalls nothing. Elsewhere nothing needs to wait, and what a
    step has put is read at its own end. Which of the two holds depends on the device alone, so all ranks read the same
    step at the same time.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Tensor, torch.cuda.Event | None, Any]] = deque()

    def put(self, values: Tensor, note: Any) -> None:
        """Begins to copy ``values``, (n,); ``note`` comes back with them."""
        values = values.detach()
        if values.device.type != "cuda":
            self._queue.append((values.cpu(), None, note))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._queue.append((host, arrived, note))

    def take(self, wait: bool = False) -> tuple[list[float], Any] | None:
        """The oldest numbers that can be read without stalling, and their note; None if there are none.

        Args:
            wait: read the latest as well, as at the end of a run.
        """
        if not self._queue or (self._queue[0][1] is not None and len(self._queue) < 2 and not wait):
            return None
        values, arrived, note = self._queue.popleft()
        if arrived is not None:
            arrived.synchronize()
        return values.tolist(), note

    def clear(self) -> None:
        """Forgets what was put."""
        self._queue.clear()


def gather_equal(mine: Tensor, world_size: int) -> Tensor:
    """What all ranks have, in the order of ranks: (world_size * n,) of (n,) each. One collective, unwaited for."""
    every = mine.new_empty(world_size * mine.numel())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.13
    gather(every, mine)
    return every
