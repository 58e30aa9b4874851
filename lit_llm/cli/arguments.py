"""What is done to the words of a trainer command before jsonargparse reads them.

Three things that it leaves to wish for: a broken configuration file is named with its line; single fields of
``model.config`` add to a mapping or to a preset's name instead of replacing it, over files and options alike, and so do
those of ``model.optimizer.options``; and the
value of a nested option (``--model.generation.stop``) arrives as it was typed, where jsonargparse reads it twice, so
that null and backslashes get lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_llm.checkpoint.hf_folder import config_like
from lit_llm.cli.yaml_text import load_yaml
from lit_llm.errors import UserError
from lit_llm.model.presets import PRESETS
from lit_llm.training.model_source import DEFAULT_CONFIG

_SECTIONS = ("model", "data")
_LITLLM = "lit_llm.LitLLM"


@dataclass
class Arguments:
    """The words for jsonargparse, and what the user gave of the model."""

    words: list[str]
    model_config: Any = None  # a preset's name or a mapping of fields, also a folder's; None: not given
    given: set[str] = field(default_factory=set)  # names of the model's other options that were given
    typed: set[str] = field(default_factory=set)  # those of them that are words, not of a file
    classes: dict[str, str] = field(default_factory=dict)  # of model and data, where they were given
    print_schedule: bool = False  # what fit does instead of training; no part of a configuration
    replay: str | None = None


def prepare_arguments(words: list[str], command: str = "fit") -> Arguments:
    """Reads the configuration files and rewrites the options; see the module's text.

    Raises:
        UserError: a configuration file that is missing, no YAML or no mapping, or a preset that is none.
    """
    result = Arguments([])
    rewritten = False
    options: dict[str, Any] = {}  # of the optimizer, which add up over files and words as well
    sources = 0
    pretrained: Any = None
    for name, value, original in each_option(words):
        if command == "fit" and name == "--print_schedule" and value is None:
            result.print_schedule = True
            continue
        if command == "fit" and name == "--replay":
            if not value:
                raise UserError("--replay has no value; give it a file of replays/ in a run's folder")
            result.replay = value
            continue
        section, _, rest = name.removeprefix("--").partition(".")
        path = rest.removeprefix("init_args.").split(".")
        if name in ("--config", "-c") and value is not None:
            content = read_yaml(value, "--config")
            fields = _model_options(content)
            for part in _SECTIONS:
                if isinstance(content.get(part), Mapping) and "class_path" in content[part]:
                    result.classes[part] = str(content[part]["class_path"])
            if "config" in fields and fields["config"] is None:
                result.model_config = None  # as where it is not said
            elif "config" in fields:
                rewritten = result.model_config is not None or isinstance(fields["config"], str)
                result.model_config = _merge(result.model_config, fields["config"])
            pretrained = fields.get("pretrained", pretrained)
            given = _mapping(_mapping(fields.get("optimizer")).get("options"))
            options.update(given)
            sources += bool(given)
            result.given |= set(fields)
            result.words += original
        elif section in _SECTIONS and value is not None and not rest:
            result.classes[section] = value
            result.words += original
        elif section not in _SECTIONS or path[-1] == "help":
            result.words += original
        elif rest.endswith("+"):
            is_one = value is not None and len(path) == 1 and value.lstrip()[:1] not in ("[", "{")
            result.words += [f"{name}={json.dumps([value])}"] if is_one else original  # a prompt `a: b` is no mapping
        elif value is None:
            raise UserError(f"{name} has no value; give it one")
        elif section == "model" and path[0] == "config":
            changes = load_value(value)
            for key in reversed(path[1:]):
                changes = {key: changes}
            result.model_config = _merge(result.model_config, changes)
            rewritten = True
        elif section == "model" and path[:2] == ["optimizer", "options"] and len(path) <= 3:
            result.given.add("optimizer")
            given = {path[2]: load_value(value)} if len(path) == 3 else load_value(value)
            if not isinstance(given, Mapping | None):
                raise UserError(f"{name} must be a mapping such as '{{\"momentum\": 0.9}}', not {value!r}")
            if not given:
                options.clear()
            options.update(given or {})
            sources = 2
        else:
            if section == "model":
                result.given.add(path[0])
                result.typed.add(path[0])
            if (section, path) == ("model", ["pretrained"]):
                pretrained = load_value(value)
            if (section, path) == ("model", ["optimizer"]):
                given = _mapping(_mapping(load_value(value)).get("options"))
                options.update(given)
                sources += bool(given)
            if (section, path) == ("data", ["store"]) and ": " in value and value.lstrip()[:1] not in ("{", '"', "'"):
                original = [f"{name}={json.dumps(value)}"]  # a folder `a: b` is no mapping
            result.words += _nested(section, path, value) if len(path) > 1 and path[0] != "dict_kwargs" else original
    if sources > 1:
        result.words.append(f"--model.optimizer={json.dumps({'options': options})}")
    if rewritten:
        # Behind everything else, as it sums up what came before.
        config = result.model_config
        result.words.append(f"--model.config={config if isinstance(config, str) else json.dumps(config)}")
    is_ours = result.classes.get("model") in (None, _LITLLM)
    helps = any(word.partition("=")[0].endswith("help") for word in words)  # which takes no more words
    if result.model_config is None and pretrained is None and is_ours and not helps:
        result.words.append(f"--model.config={DEFAULT_CONFIG}")  # so that the run's config.yaml says it
    return result


def each_option(words: list[str]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Name, value (None without one) and the original words of each option; positional words as names."""
    i = 0
    while i < len(words):
        name, equals, value = words[i].partition("=")
        if equals and name.startswith("--"):
            yield name, value, [words[i]]
        elif words[i].startswith("-") and i + 1 < len(words) and not words[i + 1].startswith("--"):
            yield words[i], words[i + 1], words[i : i + 2]
            i += 1
        else:
            yield words[i], None, [words[i]]
        i += 1


def _nested(section: str, path: list[str], value: str) -> list[str]:
    """``--model.generation.stop V`` as ``--model.generation={"stop": "V"}``, V still to be read."""
    nested: Any = value
    for key in reversed(path[1:]):
        nested = {key: nested}
    return [f"--{section}.{path[0]}={json.dumps(nested)}"]


def _merge(base: Any, change: Any) -> Any:
    """A configuration with a change on top: a mapping adds its fields, a name replaces everything."""
    if isinstance(change, str) and Path(change).suffix in (".yaml", ".yml"):
        change = read_yaml(change, "model.config")
    if isinstance(change, str):
        fields = config_like(change)  # an unknown name is refused here, before anything is built
        return change if change in PRESETS else fields  # a folder may be gone when the run is resumed
    if not isinstance(change, Mapping):
        raise UserError(
            "model.config must be a preset's name, a Hugging Face folder or a mapping of fields, got "
            f"{'null' if change is None else change!r}"
        )
    merged = {"preset": base} if isinstance(base, str) else dict(base or {})
    before = {**config_like(merged["preset"]), **merged} if "preset" in merged else merged
    for name, value in change.items():
        old = before.get(name)
        merged[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _model_options(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's options in a configuration file, with or without class_path."""
    model = content.get("model")
    if not isinstance(model, Mapping):
        return {}
    if "class_path" in model or "init_args" in model:
        model = model.get("init_args") or {}
    return model if isinstance(model, Mapping) else {}


def read_yaml(path: str, option: str) -> Mapping[str, Any]:
    """The mapping in a configuration file.

    Raises:
        UserError: a file that is missing, no YAML or no mapping; ``option`` is named.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{option} {path}: no such file; paths are relative to the working directory") from None
    except UnicodeDecodeError:
        raise UserError(f"{option} {path}: not UTF-8 text; give a YAML file") from None
    except OSError as error:
        raise UserError(f"{option} {path} can't be read: {error.strerror}") from None
    try:
        content = load_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = path if mark is None else f"{path}:{mark.line + 1}"
        raise UserError(f"{place} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds no mapping but {content!r:.60}; write sections such as `trainer:` and `model:`")
    return content


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def load_value(value: str) -> Any:
    """The value of a word: YAML, or the word itself where it is none."""
    try:
        return load_yaml(value)
    except yaml.YAMLError:
        return value
