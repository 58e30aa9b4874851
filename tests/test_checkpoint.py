"""Finding and reading checkpoints, and the callback that writes them."""

from __future__ import annotations

import inspect
import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_llm import LitLLM, TokenDataModule, Transformer
from lit_llm.callbacks import RunCheckpoint
from lit_llm.checkpoint import find_checkpoint, list_checkpoints, load_model, read_checkpoint
from lit_llm.errors import UserError

MODEL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class NotPlain:
    """Something that torch.load refuses with weights_only."""


def checkpoint(path: Path, *, age: float = 0.0, best: str | None = None, score: float | None = 1.0) -> Path:
    """A file like those of Lightning, some seconds old."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"best_model_path": best or "", "best_model_score": None if score is None else torch.tensor(score)}
    torch.save({"state_dict": {"w": torch.ones(1000)}, "global_step": 1, "callbacks": {"any": state}}, path)
    when = path.stat().st_mtime - age
    os.utime(path, (when, when))
    return path


def fit(store: str, folder: Path, steps: int, *, ckpt_path: Path | None = None, **options: Any) -> L.Trainer:
    """A run under a plain Trainer, validated every 2 steps unless said otherwise."""
    checkpoint_options = {name: options.pop(name) for name in list(options) if name in ARGUMENTS}
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[RunCheckpoint(**checkpoint_options), *options.pop("callbacks", [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": steps, "val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, **options},
    )
    data = TokenDataModule(store, seq_len=16, global_batch_size=4, micro_batch_size=2)
    trainer.fit(LitLLM(MODEL, optimizer={"lr": 1e-2}), data, ckpt_path=ckpt_path)
    return trainer


ARGUMENTS = set(inspect.signature(RunCheckpoint).parameters)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# ------------------------------------------------------------------ finding


def test_last_is_the_one_completed_last(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    checkpoint(place / "step-20.ckpt", age=50)
    newest = checkpoint(place / "step-10.ckpt", age=5)
    checkpoint(place / "step-15.ckpt", age=60)
    (place / ".step-30.ckpt.partial").write_bytes(b"half")
    (place / "notes.txt").write_text("no checkpoint")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-10.ckpt", "step-20.ckpt", "step-15.ckpt"]
    found = find_checkpoint(tmp_path, "last")
    assert found is not None
    assert (found.path, found.skipped) == (newest, [])


def test_equal_times_go_by_the_step(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        os.utime(checkpoint(tmp_path / "checkpoints" / f"step-{step}.ckpt"), (1, 1))
    assert [path.stem for path in list_checkpoints(tmp_path)] == ["step-100", "step-20", "step-9"]


def test_no_last(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "nowhere", "last") is None
    (tmp_path / "checkpoints").mkdir()
    assert find_checkpoint(tmp_path, "last") is None


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
def test_truncated_files_are_passed_over(tmp_path: Path, keep: float) -> None:
    """Case 62."""
    place = tmp_path / "checkpoints"
    good = checkpoint(place / "step-1.ckpt", age=10)
    content = good.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    (place / "step-2.ckpt").write_bytes(content[:size])
    found = find_checkpoint(tmp_path, "last")
    assert found is not None
    assert found.path == good
    assert len(found.skipped) == 1
    assert str(place / "step-2.ckpt") in found.skipped[0]
    with pytest.raises(UserError, match=r"step-2\.ckpt .*truncated"):
        find_checkpoint(tmp_path, str(place / "step-2.ckpt"))
    good.unlink()
    with pytest.raises(UserError, match=r"can be read: checkpoint .*step-2\.ckpt"):
        find_checkpoint(tmp_path, "last")


def test_best_is_what_the_newest_that_knows_says(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    checkpoint(place / "step-1.ckpt", age=40, best="/elsewhere/checkpoints/step-1.ckpt")
    checkpoint(place / "step-2.ckpt", age=30, best="/elsewhere/checkpoints/step-2.ckpt")
    checkpoint(place / "step-3.ckpt", age=20, best="/elsewhere/checkpoints/step-2.ckpt")
    checkpoint(place / "step-4.ckpt", age=10, best="/elsewhere/checkpoints/step-3.ckpt", score=None)  # not measured
    (place / "step-5.ckpt").write_bytes(b"half")
    found = find_checkpoint(tmp_path, "best")
    assert found is not None
    assert found.path == place / "step-2.ckpt"
    (place / "step-2.ckpt").unlink()
    found = find_checkpoint(tmp_path, "best")
    assert found is not None
    assert found.path == place / "step-1.ckpt"


def test_no_best(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint in"):
        find_checkpoint(tmp_path, "best")
    checkpoint(tmp_path / "checkpoints" / "step-1.ckpt")
    with pytest.raises(UserError, match="nothing was validated"):
        find_checkpoint(tmp_path, "best")


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint at .*nothing"):
        read_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="is a folder"):
        read_checkpoint(tmp_path)
    text = tmp_path / "text.ckpt"
    text.write_text("not a checkpoint\n")
    with pytest.raises(UserError, match=r"text\.ckpt .*truncated or no checkpoint"):
        read_checkpoint(text)
    for number, content in enumerate(([1, 2], {"weights": torch.ones(2)}, {"state_dict": 3})):
        torch.save(content, tmp_path / f"{number}.ckpt")
        with pytest.raises(UserError, match="is no Lightning checkpoint"):
            read_checkpoint(tmp_path / f"{number}.ckpt")


def test_a_checkpoint_never_runs_code(tmp_path: Path) -> None:
    path = tmp_path / "code.ckpt"
    torch.save({"state_dict": {}, "thing": NotPlain()}, path)
    with pytest.raises(UserError, match=r"NotPlain.*--weights_only false"):
        read_checkpoint(path)
    assert isinstance(read_checkpoint(path, weights_only=False)["thing"], NotPlain)


# ------------------------------------------------------------------ writing


def test_last_ones_and_best_are_kept(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    evaluated = LitLLM._evaluated
    monkeypatch.setattr(LitLLM, "_evaluated", lambda self, stage: {**evaluated(self, stage), "val/loss": next(scores)})
    trainer = fit(store, tmp_path, 10)
    assert names(tmp_path) == ["step-10.ckpt", "step-4.ckpt", "step-8.ckpt"]
    best = find_checkpoint(tmp_path, "best")
    assert best is not None
    assert best.path.name == "step-4.ckpt"
    assert Path(trainer.checkpoint_callback.best_model_path).name == "step-4.ckpt"  # type: ignore[union-attr]
    shutil.move(tmp_path / "checkpoints", tmp_path / "moved" / "checkpoints")
    best = find_checkpoint(tmp_path / "moved", "best")
    assert best is not None
    assert best.path == tmp_path / "moved" / "checkpoints" / "step-4.ckpt"


def test_every_checkpoint_knows_its_own_score(store: str, tmp_path: Path) -> None:
    fit(store, tmp_path, 4, every_n_train_steps=1, keep_last=-1)
    for step, validated in ((1, False), (2, True), (3, False), (4, True)):
        state = read_checkpoint(tmp_path / "checkpoints" / f"step-{step}.ckpt")["callbacks"]["RunCheckpoint"]
        assert (state["files"][-1]["score"] is not None) is validated
        assert state["files"][-1]["step"] == step


def test_round_steps_are_kept_besides(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([3.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 0.5, 8.0, 9.0])
    evaluated = LitLLM._evaluated
    monkeypatch.setattr(LitLLM, "_evaluated", lambda self, stage: {**evaluated(self, stage), "val/loss": next(scores)})
    options: dict[str, Any] = {"keep_last": 1, "save_top_k": 1, "keep_every_n_steps": 6}
    fit(store, tmp_path, 14, **options)  # 4 is the best, 14 the last
    assert names(tmp_path) == ["step-12.ckpt", "step-14.ckpt", "step-4.ckpt", "step-6.ckpt"]
    last = tmp_path / "checkpoints" / "step-14.ckpt"
    assert [one["step"] for one in read_checkpoint(last)["callbacks"]["RunCheckpoint"]["files"]] == [4, 6, 12, 14]
    # A resumed run knows them. 6 is no longer round, and goes, and so does the start; 4 is, though 16 beats it.
    fit(store, tmp_path, 18, ckpt_path=last, **{**options, "keep_every_n_steps": 4})
    assert names(tmp_path) == ["step-12.ckpt", "step-16.ckpt", "step-18.ckpt", "step-4.ckpt"]
    fit(store, tmp_path, 20, ckpt_path=tmp_path / "checkpoints" / "step-18.ckpt", keep_last=1, save_top_k=0)
    assert names(tmp_path) == ["step-20.ckpt"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"limit_val_batches": 0, "max_steps": -1, "max_epochs": 1}, [25]),  # nothing validated: after the epoch
        ({"max_steps": 3}, [2, 3]),  # validated, and the end
        ({"max_steps": 5, "every_n_train_steps": 3}, [3, 5]),
        ({"max_steps": 5, "every_n_train_steps": 3, "val_check_interval": 3}, [3, 5]),
        ({"max_steps": -1, "max_epochs": 1, "limit_train_batches": 6}, [2, 3]),
        ({"fast_dev_run": 2}, []),
    ],
)
def test_when_checkpoints_are_written(store: str, tmp_path: Path, options: Any, expected: list[int]) -> None:
    fit(store, tmp_path, 0, keep_last=-1, **options)
    found = [read_checkpoint(path) for path in list_checkpoints(tmp_path)]
    assert sorted(content["global_step"] for content in found) == expected


def test_stopping_early_saves_the_final_state(store: str, tmp_path: Path) -> None:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    trainer = fit(store, tmp_path, 10, callbacks=[Stop()])
    assert names(tmp_path)[-1] == f"step-{trainer.global_step}.ckpt" == "step-3.ckpt"


def test_another_run_in_the_folder_is_left_alone(store: str, tmp_path: Path) -> None:
    fit(store, tmp_path, 4)
    before = {name: (tmp_path / "checkpoints" / name).read_bytes() for name in names(tmp_path)}
    fit(store, tmp_path, 8, keep_last=1, save_top_k=0)
    assert names(tmp_path) == [*sorted([*before, "step-8.ckpt"])]
    fit(store, tmp_path, 4, keep_last=1, save_top_k=0)
    assert names(tmp_path) == [*sorted([*before, "step-4-v1.ckpt", "step-8.ckpt"])]
    assert all((tmp_path / "checkpoints" / name).read_bytes() == content for name, content in before.items())


def test_a_resumed_run_goes_on_with_its_files(store: str, tmp_path: Path) -> None:
    fit(store, tmp_path, 4)
    fit(store, tmp_path, 8, ckpt_path=tmp_path / "checkpoints" / "step-4.ckpt", save_top_k=0)
    assert names(tmp_path) == ["step-6.ckpt", "step-8.ckpt"]  # those it was resumed from are its own
    # From another folder, its files are another run's, even under the same names.
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "other" / "checkpoints")
    fit(store, tmp_path / "other", 10, ckpt_path=tmp_path / "checkpoints" / "step-8.ckpt", save_top_k=0, keep_last=1)
    assert names(tmp_path / "other") == ["step-10.ckpt", "step-6.ckpt", "step-8.ckpt"]


def test_an_interrupted_save_leaves_nothing(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(store, tmp_path, 2)
    link = os.link

    def interrupted(source: Any, target: Any) -> None:
        assert Path(source).match(".step-4.ckpt.*.partial")
        raise KeyboardInterrupt  # after the bytes, before the name

    monkeypatch.setattr(os, "link", interrupted)
    with pytest.raises(SystemExit):
        fit(store, tmp_path, 4, ckpt_path=tmp_path / "checkpoints" / "step-2.ckpt")
    assert names(tmp_path) == ["step-2.ckpt"]
    monkeypatch.setattr(os, "link", link)
    (tmp_path / "checkpoints" / ".step-4.ckpt.partial").write_bytes(b"half")  # what a killed process leaves
    fit(store, tmp_path, 4, ckpt_path=tmp_path / "checkpoints" / "step-2.ckpt")
    assert names(tmp_path) == ["step-2.ckpt", "step-4.ckpt"]


def test_saving_on_an_error_if_asked_to(store: str, tmp_path: Path) -> None:
    class Fail(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError

    for asked, expected in ((False, ["step-2.ckpt"]), (True, ["step-2.ckpt", "step-3.ckpt"])):
        with pytest.raises(ZeroDivisionError):
            fit(store, tmp_path / str(asked), 10, callbacks=[Fail()], save_on_exception=asked)
        assert names(tmp_path / str(asked)) == expected


@pytest.mark.parametrize(
    "options", [{"keep_last": 0}, {"save_top_k": -1}, {"every_n_train_steps": 0}, {"keep_every_n_steps": 0}]
)
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        RunCheckpoint(**options)  # type: ignore[arg-type]


# ------------------------------------------------------------------ loading


@pytest.fixture(scope="module")
def run(store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps."""
    folder = tmp_path_factory.mktemp("run")
    fit(store, folder, 4)
    return folder


def test_load_model_gives_what_was_trained(run: Path) -> None:
    file = run / "checkpoints" / "step-4.ckpt"
    trained = LitLLM.load_from_checkpoint(file, map_location="cpu")
    ids = torch.arange(16)[None]
    for source in (run, run / "checkpoints", file, str(file)):
        model, tokenizer = load_model(source, "cpu")
        assert isinstance(model, Transformer)
        assert not model.training
        assert tokenizer.vocab_size == model.config.vocab_size
        assert model.config.eos_token_id == tokenizer.eos_token_id
        torch.testing.assert_close(model(ids), trained.model.eval()(ids), rtol=0, atol=0)
    half, _ = load_model(run, "cpu", torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_token_ids_come_with_the_checkpoint_without_a_store(run: Path) -> None:
    file = run / "checkpoints" / "step-4.ckpt"
    saved = read_checkpoint(file)["lit_llm"]["config"]
    module = LitLLM({**MODEL, "vocab_size": saved["vocab_size"], "max_position_embeddings": 16})
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    records = trainer.predict(module, TokenDataModule(prompts=["alpha"]), ckpt_path=file)
    assert records is not None
    assert module.transformer.config.eos_token_id == saved["eos_token_id"] is not None


def edited(run: Path, path: Path, edit: Any) -> Path:
    content = torch.load(run / "checkpoints" / "step-4.ckpt", weights_only=True)
    edit(content)
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("lit_llm"), "another program"),
        (lambda c: c["lit_llm"].update(config=None), "another model"),
        (lambda c: c["lit_llm"].update(tokenizer=None), "no tokenizer"),
        (lambda c: c["state_dict"].pop("model.norm.weight"), r"1 missing tensors, such as model\.norm\.weight"),
        (lambda c: c["state_dict"].update({"model.x": torch.ones(1)}), r"1 unexpected tensors, such as model\.x"),
        (
            lambda c: c["state_dict"].update({"model.norm.weight": torch.ones(3)}),
            r"norm\.weight is \(3,\), not \(32,\)",
        ),
    ],
)
def test_checkpoints_that_give_no_model(run: Path, tmp_path: Path, edit: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_model(edited(run, tmp_path / "edited.ckpt", edit))
    assert "edited.ckpt" in str(error.value)


def test_sources_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint in"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="Hugging Face folder"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="there is nothing at"):
        load_model(tmp_path / "nothing.ckpt")
