"""Traces of a made training run on GPUs, as kineto writes them: sharded steps of a Transformer, with planted faults.

The run is simulated. A rank's host walks through the step (data, forward, backward on autograd's thread, optimizer) and
launches kernels; a kernel starts when it has been launched, its stream is free and what it waits for is there. A
collective starts on each rank by itself and ends on all ranks together, its transfer time after the last rank has
begun: so a rank that is late makes the collectives of all others long, and a delay shorter than the host's lead over
the device is hidden, as in life. What is late in the end is in the returned plan (``lag_us``).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.synthetic_device import (
    AUTOGRAD,
    COMPUTE_STREAM,
    COPY_STREAM,
    GATHER_STREAM,
    MAIN,
    NORM_STREAM,
    REDUCE_STREAM,
    Loaded,
    Ranks,
)
from tests.synthetic_run import BACKWARD, CHUNK_CAT, COPY_IN, COPY_OUT, FORWARD, OPTIMIZER, Kernel, Run
from tests.synthetic_trace_text import write_rank

__all__ = ["Run", "Simulation", "write_set"]


class Simulation(Ranks):
    """Runs a :class:`Run` through its steps."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._simulate()

    def _simulate(self) -> None:
        for step in range(-2, self.run.steps):  # two before the window, so that it opens on a run in full swing
            self.step = step
            if step == 0:
                if not self.run.carry_over:
                    self.host = np.maximum(self.host, np.maximum.reduce(list(self.free.values()))) + 50.0
                self.window = self.host.copy()
            self._one_step(self.run.first_step + step)
        begin = self.host + 100.0  # as the profiler closes it waits for the device
        self.host = np.maximum(begin, np.maximum.reduce(list(self.free.values()))) + 20.0
        self.calls.append(Loaded(self.step, MAIN, "cudaDeviceSynchronize", begin, self.host))

    def _one_step(self, number: int) -> None:
        run = self.run
        with self.note(f"ProfilerStep#{number}"):
            with self.note("data_fetch"), self.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
                self.host = self.host + run.loader_us * self._spread(run.ranks)
                for rank, ms in run.slow_loader.items():
                    self.host[rank] += 1000 * ms
                for rank, step, ms in run.data_stall:
                    self.host[rank] += 1000 * ms * (step == number)
            with self.note("batch_to_device"):
                copy = (("aten::to", "aten::_to_copy", "aten::copy_"), "Memcpy HtoD (Pinned -> Device)", 10.0)
                self.launch([copy], call="cudaMemcpyAsync", bytes=65536)
            if run.closure:
                with self.note("optimizer"), self.note("Optimizer.step#AdamW.step"):
                    self._forward()
                    reduced = self._backward()
                    self._update(reduced)
            else:
                self._forward()
                reduced = self._backward()
                with self.note("optimizer"), self.note("Optimizer.step#AdamW.step"):
                    self._update(reduced)
            with self.note("Optimizer.zero_grad#AdamW.zero_grad"):
                self.host = self.host + 20.0

    def _forward(self) -> None:
        run = self.run
        syncs = {(i + 1) * run.layers // run.host_sync - 1 for i in range(run.host_sync)} if run.host_sync else ()
        with self.note("forward"):
            with self.note("FSDP::root_pre_forward"):
                self._gathers_wait_for(self._free(COMPUTE_STREAM))  # for the optimizer, which writes the weights
            with self.note("FSDP::pre_forward"):
                gathered = self._gather(None)
                self._copy_out(None, gathered)
            embed = (("aten::embedding",), "void at::native::vectorized_gather_kernel<16, long>", run.kernel_us / 10)
            before = self.launch([embed], compute=True)
            for layer in range(run.layers):
                with self.note(f"FSDP::pre_forward (layers.{layer})"):
                    gathered = self._gather(layer, before if layer in run.unhidden_layer else 0.0)
                    self._copy_out(layer, gathered)
                kernels = [FORWARD[i % len(FORWARD)] for i in range(run.kernels)]
                before = self._compute([(ops, name, share * run.kernel_us) for ops, name, share in kernels])
                with self.note(f"FSDP::post_forward (layers.{layer})"):
                    pass
                if layer in syncs:
                    self._read_a_number(before)
            loss = (("aten::cross_entropy_loss",), "void cunn_SoftMaxForward<4, float, float>", run.kernel_us)
            self.launch([loss], compute=True)
            with self.note("FSDP::post_forward"):
                pass

    def _backward(self) -> Any:
        """Gives the time when the last gradient is there."""
        run = self.run
        reduced: Any = 0.0
        with self.note("backward"):
            self.thread = AUTOGRAD
            with self.note("FSDP::pre_backward"):
                gathered = self._prefetch(run.layers - 1)
            node = "NllLossBackward0"
            ops = (f"autograd::engine::evaluate_function: {node}", node, "aten::nll_loss_backward")
            before = self._compute([(ops, "void nll_loss_backward_kernel", run.kernel_us)])
            for layer in reversed(range(run.layers)):
                with self.note(f"FSDP::pre_backward (layers.{layer})"):
                    if gathered is None:
                        gathered = self._gather(layer, before)
                    self._copy_out(layer, gathered)
                    gathered = self._prefetch(layer - 1)
                kernels = [BACKWARD[i % len(BACKWARD)] for i in range(2 * run.kernels)]
                before = self._compute(
                    [
                        ((f"autograd::engine::evaluate_function: {node}", node, *ops), name, share * run.kernel_us)
                        for node, ops, name, share in kernels
                    ]
                )
                for what in ("accumulate", "reshard", "rs_wait"):
                    with self.note(f"FSDP::post_backward_{what} (layers.{layer})"):
                        pass
                reduced = self._reduce(layer, before)
            with self.note("FSDP::root_post_backward_callback"):
                reduced = self._reduce(None, before)
            self.thread = MAIN
        return reduced

    def _update(self, reduced: Any) -> None:
        us = self.run.kernel_us
        norm = (("aten::_foreach_norm",), "void at::native::lpnorm_cleanup<float, (at::native::NormType)1>", us / 10)
        done = self.launch([norm], gate=reduced, compute=True)
        done = self.collective("all_reduce", 1, 15.0, NORM_STREAM, gate=done)
        clip = (("aten::_foreach_mul_",), "void at::native::multi_tensor_apply_kernel<BinaryOpScalar<float> >", us / 10)
        self.launch([clip], gate=done, compute=True)
        self.launch([(*OPTIMIZER, us / 4)] * 4, compute=True)

    def _compute(self, kernels: list[Kernel]) -> Any:
        done = self.launch(kernels, compute=True)
        for rank, share in self.run.uneven_work.items():
            more = [kernels[i % len(kernels)] for i in range(max(1, round(share * len(kernels))))]
            done = self.launch(more, compute=True, mask=np.arange(self.run.ranks) == rank)
        return done

    def _size(self, layer: int | None) -> tuple[int, float]:
        """Elements and us of a unit's collectives; None: of the root, which holds the rest."""
        us = self.run.transfer * self.run.kernels * self.run.kernel_us
        elements = 1024 * max(1, int(us)) * self.run.ranks
        return (elements, us) if layer is not None else (elements // 4, us / 4)

    def _gather(self, layer: int | None, gate: Any = 0.0) -> Any:
        elements, us = self._size(layer)
        with self.note("FSDP::all_gather" + _unit(layer)):
            copied = self.launch([COPY_IN], COPY_STREAM, gate=gate)
            return self.collective("all_gather", elements, us, GATHER_STREAM, gate=copied)

    def _prefetch(self, layer: int) -> Any:
        if layer < 0 or layer in self.run.unhidden_layer:
            return None
        with self.note(f"FSDP::backward_prefetch for layers.{layer}"):
            return self._gather(layer)

    def _copy_out(self, layer: int | None, gathered: Any) -> None:
        with self.note("FSDP::all_gather_copy_out" + _unit(layer)):
            self._gathers_wait_for(self.launch([COPY_OUT], gate=gathered))  # the next one uses the same memory

    def _gathers_wait_for(self, event: Any) -> None:
        for stream in (COPY_STREAM, GATHER_STREAM):
            self.free[stream] = np.maximum(self._free(stream), event)

    def _reduce(self, layer: int | None, computed: Any) -> Any:
        elements, us = self._size(layer)
        with self.note("FSDP::post_backward_reduce" + _unit(layer)):
            joined = self.launch([CHUNK_CAT], REDUCE_STREAM, gate=computed)
            return self.collective("reduce_scatter", elements, us, REDUCE_STREAM, gate=joined)

    def _read_a_number(self, computed: Any) -> None:
        copy = (("aten::item", "aten::_local_scalar_dense"), "Memcpy DtoH (Device -> Pageable)", 2.0)
        done = self.launch([copy], call="cudaMemcpyAsync", bytes=4)
        begin = self.host + 1.0
        end = np.maximum(begin + 5.0, done + 10.0)
        self.calls.append(Loaded(self.step, self.thread, "cudaStreamSynchronize", begin, end))
        self.launches[-1].op_end[:, 0] = end + 1.0
        self.host = np.maximum(end, done + self.run.sync_return_us) + 2.0


def _unit(layer: int | None) -> str:
    return "" if layer is None else f" (layers.{layer})"


def write_set(
    folder: str | Path, *, compress: bool = True, only: Sequence[int] | None = None, processes: int = 1, **fields: Any
) -> dict[str, Any]:
    """Writes ``rank-00000.json.gz`` ... of a made run; the same bytes for the same fields.

    Args:
        folder: made if it is not there.
        compress: gzip (fast, level 1); False: plain ``.json``.
        only: the ranks whose files are written, the others are missing; None: all.
        processes: write ranks in so many processes.
        **fields: of :class:`Run`.

    Returns:
        The run's fields (``run``), ``files``, and ``lag_us``: (steps, ranks) the most that a rank
        came after the first one to any collective launched in a step, in true time.
    """
    run = Run(**fields)
    simulation = Simulation(run)
    Path(folder).mkdir(parents=True, exist_ok=True)
    ranks = list(range(run.ranks)) if only is None else list(only)
    suffix = ".json.gz" if compress else ".json"
    files = [Path(folder, f"rank-{rank:05d}{suffix}") for rank in ranks]
    if processes > 1:
        context = multiprocessing.get_context("fork")  # shares the simulation without a copy
        _SHARED[:] = [simulation]
        with context.Pool(processes) as pool:
            pool.starmap(_write_shared, zip(ranks, files, strict=True), chunksize=1)
        _SHARED.clear()
    else:
        for rank, file in zip(ranks, files, strict=True):
            write_rank(simulation, rank, file)
    return {"run": asdict(run), "files": [str(file) for file in files], "lag_us": simulation.lag.tolist()}


_SHARED: list[Simulation] = []


def _write_shared(rank: int, file: Path) -> None:
    write_rank(_SHARED[0], rank, file)
