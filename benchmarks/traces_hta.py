"""The part of benchmarks.traces that reads one big trace with lit_llm and with HTA (HolisticTraceAnalysis)."""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import table
from benchmarks.traces import MIB, measure

# Runs under the other interpreter. What a version of HTA can't do with a trace it says, and the rest still counts.
_HTA = """
import json, sys, time
from hta.trace_analysis import TraceAnalysis
imported = time.process_time()
done = []
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
for name in ("get_temporal_breakdown", "get_comm_comp_overlap", "get_gpu_kernel_breakdown"):
    try:
        getattr(analysis, name)(visualize=False)
        done.append(name)
    except Exception as error:
        done.append(f"{name} failed: {type(error).__name__}: {error}"[:200])
print(json.dumps({"import_processor_seconds": imported, "done": done}))
"""


def repeated(source: Path | None, target: Path, megabytes: int) -> int:
    """Writes a trace of at least so many megabytes of text; the number of its events.

    ``source`` is repeated, each copy behind the one before, with correlation and flow identities and step numbers of
    its own. Without one, a made trace is written.
    """
    if source is None:
        return _made(target, megabytes)
    data = source.read_bytes()
    trace = json.loads(gzip.decompress(data) if source.suffix == ".gz" else data)
    events = trace["traceEvents"]
    timed = [e for e in events if e.get("ph") in ("X", "s", "f", "t", "i") and "ts" in e and e.get("cat") != "Trace"]
    among = {id(e) for e in timed}
    rest = [e for e in events if id(e) not in among]
    period = max(e["ts"] + e.get("dur", 0) for e in timed) - min(e["ts"] for e in timed) + 1000
    identities = 1 + max(_identity(e) for e in timed)
    steps = len({e["name"] for e in timed if str(e.get("name")).startswith("ProfilerStep#")})
    size = len(json.dumps(timed))
    copies = -(-megabytes * 10**6 // size)
    head = json.dumps({k: v for k, v in trace.items() if k != "traceEvents"})
    with gzip.open(target, "wt", compresslevel=1) as file:
        file.write(head[:-1] + ', "traceEvents": [\n' + ",\n".join(map(json.dumps, rest)))
        for copy in range(copies):
            for event in timed:
                file.write(",\n" + json.dumps(_shifted(event, copy, copy * period, copy * identities, copy * steps)))
        file.write("\n]}\n")
    return copies * len(timed)


def _identity(event: dict[str, Any]) -> int:
    numbers = [event.get("id"), *(event.get("args", {}).get(key) for key in ("correlation", "External id"))]
    return max((n for n in numbers if isinstance(n, int)), default=0)


def _shifted(event: dict[str, Any], copy: int, later: float, identities: int, steps: int) -> dict[str, Any]:
    if copy == 0:
        return event
    event = {**event, "ts": round(event["ts"] + later, 3)}
    if isinstance(event.get("id"), int):
        event["id"] += identities
    if str(event.get("name")).startswith("ProfilerStep#"):
        event["name"] = f"ProfilerStep#{int(event['name'].split('#')[1]) + steps}"
    if "args" in event:
        arguments = event["args"] = dict(event["args"])
        for key in ("correlation", "External id"):
            if isinstance(arguments.get(key), int) and arguments[key] > 0:
                arguments[key] += identities
    return event


def _made(target: Path, megabytes: int) -> int:
    from tests.synthetic_traces import write_set

    with tempfile.TemporaryDirectory() as folder:
        steps = max(2, round(megabytes / 9))  # about 9 MB a step
        plan = write_set(folder, ranks=2, layers=32, steps=steps, kernels=56, kernel_us=100.0, only=[0])
        data = Path(plan["files"][0]).read_bytes()
    target.write_bytes(data)
    return gzip.decompress(data).count(b'"ph": "')


def run_against_hta(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both on the same file, in turns; prints and gives the medians."""
    results: dict[str, list[dict[str, Any]]] = {"lit_llm": [], "hta": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-00000.json.gz"
        events = repeated(Path(arguments.trace) if arguments.trace else None, path, arguments.megabytes)
        with gzip.open(path) as file:
            size = sum(len(part) for part in iter(lambda: file.read(MIB), b""))
        print(f"{size / 1e6:.0f} MB of text, {events:,} events", flush=True)
        ours = json.dumps({"paths": [str(path)], "processes": 1})
        commands = {
            "lit_llm": [sys.executable, "-m", "benchmarks.traces", "--worker", ours],
            "hta": [arguments.against_hta, "-c", _HTA, str(path)],
        }
        for _ in range(arguments.rounds):
            for name, command in commands.items():
                results[name].append(measure(command))
                print(f"{name}: {results[name][-1]['processor_seconds']:.1f} s of processor time", flush=True)
    medians = {
        name: {
            key: statistics.median(r[key] for r in rounds)
            for key in ("seconds", "processor_seconds", "import_processor_seconds", "peak_mib")
        }
        for name, rounds in results.items()
    }
    for median in medians.values():
        median["work_processor_seconds"] = median["processor_seconds"] - median["import_processor_seconds"]
    columns = ("seconds", "processor_seconds", "work_processor_seconds", "peak_mib")
    rows: list[list[Any]] = [[name, *(median[c] for c in columns)] for name, median in medians.items()]
    ratios = {c: medians["hta"][c] / medians["lit_llm"][c] for c in columns}
    rows.append(["hta / lit_llm", *ratios.values()])
    print(table(("reader", "wall s", "processor s", "of which not imports", "peak MiB"), rows))
    done = results["hta"][-1]["done"]
    print("HTA did: " + ", ".join(done))
    source = Path(arguments.trace).name if arguments.trace else "made"
    return {
        "trace": source, "megabytes": size / 1e6, "events": events, "rounds": arguments.rounds,
        "medians": medians, "ratios": ratios, "hta_did": done,
    }  # fmt: skip
