"""The command line: options, errors, runs and what they leave."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning  # noqa: F401  (before any test: its log goes to the stderr that it is first imported with)
import pytest
import torch
import yaml

from lit_llm.cli.main import _failure, main
from lit_llm.cli.trainer import follow_torchrun
from lit_llm.errors import RunStopped, UserError

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--model.config.hidden_size=32", "--model.config.num_hidden_layers=1", "--model.config.num_attention_heads=2"]
SMALL_DATA = ["--data.seq_len=16", "--data.global_batch_size=4"]
QUICK = ["--trainer.accelerator=cpu", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
PROMPTS = '["alpha beta", "gamma"]'


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
    """Runs a command in this process; gives its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def resolved(cli: Callable[..., tuple[int, str, str]]) -> Callable[..., dict[str, Any]]:
    """The configuration that a command would run with."""

    def run(*words: str, command: str = "fit") -> dict[str, Any]:
        code, out, err = cli(command, *words, "--print_config")
        assert code == 0, err
        return yaml.safe_load(out)

    return run


@pytest.fixture(scope="session")
def run(store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run's folder: 5 steps, checkpoints at 4 and 5. Not to be changed."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    before = dict(os.environ)
    words = ["--data.store", store, "--trainer.max_steps=5", "--trainer.default_root_dir", str(folder)]
    assert main(["fit", *words, *TINY, *SMALL_DATA, *QUICK]) == 0
    os.environ.clear()
    os.environ.update(before)
    return folder


def write(path: str, content: Any) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def model_of(config: dict[str, Any]) -> dict[str, Any]:
    return config["model"]["init_args"]


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, **options)


# ------------------------------------------------------------------ light commands


def test_help_and_version_need_no_torch() -> None:
    code = (
        "import sys, contextlib, io\n"
        "from lit_llm.cli.main import main\n"
        "for words in ([], ['--help'], ['--version'], ['prepare', '--help'], ['generate', '--help'], ['nope']):\n"
        "    main(words)\n"
        "print(sorted({'torch', 'lightning', 'jsonargparse', 'transformers'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.rstrip().endswith("[]"), done


def test_help_takes_less_than_a_second() -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = python("-m", "lit_llm", "--help")
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
    assert min(seconds) < 1


def test_help_without_a_command_names_them_all(cli: Any) -> None:
    code, out, err = cli()
    assert (code, err) == (0, "")
    assert cli("--help")[1] == out
    for command in ("fit", "validate", "test", "predict", "prepare", "generate"):
        assert f"\n  {command} " in out
    assert cli("--version")[1].startswith("lit-llm 0.")


@pytest.mark.parametrize("command", ["fit", "predict", "prepare", "generate"])
def test_help_of_a_command(cli: Any, command: str) -> None:
    code, out, _ = cli(command, "--help")
    assert code == 0
    assert out.startswith(f"usage: lit-llm {command}")


# ------------------------------------------------------------------ a user's mistakes

MISTAKES: list[tuple[str, list[str]]] = [
    ("fit run.yaml", ["unexpected word 'run.yaml'", "--config run.yaml"]),
    ("fit --data.store [a,b]", ["data.store", "{FOLDER: 1, OTHER: 2}"]),
    ("""fit --data.store={"a":-1}""", ["the weight of store a is -1"]),
    ("fit --data.packing loose", ["data.packing", "best_fit"]),
    ("fitt", ["'fitt'", "did you mean fit?"]),
    ("--versio", ["'--versio'", "--version"]),
    ("prepare", ["INPUT", "--output"]),
    ("prepare x --output y --vocab 3", ["'--vocab'", "--vocab_size"]),
    ("prepare nofile.txt --output y", ["nofile.txt"]),
    ("generate", ["SOURCE"]),
    ("generate run", ["--prompt"]),
    ("generate run --prompt a --prompts_file b", ["not both"]),
    ("generate run --prompt a --temprature 3", ["'--temprature'", "--temperature"]),
    ("generate run --prompt a --temperature -1", ["temperature", "-1"]),
    ("generate run --prompt a --dtype int8", ["int8", "bfloat16"]),
    ("generate run --prompt a --batch_size 0", ["--batch_size", "0"]),
    ("generate nowhere --prompt a", ["nowhere"]),
    ("fit --model.optimizer.lr abc", ["model.optimizer.lr", "'abc'", "float"]),
    ("fit --model.optimizer.lr null", ["model.optimizer.lr", "null", "float"]),
    ("fit --model.optimizer.learning_rate 3", ["model.optimizer.learning_rate", "model.optimizer.lr"]),
    ("fit --model.optimzer.lr 3", ["model.optimzer.lr", "did you mean model.optimizer?"]),
    ("fit --model.compil true", ["model.compil", "did you mean model.compile?"]),
    ("fit --modle.xx 3", ["modle.xx", "model"]),
    ("fit --trainer.max_stepz 3", ["trainer.max_stepz", "trainer.max_steps"]),
    ("fit --trainer.max_step 3", ["trainer.max_step;", "trainer.max_steps"]),
    ("fit --trainer.max_steps abc", ["trainer.max_steps", "'abc'", "int"]),
    ("fit --trainer.max_steps", ["--trainer.max_steps", "value"]),
    ("fit --model.config", ["--model.config", "value"]),
    ("fit --trainer.precision 8", ["trainer.precision", "'8'", "bf16-mixed", "16-mixed", "null"]),
    ("fit --trainer.strategy fsdp_cpu_offload", ["trainer.strategy fsdp_cpu_offload", "MeshStrategy"]),
    ("fit --trainer.strategy lightning.pytorch.strategies.FSDPStrategy", ["FSDPStrategy", "MeshStrategy"]),
    ("fit --trainer.strategy foo", ["strategy", "foo"]),
    ("fit --trainer.accelerator cpu --trainer.precision 16-mixed", ["precision 16-mixed", "cpu", "bf16-mixed"]),
    ("fit --trainer.callbacks Foo", ["trainer.callbacks", "'Foo'", "module.Class"]),
    ("fit --trainer.logger CSVLogger", ["trainer.logger.save_dir"]),
    ("fit --checkpoint.keep_last 0", ["checkpoint.keep_last", "0"]),
    ("fit --config nope.yaml", ["nope.yaml", "no such file"]),
    ("fit --config bad.yaml", ["bad.yaml:2", "YAML"]),
    ("fit --config list.yaml", ["list.yaml", "mapping"]),
    ("fit --config misspelt.yaml", ["modl.optimizer.lr", "did you mean model?"]),
    ("fit --model nowhere.Nope", ["'nowhere.Nope'", "No module named 'nowhere'"]),
    ("fit --model Nope", ["model", "'Nope'", "module.Class"]),
    ("fit --model json.JSONDecoder", ["json.JSONDecoder", "subclass of LitLLM"]),
    ("fit --data json.JSONDecoder", ["json.JSONDecoder", "subclass of LightningDataModule"]),
    ("fit --model tests.cli_classes.NeedsVocabulary --model.config 1m", ["unknown option model.config"]),
    ("fit stray", ["'stray'"]),
    ("fit --model.config 4m", ["'4m'", "3m"]),
    ("fit --model.config null", ["model.config", "null"]),
    ("fit --model.generation.stop x", ["model.generation.stop", "'x'", "list"]),
    ("fit --data.prompts x", ["data.prompts", "'x'", "list"]),
    ("fit --data.seq_len 1.5", ["data.seq_len", "'1.5'", "int"]),
    ("fit --data.seq_len 0", ["data.seq_len", "0"]),
    ("fit", ["data.store", "lit-llm prepare"]),
    ("fit --data.store nowhere", ["nowhere", "lit-llm prepare"]),
    ("fit --trainer.default_root_dir bad.yaml/run", ["default_root_dir bad.yaml/run", "is a file"]),
    ("fit --ckpt_path best", ["no checkpoint in runs/default/checkpoints"]),
    ("fit --ckpt_path nofile.ckpt", ["nofile.ckpt", "no checkpoint"]),
    ("fit --ckpt_path bad.yaml", ["bad.yaml", "truncated"]),
    ("validate", ["none in runs/default/checkpoints"]),
    ("test --ckpt_path last", ["none in runs/default/checkpoints", "--ckpt_path"]),
    ("predict --ckpt_path best", ["no checkpoint in runs/default/checkpoints"]),
    ("predict", ["none in runs/default/checkpoints", "--ckpt_path"]),
]


@pytest.mark.parametrize(("line", "fragments"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_line(cli: Any, line: str, fragments: list[str]) -> None:
    write("bad.yaml", "a: [1\nb: 2\n")
    write("list.yaml", "- 1\n")
    write("misspelt.yaml", "modl:\n  optimizer: {lr: 1}\n")
    code, out, err = cli(*line.split())
    assert code == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("lit-llm: error: ")
    for fragment in fragments:
        assert fragment in last
    for noise in ("Traceback", "usage:", "Union", "Errors:", "NestedArg"):
        assert noise not in err
    assert len(last) < 420
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["--data.seq_len=100000"], ["data.seq_len 100000"]),
        (["--data.global_batch_size=3", "--data.micro_batch_size=2"], ["global_batch_size 3", "micro_batch_size 2"]),
        (["--model.config.hidden_size=33"], ["hidden_size 33", "num_attention_heads 2"]),
        (["--model.config.hidden_sise=33"], ["hidden_sise", "hidden_size"]),
        (["--model.config.hidden_size=x"], ["hidden_size", "'x'"]),
        (["--trainer.precision=16-true"], ["16-true", "bf16-true"]),
        (["--trainer.gradient_clip_val=-1"], ["trainer.gradient_clip_val", "above 0", "-1"]),
        (["--trainer.val_check_interval=0"], ["val_check_interval", "at least 1"]),
        (["--trainer.strategy=foo"], ["foo"]),
        (["--model=tests.cli_classes.Failing", "--model.mode=user"], ["model.mode user"]),
    ],
)
def test_a_mistake_that_shows_in_the_run_is_one_line(cli: Any, store: str, words: list[str], fragments: Any) -> None:
    code, _, err = cli("fit", "--data.store", store, "--trainer.max_steps=3", *TINY, *SMALL_DATA, *QUICK, *words)
    assert code == 2
    last = err.splitlines()[-1]
    assert last.startswith("lit-llm: error: ")
    assert all(fragment in last for fragment in fragments), last
    assert "Traceback" not in err
    assert not list(Path().rglob("*.ckpt"))


def test_a_store_that_is_not_there_is_one_line_beside_prompts(cli: Any) -> None:
    # Lightning's text for a data module asks its loaders, and fails where predict has several.
    code, _, err = cli("fit", "--data.store=nowhere", f"--data.prompts={PROMPTS}", *TINY, *SMALL_DATA, *QUICK)
    assert code == 2
    assert err.splitlines()[-1].startswith("lit-llm: error: ")
    assert "no store at nowhere" in err.splitlines()[-1]


def test_a_bug_keeps_its_traceback(store: str) -> None:
    words = ["fit", "--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--model=tests.cli_classes.Failing"]
    with pytest.raises(ZeroDivisionError, match="a real bug"):
        main(words)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("number", ["3e-4", "3E-4", "3.0e-4", "'3e-4'", "0.0003"])
def test_floats_in_every_spelling(resolved: Any, number: str) -> None:
    """Case 70."""
    fields = ("optimizer.lr", "schedule.warmup_fraction", "generation.top_p", "config.rms_norm_eps")
    nested: dict[str, Any] = {"trainer": {"gradient_clip_val": "NUMBER"}, "model": {}}
    for name in fields:
        section, _, key = name.partition(".")
        nested["model"].setdefault(section, {})[key] = "NUMBER"
    in_file = resolved("--config", write("numbers.yaml", yaml.safe_dump(nested).replace("NUMBER", number)))
    words = [f"--model.{name}={number.strip(chr(39))}" for name in fields]
    on_line = resolved(*words, f"--trainer.gradient_clip_val={number.strip(chr(39))}")
    for config in (in_file, on_line):
        values = [config["trainer"]["gradient_clip_val"]]
        for name in fields:
            section, _, key = name.partition(".")
            values.append(model_of(config)[section][key])
        assert [float(value) for value in values] == [0.0003] * 5
        assert all(isinstance(value, float) for value in values[:-1])


def test_null_is_off_for_optional_numbers(resolved: Any) -> None:
    """Case 70."""
    on = write("on.yaml", {"model": {"generation": {"top_p": 0.5}, "schedule": {"warmup_fraction": 0.1}}})
    off = {"model": {"generation": {"top_p": None}, "schedule": {"warmup_fraction": None}}}
    for words in (
        ["--config", write("off.yaml", off)],
        ["--model.generation.top_p=null", "--model.schedule.warmup_fraction", "null"],
    ):
        model = model_of(resolved("--config", on, *words))
        assert model["generation"]["top_p"] is None
        assert model["schedule"]["warmup_fraction"] is None


@pytest.mark.parametrize("value", [1, 2, 1.0, 0.5])
def test_a_limit_of_one_is_one_batch(resolved: Any, value: float) -> None:
    limits = [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]
    on_line = resolved(*[f"--trainer.{name}={value}" for name in limits])
    in_file = resolved("--config", write("limit.yaml", {"trainer": dict.fromkeys(limits, value)}))
    again = resolved("--config", write("again.yaml", on_line))
    for config in (on_line, in_file, again):
        for name in limits:
            got = config["trainer"][name]
            assert (got, type(got)) == (value, type(value))


def test_nested_values_arrive_as_typed(resolved: Any) -> None:
    stop = ["\n\n", 'a "b" \\n', "it's", "null"]
    words = ["--model.generation.stop", json.dumps(stop), "--model.generation.eos_token_id=[]"]
    generation = model_of(resolved(*words, "--model.generation.seed=7"))["generation"]
    assert generation["stop"] == stop
    assert generation["eos_token_id"] == []
    assert generation["seed"] == 7


def test_paths_and_prompts_stay_what_they_are(resolved: Any) -> None:
    """Case 73: a value that happens to be the name of a file is not replaced by its content."""
    write("elsewhere/prompts.txt", "a prompt\n")
    write("prompts.txt", "a prompt\n")
    prompts = ["prompts.txt", "1e-5", "null", "def f(x): return", "7", " if\n"]
    config = write(
        "elsewhere/config.yaml",
        {"data": {"store": "prompts.txt", "prompts": prompts, "prompts_file": "prompts.txt"}},
    )
    paths = ["--data.store=prompts.txt", "--data.prompts_file", "prompts.txt"]
    for words in (
        ["--config", config],
        [*paths, "--data.prompts", json.dumps(prompts)],
        [*paths, *[word for prompt in prompts for word in ("--data.prompts+", prompt)]],
    ):
        data = resolved(*words)["data"]["init_args"]
        assert data["prompts"] == prompts
        assert data["store"] == data["prompts_file"] == "prompts.txt"  # relative to the working directory


def test_callbacks_replace_or_append(resolved: Any) -> None:
    """Case 71: = replaces, += appends, and the checkpoints are there in any case."""
    config = write("callbacks.yaml", {"trainer": {"callbacks": [{"class_path": "LearningRateMonitor"}]}})

    def names(*words: str) -> list[str]:
        result = resolved("--config", config, *words)
        assert result["checkpoint"]["keep_last"] == 2
        callbacks = result["trainer"]["callbacks"]
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        return [callback["class_path"].rpartition(".")[2] for callback in callbacks]

    assert names() == ["LearningRateMonitor"]
    assert names("--trainer.callbacks+=DeviceStatsMonitor") == ["LearningRateMonitor", "DeviceStatsMonitor"]
    assert names("--trainer.callbacks=DeviceStatsMonitor") == ["DeviceStatsMonitor"]


# ------------------------------------------------------------------ sections


def test_forms_of_a_section(resolved: Any) -> None:
    plain = write("plain.yaml", {"model": {"config": "1m", "optimizer": {"lr": 0.5}}, "data": {"seq_len": 8}})
    full = write(
        "full.yaml",
        {
            "model": {"class_path": "lit_llm.LitLLM", "init_args": {"config": "1m", "optimizer": {"lr": 0.5}}},
            "data": {"class_path": "lit_llm.TokenDataModule", "init_args": {"seq_len": 8}},
        },
    )
    words = ["--model.config=1m", "--model.optimizer.lr=0.5", "--data.seq_len=8"]
    full_words = ["--model=lit_llm.LitLLM", "--model.init_args.config=1m", "--model.init_args.optimizer.lr=0.5"]
    configs = [
        resolved("--config", plain),
        resolved("--config", full),
        resolved(*words),
        resolved(*full_words, "--data=TokenDataModule", "--data.init_args.seq_len=8"),
    ]
    assert all(config == configs[0] for config in configs)
    assert model_of(configs[0])["optimizer"]["lr"] == 0.5


def test_subclasses_take_part_in_all_forms(resolved: Any) -> None:
    sub = write("sub.yaml", {"model": {"class_path": "tests.cli_classes.Mine", "init_args": {"mine": 5}}})
    more = write("more.yaml", {"model": {"config": "1m"}})
    config = resolved("--config", sub, "--config", more, "--data=tests.cli_classes.OtherData", "--data.batches=3")
    assert config["model"]["class_path"] == "tests.cli_classes.Mine"
    assert (model_of(config)["mine"], model_of(config)["config"]) == (5, "1m")
    assert config["data"]["init_args"] == {"batches": 3}
    assert model_of(resolved("--model=tests.cli_classes.Mine", "--model.mine=7"))["mine"] == 7


@pytest.mark.parametrize(
    ("files", "words", "expected"),
    [
        ([], ["--model.config=15m"], "15m"),
        ([], ["--model.config.hidden_size=64"], {"hidden_size": 64}),
        ([], ["--model.config", "{hidden_size: 64, rms_norm_eps: 1e-6}"], {"hidden_size": 64, "rms_norm_eps": 1e-6}),
        ([], ["--model.config=15m", "--model.config.hidden_size=64"], {"preset": "15m", "hidden_size": 64}),
        ([], ["--model.config.hidden_size=64", "--model.config=15m"], "15m"),
        (["15m"], ["--model.config.hidden_size=64"], {"preset": "15m", "hidden_size": 64}),
        ([{"hidden_size": 8, "head_dim": 4}, {"hidden_size": 64}], [], {"hidden_size": 64, "head_dim": 4}),
        ([{"hidden_size": 8}, "1m"], ["--model.config.head_dim=4"], {"preset": "1m", "head_dim": 4}),
        ([{"preset": "1m", "head_dim": 4}], ["--model.config.preset=3m"], {"preset": "3m", "head_dim": 4}),
        (
            [{"rope_scaling": {"rope_type": "linear", "factor": 2}}],
            ["--model.config.rope_scaling.factor=4"],
            {"rope_scaling": {"rope_type": "linear", "factor": 4}},
        ),
        ([], ["--model.config=fields.yaml", "--model.config.head_dim=4"], {"hidden_size": 16, "head_dim": 4}),
    ],
)
def test_fields_of_the_model_add_up(resolved: Any, files: list[Any], words: list[str], expected: Any) -> None:
    write("fields.yaml", "hidden_size: 16\n")
    given = []
    for number, config in enumerate(files):
        given += ["--config", write(f"{number}.yaml", {"model": {"config": config}})]
    assert model_of(resolved(*given, *words))["config"] == expected


def test_print_config_round_trips(cli: Any, store: str) -> None:
    words = [
        *TINY,
        *QUICK,
        "--model.optimizer.betas=[0.8, 0.99]",
        "--model.generation.stop=['\\n']",
        "--trainer.callbacks+=LearningRateMonitor",
        "--trainer.limit_train_batches=1",
        "--checkpoint.keep_last=3",
        "--data.store",
        store,
        "--data.prompts",
        '["1e5", "1e-5", ".5", "null", "7", "é\\n"]',
    ]
    code, first, _ = cli("fit", *words, "--print_config")
    assert code == 0
    assert cli("fit", "--config", write("printed.yaml", first), "--print_config")[1] == first
    for command in ("validate", "test", "predict"):
        assert cli(command, "--config", "printed.yaml", "--print_config")[0] == 0


@pytest.mark.parametrize(
    "path",
    sorted(set(ROOT.glob("configs/**/*.yaml")) - set(ROOT.glob("configs/cluster/*"))),
    ids=lambda path: path.name,
)
def test_shipped_configurations_parse(resolved: Any, path: Path) -> None:
    from lit_llm import ModelConfig

    config = resolved("--config", str(path))
    shape = model_of(config)["config"]
    built = ModelConfig.preset(shape) if isinstance(shape, str) else ModelConfig.from_dict(shape, vocab_size=2048)
    assert built.num_hidden_layers > 0


def test_shipped_fragments_compose(resolved: Any) -> None:
    files = ("gpu-1b.yaml", "model/125m.yaml", "precision/bf16-true.yaml")
    config = resolved(*[word for name in files for word in ("--config", str(ROOT / "configs" / name))])
    assert model_of(config)["config"] == "125m"
    assert config["trainer"]["precision"] == "bf16-true"
    assert model_of(config)["compile"] is True


# ------------------------------------------------------------------ runs


def test_what_a_run_leaves(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "logs"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-4.ckpt", "step-5.ckpt"]
    assert len(list((run / "logs").glob("events.*"))) == 1
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["ckpt_path"] is None
    assert config["seed_everything"] == 0
    assert config["trainer"]["limit_val_batches"] == 1
    assert isinstance(config["trainer"]["limit_val_batches"], int)


def test_the_saved_configuration_runs_again(cli: Any, run: Path, store: str) -> None:
    again = Path("again")
    words = ["--config", str(run / "config.yaml"), "--trainer.default_root_dir", str(again)]
    code, out, _ = cli("fit", *words)
    assert code == 0
    assert f"run: {again}" in out
    first = (again / "config.yaml").read_text()
    kept = sorted(path.name for path in (again / "checkpoints").iterdir())
    contents = {name: (again / "checkpoints" / name).read_bytes() for name in kept}
    # The same command again: a fresh run, which touches nothing of the earlier one.
    assert cli("fit", *words)[0] == 0
    assert (again / "config.yaml").read_text() == first
    assert not (again / "config-1.yaml").exists()
    for name, content in contents.items():
        assert (again / "checkpoints" / name).read_bytes() == content
    assert len(list((again / "checkpoints").iterdir())) == 2 * len(kept)
    # Another one keeps the earlier configuration; predict, validate and test leave it alone.
    assert cli("fit", *words, "--trainer.max_steps=1")[0] == 0
    assert (again / "config-1.yaml").read_text() == first
    for command, more in (("validate", []), ("test", []), ("predict", ["--data.prompts", PROMPTS])):
        assert cli(command, "--config", str(again / "config.yaml"), *more)[0] == 0
    assert sorted(path.name for path in again.glob("config*")) == ["config-1.yaml", "config.yaml"]
    assert not (again / "config-2.yaml").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_repeats_the_losses(cli: Any, store: str, workers: int, monkeypatch: Any) -> None:
    words = ["fit", "--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--trainer.callbacks=tests.cli_classes.Losses"]
    words += ["--data.micro_batch_size=2", f"--data.num_workers={workers}", "--trainer.log_every_n_steps=1"]
    words += ["--model.schedule.name=constant"]
    monkeypatch.setenv("LOSSES", "whole.jsonl")
    assert cli(*words, "--trainer.max_steps=12", "--trainer.default_root_dir=whole")[0] == 0
    monkeypatch.setenv("LOSSES", "parts.jsonl")
    words += ["--trainer.default_root_dir=parts", "--ckpt_path=last"]
    code, _, err = cli(*words, "--trainer.max_steps=5")
    assert code == 0
    assert "no checkpoint in parts/checkpoints: training starts afresh" in err
    code, _, err = cli(*words, "--trainer.max_steps=12")
    assert code == 0
    assert "checkpoint: parts/checkpoints/step-5.ckpt (step 5)" in err
    whole, parts = (Path(name).read_text().splitlines() for name in ("whole.jsonl", "parts.jsonl"))
    assert len(whole) == 12
    assert parts == whole


def test_checkpoints_of_a_resumed_run(cli: Any, store: str) -> None:
    words = ["fit", "--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--trainer.default_root_dir=run"]
    words += ["--checkpoint.every_n_train_steps=2", "--checkpoint.save_top_k=0"]

    def files() -> list[str]:
        return sorted(path.name for path in Path("run/checkpoints").iterdir())

    assert cli(*words, "--trainer.max_steps=5")[0] == 0
    assert files() == ["step-4.ckpt", "step-5.ckpt"]
    assert cli(*words, "--trainer.max_steps=8", "--ckpt_path=last")[0] == 0
    assert files() == ["step-6.ckpt", "step-8.ckpt"]
    assert cli(*words, "--trainer.max_steps=8", "--ckpt_path=last")[0] == 0  # nothing left to do
    assert files() == ["step-6.ckpt", "step-8.ckpt"]


def test_checkpoints_can_be_switched_off_and_callbacks_added(cli: Any, store: str) -> None:
    words = ["fit", "--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--trainer.max_steps=1"]
    assert cli(*words, "--trainer.enable_checkpointing=false", "--trainer.default_root_dir=off")[0] == 0
    assert not Path("off/checkpoints").exists()
    monitor = "--trainer.callbacks=LearningRateMonitor"
    assert cli(*words, monitor, "--trainer.default_root_dir=on")[0] == 0
    assert [path.name for path in Path("on/checkpoints").iterdir()] == ["step-1.ckpt"]
    assert cli(*words, "--trainer.fast_dev_run=true", "--trainer.default_root_dir=dev")[0] == 0
    assert not list(Path("dev").rglob("*.*"))


@pytest.mark.parametrize("name", ["NeedsVocabulary", "Mine"])
def test_the_vocabulary_is_linked_into_subclasses(cli: Any, store: str, name: str) -> None:
    words = ["--data.store", store, *SMALL_DATA, *QUICK, "--trainer.max_steps=1", f"--model=tests.cli_classes.{name}"]
    assert cli("fit", *words, *(TINY if name == "Mine" else []))[0] == 0
    code, _, err = cli("predict", f"--model=tests.cli_classes.{name}", "--data.prompts", PROMPTS)
    assert code == 0, err
    assert len(Path("runs/default/predictions.jsonl").read_text().splitlines()) == 2


def test_other_data_needs_no_store(cli: Any) -> None:
    words = [*TINY, "--trainer.max_steps=2", "--trainer.accelerator=cpu", "--data=tests.cli_classes.OtherData"]
    assert cli("fit", *words, "--model.vocab_size=40")[0] == 0
    assert yaml.safe_load(Path("runs/default/config.yaml").read_text())["model"]["init_args"]["vocab_size"] == 40
    code, _, err = cli("fit", *words)
    assert code == 2
    assert "vocab_size is missing" in err


# ------------------------------------------------------------------ predict, validate, test


def records(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_predict_needs_a_checkpoint_only(cli: Any, run: Path, store: str) -> None:
    file = str(run / "checkpoints" / "step-5.ckpt")
    code, out, err = cli("predict", "--ckpt_path", file, "--data.prompts", PROMPTS, "--output=out/a.jsonl")
    assert code == 0, err
    assert "2 completions in out/a.jsonl" in out
    first = records("out/a.jsonl")
    assert [record["index"] for record in first] == [0, 1]
    assert [record["prompt"] for record in first] == json.loads(PROMPTS)
    assert list(first[0]) == ["index", "prompt", "completion", "tokens", "finish_reason", "logprobs"]
    assert all(len(record["tokens"]) == len(record["logprobs"]) for record in first)
    assert sorted(path.name for path in Path("out").iterdir()) == ["a.jsonl"]
    # With fit's configuration, whose mapping names no vocabulary, with and without its store.
    config = ["--config", str(run / "config.yaml"), "--data.prompts", PROMPTS]
    assert cli("predict", *config, "--output=b.jsonl")[0] == 0
    assert cli("predict", *config, "--data.store=null", "--output=c.jsonl")[0] == 0
    assert records("b.jsonl") == records("c.jsonl") == first


def test_predict_without_a_path_takes_the_last(cli: Any, run: Path) -> None:
    Path("copy").mkdir()
    (Path("copy") / "checkpoints").symlink_to(run / "checkpoints")
    words = ["--trainer.default_root_dir=copy", "--data.prompts", PROMPTS, "--model.generation.max_new_tokens=3"]
    code, _, err = cli("predict", *words)
    assert code == 0
    assert "checkpoint: copy/checkpoints/step-5.ckpt (step 5)" in err
    assert [len(record["tokens"]) for record in records("copy/predictions.jsonl")] == [3, 3]
    assert sorted(path.name for path in Path("copy").iterdir()) == ["checkpoints", "predictions.jsonl"]


def test_what_the_user_types_wins_over_the_checkpoint(cli: Any, run: Path) -> None:
    words = ["--ckpt_path", str(run / "checkpoints" / "step-5.ckpt"), "--output=out.jsonl"]
    words += ["--data.prompts", PROMPTS]
    config = write("typed.yaml", {"model": {"generation": {"max_new_tokens": 2}}})
    assert cli("predict", *words, "--config", config)[0] == 0
    assert [len(record["tokens"]) for record in records("out.jsonl")] == [2, 2]
    code, _, err = cli("predict", *words, "--model.config.hidden_size=64")
    assert code == 2
    assert "hidden_size 32 there, 64 here" in err.splitlines()[-1]
    code, _, err = cli("predict", *words, "--model.config=1m")
    assert code == 2
    assert "hidden_size 32 there, 96 here" in err.splitlines()[-1]


def test_a_context_that_was_typed_holds(cli: Any, run: Path) -> None:
    words = ["--ckpt_path", str(run / "checkpoints" / "step-5.ckpt"), "--data.prompts", PROMPTS, "--output=o.jsonl"]
    assert cli("predict", *words)[0] == 0
    short = [len(record["tokens"]) for record in records("o.jsonl")]
    assert cli("predict", *words, "--model.config.max_position_embeddings=64")[0] == 0
    assert all(new > old for new, old in zip((len(r["tokens"]) for r in records("o.jsonl")), short, strict=True))


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluation_repeats_the_loss(cli: Any, run: Path, command: str) -> None:
    code, out, err = cli(command, "--config", str(run / "config.yaml"), "--ckpt_path=best")
    assert code == 0, err
    assert "/loss" in out
    code, _, err = cli(command, "--config", str(run / "config.yaml"), "--data.store=null")
    assert code == 2
    assert "data.store" in err.splitlines()[-1]


def test_broken_checkpoints(cli: Any, run: Path, store: str) -> None:
    import shutil

    import torch

    shutil.copytree(run, "copy")
    good = Path("copy/checkpoints/step-5.ckpt")
    broken = Path("copy/checkpoints/step-9.ckpt")
    broken.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    words = ["--config=copy/config.yaml", "--trainer.default_root_dir=copy", "--data.prompts", PROMPTS]
    code, _, err = cli("predict", *words, "--ckpt_path=last")
    assert code == 0
    assert "passed over: checkpoint copy/checkpoints/step-9.ckpt" in err
    assert "checkpoint: copy/checkpoints/step-5.ckpt" in err
    code, _, err = cli("predict", *words, f"--ckpt_path={broken}")
    assert code == 2
    assert "copy/checkpoints/step-9.ckpt" in err.splitlines()[-1]
    torch.save({"state_dict": {}, "callbacks": {}}, "foreign.ckpt")
    code, _, err = cli("predict", *words, "--ckpt_path=foreign.ckpt")
    assert code == 2
    assert "foreign.ckpt" in err.splitlines()[-1]
    assert "another program" in err.splitlines()[-1]
    content = torch.load(good, weights_only=True)
    content["state_dict"] = {f"{name}.x": value for name, value in content["state_dict"].items()}
    torch.save(content, "renamed.ckpt")
    code, _, err = cli("predict", *words, "--ckpt_path=renamed.ckpt")
    assert code == 2
    assert "renamed.ckpt does not fit LitLLM" in err.splitlines()[-1]


# ------------------------------------------------------------------ generate


def test_generate(cli: Any, run: Path) -> None:
    code, out, err = cli("generate", str(run), "--prompt=alpha beta", "--max_new_tokens=5")
    assert (code, err) == (0, "")
    assert out.startswith("alpha beta")
    both = ["--prompt=alpha beta", "--prompt=gamma", "--max_new_tokens=5"]
    code, out, _ = cli("generate", str(run), *both)
    assert code == 0
    assert out.count("---") == 2
    code, out, _ = cli("generate", str(run / "checkpoints" / "step-5.ckpt"), *both, "--output=out.jsonl")
    assert code == 0
    words = ["--config", str(run / "config.yaml"), "--data.prompts", PROMPTS, "--output=predicted.jsonl"]
    assert cli("predict", *words, "--model.generation.max_new_tokens=5")[0] == 0
    assert records("out.jsonl") == records("predicted.jsonl")


def test_generate_samples_by_seed(cli: Any, run: Path) -> None:
    write("prompts.txt", "alpha\nbeta\n")
    outs = []
    for seed in ("1", "1", "2"):
        words = ["--prompts_file=prompts.txt", "--temperature=1.5", "--top_k=50", f"--seed={seed}", "--batch_size=1"]
        code, out, err = cli("generate", str(run), *words, "--device=cpu", "--dtype=float32")
        assert code == 0, err
        outs.append(out)
    assert outs[0] == outs[1] != outs[2]


# ------------------------------------------------------------------ processes


def test_ddp_predict_keeps_the_order(run: Path) -> None:
    """Case 55."""
    prompts = json.dumps(["alpha", "beta beta", "gamma", "delta", "one"])
    words = ["--config", str(run / "config.yaml"), "--data.prompts", prompts, "--data.micro_batch_size=2"]
    words += ["--model.generation.max_new_tokens=3", "--output=out.jsonl"]
    done = python("-m", "lit_llm", "predict", *words, "--trainer.devices=2", "--trainer.strategy=ddp")
    assert done.returncode == 0, done.stderr
    assert "5 completions in out.jsonl" in done.stdout
    both = records("out.jsonl")
    assert [record["index"] for record in both] == [0, 1, 2, 3, 4]
    assert [record["prompt"] for record in both] == json.loads(prompts)
    assert main(["predict", *words]) == 0
    assert [r["tokens"] for r in records("out.jsonl")] == [r["tokens"] for r in both]
    assert not list(Path().glob(".*partial"))


def test_a_mistake_under_ddp_is_told_once(store: str) -> None:
    write("mine.py", "from tests.cli_classes import Failing\n")  # found in the working directory
    words = ["fit", "--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--trainer.devices=2", "--trainer.strategy=ddp"]
    words += ["--model=mine.Failing", "--model.mode=rank1"]
    done = python("-m", "lit_llm", *words, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == "lit-llm: error: model.mode rank1 is a mistake; take another"
    assert done.stderr.count("lit-llm: error:") == 1


@pytest.mark.parametrize(
    ("mode", "signals", "code"),
    [
        ("pause", [signal.SIGTERM], 0),
        pytest.param("pause", [signal.SIGINT], 130, marks=pytest.mark.slow),
        # the second one does not wait for the step
        pytest.param("wait", [signal.SIGINT, signal.SIGINT], 130, marks=pytest.mark.slow),
    ],
)
def test_signals_save_and_have_their_own_exit_codes(store: str, mode: str, signals: list[int], code: int) -> None:
    words = ["fit", "--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--model=tests.cli_classes.Failing"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lit_llm", *words, f"--model.mode={mode}"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    give_up = time.monotonic() + 90
    while not Path("waiting").exists() and time.monotonic() < give_up and process.poll() is None:
        time.sleep(0.1)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.5)
    _, err = process.communicate(timeout=50)
    assert process.returncode == code, err
    assert "Traceback" not in err
    saved = sorted(path.name for path in Path("runs/default/checkpoints").glob("*"))
    assert saved == (["step-2.ckpt"] if mode == "pause" else [])
    if mode == "pause":
        assert "after step 2; saved" in err


def test_a_typed_rate_wins_over_the_checkpoints(
    cli: Callable[..., tuple[int, str, str]], store: str, run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    words = ["--data.store", store, "--trainer.default_root_dir", str(folder), *TINY, *SMALL_DATA, *QUICK]
    more = ["--model.optimizer.lr=0.5", "--model.schedule.name=constant", "--ckpt_path=last", "--trainer.max_steps=7"]
    code, _, err = cli("fit", *words, *more)
    assert code == 0, err
    state = torch.load(folder / "checkpoints" / "step-7.ckpt", weights_only=True)["optimizer_states"][0]
    assert [group["lr"] for group in state["param_groups"]] == [0.5, 0.5]
    code, _, err = cli("fit", *words, *more)
    assert code == 0
    assert "no step was taken: the checkpoint is at step 7" in err
    code, _, err = cli("fit", *words, "--trainer.max_steps=1")
    assert code == 0
    assert "step-7.ckpt is of an earlier run, which is left alone; --ckpt_path last would go on with it" in err
    assert "1,000 epochs" not in err


def test_a_run_without_an_end_is_told(cli: Callable[..., tuple[int, str, str]], store: str) -> None:
    _, _, err = cli("fit", "--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--trainer.max_time=00:00:00:01")
    assert "1,000 epochs" not in err
    _, _, err = cli("fit", "--data.store", store, *TINY, *SMALL_DATA, "--trainer.limit_train_batches=0")
    assert "neither trainer.max_steps nor max_epochs is given, so Lightning trains 1,000 epochs; give one" in err


def test_the_schedule_is_drawn_and_nothing_trained(cli: Callable[..., tuple[int, str, str]], store: str) -> None:
    words = ["--data.store", store, *TINY, *SMALL_DATA]
    code, out, err = cli("fit", *words, "--trainer.max_steps=40", "--model.schedule.warmup_steps=4", "--print_schedule")
    assert code == 0, err
    assert re.search(r"end of warm-up +3 +0\.0003 ", out)
    assert re.search(r"last step +39 +3e-05 ", out)
    code, out, err = cli("fit", *words, "--trainer.max_epochs=2", "--print_schedule")
    assert code == 0, err
    assert not Path("runs").exists()
    code, _, err = cli("fit", *words, "--print_schedule")
    assert (code, "set the trainer's max_steps" in err.splitlines()[-1]) == (2, True)


def test_a_bad_batch_is_replayed(cli: Callable[..., tuple[int, str, str]], store: str) -> None:
    words = ["--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--model=tests.cli_classes.Failing", "--model.mode=nan"]
    told = "step 2 skipped: the loss is not finite on rank 0; .*lit-llm fit --config runs/default/config.yaml --replay "
    with pytest.warns(UserWarning, match=told):
        code, _, err = cli("fit", *words, "--trainer.max_steps=4")
    assert code == 0, err
    file = "runs/default/replays/step-2-rank-0.pt"
    code, out, err = cli("fit", *words, "--replay", file)
    assert code == 0, err
    assert "step 2, rank 0 of 1: the loss is not finite on rank 0" in out
    assert "computed with the weights of runs/default/checkpoints/step-4.ckpt" in out
    code, _, err = cli("fit", *words, "--replay", "runs/default/config.yaml")
    assert code == 2
    assert err.splitlines()[-1].startswith("lit-llm: error: ")
    code, _, err = cli("fit", *words, "--model.guard.nonfinite=stop", "--trainer.max_steps=4")
    assert code == 1
    assert re.match(
        r"lit-llm: error: step 2: the loss is not finite on rank 0; .*; saved .*-2-v1\.ckpt", err.splitlines()[-1]
    )


def test_early_stopping_on_what_nobody_logs(cli: Callable[..., tuple[int, str, str]], store: str) -> None:
    stopping = '{"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}}'
    words = ["--data.store", store, *TINY, *SMALL_DATA, *QUICK, "--trainer.max_steps=4"]
    code, _, err = cli("fit", *words, f"--trainer.callbacks=[{stopping}]")
    assert code == 2
    assert "val_loss" in err.splitlines()[-1]


def test_options_of_the_optimizer_add_up(resolved: Callable[..., dict[str, Any]]) -> None:
    def options(*words: str) -> Any:
        config = resolved("--model.optimizer.name=torch.optim.SGD", "--model.optimizer.lr=0.5", *words)
        assert config["model"]["init_args"]["optimizer"]["lr"] == 0.5
        return config["model"]["init_args"]["optimizer"]["options"]

    dotted = ["--model.optimizer.options.momentum=0.9", "--model.optimizer.options.nesterov", "true"]
    assert options(*dotted) == {"momentum": 0.9, "nesterov": True}
    as_json = '--model.optimizer.options={"momentum": 0.8, "dampening": 0.1}'
    assert options(as_json, dotted[0]) == {"momentum": 0.9, "dampening": 0.1}
    file = write("optimizer.yaml", "model: {optimizer: {options: {momentum: 0.7, dampening: 0.2}}}")
    assert options("--config", file, dotted[0]) == {"momentum": 0.9, "dampening": 0.2}
    assert options(dotted[0], "--config", file) == {"momentum": 0.7, "dampening": 0.2}
    other = write("other.yaml", "model: {optimizer: {options: {nesterov: true, dampening: 0.0}}}")
    assert options("--config", file, "--config", other) == {"momentum": 0.7, "dampening": 0.0, "nesterov": True}
    assert options(dotted[0], "--config", other) == {"momentum": 0.9, "dampening": 0.0, "nesterov": True}
    assert options('--model.optimizer={"options": {"momentum": 0.6}}', *dotted[1:]) == {
        "momentum": 0.6,
        "nesterov": True,
    }
    assert options("--config", file, "--model.optimizer.options={}") == {}


def test_torchrun_says_how_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    settings: dict[str, Any] = {"devices": "auto", "num_nodes": 1}
    follow_torchrun(settings)
    assert settings == {"devices": 2, "num_nodes": 2}
    with pytest.raises(UserError, match=r"torchrun has started 2 processes here, but trainer.devices is 1; leave"):
        follow_torchrun({"devices": 1, "num_nodes": 1})
    with pytest.raises(UserError, match=r"torchrun runs on 2 nodes now, but trainer.num_nodes is 4; leave"):
        follow_torchrun({"devices": "auto", "num_nodes": 4})
    monkeypatch.setenv("WORLD_SIZE", "1")  # as after an elastic restart on what is left
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    settings = {"devices": "auto", "num_nodes": 1}
    follow_torchrun(settings)
    assert settings == {"devices": 1, "num_nodes": 1}


def test_a_lost_process_is_one_line() -> None:
    lost = RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. GLHF!")
    assert "another process of this run is gone" in str(_failure(lost))
    assert _failure(RuntimeError("a bug")) is None
    assert _failure(RunStopped("step 3: bad")) == "step 3: bad"


def test_the_picture_in_a_terminal_without_unicode(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    words = ["fit", "--data.store", store, *TINY, *SMALL_DATA, "--trainer.max_steps=10", "--print_schedule"]
    assert main(words) == 0
    terminal.flush()
    out = terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "*" in out
    assert max(map(len, out.splitlines())) <= 50
