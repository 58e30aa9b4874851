"""Writing a checkpoint: it is complete or not there. And the copy that the background writes."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import socket
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_llm.checkpoint import CheckpointWriteError, SafeCheckpointIO, disk, snapshot, write, write_checkpoint
from lit_llm.errors import UserError

Pair = namedtuple("Pair", "left right")


class Holder:
    """A plain object with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def content(number: int, size: int = 1000) -> dict[str, Any]:
    return {"state_dict": {str(key): torch.full((size,), float(number)) for key in range(4)}, "number": number}


def number_in(path: Path, size: int = 1000) -> int:
    """Which of the contents a file holds, complete."""
    found = torch.load(path, weights_only=True)
    assert all(torch.equal(one, torch.full((size,), float(found["number"]))) for one in found["state_dict"].values())
    return int(found["number"])


# ------------------------------------------------------------------ kill -9


def kill_at(moment: float | str) -> None:
    """Lets this process kill itself: after so many bytes of a write, or before or after a call of os."""
    if isinstance(moment, str):
        when, name = moment.split()
        real = getattr(os, name)

        def dying(*args: Any) -> None:
            if when == "after":
                real(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, name, dying)
        return
    written, write_part = 0, disk.Stream.write

    def part(stream: Any, data: Any) -> int:
        nonlocal written
        data = memoryview(data).cast("B")
        if written + len(data) > moment:
            stream.file.write(data[: int(moment) - written])
            stream.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        written += len(data)
        return write_part(stream, data)

    disk.Stream.write = part  # type: ignore[method-assign]


def test_what_a_live_process_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / f".x.ckpt.{socket.gethostname()}-{os.getpid()}-1.partial"
    with mine.open("wb") as file:
        assert disk.lock_file(file)
        disk.remove_partials(tmp_path)
        assert mine.exists()
    disk.remove_partials(tmp_path)
    assert not mine.exists()
    # Where there are no locks, a process of this machine that has ended is known by its number.
    import fcntl

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = tmp_path / f".x.ckpt.{socket.gethostname()}-{ended.pid}-1.partial"
    elsewhere = tmp_path / f".x.ckpt.another-host-{ended.pid}-1.partial"
    for path in (mine, gone, elsewhere):
        path.touch()
    disk.remove_partials(tmp_path)
    assert [mine.exists(), gone.exists(), elsewhere.exists()] == [True, False, True]


SIZE = 100_000
MOMENTS: list[float | str] = [0, 1, 5e4, 3e5, 6e5, 9e5, 1.2e6, 1.5e6, "before fsync", "before replace", "after replace"]


def killed_writes(folder: str) -> None:
    """Writes version 1, and version 2 in children that die at each of the moments."""
    for index, moment in enumerate(MOMENTS):
        path = Path(folder, str(index), "x.ckpt")
        write_checkpoint(content(1, SIZE), path)
        child = os.fork()
        if child == 0:
            kill_at(moment)
            write_checkpoint(content(2, SIZE), path)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_write_killed_at_any_moment_costs_nothing(tmp_path: Path) -> None:
    call = f"from tests.test_checkpoint_writing import killed_writes; killed_writes({str(tmp_path)!r})"
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # others do not live through a fork
    subprocess.run(
        [sys.executable, "-c", call], check=True, cwd=Path(__file__).parent.parent, env=one_thread, timeout=120
    )
    for index, moment in enumerate(MOMENTS):
        folder = tmp_path / str(index)
        replaced = moment == "after replace"
        assert number_in(folder / "x.ckpt", SIZE) == (2 if replaced else 1), moment
        partials = list(folder.glob(disk.PARTIAL))
        assert len(partials) == (0 if replaced else 1)
        if not isinstance(moment, str):
            assert partials[0].stat().st_size == int(moment)
        write_checkpoint(content(3, SIZE), folder / "x.ckpt")
        assert number_in(folder / "x.ckpt", SIZE) == 3
        assert [path.name for path in folder.iterdir()] == ["x.ckpt"]


# ------------------------------------------------------------------ errors


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "runs" / "x.ckpt"
    write_checkpoint(content(1), path)
    for size in (16_000, 100_000):  # in the last tensor, in the first
        with pytest.raises(CheckpointWriteError) as caught:
            write_checkpoint(content(2, size), path)
        assert caught.value.errno == errno.ENOSPC
        assert not isinstance(caught.value, UserError)
        line = str(caught.value)
        assert line.startswith(f"{path} can't be written: No space left on device (")
        assert "bytes are free there); free some space, keep fewer by checkpoint.keep_last, or" in line
        assert "checkpoint.dirpath" in line
        assert "\n" not in line
        assert [one.name for one in path.parent.iterdir()] == ["x.ckpt"]
        assert number_in(path) == 1


@pytest.mark.parametrize("size", [5_000, 50_000])
def test_a_file_that_may_not_grow(tmp_path: Path, size: int) -> None:
    """The system's own error arrives, wherever in the file it comes."""
    path = tmp_path / "x.ckpt"
    write_checkpoint(content(1), path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        with pytest.raises(CheckpointWriteError, match=r"x\.ckpt can't be written: File too large .*can be written"):
            write_checkpoint(content(2, size), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [one.name for one in tmp_path.iterdir()] == ["x.ckpt"]
    assert number_in(path) == 1


def test_places_that_take_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "x.ckpt", tmp_path / "folder"):
        with pytest.raises(CheckpointWriteError, match=f"{path} can't be written: "):
            write_checkpoint(content(1), path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


def test_what_is_no_error_of_the_disk_arrives_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    write_checkpoint(content(1), path)
    with pytest.raises(AttributeError):  # of pickle
        write_checkpoint({**content(2), "function": lambda: None}, path)
    written = io.BufferedWriter.write

    class Interrupted(disk.Stream):
        def __init__(self, file: Any) -> None:
            super().__init__(self)  # type: ignore[arg-type]
            self.real = file
            self.file = type("File", (), {"write": staticmethod(self.part)})()

        def part(self, data: Any) -> int:
            if len(data) >= 4000:
                raise KeyboardInterrupt
            return written(self.real, data)

    monkeypatch.setattr(disk, "Stream", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(content(2), path)
    assert [one.name for one in tmp_path.iterdir()] == ["x.ckpt"]
    assert number_in(path) == 1


# ------------------------------------------------------------------ Lightning's interface


def test_local_files_of_any_spelling_are_written_safely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written: list[str] = []
    real = write.write_checkpoint
    monkeypatch.setattr(write, "write_checkpoint", lambda content, path: (written.append(path), real(content, path)))
    safe = SafeCheckpointIO()
    spellings = ["a.ckpt", Path("new/b.ckpt"), tmp_path / "c.ckpt", f"file://{tmp_path}/d.ckpt"]
    for number, path in enumerate(spellings):
        safe.save_checkpoint(content(number), path)
        assert safe.load_checkpoint(path)["number"] == number
    places = ["a.ckpt", "new/b.ckpt", "c.ckpt", "d.ckpt"]
    assert written == [str(tmp_path / place) for place in places]
    assert [number_in(tmp_path / place) for place in places] == [0, 1, 2, 3]
    safe.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_the_rest_is_lightnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "write_checkpoint", None)
    address = f"memory://{tmp_path}/x.ckpt"
    SafeCheckpointIO().save_checkpoint(content(5), address)
    assert TorchCheckpointIO().load_checkpoint(address)["number"] == 5
    for path in (address, tmp_path / "x.ckpt"):
        with pytest.raises(TypeError, match="storage_options"):
            SafeCheckpointIO().save_checkpoint(content(1), path, storage_options={})


# ------------------------------------------------------------------ snapshot


def everything() -> dict[str, Any]:
    """What a checkpoint may hold, and more."""
    module = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    module[1].weight = module[0].weight
    base = torch.arange(1000.0)
    shared = {"lr": 0.1, "betas": (0.9, 0.95), "step": torch.tensor(3.0)}
    return {
        "state_dict": module.state_dict(),
        "views": [base, base[10:20], base[:4].view(2, 2).T, base[5]],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "gradient": torch.ones(2, requires_grad=True),
        "kinds": [torch.ones(3, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 4), torch.tensor(7)],
        "odd": [torch.eye(3).to_sparse(), torch.empty(2, device="meta")],
        "groups": [shared, shared],
        "pair": Pair([1, 2], torch.ones(2)),
        "default": defaultdict(list, a=[torch.zeros(1)]),
        "ordered": OrderedDict(b=1, a=None),
        "object": Holder(base),
        "plain": (1, "two", None, 3.5, b"4", torch.float32, torch.Size([2]), {5, 6}),
    }


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_snapshot_makes_the_same_file() -> None:
    original = everything()
    before = saved(original)
    copied = snapshot(original)
    assert saved(copied) == before
    with torch.no_grad():
        for tensor in (*original["state_dict"].values(), *original["views"][:1], *original["kinds"]):
            tensor.zero_()
        original["parameter"].zero_()
        original["groups"][0]["step"] += 1
        original["pair"].right.zero_()
        original["default"]["a"][0] += 1
        original["odd"][0].values().zero_()
    original["groups"][0]["lr"] = 0.5
    original["ordered"]["c"] = 2
    original["state_dict"]._metadata[""]["version"] = 9
    assert saved(copied) == before
    assert saved(original) != before


def test_a_snapshot_shares_what_was_shared() -> None:
    original = everything()
    copied = snapshot(original)
    state = copied["state_dict"]
    assert list(state) == list(original["state_dict"])
    assert type(state) is OrderedDict
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr() != original["state_dict"]["0.weight"].data_ptr()
    whole = copied["views"][0]
    assert all(view.untyped_storage().data_ptr() == whole.data_ptr() for view in copied["views"])
    assert copied["object"].tensor.data_ptr() == whole.data_ptr()
    assert copied["groups"][0] is copied["groups"][1] is not original["groups"][0]
    assert type(copied["pair"]) is Pair
    assert copied["default"].default_factory is list
    number = torch.tensor([1 + 2j])
    conjugate = snapshot(number.conj())
    number.zero_()
    assert conjugate.item() == 1 - 2j
    loop: list[Any] = []
    loop.append(loop)
    copy = snapshot(loop)
    assert copy[0] is copy
