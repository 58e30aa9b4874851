"""``lit-llm trace``: what the profiler recorded on all ranks, in words, as JSON and as a page."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from lit_llm.cli.options import OptionParser
from lit_llm.errors import UserError


def parser() -> OptionParser:
    """The options of the command."""
    options = OptionParser(
        "trace",
        "Reads the traces of all ranks and says which rank lags and why, what communication hides, and what to change.",
    )
    add = options.add_argument
    add("paths", metavar="PATH", nargs="+", help="trace files, a folder of them, or a run's folder (its last window)")
    add("--json", metavar="FILE", help="write all figures to a file")
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
    from rich.console import Console

    from lit_llm.trace.analysis import analyze
    from lit_llm.trace.conditions import Condition
    from lit_llm.trace.diff import compare
    from lit_llm.trace.diff_terminal import render_difference
    from lit_llm.trace.html import write_html
    from lit_llm.trace.json_report import write_json
    from lit_llm.trace.terminal import render

    condition = None if args.fail_on is None else Condition(args.fail_on)
    if args.processes is not None and args.processes < 1:
        raise UserError(f"--processes must be at least 1; got {args.processes}")
    for option in ("json", "html"):
        file = getattr(args, option)
        if file is not None and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
            wrong = "is a folder" if Path(file).is_dir() else "its folder does not exist"
            raise UserError(f"--{option} {file}: {wrong}; name a file")
        if file is not None and any(Path(file).absolute() == Path(path).absolute() for path in args.paths):
            raise UserError(f"--{option} {file} would replace a trace that is to be read; name another file")
    if args.json is not None and args.html is not None and Path(args.json).absolute() == Path(args.html).absolute():
        raise UserError(f"--json and --html are both {args.json}; name two files")
    analysis = analyze(args.paths, processes=args.processes, timeline=args.html is not None)
    difference = None
    if args.against is not None:
        difference = compare(analysis, analyze(args.against, processes=args.processes))
    if args.json is not None:  # first, as the reader of the report may have gone before its end
        write_json(analysis, args.json, difference)
    if args.html is not None:
        write_html(analysis, args.html, difference)
    console = Console()
    render(analysis, console)
    if difference is not None:
        render_difference(difference, console)
    for file in filter(None, (args.json, args.html)):
        console.print(f"written: {file}", markup=False, highlight=False, soft_wrap=True)
    if condition is not None and (why := condition.holds(analysis)) is not None:
        console.print(f"fail_on: {why}", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0
