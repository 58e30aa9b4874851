"""The optimizer out of its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lit_llm.errors import UserError
from lit_llm.optim.groups import parameter_groups
from lit_llm.optim.numbers import as_float

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019).

    Args:
        name: ``adamw``.
        lr: peak learning rate.
        weight_decay: of matrices; norm gains, biases and embeddings do not decay.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        fused: torch's fused kernel; None: where the parameters' device has one.
    """

    name: Literal["adamw"] = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.name != "adamw":
            raise UserError(f"model.optimizer.name {self.name!r} is unknown; known is adamw")
        for name in ("lr", "weight_decay", "eps"):
            object.__setattr__(self, name, as_float(f"model.optimizer.{name}", getattr(self, name), low=0.0))
        if len(self.betas) != 2:
            raise UserError(f"model.optimizer.betas must be two numbers, got {self.betas!r}")
        betas = tuple(as_float("model.optimizer.betas", beta, low=0.0, high=0.9999999) for beta in self.betas)
        object.__setattr__(self, "betas", betas)


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the two groups of :func:`parameter_groups`.

    Raises:
        UserError: no parameter requires a gradient.
    """
    groups = parameter_groups(module, config.weight_decay)
    if not groups:
        raise UserError("no parameter requires a gradient: everything is frozen; unfreeze what should be trained")
    fused = config.fused
    if fused is None:
        parameters = [p for group in groups for p in group["params"]]
        fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
