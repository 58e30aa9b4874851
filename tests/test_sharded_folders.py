"""Folders of sharded checkpoints on disk: what is passed over, left behind, adopted, replaced and never overwritten."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_llm.checkpoint import disk, find_checkpoint, list_checkpoints, load_model, read_checkpoint
from lit_llm.checkpoint.marker import MARKER, METADATA
from lit_llm.checkpoint.sharded import prepare_write, read_sharded
from lit_llm.checkpoint.write import CheckpointWriteError, SafeCheckpointIO, write_checkpoint
from lit_llm.errors import UserError
from tests.sharded_runs import content_of, difference, names_of, trained
from tests.test_sharded_checkpoints import write_alone


def test_last_passes_over_what_is_not_complete(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    write_alone(place / "step-1.ckpt")
    good = place / "step-1.ckpt"
    when = (good / MARKER).stat().st_mtime
    os.utime(good / MARKER, (when - 100, when - 100))
    broken = {"step-2.ckpt": MARKER, "step-3.ckpt": "meta.pt", "step-4.ckpt": "__0_0.distcp", "step-5.ckpt": METADATA}
    for number, (name, lost) in enumerate(broken.items()):
        shutil.copytree(good, place / name)
        (place / name / lost).unlink()
        if lost != MARKER:
            os.utime(place / name / MARKER, (when + number, when + number))
    shutil.copytree(good, place / "step-6.ckpt")
    shard = place / "step-6.ckpt" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    (place / "step-7.ckpt").mkdir()
    found = find_checkpoint(tmp_path, "last")
    assert found is not None
    assert found.path == good
    assert found.content["global_step"] == 3
    told = {Path(line.split()[0]).name: line for line in found.skipped}
    assert set(told) == {f"step-{n}.ckpt" for n in (2, 3, 4, 5, 6, 7)}
    assert "marker complete.json is missing" in told["step-2.ckpt"]
    assert "marker complete.json is missing" in told["step-7.ckpt"]
    for name, lost in list(broken.items())[1:]:
        assert f"{lost} is missing" in told[name]
    assert "__0_0.distcp has" in told["step-6.ckpt"]
    with pytest.raises(UserError, match=r"step-6\.ckpt is damaged"):
        read_checkpoint(place / "step-6.ckpt")
    assert len(list_checkpoints(tmp_path)) == 7


def test_a_folder_never_runs_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/done",)

    write_alone(tmp_path / "x.ckpt")
    evil = pickle.dumps(Evil())
    (tmp_path / "x.ckpt" / METADATA).write_bytes(evil)
    marker = json.loads((tmp_path / "x.ckpt" / MARKER).read_text())
    marker["files"][METADATA] = len(evil)
    (tmp_path / "x.ckpt" / MARKER).write_text(json.dumps(marker))
    with pytest.raises(UserError, match=r"\.metadata can't be read: .*system.* is no part"):
        read_sharded(tmp_path / "x.ckpt")
    assert not (tmp_path / "done").exists()


def test_partial_folders(tmp_path: Path) -> None:
    host, pid = socket.gethostname(), os.getpid()
    gone = 2**22 - 1  # above any process' number here
    mine, killed, begun, left = (
        tmp_path / f".x.ckpt.{host}-{number}-{thread}.partial"
        for number, thread in ((pid, 1), (pid, 2), (pid, 3), (gone, 4))
    )
    for path in (mine, killed, begun, left):
        path.mkdir()
        (path / "__0_0.distcp").touch()
    (killed / disk.LOCK).touch()
    with (mine / disk.LOCK).open("wb") as lock:
        disk.lock_file(lock)
        disk.remove_partials(tmp_path)
        assert [one.exists() for one in (mine, killed, begun, left)] == [True, False, True, False]
    disk.remove_partials(tmp_path)
    assert [one.exists() for one in (mine, begun)] == [False, True]


def test_a_removed_folder_leaves_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_alone(tmp_path / "x.ckpt")

    def killed(path: Path, **options: Any) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        SafeCheckpointIO().remove_checkpoint(tmp_path / "x.ckpt")
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".x.ckpt.")
    assert left.endswith(".partial")
    monkeypatch.undo()
    write_alone(tmp_path / "x.ckpt")
    SafeCheckpointIO().remove_checkpoint(tmp_path / "x.ckpt")
    assert "x.ckpt" not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    "marker",
    [
        b'{"format": "1", "files": {}}',
        b'{"format": 1, "files": {}}',
        b'{"format": 1, "files": {"meta.pt": "many", ".metadata": 1}}',
        b'{"format": 1, "files": ["meta.pt", ".metadata"]}',
        b'{"format": 1, "files": {"meta.pt": 1, ".metadata": 1, "\\u0000": 1}}',
        b'{"format": null}',
        b"[]",
        b"3",
        b"[" * 100_000,
        b"",
        b"\x80\x81\xff",
    ],
    ids=range(11),
)
def test_a_damaged_marker_is_passed_over(tmp_path: Path, marker: bytes) -> None:
    place = tmp_path / "checkpoints"
    write_alone(place / "step-1.ckpt")
    content = read_sharded(place / "step-1.ckpt")
    score = {"best_model_score": torch.tensor(1.0), "best_model_path": "elsewhere/step-1.ckpt"}
    write_checkpoint({**content, "callbacks": {"RunCheckpoint": score}}, place / "step-0.ckpt")
    shutil.copytree(place / "step-1.ckpt", place / "step-2.ckpt")
    (place / "step-2.ckpt" / MARKER).write_bytes(marker)
    for age, name in enumerate(("step-2.ckpt/complete.json", "step-1.ckpt/complete.json", "step-0.ckpt")):
        os.utime(place / name, (1e9 - age, 1e9 - age))
    last, best = find_checkpoint(tmp_path, "last"), find_checkpoint(tmp_path, "best")
    assert last is not None
    assert best is not None
    assert last.path == best.path == place / "step-1.ckpt"
    for found in (last, best):
        (line,) = found.skipped
        assert line.startswith(f"{place / 'step-2.ckpt'}")
        assert "damaged" in line
        assert "\n" not in line


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    write_alone(tmp_path / "x.ckpt")
    for name in ("meta.pt", MARKER, METADATA, "__0_0.distcp"):
        for read in (read_checkpoint, SafeCheckpointIO().load_checkpoint):
            with pytest.raises(UserError, match=rf"{name} is one file of .*x\.ckpt; give the folder"):
                read(tmp_path / "x.ckpt" / name)
    (tmp_path / "empty.ckpt").mkdir()
    for load in (read_checkpoint, load_model, SafeCheckpointIO().load_checkpoint):
        with pytest.raises(
            UserError, match=r"empty\.ckpt is no complete checkpoint: its marker complete\.json is missing"
        ):
            load(tmp_path / "empty.ckpt")


class Killed:
    """A child that writes x.ckpt and dies at a call of os.rename."""

    def __init__(self, folder: Path, at: str) -> None:
        model, optimizers = trained(None, "named")
        self.truth = content_of(model, optimizers)
        child = os.fork()
        if child == 0:
            rename = os.rename

            def dying(source: Any, target: Any) -> None:
                if Path(target).name.endswith(at):
                    os._exit(9)
                rename(source, target)

            os.rename = dying
            try:
                prepare_write(self.truth, folder / "x.ckpt", names_of(model, optimizers))()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("how", ["last", "path", "sweep"])
def test_a_kill_amid_replacing_costs_neither(tmp_path: Path, how: str) -> None:
    place = tmp_path / "checkpoints"
    write_alone(place / "x.ckpt", steps=0)
    truth = Killed(place, "x.ckpt").truth
    names = os.listdir(place)
    assert len(names) == 2
    assert all(name.startswith(".x.ckpt.") and name.endswith(".partial") for name in names)
    if how == "last":
        found = find_checkpoint(tmp_path, "last")
        assert found is not None
        assert (found.path, found.skipped) == (place / "x.ckpt", [])
    elif how == "path":
        read_checkpoint(place / "x.ckpt")
    disk.remove_partials(place)
    assert os.listdir(place) == ["x.ckpt"]
    assert difference(read_sharded(place / "x.ckpt"), truth) is None
    assert not (place / "x.ckpt" / disk.LOCK).exists()


def test_a_kill_before_replacing_leaves_the_old_one(tmp_path: Path) -> None:
    truth = write_alone(tmp_path / "x.ckpt", steps=0)
    Killed(tmp_path, ".old.partial")
    assert len(os.listdir(tmp_path)) == 2
    disk.remove_partials(tmp_path)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert difference(read_sharded(tmp_path / "x.ckpt"), truth) is None


def test_only_what_is_complete_and_left_is_adopted(tmp_path: Path) -> None:
    write_alone(tmp_path / "x.ckpt")
    (tmp_path / "x.ckpt" / disk.LOCK).write_text("x.ckpt")
    partial = tmp_path / f".x.ckpt.{socket.gethostname()}-{os.getpid()}-1.partial"
    removed = partial.with_suffix(".old.partial")
    os.rename(tmp_path / "x.ckpt", removed)
    disk.adopt_complete(tmp_path)
    assert os.listdir(tmp_path) == [removed.name]  # not what was being removed
    os.rename(removed, partial)
    with (partial / disk.LOCK).open("rb") as lock:
        disk.lock_file(lock)
        disk.remove_partials(tmp_path)
        assert os.listdir(tmp_path) == [partial.name]  # its writer lives
    marker = (partial / MARKER).read_bytes()
    for name in ("../y.ckpt", "y.ckpt", ""):
        (partial / disk.LOCK).write_text(name)
        disk.adopt_complete(tmp_path)
        assert os.listdir(tmp_path) == [partial.name]
    (partial / disk.LOCK).write_text("x.ckpt")
    (partial / MARKER).write_bytes(b"[]")
    disk.adopt_complete(tmp_path)
    assert os.listdir(tmp_path) == [partial.name]
    (partial / MARKER).write_bytes(marker)
    disk.adopt_complete(tmp_path)
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.mark.parametrize("error", [OSError(5, "broken"), KeyboardInterrupt()])
def test_replacing_that_fails_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    truth = write_alone(tmp_path / "x.ckpt", steps=0)
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        if Path(target).name == "x.ckpt" and not str(source).endswith(".old.partial"):
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises((CheckpointWriteError, KeyboardInterrupt)):
        write_alone(tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert difference(read_sharded(tmp_path / "x.ckpt"), truth) is None


@pytest.mark.parametrize("kind", ["folder", "file", "file without links"])
def test_a_name_taken_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two runs in one folder look for a free name at once, and one is faster."""
    if kind == "file without links":

        def refused(*args: Any) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", refused)
    model, optimizers = trained(None, "named")
    content, names = content_of(model, optimizers), names_of(model, optimizers)

    def write(path: Path) -> Any:
        with disk.new_names_only():
            if kind == "folder":
                return prepare_write(content, path, names)
            write_checkpoint(content, path)
            return lambda: None

    if kind == "folder":
        slow = write(tmp_path / "x.ckpt")
        truth = write_alone(tmp_path / "x.ckpt", steps=0)
    else:
        truth = {"state_dict": {"a": torch.ones(1)}}
        write_checkpoint(truth, tmp_path / "x.ckpt")

        def slow() -> None:
            write(tmp_path / "x.ckpt")

    with pytest.raises(
        CheckpointWriteError, match=r"^\S+x\.ckpt is there by now .* give each its own by checkpoint\.dirpath$"
    ):
        slow()
    assert os.listdir(tmp_path) == ["x.ckpt"]
    there = read_sharded(tmp_path / "x.ckpt") if kind == "folder" else read_checkpoint(tmp_path / "x.ckpt")
    assert difference(there, truth) is None
    write(tmp_path / "x-v1.ckpt")()
    assert sorted(os.listdir(tmp_path)) == ["x-v1.ckpt", "x.ckpt"]
    there = read_sharded(tmp_path / "x-v1.ckpt") if kind == "folder" else read_checkpoint(tmp_path / "x-v1.ckpt")
    assert difference(there, content) is None
