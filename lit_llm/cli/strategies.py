"""The option trainer.strategy: short names, options of a class, and what is said of mistakes."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import strategies
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lit_llm.cli.arguments import each_option, load_value, read_yaml
from lit_llm.cli.options import did_you_mean
from lit_llm.cli.yaml_text import dump_yaml
from lit_llm.errors import UserError
from lit_llm.parallel.ddp import DataParallelStrategy
from lit_llm.parallel.strategy import MeshStrategy

MESH = "lit_llm.parallel.MeshStrategy"
_OURS: dict[str, type[Strategy]] = {"MeshStrategy": MeshStrategy, "DataParallelStrategy": DataParallelStrategy}
_SHORT: dict[str, type[Strategy]] = {"fsdp": MeshStrategy, "ddp": DataParallelStrategy, **_OURS}
_TIME = re.compile(r"(?:(\d+) days?, *)?(?:(\d+):)?(\d+):(\d+(?:\.\d*)?)$")


class _Choice:
    """What files and words say of the strategy so far: a class or a name, and options.

    A name or another class replaces what came before, but for options typed before any class was; what names the same
    class, or none, adds to it.
    """

    def __init__(self) -> None:
        self.name = "auto"
        self.options: dict[str, Any] = {}
        self._early: dict[str, Any] = {}

    def take(self, value: Any, *, typed: bool) -> None:
        """A value for the whole."""
        if isinstance(value, Mapping):
            rest = {key: one for key, one in value.items() if key not in ("class_path", "init_args")}
            name = value.get("class_path")
            if name is not None and (_find_class(str(name)) or name) is not (_find_class(self.name) or self.name):
                self._replace(str(name), typed)
            inner = value.get("init_args") or {}
            if not isinstance(inner, Mapping):
                raise UserError(f"trainer.strategy.init_args: {inner!r} does not fit; give a mapping of options")
            self.options.update({**rest, **inner})
        elif value is None or isinstance(value, str):
            self._replace(value or "auto", typed)
        else:
            raise UserError(f"trainer.strategy: {value!r} does not fit; give a name or a class, such as {MESH}")

    def _replace(self, name: str, typed: bool) -> None:
        self.name = name
        self.options = self._early if typed and name != "auto" else {}
        self._early = {}

    def add(self, path: list[str], value: Any) -> None:
        """A single typed option, or one of an object that is an option."""
        if path == ["init_args"]:
            self.take({"init_args": value}, typed=True)
            return
        first, *more = [part for part in path if part != "init_args"]
        for options in (self.options, self._early) if self.name == "auto" else (self.options,):
            if not more:
                options[first] = value
                continue
            inner = options.get(first)
            inner = {"class_path": inner} if isinstance(inner, str) else dict(inner or {})
            if first == "dict_kwargs" or more == ["class_path"]:
                inner[more[0]] = value
            else:
                inner["init_args"] = {**inner.get("init_args", {}), ".".join(more): value}
            options[first] = inner

    def words(self) -> list[str]:
        """The one word that says it all."""
        if self.name == "auto" and self.options:
            self.name = "fsdp"
        found = _find_class(self.name)
        if found is None or (self.name in ("fsdp", "ddp") and not self.options):
            if self.options:
                raise UserError(
                    f"trainer.strategy {self.name} takes no options, but {next(iter(self.options))} is given; use "
                    "fsdp, ddp or a class, as module.Class"
                )
            return [f"--trainer.strategy={self.name}"]
        options = dict(self.options)
        more = {"dict_kwargs": options.pop("dict_kwargs")} if "dict_kwargs" in options else {}
        parameters = inspect.signature(found).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            for option in (*options, *more):
                if option not in parameters:
                    raise UserError(_unknown_option(found, option, list(parameters)))
        kind = str(parameters["timeout"].annotation) if "timeout" in parameters else ""
        if "timeout" in options and "timedelta" in kind and not (options["timeout"] is None and "None" in kind):
            options["timeout"] = _time(options["timeout"])
        # Singly: a whole mapping that does not fit would pass as a name.
        texts = {
            key: one if isinstance(one, str) else json.dumps(one, default=str)
            for key, one in {**options, **more}.items()
        }
        singly = [f"--trainer.strategy.{key}={text}" for key, text in texts.items()]
        return [f"--trainer.strategy={json.dumps({'class_path': _path(self.name)})}", *singly]


def strategy_words(words: list[str]) -> list[str]:
    """The words with all that files and options say of trainer.strategy in one, behind the others.

    jsonargparse knows options of a class only where the class itself is given first, and no time in seconds. What it
    reads after --print_config it prints in part only, so that goes to the end.

    Raises:
        UserError: an unknown name, class or option, or a time that is none.
    """
    choice, found = _Choice(), False
    rest: list[str] = []
    last: list[str] = []
    for name, value, original in each_option(words):
        if name in ("--config", "-c") and value is not None:
            content = read_yaml(value, "--config")
            trainer = content.get("trainer")
            if isinstance(trainer, Mapping) and "strategy" in trainer:
                found = True
                choice.take(trainer["strategy"], typed=False)
                if not isinstance(trainer["strategy"], str):
                    others = {key: one for key, one in trainer.items() if key != "strategy"}
                    original = [f"--config={dump_yaml({**content, 'trainer': others})}"]
        elif name == "--trainer.strategy.help":
            original = original if value is None else [f"{name}={_path(value)}"]
        elif name == "--trainer.strategy" or name.startswith("--trainer.strategy."):
            if value is None:
                raise UserError(f"{name} has no value; give it one")
            found, original = True, []
            path = name.removeprefix("--trainer.strategy").removeprefix(".").removeprefix("init_args.").split(".")
            if path in ([""], ["class_path"]):
                choice.take(load_value(value), typed=True)
            else:
                choice.add(path, load_value(value))
        elif name == "--print_config":
            last, original = original[:1], original[1:]
        rest += original
    return [*rest, *(choice.words() if found else []), *last]


def _find_class(name: str) -> Callable[..., Any] | None:
    """The class that a name stands for; None for Lightning's short names."""
    if name in _SHORT:
        return _SHORT[name]
    if "." not in name:
        if name == "auto" or name in StrategyRegistry.available_strategies():
            return None
        if not hasattr(strategies, name):
            hint = did_you_mean(name, [*_SHORT, *StrategyRegistry.available_strategies(), *strategies.__all__])
            listed = f"known are auto, {', '.join(_SHORT)}, Lightning's names, and classes as module.Class"
            raise UserError(f"trainer.strategy: there is no {name}; {hint if 'mean' in hint else listed}")
    try:
        found = pkgutil.resolve_name(_path(name))
    except (ImportError, AttributeError, ValueError) as error:
        module = name.rpartition(".")[0]
        known = [f"{module}.{key}" for key in dir(sys.modules.get(module)) if key.endswith("Strategy")]
        hint = did_you_mean(name, [_path(one) for one in _OURS] + known)
        cause = f" ({error})" if isinstance(error, ImportError) else ""
        raise UserError(f"trainer.strategy: there is no class {name}{cause}; {hint}") from None
    if not callable(found) or (inspect.isclass(found) and not issubclass(found, Strategy)):
        raise UserError(f"trainer.strategy: {name} is no strategy; give one, such as {MESH}")
    return found


def _path(name: str) -> str:
    """module.Class of a short name."""
    name = {"fsdp": "MeshStrategy", "ddp": "DataParallelStrategy"}.get(name, name)
    return name if "." in name else f"{'lit_llm.parallel' if name in _OURS else strategies.__name__}.{name}"


def _unknown_option(of: Callable[..., Any], option: str, known: list[str]) -> str:
    chosen = getattr(of, "__name__", str(of))
    for short in ("fsdp", "ddp"):
        if option in inspect.signature(_SHORT[short]).parameters:
            return (
                f"trainer.strategy.{option} is no option of {chosen}, but of {_SHORT[short].__name__} "
                f"(--trainer.strategy {short}); {chosen} knows {', '.join(known)}"
            )
    hint = did_you_mean(f"trainer.strategy.{option}", [f"trainer.strategy.{one}" for one in known])
    hint = hint if "mean" in hint else f"{chosen} knows {', '.join(known)}"
    return f"unknown option trainer.strategy.{option}; {hint}"


def _time(value: Any) -> str:
    """Seconds, or hours:minutes:seconds, as jsonargparse reads a timedelta."""
    seconds = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if isinstance(value, str) and (found := _TIME.match(value.strip())):
        parts = (float(part or 0) for part in found.groups())
        seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=True))
    try:
        if seconds > 0 and (time := timedelta(seconds=seconds)):
            return str(time)
    except (OverflowError, ValueError):
        pass
    raise UserError(f"trainer.strategy.timeout must be seconds or h:m:s above 0, such as 1800 or 0:30:00; got {value}")


def settle_strategy(settings: Any) -> str | None:
    """Turns ``fsdp`` into MeshStrategy over all devices.

    Args:
        settings: the Trainer's, changed in place.

    Returns:
        A line for the user, if something was changed.

    Raises:
        UserError: another of Lightning's ways to shard.
    """
    strategy = settings.strategy
    name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", "")
    if name == "fsdp":
        settings.strategy = Namespace(class_path=MESH, init_args=Namespace(shard="auto"))
        return f"trainer.strategy fsdp: {MESH} with shard auto, over all devices"
    if name.startswith("fsdp") or name.endswith((".FSDPStrategy", ".ModelParallelStrategy")) or name == "FSDPStrategy":
        more = " and cpu_offload true" if "offload" in name else ""
        raise UserError(
            f"trainer.strategy {name} can't keep the numbers of one process; use trainer.strategy {MESH} with "
            f"trainer.strategy.shard auto{more}"
        )
    return None
