"""Saved by two ranks, gone on with by one, two and four, in other layouts, from folders and from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_llm.parallel import MeshStrategy
from tests.distributed import run_ranks
from tests.training import fit

STOP, END = 3, 8
LAYOUTS: dict[str, Any] = {"ddp": "ddp", "shard": {}, "replicate 2 x shard": {"replicate": 2}, "one file": {}}


def strategy(name: str) -> Any:
    options = LAYOUTS[name]
    if name == "one file":
        return MeshStrategy(save_distributed_checkpoint=False)
    return MeshStrategy(**options) if isinstance(options, dict) else options


def path(folder: str | Path, name: str) -> Path:
    return Path(folder, name, "checkpoints", f"step={STOP}.ckpt")


def save(store: str, folder: str, ranks: int) -> None:
    for name in LAYOUTS:
        where = f"{folder}/{name}"
        fit(store, where, max_steps=STOP, save_at=STOP, devices=ranks, strategy=strategy(name))


def resume(store: str, folder: str, ranks: int, micro_batch_size: int) -> dict[str, Any]:
    """From each layout's checkpoint under each other layout."""
    found = {}
    for saved in LAYOUTS:
        for name in ("ddp", "shard", "replicate 2 x shard"):
            options = {"devices": ranks, "strategy": strategy(name), "micro_batch_size": micro_batch_size}
            run = fit(store, f"{folder}/resumed", max_steps=END, ckpt_path=str(path(folder, saved)), **options)
            found[f"{saved} to {name}"] = {"losses": run["losses"], "norms": run["norms"], "rows": run["rows"]}
    return found


def check(run: dict[str, Any], whole: dict[str, Any]) -> None:
    np.testing.assert_allclose(run["losses"], whole["losses"][STOP:], atol=1e-5, rtol=0)
    np.testing.assert_allclose(run["norms"], whole["norms"][STOP:], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_layout_goes_on_from_every_other(store: str, tmp_path: Path) -> None:
    whole = fit(store, str(tmp_path / "whole"), max_steps=END)
    run_ranks("tests.test_mesh_resume:save", 2, timeout=120, store=store, folder=str(tmp_path), ranks=2)
    assert path(tmp_path, "shard").is_dir()
    assert path(tmp_path, "one file").is_file()
    for saved in LAYOUTS:
        alone = fit(store, str(tmp_path / "alone"), max_steps=END, ckpt_path=str(path(tmp_path, saved)))
        check(alone, whole)
        # The data go on too: step by step the same rows.
        assert alone["rows"] == whole["rows"][STOP * 4 :]
    for ranks, micro_batch_size in ((2, 2), (4, 1)):
        options = {"store": store, "folder": str(tmp_path), "ranks": ranks, "micro_batch_size": micro_batch_size}
        results = run_ranks("tests.test_mesh_resume:resume", ranks, timeout=250, **options)
        each = 8 // micro_batch_size // ranks  # micro-batches of a rank in a step
        for name in results[0]:
            for result in results:
                check(result[name], whole)
            for step in range(END - STOP):
                theirs = [row for result in results for rows in _step(result[name], step, each) for row in rows]
                mine = [row for rows in whole["rows"][(STOP + step) * 4 :][:4] for row in rows]
                assert sorted(theirs) == sorted(mine), f"{name}: rows of step {STOP + step}"


def _step(run: dict[str, Any], step: int, each: int) -> list[list[str]]:
    return run["rows"][step * each : (step + 1) * each]
