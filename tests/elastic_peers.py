"""A rank that does nothing but exchange, for the tests of who has died; a server of processes imports it once."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

# Before torch: its store says in twenty lines that a connection is gone.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist

from lit_llm.errors import RunStopped
from lit_llm.training.peers import PeerWatch

STEPS = 10_000


def rank_main(rank: int, world: int, port: int, folder: str, what: str, who: int, timeout: float) -> None:
    """Steps until something happens; the last line of its stderr, a file, is what a user would see."""
    place = Path(folder)
    log = os.open(place / f"err-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    patience = timedelta(seconds=2 if what == "hangs" else 300)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=patience)
    watch, step = PeerWatch(timeout), 0
    watch.start(lambda: step)
    steps = 20 if what in ("ends", "quiet") else STEPS
    try:
        while step < steps:
            if step == 15 and what == "raises" and rank == who:
                raise ValueError("a bad\nsample")
            if step == 15 and what == "stops":
                raise RunStopped("the loss is no longer finite")
            if step == 15 and what == "hangs" and rank == who:
                time.sleep(60)
            if step == 15 and what.startswith("quiet") and rank == who:
                with watch.quiet(0.0 if what == "quiet unsaid" else 60.0):
                    if what == "quiet, then dead":
                        os.kill(os.getpid(), signal.SIGKILL)
                    # Keeps the interpreter, as no other function of the library does.
                    ctypes.PyDLL(None).sleep(int(2 * timeout) + 1)
                (place / f"quiet-{rank}").touch()
            dist.all_reduce(torch.ones(2))
            step += 1
            (place / f"now-{rank}").write_text(str(step))
            os.replace(place / f"now-{rank}", place / f"at-{rank}")
            time.sleep(0.005)
        if what == "quiet":
            watch.stop()
        if what == "ends":
            time.sleep(0.7 * rank)  # rank 0 is the first to go
            watch.stop()
            watch.start(lambda: step)  # a second fit in the same processes
            dist.all_reduce(torch.ones(2))
            watch.stop()
            watch.stop()
    except Exception as error:
        watch.attach_to(error)
        watch.stop()
        cause = error.__cause__ if isinstance(error.__cause__, RunStopped) else error
        print(f"lit-llm: error: {type(cause).__name__} {cause}", file=sys.stderr, flush=True)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("peers")]
        os._exit(1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("peers")]
    (place / f"done-{rank}").touch()
