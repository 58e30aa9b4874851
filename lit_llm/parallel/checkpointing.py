"""Checkpoints of MeshStrategy: a folder to which each process writes its part, or one file as one process writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lit_llm.checkpoint.average import plain_name
from lit_llm.checkpoint.copies import gather, snapshot
from lit_llm.checkpoint.disk import new_names_only, replaces
from lit_llm.checkpoint.find import read_checkpoint
from lit_llm.checkpoint.placing import place_weights, placeholders
from lit_llm.checkpoint.sharded import load_content, prepare_write
from lit_llm.checkpoint.sharded_write import identity
from lit_llm.checkpoint.stored import Stored
from lit_llm.checkpoint.team import Team
from lit_llm.checkpoint.write import BackgroundWrite, SafeCheckpointIO, write_checkpoint

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy

    _Base = ModelParallelStrategy
else:
    _Base = object

_Result = TypeVar("_Result")


class ShardedCheckpoints(_Base):
    """The methods of a ModelParallelStrategy that save and load; its first base.

    With ``save_distributed_checkpoint`` a checkpoint is a folder (:mod:`lit_llm.checkpoint.sharded`), else a file with
    the keys and positions that one process would write, gathered by rank 0 tensor by tensor. Both load, whoever wrote
    them: each process takes its part. Whatever fails on one process is raised on all.

    Lightning asks for the content, lets the module and the callbacks change it, and only then are tensors read.
    """

    _writers: Any = None
    """A group of its own, of gloo, as a thread in the background uses it while training goes on."""

    @property
    def lightning_restore_optimizer(self) -> bool:
        """By :meth:`load_optimizer_state_dict`, after the module has seen the content."""
        return True

    # Saving

    @property
    def saves_parts(self) -> bool:
        """Whether DTensors in callbacks' states are saved as they are, each process its part."""
        return self._save_distributed_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Tensors and DTensors by plain name; for one file whole ones, on rank 0 alone. All processes call it."""
        assert self.lightning_module is not None
        state = {plain_name(name): value for name, value in self.lightning_module.state_dict().items()}
        if self._save_distributed_checkpoint:
            return state
        gather = _Gather(self.is_global_zero)
        whole = {name: gather(value) for name, value in state.items()}
        return whole if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state in torch's format, by position; for one file whole, on rank 0 alone."""
        state = _plain_optimizer(optimizer).state_dict()
        if self._save_distributed_checkpoint:
            return state
        gather = _Gather(self.is_global_zero)
        whole = {
            position: {key: gather(value) for key, value in values.items()}
            for position, values in state["state"].items()
        }
        return {**state, "state": whole} if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint; all processes call it, and return when it is there.

        One at its name is replaced, but see :func:`lit_llm.checkpoint.disk.new_names_only`.

        Raises:
            TypeError: ``storage_options`` are given.
            CheckpointWriteError: it can't be written; on all processes.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options for a checkpoint")
        self._writer(checkpoint, self.broadcast(os.fspath(filepath)), copy=False)()

    def write_in_background(self, content: dict[str, Any], path: str | Path) -> BackgroundWrite:
        """Writes a checkpoint while training goes on, out of copies in CPU memory; all processes call it.

        What fails on one process is the error on all, and so is a name that is taken when it is written.
        """
        with new_names_only():
            return BackgroundWrite(self._writer(content, self.broadcast(os.fspath(path)), copy=True))

    def _writer(self, content: dict[str, Any], path: str, *, copy: bool) -> Callable[[], None]:
        team = self._team()
        if self._save_distributed_checkpoint:
            return prepare_write(content, path, self._optimizer_names(), group=team.group, copy=copy)
        if team.rank == 0 and copy:
            content = snapshot(content)
        replace = replaces()
        return lambda: team.first(lambda: write_checkpoint(content, path, replace=replace))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a file or a folder, by rank 0; a kill in between leaves no half checkpoint under its name."""
        if self.is_global_zero:
            SafeCheckpointIO().remove_checkpoint(filepath)

    # Loading

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The content of a folder or a file. Tensors of a folder are without memory until they are loaded."""
        path = self.broadcast(os.fspath(checkpoint_path))
        content = self._together(lambda: read_checkpoint(path, weights_only=weights_only is not False))
        if isinstance(content["state_dict"], Stored):
            content["state_dict"] = self._together(lambda: placeholders(content["state_dict"]))
        return content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fills the model in place."""
        module = self.lightning_module
        assert module is not None
        self._together(lambda: place_weights(checkpoint["state_dict"], module.state_dict(), strict=strict))
        others = {name: value for name, value in checkpoint["state_dict"].items() if not isinstance(value, Tensor)}
        if others:  # what modules save by get_extra_state
            module.load_state_dict(others, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fills the optimizers, by the names of their parameters."""
        optimizers = [_plain_optimizer(one) for one in self.optimizers]
        states = checkpoint["optimizer_states"]
        self._together(lambda: load_content(states, optimizers, self._optimizer_names()))

    # Processes and names

    def prepare_saving(self) -> None:
        """Makes the group that writes; all processes call it, before the first of :meth:`all_come`."""
        self._team()

    def all_come(self, seconds: float = 60) -> bool:
        """Whether all processes call this within some seconds: where one has met an error, others may not."""
        if self._writers is None:
            return not torch.distributed.is_initialized()
        try:
            torch.distributed.monitored_barrier(self._writers, timeout=timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _team(self) -> Team:
        if self._writers is None and torch.distributed.is_initialized():
            self._writers = torch.distributed.new_group(backend="gloo", timeout=self._timeout)
        return Team(self._writers)

    def _together(self, step: Callable[[], _Result]) -> _Result:
        return self._team().all(step)

    def _optimizer_names(self) -> list[list[str]]:
        """Of each optimizer, the parameters' names by their positions."""
        assert self.lightning_module is not None
        known = {id(p): plain_name(name) for name, p in self.lightning_module.named_parameters()}
        names: list[list[str]] = []
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            names.append([known.get(id(p), f"#{position}") for position, p in enumerate(parameters)])
        return names


class _Gather:
    """Makes tensors whole, tensor by tensor, on rank 0's CPU; those that share memory do so there too."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = identity(value)
        if key not in self._known:
            self._known[key] = gather(value, keeps=self.keeps)
        return self._known[key]


def _plain_optimizer(optimizer: Any) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
