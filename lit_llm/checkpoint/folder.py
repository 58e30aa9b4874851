"""A sharded checkpoint on disk: what lies in its folder, whether it is complete, and reading single tensors from it.

The folder holds the files of torch.distributed.checkpoint (``.metadata`` and ``__RANK_N.distcp``), ``meta.pt`` with
all that is no tensor of the weights or the optimizers and no part of one in a callback's state, and ``complete.json``,
written last: names and sizes of the rest.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lit_llm.checkpoint.marker import MARKER, META, METADATA, WAY_OUT, check_complete
from lit_llm.checkpoint.stored import Stored
from lit_llm.errors import UserError

SECTION = "sharded"
"""Key in meta.pt of what the folder needs to know about itself."""

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"},
}


def weight_key(name: str) -> str:
    """Of a tensor of ``state_dict`` among those of the folder."""
    return f"state_dict.{name}"


def state_key(optimizer: int, parameter: str, key: str) -> str:
    """Of what an optimizer remembers of a parameter."""
    return f"optimizer_{optimizer}.state.{parameter}.{key}"


def callback_key(path: Sequence[Any]) -> str:
    """Of a tensor in a callback's state, by the keys that lead to it."""
    return ".".join(["callbacks", *map(str, path)])


class Folder:
    """A complete sharded checkpoint, or one that Lightning's own ModelParallelStrategy wrote.

    Args:
        path: of the folder.
        weights_only: as in torch.load, of meta.pt; False runs code that it may hold.

    Attributes:
        content: the checkpoint as one file would hold it, with None for each tensor that lies in another file.
        tied: name in ``state_dict`` to the one under which the same tensor was saved.
        optimizer_names: of each optimizer, the parameters' names by their positions.
        in_callbacks: where in ``callbacks`` a tensor is missing, and its key here.

    Raises:
        UserError: no such folder, or one that is not complete.
    """

    def __init__(self, path: str | Path, *, weights_only: bool = True) -> None:
        self.path = Path(path)
        if _may_be_lightnings(self.path):  # which has no marker, and writes meta.pt last
            content = self._read_meta(weights_only)
            if SECTION not in content:
                self._take_lightnings(content)
                return
        check_complete(self.path)
        self.content = self._read_meta(weights_only)
        own = self.content.pop(SECTION, None)
        if not isinstance(own, dict) or not isinstance(self.content.get("state_dict"), dict):
            raise UserError(f"{path} is no sharded checkpoint of lit-llm: {META} lacks its section; {WAY_OUT}")
        self.tied: dict[str, str] = own["tied"]
        self.optimizer_names: list[list[str]] = own["optimizer_names"]
        self.in_callbacks: list[tuple[list[Any], str]] = own.get("callbacks", [])

    def _read_meta(self, weights_only: bool) -> dict[str, Any]:
        try:
            content = torch.load(self.path / META, map_location="cpu", weights_only=weights_only, mmap=True)
        except pickle.UnpicklingError as error:
            unsafe = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
            if unsafe:
                raise UserError(
                    f"{self.path} holds objects of {unsafe.group(1)}, which would run code when read; if you trust it, "
                    "give --weights_only false"
                ) from None
            raise UserError(f"{self.path / META} is damaged; {WAY_OUT}") from None
        except Exception as error:  # whatever the bytes lead to
            raise UserError(f"{self.path / META} can't be read: {_line(error)}; {WAY_OUT}") from error
        if not isinstance(content, dict):
            raise UserError(f"{self.path / META} holds no checkpoint; {WAY_OUT}")
        return content

    def _take_lightnings(self, content: dict[str, Any]) -> None:
        from lit_llm.checkpoint.lightning_folder import describe_folder

        self.tied, self.in_callbacks = {}, []
        try:
            self.content, self.optimizer_names = describe_folder(self.path, self._metadata, content)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{self.path} can't be read: {_line(error)}; {WAY_OUT}") from error

    # Tensors

    @cached_property
    def _metadata(self) -> Any:
        try:
            with (self.path / METADATA).open("rb") as file:
                return _Unpickler(file).load()
        except Exception as error:
            raise UserError(f"{self.path / METADATA} can't be read: {_line(error)}; {WAY_OUT}") from error

    def __contains__(self, key: str) -> bool:
        return key in self._metadata.state_dict_metadata

    def shape(self, key: str) -> torch.Size:
        """Of a whole tensor."""
        return torch.Size(self._metadata.state_dict_metadata[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """As it was saved."""
        return self._metadata.state_dict_metadata[key].properties.dtype

    def placeholder(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor without memory that says where it is, see :meth:`Stored.placeholder`."""
        tensor = torch.empty(self.shape(key), dtype=dtype or self.dtype(key), device="meta")
        tensor.stored = (self, key)  # type: ignore[attr-defined]
        return tensor

    def read(self, key: str) -> Tensor:
        """A whole tensor, on the CPU."""
        whole = torch.empty(self.shape(key), dtype=self.dtype(key))
        self.read_into([(key, whole)])
        return whole

    def read_into(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fills tensors, of a DTensor this process' part, and reads what it overlaps with; without communication.

        Args:
            targets: keys and tensors of their shapes, in any dtype, on any device.

        Raises:
            UserError: a file that can't be read.
        """
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        for part in _without_repeats(targets):
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            reader = FileSystemReader(self.path)
            try:
                planner.set_up_planner(part, self._metadata, True)
                reader.set_up_storage_reader(self._metadata, True)
                reader.read_data(planner.create_local_plan(), planner).wait()
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"{self.path} can't be read: {_line(error)}; {WAY_OUT}") from error

    # What one file would hold

    def saved_name(self, name: str) -> str:
        """Under which a tensor of ``state_dict`` lies in the folder."""
        return self.tied.get(name, name)

    def weights(self) -> Stored:
        """The tensors of ``state_dict``, each read when it is asked for."""
        keys = {name: weight_key(self.saved_name(name)) for name in self.content["state_dict"]}
        return Stored(self, {name: key for name, key in keys.items() if key in self}, self.content["state_dict"])

    def callbacks(self) -> dict[str, Any]:
        """The callbacks' states; a mapping in which tensors of the folder belong is a :class:`Stored` in them."""
        keys: dict[tuple[Any, ...], dict[Any, str]] = {}
        for (*above, last), key in self.in_callbacks:
            keys.setdefault(tuple(above), {})[last] = key
        return _with_stored(self, self.content["callbacks"], keys, ())

    def optimizer_state(self, index: int, tensor: Any = None) -> dict[str, Any]:
        """An optimizer's state by position, as torch gives it.

        Args:
            index: of the optimizer.
            tensor: gives the tensor of a key; None: read.
        """
        make = tensor or self.read
        saved = self.content["optimizer_states"][index]
        if "state" not in saved:
            return dict(saved)
        states: dict[Any, Any] = {}
        for position, values in saved["state"].items():
            keys = {one: state_key(index, self.parameter_name(index, position), one) for one in values}
            states[position] = {one: make(keys[one]) if keys[one] in self else value for one, value in values.items()}
        return {**saved, "state": states}

    def parameter_name(self, index: int, position: int) -> str:
        """Of an optimizer's parameter."""
        return self.optimizer_names[index][position]


def _may_be_lightnings(path: Path) -> bool:
    return not (path / MARKER).exists() and all((path / name).is_file() for name in (META, METADATA))


def _with_stored(folder: Folder, value: Any, keys: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...]) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _with_stored(folder, one, keys, (*path, key)) for key, one in value.items()}
    return Stored(folder, keys[path], inner) if path in keys else inner


def _without_repeats(targets: Iterable[tuple[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The same pairs, as mappings: of a key with several targets, each is in another one."""
    parts: list[dict[str, Tensor]] = []
    for key, tensor in targets:
        part = next((one for one in parts if key not in one), None)
        if part is None:
            parts.append(part := {})
        part[key] = tensor
    return parts


class _Unpickler(pickle.Unpickler):
    """Of torch.distributed.checkpoint's metadata, and nothing that would run code."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        allowed = name in _METADATA_CLASSES.get(module, ())
        if not allowed and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")
        return super().find_class(module, name)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
