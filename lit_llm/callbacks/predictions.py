"""Writes what predict returns, a JSON object a line, in the order of the prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_llm.errors import UserError


class PredictionWriter(Callback):
    """Puts the records of ``predict_step`` into one file, each as soon as it is there.

    Every rank writes its own part; rank 0 then copies the lines of all parts together by ``index``, each index once,
    and renames the whole. Nothing lies under the final name before it is complete. The ranks must see the same file
    system.

    Args:
        output: the file, replaced if there is one. Its folder is made.
    """

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output)
        self.records = 0
        self._part: TextIO | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens this rank's part."""
        if self.output.is_dir():
            raise UserError(f"output {self.output} is a folder; give the name of a file")
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._part = self._part_path(trainer.global_rank).open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"output {self.output} can't be written: {error.strerror}; choose another") from None

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Appends a batch's records."""
        assert self._part is not None
        if not isinstance(outputs, list) or not all(isinstance(r, dict) and "index" in r for r in outputs):
            raise UserError(
                f"{type(pl_module).__name__}.predict_step returned {type(outputs).__name__}; to be written to a file "
                "it must be a list of dicts with an index each"
            )
        for record in outputs:
            self._part.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._part.flush()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merges the parts."""
        assert self._part is not None
        self._part.close()
        trainer.strategy.barrier("PredictionWriter")
        if trainer.is_global_zero:
            self._merge([self._part_path(rank) for rank in range(trainer.world_size)])
        trainer.strategy.barrier("PredictionWriter: the file is there")

    def _merge(self, parts: list[Path]) -> None:
        whole = self.output.with_name(f".{self.output.name}.partial")
        with ExitStack() as stack, whole.open("wb") as file:
            streams: list[IO[bytes]] = [stack.enter_context(part.open("rb")) for part in parts]
            places: dict[int, tuple[IO[bytes], int]] = {}
            for stream in streams:
                for index, offset in _offsets(stream):
                    places.setdefault(index, (stream, offset))
            for _, (stream, offset) in sorted(places.items(), key=lambda place: place[0]):
                stream.seek(offset)
                file.write(stream.readline())
        os.replace(whole, self.output)
        self.records = len(places)
        for part in parts:
            part.unlink()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves nothing half-written."""
        if self._part is not None:
            self._part.close()
            self._part_path(trainer.global_rank).unlink(missing_ok=True)

    def _part_path(self, rank: int) -> Path:
        return self.output.with_name(f".{self.output.name}.rank{rank}.partial")


def _offsets(lines: IO[bytes]) -> Iterator[tuple[int, int]]:
    """The index and the place of each line."""
    offset = 0
    for line in lines:
        yield json.loads(line)["index"], offset
        offset += len(line)
