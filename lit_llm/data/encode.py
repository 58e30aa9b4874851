"""Tokenizing a stream of documents in worker processes, results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import numpy as np

from lit_llm.data.document import Conversation, Document, Item
from lit_llm.data.store import store_dtype
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

BATCH_CHARACTERS = 1 << 19
_WORKER_BYTES = 1 << 20  # a further process pays from about so much input on
_HELD_CHARACTERS = 1 << 25  # of a text without a place to cut; the library takes some hundred bytes for each
_CHECKED_CHARACTERS = 2048  # of each batch go through the slow engine too


class EngineMismatch(Exception):
    """The fast engine gave other ids than the tokenizers library; its message holds the source."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some documents as ids, all in a row. The first may go on from the batch before, the last into the next one."""

    ids: np.ndarray  # (tokens,) in the store's dtype
    lengths: np.ndarray  # (parts,) int64: tokens of each
    text_bytes: np.ndarray  # (parts,) int64: UTF-8 bytes of each
    size: int  # bytes of input they took
    trained: np.ndarray | None = None  # (tokens,) bool where there are conversations
    begins: bool = True
    ends: bool = True


def default_workers(size: int | None) -> int:
    """A process per usable CPU, but not more than ``size`` bytes of input (None: unknown) keep busy."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpus if size is None else max(1, min(cpus, size // _WORKER_BYTES))


def encode_all(items: Iterable[Item], tokenizer: Tokenizer, workers: int) -> Generator[Encoded, None, None]:
    """The ids of texts and conversations, EOS at their end and BOS by the tokenizer's convention, in batches, in order.

    One worker is this process itself. At most ``3 * workers`` batches are under way. A little of each batch is encoded
    by the tokenizers library too, where another engine does the work.

    Raises:
        UserError: a text the tokenizer fails on (named by its source), or a worker that was killed.
        EngineMismatch: the fast engine's ids are not those of the tokenizers library.
    """
    batches = _batches(items, tokenizer)
    _ = tokenizer.engine  # built once, before the processes are forked
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
            with _blocked_signals():  # a child must not run this process's handlers before it has its own
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
            _ = tokenizer.fingerprint  # needed in the end; it takes a tenth of a second, which this process has now
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
        for connection in (*idle, *busy):
            connection.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


# ------------------------------------------------------------------- batches


def _batches(items: Iterable[Item], tokenizer: Tokenizer) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in _recut(items, tokenizer):
        batch.append(item)
        size += len(item.text) if isinstance(item, Document) else _characters(item)
        # a part that does not end its text is the last of a batch, so that only the first can go on from another
        if size >= BATCH_CHARACTERS or (isinstance(item, Document) and not item.ends):
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _characters(conversation: Conversation) -> int:
    # a turn costs some time of its own
    return sum(len(str(message["content"])) + 200 for message in conversation.messages)


def _recut(items: Iterable[Item], tokenizer: Tokenizer) -> Iterator[Item]:
    """The items, texts in parts of about BATCH_CHARACTERS that are cut where the ids do not change by it.

    A text is held until such a place is found: to its end, with a tokenizer for which none is certain.
    """
    held: list[str] = []
    size = 0
    begins = True
    for item in items:
        if isinstance(item, Conversation):
            yield item
            continue
        size += item.size
        for start in range(0, max(len(item.text), 1), BATCH_CHARACTERS):
            part = item.text[start : start + BATCH_CHARACTERS]
            ends = item.ends and start + BATCH_CHARACTERS >= len(item.text)
            cut = len(part) if ends else tokenizer.last_cut(part)
            if not cut and not ends:
                held.append(part)
                if len(held) > _HELD_CHARACTERS // BATCH_CHARACTERS:
                    raise UserError(
                        f"{item.source}: {_HELD_CHARACTERS >> 20} million characters without a place where this "
                        "tokenizer's words surely end; break its lines, or split it into several documents"
                    )
                continue
            yield Document("".join([*held, part[:cut]]), item.source, size, begins, ends)
            held, size, begins = [] if ends else [part[cut:]], 0, ends
    assert begins, "a text that does not end"


# ------------------------------------------------------------------- one batch

_SIGNALS = {signal.SIGINT, signal.SIGTERM}


@contextmanager
def _blocked_signals() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, other_end: Connection, tokenizer: Tokenizer) -> None:
    """A worker's life: batches in, answers out, until the parent ends it or ends itself."""
    other_end.close()  # the copy here would hide the parent's end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(EOFError, ConnectionError):
        while True:
            batch = connection.recv()
            answer: Encoded | Exception
            try:
                answer = _encode(tokenizer, batch)
            except (UserError, EngineMismatch) as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            connection.send(answer)


def _encode(tokenizer: Tokenizer, batch: list[Item]) -> Encoded:
    texts = [item for item in batch if isinstance(item, Document)]
    try:
        rows = tokenizer.encode_parts([t.text for t in texts], [t.begins for t in texts], [t.ends for t in texts])
    except Exception:
        for text in texts:
            _encode_alone(tokenizer, text)
        raise
    for text in texts[:1]:
        if not tokenizer.check_engine(text.text[:_CHECKED_CHARACTERS]):
            raise EngineMismatch(text.source)
    text_bytes = [len(item.text.encode()) if isinstance(item, Document) else 0 for item in batch]
    trained: np.ndarray | None = None
    if len(texts) < len(batch):
        text_rows = iter(rows)
        rows, masks = [], []
        for place, item in enumerate(batch):
            if isinstance(item, Document):
                row = next(text_rows)
                mask = np.ones(len(row), bool)
            else:
                row, mask, text_bytes[place] = _encode_chat(tokenizer, item)
            rows.append(row)
            masks.append(mask)
        trained = np.concatenate(masks)
    first, last = batch[0], batch[-1]
    return Encoded(
        ids=np.concatenate(rows).astype(store_dtype(tokenizer.vocab_size)),
        lengths=np.fromiter(map(len, rows), np.int64, len(rows)),
        text_bytes=np.array(text_bytes, np.int64),
        size=sum(item.size for item in batch),
        trained=trained,
        begins=first.begins if isinstance(first, Document) else True,
        ends=last.ends if isinstance(last, Document) else True,
    )


def _encode_chat(tokenizer: Tokenizer, chat: Conversation) -> tuple[np.ndarray, np.ndarray, int]:
    from lit_llm.data.conversation import encode_conversation

    try:
        ids, trained = encode_conversation(tokenizer, chat.messages)
    except UserError as error:
        raise UserError(f"{chat.source}: {error}") from error
    size = sum(len(message["content"].encode()) for message in chat.messages)
    return np.asarray(ids, np.uint32), np.asarray(trained, bool), size


def _encode_alone(tokenizer: Tokenizer, document: Document) -> None:
    """Name the document that makes a batch fail."""
    try:
        tokenizer.encode_parts([document.text], [document.begins], [document.ends])
    except Exception as error:
        raise UserError(f"{document.source}: the tokenizer fails on this text: {error}") from error
