"""Sharded training from the command line: fsdp on two processes, and what goes on from its checkpoints."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from lit_llm import LitLLM
from lit_llm.checkpoint import load_model
from lit_llm.cli.main import main


def words(store: str, folder: Path, steps: int) -> list[str]:
    return [
        *(
            "fit",
            f"--data.store={store}",
            "--data.seq_len=16",
            "--data.global_batch_size=8",
            "--data.micro_batch_size=2",
        ),
        *("--model.config=1m", "--model.config.hidden_size=32", "--trainer.accelerator=cpu"),
        *(f"--trainer.max_steps={steps}", "--model.schedule.total_steps=20", "--trainer.log_every_n_steps=1"),
        *(
            "--checkpoint.every_n_train_steps=3",
            "--trainer.limit_val_batches=1",
            f"--trainer.default_root_dir={folder}",
        ),
        *("--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={folder}/csv"),
    ]


def losses(folder: Path) -> dict[int, float]:
    """Of the newest log."""
    newest = max((folder / "csv").rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    with newest.open() as file:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}


@pytest.fixture(scope="module")
def sharded(store: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of three steps on two processes, and what they said."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [
        sys.executable,
        "-m",
        "lit_llm",
        *words(store, folder, 3),
        "--trainer.devices=2",
        "--trainer.strategy=fsdp",
    ]
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout + done.stderr


def test_fsdp_means_our_strategy(sharded: tuple[Path, str]) -> None:
    folder, said = sharded
    assert "trainer.strategy fsdp: lit_llm.parallel.MeshStrategy with shard auto, over all devices\n" in said
    assert said.count("mesh: shard 2; ") == 1
    assert (folder / "checkpoints/step-3.ckpt/complete.json").is_file()
    strategy = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["strategy"]
    assert strategy["class_path"] == "lit_llm.parallel.MeshStrategy"
    assert strategy["init_args"]["shard"] == "auto"


def test_one_process_goes_on_from_two(
    sharded: tuple[Path, str], store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = sharded
    assert main(words(store, tmp_path, 6)) == 0
    whole = losses(tmp_path)
    assert losses(folder) == pytest.approx({step: whole[step] for step in (0, 1, 2)}, abs=1e-5)
    assert main([*words(store, folder, 6), "--ckpt_path=last"]) == 0
    assert losses(folder) == pytest.approx({step: whole[step] for step in (3, 4, 5)}, abs=1e-5)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-3.ckpt", "step-6.ckpt"]
    # And everything else that takes a run.
    capsys.readouterr()
    first = folder / "checkpoints/step-3.ckpt"
    assert main(["validate", f"--config={folder}/config.yaml", f"--ckpt_path={first}"]) == 0
    assert main(["generate", str(first), "--prompt=alpha", "--max_new_tokens=3"]) == 0
    assert main(["export", str(first), f"--output={tmp_path}/hf"]) == 0
    model, _ = load_model(first, "cpu")
    # Its head is its embedding, and stays so on the way out.
    assert model.config.tie_word_embeddings
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert exported.lm_head.weight is exported.get_input_embeddings().weight
    ids = torch.arange(12)[None]
    torch.testing.assert_close(exported(ids).logits, model(ids), atol=1e-5, rtol=0)
    loaded = LitLLM.load_from_checkpoint(first)
    for name, parameter in loaded.transformer.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_a_strategy_without_options_and_a_wrong_one(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = [*words(store, tmp_path, 1), "--trainer.devices=1"]
    assert main([*one, "--trainer.strategy=lit_llm.parallel.MeshStrategy"]) == 0
    for options, said in (
        (["--trainer.strategy.tensor=2"], "trainer.strategy.tensor 2 is not there yet"),
        (
            ["--trainer.strategy.replicate=3"],
            "replicate 3 x shard auto needs a multiple of 3 processes, but there is 1",
        ),
        (["--trainer.strategy.shard=half"], "trainer.strategy.shard: 'half' does not fit"),
        (["--trainer.strategy.pipeline=2"], "unknown option trainer.strategy.pipeline"),
        (["--trainer.precision=16-mixed"], "trainer.precision 16-mixed does not exist with MeshStrategy"),
    ):
        assert main([*one, "--trainer.strategy=lit_llm.parallel.MeshStrategy", *options]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("lit-llm: error: "), line
        assert said in line
    assert main([*one, "--trainer.strategy=fsdp_cpu_offload"]) == 2
    assert (
        "lit_llm.parallel.MeshStrategy with trainer.strategy.shard auto and cpu_offload true" in capsys.readouterr().err
    )
