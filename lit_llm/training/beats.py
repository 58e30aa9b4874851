"""What a rank says of itself while it runs, and the store that carries it."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

# States of a rank. LOST: alive, but a collective has failed there. LEFT: it has ended as a whole run does.
RUNS, LOST, FAILED, LEFT = "runs", "lost", "failed", "left"
UNHEARD = b"-"  # in the store, before the first beat


@dataclass
class Beat:
    """What a rank says of itself, and when this process has last heard it."""

    rank: int
    count: int = 0
    step: int = 0
    state: str = RUNS
    text: str = ""  # of an error
    knows: bool = False  # has read the verdict, or that rank 0 is done
    host: str = ""
    pid: int = 0
    machine: str = ""
    silence: float = 0.0  # seconds that it may be silent for, as it has said
    heard: float = field(default_factory=time.monotonic)

    @classmethod
    def of_this_process(cls, rank: int) -> Beat:
        """The first one, not yet counted."""
        return cls(rank, host=socket.gethostname(), pid=os.getpid(), machine=_machine())

    def encode(self) -> str:
        """For the store."""
        said = [self.step, self.state, self.text, self.knows, self.host, self.pid, self.machine, self.silence]
        return json.dumps([self.count, *said])

    def hear(self, value: bytes) -> None:
        """Takes in what the store holds; time counts from a change, so that no clocks are compared."""
        if value == UNHEARD:
            return
        count, *said = json.loads(value)
        if count != self.count:
            self.count = count
            self.step, self.state, self.text, self.knows, self.host, self.pid, self.machine, self.silence = said
            self.heard = time.monotonic()

    @property
    def active(self) -> bool:
        """Whether it has been heard and not yet left."""
        return self.count > 0 and self.state != LEFT

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})" if self.pid else f"rank {self.rank}"


def beats_store() -> Any:
    """A connection of our own to the process group's store; None where there is nothing to watch."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, TCPStore) or not hasattr(store, "clone"):  # such as a file, which grows with every beat
        return None
    global _starts
    _starts += 1
    # A copy: a store serves one thread at a time, and the main thread's may wait for long.
    own = PrefixStore(f"lit_llm/peers/{_starts}", store.clone())
    own.set_timeout(timedelta(days=1))  # no read waits for a key; an answer that does not come is the judge's matter
    return own


_starts = 0  # equal on all ranks, as all start their watches


@cache
def _machine() -> str:
    """What has the same process ids as this process."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs, be it paused; one that nobody has waited for does not."""
    with suppress(OSError):  # no /proc, or no such process
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
