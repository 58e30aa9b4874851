"""An exponential moving average of the weights, kept beside them and used for validation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_llm.checkpoint.average import AVERAGE_KEY, plain_name
from lit_llm.checkpoint.copies import gather
from lit_llm.checkpoint.placing import fill, placeholders
from lit_llm.checkpoint.stored import Stored
from lit_llm.errors import UserError
from lit_llm.parallel.report import is_sharded, local_part, reshard

_MEANING = ("decay", "every_n_steps")
"""What may not change when a run is resumed: the average would mix two meanings."""


class WeightAverage(Callback):
    """Keeps an average of the trainable parameters over the optimizer steps (Polyak and Juditsky 1992).

    An update moves the average by ``(1 - d) * (weights - average)`` with ``d = min(decay, (1 + n) / (10 + n))``, n the
    updates before it. The second term is a warm-up without a number to choose: early on the average reaches over about
    the last ninth of the updates, nearly the power function with gamma = 8 of Karras et al. 2024 ("Analyzing and
    Improving the Training Dynamics of Diffusion Models", section 3.1), so that it soon forgets the initial weights.

    The average is float32 whatever the parameters (in 16 bits it would stand still) and split over the ranks as they
    are; it costs 4 bytes a parameter, no communication, and waits for no device. A step that a guard skipped counts as
    one. Buffers and parameters that are frozen when training starts are the model's own.

    Validation inside fit uses the average once an update has been made (so never the sanity check). The weights that
    are trained and saved as ``state_dict`` are the raw ones; the average is saved in this callback's state, under
    the names of ``state_dict``: each rank its part where MeshStrategy writes a folder, else on rank 0 whole.
    :func:`lit_llm.checkpoint.average.averaged_weights` reads it back.

    Args:
        decay: share of the average that an update keeps, 0 or more and below 1.
        every_n_steps: optimizer steps between two updates, made at the steps that it divides.
        start_step: the step whose weights the average begins with; 0: the initial ones.
        evaluate: validate with the average, in fit and of its checkpoints.

    Raises:
        UserError: a number out of its range; on resuming, another ``decay`` or ``every_n_steps`` than before.
    """

    def __init__(
        self, decay: float = 0.999, every_n_steps: int = 1, start_step: int = 0, evaluate: bool = True
    ) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"weight_average.decay must be at least 0 and below 1, such as 0.999; got {decay}")
        if every_n_steps < 1:
            raise UserError(f"weight_average.every_n_steps must be at least 1; got {every_n_steps}")
        if start_step < 0:
            raise UserError(f"weight_average.start_step must be 0 or more; got {start_step}")
        self.decay, self.every_n_steps, self.start_step, self.evaluate = decay, every_n_steps, start_step, evaluate
        self.updates = 0
        self._step = 0
        self._entries: list[_Entry] = []
        self._module: weakref.ref[LightningModule] | None = None
        self._loaded: Mapping[str, Tensor] | None = None
        self._swapped = self._saves_parts = False

    @property
    def state_key(self) -> str:
        """One key whatever the options: it is how a checkpoint is asked for its average."""
        return AVERAGE_KEY

    # The average

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Asks how the strategy saves."""
        self._saves_parts = bool(getattr(trainer.strategy, "saves_parts", False))

    @torch.no_grad()
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes up the loaded average or the one of this module's last fit; else begins with the present weights."""
        known = self._loaded
        if known is None and self._module is not None and self._module() is pl_module:
            known = {entry.names[0]: entry.shadow for entry in self._entries}
        if known is None:
            self.updates, self._step = 0, trainer.global_step
        reshard(pl_module)
        self._entries = [_Entry.of(names, p) for names, p in _trainable(pl_module)]
        if known is not None:
            sources = placeholders(known) if isinstance(known, Stored) else known
            fill((sources[e.names[0]], e.shadow) for e in self._entries if e.names[0] in sources)
        self._module, self._loaded = weakref.ref(pl_module), None
        unknown = [e.names[0] for e in self._entries if known is not None and e.names[0] not in known]
        if unknown:
            rank_zero_warn(f"no average of {len(unknown)} parameters, such as {unknown[0]}, was saved; it begins anew")
        self._step = min(self._step, trainer.global_step)
        self._advance(trainer.global_step)  # saved between a step and its update

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the average if a step has been made."""
        self._advance(trainer.global_step)

    @torch.no_grad()
    def _advance(self, step: int) -> None:
        before, self._step = self._step, step
        if before < self.start_step <= step:
            self._move(1.0)
        elif before < step and step > self.start_step and step % self.every_n_steps == 0:
            self._move(1 - min(self.decay, (1 + self.updates) / (10 + self.updates)))
            self.updates += 1

    def _move(self, share: float) -> None:
        alike = [entry for entry in self._entries if entry.is_alike]
        if alike:
            weights = [local_part(entry.parameter) for entry in alike]
            torch._foreach_lerp_([local_part(entry.shadow) for entry in alike], weights, share)
        for entry in self._entries:
            if not entry.is_alike:  # one at a time, as each is copied
                shadow = local_part(entry.shadow)
                shadow.lerp_(local_part(entry.parameter).to(shadow.dtype), share)

    # Validation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the average into the parameters."""
        if self.evaluate and self.updates and trainer.state.fn == TrainerFn.FITTING and not self._swapped:
            self._swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the raw weights back; checkpoint callbacks, which come last, save them."""
        if self._swapped:
            self._swap(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Puts the raw weights back."""
        if self._swapped:
            self._swap(pl_module)

    @torch.no_grad()
    def _swap(self, module: LightningModule) -> None:
        reshard(module)
        for entry in self._entries:
            if self._swapped:
                entry.put_back()
            else:
                entry.put_in()
        self._swapped = not self._swapped

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The average; every rank must come here.

        As DTensors where the strategy saves them so, else as plain tensors, for which sharded ones are gathered one by
        one and which only rank 0 holds.
        """
        weights = dict(self._loaded or {})
        for entry in self._entries if self._loaded is None else ():
            average = entry.average(self._swapped)
            whole = average if self._saves_parts else _whole(average)
            if whole is not None:
                weights.update(dict.fromkeys(entry.names, whole))
        return {
            "decay": self.decay,
            "every_n_steps": self.every_n_steps,
            "evaluate": self.evaluate,
            "updates": self.updates,
            "step": self._step,
            "weights": weights,
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint that is saved amid a validation, as a signal may do, gets the raw weights too."""
        if not self._swapped:
            return
        saved = checkpoint["state_dict"]
        names = {plain_name(name): name for name in saved}
        for entry in self._entries:
            places = [names[name] for name in entry.names if name in names]
            in_parts = any(is_sharded(saved[place]) for place in places)
            raw = entry.raw_weights.cpu() if in_parts else _whole(entry.raw_weights)
            saved.update(dict.fromkeys(places, raw))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuses to go on with another average; called before the state is loaded."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        state = checkpoint.get("callbacks", {}).get(AVERAGE_KEY)
        if state is None:
            rank_zero_info("the checkpoint holds no averaged weights; the average begins with its weights")
            return
        for name in _MEANING:
            there, here = state[name], getattr(self, name)
            if there != here:
                raise UserError(
                    f"weight_average.{name} is {here}, but the checkpoint's average was made with {there}; give {there}"
                )
        if isinstance(state["weights"], dict):
            state["weights"] = _Uncopied(state["weights"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the average until training starts, when the parameters are where they stay."""
        self.updates, self._step = state_dict["updates"], state_dict["step"]
        self._loaded = state_dict["weights"]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lets go of an average that was loaded but not trained on."""
        if stage != TrainerFn.FITTING:
            self._loaded = None


class _Uncopied(dict[str, Tensor]):
    """What Lightning's copy.deepcopy of a callback's state leaves where it is: tensors mapped from a file."""

    def __deepcopy__(self, memo: Any) -> _Uncopied:
        return self


@dataclass
class _Entry:
    """A parameter and its average; while swapped, they hold each other's values."""

    names: list[str]
    parameter: nn.Parameter
    shadow: Tensor
    kept: Tensor | None = None
    """The raw weights while swapped, where their dtype can't hold the average."""

    @classmethod
    def of(cls, names: list[str], parameter: nn.Parameter) -> _Entry:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return cls(names, parameter, parameter.detach().to(wide, copy=True))

    @property
    def is_alike(self) -> bool:
        return self.parameter.dtype == self.shadow.dtype

    def put_in(self) -> None:
        weights, average = local_part(self.parameter), local_part(self.shadow)
        if self.is_alike:
            _exchange(weights, average)
        else:
            self.kept = self.parameter.detach().clone()
            weights.copy_(average)

    def put_back(self) -> None:
        weights = local_part(self.parameter)
        if self.kept is None:
            _exchange(weights, local_part(self.shadow))
        else:
            weights.copy_(local_part(self.kept))
            self.kept = None

    def average(self, swapped: bool) -> Tensor:
        return self.parameter.detach() if swapped and self.is_alike else self.shadow

    @property
    def raw_weights(self) -> Tensor:
        """While swapped."""
        return self.shadow if self.kept is None else self.kept


def _trainable(module: nn.Module) -> Iterable[tuple[list[str], nn.Parameter]]:
    """Each trainable parameter once, with all its names."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(id(parameter), ([], parameter))[0].append(plain_name(name))
    return found.values()


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _whole(tensor: Tensor) -> Tensor | None:
    """The tensor, gathered if it is sharded; None on the other ranks then, as rank 0 alone writes it."""
    if not is_sharded(tensor):
        return tensor
    first = torch.distributed.get_rank() == 0
    whole = gather(tensor, keeps=first)
    return whole if first else None
