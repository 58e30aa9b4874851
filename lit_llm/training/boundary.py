"""The boundary between two optimizer steps: what is agreed on across ranks there, and what follows from it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_llm.checkpoint.write import write_safely
from lit_llm.errors import UserError
from lit_llm.optim import supports_found_inf
from lit_llm.parallel.report import drop_gradients
from lit_llm.training.ending import end_by_failure, end_by_signal
from lit_llm.training.gradients import gradients_of, scale_gradients, total_norm
from lit_llm.training.guard import Guard, GuardConfig
from lit_llm.training.host import HostRead
from lit_llm.training.incidents import Incident, Incidents, loss_scaler
from lit_llm.training.lightning_loop import free_gradients, mend, restore
from lit_llm.training.peers import QUIET_S, PeerWatch
from lit_llm.training.signals import SignalFlag
from lit_llm.training.streams import begin_stream
from lit_llm.training.window import StepWindow

# What a rank's mark says, in one number that float32 holds exactly:
BAD = 128  # a loss that is not finite, above all signal numbers
WISH = 256  # a wish of that rank's callbacks, such as a trace of the coming steps
_ALL_RANKS = -1  # the stream between micro-batches


class StepBoundary(Callback):
    """Makes one optimizer step out of its micro-batches, and acts between two.

    LitLLM puts it before all other callbacks of a fit, and its :class:`StepEnd` behind them. Before each step it turns
    the gradients into those of the mean loss over the global batch's label tokens, with one reduction over the ranks
    that also carries signals and non-finite losses, and lets the guard judge; at the end of the step it does what all
    ranks now know: skip, stop, or save and end.

    Args:
        window: sums the micro-batches.
        config: of the guard.
        seed: of the random streams.
    """

    def __init__(self, window: StepWindow, config: GuardConfig, seed: int) -> None:
        self.window, self.config, self.seed = window, config, seed
        self.guard = Guard(config)
        self.norm: Tensor | None = None
        """Of the gradients of the step that is being taken, before clipping; None where nobody asks for it."""
        self.wish = False
        """Set by a callback of one rank, and cleared when it is sent: the listeners of all ranks then hear of it."""
        self.listeners: list[Callable[[int], None]] = []
        """Called with the step that carried a wish of any rank, on all ranks at the end of the same step: that one, or
        on a GPU the next. Not called any more once training has ended."""
        self._signals = SignalFlag()
        self._peers = PeerWatch(config.peer_timeout)
        self._read = HostRead()
        self._trainer: Any = None
        self._hooks: list[Any] = []
        self._froze = False
        self._begin(0)

    def _begin(self, step: int) -> None:
        self.window.discard()
        self._read.clear()
        self._incidents = Incidents(self.config, self.seed)
        self._marks: Tensor | None = None  # (ranks,) what each rank reports at this step
        self._batches: list[list[Any]] = [[]]  # micro-batches of the steps not yet read
        self._bad: Tensor | None = None  # whether a micro-batch of this step had a loss that is not finite
        self._seen_step = step
        self._micro_batch = -1
        self._ending = self.wish = False
        self.norm = None

    def attach(self, trainer: Any) -> None:
        """Takes its places in a Trainer that is setting up a fit, and makes its checkpoints safe."""
        others = [one for one in trainer.callbacks if not isinstance(one, StepBoundary | StepEnd)]
        trainer.callbacks = [self, *others, StepEnd(self)]
        self._trainer = trainer
        write_safely(trainer.strategy)

    def takes_part(self, trainer: Any) -> bool:
        """Whether it makes the steps of this fit; not while a tuner has put the callbacks aside.

        Raises:
            UserError: ``setup`` was overridden without its own, so that it was never attached.
        """
        if self._trainer is not trainer:
            raise UserError(
                "LitLLM.setup was not called: a subclass that overrides setup must call super().setup(stage)"
            )
        return self in trainer.callbacks

    def _detach(self, trainer: Any) -> None:
        """Leaves the Trainer, and the optimizers, as they were."""
        for optimizer in trainer.optimizers:
            if getattr(optimizer, "found_inf", None) is not None:
                optimizer.found_inf = None
        for hook in self._hooks:
            hook.remove()
        if trainer.lightning_module is not None:
            drop_gradients(trainer.lightning_module)
        if self._froze:
            gc.unfreeze()
        self._froze = False
        self._hooks, self._trainer = [], None
        self.listeners.clear()
        restore(trainer)
        trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, StepBoundary | StepEnd)]

    # The run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mends Lightning's loop."""
        mend(trainer, self._signals.install)
        self._peers.start(lambda: trainer.global_step, lambda: getattr(trainer.strategy.launcher, "procs", None) or [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins with nothing open, and on several ranks keeps the garbage collector from what is there already.

        A full collection looks at all that torch, Lightning and others have loaded: a quarter of a second now and then,
        on each rank at a step of its own, for which all others wait.
        """
        self._begin(trainer.global_step)
        drop_gradients(pl_module)
        if trainer.world_size > 1 and gc.isenabled() and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._froze = True
        if pl_module.automatic_optimization:
            self._hooks += [optimizer.register_step_post_hook(free_gradients) for optimizer in trainer.optimizers]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seeds the micro-batch's random stream."""
        automatic = pl_module.automatic_optimization
        self._micro_batch = batch_idx % trainer.accumulate_grad_batches if automatic else self._micro_batch + 1
        if automatic and self._micro_batch == 0:  # Lightning zeroes the gradients here, also behind a window cut short
            self.window.forget()
            self._bad = None
            self._batches[-1].clear()
        begin_stream(self.seed, trainer.global_step, self._micro_batch, data_rank(trainer))
        if automatic and self.config.active and self._incidents.save_more:
            self._batches[-1].append(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Counts a micro-batch once its gradient is about to be made, and notes whether its loss is finite."""
        bad = ~torch.isfinite(loss.detach()).all()
        self._bad = bad if self._bad is None else self._bad | bad
        self.window.commit(loss, scaled=loss_scaler(trainer) is not None)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Makes the gradient that of the mean over the global batch's label tokens, measures and judges it.

        Gradients arrive unscaled by the precision plugin, averaged over ranks and micro-batches. No value is read on
        the host unless this step is logged.
        """
        if not pl_module.automatic_optimization:
            return
        if loss_scaler(trainer) is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise UserError(
                f"a fused {type(optimizer).__name__} unscales float16 gradients inside its own step, after they are "
                "measured and clipped; build it with fused=False for trainer.precision 16-mixed"
            )
        gradients, loss = gradients_of(optimizer), None
        if self.window.is_open:  # else an overridden training_step: Lightning's own semantics
            sums = self.window.sums()
            totals = self._agree(trainer, sums)
            loss, factor = self.window.close(totals, trainer.accumulate_grad_batches * _averaged_ranks(trainer))
            scale_gradients(gradients, factor)
        logged = loss is not None and trainer._logger_connector.should_update_logs
        asked = logged or self.config.active or (loss is not None and trainer.gradient_clip_val is not None)
        self.norm = total_norm(gradients, pl_module.device) if asked else None
        if self.config.active:
            self._judge(trainer, optimizer, loss)
        self.window.count_trained()
        if logged:
            log_step: Any = pl_module._log_step
            log_step(optimizer, loss, self.norm)

    def _agree(self, trainer: Trainer, sums: Tensor) -> Tensor:
        """One reduction over the ranks of ``sums``, and of what each rank has to report; gives the sums."""
        marks = sums.new_zeros(trainer.world_size)
        told = self._signals.number + WISH * self.wish
        marks[trainer.global_rank] = told + (0 if self._bad is None else BAD * self._bad)
        self._bad, self.wish = None, False
        parts = torch.cat([sums, marks])
        if trainer.world_size > 1 and dist.is_initialized():
            # Not through the strategy, which puts a barrier before each reduction.
            dist.all_reduce(parts)
        self._marks = parts[len(sums) :]
        copies = trainer.world_size // _averaged_ranks(trainer)  # ranks that share their data with others
        return parts[: len(sums)] / copies

    def _judge(self, trainer: Trainer, optimizer: Any, loss: Tensor | None) -> None:
        """Lets the guard decide on the step that is about to be taken.

        An optimizer that can't be told on the device to skip is told from the host, which reads one number a step.
        """
        assert self.norm is not None
        if self._marks is None:
            self._agree(trainer, self.norm.new_zeros(0))
        assert self._marks is not None
        verdict = self.guard.judge(loss, self.norm)
        skip = (verdict[0] > 0).float()
        self.window.count_trained(skip)
        self._read.put(torch.cat([self._marks.float(), verdict]), trainer.global_step)
        self._marks = None
        if loss_scaler(trainer) is None and supports_found_inf(optimizer):
            optimizer.found_inf = skip
        elif bool(skip):
            optimizer.zero_grad(set_to_none=True)

    def end_micro_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Acts on what the ranks agreed on, once a step."""
        self.window.withdraw()
        # Between micro-batches all ranks draw alike, as code that shuffles by torch's generator expects.
        begin_stream(self.seed, trainer.global_step, self._micro_batch, _ALL_RANKS)
        if trainer.global_step == self._seen_step:
            return
        if not pl_module.automatic_optimization:
            self._agree(trainer, torch.zeros(0, device=pl_module.device))
            self._micro_batch = -1
        elif self._marks is None and not self.config.active:  # an overridden training_step and no guard
            self._agree(trainer, torch.zeros(0, device=pl_module.device))
        if self._marks is not None:
            self._read.put(self._marks.float(), trainer.global_step - 1)
            self._marks = None
        self._seen_step = trainer.global_step
        self._batches.append([])
        self._act(trainer)

    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads what is left at the end of training, and asks for signals again: a validation may have been last."""
        if self._ending:
            return
        self._agree(trainer, torch.zeros(0, device=pl_module.device))
        assert self._marks is not None
        self._read.put(self._marks.float(), trainer.global_step - 1)
        self._marks = None
        self._act(trainer, last=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finds out whether another rank's end is the reason, and leaves."""
        self._peers.attach_to(exception)
        self._peers.stop()
        self._detach(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves."""
        self._peers.stop()
        self._detach(trainer)

    # What follows

    def _act(self, trainer: Trainer, last: bool = False) -> None:
        while (taken := self._read.take(wait=last)) is not None:
            values, step = taken
            marks = [_Mark.of(int(mark)) for mark in values[: trainer.world_size]]
            verdict = values[trainer.world_size :]
            batches = self._batches.pop(0) if len(self._batches) > 1 else []
            why = None
            if verdict and verdict[0]:
                bad = [rank for rank, mark in enumerate(marks) if mark.bad]
                why = self._incidents.report(trainer, Incident(step + 1, bad, *verdict), batches)
            signals = [(rank, mark.signal) for rank, mark in enumerate(marks) if mark.signal]
            if why is not None or signals:
                self._ending = True
                self._read.clear()
            if why is not None:
                end_by_failure(trainer, why, ended=last)
            if signals:
                end_by_signal(trainer, *signals[0], ended=last)
            if any(mark.wish for mark in marks) and not last:
                for listener in self.listeners:
                    listener(step)


def quiet(trainer: Any, seconds: float = QUIET_S) -> AbstractContextManager[None]:
    """Around what holds this process's interpreter for long: the other ranks don't take it for dead meanwhile.

    Of :meth:`lit_llm.training.peers.PeerWatch.quiet`; does nothing where no boundary watches the ranks.
    """
    boundary = next((one for one in trainer.callbacks if isinstance(one, StepBoundary)), None)
    return nullcontext() if boundary is None else boundary._peers.quiet(seconds)


class StepEnd(Callback):
    """The last callback of a fit, so that all others have seen a step before the boundary ends the run there."""

    def __init__(self, boundary: StepBoundary) -> None:
        self.boundary = boundary

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the micro-batch."""
        self.boundary.end_micro_batch(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the run, whose final state is saved by now."""
        self.boundary.finish(trainer, pl_module)


class _Mark(NamedTuple):
    """What a rank reported at a step."""

    signal: int
    bad: bool
    wish: bool

    @classmethod
    def of(cls, number: int) -> _Mark:
        return cls(number % BAD, bool(number // BAD % 2), number >= WISH)


def data_rank(trainer: Any) -> int:
    """This process's place among those that see different data."""
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["rank"]) if kwargs else 0


def _averaged_ranks(trainer: Any) -> int:
    """Ranks over which the strategy averages gradients."""
    kwargs = trainer.distributed_sampler_kwargs
    return int(kwargs["num_replicas"]) if kwargs else 1
