"""Which files are read, and whether they belong together."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from lit_llm.errors import UserError
from lit_llm.trace.file_set import FileFacts, check_set, named, ranges
from lit_llm.trace.finding import find, looks_like_trace
from lit_llm.trace.reader import read

SECOND = 10**9
START = 1_790_857_026 * SECOND


def write(path: Path, rank: int | None = None, age: float = 0, **more: object) -> Path:
    """A small trace; ``age`` in seconds before others."""
    event = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "pid": 1, "tid": 1, "ts": 5.5, "dur": 1.0}
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    text = json.dumps({"schemaVersion": 1, **info, **more, "traceEvents": [event]}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def named_in(files: list[Path], root: Path) -> list[str]:
    return [str(file.relative_to(root)) for file in files]


def test_files_and_folders_of_traces(tmp_path: Path) -> None:
    for name in ("rank10.pt.trace.json", "rank2.json", "rank1.json.gz"):
        write(tmp_path / "t" / name)
    (tmp_path / "t" / "metrics.json").write_text('{"loss": 1}')
    (tmp_path / "t" / "notes.txt").write_text("traceEvents")
    (tmp_path / "t" / "rank3.json").write_text("")
    (tmp_path / "t" / "rank4.json").write_text('{"a": 1}')
    found = find([tmp_path / "t"])
    assert [file.name for file in found.files] == ["rank1.json.gz", "rank2.json", "rank10.pt.trace.json"]
    assert found.source == str(tmp_path / "t")
    assert (found.window, found.others, found.leftovers) == (None, [], [])
    assert sorted(found.notes) == ["rank3.json is empty and is left out", "rank4.json is no trace and is left out"]
    one = find([str(tmp_path / "t" / "rank2.json")])
    assert (one.files, one.source) == ([tmp_path / "t" / "rank2.json"], str(tmp_path / "t" / "rank2.json"))
    # A file that is named is read, whatever it looks like: the reader says what it is.
    assert find([tmp_path / "t" / "metrics.json"]).files == [tmp_path / "t" / "metrics.json"]
    two = find([tmp_path / "t" / "rank2.json", tmp_path / "t"])
    assert [file.name for file in two.files] == ["rank2.json", "rank1.json.gz", "rank10.pt.trace.json"]


@pytest.mark.parametrize("given", ["", "traces", "traces/step-001000"])
def test_the_last_window_of_a_run(tmp_path: Path, given: str) -> None:
    run = tmp_path / "run"
    write(run / "checkpoints" / "step-9.json")
    for step in (200, 1000, 30):
        for rank in (1, 0):
            write(run / "traces" / f"step-{step:06d}" / f"rank-{rank:05d}.json.gz", rank)
    found = find([run / given])
    folder = "traces/step-001000"
    assert named_in(found.files, run) == [f"{folder}/rank-00000.json.gz", f"{folder}/rank-00001.json.gz"]
    assert found.window == "step-001000"
    if given == "traces/step-001000":
        assert (found.others, found.notes) == ([], [])
    else:
        assert [Path(name).name for name in found.others] == ["step-000030", "step-000200"]
        assert found.notes == ["3 windows; step-001000, the last, is read; give another folder to read that"]


def test_windows_of_a_second_run_in_the_same_folder(tmp_path: Path) -> None:
    write(tmp_path / "step-000100" / "rank-00000.json.gz", age=90)
    write(tmp_path / "step-000200" / "rank-00000.json.gz", age=80)
    write(tmp_path / "step-000100-2" / "rank-00000.json.gz", age=10)
    found = find([tmp_path])
    assert found.window == "step-000200"
    assert "(step-000100-2 was written later)" in found.notes[0]
    write(tmp_path / "step-000200-2" / "rank-00000.json.gz", age=5)
    write(tmp_path / "step-000200-10" / "rank-00000.json.gz", age=1)
    found = find([tmp_path])
    assert found.window == "step-000200-10"
    assert "later" not in found.notes[0]


def test_unfinished_files(tmp_path: Path) -> None:
    window = tmp_path / "traces" / "step-000100"
    write(window / "rank-00000.json.gz", 0)
    (window / "rank-00001.json.gz.tmp").write_text('{"traceEvents": [')
    (window / ".rank-00002.json.gz.partial").write_text("")
    (window / ".rank-00002.json").write_text('{"traceEvents": [')
    found = find([tmp_path])
    assert [file.name for file in found.files] == ["rank-00000.json.gz"]
    assert [file.name for file in found.leftovers] == [
        ".rank-00002.json",
        ".rank-00002.json.gz.partial",
        "rank-00001.json.gz.tmp",
    ]
    assert len(found.notes) == 1
    assert "rank-00001.json.gz.tmp" in found.notes[0]
    later = tmp_path / "traces" / "step-000200"
    later.mkdir()
    (later / "rank-00000.json.gz.tmp").write_text("")
    found = find([tmp_path])
    assert found.window == "step-000100"
    assert found.notes[0] == "step-000200 holds unfinished traces only"
    with pytest.raises(
        UserError, match=r"step-000200 holds only unfinished traces.+step-000200/rank-00000.json.gz.tmp$"
    ):
        find([later])


def test_other_folders(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        write(tmp_path / "a" / f"rank_{rank}" / "trace.json", rank)
    found = find([tmp_path / "a"])
    assert named_in(found.files, tmp_path) == ["a/rank_0/trace.json", "a/rank_1/trace.json", "a/rank_10/trace.json"]
    write(tmp_path / "b" / "x" / "version_0" / "host_1.123.pt.trace.json", age=9)
    write(tmp_path / "b" / "x" / "version_1" / "host_1.124.pt.trace.json", age=3)
    write(tmp_path / "b" / "x" / "version_2" / "host_1.125.pt.trace.json", age=6)
    write(tmp_path / "b" / "x" / "version_1" / "deeper" / "y.json", age=0)
    found = find([tmp_path / "b"])
    assert named_in(found.files, tmp_path) == ["b/x/version_1/host_1.124.pt.trace.json"]
    assert found.others == ["x/version_0", "x/version_2"]
    assert found.notes == ["3 folders of traces; x/version_1, the newest, is read; give another to read that"]
    for run, age in (("one", 5), ("two", 1)):
        write(tmp_path / "c" / run / "traces" / "step-000010" / "rank-00000.json.gz", age=age)
        write(tmp_path / "c" / run / "traces" / "step-000020" / "rank-00000.json.gz", age=age)
    found = find([tmp_path / "c"])
    assert named_in(found.files, tmp_path) == ["c/two/traces/step-000020/rank-00000.json.gz"]
    assert found.notes[0].startswith("2 folders of windows; two/traces, the newest, is read")
    assert found.notes[1].startswith("2 windows; step-000020, the last, is read")


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "metrics.json").write_text('{"loss": 1}')
    for name in ("empty", "run"):
        with pytest.raises(UserError) as caught:
            find([tmp_path / name])
        assert str(caught.value) == (
            f"{tmp_path / name} holds no traces; record some with --trainer.callbacks+=lit_llm.callbacks.TraceCapture"
        )
    with pytest.raises(UserError, match=r"/gone is not there; name a trace"):
        find([tmp_path / "gone"])
    with pytest.raises(UserError, match="no trace is given"):
        find([])


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *(('{"schemaVersion": 1, "deviceProperties": [', True), ('{"traceEvents": []}', True)),
        *(('\n [ {"ph": "X", "ts": 1}', True), ('[{"name": "x", "cat": "y"}]', True), ("\ufeff[{" + '"ph":1}]', True)),
        *(("", False), ("[]", False), ("{}", False), ('{"model_type": "llama"}', False), ('[{"text": "ph"}]', False)),
        ('{"text": "\\"traceEvents\\": ["}', False),
    ],
)
def test_looks_of_traces(tmp_path: Path, text: str, is_one: bool) -> None:
    for name, data in (("a.json", text.encode()), ("a.json.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        assert looks_like_trace(tmp_path / name) is is_one
    assert not looks_like_trace(tmp_path / "gone.json")


def fact(rank: int | None, at: float = 0, steps: str = "4-6", **more: object) -> FileFacts:
    """``at``: seconds; ``steps``: first and last."""
    first, last = map(int, steps.split("-"))
    path = str(more.pop("path", f"rank{rank}.json"))
    start = START + int(at * SECOND)
    return FileFacts(path, rank, first=start, last=start + SECOND, steps=frozenset(range(first, last + 1)), **more)  # type: ignore[arg-type]


def test_a_whole_set() -> None:
    files = [fact(rank, rank / 10, world_size=4, run="a") for rank in (2, 0, 3, 1)]
    kept = check_set(files)
    assert (kept.kept, kept.ranks, kept.world_size, kept.missing, kept.notes) == ([1, 3, 0, 2], [0, 1, 2, 3], 4, [], [])
    assert check_set([]).kept == []


def test_missing_ranks() -> None:
    kept = check_set([fact(rank, world_size=12) for rank in (0, 1, 2, 4, 10, 11)])
    assert kept.missing == [3, 5, 6, 7, 8, 9]
    assert kept.notes == ["ranks 3, 5-9 of 12 are missing"]
    assert check_set([fact(0, world_size=2)]).notes == ["rank 1 of 2 is missing"]
    assert check_set([fact(0), fact(5)]).notes == []


def test_unknown_ranks_are_numbered_by_name() -> None:
    files = [fact(None, path=f"host_{n}.json") for n in (10, 9, 2)] + [fact(1)]
    kept = check_set(files)
    assert [(files[index].path, rank) for index, rank in zip(kept.kept, kept.ranks, strict=True)] == [
        ("host_2.json", 0),
        ("rank1.json", 1),
        ("host_9.json", 2),
        ("host_10.json", 3),
    ]
    assert kept.notes == [
        "no rank is told by host_2.json, host_9.json, host_10.json; read as ranks 0, 2-3, in the order of their names"
    ]


def test_mixed_runs() -> None:
    one = [fact(rank, 0, run="a", world_size=4, path=f"a{rank}") for rank in range(3)]
    two = [fact(rank, 500, run="b", world_size=4, path=f"b{rank}") for rank in range(4)]
    kept = check_set([*one, *two])
    assert kept.kept == [3, 4, 5, 6]
    assert kept.notes == [
        "2 runs are mixed; the one with the most ranks, or else the latest, is kept; left out: a0, a1, a2"
    ]
    # Equally large: the later one.
    assert check_set([*two[:3], *one]).kept == [0, 1, 2]
    sizes = check_set([fact(0, world_size=2), fact(1, world_size=2), fact(0, world_size=16, path="x")])
    assert sizes.kept == [0, 1]
    assert sizes.notes[0].startswith("world sizes 2, 16 are mixed, so these are different runs")
    # A file that does not say what run it is of may belong.
    assert check_set([*two, fact(4, 500, path="c")]).kept == [0, 1, 2, 3, 4]


def test_ranks_twice() -> None:
    same = check_set([fact(0), fact(1, path="a"), fact(1, path="b", steps="4-9"), fact(1, path="c")])
    assert same.kept == [0, 2]
    assert same.notes[0] == "rank 1 has 3 files; b is read, not a, c"
    early = [fact(rank, 0, path=f"early{rank}") for rank in (0, 1)]
    late = [fact(rank, 900, path=f"late{rank}") for rank in (0, 1, 2)]
    mixed = check_set([*late, *early])
    assert mixed.kept == [0, 1, 2]
    assert mixed.notes[0].startswith("traces of 2 different times are mixed; the time with the most ranks is kept")
    # Without a known clock there is nothing to tell them by.
    blind = [FileFacts(path, 0, steps=frozenset({1})) for path in ("x", "y")]
    assert check_set(blind).kept == [0]
    # A wrong clock alone is no other run.
    off = check_set([fact(0), fact(1), fact(1, path="again"), fact(2, 900)])
    assert off.kept == [0, 1, 3]
    assert off.notes[-1].startswith("rank 2 recorded more than a minute away from the others")


def test_different_steps() -> None:
    kept = check_set([fact(0), fact(1), fact(2, steps="4-5"), fact(3, steps="6-6")])
    assert kept.kept == [0, 1, 2, 3]
    assert kept.notes == [
        "the ranks recorded different steps: 4-6 on ranks 0-1; 4-5 on rank 2; 6 on rank 3; none is common to all"
    ]
    assert check_set([fact(0), fact(1, steps="5-7")]).notes == [
        "the ranks recorded different steps: 4-6 on rank 0; 5-7 on rank 1"
    ]


def test_random_sets_keep_each_rank_once() -> None:
    draw = random.Random(0)
    for _ in range(300):
        files = [
            FileFacts(
                f"f{index}",
                draw.choice([None, 0, 1, 2, 3]),
                draw.choice([None, 4, 4, 8]),
                draw.choice([None, "a", "a", "b"]),
                first := draw.choice([None, START, START + 900 * SECOND]),
                None if first is None else first + SECOND,
                frozenset(draw.sample(range(4), draw.randrange(3))),
            )
            for index in range(draw.randrange(9))
        ]
        kept = check_set(files)
        assert kept.ranks == sorted(set(kept.ranks))
        assert len(kept.kept) == len(kept.ranks) == len(set(kept.kept))
        assert all(files[index].rank in (None, rank) for index, rank in zip(kept.kept, kept.ranks, strict=True))
        for key in ("run", "world_size"):
            assert len({getattr(files[index], key) for index in kept.kept} - {None}) <= 1
        left_out = len(files) - len(kept.kept)
        assert not left_out or any("left out" in note or "is read" in note for note in kept.notes)
        assert not any("\n" in note for note in kept.notes)


def test_facts_of_a_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", 1, baseTimeNanoseconds=START, lit_llm={"run": "ab", "world_size": 2})
    facts = FileFacts.of(read(path))
    assert facts == FileFacts(str(path), 1, 2, "ab", START + 5500, START + 6500, frozenset({4}))
    unknown = FileFacts.of(read(write(tmp_path / "b.json")))
    assert (unknown.rank, unknown.run, unknown.first, unknown.last) == (None, None, None, None)


def test_ranges() -> None:
    assert ranges([9, 5, 3, 7, 6, 8]) == "3, 5-9"
    assert ranges([]) == ""
    assert named([4]) == "rank 4"
    assert named([4, 5]) == "ranks 4-5"
