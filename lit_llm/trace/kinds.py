"""What an event is, by its name: communication or compute, which collective, which wait of the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

_COMMUNICATION = re.compile(
    r"nccl|rccl|mscclpp|nvshmem|rocshmem|oneccl|hccl|deep_?ep|"
    r"(?:cross_device|one_?shot|two_?shot|multimem|lamport|custom|symm_?mem|trtllm)\w*_?(?:all_?reduce|reduce_?scatter|all_?gather)|"
    r"cross_device_reduce|all_?to_?all|allreduce_fusion|userbuffers|SendRecv",
    re.IGNORECASE,
)
_NOT_COMMUNICATION = re.compile(r"_copy_in|copy_out|chunk_cat|split_with_sizes", re.IGNORECASE)
_HOST_COMMUNICATION = re.compile(r"^(?:gloo|mpi|ucc):", re.IGNORECASE)

# The first that is found in the name without its underscores.
_COLLECTIVES = (
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("crossdevicereduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)

_SYNC_CALL = re.compile(r"(?:Stream|Device|Event|Ctx|Context)Synchronize|^(?:cuda|hip)Memcpy$|hipMemcpyWithStream")
_SYNC_OP = re.compile(r"^aten::(?:item|_local_scalar_dense|is_nonzero|nonzero|equal|masked_select|unique\w*)$")

DATA = re.compile(r"^enumerate\(DataLoader\)|^data_fetch$|^\[_TrainingEpochLoop\]\.train_dataloader_next$")
OPTIMIZER = re.compile(r"^Optimizer\.step#|^optimizer$")
FORWARD_BACKWARD = re.compile(r"^(?:forward|backward)$")
STEP = re.compile(r"^ProfilerStep\s*#\s*(\d+)$")
AROUND = re.compile(r"^autograd::engine::evaluate_function")
WAIT = re.compile(r"^_?c10d_functional::wait_tensor$|^c10d::barrier$")
ENQUEUE = re.compile(r"^c10d::")
UNIT = re.compile(r"^FSDP::(\w+) ?(?:\((.*)\)|for (.*))?$")


def matching(names: Sequence[str], test: Callable[[str], object]) -> np.ndarray:
    """Which names pass, (names,) bool."""
    return np.fromiter((bool(test(name)) for name in names), dtype=bool, count=len(names))


def is_communication(kernel: str) -> bool:
    """Whether a kernel of this name talks to other devices, whatever library it is from."""
    return bool(_COMMUNICATION.search(kernel)) and not _NOT_COMMUNICATION.search(kernel)


def is_host_communication(annotation: str) -> bool:
    """Whether an annotation is the execution of a collective on a CPU."""
    return bool(_HOST_COMMUNICATION.match(annotation))


def collective_kind(name: str) -> str:
    """The kind of a collective by the name of its kernel, its op or its argument ``Collective name``."""
    plain = re.sub(r"\([^)]*\)$", "", name).replace("_", "").lower()
    return next((kind for part, kind in _COLLECTIVES if part in plain), "other")


def is_sync_call(runtime: str) -> bool:
    """Whether a runtime call waits for the device."""
    return bool(_SYNC_CALL.search(runtime))


def is_sync_op(op: str) -> bool:
    """Whether an op reads a value of the device."""
    return bool(_SYNC_OP.match(op))
