"""Reading traces: a made set of many ranks with planted faults, and one big trace beside HTA.

    python -m benchmarks.traces --ranks 128                       # wall, processor time, memory; planted against found
    python -m benchmarks.traces --ranks 128 --healthy             # the same without faults: nothing may be found
    python -m benchmarks.traces --against_hta PYTHON [--trace FILE]

The set is written to a temporary folder, or to ``--folder``, where the next call finds it again. PYTHON is the
interpreter of an environment with holistictraceanalysis; FILE a trace that is repeated, with shifted times and
identities, until it has ``--megabytes`` (default: a made one). Each measurement is a process of its own, the two take
turns, and the figures are medians over the rounds: processor time (user and system, with child processes) and the peak
of the proportional memory of a process and its children. Linux only. Figures go to benchmarks/results/traces.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, save, table

MIB = 2**20


def measure(command: list[str]) -> dict[str, Any]:
    """Runs a command that prints a line of JSON last; its seconds, processor seconds and peak MiB beside that.

    Raises:
        RuntimeError: the command failed.
    """
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output)
        peak, samples = 0, 0
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak, samples = max(peak, _memory(process.pid)), samples + 1
            time.sleep(0.03)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with {process.returncode}")
    return {
        "seconds": seconds,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mib": peak / MIB,
        "samples": samples,
        **json.loads(lines[-1]),
    }


def _memory(pid: int) -> int:
    """Bytes of a process and its children, pages that several share divided among them."""
    total = 0
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total += sum(_memory(int(child)) for child in (thread / "children").read_text().split())
    except (OSError, StopIteration):  # has ended meanwhile
        pass
    return total


def make_set(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Writes the made set, unless the same one is there."""
    from tests.synthetic_traces import write_set

    plan = folder / "plan.txt"  # no name that a reader of traces takes for one
    asked = json.dumps(fields, sort_keys=True)
    if plan.exists():
        there = json.loads(plan.read_text())
        if there["asked"] == asked and all(Path(file).exists() for file in there["files"]):
            return there
        raise SystemExit(f"{folder} holds another set; give an empty folder")
    start = time.perf_counter()
    made = {"asked": asked, **write_set(folder, processes=os.cpu_count() or 1, **fields)}
    print(f"made {len(made['files'])} files in {time.perf_counter() - start:.0f} s", flush=True)
    plan.write_text(json.dumps(made))
    return made


def faults(ranks: int, layers: int, first_step: int) -> dict[str, Any]:
    """A slow rank, a layer without overlap and one data stall."""
    return {
        "slow_rank": {ranks * 3 // 10: 1.25},
        "unhidden_layer": [layers // 3],
        "data_stall": [(ranks * 7 // 10, first_step + 2, 900.0)],
    }


def check(fields: dict[str, Any], found: dict[str, Any]) -> list[list[str]]:
    """Planted against found: rows of (what, planted, found, right or not)."""
    verdicts = found["verdicts"]
    loud = [v for v in verdicts if v["severity"] != "info"]
    rows = []
    slow = next(iter(fields.get("slow_rank", {})), None)
    straggler = found["straggler"] or {"rank": None, "cause": None}
    want = "none" if slow is None else f"rank {slow}, slow_device"
    got = "none" if straggler["rank"] is None else f"rank {straggler['rank']}, {straggler['cause']}"
    rows.append(["straggler", want, got, "yes" if want == got else "NO"])
    layer = next(iter(fields.get("unhidden_layer", [])), None)
    named = [v for v in verdicts if v["code"] == "prefetch_missing"]
    want = "none" if layer is None else f"layers.{layer}"
    texts = "; ".join(f"{v['message']} {v['evidence']}" for v in named)
    right = (layer is None and not named) or (layer is not None and f"layers.{layer}" in texts)
    rows.append(["layer without overlap", want, texts or "none", "yes" if right else "NO"])
    stall = next(iter(fields.get("data_stall", [])), None)
    named = [v for v in verdicts if v["code"] == "one_off_stall"]
    want = "none" if stall is None else f"rank {stall[0]}, step {stall[1]}"
    got = "; ".join(f"rank {v['ranks']}, step {v['steps']}" for v in named) or "none"
    right = not named if stall is None else any(v["ranks"] == [stall[0]] and v["steps"] == [stall[1]] for v in named)
    rows.append(["data stall", want, got, "yes" if right and len(named) <= 1 else "NO"])
    expected = {"straggler"} if slow is not None else set()
    expected |= {"prefetch_missing"} if layer is not None else set()
    expected |= {"one_off_stall"} if stall is not None else set()
    # Waiting for the planted ones may also be told as waiting.
    invented = [v["code"] for v in loud if v["code"] not in expected | ({"communication_bound"} if expected else set())]
    rows.append(["anything else above info", "none", ", ".join(invented) or "none", "NO" if invented else "yes"])
    return rows


def analyse(paths: list[str], processes: int | None) -> dict[str, Any]:
    """In a process of its own: what lit_llm finds, as JSON types."""
    usage_before = time.process_time()
    from lit_llm.trace.analysis import analyze

    imported = time.process_time() - usage_before
    found = analyze(paths, processes=processes)
    return {
        "import_processor_seconds": imported,
        "straggler": found.straggler and {"rank": found.straggler.rank, "cause": found.straggler.cause},
        "ranks": len(found.ranks),
        "verdicts": [
            {name: getattr(v, name) for name in ("code", "severity", "ranks", "steps", "message", "evidence")}
            for v in found.verdicts
        ],
        "health": [f"{h.rank}: {h.message}" for h in found.health][:10],
    }


def run_set(arguments: argparse.Namespace) -> dict[str, Any]:
    """Makes (or finds) the set, analyses it and prints."""
    shape = {"ranks": arguments.ranks, "layers": arguments.layers, "steps": 4, "kernels": arguments.kernels}
    fields: dict[str, Any] = {**shape, "kernel_us": 100.0, "compress": not arguments.plain}
    if not arguments.healthy:
        fields.update(faults(arguments.ranks, arguments.layers, 100))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files = make_set(folder, fields)["files"]
        size = sum(Path(file).stat().st_size for file in files) / MIB
        work = {"paths": [str(folder)], "processes": arguments.processes}
        found = measure([sys.executable, "-m", "benchmarks.traces", "--worker", json.dumps(work)])
    rows = check(fields, found)
    print(table(("what", "planted", "found", "right"), rows))
    for verdict in found["verdicts"]:
        print(f"{verdict['severity']:>8} {verdict['code']}: {verdict['message']}")
    print(
        f"{found['ranks']} ranks, {size:.0f} MiB of files: {found['seconds']:.1f} s of wall time, "
        f"{found['processor_seconds']:.1f} s of processor time, at most {found['peak_mib']:.0f} MiB"
    )
    right = all(row[-1] == "yes" for row in rows)
    return {"fields": fields, "mib_of_files": size, "all_found_none_invented": right, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark of reading traces.")
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kernels", type=int, default=56, help="of a layer's forward; 56: about 35 MB a rank")
    parser.add_argument("--healthy", action="store_true", help="plant no faults")
    parser.add_argument("--plain", action="store_true", help="write .json, not .json.gz")
    parser.add_argument("--folder", help="of the set, kept for the next call; default: a temporary one")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--against_hta", metavar="PYTHON", help="an interpreter that has holistictraceanalysis")
    parser.add_argument("--trace", help="to be repeated, for --against_hta; default: a made one")
    parser.add_argument("--megabytes", type=int, default=110)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(analyse(**json.loads(arguments.worker))))
        return
    stored = RESULTS / "traces.json"
    data = json.loads(stored.read_text())["data"] if stored.exists() else {}  # what was not measured now stays
    if arguments.against_hta:
        from benchmarks.traces_hta import run_against_hta

        found = run_against_hta(arguments)
        data.setdefault("against_hta", {})[found["trace"]] = found
    else:
        data["healthy" if arguments.healthy else "planted"] = run_set(arguments)
    print(f"written to {save('traces', data).name}")


if __name__ == "__main__":
    main()
