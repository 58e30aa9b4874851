"""RunCheckpoint when a checkpoint can't be written."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_llm.checkpoint import CheckpointWriteError, list_checkpoints, read_checkpoint
from tests.checkpoint_runs import At, WaitAfter, fill, fit, names
from tests.distributed import run_ranks


def full_disk(store: str, folder: str, *, forever: bool, **own: Any) -> dict[str, Any]:
    """A run of 8 steps on a disk that is full from step 3 on, forever or up to step 5; what rank 0 and others see."""
    ballast = Path(folder, "ballast")
    seen: list[list[str]] = []

    def on_rank_0(do: Any) -> Any:
        return lambda trainer: do() if trainer.is_global_zero else None

    at = {3: on_rank_0(lambda: fill(folder)), 5: on_rank_0(lambda: seen.append(names(folder)))}
    if not forever:
        at[6] = on_rank_0(lambda: ballast.unlink())
    error, checkpoint = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpoint = fit(store, folder, 8, WaitAfter(2, 4, 5), At(at), keep_last=1, **own)
        except CheckpointWriteError as raised:
            error = str(raised)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # until rank 0 has removed old files
    told = [str(one.message) for one in caught if "is not saved" in str(one.message)]
    files = None if checkpoint is None else [one.step for one in checkpoint._files]
    return {"told": told, "error": error, "names": names(folder), "during": seen, "files": files}


def check_full_disk(results: list[dict[str, Any]], folder: Path, forever: bool, failed: list[int]) -> None:
    first, *others = results
    for line, step in zip(first["told"], failed, strict=True):
        assert line.startswith(f"step {step} is not saved; the last good checkpoint is step-2.ckpt: {folder}/")
        assert f"step-{step}.ckpt can't be written: No space left on device" in line
        assert "\n" not in line
    assert all(one["told"] == [] for one in others)  # on rank 0 alone
    assert first["during"] == [["step-2.ckpt"]]  # nothing old is removed, no partial file stays
    left = ["step-2.ckpt"] if forever else ["step-8.ckpt"]
    for one in results:
        assert one["names"] == left
        assert (one["error"] is not None) is forever
        if forever:
            assert f"{folder}/checkpoints/step-8.ckpt can't be written: No space left on device" in one["error"]
            assert "\n" not in one["error"]
        else:
            assert one["files"] == [8]
    for path in list_checkpoints(folder):
        content = read_checkpoint(path)
        assert content["global_step"] == int(path.stem.removeprefix("step-"))
        assert content["callbacks"]["RunCheckpoint"]["files"][-1]["name"] == path.name


@pytest.mark.parametrize("forever", [True, False])
def test_a_full_disk_ends_no_run_but_at_its_end(store: str, small_disk: Path, forever: bool) -> None:
    """Steps 3 and up fail. At step 8, the last, one line would be told twice: there, it is the error."""
    result = full_disk(store, str(small_disk), forever=forever)
    check_full_disk([result], small_disk, forever, [3, 4, 5, 6, 7, 8] if forever else [3, 4, 5])


@pytest.mark.parametrize("forever", [True, False])
def test_a_full_disk_in_the_background(store: str, small_disk: Path, forever: bool) -> None:
    result = full_disk(store, str(small_disk), forever=forever, async_save=True)
    check_full_disk([result], small_disk, forever, [3, 4, 5, 6, 7, 8] if forever else [3, 4, 5])


def full_disk_on_ranks(store: str, folder: str) -> list[dict[str, Any]]:
    ranks = {"devices": 2, "strategy": "ddp"}
    results = []
    for forever in (False, True):
        for background in (False, True):
            results.append(full_disk(store, folder, forever=forever, async_save=background, trainer=ranks))
            torch.distributed.barrier()
            if os.environ["RANK"] == "0":
                for path in [*Path(folder, "checkpoints").iterdir(), *Path(folder).glob("ballast")]:
                    path.unlink()
            torch.distributed.barrier()
    return results


def test_a_full_disk_stops_no_rank(store: str, small_disk: Path) -> None:
    ranks = run_ranks(
        "tests.test_checkpoint_faults:full_disk_on_ranks", 2, timeout=200, store=store, folder=str(small_disk)
    )
    for number, (forever, _) in enumerate([(False, False), (False, True), (True, False), (True, True)]):
        results = [rank[number] for rank in ranks]
        check_full_disk(results, small_disk, forever, [3, 4, 5, 6, 7, 8] if forever else [3, 4, 5])


def unpicklable(store: str, folder: str, devices: int = 1) -> list[str]:
    """What becomes of a checkpoint that torch.save refuses, in the foreground and in the background."""

    class Refused(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"function": lambda: None}

    strategy = {"devices": devices, "strategy": "ddp"} if devices > 1 else {}
    errors = []
    for background in (False, True):
        try:
            fit(store, folder, 3, Refused(), async_save=background, trainer=strategy)
        except (RuntimeError, AttributeError, pickle.PicklingError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.slow
def test_a_mistake_in_the_content_ends_the_run_on_all_ranks(store: str, tmp_path: Path) -> None:
    alone = unpicklable(store, str(tmp_path / "one"))
    call, folder = "tests.test_checkpoint_faults:unpicklable", str(tmp_path / "two")
    own, other = run_ranks(call, 2, timeout=120, store=store, folder=folder, devices=2)
    for errors in (alone, own):
        assert ["lambda" in error for error in errors] == [True, True]
    assert all(error.startswith("RuntimeError: rank 0 could not write a checkpoint: ") for error in other)
    assert len(other) == 2
    assert names(tmp_path / "one") == names(tmp_path / "two") == []
