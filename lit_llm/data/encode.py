"""Tokenizing a stream of documents in worker processes, results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from lit_llm.data.sources import Document
from lit_llm.data.store import store_dtype
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

BATCH_CHARACTERS = 1 << 19
_WORKER_BYTES = 1 << 20  # a further process pays from about so much input on


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some documents as ids: all in a row, tokens and UTF-8 bytes of each, and the input they took."""

    ids: np.ndarray  # (tokens,) in the store's dtype
    lengths: np.ndarray  # (documents,) int64
    text_bytes: np.ndarray  # (documents,) int64
    size: int


def default_workers(size: int | None) -> int:
    """A process per usable CPU, but not more than ``size`` bytes of input (None: unknown) keep busy."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpus if size is None else max(1, min(cpus, size // _WORKER_BYTES))


def encode_all(documents: Iterable[Document], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """The documents' ids, EOS appended and BOS by the tokenizer's convention, in batches, in order.

    One worker is this process itself. At most ``2 * workers + 1`` batches are under way.

    Raises:
        UserError: a text the tokenizer fails on (named by its source), or a worker that was killed.
    """
    batches = _batches(documents)
    if workers == 1:
        for batch in batches:
            yield _encode(tokenizer, batch)
        return
    # fork starts at once and cannot run a script's unguarded main module again, as spawn would; the workers touch
    # no lock that another thread may hold (their tokenizer is their own, and runs in one thread).
    method = "fork" if sys.platform == "linux" else "spawn"
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context(method), initializer=_start_worker, initargs=(tokenizer.to_files(),)
    )
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_work, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenizing process was killed, perhaps for want of memory; use fewer --workers or shorter documents"
        ) from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_worker_tokenizer: Tokenizer | None = None


def _start_worker(files: Mapping[str, str]) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_follow_parent, daemon=True).start()
    _worker_tokenizer = Tokenizer.from_files(files)


def _follow_parent() -> None:
    """End with the parent, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(batch: list[Document]) -> Encoded:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, batch)


def _encode(tokenizer: Tokenizer, batch: list[Document]) -> Encoded:
    try:
        rows = tokenizer.encode_batch([document.text for document in batch], eos=True)
    except Exception:
        for document in batch:
            _encode_alone(tokenizer, document)
        raise
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids: np.ndarray[Any, Any] = np.fromiter(
        chain.from_iterable(rows), store_dtype(tokenizer.vocab_size), int(lengths.sum())
    )
    text_bytes = np.fromiter((len(document.text.encode()) for document in batch), np.int64, len(batch))
    return Encoded(ids, lengths, text_bytes, sum(document.size for document in batch))


def _encode_alone(tokenizer: Tokenizer, document: Document) -> None:
    """Name the document that makes a batch fail."""
    try:
        tokenizer.encode(document.text, eos=True)
    except Exception as error:
        raise UserError(f"{document.source}: the tokenizer fails on this text: {error}") from error
