"""Optimizers, parameter groups and learning-rate schedules, in plain torch."""

from __future__ import annotations

from lit_llm.optim.build import build_optimizer
from lit_llm.optim.chained import ChainedOptimizer, supports_found_inf
from lit_llm.optim.config import OptimizerConfig
from lit_llm.optim.groups import describe_groups, parameter_groups
from lit_llm.optim.picture import draw_schedule
from lit_llm.optim.scheduler import StepSchedule, build_scheduler
from lit_llm.optim.schedules import Lengths, ScheduleConfig, lr_factor, resolved

__all__ = [
    "ChainedOptimizer",
    "Lengths",
    "OptimizerConfig",
    "ScheduleConfig",
    "StepSchedule",
    "build_optimizer",
    "build_scheduler",
    "describe_groups",
    "draw_schedule",
    "lr_factor",
    "parameter_groups",
    "resolved",
    "supports_found_inf",
]
