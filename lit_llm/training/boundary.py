"""The boundary between two optimizer steps: what is agreed on across ranks there, and what follows from it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_llm.checkpoint.write import SafeCheckpointIO
from lit_llm.optim import supports_found_inf
from lit_llm.training.ending import end_by_failure, end_by_signal
from lit_llm.training.gradients import gradients_of
from lit_llm.training.guard import Guard, GuardConfig
from lit_llm.training.host import HostRead
from lit_llm.training.incidents import Incident, Incidents, loss_scaler
from lit_llm.training.lightning_loop import free_gradients, mend
from lit_llm.training.signals import SignalFlag
from lit_llm.training.streams import begin_stream
from lit_llm.training.window import StepWindow

BAD = 128  # a rank's mark for a loss that is not finite, above all signal numbers


class StepBoundary(Callback):
    """Makes one optimizer step out of its micro-batches, and acts between two.

    LitLLM puts it before all other callbacks of a fit, and its :class:`StepEnd` behind them. Before each step it turns
    the gradients into those of the mean loss over the global batch's label tokens, with one reduction over the ranks
    that also carries signals and non-finite losses; at the end of the step it does what all ranks now know: skip, stop,
    or save and end.

    Args:
        window: sums the micro-batches.
        config: of the guard.
        seed: of the random streams.
    """

    def __init__(self, window: StepWindow, config: GuardConfig, seed: int) -> None:
        self.window, self.config, self.seed = window, config, seed
        self.guard = Guard(config)
        self._incidents = Incidents(config, seed)
        self.mean_loss: Tensor | None = None
        """Of the step that is being taken, over the global batch; None where an overridden step gives no sums."""
        self._signals = SignalFlag()
        self._read = HostRead()
        self._marks: Tensor | None = None  # (ranks,) what each rank reports at this step
        self._agreed_step = -1
        self._batches: list[list[Any]] = []  # micro-batches of the steps not yet read
        self._seen_step = 0

    def attach(self, trainer: Any) -> None:
        """Takes its places in a Trainer that is setting up a fit, and makes its checkpoints safe."""
        others = [one for one in trainer.callbacks if not isinstance(one, StepBoundary | StepEnd)]
        trainer.callbacks = [self, *others, StepEnd(self)]
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = SafeCheckpointIO()

    # The run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mends Lightning's loop."""
        mend(trainer, lambda: self._signals.install(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins with nothing open."""
        self.window.discard()
        self._read.clear()
        self._batches, self._marks, self._agreed_step = [[]], None, -1
        self._seen_step = trainer.global_step
        for optimizer in trainer.optimizers:
            if pl_module.automatic_optimization:
                optimizer.register_step_post_hook(free_gradients)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seeds the micro-batch's random stream."""
        begin_stream(self.seed, trainer.global_step, batch_idx % trainer.accumulate_grad_batches, data_rank(trainer))
        if self.config.active and self._incidents.save_more:
            self._batches[-1].append(batch)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Makes the gradient that of the mean over the global batch's label tokens.

        Gradients arrive unscaled by the precision plugin, averaged over ranks and micro-batches. No value is read on
        the host.
        """
        self.mean_loss = None
        if not self.window.is_open:  # an overridden training_step: Lightning's own semantics
            return
        sums = self.window.sums()
        totals = self._agree(trainer, sums, bad=~torch.isfinite(sums[0]))
        divisions = trainer.accumulate_grad_batches * _averaged_ranks(trainer)
        self.mean_loss, factor = self.window.close(totals, divisions)
        gradients = gradients_of(optimizer)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _agree(self, trainer: Trainer, sums: Tensor, bad: Tensor) -> Tensor:
        """One reduction over the ranks of ``sums``, and of what each rank has to report; gives the sums."""
        marks = sums.new_zeros(trainer.world_size)
        marks[trainer.global_rank] = self._signals.number + BAD * bad
        parts = torch.cat([sums, marks])
        if trainer.world_size > 1 and dist.is_initialized():
            # Not through the strategy, which puts a barrier before each reduction.
            dist.all_reduce(parts)
        self._marks, self._agreed_step = parts[len(sums) :], trainer.global_step
        copies = trainer.world_size // _averaged_ranks(trainer)  # ranks that share their data with others
        return parts[: len(sums)] / copies

    def judge(self, trainer: Trainer, optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
        """Lets the guard decide on the step that is about to be taken.

        An optimizer that can't be told on the device to skip is told from the host, which reads one number a step.

        Args:
            norm: of the gradients, before clipping.
        """
        if self._marks is None:
            self._agree(trainer, norm.new_zeros(0, dtype=torch.float64), torch.zeros((), device=norm.device))
        assert self._marks is not None
        verdict = self.guard.judge(self.mean_loss, norm)
        skip = (verdict[0] > 0).float()
        self.window.count_trained(skip)
        self._read.put(torch.cat([self._marks.float(), verdict]), trainer.global_step)
        self._marks = None
        if loss_scaler(trainer) is None and supports_found_inf(optimizer):
            optimizer.found_inf = skip  # type: ignore[attr-defined]
        elif bool(skip):
            optimizer.zero_grad(set_to_none=True)

    def end_micro_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Acts on what the ranks agreed on, once a step."""
        if trainer.global_step == self._seen_step:
            return
        self._seen_step = trainer.global_step
        if self._marks is None and self._agreed_step < trainer.global_step - 1:  # no automatic optimization
            self._agree(trainer, torch.zeros(0, device=pl_module.device), torch.zeros((), device=pl_module.device))
        if self._marks is not None:  # no guard
            self.window.count_trained()
            self._read.put(self._marks.float(), trainer.global_step - 1)
            self._marks = None
        self._batches.append([])
        self._act(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads what is left."""
        self._act(trainer, last=True)

    # What follows

    def _act(self, trainer: Trainer, last: bool = False) -> None:
        while (taken := self._read.take(wait=last)) is not None:
            values, step = taken
            marks, verdict = [int(mark) for mark in values[: trainer.world_size]], values[trainer.world_size :]
            batches = self._batches.pop(0) if len(self._batches) > 1 else []
            why = None
            if verdict and verdict[0]:
                bad = [rank for rank, mark in enumerate(marks) if mark >= BAD]
                why = self._incidents.report(trainer, Incident(step + 1, bad, *verdict), batches)
            if last:  # the run ends as it is
                continue
            if why is not None:
                end_by_failure(trainer, why)
            for rank, mark in enumerate(marks):
                if mark % BAD:
                    end_by_signal(trainer, rank, mark % BAD)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The guard's."""
        return self.guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The guard's."""
        self.guard.load_state_dict(state_dict)


class StepEnd(Callback):
    """The last callback of a fit, so that all others have seen a step before the boundary ends the run there."""

    def __init__(self, boundary: StepBoundary) -> None:
        self.boundary = boundary

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the micro-batch."""
        self.boundary.end_micro_batch(trainer, pl_module)


def data_rank(trainer: Any) -> int:
    """This process's place among those that see different data."""
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["rank"]) if kwargs else 0


def _averaged_ranks(trainer: Any) -> int:
    """Ranks over which the strategy averages gradients."""
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["num_replicas"]) if kwargs else 1
