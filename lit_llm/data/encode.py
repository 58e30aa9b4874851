"""Tokenizing a stream of documents in worker processes, results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

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


def encode_all(documents: Iterable[Document], tokenizer: Tokenizer, workers: int) -> Generator[Encoded, None, None]:
    """The documents' ids, EOS appended and BOS by the tokenizer's convention, in batches, in order.

    One worker is this process itself. At most ``3 * workers`` batches are under way.

    Raises:
        UserError: a text the tokenizer fails on (named by its source), or a worker that was killed.
    """
    batches = _batches(documents)
    if workers == 1:
        for batch in batches:
            yield _encode(tokenizer, batch)
        return
    # fork starts at once, shares the tokenizer and cannot run a script's unguarded main module again, as spawn would.
    # The workers need nothing that other threads of this process may hold: they encode in one thread.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes: list[BaseProcess] = []
    idle: list[Connection] = []
    busy: dict[Connection, int] = {}  # connection -> number of the batch that is there
    results: dict[int, Encoded] = {}
    turn = 0
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, ours, tokenizer), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()  # so that the worker's death is the end of the stream
            idle.append(ours)
        numbered = enumerate(batches)
        while True:
            while idle and len(busy) + len(results) < 3 * workers:
                item = next(numbered, None)
                if item is None:
                    break
                # A worker gets a batch only when it waits for one, so that neither side blocks the other in sending.
                number, batch = item
                idle[-1].send(batch)
                busy[idle.pop()] = number
            if not busy:
                return
            for connection in cast("list[Connection]", wait(list(busy))):
                answer: Encoded | Exception = connection.recv()
                if isinstance(answer, Exception):
                    raise answer
                results[busy.pop(connection)] = answer
                idle.append(connection)
            while turn in results:
                yield results.pop(turn)
                turn += 1
    except (EOFError, ConnectionError) as error:
        raise UserError(
            "a tokenizing process was killed, perhaps for want of memory; use fewer --workers or shorter documents"
        ) from error
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for connection in (*idle, *busy):
            connection.close()


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


def _serve(connection: Connection, other_end: Connection, tokenizer: Tokenizer) -> None:
    """A worker's life: batches in, answers out, until the parent ends it or ends itself."""
    other_end.close()  # the copy here would hide the parent's end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(EOFError, ConnectionError):
        while True:
            batch = connection.recv()
            answer: Encoded | Exception
            try:
                answer = _encode(tokenizer, batch)
            except UserError as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            connection.send(answer)


def _encode(tokenizer: Tokenizer, batch: list[Document]) -> Encoded:
    try:
        parts, lengths = _rows(tokenizer, [document.text for document in batch])
    except Exception:
        for document in batch:
            _encode_alone(tokenizer, document)
        raise
    text_bytes = np.fromiter((len(document.text.encode()) for document in batch), np.int64, len(batch))
    return Encoded(
        np.concatenate(parts), np.array(lengths, np.int64), text_bytes, sum(document.size for document in batch)
    )


def _rows(tokenizer: Tokenizer, texts: list[str]) -> tuple[list[np.ndarray], list[int]]:
    """Ids of ``texts``, EOS appended, as arrays to be joined, and how many of them each text has.

    The library takes some hundred bytes per token while it works, so a long text goes through it in pieces.
    """
    dtype = store_dtype(tokenizer.vocab_size)
    long = len(texts[-1]) > BATCH_CHARACTERS  # no other can be: a batch is full with the first one
    rows = tokenizer.encode_batch(texts[:-1] if long else texts, eos=True)
    lengths = [len(row) for row in rows]
    parts = [np.fromiter(chain.from_iterable(rows), dtype, sum(lengths))]
    if long:
        *pieces, last = tokenizer.pieces(texts[-1], BATCH_CHARACTERS)
        for number, piece in enumerate(pieces):
            parts.append(np.array(tokenizer.encode(piece, bos=False if number else None), dtype))
        parts.append(np.array(tokenizer.encode(last, bos=False if pieces else None, eos=True), dtype))
        lengths.append(sum(map(len, parts[1:])))
    return parts, lengths


def _encode_alone(tokenizer: Tokenizer, document: Document) -> None:
    """Name the document that makes a batch fail."""
    try:
        tokenizer.encode(document.text, eos=True)
    except Exception as error:
        raise UserError(f"{document.source}: the tokenizer fails on this text: {error}") from error
