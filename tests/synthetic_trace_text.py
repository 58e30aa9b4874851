"""The text of a made trace: see :mod:`tests.synthetic_traces`."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.synthetic_device import Launches, Ranks

BASE_NS = 1_790_857_026_000_000_000
ZERO_NS = 5_101_655_000_000_000
"""Of the simulation's zero, after the base."""
_T = "%d.%03d"
_MARKED = ("FSDP::all_gather", "FSDP::post_backward_reduce", "nccl:", "ProfilerStep#")  # on the device as well


def write_rank(simulation: Ranks, rank: int, file: Path) -> None:
    """Writes the file of a rank."""
    run = simulation.run
    text = "".join(_parts(simulation, rank))
    data = gzip.compress(text.encode(), 1, mtime=0) if file.suffix == ".gz" else text.encode()
    if rank in run.truncated:
        data = data[: int(len(data) * run.truncated[rank])]
    file.write_bytes(data)


def _parts(simulation: Ranks, rank: int) -> list[str]:
    run = simulation.run
    events = [*_metadata(simulation, rank), *_events(simulation, rank)]
    parts = [_head(simulation, rank), ",\n".join(events)]
    first, last = _ns(run, rank, simulation.window[rank]), _ns(run, rank, simulation.host[rank])
    parts.append(
        f',\n  {{"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", '
        f'"ts": {_text(first)}, "dur": {_text(last - first)}, "args": {{"Op count": 0}}}}'
        f',\n  {{"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": {_text(last)}}}'
    )
    parts.append(f'\n  ],\n  "traceName": "rank-{rank:05d}.json"\n}}\n')
    return parts


def _head(simulation: Ranks, rank: int) -> str:
    run = simulation.run
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": run.ranks}
    distributed = {
        "backend": "nccl", "rank": rank, "world_size": run.ranks, "pg_count": 1,
        "pg_config": [{**group, "ranks": list(range(run.ranks))}], "nccl_version": "2.27.5",
    }  # fmt: skip
    meta = {
        "version": "0", "run": f"{run.seed:016x}", "rank": rank, "world_size": run.ranks, "host": _host(run, rank),
        "first_step": run.first_step, "steps": run.steps, "strategy": "MeshStrategy", "micro_batches": 1,
    }  # fmt: skip
    device = {"id": rank % run.ranks_per_host, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_029_158_912}
    head = {
        "schemaVersion": 1, "deviceProperties": [device], "trace_id": f"{run.seed:032X}", "lit_llm": meta,
        "distributedInfo": distributed, "host_name": _host(run, rank), "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
    }  # fmt: skip
    return "{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in head.items()) + ',\n  "traceEvents": [\n'


def _metadata(simulation: Ranks, rank: int) -> list[str]:
    pid, at = _pid(rank), _text(_ns(simulation.run, rank, simulation.window[rank]))
    names = {"process_name": [(pid, 0, "python"), (rank % simulation.run.ranks_per_host, 0, "python")]}
    names["thread_name"] = [
        (pid, pid, f"thread {pid} (python)"),
        (pid, pid + 1, f"thread {pid + 1} (pt_autograd_0)"),
        *((rank % simulation.run.ranks_per_host, stream, f"stream {stream}") for stream in sorted(simulation.free)),
    ]
    return [
        f'  {{"ph": "M", "name": "{kind}", "ts": {at}, "pid": {p}, "tid": {t}, "args": {{"name": "{name}"}}}}'
        for kind, rows in names.items()
        for p, t, name in rows
    ]


def _events(simulation: Ranks, rank: int) -> list[str]:
    """Host ops by thread (autograd's first), then calls and kernels, then annotations on the device."""
    run, pid = simulation.run, _pid(rank)
    host: tuple[list[str], list[str]] = ([], [])
    device: list[str] = []
    spans: dict[tuple[int, int], list[Any]] = {}
    identity, correlation = 1, 1
    for note in simulation.notes:
        if note.step >= 0:
            start, end = _ns(run, rank, note.start[rank]), _ns(run, rank, note.end[rank])
            host[note.thread].append(
                f'  {{"ph": "X", "cat": "user_annotation", "name": "{note.name}", "pid": {pid}, '
                f'"tid": {pid + note.thread}, "ts": {_text(start)}, "dur": {_text(end - start)}, '
                f'"args": {{"External id": {identity}, "Record function id": 0}}}}'
            )
            identity += 1
    for group in simulation.launches:
        correlation += len(group.names)
        if group.mask is not None and not group.mask[rank]:
            continue
        if group.step < 0:
            device += _carried_over(simulation, rank, group, correlation)
            continue
        texts = _texts(simulation, rank, group, identity, correlation)
        identity += sum(len(ops) for ops in group.ops)
        host[group.thread].extend(texts[0])
        device += texts[1]
        for note in group.notes:
            if note.name.startswith(_MARKED):
                span = spans.setdefault((id(note), group.stream), [note.name, np.inf, -np.inf])
                span[1], span[2] = min(span[1], group.start[rank, 0]), max(span[2], group.end[rank, -1])
    for call in simulation.calls:
        if call.step >= 0:
            correlation += 1
            start, end = _ns(run, rank, call.start[rank]), _ns(run, rank, call.end[rank])
            device.append(
                f'  {{"ph": "X", "cat": "cuda_runtime", "name": "{call.name}", "pid": {pid}, '
                f'"tid": {pid + call.thread}, "ts": {_text(start)}, "dur": {_text(end - start)}, '
                f'"args": {{"External id": 0, "cbid": 131, "correlation": {correlation}}}}}'
            )
    marks = []
    for (_, stream), (name, first, last) in spans.items():
        start, end = _ns(run, rank, first) - 1, _ns(run, rank, last) + 1
        marks.append(
            f'  {{"ph": "X", "cat": "gpu_user_annotation", "name": "{name}", "pid": {rank % run.ranks_per_host}, '
            f'"tid": {stream}, "ts": {_text(start)}, "dur": {_text(end - start)}, "args": {{"External id": 0}}}}'
        )
    return [*host[1], *host[0], *device, *marks]


def _texts(
    simulation: Ranks, rank: int, group: Launches, identity: int, correlation: int
) -> tuple[list[str], list[str]]:
    """Rows of the host's ops and of the calls and kernels, a text per launch."""
    run, pid, count = simulation.run, _pid(rank), len(group.names)
    op_start, op_end, call_start, call_end = (
        getattr(group, name)[rank] for name in ("op_start", "op_end", "call_start", "call_end")
    )
    call, call_took = _ns(run, rank, call_start), _ns(run, rank, call_end) - _ns(run, rank, call_start)
    start, took = _ns(run, rank, group.start[rank]), _ns(run, rank, group.end[rank]) - _ns(run, rank, group.start[rank])
    depth = max(len(ops) for ops in group.ops)
    levels = []
    for level in range(depth):  # an inner op begins later and ends earlier
        begin = _ns(run, rank, op_start + 0.15 * level * (call_start - op_start))
        length = _ns(run, rank, op_end - 0.15 * level * (op_end - call_end)) - begin
        levels += [*divmod(begin, 1000), *divmod(length, 1000)]
    ops = np.stack(levels, axis=1).tolist()
    calls = np.stack([*divmod(call, 1000), *divmod(call_took, 1000)], axis=1).tolist()
    kernels = np.stack([*divmod(start, 1000), *divmod(took, 1000)], axis=1).tolist()
    tid, device = pid + group.thread, rank % run.ranks_per_host
    comm = _comm_arguments(run.ranks, **group.collective) if group.collective else ""
    host, rows = [], []
    for i in range(count):
        values: list[Any] = []
        for level in range(len(group.ops[i])):
            values += [pid, tid, *ops[i][4 * level : 4 * level + 4], identity, identity]
            identity += 1
        extra = ""
        if group.collective:
            extra = ", " + comm
        host.append(_host_template(group.ops[i], extra) % tuple(values))
        number = correlation - count + i
        at, to = calls[i][:2], kernels[i][:2]
        rows.append(
            _device_template(group.names[i], group.call, group.bytes, comm if run.comm_args else "")
            % (pid, tid, *calls[i], identity - 1, number, number, pid, tid, *at, device, group.stream, *kernels[i],
               identity - 1, device, group.stream, number, number, device, group.stream, *to)
        )  # fmt: skip
    return host, rows


def _carried_over(simulation: Ranks, rank: int, group: Launches, correlation: int) -> list[str]:
    """Kernels launched before the window that run in it: without the call."""
    run, device = simulation.run, rank % simulation.run.ranks_per_host
    comm = _comm_arguments(run.ranks, **group.collective) if group.collective and run.comm_args else ""
    rows = []
    for i, name in enumerate(group.names):
        if group.start[rank, i] >= simulation.window[rank]:
            start, end = _ns(run, rank, group.start[rank, i]), _ns(run, rank, group.end[rank, i])
            number = correlation - len(group.names) + i
            values = (device, group.stream, *divmod(int(start), 1000), *divmod(int(end - start), 1000), 0)
            rows.append(_kernel_template(name, group.bytes, comm) % (*values, device, group.stream, number))
    return rows


@functools.cache
def _host_template(ops: tuple[str, ...], extra: str) -> str:
    rows = [
        f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "{op}", "pid": %d, "tid": %d,\n    "ts": {_T}, "dur": {_T},\n'
        f'    "args": {{\n      "External id": %d, "Record function id": 0, "Ev Idx": %d'
        + (extra.replace("%", "%%") if op == "record_param_comms" else "")
        + "\n    }\n  }"
        for op in ops
    ]
    return ",\n".join(rows)


@functools.cache
def _kernel_template(name: str, moved: int | None, comm: str) -> str:
    category = "gpu_memcpy" if moved is not None else "kernel"
    launch = (
        f'"bytes": {moved}, "memory bandwidth (GB/s)": 12.5'
        if moved is not None
        else '"registers per thread": 96, "shared memory": 16384, "blocks per SM": 2.5, "warps per SM": 20, '
        '"grid": [330, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %%": 31'
    )
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": %d, "tid": %d,\n'
        f'    "ts": {_T}, "dur": {_T},\n'
        '    "args": {\n      "External id": %d, "device": %d, "context": 1, "stream": %d, "correlation": %d, '
        f"{launch}{', ' + comm if comm else ''}\n    }}\n  }}"
    )


@functools.cache
def _device_template(name: str, call: str, moved: int | None, comm: str) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "cuda_runtime", "name": "{call}", "pid": %d, "tid": %d,\n'
        f'    "ts": {_T}, "dur": {_T},\n    "args": {{"External id": %d, "cbid": 211, "correlation": %d}}\n  }},\n'
        f'  {{"ph": "s", "id": %d, "pid": %d, "tid": %d, "ts": {_T}, "cat": "ac2g", "name": "ac2g"}},\n'
        + _kernel_template(name, moved, comm)
        + f',\n  {{"ph": "f", "id": %d, "pid": %d, "tid": %d, "ts": {_T}, "cat": "ac2g", "name": "ac2g", "bp": "e"}}'
    )


def _comm_arguments(ranks: int, **collective: Any) -> str:
    members = f"[{', '.join(map(str, range(ranks)))}]" if ranks <= 30 else f"[0, 1, ..., {ranks - 1}]"
    return (
        f'"Collective name": "{collective["name"]}", "In msg nelems": {collective["in"]}, '
        f'"Out msg nelems": {collective["out"]}, "Group size": {ranks}, "dtype": "{collective["dtype"]}", '
        f'"In split size": "[]", "Out split size": "[]", "Process Group Name": "0", '
        f'"Process Group Description": "default_pg", "Process Group Ranks": "{members}", '
        f'"Seq": {collective["sequence"]}'
    )


def _ns(run: Any, rank: int, us: Any) -> Any:
    """ns after the base on this rank's clock."""
    return np.rint(np.asarray(us) * 1000).astype(np.int64) + ZERO_NS + run.skew_ns.get(rank, 0)


def _text(ns: Any) -> str:
    return _T % divmod(int(ns), 1000)


def _host(run: Any, rank: int) -> str:
    return f"node-{rank // run.ranks_per_host}"


def _pid(rank: int) -> int:
    return 10_000 + 100 * rank
