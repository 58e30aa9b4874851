"""Cuts a trace to its first steps. Run as a program, and on the standard library alone, so that it starts at once:

``python trace_cut.py IN.json OUT.json MAX_BYTES`` prints how many steps are left.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

_MARK = "ProfilerStep#"
_BEGIN, _END = b"  {\n", (b"  }\n", b"  },\n")  # of an event, in the layout that the profiler writes


def main(source: str, target: str, limit: int) -> int:
    """Writes the cut trace.

    Args:
        source: a trace as the profiler has written it, not packed.
        target: the file to make.
        limit: bytes that it should have at most; at least one step stays.

    Returns:
        The number of steps that are left.

    Raises:
        ValueError: no steps are marked, or there are no more than would be left.
    """
    ends: list[float] = []
    size = 0
    for text, event in _parts(source):
        size += len(text)
        if event is not None and event.get("cat") == "user_annotation" and str(event["name"]).startswith(_MARK):
            ends.append(float(event["ts"]) + float(event["dur"]))
    ends.sort()
    left = max(1, int(len(ends) * limit / size))  # steps are much alike
    if left >= len(ends):
        raise ValueError(f"it has {len(ends)} marked steps")
    end = ends[left - 1]
    launches = {
        event["args"]["correlation"]
        for _, event in _parts(source)
        if event is not None and _is_launch(event) and float(event["ts"]) <= end
    }
    with open(target, "wb") as file:
        comma = b""
        for text, event in _parts(source):
            if event is None:
                file.write(_noted(text, left))
            elif _stays(event, end, launches):
                file.write(comma + b"  " + text.strip().rstrip(b","))
                comma = b",\n"
    return left


def _parts(path: str) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The trace's text in parts: events with what they say, and lines of the rest."""
    with open(path, "rb") as file:
        lines: list[bytes] = []
        for line in file:
            if lines:
                lines.append(line)
                if line in _END:
                    text = b"".join(lines)
                    lines = []
                    yield text, json.loads(text.strip().rstrip(b","))
            elif line == _BEGIN:
                lines = [line]
            else:
                yield line, None
        if lines:
            raise ValueError("its last event is not whole")


def _is_launch(event: dict[str, Any]) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver", "xpu_runtime") and "correlation" in event.get("args", {})


def _stays(event: dict[str, Any], end: float, launches: set[Any]) -> bool:
    if event.get("ph") == "M":
        return True
    if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):  # runs later than the step that launched it
        correlation = event.get("args", {}).get("correlation")
        if correlation in launches:
            return True
    return float(event.get("ts", 0)) < end


def _noted(line: bytes, left: int) -> bytes:
    """The line, with a note in what lit-llm says of the trace."""
    head, colon, value = line.partition(b":")
    if head.strip() != b'"lit_llm"' or not colon:
        return line
    noted = json.loads(value.strip().rstrip(b","))
    noted["truncated_to_steps"] = left
    return head + b": " + json.dumps(noted).encode() + (b"," if value.rstrip().endswith(b",") else b"") + b"\n"


if __name__ == "__main__":
    try:
        print(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
