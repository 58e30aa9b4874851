"""Writing safetensors files one tensor at a time.

The format (https://github.com/huggingface/safetensors, "Format"): eight bytes with the header's length, the header, a
JSON mapping of names to dtype, shape and place, then the tensors' bytes, little-endian, without gaps. The package's own
writer wants all tensors of a file in memory at once; this one needs one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lit_llm.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written.

    Args:
        name: in the file.
        shape, dtype: it will have.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(folder: Path, tensors: Sequence[Planned], max_bytes: int, read: Callable[[Planned], Tensor]) -> int:
    """Writes tensors into ``model.safetensors``, or into numbered files with an index where one would be too large.

    Args:
        folder: there.
        tensors: in the order of the files.
        max_bytes: of tensors in a file; a larger tensor gets a file of its own.
        read: gives a tensor of the planned shape and dtype; called once for each, and one result is held at a time.

    Returns:
        The number of files of weights.

    Raises:
        UserError: a dtype that is none of float64, float32, bfloat16 and float16.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{tensor.name} is {str(tensor.dtype).removeprefix('torch.')}, which no export holds; give --dtype"
            )
    shards: list[list[Planned]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if tensor.bytes > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.bytes
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE_FILE]
    else:
        index = {
            "metadata": {"total_size": sum(tensor.bytes for tensor in tensors)},
            "weight_map": {t.name: file for shard, file in zip(shards, files, strict=True) for t in shard},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for shard, file in zip(shards, files, strict=True):
        _write(folder / file, shard, read)
    return len(files)


def _write(path: Path, tensors: Sequence[Planned], read: Callable[[Planned], Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.bytes],
        }
        place += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            value = read(tensor)
            assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype)
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del value  # before the next one is read
