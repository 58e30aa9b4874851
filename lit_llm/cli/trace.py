"""``lit-llm trace``: what the profiler recorded on all ranks, in words, as JSON and as a page."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_llm.cli.options import OptionParser
from lit_llm.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


def parser() -> OptionParser:
    """The options of the command."""
    options = OptionParser(
        "trace",
        "Reads the traces of all ranks and says which rank lags and why, what communication hides, and what to change.",
    )
    add = options.add_argument
    add("paths", metavar="PATH", nargs="+", help="trace files, a folder of them, or a run's folder (its last window)")
    add("--json", metavar="FILE", help="write all figures to a file; -: to stdout, and the report to stderr")
    add("--html", metavar="FILE", help="write a page with pictures, one file that needs no network")
    add("--against", metavar="PATH", help="compare with another run's traces: what became slower")
    add(
        "--fail_on",
        metavar="EXPR",
        help='exit with 1 if it holds, such as "comm_exposed_pct>15" or "straggler_lag_us>5000 or warnings>0"',
    )
    add("--processes", type=int, metavar="N", help="that read files side by side (default: one for each CPU)")
    return options


def run(args: Namespace) -> int:
    """Analyses, reports, and gives 1 where ``--fail_on`` holds.

    Raises:
        UserError: nothing is a trace, an expression that is none, a file that can't be written.
    """
    from lit_llm.trace.analysis import analyze
    from lit_llm.trace.conditions import FIGURES, Condition, shown
    from lit_llm.trace.diff import compare
    from lit_llm.trace.diff_terminal import render_difference
    from lit_llm.trace.html import write_html
    from lit_llm.trace.json_report import to_json, write_json
    from lit_llm.trace.terminal import render

    condition = None if args.fail_on is None else Condition(args.fail_on)
    _check(args)
    analysis = analyze(args.paths, processes=args.processes, timeline=args.html is not None)
    difference = None
    if args.against is not None:
        difference = compare(analysis, analyze(args.against, processes=args.processes))
    # The files first, as the reader of the report may have gone before its end.
    if args.json == "-":
        print(json.dumps(to_json(analysis, difference), allow_nan=False))
    elif args.json is not None:
        write_json(analysis, args.json, difference)
    if args.html is not None:
        write_html(analysis, args.html, difference)
    console = _console(stderr=args.json == "-")
    render(analysis, console)
    if difference is not None:
        render_difference(difference, console)
    lines = [f"written: {file}" for file in (args.json, args.html) if file not in (None, "-")]
    failed = False
    if condition is not None:
        why = condition.holds(analysis)
        failed = why is not None
        figures = ", ".join(f"{name} is {shown(FIGURES[name](analysis))}" for name in condition.names)
        lines.append(f"fail_on: {why}" if failed else f"fail_on does not hold: {figures}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return int(failed)


def _check(args: Namespace) -> None:
    """Refuses what would fail only after the work, or lose a file."""
    if args.processes is not None and args.processes < 1:
        raise UserError(f"--processes must be at least 1; got {args.processes}")
    for option in ("json", "html"):
        name = getattr(args, option)
        if name is None or (option == "json" and name == "-"):
            continue
        file = Path(name).absolute()
        if file.is_dir() or not file.parent.is_dir():
            wrong = "is a folder" if file.is_dir() else "its folder does not exist"
            raise UserError(f"--{option} {name}: {wrong}; name a file")
        if any(file == Path(path).absolute() for path in args.paths):
            raise UserError(f"--{option} {name} would replace a trace that is to be read; name another file")
    if None not in (args.json, args.html) and Path(args.json).absolute() == Path(args.html).absolute():
        raise UserError(f"--json and --html are both {args.json}; name two files")


def _console(stderr: bool) -> Console:
    from rich.console import Console

    class Pipe(Console):
        """Tells the caller that the reader has gone, instead of ending with 1, which is a verdict here."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Pipe(stderr=stderr)
