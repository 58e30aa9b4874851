"""A process that has imported everything once, and forks the ranks of the tests: each starts in no time, and clean.

It reads one JSON object a line from standard input (what to run, with which environment, and where its output goes),
and writes the exit code of each child to a file. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import traceback
from pathlib import Path
from typing import Any


def _import_all() -> None:
    import lightning.pytorch
    import numpy
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import lit_llm.callbacks
    import lit_llm.data.module
    import lit_llm.module
    import tests.training

    del lightning, numpy, tests, lit_llm
    torch.set_num_threads(1)


def _run(job: dict[str, Any]) -> int:
    """In the child: as a process of its own would."""
    import importlib

    import numpy as np

    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(job["env"])
    random.seed()  # no two ranks alike
    np.random.seed()
    module, function = job["target"].split(":")
    try:
        result = getattr(importlib.import_module(module), function)(**job["kwargs"])
        Path(job["out"]).write_text(json.dumps(result))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _reap(children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        place = Path(children.pop(pid))
        partial = place.with_suffix(".partial")
        partial.write_text(str(os.waitstatus_to_exitcode(status)))
        partial.rename(place)


def main() -> int:
    """Serves until standard input ends; returns the exit code, in the children theirs."""
    _import_all()
    children: dict[int, str] = {}
    waiting = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        _reap(children)
        if not ready:
            continue
        more = os.read(0, 65536)
        if not more:
            return 0
        *lines, waiting = (waiting + more).split(b"\n")
        for line in lines:
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return _run(job)
            children[pid] = job["rc"]
            Path(job["pid"]).write_text(str(pid))


if __name__ == "__main__":
    sys.exit(main())
