"""The weights of a model in memory, on one process or spread over several, as an export reads them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lit_llm.checkpoint.average import plain_name
from lit_llm.checkpoint.copies import gather
from lit_llm.errors import UserError
from lit_llm.model import Transformer

_Result = TypeVar("_Result")


class ModelWeights:
    """The tensors of a model; a :class:`lit_llm.checkpoint.hf.Weights`.

    What is spread over processes is read within :meth:`together`, which all of them call.

    Raises:
        UserError: a model without weights, on the meta device.
    """

    def __init__(self, model: Transformer) -> None:
        self._tensors = {plain_name(name): tensor.detach() for name, tensor in model.state_dict().items()}
        self._spread = any(map(_is_spread, self._tensors.values()))
        for name, tensor in self._tensors.items():
            if tensor.is_meta:
                raise UserError(f"{name} is on the meta device: the model has no weights yet that could be saved")

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, the whole."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, whole."""
        tensor = self._tensors[name]
        if not _is_spread(tensor):
            return tensor.cpu()
        _broadcast(name)
        return gather(tensor, keeps=True)

    def together(self, write: Callable[[], _Result]) -> _Result:
        """Lets one process do what reads the tensors, the first where they are spread; the others give their parts.

        All return its result when it is done, or raise what it raised.
        """
        if not self._spread:
            return write()
        if torch.distributed.get_rank() == 0:
            end: tuple[Any, BaseException | None] = (None, None)
            try:
                result = write()
                end = (result, None)
            except BaseException as error:
                end = (None, _sendable(error))
                raise
            finally:
                _broadcast(end)
            return result
        while isinstance(told := _broadcast(), str):
            gather(self._tensors[told], keeps=False)
        result, failure = told
        if failure is not None:
            raise failure
        return result


def _is_spread(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def _broadcast(value: Any = None) -> Any:
    """What the first process gives."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error
