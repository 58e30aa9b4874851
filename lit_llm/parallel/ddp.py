"""Data parallelism: every process holds the whole model, and gradients are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel

from lit_llm.errors import UserError
from lit_llm.parallel.ddp_hooks import (
    PowerSGD,
    reduce_by_powersgd,
    reduce_in_bfloat16,
    reduce_in_float16,
    reduce_in_float32,
)

_HOOKS: dict[str, Callable[..., Any]] = {"bf16": reduce_in_bfloat16, "fp16": reduce_in_float16}
_COMPRESSIONS = (*_HOOKS, "powersgd")
_DEFAULT_BUCKET_MB = 25.0  # torch's; given nothing, it makes the first bucket smaller, so that the first send is early


class DataParallelStrategy(DDPStrategy):
    """Replicas under DistributedDataParallel (Li et al. 2020, "PyTorch Distributed", section 3): ``ddp`` with options.

    Gradients are averaged in float32, also those of trainer.precision bf16-true, unless compressed. Every option means
    the same on CPUs (gloo) and GPUs (NCCL).

    Compression saves bytes at the price of exactness. ``bf16`` and ``fp16`` send half the bytes, also with bf16-true,
    whose gradients are then no longer averaged in float32; ``powersgd`` sends two thin factors of each matrix. What
    ``powersgd`` leaves out of a step it adds to the next. That rest, as large as the gradients and another one in each
    process, is not saved: a resumed run begins without it, so it is close to the uninterrupted one, not equal. Nor is
    it taken back when a guard skips a step as a spike.

    Args:
        bucket_size_mb: MiB of gradients that are sent together. Fewer, larger buckets cost less per byte, more and
            smaller ones begin earlier.
        compression: None, ``bf16``, ``fp16`` or ``powersgd``; see :mod:`lit_llm.parallel.ddp_hooks`.
        powersgd_rank: of the factors (torch's ``matrix_approximation_rank``).
        powersgd_start_step: optimizer steps that are averaged whole before the first that is compressed (torch's
            ``start_powerSGD_iter``); a resumed run goes on counting.
        static_graph: the same parameters get gradients at every step; learned at the first. Not with accumulation.
        find_unused_parameters: search each step's graph for parameters without a gradient, which costs time.
        gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them.
        process_group_backend: gloo, nccl, ...; None: by the device.
        timeout: after which a collective that some process does not join fails.

    Raises:
        UserError: a number out of its range, an unknown compression, options that exclude each other; at the start of
            a fit ``static_graph`` with accumulation, and ``powersgd`` with 16-mixed.
    """

    def __init__(
        self,
        bucket_size_mb: float = _DEFAULT_BUCKET_MB,
        compression: Literal["bf16", "fp16", "powersgd"] | None = None,
        powersgd_rank: int = 4,
        powersgd_start_step: int = 1000,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if not 0 < bucket_size_mb < float("inf"):
            raise UserError(f"trainer.strategy.bucket_size_mb must be above 0, such as 25; got {bucket_size_mb}")
        if compression is not None and compression not in _COMPRESSIONS:
            raise UserError(
                f"trainer.strategy.compression must be {', '.join(_COMPRESSIONS)} or null; got {compression}"
            )
        if powersgd_rank < 1:
            raise UserError(f"trainer.strategy.powersgd_rank must be at least 1; got {powersgd_rank}")
        if powersgd_start_step < 0:
            raise UserError(f"trainer.strategy.powersgd_start_step must be 0 or more; got {powersgd_start_step}")
        if static_graph and find_unused_parameters:
            raise UserError(
                "trainer.strategy.static_graph finds unused parameters at the first step; leave out "
                "trainer.strategy.find_unused_parameters"
            )
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timeout,
            bucket_cap_mb=None if bucket_size_mb == _DEFAULT_BUCKET_MB else bucket_size_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        self.compression = compression
        self.powersgd_rank, self.powersgd_start_step = powersgd_rank, powersgd_start_step
        self.static_graph = static_graph
        self._trainer: Any = None

    def setup(self, trainer: Any) -> None:
        """Wraps the model; the data has been set up by now, and accumulation is known."""
        self._trainer = trainer
        if trainer.state.fn == TrainerFn.FITTING:
            self._refuse(trainer)
        super().setup(trainer)

    def teardown(self) -> None:
        """Lets go of the Trainer."""
        super().teardown()
        self._trainer = None

    def _refuse(self, trainer: Any) -> None:
        if self.static_graph and (accumulation := _accumulation(trainer)) > 1:
            raise UserError(
                f"trainer.strategy.static_graph does not work with accumulation ({accumulation} micro-batches a step): "
                "leave it false, or give a micro_batch_size of which one is a step"
            )
        if self.compression == "powersgd" and str(self.precision_plugin.precision) == "16-mixed":
            raise UserError(
                "trainer.strategy.compression powersgd adds up gradients over steps, between which the loss scale of "
                "trainer.precision 16-mixed changes; use bf16-mixed, or compression fp16"
            )

    def _register_ddp_hooks(self) -> None:
        """Lightning's own registers on a GPU alone."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        if self.compression is None:
            ensure_float32_reduction(self)
        elif self.compression == "powersgd":
            names = {id(parameter): name for name, parameter in model.module.named_parameters()}
            state = PowerSGD(self.powersgd_rank, self.powersgd_start_step, self._step, names, group=model.process_group)
            model.register_comm_hook(state, reduce_by_powersgd)
        else:
            model.register_comm_hook(model.process_group, _HOOKS[self.compression])

    def _step(self) -> int:
        return int(self._trainer.global_step)


def ensure_float32_reduction(strategy: Any) -> bool:
    """Makes the replicas of any DDPStrategy average 16-bit gradients in float32.

    A strategy whose DistributedDataParallel has a hook is left as it is: the user's own, or ours.

    Args:
        strategy: of a Trainer that is about to fit, after its setup; one without DDP is left alone.

    Returns:
        Whether the hook was registered here.
    """
    model = getattr(strategy, "model", None)
    if not isinstance(strategy, DDPStrategy) or not isinstance(model, DistributedDataParallel):
        return False
    trained = [p.dtype for p in model.parameters() if p.requires_grad]
    if model._comm_hooks or all(torch.promote_types(dtype, torch.float32) == dtype for dtype in trained):
        return False
    model.register_comm_hook(model.process_group, reduce_in_float32)
    return True


def _accumulation(trainer: Any) -> int:
    """Most micro-batches of a step in this fit."""
    schedules = [one for one in trainer.callbacks if isinstance(one, GradientAccumulationScheduler)]
    return max([trainer.accumulate_grad_batches, *(n for one in schedules for n in one.scheduling.values())])
