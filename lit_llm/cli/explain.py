"""One line out of what jsonargparse says of a value or an option that it does not accept."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lit_llm.cli.options import did_you_mean

_KEY = re.compile(r'^( *)(?:- )?Parser key "([^"]+)"')
_GIVEN = re.compile(r"^ *(?:- )?Given value: (.*)$")
_GOT = re.compile(r"Expected an? (.+?)\. Got value: (.*)$")
_SUBTYPES = re.compile(r"^ *Subtypes: \[(.*)\]$")
_NOT_ACCEPTED = re.compile(r"Option '([^']+)' is not accepted")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.+)$", re.M)
_LITERALS = re.compile(r"typing\.Literal\[([^\]]*)\]")
_CLASS = re.compile(r"<class '([^']+)'>")
# What follows these says more of the cause than the types that did not match.
_CAUSES = (
    re.compile(r"Problem with given class_path '([^']+)':\s*\n\s*(?!Parser key|- )(.+)"),
    re.compile(r"(Import path does not correspond to a subclass of \w+)"),
    re.compile(r"(Expected a dot import path string: \S+)"),
    re.compile(r'(Key "[^"]+" is required[^\n]*)'),
)


def explain(message: str, known: Iterable[str]) -> str:
    """What is wrong, with the option, the value and the way out.

    Args:
        message: of jsonargparse, over many lines.
        known: names of all options, without dashes; the nearest is offered for an unknown one.
    """
    names = sorted({name.replace(".init_args.", ".") for name in known})
    path, block = _innermost(message)
    unknown = _NOT_ACCEPTED.search(message) or _UNRECOGNIZED.search(message)
    if unknown:
        return _unknown(unknown.group(1), path, names)
    required = re.search(r"the following arguments are required: (.+)", message)
    if required:
        return f"{required.group(1)} is missing"
    if message.startswith("argument ") and "expected" in message:
        return f"{message.removeprefix('argument ')}; give it a value"
    for pattern in _CAUSES:
        found = pattern.search(message)
        if found:
            given = _given(block) or _given(message.splitlines())
            return f"{path}: {': '.join(found.groups())}{_value(given)}; {_class_hint(found.group(0))}"
    got = _GOT.search("\n".join(block)) or _GOT.search(message)
    subtypes = next((m.group(1) for m in map(_SUBTYPES.match, block) if m), None)
    given = _given(block)
    if subtypes is not None and given is not None:
        return f"{path}: {given!r} does not fit, expected {_types(subtypes)}"
    if got:
        return f"{path}: {got.group(2)!r} does not fit, expected {_types(got.group(1))}"
    return " ".join(message.split())


def _innermost(message: str) -> tuple[str, list[str]]:
    """The full name of the option that is deepest in the message, and the lines about it alone."""
    lines = message.splitlines()
    chain: list[tuple[int, str]] = []
    start = 0
    for number, line in enumerate(lines):
        found = _KEY.match(line)
        if not found or (chain and len(found.group(1)) <= chain[-1][0]):
            continue
        chain.append((len(found.group(1)), found.group(2)))
        start = number + 1
    depth = chain[-1][0] if chain else -1
    end = next(
        (n for n in range(start, len(lines)) if lines[n].strip() and _indent(lines[n]) <= depth and start < n),
        len(lines),
    )
    return ".".join(name for _, name in chain), lines[start:end] if chain else lines


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _given(lines: Iterable[str]) -> str | None:
    for line in lines:
        found = _GIVEN.match(line)
        if found:
            nested = re.match(r"NestedArg\(key='([^']*)', val=(.*)\)$", found.group(1))
            return nested.group(2).strip("'") if nested else found.group(1)
    return None


def _value(given: str | None) -> str:
    return "" if given is None or len(given) > 80 else f" (got {given!r})"


def _class_hint(cause: str) -> str:
    if "required" in cause:
        return "give it"
    return "name a class as module.Class, importable from the working directory"


def _unknown(words: str, path: str, names: list[str]) -> str:
    option = words.split()[0]
    if not option.startswith("--") and "unrecognized" not in words and not path and option not in names:
        dotted = option
    else:
        dotted = option.removeprefix("--").partition("=")[0]
    full = f"{path}.{dotted}" if path else dotted
    # Of a nested name the first unknown part is the culprit: modl.optimizer.lr.
    parents = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1)}
    parts = full.split(".")
    for depth in range(1, len(parts)):
        head = ".".join(parts[:depth])
        if head not in parents and head not in names:
            return f"unknown option {full}: {did_you_mean(head, sorted(parents))}"
    return f"unknown option {full}; {did_you_mean(full, names)}"


def _types(text: str) -> str:
    """`<class 'float'>, <class 'NoneType'>` as `float or null`."""
    kinds: list[str] = []
    literals = [part.strip().strip("'") for group in _LITERALS.findall(text) for part in group.split(",")]
    kinds += sorted(set(literals))
    rest = _CLASS.sub(lambda m: m.group(1).rpartition(".")[2], _LITERALS.sub("", text))
    for part in re.split(r",(?![^\[]*\])", rest):
        part = re.sub(r"\b[\w.]+\.(\w+)", r"\1", part.strip()).replace("NoneType", "null")
        if part and part not in kinds:
            kinds.append(part)
    hint = '; a list is written as [a, b] or ["a", "b"]' if any(kind.startswith("list") for kind in kinds) else ""
    return f"{' or '.join([', '.join(kinds[:-1]), kinds[-1]] if len(kinds) > 1 else kinds)}{hint}"
