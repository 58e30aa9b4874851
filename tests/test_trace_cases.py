"""Single questions on traces of a few events, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_llm.trace.analysis import analyze, summarize_file
from lit_llm.trace.kinds import collective_kind, is_communication
from lit_llm.trace.per_rank import RankSummary

MAIN, OTHER, GLOO = 1, 2, 3


def event(category: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    """From ``start`` to ``end``, in us."""
    one = {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, "ts": start, "dur": end - start}
    return {**one, "args": args} if args else one


def kernel(name: str, start: float, end: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    """On the GPU."""
    return event("kernel", name, start, end, stream, device=0, stream=stream, correlation=correlation)


def launch(start: float, correlation: int, thread: int = MAIN) -> dict[str, Any]:
    """Of a kernel; takes 5 us."""
    return event("cuda_runtime", "cudaLaunchKernel", start, start + 5, thread, correlation=correlation)


def write(folder: Path, rank: int, events: list[dict[str, Any]], world_size: int = 1) -> Path:
    """A rank's trace."""
    content = {
        "distributedInfo": {"rank": rank, "world_size": world_size},
        "baseTimeNanoseconds": 1_790_857_026_000_000_000,
        "traceEvents": events,
    }
    path = folder / f"rank-{rank:05d}.json"
    path.write_text(json.dumps(content))
    return path


def summary(folder: Path, *events: dict[str, Any]) -> RankSummary:
    """Of one rank."""
    return summarize_file(str(write(folder, 0, list(events))))


def step(number: int, start: float, end: float) -> dict[str, Any]:
    """A mark."""
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


# Names


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "send_recv"),
        ("rccl_main_kernel_AllGather", "all_gather"),
        ("void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)", "all_reduce"),
        ("multimem_all_reduce_kernel", "all_reduce"),
        ("two_shot_all_reduce_kernel", "all_reduce"),
        ("deep_ep::intranode::dispatch", "other"),
        ("nvshmem_alltoall", "all_to_all"),
    ],
)
def test_kernels_of_all_libraries_are_communication(name: str, kind: str) -> None:
    assert is_communication(name)
    assert collective_kind(name) == kind


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >",
        "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel",
        "fsdp_all_gather_copy_in",
        "triton_red_fused_all_add_gather_0",
        "void at::native::vectorized_gather_kernel<16, long>",
        "void cub::DeviceReduceKernel",
        "void flash::flash_fwd_kernel",
        "broadcast_add_kernel",
    ],
)
def test_other_kernels_are_not(name: str) -> None:
    assert not is_communication(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("_allgather_base", "all_gather"), ("_reduce_scatter_base", "reduce_scatter"), ("allreduce", "all_reduce"),
     ("all_to_all", "all_to_all"), ("allreduce_coalesced", "all_reduce"), ("recv", "send_recv"), ("wait", "other")],
)  # fmt: skip
def test_names_of_collectives(name: str, kind: str) -> None:
    assert collective_kind(name) == kind


# Steps


def _gpu_step(number: int, at: float, correlation: int) -> list[dict[str, Any]]:
    return [
        step(number, at, at + 100),
        launch(at + 10, correlation),
        kernel("gemm", at + 20, at + 60, correlation),
    ]


def test_work_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    events = [step(3, 0, 100), step(4, 100, 200), launch(90, 1), launch(110, 2)]
    events += [
        kernel("gemm", 150, 250, 1),
        kernel("gemm", 250, 300, 2),
    ]  # both run while the host is in step 4 or later
    found = summary(tmp_path, *events)
    base = 1_790_857_026_000_000_000
    assert (found.windows - base).tolist() == [[150_000, 250_000], [250_000, 300_000]]
    assert [split.compute for split in found.step_splits] == [100_000, 50_000]


def test_a_copy_that_runs_ahead_opens_no_step(tmp_path: Path) -> None:
    copy = event("gpu_memcpy", "Memcpy HtoD", 40, 45, 14, device=0, stream=14, correlation=9)
    events = [
        *_gpu_step(0, 0, 1),
        *_gpu_step(1, 100, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 101, 102, correlation=9),
    ]
    found = summary(tmp_path, *events, copy)  # of step 1, and before the kernels of step 0 have ended
    base = 1_790_857_026_000_000_000
    assert (found.windows - base).tolist() == [[20_000, 120_000], [120_000, 160_000]]


def test_what_runs_between_two_steps_is_in_neither(tmp_path: Path) -> None:
    validation = [event("user_annotation", "validation", 100, 180), launch(120, 5), kernel("gemm", 130, 170, 5)]
    found = summary(tmp_path, *_gpu_step(0, 0, 1), *validation, *_gpu_step(1, 200, 2))
    base = 1_790_857_026_000_000_000
    assert (found.windows - base).tolist() == [[20_000, 130_000], [220_000, 260_000]]
    assert found.split.compute == 120_000


def test_one_launch_of_many_kernels(tmp_path: Path) -> None:
    graph = [event("cuda_runtime", "cudaGraphLaunch", 10, 15, correlation=4)]
    graph += [kernel("gemm", 20 + 10 * number, 28 + 10 * number, 4) for number in range(5)]
    found = summary(tmp_path, step(0, 0, 100), *graph)
    assert found.unlaunched == 0
    assert found.work["calls"].tolist() == [5]


def test_kernels_with_no_launch_count_in_no_step(tmp_path: Path) -> None:
    found = summary(tmp_path, *_gpu_step(0, 0, 1), kernel("gemm", 5, 15, 77), kernel("gemm", 61, 62, 0))
    assert found.unlaunched == 2
    assert found.work["calls"].tolist() == [1]
    assert found.split.compute == 51_000


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([(0, 0, 100), (1, 100, 200)], [(0, 0, 100), (1, 100, 200)]),
        ([(9, 0, 200), (0, 0, 100), (1, 100, 200)], [(0, 0, 100), (1, 100, 200)]),  # one around all
        ([(0, 0, 120), (1, 100, 200)], [(0, 0, 100), (1, 100, 200)]),
        ([(7, 0, 50), (7, 60, 90)], [(0, 0, 50), (1, 60, 90)]),  # of epochs that count anew
        ([], []),
    ],
)
def test_marks(tmp_path: Path, marks: list[Any], expected: list[Any]) -> None:
    events = [step(*mark) for mark in marks] + [event("cpu_op", "aten::mm", 0, 10)]
    found = summary(tmp_path, *events).marks
    base = 1_790_857_026_000_000_000
    rows = zip(found.numbers.tolist(), *((found.windows - base) // 1000).T.tolist(), strict=True) if len(found) else []
    assert [tuple(row) for row in rows] == expected


def test_a_step_that_the_run_ended_in_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [step(0, 0, 100), step(1, 100, 900), event("cpu_op", "aten::mm", 0, 10)])
    path.write_text(json.dumps({**json.loads(path.read_text()), "lit_llm": {"last_step_is_partial": True}}))
    assert summarize_file(str(path)).marks.numbers.tolist() == [0]
    assert any("in the middle of a step" in one.message for one in analyze(tmp_path).health)


def test_a_validation_inside_a_step_is_no_part_of_its_length(tmp_path: Path) -> None:
    events = [step(0, 0, 500), event("user_annotation", "validation", 100, 400), event("cpu_op", "aten::mm", 0, 10)]
    assert summary(tmp_path, *events).marks.lengths.tolist() == [200_000]


# Idle


def _gap(tmp_path: Path, *events: dict[str, Any], thread: int = MAIN) -> dict[str, int]:
    """Causes of the gap from 60 to 200 between two kernels, the second launched at 190."""
    both = [launch(0, 1), kernel("gemm", 10, 60, 1), launch(190, 2, thread), kernel("gemm", 200, 260, 2)]
    found = summary(tmp_path, step(0, 0, 300), *both, *events)
    assert found.split.idle_by_cause is not None
    assert sum(found.split.idle_by_cause.values()) == found.split.idle == 140_000
    return {cause: ns for cause, ns in found.split.idle_by_cause.items() if ns}


def test_idle_without_anything_on_the_host_is_untold(tmp_path: Path) -> None:
    assert _gap(tmp_path) == {"other": 130_000, "dependency": 10_000}


def test_idle_for_data(tmp_path: Path) -> None:
    loader = event("user_annotation", "enumerate(DataLoader)#_Single.__next__", 70, 170)
    inside = event("cpu_op", "aten::stack", 80, 160)
    assert _gap(tmp_path, loader, inside) == {"data_loading": 100_000, "other": 30_000, "dependency": 10_000}


def test_idle_for_dispatch(tmp_path: Path) -> None:
    op, malloc = event("cpu_op", "aten::add", 100, 180), event("cuda_runtime", "cudaMalloc", 60, 90)
    assert _gap(tmp_path, op, malloc) == {"launch": 110_000, "other": 20_000, "dependency": 10_000}


@pytest.mark.parametrize("thread", [MAIN, OTHER])
def test_idle_after_a_wait_for_the_device(tmp_path: Path, thread: int) -> None:
    item, sync = event("cpu_op", "aten::item", 20, 65), event("cuda_runtime", "cudaStreamSynchronize", 25, 62)
    # It saw the device run dry, so what follows until the next launch is its doing, whichever thread launches then.
    assert _gap(tmp_path, item, sync, thread=thread) == {"host_sync": 130_000, "dependency": 10_000}


def test_work_that_was_launched_long_ago_waits_for_other_work(tmp_path: Path) -> None:
    events = [launch(0, 1), launch(2, 2), kernel("gemm", 10, 60, 1), kernel("gemm", 200, 260, 2)]
    found = summary(tmp_path, step(0, 0, 300), *events)
    assert found.split.idle_by_cause is not None
    assert {cause: ns for cause, ns in found.split.idle_by_cause.items() if ns} == {"dependency": 140_000}


# FSDP


def _layer(number: int, at: float) -> list[dict[str, Any]]:
    """The gather of a layer, on the GPU alone: half of it behind a kernel."""
    gather = kernel("ncclDevKernel_AllGather_RING_LL", at, at + 40, 0, stream=20)
    # as kineto writes it: 1 ns early and 2 ns longer
    mirror = event("gpu_user_annotation", f"FSDP::all_gather (layers.{number})", at - 0.001, at + 40.001, 20)
    return [gather, mirror, kernel("gemm", at + 20, at + 100, 0)]


def test_layers_by_the_annotations_of_the_gpu_alone(tmp_path: Path) -> None:
    events = [one for number in range(3) for one in _layer(number, 100 * number + 1)]
    found = summary(tmp_path, *events).gathers
    assert found.units == ["layers.0", "layers.1", "layers.2"]
    assert found.exposed.tolist() == [20_000] * 3


# CPUs


def _gloo(name: str, call: float, start: float, end: float) -> list[dict[str, Any]]:
    return [
        event("cpu_op", f"c10d::{name}", call, call + 2),
        event("user_annotation", "gloo:all_reduce", start, end, GLOO),
    ]


def test_what_an_op_hides_on_a_cpu(tmp_path: Path) -> None:
    events = [step(0, 0, 300), *_gloo("allreduce_", 100, 110, 200), event("cpu_op", "aten::mm", 102, 150)]
    found = summary(tmp_path, *events, event("cpu_op", "aten::mm", 120, 190, OTHER))  # of another thread: not counted
    assert (found.split.comm_exposed, found.split.comm_hidden) == (50_000, 40_000)
    assert found.collectives.keys == [("all_reduce", None)]


def test_an_op_that_only_waits_hides_nothing(tmp_path: Path) -> None:
    wait = event("cpu_op", "_c10d_functional::wait_tensor", 103, 200)
    found = summary(tmp_path, step(0, 0, 300), *_gloo("allreduce_", 100, 110, 200), wait)
    assert (found.split.comm_exposed, found.split.comm_hidden) == (90_000, 0)
    assert found.work["ops"].tolist() == [0]


def test_the_kind_is_the_calls(tmp_path: Path) -> None:
    events = [step(0, 0, 300), *_gloo("_reduce_scatter_base_", 10, 20, 40), *_gloo("_allgather_base_", 50, 60, 80)]
    found = summary(tmp_path, *events).collectives
    assert [found.keys[key][0] for key in found.key] == ["reduce_scatter", "all_gather"]


def test_an_execution_whose_call_came_before_the_trace(tmp_path: Path) -> None:
    early = event("user_annotation", "gloo:all_reduce", 0, 5, GLOO)
    found = summary(tmp_path, early, step(0, 0, 300), *_gloo("_allgather_base_", 50, 60, 80)).collectives
    rows = [(found.keys[key][0], int(number)) for key, number in zip(found.key, found.step, strict=True)]
    assert rows == [("all_reduce", -1), ("all_gather", 0)]


def test_the_optimizer_without_the_closure_inside(tmp_path: Path) -> None:
    events = [step(0, 0, 300), event("user_annotation", "Optimizer.step#AdamW.step", 10, 290)]
    events += [event("user_annotation", "forward", 20, 100), event("user_annotation", "backward", 100, 250)]
    found = summary(tmp_path, *events, event("cpu_op", "aten::mm", 30, 40))
    assert found.split.optimizer == 280_000 - 230_000
    events.append(event("user_annotation", "optimizer", 255, 285))
    assert summary(tmp_path, *events, event("cpu_op", "aten::mm", 30, 40)).split.optimizer == 30_000


# Ranks with nothing to compare


def test_a_rank_without_gpu_work_among_others_is_not_called_cut(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, [*_gpu_step(0, 0, 1), *_gpu_step(1, 100, 2)], world_size=3)
    write(tmp_path, 2, [step(0, 0, 100), event("cpu_op", "aten::mm", 0, 10)], world_size=3)
    found = analyze(tmp_path)
    (told,) = [one for one in found.verdicts if one.ranks == [2]]
    assert "no work of a GPU" in told.message
    assert np.all([not one.truncated for one in found.ranks])
