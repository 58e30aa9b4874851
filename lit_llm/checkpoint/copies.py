"""Copies of a checkpoint's content that training can't change any more."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)


_owned = WeakIdKeyDictionary()  # by the tensor itself, so that none is taken for another that is gone


def gather(tensor: Any, *, keeps: bool) -> torch.Tensor:
    """A tensor or DTensor, whole in CPU memory; collective over the mesh of a DTensor.

    Args:
        tensor: to be made whole.
        keeps: False where it is not wanted: an empty tensor then.
    """
    tensor = tensor.detach()
    parts = tensor
    if hasattr(tensor, "full_tensor"):
        kind = tensor.device_mesh.device_type  # which its processes talk over, wherever it is kept
        parts = tensor.to_local()
        tensor = (tensor if tensor.device.type == kind else tensor.to(kind)).full_tensor()
    if not keeps:
        return torch.empty(0)
    whole = tensor.cpu()
    if whole.untyped_storage()._cdata != parts.untyped_storage()._cdata:
        _owned[whole] = True
    return whole


def snapshot(content: Any) -> Any:
    """A copy of a checkpoint's content that later training can't change.

    Tensors are copied to CPU memory. Those that share memory, such as tied weights and views, share it in the copy as
    well, and a container that appears twice is one there too, so the copy makes the same file. Objects of other kinds
    go through copy.deepcopy. Tensors that :func:`gather` has made are copies already and are taken as they are.
    """
    return _copied(content, {}, {})


def _copied(value: Any, memo: dict[int, Any], storages: dict[int, Any]) -> Any:
    if isinstance(value, _IMMUTABLE):
        return value
    if id(value) in memo:
        return memo[id(value)]
    new: Any
    if isinstance(value, torch.Tensor):
        new = _copied_tensor(value, memo, storages)
    elif isinstance(value, dict):
        new = memo[id(value)] = copy.copy(value)  # its kind, order and default
        for key in value:
            new[key] = _copied(value[key], memo, storages)
        if hasattr(value, "__dict__"):  # a module's state_dict carries _metadata so
            vars(new).update({name: _copied(one, memo, storages) for name, one in vars(value).items()})
    elif type(value) is list:
        new = memo[id(value)] = []
        new.extend(_copied(one, memo, storages) for one in value)
    elif type(value) is tuple:
        new = tuple(_copied(one, memo, storages) for one in value)
    else:
        new = copy.deepcopy(value, memo)
    memo[id(value)] = new
    memo.setdefault(id(memo), []).append(value)  # kept alive, as copy.deepcopy does, so that no id is met again
    return new


def _copied_tensor(tensor: torch.Tensor, memo: dict[int, Any], storages: dict[int, Any]) -> torch.Tensor:
    if tensor.is_meta or tensor in _owned:
        return tensor
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)
    storage = tensor.untyped_storage()
    if storage.device.type == "cpu":
        new = copy.deepcopy(storage, memo)  # the memo knows it: copy.deepcopy of other objects shares it too
    else:
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.cpu()
        new = storages[storage._cdata]
    copied = torch.empty(0, dtype=tensor.dtype).set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
