"""The optimizer of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lit_llm.errors import UserError
from lit_llm.optim.checks import as_float, one_of
from lit_llm.optim.groups import parameter_groups

_FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) and its settings. Numbers may be given as text ("3e-4").

    Attributes:
        name: "adamw".
        lr: the peak learning rate; the schedule multiplies it.
        weight_decay: of the matrices; norm gains, biases and embeddings have none.
        betas: decay rates of the running means of the gradient and of its square, in [0, 1).
        eps: added to the root of the mean square.
        fused: one kernel for the whole update; None takes it where the parameters' device has it.

    Raises:
        UserError: a value that is not as described.
    """

    name: Literal["adamw"] = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    fused: bool | None = None

    def __post_init__(self) -> None:
        one_of("model.optimizer.name", self.name, ("adamw",))
        for field in ("lr", "weight_decay", "eps"):
            object.__setattr__(self, field, as_float(f"model.optimizer.{field}", getattr(self, field), 0.0))
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise UserError(f"model.optimizer.betas must be two numbers, not {self.betas!r}")
        betas = tuple(
            as_float(f"model.optimizer.betas[{i}]", beta, 0.0, 1.0, below=True) for i, beta in enumerate(self.betas)
        )
        object.__setattr__(self, "betas", betas)
        if self.fused is not None and not isinstance(self.fused, bool):
            raise UserError(f"model.optimizer.fused must be true, false or null, not {self.fused!r}")


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the groups of :func:`parameter_groups`, in one fused kernel where there is one.

    Raises:
        UserError: nothing in ``module`` requires a gradient, or ``config.fused`` is True where no fused kernel is.
    """
    groups = parameter_groups(module, config.weight_decay)
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not parameters:
        raise UserError("the model has no parameter to train: all of them are frozen (requires_grad=False)")
    unfit = next((p for p in parameters if p.device.type not in _FUSED_DEVICES or not p.is_floating_point()), None)
    if config.fused and unfit is not None:
        raise UserError(
            f"model.optimizer.fused cannot be true for {unfit.dtype} parameters on {unfit.device.type}; set it to null"
        )
    fused = config.fused is not False and unfit is None
    # None, unlike False, leaves torch the choice between kernels over lists of parameters and a loop.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)
