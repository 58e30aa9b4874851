"""Token stores: what ``lit-llm prepare`` writes, opened for reading.

A store is a folder::

    meta.json             format version, dtype, vocabulary, counts per split, checksums
    tokenizer.json ...    the tokenizer that made the ids
    train.idx             where each document begins, and the end: little-endian int64, one more than documents
    train-00000.bin       token ids, one document after another, little-endian uint16 or uint32
    train-00000.trained   only where chats are in the split: a byte per token, 1 where it is to be learned

``val.idx``, ``val-00000.bin`` and so on likewise. No shard is longer than the bound it was written with; a document
goes on in the next one. The index is signed although no offset is negative, because numpy turns uint64 mixed with
int64 into floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lit_llm.data.files import StoreFiles, open_files
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

FORMAT = "lit-llm token store"
FORMAT_VERSION = 2
META_FILE = "meta.json"
DTYPES = ("uint16", "uint32")
INDEX_DTYPE = np.dtype("<i8")
TRAINED_DTYPE = np.dtype("u1")
_SCAN_BYTES = 64 << 20  # stores up to this size have all their ids looked at when they are opened


def store_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest width on disk that holds every id below ``vocab_size``."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def read_meta(folder: str | Path) -> dict[str, Any]:
    """The content of a store's meta.json. UserError where there is no store, or one of another version."""
    return _checked_meta(open_files(folder))


def _checked_meta(files: StoreFiles) -> dict[str, Any]:
    meta = files.meta
    way_out = f"make one by `lit-llm prepare INPUT... --output {files.name}`"
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{files.name}/{META_FILE} describes no token store; {way_out}")
    if meta.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{files.name}: format version {meta.get('format_version')!r}, this lit-llm reads {FORMAT_VERSION}; "
            f"prepare it anew by `lit-llm prepare INPUT... --output {files.name}`"
        )
    return meta


class TokenStore:
    """One split of a store, memory-mapped and read-only.

    Opening compares the files with meta.json (lengths, counts, widths) and, up to 64 MiB, looks at every id;
    ``verify`` checks everything of a larger one. Pickling carries no data: a worker maps the files anew.

    Args:
        folder: what ``lit-llm prepare`` wrote; a folder, or an address of fsspec's (``s3://bucket/store``), whose
            files are copied into a local cache when they are first needed.
        split: ``train`` or ``val``.

    Raises:
        UserError: no store there, no such split, or files that contradict meta.json.
    """

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        self._files = open_files(folder)
        self.folder: str = self._files.name
        self.split = split
        self._meta = meta = _checked_meta(self._files)
        try:
            splits = meta["splits"]
            if split not in splits:
                names = ", ".join(sorted(splits)) or "none"
                raise UserError(
                    f"{folder} has no split {split!r}, only {names}; `lit-llm prepare --val_fraction F` makes val"
                )
            self.vocab_size: int = _count(meta["vocab_size"])
            self.eos_token_id: int = _count(meta["eos_token_id"])
            self.bos_token_id: int | None = None if meta["bos_token_id"] is None else _count(meta["bos_token_id"])
            self.fingerprint: str = meta["fingerprint"]
            self.num_tokens: int = _count(splits[split]["tokens"])
            self.num_bytes: int = _count(splits[split]["bytes"])
            self.has_trained: bool = bool(splits[split]["chats"])
            """Whether only some tokens are to be learned: the split holds chats."""
            self._documents: int = _count(splits[split]["documents"])
            self._index: str = splits[split]["index"]
            self._shards: list[dict[str, Any]] = splits[split]["shards"]
            self._check()
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{folder}: {META_FILE} is incomplete ({error!r}); prepare the store anew") from error

    @staticmethod
    def splits(folder: str | Path) -> list[str]:
        """Names of the splits that the store in ``folder`` has."""
        return sorted(read_meta(folder)["splits"])

    def _check(self) -> None:
        if self._meta["dtype"] not in DTYPES:
            raise UserError(
                f"{self.folder}: dtype {self._meta['dtype']!r} in {META_FILE}, known are {', '.join(DTYPES)}"
            )
        self.dtype: np.dtype[Any] = np.dtype(self._meta["dtype"]).newbyteorder("<")
        if self.vocab_size - 1 > np.iinfo(self.dtype).max:
            raise UserError(f"{self.folder}: {self.dtype.name} cannot hold a vocabulary of {self.vocab_size} ids")
        for name in checksums(self._meta, self.split):
            if Path(name).name != name or name.startswith("."):
                raise UserError(f"{self.folder}: {META_FILE} names the file {name!r}, which is no plain name in it")
        for shard in self._shards:
            self._check_length(shard["file"], shard["tokens"], self.dtype, "tokens")
            if self.has_trained:
                self._check_length(shard["trained"], shard["tokens"], TRAINED_DTYPE, "tokens")
            if shard["max_token_id"] >= self.vocab_size:
                self._refuse_id(shard, shard["max_token_id"])
        self._check_length(self._index, self._documents + 1, INDEX_DTYPE, "documents")
        if (parts := sum(shard["tokens"] for shard in self._shards)) != self.num_tokens:
            raise UserError(
                f"{self.folder}: {META_FILE} says {self.num_tokens} tokens of {self.split}, its shards {parts}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != self.num_tokens:
            raise UserError(
                f"{self._name(self._index)}: it runs from {self.offsets[0]} to {self.offsets[-1]}, {META_FILE} says 0 "
                f"to {self.num_tokens}; the store is damaged, prepare it anew"
            )
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise UserError(
                f"{self.folder}: eos_token_id {self.eos_token_id} in {META_FILE} is outside the vocabulary of "
                f"{self.vocab_size}; prepare the store anew"
            )
        if self.num_tokens * self.dtype.itemsize <= _SCAN_BYTES:
            for problem in self._wrong_content():
                raise UserError(problem)

    def _name(self, file: str) -> str:
        return f"{self.folder}/{file}"

    def _check_length(self, name: str, count: int, dtype: np.dtype[Any], what: str) -> None:
        size = self._files.size(name)
        if size != count * dtype.itemsize:
            raise UserError(
                f"{self._name(name)}: {size} bytes, but the {what} in {META_FILE} as {dtype.name} make "
                f"{count * dtype.itemsize}; the store is damaged or was changed by hand, prepare it anew"
            )

    def _refuse_id(self, shard: dict[str, Any], token_id: int) -> None:
        raise UserError(self._wrong_id(shard, token_id))

    def _wrong_id(self, shard: dict[str, Any], token_id: int) -> str:
        return (
            f"{self._name(shard['file'])}: token id {token_id} is outside the vocabulary of {self.vocab_size} that "
            f"{META_FILE} gives; prepare the store anew"
        )

    def _wrong_content(self) -> Iterator[str]:
        for shard, ids in zip(self._shards, self._ids, strict=True):
            if (highest := int(ids.max())) >= self.vocab_size:
                yield self._wrong_id(shard, highest)
        if (np.diff(self.offsets) <= 0).any():
            yield f"{self._name(self._index)}: offsets that do not rise; prepare the store anew"

    def verify(self) -> None:
        """Reads every byte: checksums, range of the ids, offsets. UserError names the first thing that is wrong."""
        for problem in self.problems():
            raise UserError(problem)

    def problems(self) -> list[str]:
        """All that ``verify`` would find, a line each."""
        problems = []
        for name, checksum in checksums(self._meta, self.split).items():
            if self._files.checksum(name) != checksum:
                problems.append(f"{self._name(name)}: its checksum differs from {META_FILE}; prepare the store anew")
        return problems + list(self._wrong_content())

    # ---------------------------------------------------------------- mapped files

    def prefetch(self) -> None:
        """Sees to it that all files of the split are on this machine, and maps them."""
        _ = self._ids, self.offsets
        if self.has_trained:
            _ = self._trained

    def __getstate__(self) -> dict[str, Any]:
        mapped = ("_ids", "_trained", "offsets", "tokenizer")
        return {name: value for name, value in self.__dict__.items() if name not in mapped}

    @cached_property
    def _ids(self) -> list[np.ndarray]:
        return [self._map(shard["file"], self.dtype) for shard in self._shards]

    @cached_property
    def _trained(self) -> list[np.ndarray]:
        return [self._map(shard["trained"], TRAINED_DTYPE) for shard in self._shards]

    @cached_property
    def offsets(self) -> np.ndarray:
        """First token of each document, and the end: (documents + 1,) int64, over all shards."""
        return self._map(self._index, INDEX_DTYPE)

    def _map(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        path = self._files.path(name)
        try:
            mapped = np.memmap(path, dtype=dtype, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot map {self._name(name)}: {error}; prepare the store anew") from error
        return np.asarray(mapped)  # a plain view: indexing a memmap object is slower

    @cached_property
    def _starts(self) -> np.ndarray:
        """First token of each shard, and the end: (shards + 1,) int64."""
        return np.cumsum([0] + [shard["tokens"] for shard in self._shards], dtype=np.int64)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids. UserError when the one in the folder is another by now."""
        tokenizer = Tokenizer(self._files.tokenizer_folder())
        if tokenizer.fingerprint != self._meta["tokenizer_fingerprint"]:
            raise UserError(
                f"{self.folder}: its tokenizer is not the one that made the ids; put that one back, or prepare the "
                "store anew"
            )
        return tokenizer

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        """Number of documents."""
        return self._documents

    def __repr__(self) -> str:
        return f"TokenStore({self.folder!r}, {self.split!r}: {len(self)} documents, {self.num_tokens} tokens)"

    def document(self, i: int) -> np.ndarray:
        """Token ids of document ``i`` (from the end if negative), EOS included: (length,) int64, a copy."""
        start, stop = self._bounds(i)
        return self.tokens(start, stop).astype(np.int64)

    def document_trained(self, i: int) -> np.ndarray:
        """Which tokens of document ``i`` are to be learned: (length,) bool; all of them in a text."""
        start, stop = self._bounds(i)
        return self.trained(start, stop).astype(bool)

    def _bounds(self, i: int) -> tuple[int, int]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        i = int(i) % len(self)
        return int(self.offsets[i]), int(self.offsets[i + 1])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Ids ``start`` to ``stop`` of all documents in a row: (stop - start,) in the store's dtype, maybe a view."""
        return self._slice(self._ids, start, stop)

    def trained(self, start: int, stop: int) -> np.ndarray:
        """1 where a token is to be learned, else 0: (stop - start,) uint8, maybe a view."""
        if not self.has_trained:
            return np.ones(stop - start, TRAINED_DTYPE)
        return self._slice(self._trained, start, stop)

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Ids ``starts[i]`` to ``starts[i] + length``, a row each: (n, length) in the store's dtype."""
        return self._gather(self._ids, starts, length)

    def gather_trained(self, starts: np.ndarray, length: int) -> np.ndarray:
        """``trained`` in rows, as ``gather`` gives the ids: (n, length) uint8."""
        if not self.has_trained:
            return np.ones((len(starts), length), TRAINED_DTYPE)
        return self._gather(self._trained, starts, length)

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Ids at any places of all documents in a row: the shape of ``positions``, in the store's dtype. Places outside
        are the caller's fault and give any id."""
        return self._take(self._ids, positions)

    def take_trained(self, positions: np.ndarray) -> np.ndarray:
        """``trained`` at such places: the shape of ``positions``, uint8."""
        return self._take(self._trained, positions) if self.has_trained else np.ones(positions.shape, TRAINED_DTYPE)

    def _take(self, shards: list[np.ndarray], positions: np.ndarray) -> np.ndarray:
        if len(shards) == 1:
            return shards[0].take(positions, mode="clip")  # unchecked, which is three times as fast
        number = np.searchsorted(self._starts[1:-1], positions, side="right")
        found = np.empty(positions.shape, shards[0].dtype)
        for shard in np.unique(number).tolist():
            chosen = number == shard
            found[chosen] = shards[shard].take(positions[chosen] - self._starts[shard], mode="clip")
        return found

    def _slice(self, shards: list[np.ndarray], start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        for shard in range(first, len(shards)):
            begin = int(self._starts[shard])
            parts.append(shards[shard][max(start - begin, 0) : stop - begin])
            if stop <= self._starts[shard + 1]:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, shards[0].dtype)

    def _gather(self, shards: list[np.ndarray], starts: np.ndarray, length: int) -> np.ndarray:
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and not (starts.min() >= 0 and starts.max() + length <= self.num_tokens):
            raise IndexError(f"rows of {length} from {starts.min()} to {starts.max()} of {self.num_tokens} tokens")
        if len(shards) == 1:
            return _rows(shards[0], starts, length)
        rows = np.empty((len(starts), length), dtype=shards[0].dtype)
        number = np.searchsorted(self._starts, starts, side="right") - 1
        inside = starts + length <= self._starts[np.minimum(number + 1, len(shards))]
        for shard in np.unique(number[inside]):
            chosen = inside & (number == shard)
            rows[chosen] = _rows(shards[shard], starts[chosen] - self._starts[shard], length)
        for row in np.flatnonzero(~inside):  # the few that cross into the next shard
            rows[row] = self._slice(shards, int(starts[row]), int(starts[row]) + length)
        return rows

    def document_index(self, positions: np.ndarray) -> np.ndarray:
        """Number of the document that each token position lies in: the shape of ``positions``, int64."""
        return np.searchsorted(self.offsets, np.asarray(positions, dtype=np.int64), side="right") - 1


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of things")
    return value


def fingerprint(meta: dict[str, Any]) -> str:
    """What tells a store's content from others': SHA-256 over the tokenizer's, the width, the splits' and checksums."""
    sums = [sha for name in meta["splits"] for sha in checksums(meta, name).values()]
    content = [meta["tokenizer_fingerprint"], meta["dtype"], *meta["splits"], *sums]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def checksums(meta: dict[str, Any], split: str) -> dict[str, str]:
    """File name -> SHA-256 of a split's files, as meta.json has them."""
    content = meta["splits"][split]
    found = {content["index"]: content["index_sha256"]}
    for shard in content["shards"]:
        found[shard["file"]] = shard["sha256"]
        if content["chats"]:
            found[shard["trained"]] = shard["trained_sha256"]
    return found


def _rows(ids: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    if not starts.size or not length:
        return np.empty((len(starts), length), dtype=ids.dtype)
    # Every window as a view, so that choosing some copies whole rows instead of looking up token by token. The bounds
    # are checked by the caller; the stride tricks of numpy do the same at twice the cost for a batch of 8 rows.
    return np.ndarray((len(ids) - length + 1, length), ids.dtype, ids, 0, ids.strides * 2)[starts]
