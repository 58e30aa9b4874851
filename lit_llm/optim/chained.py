"""Several optimizers that look like one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.optim import SGD, Optimizer


class ChainedOptimizer(Optimizer):
    """Optimizers of disjoint parameters as one.

    The parts lend it their group dicts, so that a rate set here reaches them, and share one ``state``. What it saves
    and loads is the ordinary format of torch: one list of groups, one mapping of state. Step and save it as a whole,
    never a part alone.

    Args:
        parts: the optimizers, at least one; they step in this order.

    Raises:
        ValueError: no part, or a parameter in two of them.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        self._complete = False
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._complete = True
        for part in parts:
            self.state.update(part.state)
            part.state = self.state
        self._step_supports_amp_scaling = all(getattr(part, "_step_supports_amp_scaling", False) for part in parts)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every part; ``closure`` is called once, before, with gradients on.

        ``found_inf`` and ``grad_scale``, where set on this optimizer, hold for the parts during the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lent = {name: getattr(self, name) for name in ("found_inf", "grad_scale") if hasattr(self, name)}
        for part in self.parts:
            for name, value in lent.items():
                setattr(part, name, value)
            try:
                part.step()
            finally:
                for name in lent:
                    delattr(part, name)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once built: no part would own the group.

        Raises:
            TypeError: always, then.
        """
        if self._complete:
            raise TypeError("a ChainedOptimizer takes no further groups; build its parts with them")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        extra = {name: self.__dict__[name] for name in ("parts", "_complete", "_step_supports_amp_scaling")}
        return {**super().__getstate__(), **extra}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the last act of ``load_state_dict``: hands the new groups and state on to the parts."""
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for part in self.parts:
            own = list(islice(groups, len(part.param_groups)))
            part.__setstate__({"state": self.state, "param_groups": own})


def supports_found_inf(optimizer: Optimizer) -> bool:
    """Whether a step with ``optimizer.found_inf`` set is skipped on the device where it holds 1, and taken where 0.

    The attribute is a float32 tensor of no dimension, on the parameters' device: with one dimension torch's kernels
    fail. True for torch's fused kernels, and for any class that tells GradScaler it reads the attribute. A chained
    optimizer does where all its parts do. Not SGD with momentum: fused, its first step allocates the buffers, and
    skipped, it would leave them with whatever the memory held.
    """
    if isinstance(optimizer, ChainedOptimizer):
        return all(supports_found_inf(part) for part in optimizer.parts)
    if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
        return False
    fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
