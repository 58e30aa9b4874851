"""What becomes of a step that was not taken: a line for the user, its batch on disk, the end of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.training.guard import NON_FINITE, SPIKE, GuardConfig
from lit_llm.training.saved_batches import save_batches

REPLAYS = "replays"
# float16's loss scale begins at 2^16 and is halved at each overflow.
_SCALE_SEARCH = 32


@dataclass(frozen=True)
class Incident:
    """A skipped step.

    Args:
        step: its number, from 1.
        ranks: those whose own loss was not finite.
        kind: NON_FINITE or SPIKE.
        loss: mean over the global batch.
        norm: of the gradient, before clipping.
        in_a_row: steps skipped up to here without one between.
        limit: that a spike went over.
    """

    step: int
    ranks: list[int]
    kind: float
    loss: float
    norm: float
    in_a_row: float
    limit: float

    @property
    def reason(self) -> str:
        """In a few words."""
        if self.kind == SPIKE:
            values = f"loss {self.loss:.4g} or gradient norm {self.norm:.4g}"
            return f"{values} leaves the running distribution (limit {self.limit:.4g})"
        if self.ranks:
            return f"the loss is not finite on rank {', '.join(map(str, self.ranks))}"
        return f"the gradient is not finite (loss {self.loss:.4g})"


class Incidents:
    """Reports skipped steps; all ranks do so alike.

    Args:
        config: of the guard.
        seed: of the run, for the replay.
    """

    def __init__(self, config: GuardConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self._saved = 0

    @property
    def save_more(self) -> bool:
        """Whether a bad step's batch would be saved."""
        return self._saved < self.config.save_batches

    def report(self, trainer: Trainer, incident: Incident, batches: list[Any]) -> str | None:
        """Says what was skipped and saves its batches.

        Args:
            trainer: of the run.
            incident: what all ranks know of it.
            batches: this rank's micro-batches of that step.

        Returns:
            Why the run can't go on; None if it can.
        """
        scaled = loss_scaler(trainer) is not None
        if scaled and incident.kind == NON_FINITE and not incident.ranks:
            return self._too_many(incident, _SCALE_SEARCH)  # an overflow, by which the loss scale finds its place
        file = self._save(trainer, incident, batches)
        config = Path(trainer.default_root_dir) / "config.yaml"
        options = f"--config {config} " if config.exists() else ""
        replay = f"; replay its batch: lit-llm fit {options}--replay {file}" if file else ""
        if incident.kind == NON_FINITE and self.config.nonfinite == "stop":
            return f"step {incident.step}: {incident.reason}{replay}"
        rank_zero_warn(f"step {incident.step} skipped: {incident.reason}{replay}")
        return self._too_many(incident, _SCALE_SEARCH if scaled else 0)

    def _too_many(self, incident: Incident, more: int) -> str | None:
        if incident.kind != NON_FINITE or incident.in_a_row < self.config.max_skips + more:
            return None
        row = int(incident.in_a_row)
        return f"step {incident.step}: no finite loss and gradient for {row} steps in a row (model.guard.max_skips)"

    def _save(self, trainer: Trainer, incident: Incident, batches: list[Any]) -> str | None:
        """Each rank concerned writes its own; gives the first one's file, which all can name."""
        if not self.save_more:
            return None
        self._saved += 1
        ranks = incident.ranks or list(range(trainer.world_size))
        folder = Path(trainer.default_root_dir) / REPLAYS
        if trainer.global_rank in ranks and batches:
            try:
                save_batches(
                    folder / f"step-{incident.step}-rank-{trainer.global_rank}.pt",
                    step=incident.step,
                    rank=trainer.global_rank,
                    world_size=trainer.world_size,
                    seed=self.seed,
                    reason=incident.reason,
                    loss=incident.loss,
                    grad_norm=incident.norm,
                    batches=batches,
                    checkpoint=str(trainer.ckpt_path) if trainer.ckpt_path else None,
                )
            except Exception as error:  # whatever is in a batch, a tool for looking must not end the run
                why = getattr(error, "strerror", None) or error
                rank_zero_warn(f"the batch of step {incident.step} can't be saved in {folder}: {why}")
                if trainer.global_rank == ranks[0]:
                    return None
        return str(folder / f"step-{incident.step}-rank-{ranks[0]}.pt")


def loss_scaler(trainer: Any) -> Any:
    """float16's gradient scaler, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)
