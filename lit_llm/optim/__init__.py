"""Optimizers, parameter groups and schedules, in plain torch."""

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
