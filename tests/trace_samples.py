"""Made analyses that the reports are drawn from: 2 CPU ranks, 8 and 128 GPU ranks."""

from __future__ import annotations

import random

from lit_llm.trace.results import (
    CAUSES,
    Analysis,
    CollectiveKind,
    FsdpLayer,
    Gap,
    Health,
    Kernel,
    Lane,
    Rank,
    RankTimeline,
    Span,
    Split,
    Step,
    Straggler,
    Timeline,
    Verdict,
)

MS = 1_000_000
BASE = 1_764_000_000_000_000_000
HOSTILE = "void at::native::<lambda()>::operator()<\"a&b\", 'c'>(</title><script>alert(1)</script>)"
LONG = "void at::native::vectorized_elementwise_kernel<4, " + "at::native::CUDAFunctor_add<c10::BFloat16>, " * 30 + ">"


def cpu_pair() -> Analysis:
    """Two CPU ranks, three steps; rank 1 sleeps in its data loader."""
    ranks = []
    for rank, data in ((0, 2), (1, 62)):
        steps = []
        for number in range(3):
            waiting, transfer = (58 if rank == 0 else 1) * MS + number, 7 * MS + 3
            split = Split(
                comm_exposed=waiting + transfer,
                comm_hidden=4 * MS + 5,
                comm_waiting=waiting,
                comm_transfer=transfer,
                dataloader=data * MS + 7,
                optimizer=31 * MS,
            )
            start = BASE + number * 190 * MS
            steps.append(Step(number + 100, start, 188 * MS + 123, split, lag=60 * MS * rank + number * MS))
        whole = Split(
            comm_exposed=sum(step.split.comm_exposed for step in steps),
            comm_hidden=12 * MS + 15,
            comm_waiting=sum(step.split.comm_waiting or 0 for step in steps),
            comm_transfer=21 * MS + 9,
            dataloader=3 * data * MS + 21,
            optimizer=93 * MS,
        )
        name = f"rank-{rank:05d}.json.gz"
        ranks.append(
            Rank(rank, name, "laptop", "cpu", False, rank * 37 * MS + 123_456, 410_000, rank > 0, steps, whole)
        )
    lanes = [
        RankTimeline(rank, label, [_phases(rank), Lane("communication", [_span(95, 130, "comm", "gloo:all_reduce")])])
        for rank, label in ((1, "slowest"), (0, "fastest"))
    ]
    advice = "Raise data.num_workers or prepare the data beforehand; the model is not the cause."
    return Analysis(
        source="runs/demo/traces/step-000100",
        ranks=ranks,
        collectives=[CollectiveKind("all_reduce", "0", 2, 33, 260 * MS, 219 * MS, 41 * MS, 91_234_567)],
        top_kernels=[
            Kernel("aten::mm", 420, 240 * MS, 571_428.571, 900_000, 0.61, 1, 1.02),
            Kernel("aten::_softmax", 36, 30 * MS, 833_333.33, 1_200_000, 0.08),
            Kernel(HOSTILE, 12, 11 * MS, 916_666.6, 1_000_000, 0.03, 0, 1.4),
        ],
        straggler=Straggler(1, 61 * MS, 3, 3, "data_loading"),
        verdicts=[
            Verdict(
                "straggler",
                "critical",
                [1],
                "Rank 1 keeps the others waiting: its data come 60 ms late in each step.",
                "Last at the first collective in 3 of 3 steps, median lag 61.0 ms; data 62.0 ms against 2.0 ms.",
                advice,
                "high",
                [100, 101, 102],
            ),
            Verdict("communication_bound", "info", [], "15% of the step is exposed <b>communication</b>.", "x & y", ""),
        ],
        health=[
            Health(None, "CPU traces: GPU idle time and bandwidth can't be told."),
            Health(1, "its clock is 37 ms ahead"),
        ],
        timeline=Timeline(100, BASE, BASE + 188 * MS, lanes),
        world_size=2,
        seconds=0.31,
    )


def gpus(count: int, *, steps: int = 4, slow: int | None = None, seed: int = 0, layers: int = 24) -> Analysis:
    """``count`` GPU ranks, eight a host; rank ``slow`` computes 18% longer."""
    rng = random.Random(seed)
    slow = count * 5 // 8 if slow is None else slow
    ranks = [_gpu_rank(rank, steps, 1.18 if rank == slow else 1.0, rng) for rank in range(count)]
    return Analysis(
        source=f"runs/llama/traces/step-002000 ({count} ranks)",
        ranks=ranks,
        collectives=[
            CollectiveKind("all_gather", "fsdp", count, 200, 90_000 * MS, 21_000 * MS, 69_000 * MS, 42 * 10**9, 171e9),
            CollectiveKind(
                "reduce_scatter", "fsdp", count, 100, 51_000 * MS, 9_000 * MS, 42_000 * MS, 42 * 10**9, 163e9
            ),
            CollectiveKind("all_reduce", None, None, 4, 12 * MS, 12 * MS, 0, None, None),
        ],
        fsdp_layers=_layers(layers),
        top_kernels=_kernels(slow),
        gaps=[
            Gap(slow, 2001, 31 * MS, "data_loading", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),
            Gap(0, None, 9 * MS, "host_sync", "aten::_local_scalar_dense"),
            Gap(1, 2002, 4 * MS, "other", None),
        ],
        straggler=Straggler(slow, 41 * MS, steps, steps, "slow_device"),
        verdicts=_verdicts(slow, steps),
        health=[
            Health(3, "the file ends early: some kernels are lost"),
            Health(None, "ranks 5 and 6 are missing"),
        ],
        timeline=_gpu_timeline(slow),
        world_size=count,
        seconds=21.7,
    )


def _span(start: float, end: float, kind: str, name: str) -> Span:
    return Span(BASE + int(start * MS), BASE + int(end * MS), kind, name)  # type: ignore[arg-type]


def _phases(rank: int) -> Lane:
    wait = 62 if rank else 2
    return Lane(
        "phases",
        [
            _span(0, wait, "data", "data_fetch"),
            _span(wait, wait + 35, "forward", "forward"),
            _span(wait + 35, 140, "backward", "backward"),
            _span(140, 142, "wait", HOSTILE),
            _span(142, 188, "optimizer", "optimizer"),
        ],
    )


def _gpu_rank(rank: int, steps: int, slowness: float, rng: random.Random) -> Rank:
    found = []
    for number in range(steps):
        compute = int((250 + rng.random() * 4) * slowness * MS)
        transfer = int((34 + rng.random() * 2) * MS)
        waiting = int((45 if slowness == 1 else 0.4) * MS + rng.random() * MS)
        causes = {cause: int(rng.random() * 6 * MS) for cause in CAUSES}
        if slowness == 1 and number == 2 and rank % 16 == 3:
            causes["data_loading"] += 30 * MS
        memory, idle = int(rng.random() * 3 * MS), sum(causes.values())
        window = compute + transfer + waiting + memory + idle
        split = Split(
            window, compute, transfer + waiting, 61 * MS, memory, idle, waiting, transfer, causes, 3 * MS, 9 * MS
        )
        lag = int((41 + rng.random() * 3) * MS) if slowness > 1 else int(rng.random() * 2 * MS)
        found.append(Step(2000 + number, BASE + number * 360 * MS, 352 * MS + int(rng.random() * MS), split, lag))
    whole = Split(
        *(sum(getattr(step.split, name) for step in found) for name in _SUMMED),
        {cause: sum((step.split.idle_by_cause or {})[cause] for step in found) for cause in CAUSES},
        12 * MS,
        36 * MS,
    )
    return Rank(
        rank=rank,
        file=f"rank-{rank:05d}.json.gz",
        host=f"node-{rank // 8:02d}",
        device="gpu",
        truncated=False,
        clock_offset=rank * 1000,
        clock_error=900,
        clock_applied=False,
        steps=found,
        split=whole,
        launch_ahead=12 * MS,
        kernels=41_000,
    )


_SUMMED = (
    "window",
    "compute",
    "comm_exposed",
    "comm_hidden",
    "mem_exposed",
    "idle",
    "comm_waiting",
    "comm_transfer",
)


def _layers(count: int) -> list[FsdpLayer]:
    found = []
    for layer in range(count):
        gather, hidden = 300 * MS, (0 if layer == 7 else 285 - layer) * MS
        found.append(FsdpLayer(f"layers.{layer}", 64, gather, hidden, gather - hidden, 0.02 if layer == 7 else 0.98))
    return [*found, FsdpLayer("lm_head", 64, 500 * MS, 460 * MS, 40 * MS, None)]


def _kernels(slow: int) -> list[Kernel]:
    names = [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroup1x1x1_execute_segment_k_off",
        LONG,
    ]
    names += [
        "flash_fwd_kernel",
        "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
        HOSTILE,
        "ncclDevKernel_AllGather_RING_LL",
    ]
    shares = [0.41, 0.17, 0.12, 0.09, 0.05, 0.0004]
    return [
        Kernel(
            name,
            1200 * (i + 1),
            int(part * 1e12),
            part * 1e12 / 1200 / (i + 1),
            9 * MS,
            part,
            slow if i < 4 else None,
            1.18 if i < 4 else None,
        )
        for i, (name, part) in enumerate(zip(names, shares, strict=True))
    ]


def _verdicts(slow: int, steps: int) -> list[Verdict]:
    led = list(range(2000, 2000 + steps))
    return [
        Verdict(
            "straggler",
            "critical",
            [slow],
            f"Rank {slow} computes 18% slower than the others and keeps them waiting 41 ms in each step.",
            f"It was last in {steps} of {steps} steps, median lag 41.9 ms (12% of a step); its kernels take 1.18x.",
            f"Look at the GPU of rank {slow} (clocks, temperature, ECC); take it out of the job if it stays slow.",
            "high",
            led,
        ),
        Verdict(
            "prefetch_missing",
            "warning",
            [],
            "The all-gather of layers.7 is not hidden: nothing begins it before the layer's own turn.",
            "Exposed 300 ms of 300 ms; of the other layers 4% are exposed.",
            "Let MeshStrategy prefetch (prefetch: 2).",
            "medium",
        ),
        Verdict("one_off_stall", "info", [3, 19], "Data came 30 ms late once.", "Step 2002 only.", "", "low", [2002]),
    ]


def _gpu_timeline(slow: int) -> Timeline:
    ranks = []
    for rank, label, slowness in ((slow, "slowest", 1.18), (0, "median", 1.0)):
        compute, comm = [], []
        at = 0.0
        for layer in range(400):
            compute.append(_span(at, at + 0.6 * slowness, "compute", f"gemm {layer}" if layer % 7 else LONG))
            if layer % 9 == 0:
                comm.append(_span(at + 0.1, at + 0.9, "comm", "ncclDevKernel_AllGather_RING_LL"))
            at += 0.7 * slowness
        comm.append(_span(at, 352, "comm", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"))
        lanes = [
            Lane("GPU stream 7", compute),
            Lane("communication", comm),
            Lane("copies", [_span(1, 2, "memory", "HtoD")]),
        ]
        lanes.append(Lane("phases", [_span(0, 9, "data", "data_fetch"), _span(9, 352, "forward", "forward")]))
        ranks.append(RankTimeline(rank, label, lanes))
    return Timeline(2001, BASE, BASE + 352 * MS, ranks)
