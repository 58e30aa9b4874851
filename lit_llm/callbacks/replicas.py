"""A check that what should be equal on several processes is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_llm.checkpoint.average import plain_name
from lit_llm.errors import RunStopped, UserError
from lit_llm.training.host import gather_equal

_CHUNK = 2**22
_NAN = 0x7FC00000  # stands for all NaN: which bits one has may depend on the order of operands
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (-7046029254386353131, -4417276706812531889)  # odd, as int64; of SplitMix64 and its kin (Steele et al. 2014)


class ReplicaCheck(Callback):
    """Compares checksums of the replicas' weights every so many steps, and says which rank differs.

    Under DDP all ranks hold the same weights; under MeshStrategy the ranks that differ only in the mesh's dimension
    ``replicate`` hold the same shards. A bit that memory or a link has turned, a reduction that missed a rank, or code
    that does something on one rank alone makes them train different models, silently. Where there are no replicas there
    is nothing to compare.

    A checksum is exact: it is made of the bits as integers, so that one bit in one weight is found for certain. Weights
    that are NaN are equal. A check reads each weight once, communicates two numbers a rank, and waits for the device;
    between checks nothing happens.

    Args:
        every_n_steps: optimizer steps between two checks.
        action: ``stop`` ends the run by :class:`lit_llm.errors.RunStopped` before the step is saved, ``warn`` goes on.
        optimizer_state: compare what the optimizers remember as well.

    Raises:
        UserError: a number or an action that is none.
    """

    def __init__(
        self, every_n_steps: int = 100, action: Literal["stop", "warn"] = "stop", optimizer_state: bool = False
    ) -> None:
        if every_n_steps < 1:
            raise UserError(f"replica_check.every_n_steps must be at least 1; got {every_n_steps}")
        if action not in ("stop", "warn"):
            raise UserError(f"replica_check.action must be stop or warn; got {action}")
        self.every_n_steps, self.action, self.optimizer_state = every_n_steps, action, optimizer_state
        self._seen_step = 0
        self._equal_at: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to count."""
        self._seen_step, self._equal_at = trainer.global_step, None
        if trainer.world_size > 1 and _replicas(trainer) == [trainer.global_rank]:
            rank_zero_warn(f"ReplicaCheck has nothing to compare: {type(trainer.strategy).__name__} has no replicas")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks if it is time, after a step.

        Raises:
            RunStopped: on all ranks, with ``stop``, if replicas differ.
        """
        step = trainer.global_step
        due, self._seen_step = step > self._seen_step and step % self.every_n_steps == 0, step
        if not due or trainer.world_size == 1 or not dist.is_initialized():
            return
        found = self._compare(trainer, pl_module)
        if found is None:
            self._equal_at = step
            return
        told = f"step {step}: {found}"
        if self._equal_at is not None:
            told += f"; all were equal at step {self._equal_at}"
        if self.action == "warn":
            rank_zero_warn(told)
            return
        good = "an earlier checkpoint" if self._equal_at is None else f"a checkpoint of step {self._equal_at} or before"
        raise RunStopped(f"{told}; resume from {good}")

    @torch.no_grad()
    def _compare(self, trainer: Trainer, module: LightningModule) -> str | None:
        """What differs, for the user; None: nothing. Equal on all ranks, whatever part of the model they hold."""
        device = trainer.strategy.root_device
        sums = torch.stack([checksum(tensor).to(device) for _, tensor in self._tensors(trainer, module)])
        first = _replicas(trainer)[0]
        mine = torch.stack([torch.tensor(first, device=device), checksum(sums)])
        groups = _groups(gather_equal(mine, trainer.world_size).view(-1, 2).tolist())
        if not any(len(set(group.values())) > 1 for group in groups.values()):
            return None
        names = [name for name, _ in self._tensors(trainer, module)]
        parts: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(parts, (names, sums.tolist()))
        return "; ".join(
            _told(group, {rank: parts[rank] for rank in group})
            for group in groups.values()
            if len(set(group.values())) > 1
        )

    def _tensors(self, trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Tensor]]:
        """Names and this rank's part of what is compared; a tied weight once."""
        for name, parameter in module.named_parameters():
            yield plain_name(name), _local(parameter)
        if not self.optimizer_state:
            return
        names = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
        for optimizer in trainer.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        yield f"{key} of {names.get(parameter, 'a parameter')}", _local(value)


def checksum(tensor: Tensor) -> Tensor:
    """A scalar int64 of a tensor's bits and their places, on its device, without waiting for it.

    The sum, modulo 2^64, of each element's bits times an odd number that depends on its place: one element that
    differs always changes it, several do so but by a chance of about 2^-64.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):  # in parts, as integers take up to 8 bytes an element
        part = flat[start : start + _CHUNK]
        bits = part.clone().view(_INTEGERS[part.element_size()]).to(torch.int64)
        if part.is_floating_point() and part.element_size() > 1:
            bits = torch.where(part.isnan(), _NAN, bits)
        place = torch.arange(start, start + part.numel(), device=flat.device) * _MIX[0]
        place = (place ^ (place >> 29)) * _MIX[1]
        total += (bits * ((place ^ (place >> 32)) | 1)).sum()
    return total


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _replicas(trainer: Any) -> list[int]:
    """The ranks, this one among them, that should hold what this one holds, in order."""
    mesh = getattr(trainer.strategy, "device_mesh", None)
    if mesh is None:
        return list(range(trainer.world_size))
    if "replicate" not in (mesh.mesh_dim_names or ()):
        return [trainer.global_rank]
    return sorted(dist.get_process_group_ranks(mesh.get_group("replicate")))


def _groups(every: list[list[int]]) -> dict[int, dict[int, int]]:
    """The checksum of each rank, by the first rank of its replicas."""
    groups: dict[int, dict[int, int]] = {}
    for rank, (first, value) in enumerate(every):
        groups.setdefault(first, {})[rank] = value
    return groups


def _told(group: dict[int, int], parts: dict[int, tuple[list[str], list[int]]]) -> str:
    """Who differs from whom, and in what first."""
    (value, most), *others = Counter(group.values()).most_common()
    ranks = list(group)
    names = parts[ranks[0]][0]
    if not others or most > others[0][1]:
        odd = [rank for rank in ranks if group[rank] != value]
        sound = next(rank for rank in ranks if group[rank] == value)
        differs = _first([parts[rank][1] for rank in (sound, *odd)])
        return f"{_listed(odd)} of the replicas {_listed(ranks, '')} differs from the others, first in {names[differs]}"
    differs = _first([parts[rank][1] for rank in ranks])
    values = ", ".join(f"{parts[rank][1][differs] % 2**64:016x} on rank {rank}" for rank in ranks)
    return (
        f"the replicas {_listed(ranks, '')} hold different values, first in {names[differs]} (checksum {values}), and "
        "which of them is right can't be told"
    )


def _first(sums: list[list[int]]) -> int:
    return next(place for place, values in enumerate(zip(*sums, strict=True)) if len(set(values)) > 1)


def _listed(ranks: list[int], what: str = "rank ") -> str:
    return what + ", ".join(map(str, ranks))
