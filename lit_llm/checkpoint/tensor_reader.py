"""Reading safetensors files straight into the memory of the tensors that want them.

The format (https://github.com/huggingface/safetensors, "Format"): eight bytes with the header's length, little-endian,
the header, a JSON mapping of names to dtype, shape and place, then the tensors' bytes. Nothing is mapped: pages of a
mapped file count as memory of the process, beside that of the tensors that they are copied into.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lit_llm.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PIECE = 4 * 2**20
"""Bytes of a file that are held at once where they need a conversion or a copy."""
_LONGEST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file


class SafetensorsFile:
    """A file whose tensors are read when they are asked for.

    Args:
        path: of it.

    Raises:
        UserError: nothing there, a truncated or damaged file, or a dtype that torch has not.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        """Of tensors, so far."""
        try:
            self._file: BinaryIO = self.path.open("rb", buffering=0)
            size = self.path.stat().st_size
            self._entries = self._header(size)
        except OSError as error:
            raise UserError(f"{self.path} can't be read: {error.strerror}") from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __reduce__(self) -> tuple[type[SafetensorsFile], tuple[Path]]:
        return SafetensorsFile, (self.path,)  # a copy opens the file for itself

    def names(self) -> list[str]:
        """Of all tensors, in the order of the header."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        return self._entries[name].dtype

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        entry = self._entries[name]
        target = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read_into(name, target)
        return target

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Its rows from ``start`` to ``stop`` (without it), on the CPU."""
        entry = self._entries[name]
        target = torch.empty((stop - start, *entry.shape[1:]), dtype=entry.dtype, device="cpu")
        self.read_into(name, target, (start, stop))
        return target

    @torch.no_grad()
    def read_into(self, name: str, target: Tensor, rows: tuple[int, int] | None = None) -> None:
        """Fills ``target`` with a tensor, or with some of its rows.

        Bytes go straight into a target of the same dtype that lies on the CPU in one piece. Every other one takes them
        through a buffer of a few MB, or of one row where that is more.

        Args:
            name: of the tensor in the file.
            target: of its shape, or of the shape of the rows.
            rows: from and to (without it); None: all of them.

        Raises:
            UserError: the file ends too early, or values that the target's dtype can't hold.
        """
        entry, target = self._entries[name], target.detach()
        shape, start = entry.shape, entry.start
        if rows is not None:
            row_bytes = math.prod(shape[1:]) * entry.dtype.itemsize
            assert 0 <= rows[0] <= rows[1] <= shape[0], (name, rows, shape)
            shape, start = (rows[1] - rows[0], *shape[1:]), start + rows[0] * row_bytes
        assert tuple(target.shape) == shape, (name, tuple(target.shape), shape)
        if not target.numel():
            return
        if target.dtype == entry.dtype and target.device.type == "cpu" and target.is_contiguous():
            self._fill(target, start)
            return
        if target.is_contiguous():
            target, shape = target.view(-1), (target.numel(),)
        row_bytes = math.prod(shape[1:]) * entry.dtype.itemsize
        each = max(1, PIECE // row_bytes)
        for first in range(0, shape[0], each):
            part = target[first : first + each]
            piece = torch.empty(part.shape, dtype=entry.dtype, device="cpu")
            self._fill(piece, start + first * row_bytes)
            part.copy_(piece)
            if target.dtype in _NARROW and entry.dtype.is_floating_point:
                self._refuse_overflow(name, piece, target.dtype)

    def _fill(self, target: Tensor, start: int) -> None:
        """Reads the bytes of a tensor that lies on the CPU in one piece."""
        view = target.reshape(-1).view(torch.uint8).numpy().data
        self._file.seek(start)
        done = 0
        while done < len(view):  # a single read gives 2 GiB at most
            count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise UserError(f"{self.path} ends too early: it has been changed or cut while it was read")
            done += count
        self.bytes_read += done

    def _refuse_overflow(self, name: str, piece: Tensor, dtype: torch.dtype) -> None:
        values = piece.float()
        largest = values.masked_fill_(~values.isfinite(), 0).abs().max().item()
        if largest > torch.finfo(dtype).max:
            raise UserError(
                f"{self.path}: {name} holds {largest:.4g}, more than {_word(dtype)} can "
                f"({torch.finfo(dtype).max:.4g}); read it as bfloat16 or float32"
            )

    def _header(self, size: int) -> dict[str, _Entry]:
        length = int.from_bytes(self._file.read(8), "little") if size >= 8 else size
        if size < 8 or length > _LONGEST_HEADER or 8 + length > size:
            raise UserError(f"{self.path} ({size:,} bytes) is truncated or no safetensors file; fetch it again")
        text = self._file.read(length)
        try:
            content = json.loads(text, object_pairs_hook=_unique)
            content.pop("__metadata__", None)
            entries = {name: self._entry(name, value, 8 + length) for name, value in content.items()}
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{self.path} is damaged: its header is none of safetensors; fetch it again") from None
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, _bytes(item[1]))):
            if entry.start < end:
                raise UserError(f"{self.path} is damaged: {name} lies on the bytes of another tensor; fetch it again")
            end = entry.start + _bytes(entry)
        if end != size:
            what = "truncated" if end > size else "damaged"
            raise UserError(f"{self.path} is {what}: it has {size:,} bytes and should have {end:,}; fetch it again")
        return entries

    def _entry(self, name: str, value: Any, base: int) -> _Entry:
        if value["dtype"] not in DTYPES:
            raise UserError(f"{self.path}: {name} is of dtype {value['dtype']!r}, which is not read here")
        shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError("no places")
        entry = _Entry(DTYPES[value["dtype"]], shape, base + start)
        if stop - start != _bytes(entry):
            raise UserError(
                f"{self.path} is damaged: {name} of shape {list(shape)} has {stop - start:,} bytes, not "
                f"{_bytes(entry):,}; fetch it again"
            )
        return entry


_NARROW = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def _bytes(entry: _Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name twice")
    return content
