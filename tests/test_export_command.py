"""`lit-llm export`: what it takes out of checkpoints, what it leaves there, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lit_llm.checkpoint import load_model, open_weights, read_checkpoint
from lit_llm.checkpoint.hf import export
from lit_llm.checkpoint.sharded import prepare_write
from lit_llm.cli.main import main
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.model import Transformer
from tests.test_export import loaded, logits, transformer
from tests.test_export_tokenizer import assert_same_ids


def checkpoint(model: Transformer, tokenizer: Tokenizer | None, **more: Any) -> dict[str, Any]:
    """What a run saves, as far as an export goes by it."""
    files = None if tokenizer is None else tokenizer.to_files()
    return {
        "state_dict": {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        "lit_llm": {"format": 1, "config": model.config.to_dict(), "tokenizer": files},
        **more,
    }


def average(model: Transformer, **changes: Any) -> dict[str, Any]:
    """WeightAverage's state: every weight is 0.5, in float64, which a run's dtype never is."""
    weights = {f"model.{name}": torch.full(t.shape, 0.5, dtype=torch.float64) for name, t in model.named_parameters()}
    return {"WeightAverage": {"evaluate": True, "updates": 3, "weights": weights, **changes}}


def test_averaged_weights_are_taken_where_the_run_validated_with_them(tmp_path: Path) -> None:
    model = transformer()
    torch.save(checkpoint(model, None, callbacks=average(model)), tmp_path / "a.ckpt")
    torch.save(checkpoint(model, None, callbacks=average(model, evaluate=False)), tmp_path / "b.ckpt")
    torch.save(checkpoint(model, None, callbacks=average(model, updates=0)), tmp_path / "c.ckpt")
    for name, averaged in {"a": True, "b": False, "c": False}.items():
        export(open_weights(tmp_path / f"{name}.ckpt").weights, model.config, tmp_path / name)
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            for key, value in model.state_dict().items():
                found = file.get_tensor(key if key.startswith("lm_head") else f"model.{key}")
                assert found.dtype == torch.float32
                assert torch.equal(found, torch.full_like(value, 0.5) if averaged else value)


def test_a_damaged_checkpoint_is_named_when_it_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    torch.save(checkpoint(transformer(), None), place / "step-1.ckpt")
    assert open_weights(tmp_path).path == place / "step-1.ckpt"
    assert not caplog.records
    (place / "step-2.ckpt").mkdir()  # cut short, and newer
    assert open_weights(tmp_path).path == place / "step-1.ckpt"
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith(f"passed over: {place / 'step-2.ckpt'}")
    assert "complete.json is missing" in told


def peak(action: Any) -> int:
    """Bytes by which the process grows at most during an action, files that are mapped into it included."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        pytest.skip("needs Linux's peak of resident memory")

    def kib(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    before = kib("VmRSS")
    action()
    return (kib("VmHWM") - before) * 1024


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_memory_does_not_grow_with_the_optimizer(kind: str, tmp_path: Path) -> None:
    large = 96 * 2**20
    model = transformer()
    names = [[f"model.{name}" for name, _ in model.named_parameters()]]
    group = {"params": list(range(len(names[0])))}
    state = {0: {"exp_avg": torch.ones(large // 4), "step": torch.tensor(1.0)}}
    content = checkpoint(model, None, optimizer_states=[{"state": state, "param_groups": [group]}])
    path = tmp_path / "checkpoints" / "step-1.ckpt"
    path.parent.mkdir()
    if kind == "file":
        torch.save(content, path)
    else:
        prepare_write(content, path, names)()
    del content, state
    export(open_weights(tmp_path).weights, model.config, tmp_path / "warm")
    assert peak(lambda: export(open_weights(tmp_path).weights, model.config, tmp_path / "out")) < large / 4
    # So that this says something: reading the state once is seen.
    assert peak(lambda: read_checkpoint(path)["optimizer_states"][0]["state"][0]["exp_avg"].sum()) > large / 2
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(tmp_path / "warm")))
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), logits(model), atol=1e-4, rtol=0)


def test_sharded_checkpoints_are_exported(tmp_path: Path, tokenizer: Path) -> None:
    ours = Tokenizer(tokenizer)
    model = transformer(vocab_size=ours.vocab_size, tie_word_embeddings=True).bfloat16()
    content = checkpoint(model, ours, callbacks=average(model))
    prepare_write(content, tmp_path / "run/checkpoints/step-7.ckpt", [])()
    with_average = open_weights(tmp_path / "run").weights
    assert with_average.dtype("embed_tokens.weight") == torch.bfloat16
    assert torch.equal(with_average.read("norm.weight"), torch.full((64,), 0.5, dtype=torch.bfloat16))
    path = tmp_path / "run/checkpoints/step-8.ckpt"
    prepare_write({**content, "callbacks": {}}, path, [])()
    for source in (tmp_path / "run", path):
        assert main(["export", str(source), "--output", str(tmp_path / "out")]) == 0
        theirs = loaded(tmp_path / "out")
        assert theirs.dtype == torch.bfloat16
        for name, weight in model.state_dict().items():
            assert torch.equal(theirs.get_parameter(f"model.{name}"), weight)
    assert_same_ids(ours, tmp_path / "out")


@pytest.fixture(scope="module")
def run(store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint after 2 steps."""
    from tests.checkpoint_runs import fit

    folder = tmp_path_factory.mktemp("run")
    fit(store, folder, 2)
    return folder


def test_a_run_is_exported_and_computes_the_same(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a b" / "out"
    assert main(["export", str(run), "--output", str(out), "--max_shard_size", "2KB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    model, tokenizer = load_model(run, "cpu")
    newest = max((run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert lines[0] == f"{newest} is exported:"
    assert lines[1].startswith(
        f"  {out}: LlamaForCausalLM, {model.num_parameters():,} parameters in float32, "
        f"{4 * model.num_parameters() / 1e6:,.1f} MB in "
    )
    assert lines[1].endswith(" files; tokenizer with the chat template ChatML, by which lit-llm renders chats")
    assert lines[2] == f'  load it by transformers.AutoModelForCausalLM.from_pretrained("{out}")'
    assert len(lines) == 3
    assert len(list(out.glob("model-*.safetensors"))) > 1
    theirs, vocab = loaded(out), tokenizer.vocab_size
    torch.testing.assert_close(logits(theirs, 12, vocab), logits(model, 12, vocab), atol=1e-4, rtol=0)
    assert_same_ids(tokenizer, out)
    assert theirs.config.eos_token_id == tokenizer.eos_token_id
    # A checkpoint's file, and an export in place of the earlier one.
    assert main(["export", str(newest), "--output", str(out), "--dtype", "bfloat16"]) == 0
    assert "in bfloat16" in capsys.readouterr().out
    assert loaded(out).dtype == torch.bfloat16
    assert not list(out.glob("model-*"))


def test_a_checkpoint_without_tokenizer_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformer()
    torch.save(checkpoint(model, None), tmp_path / "a.ckpt")
    assert main(["export", str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path / 'a.ckpt'} is exported:"
    assert lines[1].endswith("1 file; no tokenizer: the checkpoint has none")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter.txt").write_text("mine")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    odd = transformer(final_logit_softcapping=30.0)
    torch.save(checkpoint(odd, None), tmp_path / "odd.ckpt")
    torch.save({**checkpoint(odd, None), "lit_llm": {"config": None, "tokenizer": None}}, tmp_path / "own.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    out = ["--output", str(tmp_path / "out")]
    for words, said in (
        ([], "the following arguments are required: SOURCE, --output"),
        ([str(run)], "the following arguments are required: --output"),
        ([str(run), *out, "--dtype", "int8"], "invalid choice: 'int8'"),
        ([str(run), *out, "--max_shard_size", "big"], "max_shard_size 'big' is no size"),
        ([str(run), *out, "--dtpye", "x"], "unknown '--dtpye'; did you mean --dtype?"),
        ([str(run), "--output", str(tmp_path / "full")], "is not empty and no earlier export"),
        ([str(run), "--output", str(run)], "is not empty and no earlier export"),
        ([str(tmp_path / "nothing"), *out], "there is nothing at"),
        ([str(tmp_path / "full"), *out], "no checkpoint in"),
        ([str(tmp_path / "hf"), *out], "looks like a Hugging Face folder"),
        ([str(tmp_path / "odd.ckpt"), *out], "model.config.final_logit_softcapping 30.0 beside"),
        ([str(tmp_path / "own.ckpt"), *out], "holds another model than lit_llm's Transformer"),
        ([str(tmp_path / "foreign.ckpt"), *out], "checkpoint of another program"),
    ):
        capsys.readouterr()
        assert main(["export", *words]) == 2, words
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("lit-llm: error: ")
        assert captured.err.count("\n") == 1
        assert said in captured.err
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]


def test_help_names_the_command_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "  export    write a checkpoint as a Hugging Face folder" in capsys.readouterr().out
    assert main(["export", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("SOURCE", "--output", "--dtype", "--max_shard_size"))
