"""One line out of what jsonargparse says of a value or an option that it does not accept."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lit_llm.cli.options import did_you_mean

_KEY = re.compile(r'^( *)(?:- )?Parser key "([^"]+)"')
_GIVEN = re.compile(r"^ *(?:- )?Given value: (.*)$", re.M)
_NESTED = re.compile(r"NestedArg\(key='[^']*', val=(.*)\)$")
_GOT = re.compile(r"Expected an? (.+?)\. Got value: (.*)$", re.M)
_SUBTYPES = re.compile(r"^ *Subtypes: \[(.*)\]$", re.M)
_LITERALS = re.compile(r"typing\.Literal\[([^\]]*)\]")
_CLASS = re.compile(r"<class '([^']+)'>")
_UNKNOWN = (
    re.compile(r"Option '([^']+)' is not accepted"),
    re.compile(r"Group '([^']+)' does not accept option '([^']+)'"),
    re.compile(r"unrecognized arguments: (\S+)"),
)
_BAD_CLASS = (
    re.compile(r"Problem with given class_path '[^']+':\s*\n\s*(?!Parser key|- )(.+)"),
    re.compile(r"Import path (does not correspond to a subclass of \w+)"),
    re.compile(r"(?:Expected a dot import path string): \S+()"),
)


def explain(message: str, known: Iterable[str]) -> str:
    """What is wrong, with the option, the value and the way out.

    Args:
        message: of jsonargparse, over many lines.
        known: names of all options, without dashes; the nearest is offered for an unknown one.
    """
    endings = (".help", ".class_path", ".init_args")
    names = sorted({name.replace(".init_args.", ".") for name in known if not name.endswith(endings)})
    path, block = _innermost(message)
    for pattern in _UNKNOWN:
        if unknown := pattern.search(message):
            option = ".".join(unknown.groups()).removeprefix("--").partition("=")[0]
            if pattern is _UNKNOWN[-1] and not unknown.group(1).startswith("-"):
                if option.endswith((".yaml", ".yml")):
                    return f"unexpected word {option!r}; did you mean --config {option}?"
                return f"unexpected word {option!r}; options begin with --"
            return _unknown(f"{path}.{option}" if path else option, names)
    if required := re.search(r'arguments are required: (.+)|Key "([^"]+)" is required', message):
        name = required.group(1) or required.group(2)
        return f"{f'{path}.' if path else ''}{name} is missing; give it a value"
    if message.startswith("argument ") and "expected" in message:
        return f"{message.removeprefix('argument ').partition(':')[0]} needs a value"
    value = _given(block) if _given(block) is not None else _given(message)
    for pattern in _BAD_CLASS:
        if found := pattern.search(message):
            cause = f": {found.group(1)}" if found.group(1) else ""
            return f"{path}: {value} is no class to use here{cause}; give module.Class, importable from here"
    if "Unable to load config" in message:
        return f"{path}: {value} does not fit, expected a mapping of its options; give them singly, as --{path}.NAME"
    if value is not None and (subtypes := _SUBTYPES.search(block)):
        if path == "data.store":
            return f"{path}: {value} does not fit; give a folder, or several with weights, as {{FOLDER: 1, OTHER: 2}}"
        return f"{path}: {value} does not fit, expected {_types(subtypes.group(1))}"
    if got := _GOT.search(block) or _GOT.search(message):
        return f"{path}: {_plain(got.group(2))} does not fit, expected {_types(got.group(1))}"
    return " ".join(message.split())


def _innermost(message: str) -> tuple[str, str]:
    """The full name of the option that is deepest in the message, and the lines about it alone."""
    lines = message.splitlines()
    chain: list[tuple[int, str]] = []
    start = 0
    for number, line in enumerate(lines):
        found = _KEY.match(line)
        if found and (not chain or (len(found.group(1)) > chain[-1][0] and found.group(2) != chain[-1][1])):
            chain.append((len(found.group(1)), found.group(2)))
            start = number + 1
    if not chain:
        return "", message
    block = []
    for line in lines[start:]:
        if line.strip() and len(line) - len(line.lstrip()) <= chain[-1][0]:
            break
        block.append(line)
    return ".".join(name for _, name in chain), "\n".join(block)


def _given(text: str) -> str | None:
    found = _GIVEN.search(text)
    if not found:
        return None
    nested = _NESTED.match(found.group(1))
    return _plain(nested.group(1).strip("'") if nested else found.group(1))


def _plain(value: str) -> str:
    """A value as a user would write it."""
    return "null" if value == "None" else repr(value if len(value) <= 100 else f"{value[:97]}...")


def _unknown(full: str, names: list[str]) -> str:
    # Of a nested name the first unknown part is the culprit: modl.optimizer.lr.
    parents = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1)}
    parts = full.split(".")
    for depth in range(1, len(parts)):
        head = ".".join(parts[:depth])
        if head not in parents and head not in names:
            return f"unknown option {full}; {did_you_mean(head, sorted(parents))}"
    return f"unknown option {full}; {did_you_mean(full, sorted({*names, *parents}))}"


def _types(text: str) -> str:
    """`<class 'float'>, <class 'NoneType'>` as `float or null`."""
    literals = [part.strip().strip("'") for group in _LITERALS.findall(text) for part in group.split(",")]
    kinds = sorted(set(literals))
    rest = _CLASS.sub(lambda found: found.group(1), _LITERALS.sub("", text))
    for part in re.split(r",(?![^\[]*\])", rest):
        kind = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", part.strip()).replace("NoneType", "null")
        if kind and kind not in kinds:
            kinds.append(kind)
    hint = '; a list is written as ["a", "b"]' if any(kind.startswith("list") for kind in kinds) else ""
    return (f"{', '.join(kinds[:-1])} or {kinds[-1]}" if len(kinds) > 1 else "".join(kinds)) + hint
