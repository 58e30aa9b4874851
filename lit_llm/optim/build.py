"""The optimizer of a run."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lit_llm.errors import UserError
from lit_llm.optim.chained import ChainedOptimizer
from lit_llm.optim.checks import as_float
from lit_llm.optim.config import DEFAULTS, OptimizerConfig
from lit_llm.optim.groups import parameter_groups
from lit_llm.optim.resume import keep_configuration

_FUSED_DEVICES = ("cpu", "cuda")
# What has fields of its own, or is not the user's to give.
_FIELDS = ("lr", "weight_decay", "fused")


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The configured optimizer over the groups of :func:`parameter_groups`, in one fused kernel where there is one.

    Each group also has "optimizer", the name of the class that steps it. Loading a state dict takes what the parameters
    remember and leaves the settings as configured (:func:`lit_llm.optim.resume.keep_configuration`).

    Raises:
        UserError: nothing in ``module`` requires a gradient, ``config.fused`` is True where no fused kernel is, the
            class is not there or no optimizer, or it does not take the options.
    """
    groups = parameter_groups(
        module,
        config.weight_decay,
        lr=config.lr,
        embedding_lr_ratio=config.embedding_lr_ratio,
        width_base=config.width_base,
        muon=config.name == "muon",
    )
    if not groups:
        raise UserError("the model has no parameter to train: all of them are frozen (requires_grad=False)")
    optimizer: Optimizer
    adamw = {"betas": config.betas, "eps": config.eps}
    if config.name == "adamw":
        optimizer = _made(AdamW, groups, config, adamw, config.options)
    elif config.name == "muon":
        optimizer = ChainedOptimizer(*_muon_and_adamw(groups, config, adamw))
    else:
        optimizer = _made(_resolved(config.name), groups, config, {}, config.options)
    optimizer.register_load_state_dict_pre_hook(keep_configuration)
    return optimizer


def _muon_and_adamw(groups: list[dict[str, Any]], config: OptimizerConfig, adamw: dict[str, Any]) -> list[Optimizer]:
    """Muon's updates have a root mean square of 0.2, as AdamW's do, so that one rate and one decay serve both.

    Liu et al. 2025, Muon is scalable for LLM training, section 2.2.
    """
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise UserError(f"model.optimizer.name muon needs torch 2.9 or newer, this is {torch.__version__}")
    hidden = [group for group in groups if group["name"] == "muon"]
    others = [group for group in groups if group["name"] != "muon"]
    if config.fused and not others:
        raise UserError("model.optimizer.fused cannot be true for Muon, which has no fused kernel; set it to null")
    parts = []
    settings = {"momentum": config.muon_momentum, "adjust_lr_fn": "match_rms_adamw"}
    if hidden:
        parts.append(_made(muon, hidden, config, settings, config.options, may_fuse=False))
    if others:
        parts.append(_made(AdamW, others, config, adamw, {}))
    return parts


def _made(
    cls: type[Optimizer],
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    settings: dict[str, Any],
    options: dict[str, Any],
    may_fuse: bool = True,
) -> Optimizer:
    """``cls`` over ``groups``; ``settings`` come from fields of ``config``, ``options`` from the user's mapping."""
    parameters = inspect.signature(cls).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    named = (one for one in list(parameters)[1:] if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    accepted = {one.name: one.default for one in named}
    arguments = {**settings, **_checked_options(cls, accepted, takes_all, settings, options)}
    if takes_all or "lr" in accepted:
        arguments["lr"] = config.lr
    if not (takes_all or "weight_decay" in accepted):
        if config.weight_decay not in (0.0, DEFAULTS["weight_decay"]):
            raise UserError(
                f"model.optimizer.weight_decay is {config.weight_decay:g}, and {cls.__name__} takes none; set it to 0"
            )
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    if may_fuse and _fused(cls, "fused" in accepted, groups, config):
        # Never False: None leaves torch the choice between kernels over lists of parameters and a loop.
        arguments["fused"] = True
    # Groups say their rate themselves, for a class whose signature has none.
    groups = [{"lr": config.lr, **group, "optimizer": cls.__name__} for group in groups]
    try:
        return cls(groups, **arguments)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.optimizer.name {config.name} with model.optimizer.options {options} does not work: {reason}; "
            "change the options"
        ) from error


def _checked_options(
    cls: type[Optimizer],
    accepted: dict[str, Any],
    takes_all: bool,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    found = {}
    fields = {name: name for name in (*_FIELDS, *settings)}
    if cls is getattr(torch.optim, "Muon", None) and "momentum" in fields:
        fields["momentum"] = "muon_momentum"
        del fields["adjust_lr_fn"]  # a default, no field
    for name, value in options.items():
        if name in fields:
            raise UserError(
                f"model.optimizer.options.{name} {value!r} has a place of its own: give it as "
                f"model.optimizer.{fields[name]}"
            )
        if name not in accepted and not takes_all:
            known = [one for one in accepted if one not in fields]
            raise UserError(
                f"model.optimizer.options.{name} is unknown to {cls.__name__}; it accepts "
                f"{', '.join(known) or 'no options'}"
            )
        default = accepted.get(name)
        # YAML reads 1e-5 as text.
        if isinstance(value, str) and isinstance(default, (int, float)) and not isinstance(default, bool):
            value = as_float(f"model.optimizer.options.{name}", value, float("-inf"))
            value = int(value) if isinstance(default, int) and value.is_integer() else value
        found[name] = value
    return found


def _fused(cls: type[Optimizer], known: bool, groups: list[dict[str, Any]], config: OptimizerConfig) -> bool:
    parameters = [parameter for group in groups for parameter in group["params"]]
    unfit = next((p for p in parameters if p.device.type not in _FUSED_DEVICES or not p.is_floating_point()), None)
    if config.fused:
        if not known:
            raise UserError(
                f"model.optimizer.fused cannot be true for {cls.__name__}, which takes no such argument; set it to null"
            )
        if unfit is not None:
            raise UserError(
                f"model.optimizer.fused cannot be true for {unfit.dtype} parameters on {unfit.device.type}; set it to "
                "null"
            )
        return True
    excluded = any(config.options.get(name) for name in ("foreach", "differentiable"))
    # torch has no fused SGD for what is split over processes.
    split = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    known_good = (Adam, AdamW) if split else (Adam, AdamW, SGD)
    return config.fused is None and cls in known_good and unfit is None and not excluded


def _resolved(path: str) -> type[Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module of the user's does at import
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.optimizer.name {path} cannot be imported ({reason}); give adamw, muon or the path of a class"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)) or found is Optimizer:
        raise UserError(f"model.optimizer.name {path} is no torch.optim.Optimizer; give adamw, muon or the path of one")
    return found
