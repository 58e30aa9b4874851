"""The safetensors files of a Hugging Face folder as one set of tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lit_llm.checkpoint.tensor_files import INDEX_FILE, SINGLE_FILE
from lit_llm.checkpoint.tensor_reader import SafetensorsFile
from lit_llm.errors import UserError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack")


class TensorFolder:
    """The tensors of a Hugging Face folder, over all its safetensors files.

    They are those of ``model.safetensors``; or of the files that ``model.safetensors.index.json`` names; or, without
    either, of the only ``*.safetensors`` file or numbered set of files.

    Args:
        folder: of them.

    Raises:
        UserError: no such files, or ones that do not fit together; a folder of pickles, or of an adapter.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        names, promised = self._file_names()
        self._files: dict[str, SafetensorsFile] = {}
        self._home: dict[str, SafetensorsFile] = {}
        for name in names:
            file = self._files[name] = SafetensorsFile(self.folder / name)
            for tensor in file.names():
                if tensor in self._home:
                    raise UserError(
                        f"{self.folder}: {tensor} is in {self._home[tensor].path.name} and in {name}; remove the file "
                        "that does not belong there"
                    )
                self._home[tensor] = file
        for tensor, name in promised.items():
            if tensor not in self._home or self._home[tensor].path.name != name:
                raise UserError(f"{self.folder}: {INDEX_FILE} promises {tensor} in {name}, which has no such tensor")

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._home[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        return self._home[name].dtype(name)

    def read(self, name: str) -> Tensor:
        """As :meth:`SafetensorsFile.read`."""
        return self._home[name].read(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """As :meth:`SafetensorsFile.read_rows`."""
        return self._home[name].read_rows(name, start, stop)

    def read_into(self, name: str, target: Tensor, rows: tuple[int, int] | None = None) -> None:
        """As :meth:`SafetensorsFile.read_into`."""
        self._home[name].read_into(name, target, rows)

    @property
    def bytes_read(self) -> int:
        """Of tensors, so far."""
        return sum(file.bytes_read for file in self._files.values())

    @cached_property
    def _listed(self) -> list[str]:
        try:
            return sorted(path.name for path in self.folder.iterdir())
        except OSError as error:
            raise UserError(f"{self.folder} can't be read: {error.strerror}") from None

    def _file_names(self) -> tuple[list[str], dict[str, str]]:
        """The files, and what the index promises: tensor to file."""
        there = self._listed
        if "adapter_config.json" in there:
            raise UserError(
                f"{self.folder} holds an adapter (adapter_config.json), no whole model; merge it into its base first: "
                "peft's merge_and_unload() and save_pretrained"
            )
        if SINGLE_FILE in there:
            return [SINGLE_FILE], {}
        if INDEX_FILE in there:
            promised = self._index()
            files = sorted(set(promised.values()))
            for name in files:
                if name not in there:
                    raise UserError(f"{self.folder}: {INDEX_FILE} names {name}, which is not there; fetch it again")
            return files, promised
        found = [name for name in there if name.endswith(".safetensors")]
        if not found:
            raise UserError(self._nothing(there))
        sets = {_PART.sub(r"\1-of-\3", name) for name in found}
        if len(sets) > 1:
            raise UserError(
                f"{self.folder} holds several safetensors files that don't belong together ({', '.join(found[:3])}"
                f"{', ...' if len(found) > 3 else ''}) and no {INDEX_FILE}; leave the model's alone in it"
            )
        return list(self._complete(found)), {}

    def _complete(self, found: list[str]) -> Iterator[str]:
        """The files of one numbered set, or the only file."""
        part = _PART.fullmatch(found[0])
        if part is None:
            yield from found
            return
        for number in range(1, int(part.group(3)) + 1):
            name = f"{part.group(1)}-{number:05d}-of-{part.group(3)}.safetensors"
            if name not in found:
                raise UserError(f"{self.folder}: {name} is not there; fetch it again")
            yield name

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        try:
            promised = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            if not promised or any(name != Path(name).name for name in promised.values()):
                raise ValueError("nothing, or files elsewhere")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path} is no index of safetensors files: it has no valid weight_map") from None
        return promised

    def _nothing(self, there: list[str]) -> str:
        other = [name for name in there if name.endswith(_PICKLES)]
        if not other:
            return f"{self.folder} has no weights: no *.safetensors file is in it"
        if other[0].endswith(".gguf"):
            return (
                f"{self.folder} holds {other[0]} and no safetensors; fetch the original weights, or convert them: "
                "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(NEW_FOLDER)"
            )
        return (
            f"{self.folder} holds {other[0]} and no safetensors; pickles run code when read, so they are not: convert "
            "them where you trust them, by transformers' AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER, safe_serialization=True)"
        )
