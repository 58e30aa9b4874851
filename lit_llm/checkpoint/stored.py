"""Tensors and states that lie in the folder of a sharded checkpoint, as mappings and sequences that read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lit_llm.checkpoint.folder import Folder


class Stored(Mapping[str, Any]):
    """Tensors of a folder by name, read when they are asked for and not kept.

    Args:
        folder: where they are.
        keys: name to key.
        values: all names in their order, with the values of those that have no key.
    """

    def __init__(self, folder: Folder, keys: Mapping[str, str], values: Mapping[str, Any]) -> None:
        self.folder, self.keys_of, self._values = folder, keys, values

    def __getitem__(self, name: str) -> Any:
        return self.folder.read(self.keys_of[name]) if name in self.keys_of else self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __deepcopy__(self, memo: Any) -> Stored:
        return self  # Lightning copies callbacks' states; nothing changes here

    def whole(self) -> dict[str, Any]:
        """All of them, read; tied ones are one tensor here too."""
        read: dict[str, Any] = {}
        for name, key in self.keys_of.items():
            if key not in read:
                read[key] = self[name]
        return {name: read[self.keys_of[name]] if name in self.keys_of else self._values[name] for name in self}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, without reading it."""
        return self.folder.dtype(self.keys_of[name])

    def shape(self, name: str) -> torch.Size:
        """Of a tensor, without reading it."""
        return self.folder.shape(self.keys_of[name])

    def placeholder(self, name: str, dtype: torch.dtype | None = None) -> Any:
        """A tensor without memory, which :mod:`lit_llm.checkpoint.placing` reads when it places it.

        Args:
            name: of it; what is no tensor is given as it is.
            dtype: through which its values go on their way; None: as saved.
        """
        if name not in self.keys_of:
            return self._values[name]
        return self.folder.placeholder(self.keys_of[name], dtype)


class StoredStates(Sequence[Any]):
    """The states of a folder's optimizers, each read when it is asked for and not kept."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return self.folder.optimizer_state(range(len(self))[index])

    def __len__(self) -> int:
        return len(self.folder.content["optimizer_states"])


def whole(value: Any) -> Any:
    """A value of nested mappings with every :class:`Stored` in it read."""
    if isinstance(value, Stored):
        value = value.whole()
    return {key: whole(one) for key, one in value.items()} if isinstance(value, dict) else value
