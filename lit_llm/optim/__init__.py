"""Optimizers, parameter groups and learning-rate schedules, in plain torch."""

from __future__ import annotations

from lit_llm.optim.build import OptimizerConfig, build_optimizer
from lit_llm.optim.groups import parameter_groups
from lit_llm.optim.schedules import ScheduleConfig, build_scheduler, lr_factor

__all__ = [
    "OptimizerConfig",
    "ScheduleConfig",
    "build_optimizer",
    "build_scheduler",
    "lr_factor",
    "parameter_groups",
]
