"""Writing a token store: shards with checksums in a folder that takes its final name only when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_llm.data.store import FORMAT, FORMAT_VERSION, INDEX_DTYPE, META_FILE, read_meta, store_dtype
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.data.tokenizer_json import CARRIED_FILES
from lit_llm.errors import UserError

SHARD_BYTES = 1 << 30


class StoreWriter:
    """Writes documents into ``folder``, shard by shard; memory stays flat.

    Args:
        folder: an existing, empty folder (see ``new_folder``).
        tokenizer: the one that made the ids; it must name an EOS token. It is saved beside them.
        shard_bytes: a new shard is begun rather than exceed this; a longer document has a shard to itself.

    ``append`` documents, then ``finish`` once.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, shard_bytes: int = SHARD_BYTES) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer names no EOS token, which ends every document in a store")
        self.folder = folder
        self.tokenizer = tokenizer
        self.dtype = store_dtype(tokenizer.vocab_size)
        self._shard_bytes = shard_bytes
        self._splits: dict[str, _SplitWriter] = {}

    def append(self, split: str, ids: np.ndarray, lengths: np.ndarray, text_bytes: np.ndarray) -> None:
        """Append documents: all their ``ids`` in a row (1-D), tokens per document and UTF-8 bytes of text of each.

        UserError if an id is outside the vocabulary.
        """
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocab_size:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise UserError(f"token id {wrong} is outside the vocabulary of {self.tokenizer.vocab_size} ids")
        assert len(lengths) == len(text_bytes)
        assert ids.size == lengths.sum()
        assert (lengths > 0).all()
        if split not in self._splits:
            self._splits[split] = _SplitWriter(self.folder, split, self.dtype, self._shard_bytes)
        self._splits[split].append(ids.astype(self.dtype, copy=False), lengths, text_bytes)

    def documents(self, split: str) -> int:
        """Documents appended to ``split`` so far."""
        return self._splits[split].documents if split in self._splits else 0

    def finish(self, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Close the shards, write the tokenizer and meta.json (with ``extra`` in it), and return the latter."""
        splits = {name: self._splits[name].finish() for name in sorted(self._splits)}
        self.tokenizer.save(self.folder)
        checksums = [shard[key] for s in splits.values() for shard in s["shards"] for key in ("sha256", "index_sha256")]
        content = [self.tokenizer.fingerprint, self.dtype.name, *splits, *checksums]
        meta = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype.name,
            "vocab_size": self.tokenizer.vocab_size,
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "fingerprint": hashlib.sha256("\n".join(content).encode()).hexdigest(),
            "splits": splits,
            **(extra or {}),
        }
        (self.folder / META_FILE).write_text(json.dumps(meta, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return meta

    def close(self) -> None:
        """Close the files of a store that will not be finished."""
        for split in self._splits.values():
            split.close()


@dataclass
class _Shard:
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    max_token_id: int = 0


class _SplitWriter:
    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_bytes: int) -> None:
        self.folder, self.split, self.dtype = folder, split, dtype
        self.capacity = max(1, shard_bytes // dtype.itemsize)
        self.documents = 0
        self.finished: list[dict[str, Any]] = []
        self.shard: _Shard | None = None

    def append(self, ids: np.ndarray, lengths: np.ndarray, text_bytes: np.ndarray) -> None:
        self.documents += len(lengths)
        while len(lengths):
            if self.shard is None:
                self.open()
            assert self.shard is not None
            ends = np.cumsum(lengths, dtype=np.int64)
            fitting = int(np.searchsorted(ends, self.capacity - self.shard.tokens, side="right"))
            if not fitting and self.shard.tokens:
                self.close_shard()
                continue
            count = max(fitting, 1)
            tokens = int(ends[count - 1])
            self.write(ids[:tokens], ends[:count], int(text_bytes[:count].sum()))
            ids, lengths, text_bytes = ids[tokens:], lengths[count:], text_bytes[count:]

    def write(self, ids: np.ndarray, ends: np.ndarray, text_bytes: int) -> None:
        assert self.shard is not None
        self.ids_file.write(ids)
        self.index_file.write((ends + self.shard.tokens).astype(INDEX_DTYPE))
        self.shard.tokens += len(ids)
        self.shard.documents += len(ends)
        self.shard.text_bytes += text_bytes
        self.shard.max_token_id = max(self.shard.max_token_id, int(ids.max()))

    def open(self) -> None:
        name = f"{self.split}-{len(self.finished):05d}"
        self.ids_file = _HashedFile(self.folder / f"{name}.bin")
        self.index_file = _HashedFile(self.folder / f"{name}.idx")
        self.index_file.write(np.zeros(1, INDEX_DTYPE))
        self.shard = _Shard()

    def close_shard(self) -> None:
        shard, self.shard = self.shard, None
        assert shard is not None
        self.finished.append(
            {
                "file": self.ids_file.path.name,
                "index": self.index_file.path.name,
                "documents": shard.documents,
                "tokens": shard.tokens,
                "bytes": shard.text_bytes,
                "max_token_id": shard.max_token_id,
                "sha256": self.ids_file.finish(),
                "index_sha256": self.index_file.finish(),
            }
        )

    def finish(self) -> dict[str, Any]:
        if self.shard is not None:
            self.close_shard()
        totals = {key: sum(shard[key] for shard in self.finished) for key in ("documents", "tokens", "bytes")}
        return {**totals, "shards": self.finished}

    def close(self) -> None:
        if self.shard is not None:
            self.ids_file.close()
            self.index_file.close()


class _HashedFile:
    """A file whose SHA-256 is known when it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "wb")  # noqa: SIM115  (closed by finish or close)
        self._digest = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).data
        self._file.write(data)
        self._digest.update(data)

    def finish(self) -> str:
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        with suppress(OSError):  # a full disk refuses the buffered rest, which is thrown away anyway
            self._file.close()


# ------------------------------------------------------------------- the folder's name


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A fresh folder beside ``target`` that is renamed onto it when the block ends well, and removed otherwise.

    A store that lies at ``target`` stays until then and is replaced as a whole. All files reach the disk before the
    rename.

    Raises:
        UserError: ``target`` is a file, a folder that is no store or holds other files too, or cannot be written.
    """
    target = Path(os.path.realpath(target))
    _check_target(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = _beside(target, "tmp")
        folder.mkdir()
    except OSError as error:
        raise UserError(f"cannot write {target}: {_reason(error)}; choose another --output") from error
    try:
        try:
            yield folder
            _sync(folder)
            _swap(folder, target)
        except OSError as error:
            raise UserError(
                f"writing {target} failed: {_reason(error)}; free some space or choose another --output, nothing was "
                "changed"
            ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_target(target: Path) -> None:
    try:
        if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
            return
        if not target.is_dir():
            raise UserError(f"{target} is a file; choose another --output")
    except OSError as error:
        raise UserError(f"cannot write {target}: {_reason(error)}; choose another --output") from error
    if not (target / META_FILE).exists():
        raise UserError(f"{target} is not empty and no token store; it is left alone, choose another --output")
    try:
        splits = read_meta(target)["splits"].values()
        shards = [shard[key] for split in splits for shard in split["shards"] for key in ("file", "index")]
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{target}: {META_FILE} is not that of a store; remove it or choose another --output"
        ) from error
    ours = {META_FILE, *CARRIED_FILES, *shards}
    foreign = sorted(path.name for path in target.iterdir() if path.name not in ours)
    if foreign:
        raise UserError(f"{target} is a store that holds {foreign[0]!r} too; move it away or choose another --output")


def _swap(folder: Path, target: Path) -> None:
    """Rename ``folder`` to ``target``, out of whose way an old store goes, to be removed afterwards."""
    old: Path | None = None
    if target.is_dir() and any(target.iterdir()):
        old = _beside(target, "old")
        os.rename(target, old)
    try:
        os.rename(folder, target)
    except BaseException:
        if old is not None:
            os.rename(old, target)
        raise
    _sync_path(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(target: Path, suffix: str) -> Path:
    """A hidden name in the same folder, so that a rename stays inside one file system."""
    return target.parent / f".{target.name}.{secrets.token_hex(4)}.{suffix}"


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
