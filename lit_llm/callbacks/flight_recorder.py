"""NCCL's flight recorder: the last collectives of each rank, written when one of them times out."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

_ENTRIES = "2000"
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first name from torch 2.9 on; both are read
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def switch_on() -> str | None:
    """Sets what NCCL's process groups read when they are made; what the user has set is left.

    Returns:
        A line where it comes too late; else None.
    """
    if dist.is_available() and dist.is_initialized() and not any(name in os.environ for name in _SIZE):
        return (
            "trace_capture.flight_recorder comes too late, as the process groups are made; set "
            f"{_SIZE[0]}={_ENTRIES} in the environment"
        )
    if not any(name in os.environ for name in _SIZE):
        os.environ.update(dict.fromkeys(_SIZE, _ENTRIES))
    os.environ.setdefault(_ON_TIMEOUT, "1")
    return None


def write_into(folder: Path) -> None:
    """Sets where a rank's file goes: ``nccl-flight-recorder-rank-3``; read when it is written."""
    if not any(name in os.environ for name in _FILE):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(dict.fromkeys(_FILE, str(folder / "nccl-flight-recorder-rank-")))
