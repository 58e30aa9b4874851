"""Strategies on the command line: names, options, times, SLURM; and checkpoints in a folder of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning  # noqa: F401  (before any test: its log goes to the stderr that it is first imported with)
import pytest
import yaml

from lit_llm.cli import main as cli_main
from lit_llm.cli.main import main

S = "--trainer.strategy"
MESH, REPLICAS = "lit_llm.parallel.MeshStrategy", "lit_llm.parallel.DataParallelStrategy"
SMALL = ["--model.config=1m", "--model.config.hidden_size=32", "--model.config.num_hidden_layers=1"]
QUICK = ["--data.seq_len=16", "--data.global_batch_size=8", "--trainer.accelerator=cpu", "--trainer.logger=false"]
VALIDATES = ["--trainer.limit_val_batches=1", "--trainer.val_check_interval=1"]


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs in a folder of its own and leaves no mark on the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs fit in this process; gives its exit code, stdout and stderr."""

    def run(*words: str, command: str = "fit") -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([command, *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def chosen(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., Any]:
    """The strategy that files (mappings, or texts of the strategy) and words come to, and that its own print gives."""

    def run(*words: Any) -> Any:
        given = [_file(tmp_path, n, one) if not isinstance(one, str) else one for n, one in enumerate(words)]
        code, out, err = cli(*given, "--print_config")
        assert code == 0, err
        (tmp_path / "printed.yaml").write_text(out)
        again = cli("--config=printed.yaml", "--print_config")
        assert again[:2] == (0, out), again
        return yaml.safe_load(out)["trainer"]["strategy"]

    return run


def _file(folder: Path, number: int, strategy: Any) -> str:
    path = folder / f"{number}.yaml"
    text = strategy["text"] if isinstance(strategy, dict) and "text" in strategy else yaml.safe_dump(strategy)
    path.write_text("trainer:\n  max_steps: 7\n  strategy:\n" + "".join(f"    {line}\n" for line in text.splitlines()))
    return f"--config={path}"


def _error(done: tuple[int, str, str]) -> str:
    code, _, err = done
    assert code == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("lit-llm: error: "), err
    return last.removeprefix("lit-llm: error: ")


@pytest.mark.parametrize(
    ("words", "path", "options"),
    [
        ([S, "fsdp", f"{S}.replicate", "2"], MESH, {"replicate": 2, "shard": "auto"}),
        ([f"{S}.replicate=2", f"{S}=fsdp"], MESH, {"replicate": 2}),
        ([f"{S}.replicate", "2", f"{S}.init_args.prefetch=3"], MESH, {"replicate": 2, "prefetch": 3}),
        ([S, "ddp", f"{S}.bucket_size_mb", "5"], REPLICAS, {"bucket_size_mb": 5.0}),
        ([S, "MeshStrategy"], MESH, {"replicate": 1}),
        ([f'{S}={{"class_path": "fsdp", "init_args": {{"replicate": 2}}}}'], MESH, {"replicate": 2}),
        # Files, and words on them.
        ([{"class_path": "fsdp", "init_args": {"replicate": 2}}, f"{S}.shard=3"], MESH, {"replicate": 2, "shard": 3}),
        ([{"replicate": 2}], MESH, {"replicate": 2}),
        (["auto", {"init_args": {"replicate": 2}}], MESH, {"replicate": 2}),
        (["ddp", f"{S}.static_graph=true"], None, {}),
        ([{"class_path": "ddp"}, f"{S}.compression=null"], REPLICAS, {"compression": None}),
        ([{"class_path": MESH, "init_args": {"replicate": 2}}, {"class_path": "fsdp", "prefetch": 0}], MESH,
         {"replicate": 2, "prefetch": 0}),
        ([{"class_path": "ddp", "init_args": {"bucket_size_mb": 5}}, {"class_path": MESH}], MESH, {"shard": "auto"}),
        ([{"replicate": 2}, S, REPLICAS, f"{S}.powersgd_rank=2"], REPLICAS, {"powersgd_rank": 2}),
        ([S, "DDPStrategy", f"{S}.process_group_backend=gloo"], "lightning.pytorch.strategies.DDPStrategy",
         {"process_group_backend": "gloo"}),
    ],
)  # fmt: skip
def test_options_choose_the_class_and_add_up(
    chosen: Callable[..., Any], words: list[Any], path: str | None, options: dict[str, Any]
) -> None:
    if path is None:  # a file may hold a mere name
        Path("name.yaml").write_text("trainer: {strategy: ddp}")
        words, path, options = ["--config=name.yaml", *words[1:]], REPLICAS, {"static_graph": True}
    if words[0] == "auto":
        Path("name.yaml").write_text("trainer: {strategy: auto}")
        words[0] = "--config=name.yaml"
    strategy = chosen(*words)
    assert strategy["class_path"] == path
    assert {name: strategy["init_args"][name] for name in options} == options


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([{"text": "null"}], "auto"),
        ([{"replicate": 2}, {"text": "null"}], "auto"),
        ([{"replicate": 2}, f"{S}=auto"], "auto"),
        ([{"replicate": 2}, S, "null"], "auto"),
        ([f"{S}.replicate=2", f"{S}=auto"], "auto"),
        ([{"class_path": "fsdp"}], "fsdp"),
        ([{"class_path": MESH, "init_args": {"replicate": 2}}, f"{S}=fsdp"], "fsdp"),
        ([{"replicate": 2}, f"{S}=ddp"], "ddp"),
        ([f"{S}=fsdp", f"{S}.replicate=2", f"{S}=ddp"], "ddp"),
    ],
)
def test_a_name_replaces_what_came_before(chosen: Callable[..., Any], words: list[Any], name: str) -> None:
    assert chosen(*words) == name


def test_the_rest_of_a_file_stays(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    words = [_file(tmp_path, 0, {"class_path": "fsdp", "init_args": {"replicate": 2}}), f"{S}.shard=3"]
    code, out, _ = cli("--print_config", *words)  # in whatever place
    whole = yaml.safe_load(out)
    assert code == 0
    assert whole["trainer"]["max_steps"] == 7
    assert whole["trainer"]["strategy"]["init_args"]["shard"] == 3
    assert whole["data"]["class_path"] == "lit_llm.TokenDataModule"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("60", "0:01:00"),
        ("3600", "1:00:00"),
        ("1.5", "0:00:01.500000"),
        ("2:00:00", "2:00:00"),
        ("0:00:05", "0:00:05"),
        ("1 day, 1:00:00", "1 day, 1:00:00"),
    ],
)
def test_times_in_seconds(chosen: Callable[..., Any], given: str, read: str) -> None:
    assert chosen(S, "fsdp", f"{S}.timeout", given)["init_args"]["timeout"] == read
    assert chosen({"text": f"class_path: ddp\ninit_args:\n  timeout: {given}"})["init_args"]["timeout"] == read


def test_a_time_reaches_the_strategy(cli: Callable[..., tuple[int, str, str]], monkeypatch: Any, store: str) -> None:
    from lit_llm.cli import lightning as commands

    built: list[Any] = []

    def build(command: str, settings: dict[str, Any], *rest: Any) -> None:
        built.append(settings)
        raise ZeroDivisionError

    monkeypatch.setattr(commands, "make_trainer", build)
    for name in ("fsdp", "ddp"):
        with pytest.raises(ZeroDivisionError):
            cli(*SMALL, *QUICK, f"--data.store={store}", f"{S}={name}", f"{S}.timeout=90", "--trainer.max_steps=1")
    assert [settings["strategy"]._timeout.total_seconds() for settings in built] == [90, 90]


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ([f"{S}=ddp", f"{S}.replicate=2"],
         ["trainer.strategy.replicate is no option of DataParallelStrategy", f"{S} fsdp", "bucket_size_mb, "]),
        ([f"{S}.bucket_size_mb=5"], ["is no option of MeshStrategy", "--trainer.strategy ddp", "replicate, shard"]),
        ([f"{S}=fsdp", f"{S}.pipeline=2"],
         ["unknown option trainer.strategy.pipeline; MeshStrategy knows replicate, shard, "]),
        ([f"{S}={MESH}", f"{S}.shards=2"],
         ["unknown option trainer.strategy.shards; did you mean trainer.strategy.shard?"]),
        ([f"{S}=ddp_spawn", f"{S}.replicate=2"],
         ["trainer.strategy ddp_spawn takes no options, but replicate is given"]),
        ([f"{S}=lit_llm.parallel.MashStrategy", f"{S}.shard=2"],
         ["trainer.strategy: there is no class lit_llm.parallel.MashStrategy; ", f"did you mean {MESH}?"]),
        ([f"{S}=nosuch.Strategy"],
         ["there is no class nosuch.Strategy (No module named 'nosuch'); known are", MESH, REPLICAS]),
        ([f"{S}=fspd"], ["trainer.strategy: there is no fspd; did you mean fsdp?"]),
        ([f"{S}=mesh"], ["trainer.strategy: there is no mesh; known are auto, fsdp, ddp, MeshStrategy"]),
        ([f"{S}=lit_llm.LitLLM"], ["trainer.strategy: lit_llm.LitLLM is no strategy"]),
        ([f"{S}=[1]"], ["trainer.strategy: [1] does not fit"]),
        ([f"{S}=fsdp", f"{S}.replicate"], ["--trainer.strategy.replicate has no value"]),
        ([f"{S}=fsdp", f"{S}.replicate=two"], ["trainer.strategy.replicate: 'two' does not fit, expected auto or int"]),
        ([f"{S}=fsdp", f"{S}.cpu_offload=maybe"],
         ["trainer.strategy.cpu_offload: 'maybe' does not fit, expected bool"]),
        *(([f"{S}=fsdp", f"{S}.timeout={time}"], ["trainer.strategy.timeout must be seconds or h:m:s above 0", time])
          for time in ("soon", "0", "-5", "1e+99", "1:2:3:x")),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    cli: Callable[..., tuple[int, str, str]], words: list[str], fragments: list[str]
) -> None:
    line = _error(cli(*words, "--print_config"))
    for fragment in fragments:
        assert fragment in line


def test_a_class_of_ones_own(chosen: Callable[..., Any]) -> None:
    Path("mine_strategy.py").write_text(
        "from lit_llm.parallel import MeshStrategy\n\n\nclass Mine(MeshStrategy):\n"
        "    def __init__(self, extra: int = 0, **kwargs):\n        super().__init__(**kwargs)\n"
    )
    strategy = chosen(S, "mine_strategy.Mine", f"{S}.extra=4", f"{S}.replicate=2")
    assert strategy["class_path"] == "mine_strategy.Mine"
    assert strategy["init_args"]["extra"] == 4
    assert strategy["init_args"]["replicate"] == 2


@pytest.mark.parametrize("name", ["fsdp", MESH])
def test_help_of_a_strategy(cli: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, out, _ = cli(f"{S}.help", name)
    assert code == 0
    assert "--trainer.strategy.reduce_every_micro_batch" in out
    assert "blocks that are gathered ahead" in " ".join(out.split())


# SLURM


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth of four tasks that srun has started on one machine."""
    layout = {"NTASKS": 4, "NTASKS_PER_NODE": 4, "NNODES": 1, "JOB_NAME": "train", "JOB_ID": 77, "STEP_ID": 0}
    for name, value in {**layout, "PROCID": 3, "LOCALID": 3, "NODEID": 0}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(cli_main, "_PATIENCE_S", 0.0, raising=False)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "auto"])
@pytest.mark.parametrize("devices", ["1", "2"])
@pytest.mark.usefixtures("slurm")
def test_slurm_has_started_more_tasks(cli: Any, store: str, strategy: str, devices: str) -> None:
    words = [*SMALL, *QUICK, f"--data.store={store}", "--trainer.max_steps=1", f"{S}={strategy}"]
    line = _error(cli(*words, f"--trainer.devices={devices}"))
    assert f"trainer.devices {devices} does not match SLURM's --ntasks-per-node 4" in line


@pytest.mark.usefixtures("slurm")
def test_slurm_runs_on_other_machines(cli: Any, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SMALL, *QUICK, f"--data.store={store}", "--trainer.max_steps=1", f"{S}=fsdp", "--trainer.devices=4"]
    assert "trainer.num_nodes 2 does not match SLURM's --nodes 1" in _error(cli(*words, "--trainer.num_nodes=2"))
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    assert "SLURM's --ntasks 4 says not how many run on a node; give --ntasks-per-node" in _error(cli(*words))


@pytest.mark.usefixtures("slurm")
def test_one_process_in_a_job_without_srun(cli: Any, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEP_ID", "PROCID", "LOCALID"):
        monkeypatch.delenv(f"SLURM_{name}")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    words = [*SMALL, *QUICK, f"--data.store={store}", "--trainer.max_steps=1", "--trainer.devices=1"]
    assert cli(*words, "--trainer.limit_val_batches=0")[0] == 0


# checkpoint.dirpath


def test_checkpoints_elsewhere(cli: Any, store: str, tmp_path: Path) -> None:
    words = [*SMALL, *QUICK, f"--data.store={store}", "--checkpoint.dirpath=there", *VALIDATES]
    code, out, _ = cli(*words, "--trainer.max_steps=2", "--ckpt_path=last")
    assert code == 0
    assert out.strip().endswith("run: runs/default, last checkpoint: there/step-2.ckpt")
    assert not Path("runs/default/checkpoints").exists()
    code, out, err = cli(*words, "--trainer.max_steps=3", "--ckpt_path=last")
    assert code == 0
    assert "checkpoint: there/step-2.ckpt (step 2)" in err
    assert out.strip().endswith("last checkpoint: there/step-3.ckpt")
    # In any command, and by the saved configuration too.
    for more in (words, ["--config=runs/default/config.yaml"]):
        assert "checkpoint: there/step-3.ckpt (step 3)" in cli(*more, command="validate")[2]
    assert "checkpoint: there/step-3.ckpt (step 3)" in cli(*words, "--ckpt_path=best", command="validate")[2]
    # One that is damaged is passed over; afresh is told.
    Path("there/step-4.ckpt").write_bytes(b"half")
    _, _, err = cli(*words, "--ckpt_path=last", command="validate")
    assert "passed over: checkpoint there/step-4.ckpt (4 bytes) is truncated" in err
    assert "checkpoint: there/step-3.ckpt" in err
    _, _, err = cli(*words, "--trainer.max_steps=1")
    assert "there/step-1.ckpt" not in err.partition("is of an earlier run")[0]
    assert "is of an earlier run, which is left alone; --ckpt_path last would go on with it" in err


def test_no_checkpoint_elsewhere(cli: Any, store: str) -> None:
    words = [*SMALL, *QUICK, f"--data.store={store}", "--checkpoint.dirpath=there"]
    assert "validate needs a checkpoint and there is none in there;" in _error(cli(*words, command="validate"))
    Path("there").mkdir()
    Path("there/step-4.ckpt").write_bytes(b"half")
    for which, told in (
        ("last", "no checkpoint in there can be read: "),
        ("best", "no checkpoint in there knows of a"),
    ):
        line = _error(cli(*words, f"--ckpt_path={which}", command="validate"))
        assert told in line
        assert "step-4.ckpt (4 bytes) is truncated" in line


def test_a_stopped_run_says_how_it_goes_on(cli: Any, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_llm.callbacks import RunCheckpoint

    def stop(self: RunCheckpoint, trainer: Any, *rest: Any) -> None:
        Path("there").mkdir()
        Path("there/step-1.ckpt").write_bytes(b"")
        raise SystemExit(0)

    monkeypatch.setattr(RunCheckpoint, "on_train_batch_end", stop)
    words = [*SMALL, *QUICK, f"--data.store={store}", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    code, _, err = cli(*words, "--checkpoint.dirpath=there")
    assert code == 0
    assert err.strip().splitlines()[-1] == "the same command with --ckpt_path last goes on"


def test_a_folder_that_can_not_be(cli: Any, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    words = [*SMALL, *QUICK, f"--data.store={store}", "--trainer.max_steps=1"]
    for folder in ("file", "file/inside"):
        line = _error(cli(*words, f"--checkpoint.dirpath={folder}"))
        assert line.startswith(f"checkpoint.dirpath {folder}: ")
        assert line.endswith("/file is a file, not a folder; choose another")
    monkeypatch.setenv("HOME", os.getcwd())
    assert "/file is a file, not a folder" in _error(cli(*words, "--checkpoint.dirpath=~/file"))
    real = os.access  # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: real(path, mode) and not str(path).endswith("/locked"))
    Path("locked").mkdir()
    line = _error(cli(*words, "--checkpoint.dirpath=locked/deeper"))
    assert line.startswith("checkpoint.dirpath locked/deeper: ")
    assert "/locked can't be written to" in line
    assert not Path("runs").exists()
