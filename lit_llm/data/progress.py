"""The progress bar of ``lit-llm prepare``, on stderr."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from lit_llm.data.encode import Encoded

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_REFRESH_SECONDS = 0.1


class ProgressBar:
    """MB, MB/s, documents and time left while a stream passes through; silent where stderr is no terminal.

    It is drawn by the calling thread: processes are forked while it runs.
    """

    def __init__(self, enabled: bool = True) -> None:
        from rich.console import Console

        self._drawn = 0.0
        self._progress: Progress | None = None
        console = Console(stderr=True)
        if not (enabled and console.is_terminal):
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn
        from rich.table import Column

        def fixed() -> Column:
            return Column(no_wrap=True)  # so that a narrow terminal shortens the bar

        self._progress = Progress(
            TextColumn("{task.description}", table_column=fixed()),
            BarColumn(bar_width=None),
            DownloadColumn(table_column=fixed()),
            SpeedColumn(table_column=fixed()),
            TextColumn("{task.fields[documents]:,} documents", table_column=fixed()),
            TimeRemainingColumn(table_column=fixed()),
            expand=True,
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> ProgressBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def reading(self, texts: Iterable[str], size: int) -> Iterator[str]:
        """Pass ``texts`` on, whose input has ``size`` bytes, to whatever trains a tokenizer on them."""
        if self._progress is None:
            yield from texts
            return
        task = self._progress.add_task("reading", total=size, documents=0)
        for documents, text in enumerate(texts, 1):
            yield text
            self._advance(task, len(text.encode()), documents)
        # learning the merges comes now, in one go
        self._progress.update(task, description="training the tokenizer", completed=size, refresh=True)

    def encoding(self, batches: Iterable[Encoded], size: int | None) -> Iterator[Encoded]:
        """Pass ``batches`` on; ``size``: bytes of input, None if unknown."""
        if self._progress is None:
            yield from batches
            return
        task = self._progress.add_task("tokenizing", total=size, documents=0)
        documents = 0
        for batch in batches:
            yield batch
            documents += len(batch.lengths) - (not batch.begins)
            self._advance(task, batch.size, documents)
        self._progress.update(task, total=self._progress.tasks[task].completed, refresh=True)

    def _advance(self, task: TaskID, size: int, documents: int) -> None:
        now = monotonic()
        due = now - self._drawn >= _REFRESH_SECONDS
        self._drawn = now if due else self._drawn
        assert self._progress is not None
        self._progress.update(task, advance=size, documents=documents, refresh=due)
