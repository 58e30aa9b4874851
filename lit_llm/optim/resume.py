"""Resuming: the configuration says how to train on, the checkpoint where training stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lit_llm.errors import UserError

# AdamW is torch's Adam with another decay, and what they remember is the same.
_SAME = {"AdamW": "Adam"}
# Settings that need something remembered which a run without them has not.
_REMEMBERED = {"Adam": ("amsgrad",), "RMSprop": ("centered", "momentum")}

SCHEDULED = "_has_step_schedule"
"""Set on an optimizer whose rates a StepSchedule gives."""

_Groups = Sequence[Mapping[str, Any]]


def keep_configuration(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook for ``register_load_state_dict_pre_hook``: of ``state_dict`` only what parameters remember is loaded.

    Groups and their settings (rates, betas, decay) stay as they are, where a StepSchedule sets the rates. Under another
    schedule, which may go on from the rate that it finds, settings come from the saved group of the same parameters, as
    torch has it. Parameters find their state by name, where both sides have "param_names" or the saved groups list
    names; otherwise by order. So other groups over the same parameters fit too. Tensors are passed on untouched.

    Returns:
        A new state dict that fits ``optimizer``; ``state_dict`` is not changed.

    Raises:
        UserError: other parameters, or the state of another optimizer.
    """
    saved = state_dict["param_groups"]
    ids = _matched(saved, optimizer.param_groups)
    origin = {one: group for group in saved for one in group["params"]}
    groups, start = [], 0
    for group in optimizer.param_groups:
        own = ids[start : start + len(group["params"])]
        start += len(own)
        names = group.get("param_names", own)
        for name, one in zip(names, own, strict=True):
            _refuse_other_kind(name, group, origin[one], state_dict["state"].get(one), optimizer)
        settings = dict(group)
        if own and not getattr(optimizer, SCHEDULED, False):
            settings.update({key: value for key, value in origin[own[0]].items() if key in group})
            settings.update({key: group[key] for key in ("name", "param_names", "optimizer") if key in group})
        groups.append({**settings, "params": own})
    return {**state_dict, "param_groups": groups}


def _matched(saved: _Groups, present: _Groups) -> list[Any]:
    """The saved id of each present parameter, in the order of the groups."""
    ids = [one for group in saved for one in group["params"]]
    mine = _names(present)
    # torch.distributed.checkpoint makes ids of names, and its param_names may be those of another group.
    are_names = bool(ids) and all(isinstance(one, str) for one in ids)
    theirs = [_plain(one) for one in ids] if are_names else _names(saved)
    same_sizes = [len(group["params"]) for group in saved] == [len(group["params"]) for group in present]
    if mine is not None and theirs is not None:
        by_name = dict(zip(theirs, ids, strict=True))
        missing = [name for name in mine if name not in by_name]
        foreign = sorted(by_name.keys() - set(mine))
        if not missing and not foreign:
            return [by_name[name] for name in mine]
        if not (are_names and same_sizes):  # else names under another prefix, but in our order
            both = ((missing, "not in it"), (foreign, "not here"))
            parts = [f"{_some(names)} {where}" for names, where in both if names]
            raise UserError(
                f"the checkpoint's optimizer trained other parameters: {' and '.join(parts)}; resume with its "
                "model.config and with the same parameters frozen"
            )
    elif not same_sizes:
        counts = [sum(len(group["params"]) for group in groups) for groups in (saved, present)]
        raise UserError(
            f"the checkpoint's optimizer has {counts[0]} parameters in {len(saved)} groups, this one {counts[1]} in "
            f"{len(present)}, and no names to match them by; resume with its model.config and model.optimizer"
        )
    return ids


def _refuse_other_kind(
    name: Any, group: Mapping[str, Any], saved: Mapping[str, Any], state: Any, optimizer: Optimizer
) -> None:
    keys = set(state) if isinstance(state, Mapping) else set()
    mine = group.get("optimizer", type(optimizer).__name__)
    mine = _SAME.get(mine, mine)
    theirs = saved.get("optimizer") or ("Adam" if {"exp_avg", "exp_avg_sq"} <= keys else None)
    theirs = _SAME.get(str(theirs), theirs)
    if (theirs is not None and theirs != mine) or (mine == "Muon" and keys and "momentum_buffer" not in keys):
        raise UserError(
            f"the checkpoint holds the state of another optimizer for {name} ({theirs or 'unknown'}, not {mine}); "
            "resume with its model.optimizer.name"
        )
    for option in _REMEMBERED.get(mine, ()) if keys else ():
        if group.get(option) and not saved.get(option, group[option]):
            raise UserError(
                f"model.optimizer.options.{option} is {group[option]}, and the checkpoint's optimizer ran without it; "
                "resume without it too"
            )


def _names(groups: _Groups) -> list[str] | None:
    names: list[str] = []
    for group in groups:
        own = group.get("param_names")
        if own is None or len(own) != len(group["params"]):
            return None
        names += [_plain(name) for name in own]
    return names


def _plain(name: str) -> str:
    """Without what torch.compile puts into names."""
    return name.replace("_orig_mod.", "")


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
