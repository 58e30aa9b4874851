"""How long a rank's forward computes, without what it waits for other ranks: see :mod:`lit_llm.callbacks.monitor`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lit_llm.model import Transformer

_Stretch = tuple[Any, Any]
_PER_STEP = 4  # micro-batches of a step that are measured, so that long accumulation costs no more


class HostClock:
    """Stamps of the host, for devices that compute as they are told."""

    def now(self) -> Any:
        """A stamp."""
        return time.perf_counter()

    def ms(self, stretch: _Stretch) -> float | None:
        """Between two stamps."""
        return 1000 * (stretch[1] - stretch[0])


class DeviceClock:
    """Stamps in the present stream of a CUDA device; nobody waits for them."""

    def now(self) -> Any:
        """A stamp."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, stretch: _Stretch) -> float | None:
        """Between two stamps; None while the device has not come there."""
        return stretch[0].elapsed_time(stretch[1]) if stretch[1].query() else None


@dataclass
class _MicroBatch:
    step: int
    whole: list[Any] = field(default_factory=list)
    blocks: list[_Stretch] = field(default_factory=list)
    waits: list[_Stretch] = field(default_factory=list)
    block_waits: list[_Stretch] = field(default_factory=list)


class ForwardTimer:
    """Measures the forward of some steps; outside of them nothing is installed.

    Of a :class:`lit_llm.model.Transformer` it measures the blocks alone; of another module all from the start of the
    micro-batch to its backward. What FSDP2 takes to gather parameters is taken off. A block's call is stood in for, as
    hooks of a compiled block would be compiled with it, or ignored; what activation checkpointing computes again does
    not count.

    Args:
        module: the LightningModule.
        device: where it computes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.clock: HostClock | DeviceClock = DeviceClock() if device.type == "cuda" else HostClock()
        self.installed = False
        self._module = module
        self._replaced: list[tuple[Any, str, Any]] = []  # object, attribute, what its __dict__ held
        self._done: list[_MicroBatch] = []
        self._open: _MicroBatch | None = None
        self._in_block = False
        self._counts: dict[int, int] = {}  # step -> its micro-batches
        self._unknown = False

    def install(self) -> None:
        """Begins to measure."""
        if self.installed:
            return
        self.installed = True
        self._unknown = False
        for block in _blocks(self._module):
            call = block._compiled_call_impl or block._call_impl
            self._replace(block, "_compiled_call_impl", self._timed(call))
        for group in _gathering(self._module):
            if group is None:  # waits could not be told from work
                self._unknown = True
                continue
            for name in ("unshard", "wait_for_unshard"):
                self._replace(group, name, self._waiting(getattr(group, name)))

    def remove(self) -> None:
        """Leaves everything as it was."""
        for owner, name, before in reversed(self._replaced):
            if before is _NOTHING:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before
        self._replaced.clear()
        self._open, self.installed = None, False

    def begin(self, step: int) -> None:
        """A micro-batch of a step begins."""
        self._counts[step] = self._counts.get(step, 0) + 1
        if self._counts[step] <= _PER_STEP:
            self._open = _MicroBatch(step, [self.clock.now()])

    def end(self) -> None:
        """Its backward begins."""
        if self._open is not None:
            self._open.whole.append(self.clock.now())
            self._done.append(self._open)
            self._open = None

    def take(self) -> float:
        """ms a step, the median of the steps since the last call that the device is through with; nan without one."""
        steps: dict[int, list[float | None]] = {}
        for micro_batch in self._done:
            steps.setdefault(micro_batch.step, []).append(self._ms(micro_batch))
        found = []
        for step, parts in steps.items():
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                found.append(sum(known) / len(known) * self._counts[step])
        self._done.clear()
        self._counts.clear()
        return statistics.median(found) if found and not self._unknown else float("nan")

    def _ms(self, micro_batch: _MicroBatch) -> float | None:
        worked = micro_batch.blocks or [(micro_batch.whole[0], micro_batch.whole[1])]
        waited = micro_batch.block_waits if micro_batch.blocks else micro_batch.waits
        total = 0.0
        for sign, stretches in ((1, worked), (-1, waited)):
            for stretch in stretches:
                ms = self.clock.ms(stretch)
                if ms is None:
                    return None
                total += sign * ms
        return total

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        self._replaced.append((owner, name, owner.__dict__.get(name, _NOTHING)))
        owner.__dict__[name] = by

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._open is None or self._in_block:
                return call(*args, **kwargs)
            begin, self._in_block = self.clock.now(), True
            try:
                result = call(*args, **kwargs)
            finally:
                self._in_block = False
            self._open.blocks.append((begin, self.clock.now()))
            return result

        return timed

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if self._open is None:
                return call(*args, **kwargs)
            begin = self.clock.now()
            result = call(*args, **kwargs)
            waited = (begin, self.clock.now())
            self._open.waits.append(waited)
            if self._in_block:
                self._open.block_waits.append(waited)
            return result

        return waiting


_NOTHING = object()


def _blocks(module: Any) -> list[Any]:
    """Of the Transformers in a module, unless what holds them is compiled as a whole."""
    if getattr(module, "_compiler_ctx", None) is not None:
        return []
    models = [m for m in module.modules() if isinstance(m, Transformer)]
    blocks = [block for model in models for block in model.layers]
    among = {id(part) for block in blocks for part in block.modules()}
    holders = [m for m in module.modules() if id(m) not in among]
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in holders):
        return []
    return blocks


def _gathering(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters, each with ``unshard`` and ``wait_for_unshard``; None: one that can't be reached."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                single = getattr(state, "_fsdp_param_group", _NOTHING)
                groups = [] if single is None else [single]
            for group in groups:
                known = hasattr(group, "unshard") and hasattr(group, "wait_for_unshard")
                yield group if known else None
