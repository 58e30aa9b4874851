"""A run resumed on any layout sees the global batches of the uninterrupted one; other data is not taken unasked."""

from __future__ import annotations

import hashlib
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lit_llm import LitLLM, TokenDataModule
from lit_llm.data.prepare import prepare
from lit_llm.data.rows import TokenRows
from lit_llm.data.store import TokenStore
from lit_llm.errors import UserError
from tests.conftest import write_texts
from tests.distributed import run_ranks
from tests.training import MODEL, fit

SEQ_LEN, BATCH = 48, 8


def one_rank(store: Any, folder: str, **options: Any) -> dict[str, Any]:
    """One rank of a ddp run."""
    return fit(store, folder, strategy="ddp", limit_val_batches=0, **options)


def global_batches(results: list[dict[str, Any]]) -> dict[int, list[str]]:
    """Step -> hashes of its rows over all ranks, sorted. ``steps`` counts those done after each micro-batch."""
    rows: defaultdict[int, list[str]] = defaultdict(list)
    for result in results:
        accumulation = result["accumulation"]
        last = result["steps"][-1]
        first = last - len(result["rows"]) // accumulation
        for number, micro_batch in enumerate(result["rows"]):
            rows[first + number // accumulation] += micro_batch
    return {step: sorted(hashes) for step, hashes in rows.items()}


def epoch_steps(store: str) -> tuple[int, int]:
    """Steps of an epoch, and rows of its last one."""
    rows = len(TokenRows(TokenStore(store), SEQ_LEN))
    return -(-rows // BATCH), rows % BATCH or BATCH


def check(whole: dict[int, list[str]], resumed: dict[int, list[str]], stop: int, store: str) -> None:
    steps, last = epoch_steps(store)
    assert sorted(resumed) == list(range(stop, max(whole) + 1))  # it ends at the same step
    assert resumed == {step: rows for step, rows in whole.items() if step >= stop}
    for step, rows in whole.items():
        assert len(rows) == (last if step % steps == steps - 1 else BATCH)


OPTIONS: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch_size": BATCH}


def test_a_resume_in_the_second_epoch(store: str, tmp_path: Path) -> None:
    steps, _ = epoch_steps(store)
    stop, end = steps + 2, 2 * steps + 2
    whole = fit(store, str(tmp_path / "whole"), max_steps=end, limit_val_batches=0, **OPTIONS)
    fit(store, str(tmp_path / "cut"), max_steps=stop, save_at=stop, limit_val_batches=0, **OPTIONS)
    path = str(tmp_path / "cut" / "checkpoints" / f"step={stop}.ckpt")
    for micro, workers in ((4, 2), (1, 0)):
        options = {**OPTIONS, "micro_batch_size": micro, "num_workers": workers, "limit_val_batches": 0}
        resumed = fit(store, str(tmp_path / str(micro)), max_steps=end, ckpt_path=path, **options)
        check(global_batches([whole]), global_batches([resumed]), stop, store)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resume_on_any_number_of_ranks(store: str, tmp_path: Path) -> None:
    steps, _ = epoch_steps(store)
    stop, end = steps + 2, 2 * steps + 1
    target = "tests.test_data_resume:one_rank"
    options = {**OPTIONS, "store": store, "devices": 2}
    whole = run_ranks(target, 2, folder=str(tmp_path / "whole"), max_steps=end, **options)
    run_ranks(target, 2, folder=str(tmp_path / "cut"), max_steps=stop, save_at=stop, **options)
    path = str(tmp_path / "cut" / "checkpoints" / f"step={stop}.ckpt")
    for world_size, micro in ((1, 2), (1, 8), (2, 4), (2, 1), (4, 1), (4, 2)):
        for workers in (0, 2):
            layout = {"devices": world_size, "micro_batch_size": micro, "num_workers": workers}
            folder = str(tmp_path / f"{world_size}-{micro}-{workers}")
            resumed = run_ranks(
                target, world_size, folder=folder, max_steps=end, ckpt_path=path, **{**options, **layout}
            )
            check(global_batches(whole), global_batches(resumed), stop, store)


@pytest.fixture(scope="module")
def other(store: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another text by the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    write_texts(folder / "texts", documents=40, seed=9)
    prepare([folder / "texts"], folder / "store", tokenizer=store, val_fraction=0.2, workers=1, progress=False)
    return str(folder / "store")


@pytest.fixture(scope="module")
def saved(store: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("saved")
    fit(store, str(folder), max_steps=3, save_at=3, limit_val_batches=0, **OPTIONS)
    return str(folder / "checkpoints" / "step=3.ckpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 24}, "seq_len 48 -> 24"),
        ({"global_batch_size": 16}, "global_batch_size 8 -> 16"),
        ({"data": {"seed": 5}}, "seed 0 -> 5"),
        ({"data": {"isolate_documents": False}}, "isolate_documents True -> False"),
        ({"data": {"packing": "best_fit"}}, "packing contiguous -> best_fit"),
    ],
)
def test_other_data_is_refused(store: str, saved: str, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"other data \({message}\).*data.resume_with_other_data"):
        fit(store, str(tmp_path), max_steps=5, ckpt_path=saved, **{**OPTIONS, **change})


def test_another_store_is_taken_from_its_beginning_when_asked(
    store: str, other: str, saved: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the stores' content"):
        fit(other, str(tmp_path), max_steps=5, ckpt_path=saved, **OPTIONS)
    fresh = global_batches([fit(other, str(tmp_path / "a"), max_steps=8, limit_val_batches=0, **OPTIONS)])
    options = {**OPTIONS, "data": {"resume_with_other_data": True}, "limit_val_batches": 0}
    resumed = fit(other, str(tmp_path / "b"), max_steps=7, ckpt_path=saved, save_at=7, **options)
    assert global_batches([resumed]) == {step + 3: rows for step, rows in fresh.items() if step < 4}
    # and a resume of that run goes on in the new data, without being told again
    path = str(tmp_path / "b" / "checkpoints" / "step=7.ckpt")
    again = fit(other, str(tmp_path / "c"), max_steps=11, ckpt_path=path, limit_val_batches=0, **OPTIONS)
    assert global_batches([again]) == {step + 3: rows for step, rows in fresh.items() if 4 <= step < 8}


def test_another_global_batch_size_goes_on_after_the_samples_seen(store: str, saved: str, tmp_path: Path) -> None:
    halves = {**OPTIONS, "global_batch_size": 4, "limit_val_batches": 0}
    whole = global_batches([fit(store, str(tmp_path / "a"), max_steps=9, **halves)])
    options = {**halves, "data": {"resume_with_other_data": True}}
    resumed = fit(store, str(tmp_path / "b"), max_steps=5, ckpt_path=saved, **options)
    # 3 steps of 8 rows are 6 of 4
    assert global_batches([resumed]) == {3: whole[6], 4: whole[7]}


def test_other_data_at_an_epochs_end(store: str, other: str, tmp_path: Path) -> None:
    steps, _ = epoch_steps(store)
    fit(store, str(tmp_path / "cut"), max_steps=steps, save_at=steps, limit_val_batches=0, **OPTIONS)
    fresh = global_batches([fit(other, str(tmp_path / "a"), max_steps=3, limit_val_batches=0, **OPTIONS)])
    options = {**OPTIONS, "data": {"resume_with_other_data": True}, "limit_val_batches": 0}
    path = str(tmp_path / "cut" / "checkpoints" / f"step={steps}.ckpt")
    resumed = fit(other, str(tmp_path / "b"), max_steps=steps + 3, ckpt_path=path, **options)
    assert list(global_batches([resumed]).values()) == list(fresh.values())


# ------------------------------------------------------------------- mixtures


def test_a_mixture_is_exact_logged_and_resumed(store: str, other: str, tmp_path: Path) -> None:
    mixture = {store: 3, other: 1}
    options = {**OPTIONS, "seq_len": 16, "limit_val_batches": 0}  # so that 9 steps are less than an epoch
    whole = fit(mixture, str(tmp_path / "whole"), max_steps=9, save_at=5, **options)
    rows = global_batches([whole])
    mine, theirs = (_hashes(folder) for folder in (store, other))
    for step, hashes in rows.items():
        assert len(hashes) == BATCH
        assert sum(h in mine for h in hashes) == 6, step
        assert sum(h in theirs for h in hashes) == 2, step
    tokens = whole["metrics"]
    names = [f"train/tokens/{folder}" for folder in (store, other)]  # both folders are called "store"
    assert sum(tokens[name] for name in names) == tokens["train/tokens"]
    assert 2.5 < tokens[names[0]] / tokens[names[1]] < 3.5
    path = str(tmp_path / "whole" / "checkpoints" / "step=5.ckpt")
    resumed = fit(mixture, str(tmp_path / "b"), max_steps=9, ckpt_path=path, micro_batch_size=8, **options)
    assert global_batches([resumed]) == {step: rows[step] for step in range(5, 9)}
    assert [resumed["metrics"][name] for name in names] == [tokens[name] for name in names]
    with pytest.raises(UserError, match="the mixture's weights 3, 1 -> 1, 1"):
        fit({store: 1, other: 1}, str(tmp_path / "c"), max_steps=9, ckpt_path=path, **options)


def _hashes(folder: str) -> set[str]:
    rows = TokenRows(TokenStore(folder), 16)
    ids = rows[list(range(len(rows)))]["input_ids"]
    return {hashlib.sha1(row.tobytes()).hexdigest()[:8] for row in ids}


def test_mixtures_that_do_not_go_together(store: str, tmp_path: Path) -> None:
    for weight in (0, -1, float("nan")):
        with pytest.raises(UserError, match=f"weight of store {store} is"):
            fit({store: weight}, str(tmp_path), max_steps=1)
    write_texts(tmp_path / "texts", documents=30, seed=9)
    prepare([tmp_path / "texts"], tmp_path / "s", vocab_size=290, val_fraction=0.2, workers=1, progress=False)
    with pytest.raises(UserError, match="made with another tokenizer .* prepare it with --tokenizer"):
        fit({store: 1, str(tmp_path / "s"): 1}, str(tmp_path), max_steps=1, **OPTIONS)


# ------------------------------------------------------------------- how Lightning counts


def steps_of(result: dict[str, Any]) -> list[int]:
    return sorted(global_batches([result]))


def test_epochs_count_on_when_the_batch_size_changes_at_an_epochs_end(store: str, tmp_path: Path) -> None:
    steps, _ = epoch_steps(store)
    options = {**OPTIONS, "limit_val_batches": 0, "max_steps": -1}
    fit(store, str(tmp_path / "a"), max_epochs=1, save_at=steps, **options)
    path = str(tmp_path / "a" / "checkpoints" / f"step={steps}.ckpt")
    changed = {**options, "global_batch_size": 4, "data": {"resume_with_other_data": True}, "ckpt_path": path}
    rows = len(TokenRows(TokenStore(store), SEQ_LEN))
    two = fit(store, str(tmp_path / "b"), max_epochs=2, **changed)
    assert steps_of(two) == list(range(steps, steps - (-rows // 4)))
    seen = [row for batch in global_batches([two]).values() for row in batch]
    assert len(seen) == rows  # one epoch more, each row once


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_cut_epochs_keep_whole_steps_and_validations_on_any_layout(store: str, tmp_path: Path, micro: int) -> None:
    # 2 steps of 8 rows in an epoch, a validation every 3 steps over their ends
    options: dict[str, Any] = {
        **OPTIONS,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
    }
    whole = fit(store, str(tmp_path / "whole"), max_steps=9, limit_train_batches=8, save_at=1, **options)
    assert whole["validations"] == [3, 6, 9]
    for step in (1, 2, 3, 4):
        path = str(tmp_path / "whole" / "checkpoints" / f"step={step}.ckpt")
        limit = 2 * BATCH // micro
        layout = {"micro_batch_size": micro, "limit_train_batches": limit, "ckpt_path": path}
        resumed = fit(store, str(tmp_path / f"{step}"), max_steps=9, **layout, **options)
        assert global_batches([resumed]) == {s: b for s, b in global_batches([whole]).items() if s >= step}
        assert [v for v in resumed["validations"] if v > step] == [v for v in whole["validations"] if v > step]


def test_another_batch_size_with_cut_epochs_takes_whole_steps(store: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "limit_val_batches": 0}
    fit(store, str(tmp_path / "a"), max_steps=3, save_at=1, limit_train_batches=8, **options)
    halves = {**options, "global_batch_size": 4}
    whole = global_batches([fit(store, str(tmp_path / "w"), max_steps=9, **halves)])
    for step in (1, 2, 3):
        path = str(tmp_path / "a" / "checkpoints" / f"step={step}.ckpt")
        changed = {**halves, "data": {"resume_with_other_data": True}, "ckpt_path": path, "limit_train_batches": 8}
        resumed = global_batches([fit(store, str(tmp_path / f"{step}"), max_steps=step + 3, **changed)])
        assert list(resumed.values()) == [whole[2 * step + i] for i in range(3)]


def test_overfitting_goes_on_where_it_was(store: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "overfit_batches": 8, "limit_val_batches": 0}  # 2 steps
    whole = global_batches([fit(store, str(tmp_path / "a"), max_steps=7, save_at=3, **options)])
    path = str(tmp_path / "a" / "checkpoints" / "step=3.ckpt")
    resumed = global_batches([fit(store, str(tmp_path / "b"), max_steps=7, ckpt_path=path, **options)])
    assert resumed == {step: rows for step, rows in whole.items() if step >= 3}
    assert whole[0] == whole[2] != whole[1]


# ------------------------------------------------------------------- sources


def test_one_module_trains_on_one_mixture_after_another(store: str, other: str) -> None:
    lit = LitLLM(config=MODEL, optimizer={"lr": 1e-3}, schedule={"total_steps": 40})
    counted: list[dict[str, float]] = []
    for mixture in ({store: 1, other: 1}, store, {other: 1, store: 3}):
        data = TokenDataModule(mixture, seq_len=16, global_batch_size=8, micro_batch_size=4)
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=3,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        trainer.fit(lit, data)
        counted.append({n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("train/tokens/")})
    assert [len(counts) for counts in counted] == [2, 0, 2]
    for folder in (store, other):
        assert counted[2][f"train/tokens/{folder}"] > counted[0][f"train/tokens/{folder}"] > 0


def test_a_store_that_moved_keeps_its_count(store: str, other: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "seq_len": 16, "limit_val_batches": 0}
    first = fit({store: 1, other: 1}, str(tmp_path / "a"), max_steps=2, save_at=2, **options)
    shutil.copytree(other, tmp_path / "moved")
    path = str(tmp_path / "a" / "checkpoints" / "step=2.ckpt")
    second = fit({store: 1, str(tmp_path / "moved"): 1}, str(tmp_path / "b"), max_steps=3, ckpt_path=path, **options)
    assert second["metrics"]["train/tokens/moved"] > first["metrics"][f"train/tokens/{other}"]
    names = ("train/tokens/moved", "train/tokens/store")
    assert sum(second["metrics"][name] for name in names) == second["metrics"]["train/tokens"]


def test_epochs_cut_shorter_than_the_place_of_the_checkpoint_end_there(store: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "seq_len": 16, "limit_val_batches": 0}
    whole = fit(store, str(tmp_path / "a"), max_steps=8, limit_train_batches=24, save_at=5, **options)
    path = str(tmp_path / "a" / "checkpoints" / "step=5.ckpt")
    resumed = fit(store, str(tmp_path / "b"), max_steps=8, limit_train_batches=8, ckpt_path=path, **options)
    batches = global_batches([resumed])
    assert all(len(rows) == BATCH for rows in batches.values())
    assert batches == {step: rows for step, rows in global_batches([whole]).items() if step >= 5}


def test_epochs_no_longer_cut_end_where_the_data_does(store: str, tmp_path: Path) -> None:
    steps, _ = epoch_steps(store)
    options = {**OPTIONS, "num_sanity_val_steps": 0, "max_steps": -1}
    fit(store, str(tmp_path / "a"), max_epochs=9, limit_train_batches=8, save_at=3, **options)  # 2 steps an epoch
    path = str(tmp_path / "a" / "checkpoints" / "step=3.ckpt")
    resumed = fit(store, str(tmp_path / "b"), max_epochs=2, ckpt_path=path, **options)
    assert steps_of(resumed) == list(range(3, steps))
    assert resumed["validations"] == [steps]


@pytest.mark.parametrize(("interval", "validations"), [(0.5, [1, 2, 3, 4]), (3, [3]), (2, [2, 4])])
def test_validations_in_cut_epochs(store: str, tmp_path: Path, interval: Any, validations: list[int]) -> None:
    options = {**OPTIONS, "limit_train_batches": 8, "num_sanity_val_steps": 0}  # 2 steps an epoch
    result = fit(store, str(tmp_path), max_steps=4, val_check_interval=interval, **options)
    assert result["validations"] == validations


def test_a_validation_by_the_clock(store: str, tmp_path: Path) -> None:
    result = fit(store, str(tmp_path), max_steps=3, val_check_interval="00:00:00:01", **OPTIONS)
    assert len(result["losses"]) == 3
