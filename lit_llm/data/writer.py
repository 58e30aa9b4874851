"""Writing a token store: shards with checksums in a folder that takes its final name only when it is complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lit_llm.data.store import (
    FORMAT,
    FORMAT_VERSION,
    INDEX_DTYPE,
    META_FILE,
    TRAINED_DTYPE,
    fingerprint,
    store_dtype,
)
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

SHARD_BYTES = 1 << 30


class StoreWriter:
    """Writes documents into ``folder``, shard by shard; memory stays flat.

    Args:
        folder: an existing, empty folder (see ``new_folder``).
        tokenizer: the one that made the ids; it must name an EOS token. It is saved beside them.
        shard_bytes: no shard of ids gets longer than this; a document goes on in the next one.

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

    def append(
        self,
        split: str,
        ids: np.ndarray,
        lengths: np.ndarray,
        text_bytes: np.ndarray,
        *,
        trained: np.ndarray | None = None,
        begins: bool = True,
    ) -> None:
        """Append documents, or parts of them.

        Args:
            split: where to.
            ids: (tokens,) of all of them in a row.
            lengths: (parts,) tokens of each.
            text_bytes: (parts,) bytes of text, in UTF-8.
            trained: (tokens,) of chats: whether a token is to be learned; None: all are.
            begins: whether the first part begins a document; if not, it goes on with this split's last one.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocab_size:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise UserError(f"token id {wrong} is outside the vocabulary of {self.tokenizer.vocab_size} ids")
        assert len(lengths) == len(text_bytes)
        assert ids.size == lengths.sum()
        assert trained is None or len(trained) == len(ids)
        if split not in self._splits:
            self._splits[split] = _SplitWriter(self.folder, split, self.dtype, self._shard_bytes)
        assert begins or self._splits[split].documents
        self._splits[split].append(ids.astype(self.dtype, copy=False), lengths, text_bytes, trained, begins)

    def documents(self, split: str) -> int:
        """Documents appended to ``split`` so far."""
        return self._splits[split].documents if split in self._splits else 0

    def finish(self, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Close the shards, write the tokenizer and meta.json (with ``extra`` in it), and return the latter."""
        splits = {name: self._splits[name].finish() for name in sorted(self._splits)}
        self.tokenizer.save(self.folder)
        meta: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype.name,
            "vocab_size": self.tokenizer.vocab_size,
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "fingerprint": None,
            "splits": splits,
            **(extra or {}),
        }
        meta["fingerprint"] = fingerprint(meta)
        (self.folder / META_FILE).write_text(json.dumps(meta, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return meta

    def close(self) -> None:
        """Close the files of a store that will not be finished; those of a finished one are closed."""
        for split in self._splits.values():
            for file in split.files():
                with suppress(OSError):  # a full disk refuses the buffered rest, which is thrown away anyway
                    file.close()


class _SplitWriter:
    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_bytes: int) -> None:
        self.folder, self.split = folder, split
        self.capacity = max(1, shard_bytes // dtype.itemsize)
        self.documents = self.tokens = self.text_bytes = 0
        self.index = _HashedFile(folder / f"{split}.idx")
        self.shards: list[_Shard] = []
        self.chats = False

    def append(
        self, ids: np.ndarray, lengths: np.ndarray, text_bytes: np.ndarray, trained: np.ndarray | None, begins: bool
    ) -> None:
        starts = np.cumsum(lengths, dtype=np.int64) - lengths + self.tokens
        self.index.write(starts[0 if begins else 1 :].astype(INDEX_DTYPE))
        self.documents += len(lengths) - (not begins)
        self.tokens += len(ids)
        self.text_bytes += int(text_bytes.sum())
        if trained is not None and not self.chats:
            self.chats = True
            for shard in self.shards:  # all texts so far
                shard.write_trained(None, shard.tokens)
                if shard is not self.shards[-1]:
                    shard.close()
        at = 0
        while at < len(ids):
            if not self.shards or self.shards[-1].tokens == self.capacity:
                if self.shards:
                    self.shards[-1].close()
                self.shards.append(_Shard(self.folder / f"{self.split}-{len(self.shards):05d}"))
            count = min(self.capacity - self.shards[-1].tokens, len(ids) - at)
            self.shards[-1].write(ids[at : at + count])
            if self.chats:
                self.shards[-1].write_trained(None if trained is None else trained[at : at + count], count)
            at += count

    def finish(self) -> dict[str, Any]:
        self.index.write(np.array([self.tokens], INDEX_DTYPE))
        for file in self.files():
            file.close()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.text_bytes,
            "chats": self.chats,
            "index": self.index.path.name,
            "index_sha256": self.index.checksum(),
            "shards": [shard.describe() for shard in self.shards],
        }

    def files(self) -> Iterator[_HashedFile]:
        yield self.index
        for shard in self.shards:
            yield from shard.files()


class _Shard:
    def __init__(self, path: Path) -> None:
        self.tokens = self.max_token_id = 0
        self.ids = _HashedFile(path.with_suffix(".bin"))
        self.trained: _HashedFile | None = None

    def write(self, ids: np.ndarray) -> None:
        self.ids.write(ids)
        self.tokens += len(ids)
        self.max_token_id = max(self.max_token_id, int(ids.max()))

    def write_trained(self, trained: np.ndarray | None, count: int) -> None:
        """``trained``: of ``count`` tokens; None: all are."""
        if self.trained is None:
            self.trained = _HashedFile(self.ids.path.with_suffix(".trained"))
        self.trained.write(np.ones(count, TRAINED_DTYPE) if trained is None else trained.astype(TRAINED_DTYPE))

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "file": self.ids.path.name,
            "tokens": self.tokens,
            "max_token_id": self.max_token_id,
            "sha256": self.ids.checksum(),
        }
        if self.trained is not None:
            about |= {"trained": self.trained.path.name, "trained_sha256": self.trained.checksum()}
        return about

    def files(self) -> Iterator[_HashedFile]:
        yield self.ids
        if self.trained is not None:
            yield self.trained

    def close(self) -> None:
        for file in self.files():
            file.close()


class _HashedFile:
    """A file whose SHA-256 is known when it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "wb")  # noqa: SIM115  (closed by close)
        self._digest = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).data
        self._file.write(data)
        self._digest.update(data)

    def checksum(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()
