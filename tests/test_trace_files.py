"""The files of traces and who asks for one: full disks, two runs in a folder, a signal after a fit that has failed."""

from __future__ import annotations

import gzip
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_llm.callbacks import trace_files
from lit_llm.callbacks.trace_files import Packing, is_being_written, write_raw
from lit_llm.trace.finding import find
from tests.trace_ranks import At, capture, files, fit

TEXT = '{"traceEvents": [\n' + ",\n".join(f'{{"ph": "X", "name": "{number}"}}' for number in range(200_000)) + "\n]}"


def export(text: str = TEXT) -> Any:
    return lambda path: Path(path).write_text(text)


def pack(folder: Path, run: str = "a1", text: str = TEXT) -> Packing:
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / "rank-00000.json.gz"
    packing = Packing(write_raw(export(text), packed, run), packed, 1 << 30)
    packing.run()
    return packing


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def disk(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    """Free bytes, one look after the other; the last stays."""
    looks = list(free)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: SimpleNamespace(free=looks.pop(0) if len(looks) > 1 else looks[0])
    )


def test_a_trace_is_packed_and_named(tmp_path: Path) -> None:
    packing = pack(tmp_path / "step-000005")
    assert packing.problem is None
    assert names(tmp_path) == ["step-000005/rank-00000.json.gz"]
    assert gzip.decompress(packing.packed.read_bytes()).decode() == TEXT


def test_while_it_is_written_it_is_hidden_and_found_as_unfinished(tmp_path: Path) -> None:
    pack(tmp_path)
    raw = write_raw(export(), tmp_path / "rank-00001.json.gz", "a1")
    assert is_being_written(tmp_path)
    found = find([tmp_path])
    assert [path.name for path in found.files] == ["rank-00000.json.gz"]
    assert found.leftovers == [raw]


@pytest.mark.parametrize("how", ["raises", "cut", "full"])
def test_a_full_disk_gets_no_fuller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def kineto(path: str) -> None:
        """Writes under another name, which it leaves where it fails."""
        Path(f"{path}.tmp").write_text(TEXT[:1000])
        if how == "full":
            os.rename(f"{path}.tmp", path)
            Path(path).write_text(TEXT)
            disk(monkeypatch, trace_files.KEEP_FREE - 1)
        if how == "raises":
            raise RuntimeError("no space left")

    told = {"raises": "no space left", "cut": "could not write it", "full": "only 127 MiB are free in "}[how]
    with pytest.raises((OSError, RuntimeError), match=told):
        write_raw(kineto, tmp_path / "rank-00000.json.gz", "a1")
    assert names(tmp_path) == []


def test_packing_stops_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(TEXT) > 3 * trace_files._CHUNK
    enough, little = trace_files.KEEP_FREE, trace_files.KEEP_FREE - 1
    disk(monkeypatch, enough, enough, enough, little)  # after the profiler, at two chunks, at the third
    packing = pack(tmp_path)
    assert packing.problem is not None
    assert packing.problem.startswith("no trace was written: only 127 MiB are free in ")
    assert packing.problem in caplog.text
    assert names(tmp_path) == []


@pytest.mark.parametrize("links", [True, False])
def test_two_runs_in_one_folder_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, links: bool
) -> None:
    if not links:

        def no_link(*paths: Any) -> None:
            raise PermissionError("no hard links here")

        monkeypatch.setattr("os.link", no_link)
    folder = tmp_path / "step-000005"
    folder.mkdir()
    packed = folder / "rank-00000.json.gz"
    texts = {run: TEXT.replace("X", run) for run in ("a", "b", "c")}
    packings = [Packing(write_raw(export(text), packed, run), packed, 1 << 30) for run, text in texts.items()]
    for packing in packings:  # all have written before the first is packed
        packing.run()
    expected = [f"{name}/rank-00000.json.gz" for name in ("step-000005", "step-000005-2", "step-000005-3")]
    assert names(tmp_path) == sorted(expected)
    for name, packing, text in zip(expected, packings, texts.values(), strict=True):
        assert packing.packed == tmp_path / name
        assert gzip.decompress(packing.packed.read_bytes()).decode() == text
    assert packings[0].problem is None
    assert f"{packed}: another run writes here too, so this trace is {packings[1].packed}; give each" in caplog.text


def test_a_cut_that_fails_leaves_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "RAW_PER_PACKED", 1e-3)
    packing = pack(tmp_path)  # with no step marked
    assert packing.problem is not None
    assert "could not be cut to fewer steps" in packing.problem
    assert names(tmp_path) == ["rank-00000.json.gz"]
    assert gzip.decompress(packing.packed.read_bytes()).decode() == TEXT


# The signal


@pytest.mark.parametrize("step", [0, 2])
def test_the_signal_works_after_a_fit_that_has_failed(tmp_path: Path, step: int) -> None:
    def fail() -> None:
        assert signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL
        raise ArithmeticError("enough")

    with pytest.raises(ArithmeticError, match="enough"):
        fit(tmp_path / "failed", At(step, fail), capture(start=None))
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    fit(tmp_path / "later", At(1, lambda: os.kill(os.getpid(), signal.SIGUSR2)), capture(start=None))
    assert len(files(tmp_path / "later")) == 1
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
