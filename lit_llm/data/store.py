"""Token stores: what ``lit-llm prepare`` writes, opened for reading.

A store is a folder::

    meta.json            format version, dtype, vocabulary, counts per split, checksums
    tokenizer.json ...   the tokenizer that made the ids
    train-00000.bin      token ids, one document after another, little-endian uint16 or uint32
    train-00000.idx      where each document begins: little-endian int64, one more than documents, from 0 on

``val-00000.bin`` and so on likewise. A document is never split between shards. The index is signed although no offset
is negative, because numpy turns uint64 mixed with int64 into floats.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

FORMAT = "lit-llm token store"
FORMAT_VERSION = 1
META_FILE = "meta.json"
DTYPES = ("uint16", "uint32")
INDEX_DTYPE = np.dtype("<i8")
_SCAN_BYTES = 64 << 20  # stores up to this size have all their ids looked at when they are opened


def store_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest width on disk that holds every id below ``vocab_size``."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def read_meta(folder: str | Path) -> dict[str, Any]:
    """The content of a store's meta.json. UserError where there is no store, or one of another version."""
    folder = Path(folder)
    way_out = f"make one by `lit-llm prepare INPUT... --output {folder}`"
    try:
        meta = json.loads((folder / META_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"{folder} is no token store (it has no {META_FILE})" if folder.exists() else f"no store at {folder}"
        raise UserError(f"{what}; {way_out}") from error
    except OSError as error:
        raise UserError(f"cannot read {folder / META_FILE}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / META_FILE} is not JSON ({error}); {way_out}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{folder / META_FILE} describes no token store; {way_out}")
    if meta.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{folder}: format version {meta.get('format_version')!r}, this lit-llm reads {FORMAT_VERSION}; {way_out}"
        )
    return meta


class TokenStore:
    """One split of a store, memory-mapped and read-only.

    Opening compares the files with meta.json (lengths, counts, widths) and, up to 64 MiB, looks at every id;
    ``verify`` checks everything of a larger one. Pickling carries no data: a worker maps the files anew.

    Args:
        folder: what ``lit-llm prepare`` wrote.
        split: ``train`` or ``val``.

    Raises:
        UserError: no store there, no such split, or files that contradict meta.json.
    """

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        self.folder = Path(folder)
        self.split = split
        self._meta = meta = read_meta(folder)
        try:
            splits = meta["splits"]
            if split not in splits:
                names = ", ".join(sorted(splits)) or "none"
                raise UserError(
                    f"{folder} has no split {split!r}, only {names}; `lit-llm prepare --val_fraction F` makes val"
                )
            self.vocab_size: int = int(meta["vocab_size"])
            self.eos_token_id: int = int(meta["eos_token_id"])
            self.bos_token_id: int | None = meta["bos_token_id"]
            self.fingerprint: str = meta["fingerprint"]
            self.num_tokens: int = int(splits[split]["tokens"])
            self.num_bytes: int = int(splits[split]["bytes"])
            self._documents: int = int(splits[split]["documents"])
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
        for shard in self._shards:
            self._check_length(shard["file"], shard["tokens"], self.dtype, "tokens")
            self._check_length(shard["index"], shard["documents"] + 1, INDEX_DTYPE, "documents")
            if shard["max_token_id"] >= self.vocab_size:
                self._refuse_id(shard, shard["max_token_id"])
        for kind, total in (("tokens", self.num_tokens), ("documents", self._documents), ("bytes", self.num_bytes)):
            if (parts := sum(shard[kind] for shard in self._shards)) != total:
                raise UserError(f"{self.folder}: {META_FILE} says {total} {kind} of {self.split}, its shards {parts}")
        for shard, index in zip(self._shards, self._indices, strict=True):
            if index[0] != 0 or index[-1] != shard["tokens"]:
                raise UserError(
                    f"{self.folder / shard['index']}: it runs from {index[0]} to {index[-1]}, {META_FILE} says 0 to "
                    f"{shard['tokens']}; the store is damaged, prepare it anew"
                )
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise UserError(
                f"{self.folder}: eos_token_id {self.eos_token_id} in {META_FILE} is outside the vocabulary of "
                f"{self.vocab_size}; prepare the store anew"
            )
        if self.num_tokens * self.dtype.itemsize <= _SCAN_BYTES:
            self._check_ids()
            self._check_offsets()

    def _check_length(self, name: str, count: int, dtype: np.dtype[Any], what: str) -> None:
        path = self.folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; the store is damaged, prepare it anew") from error
        if size != count * dtype.itemsize:
            raise UserError(
                f"{path}: {size} bytes, but the {what} in {META_FILE} as {dtype.name} make {count * dtype.itemsize}; "
                "the store is damaged or was changed by hand, prepare it anew"
            )

    def _check_ids(self) -> None:
        for shard, ids in zip(self._shards, self._ids, strict=True):
            highest = int(ids.max())
            if highest >= self.vocab_size:
                self._refuse_id(shard, highest)

    def _refuse_id(self, shard: dict[str, Any], token_id: int) -> None:
        raise UserError(
            f"{self.folder / shard['file']}: token id {token_id} is outside the vocabulary of {self.vocab_size} that "
            f"{META_FILE} gives; prepare the store anew"
        )

    def verify(self) -> None:
        """Read every byte: checksums, id range, offsets. UserError names the first file that is wrong."""
        for shard in self._shards:
            for name, checksum in ((shard["file"], shard["sha256"]), (shard["index"], shard["index_sha256"])):
                digest = hashlib.sha256()
                with open(self.folder / name, "rb") as stream:
                    while block := stream.read(1 << 20):
                        digest.update(block)
                if digest.hexdigest() != checksum:
                    raise UserError(f"{self.folder / name}: its checksum differs from {META_FILE}; prepare it anew")
        self._check_ids()
        self._check_offsets()

    def _check_offsets(self) -> None:
        for shard, index in zip(self._shards, self._indices, strict=True):
            if (np.diff(index) <= 0).any():
                raise UserError(f"{self.folder / shard['index']}: offsets that do not rise; prepare the store anew")

    # ---------------------------------------------------------------- mapped files

    def __getstate__(self) -> dict[str, Any]:
        mapped = ("_ids", "_indices", "offsets", "_starts", "tokenizer")
        return {name: value for name, value in self.__dict__.items() if name not in mapped}

    @cached_property
    def _ids(self) -> list[np.ndarray]:
        return [self._map(shard["file"], self.dtype) for shard in self._shards]

    @cached_property
    def _indices(self) -> list[np.ndarray]:
        return [self._map(shard["index"], INDEX_DTYPE) for shard in self._shards]

    def _map(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        try:
            mapped = np.memmap(self.folder / name, dtype=dtype, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot map {self.folder / name}: {error}; prepare the store anew") from error
        return np.asarray(mapped)  # a plain view: indexing a memmap object is slower

    @cached_property
    def _starts(self) -> np.ndarray:
        """First token of each shard, and the end: (shards + 1,) int64."""
        return np.cumsum([0] + [shard["tokens"] for shard in self._shards], dtype=np.int64)

    @cached_property
    def offsets(self) -> np.ndarray:
        """First token of each document, and the end: (documents + 1,) int64, over all shards."""
        if len(self._indices) == 1:
            return self._indices[0]
        parts = [index[:-1] + start for index, start in zip(self._indices, self._starts, strict=False)]
        return np.concatenate([*parts, self._starts[-1:]])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids. UserError when the one in the folder is another by now."""
        tokenizer = Tokenizer(self.folder)
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
        return f"TokenStore({str(self.folder)!r}, {self.split!r}: {len(self)} documents, {self.num_tokens} tokens)"

    def document(self, i: int) -> np.ndarray:
        """Token ids of document ``i`` (from the end if negative), EOS included: (length,) int64, a copy."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        i = int(i) % len(self)
        return self.tokens(int(self.offsets[i]), int(self.offsets[i + 1])).astype(np.int64)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Ids ``start`` to ``stop`` of all documents in a row: (stop - start,) in the store's dtype, maybe a view."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        for shard in range(first, len(self._ids)):
            begin = int(self._starts[shard])
            parts.append(self._ids[shard][max(start - begin, 0) : stop - begin])
            if stop <= self._starts[shard + 1]:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Ids ``starts[i]`` to ``starts[i] + length``, a row each: (n, length) in the store's dtype."""
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and not (starts.min() >= 0 and starts.max() + length <= self.num_tokens):
            raise IndexError(f"rows of {length} from {starts.min()} to {starts.max()} of {self.num_tokens} tokens")
        if len(self._ids) == 1:
            return _rows(self._ids[0], starts, length)
        rows = np.empty((len(starts), length), dtype=self.dtype)
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        inside = starts + length <= self._starts[np.minimum(shards + 1, len(self._ids))]
        for shard in np.unique(shards[inside]):
            chosen = inside & (shards == shard)
            rows[chosen] = _rows(self._ids[shard], starts[chosen] - self._starts[shard], length)
        for row in np.flatnonzero(~inside):  # the few that cross into the next shard
            rows[row] = self.tokens(int(starts[row]), int(starts[row]) + length)
        return rows

    def document_index(self, positions: np.ndarray) -> np.ndarray:
        """Number of the document that each token position lies in: the shape of ``positions``, int64."""
        return np.searchsorted(self.offsets, np.asarray(positions, dtype=np.int64), side="right") - 1


def _rows(ids: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    if not starts.size or not length:
        return np.empty((len(starts), length), dtype=ids.dtype)
    # Every window as a view, so that choosing some copies whole rows instead of looking up token by token. The bounds
    # are checked by the caller; sliding_window_view would do the same at twice the cost for a batch of 8 rows.
    shape = (len(ids) - length + 1, length)
    return np.lib.stride_tricks.as_strided(ids, shape, ids.strides * 2, writeable=False)[starts]
