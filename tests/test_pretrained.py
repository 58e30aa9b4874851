"""LitLLM that begins with a Hugging Face folder: in Python, from the command line, and on two ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from lit_llm import LitLLM, TokenDataModule, Tokenizer
from lit_llm.checkpoint import load_model, open_weights
from lit_llm.checkpoint.compare import compare_configs
from lit_llm.checkpoint.hf import save_pretrained
from lit_llm.checkpoint.tensor_reader import SafetensorsFile
from lit_llm.cli.main import main
from lit_llm.errors import UserError
from lit_llm.model import ModelConfig, Transformer
from lit_llm.parallel import MeshStrategy
from lit_llm.parallel.report import local_bytes
from tests.conftest import write_texts
from tests.distributed import run_ranks
from tests.test_export import transformer
from tests.test_step import micro_batches, trainer

GENERATION = {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 32}
QUICK = [
    "--data.seq_len=16",
    "--data.global_batch_size=4",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=1",
]


@pytest.fixture(scope="module")
def made(store: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    """A folder with the store's tokenizer and a vocabulary that is padded a little, and its model."""
    tokenizer = Tokenizer(store)
    model = transformer(**SIZES, vocab_size=tokenizer.vocab_size + 4, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("pretrained") / "folder"
    save_pretrained(model, folder, tokenizer=tokenizer, generation=GENERATION)
    return folder, model


@pytest.fixture
def folder(made: tuple[Path, Transformer], tmp_path: Path) -> str:
    """A copy of it that a test may change."""
    shutil.copytree(made[0], tmp_path / "folder")
    return str(tmp_path / "folder")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command in a folder of its own; gives its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def same(one: Any, other: Any) -> bool:
    """Whether two models have the same weights, bit for bit."""
    pairs = list(zip(one.state_dict().items(), other.state_dict().items(), strict=True))
    return all(name == twin and torch.equal(t, u) for (name, t), (twin, u) in pairs)


# ------------------------------------------------------------------ in Python


def test_the_module_is_the_folder_s_model(made: tuple[Path, Transformer]) -> None:
    folder, model = made
    lit = LitLLM(pretrained=str(folder), config={"attention_dropout": 0.25, "rope_theta": 5e4})
    assert lit.hparams["pretrained"] == str(folder)
    lit.configure_model()
    assert same(lit.transformer, model)
    assert lit.training
    assert lit.transformer.training
    assert {p.dtype for p in lit.parameters()} == {torch.float32}
    config = lit.transformer.config
    assert (config.attention_dropout, config.rope_theta, config.hidden_size) == (0.25, 5e4, 32)
    assert lit.tokenizer is not None
    assert lit.tokenizer.fingerprint == Tokenizer(folder).fingerprint
    assert config.generated_vocab_size == lit.tokenizer.vocab_size == config.vocab_size - 4
    assert config.eos_token_id == (0, 2)  # as generation_config.json has it: EOS, and what ends a turn
    assert lit.hparams["pretrained"] is None  # a checkpoint holds all of it
    assert lit.hparams["config"] == config.to_dict()


def test_a_folder_is_a_shape_for_a_new_model(made: tuple[Path, Transformer], store: str) -> None:
    folder, model = made
    for config in (str(folder), str(folder / "config.json"), {"preset": str(folder), "num_hidden_layers": 1}):
        lit = LitLLM(config=config, vocab_size=300, seq_len=16)
        lit.configure_model()
        assert lit.transformer.config.hidden_size == 32
        assert lit.transformer.config.vocab_size == model.config.vocab_size  # as of any mapping that says so
        assert lit.transformer.config.eos_token_id is None  # its tokenizer is the data's
        assert not torch.equal(lit.transformer.embed_tokens.weight, model.embed_tokens.weight)
    assert len(lit.transformer.layers) == 1
    assert LitLLM(vocab_size=300).resolve_config().hidden_size == LitLLM("3m", 300).resolve_config().hidden_size == 192


def test_what_contradicts_the_weights_is_refused(made: tuple[Path, Transformer], tmp_path: Path) -> None:
    folder, model = str(made[0]), made[1]
    size = model.config.vocab_size
    for options, said in (
        ({"config": {"hidden_size": 64}}, r"hidden_size 64 is 32 there; leave it out"),
        (
            {"config": {"num_hidden_layers": 3, "use_qk_norm": True}},
            r"num_hidden_layers 3 is 2 there; use_qk_norm True",
        ),
        ({"config": "1m"}, "does not fit the weights of .*hidden_size 96 is 32 there"),
        ({"config": {"hiden_size": 32}}, "hiden_size is no field"),
        ({"vocab_size": size + 1}, rf"has {size + 1} ids, the pretrained head of .* {size}; .*--tokenizer {folder}"),
        ({"seq_len": 33}, "data.seq_len 33 is longer than .* 32"),
    ):
        with pytest.raises(UserError, match=said) as error:
            LitLLM(pretrained=folder, **options).configure_model()
        assert "\n" not in str(error.value)
    assert LitLLM(pretrained=folder, vocab_size=100).resolve_config().unpadded_vocab_size == 100
    with pytest.raises(UserError, match="no Hugging Face folder at"):
        LitLLM(pretrained=str(tmp_path / "none")).configure_model()


def test_bf16_true_alone_stores_weights_in_16_bits(made: tuple[Path, Transformer], store: str, tmp_path: Path) -> None:
    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        lit = LitLLM(pretrained=str(made[0]), optimizer={"lr": 0.0, "weight_decay": 0.0})
        data = TokenDataModule(store, seq_len=16, global_batch_size=2)
        trainer(str(tmp_path), max_steps=1, precision=precision, limit_val_batches=0).fit(lit, data)
        assert {p.dtype for p in lit.parameters()} == {dtype}
        expected = made[1].embed_tokens.weight.to(dtype)
        assert torch.equal(lit.transformer.embed_tokens.weight, expected)


def test_another_tokenizer_than_the_folder_s_is_refused(
    made: tuple[Path, Transformer], tmp_path: Path, trained: Path
) -> None:
    from lit_llm.data.prepare import prepare

    write_texts(tmp_path / "texts", documents=20)
    prepare([str(tmp_path / "texts")], str(tmp_path / "other"), tokenizer=str(trained), workers=1, progress=False)
    data = TokenDataModule(str(tmp_path / "other"), seq_len=16, global_batch_size=2)
    with pytest.raises(UserError, match=r"another tokenizer \(\d+ ids\) than that of .*: --tokenizer ") as error:
        trainer(str(tmp_path), max_steps=1).fit(LitLLM(pretrained=str(made[0])), data)
    assert "\n" not in str(error.value)
    # Prompts alone are read from such a store: the folder's tokenizer counts.
    lit = LitLLM(pretrained=str(made[0]), generation={"max_new_tokens": 2})
    data = TokenDataModule(str(tmp_path / "other"), prompts=["alpha"])
    (found,) = trainer(str(tmp_path)).predict(lit, data)  # type: ignore[misc]
    assert found[0]["prompt"] == "alpha"
    assert lit.tokenizer is not None
    assert lit.tokenizer.fingerprint == Tokenizer(made[0]).fingerprint


def test_a_folder_without_tokenizer_takes_the_store_s(folder: str, store: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path(folder, name).unlink()
    lit = LitLLM(pretrained=folder)
    data = TokenDataModule(store, seq_len=16, global_batch_size=2)
    trainer(str(tmp_path), max_steps=1, limit_val_batches=0).fit(lit, data)
    assert lit.tokenizer is not None
    assert lit.tokenizer.fingerprint == Tokenizer(store).fingerprint
    assert open_weights(folder).tokenizer is None
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_model(folder)


class Seen(L.LightningModule):
    """What a module is told in setup of the checkpoint that comes."""

    def setup(self, stage: str) -> None:
        self.seen = self.trainer.ckpt_path
        super().setup(stage)

    def training_step(self, *args: Any) -> None:
        raise AssertionError("no step is left")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


class SeenByUs(Seen, LitLLM):
    def configure_optimizers(self) -> Any:
        return LitLLM.configure_optimizers(self)


def test_the_checkpoint_that_comes_is_known_before_the_model_is_built(store: str, tmp_path: Path) -> None:
    data = TokenDataModule(store, seq_len=16, global_batch_size=2)
    path = str(tmp_path / "a.ckpt")
    first = trainer(str(tmp_path), max_steps=1, limit_val_batches=0)
    first.fit(LitLLM(config=SIZES), data)
    first.save_checkpoint(path)
    ours = SeenByUs(config=SIZES)
    trainer(str(tmp_path), max_steps=1, limit_val_batches=0).fit(ours, data, ckpt_path=path)
    assert ours.seen == path
    again = SeenByUs(config=SIZES)
    trainer(str(tmp_path), limit_val_batches=1).validate(again, data, verbose=False)
    assert again.seen is None
    # Lightning alone does not say it; once it does, coming_checkpoint.py can go.
    theirs = Seen()
    with pytest.raises(Exception, match="callbacks|state_dict|optimizer|loaded"):
        trainer(str(tmp_path), max_steps=1).fit(theirs, DataLoader([1]), ckpt_path=path)
    assert theirs.seen is None


def test_older_checkpoints_fit_models_of_new_fields(recwarn: pytest.WarningsRecorder) -> None:
    config = ModelConfig(vocab_size=10, hidden_size=8, num_attention_heads=2, model_type="qwen3", hidden_dropout=0.1)
    old = {name: value for name, value in config.to_dict().items() if name not in ("mlp_type", "norm_placement")}
    old["model_type"] = None
    compare_configs(old, config)
    assert not [w for w in recwarn if "computes otherwise" in str(w.message)]
    for name, value in (("norm_placement", "post"), ("mlp_type", "plain"), ("lm_head_bias", True)):
        with pytest.raises(UserError, match=f"{name} .* there, {value} here"):
            compare_configs(old, ModelConfig(**{**config.to_dict(), name: value}))
    learned = {**config.to_dict(), "position_embedding": "learned"}
    compare_configs(config.to_dict(), ModelConfig(**{**config.to_dict(), "max_position_embeddings": 64}))
    with pytest.raises(UserError, match="max_position_embeddings 1024 there, 64 here"):
        compare_configs(learned, ModelConfig(**{**learned, "max_position_embeddings": 64}))


def test_the_router_s_losses_are_trained_with_and_not_measured() -> None:
    seen: list[dict[str, Any]] = []

    class Watched(LitLLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs)
            return super().forward(*args, **kwargs)

    batch = micro_batches(1)[0]
    sparse = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    for config in (SIZES, sparse, {**sparse, "router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.25}):
        lit = Watched(config=config, vocab_size=61)
        lit.configure_model()
        trained = lit.train().loss(batch)[0]
        measured = lit.eval().loss(batch)[0]
        assert (trained > measured + 1e-3) == ("num_experts" in config)
    given = [{name: value for name, value in one.items() if name.startswith("router")} for one in seen]
    assert given == [{}, {}, {"router_aux_loss": 0.5}, {}, {"router_z_loss": 0.25}, {}]


# ------------------------------------------------------------------ the command line


def test_fine_tuning_from_end_to_end(folder: str, store: str, cli: Callable[..., Any]) -> None:
    words = ["--data.store", store, *QUICK, "--trainer.max_steps=3", "--checkpoint.every_n_train_steps=2"]
    code, _, err = cli("fit", *words, "--model.pretrained", folder, "--model.config.attention_dropout=0.1")
    assert code == 0, err
    saved = yaml.safe_load(Path("runs/default/config.yaml").read_text())["model"]["init_args"]
    assert (saved["pretrained"], saved["config"]) == (folder, {"attention_dropout": 0.1})
    code, _, err = cli("export", "runs/default", "--output", "tuned")
    assert code == 0, err
    original, tuned = (load_file(f"{name}/model.safetensors") for name in (folder, "tuned"))
    assert {name: t.shape for name, t in original.items()} == {name: t.shape for name, t in tuned.items()}
    assert not any(torch.equal(original[name], tuned[name]) for name in original)
    assert all((original[name] - tuned[name]).abs().max() < 0.05 for name in original)  # it began there
    generation = json.loads(Path("tuned/generation_config.json").read_text())
    assert generation.items() >= GENERATION.items()
    padding = generation.pop("suppress_tokens")
    assert generation == json.loads(Path(folder, "generation_config.json").read_text())
    assert len(padding) == 4
    assert Tokenizer("tuned").fingerprint == Tokenizer(folder).fingerprint
    # The folder is needed no more.
    shutil.rmtree(folder)
    config = ["--config", "runs/default/config.yaml", "--ckpt_path=last"]
    code, _, err = cli("fit", *config, "--trainer.max_steps=4")
    assert code == 0, err
    assert cli("validate", *config)[0] == 0
    code, _, err = cli("predict", *config, "--data.prompts=['alpha beta']", "--model.generation.max_new_tokens=3")
    assert code == 0, err
    newest = Path("runs/default/checkpoints/step-4.ckpt")
    lit = LitLLM.load_from_checkpoint(newest)
    assert lit.hf_generation is not None
    assert lit.hf_generation.items() >= GENERATION.items()
    assert same(lit.transformer, load_model("runs/default", "cpu")[0])
    code, _, err = cli("export", "runs/default", "--output", "tuned")  # of the resumed run
    resumed = json.loads(Path("tuned/generation_config.json").read_text())
    assert resumed == {**generation, "suppress_tokens": padding}


def test_a_folder_is_a_source_of_generate_and_export(
    folder: str, cli: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = load_model(folder, "cpu")
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer.fingerprint == Tokenizer(folder).fingerprint
    code, out, err = cli("generate", folder, "--prompt", "alpha beta", "--max_new_tokens=5", "--device=cpu")
    assert code == 0, err
    code, _, err = cli("predict", "--model.pretrained", folder, "--data.prompts=['alpha beta']", "--output=p.jsonl")
    assert code == 0, err
    assert f"weights: {folder}" in caplog.text
    predicted = json.loads(Path("p.jsonl").read_text())
    assert out.rstrip("\n") == ("alpha beta" + tokenizer.decode(predicted["tokens"][:5])).rstrip("\n")
    code, out, err = cli("export", folder, "--output", "again")
    assert code == 0, err
    for name in ("model.safetensors", "generation_config.json", "tokenizer.json"):
        assert Path("again", name).read_bytes() == Path(folder, name).read_bytes(), name
    (again, first, generation) = (
        json.loads(Path(name).read_text())
        for name in ("again/config.json", f"{folder}/config.json", f"{folder}/generation_config.json")
    )
    assert again == {**first, "eos_token_id": generation["eos_token_id"]}  # of which a ModelConfig has one alone
    assert cli("export", folder, "--output", "half", "--dtype=bfloat16")[0] == 0
    half, whole = load_file("half/model.safetensors"), load_file(f"{folder}/model.safetensors")
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in whole.items())


def test_what_was_typed_comes_before_the_run_s_checkpoint(folder: str, store: str, cli: Callable[..., Any]) -> None:
    words = ["--data.store", store, *QUICK, "--trainer.max_steps=1", "--model.optimizer.lr=0.1"]
    code, _, err = cli("fit", *words, "--model.pretrained", folder, "--model.schedule.warmup_steps=0")
    assert code == 0, err
    prompts = ["--data.prompts=['alpha']", "--model.generation.max_new_tokens=8"]
    said = {}
    for name, more in {
        "typed": ["--model.pretrained", folder],
        "run": ["--config=runs/default/config.yaml"],
        "asked": ["--model.pretrained", folder, "--ckpt_path=last"],
    }.items():
        code, _, err = cli("predict", *more, *prompts, f"--output={name}.jsonl")
        assert code == 0, err
        said[name] = (Path(f"{name}.jsonl").read_text(), "checkpoint: " in err)
    assert said["run"] == said["asked"] != said["typed"]
    assert [told for _, told in said.values()] == [False, True, True]


def test_mistakes_are_one_line(folder: str, store: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copytree(folder, "strange")
    keys = json.loads(Path("strange/config.json").read_text())
    Path("strange/config.json").write_text(json.dumps({**keys, "model_type": "xyz"}))
    shutil.copytree(folder, "torn")
    content = Path("torn/model.safetensors").read_bytes()
    Path("torn/model.safetensors").write_bytes(content[:-10])
    fit = ["fit", "--data.store", store, *QUICK, "--trainer.max_steps=1"]
    for words, said in (
        ([*fit, "--model.pretrained=nothing"], "no Hugging Face folder at nothing"),
        ([*fit, "--model.pretrained=strange"], "model_type 'xyz'"),
        ([*fit, "--model.pretrained=torn"], "torn/model.safetensors is truncated"),
        ([*fit, "--model.config=strange"], "model_type 'xyz'"),
        ([*fit, "--model.config=nothing"], "no preset is called 'nothing'"),
        ([*fit, "--model.pretrained", folder, "--model.config.hidden_size=64"], "hidden_size 64 is 32 there"),
        ([*fit, "--model.pretrained", folder, "--data.seq_len=64"], "data.seq_len 64 is longer"),
        (["predict", "--data.prompts=[a]"], "or --model.pretrained FOLDER"),
        (["predict", "--data.prompts=[a]", "--model.pretrained=nothing"], "no Hugging Face folder at nothing"),
        (["generate", "strange", "--prompt=a"], "model_type 'xyz'"),
        (["generate", "torn", "--prompt=a"], "torn/model.safetensors is truncated"),
        (["export", "torn", "--output=out"], "torn/model.safetensors is truncated"),
        (["export", "nothing", "--output=out"], "there is nothing at nothing"),
    ):
        code, _, err = cli(*words)
        assert code == 2, (words, err)
        last = err.splitlines()[-1]
        assert last.startswith("lit-llm: error: "), err
        assert said in last
        assert "Traceback" not in err


def test_a_config_that_is_a_folder_is_kept_as_fields(folder: str, store: str, cli: Callable[..., Any]) -> None:
    words = ["--data.store", store, *QUICK, "--trainer.max_steps=1", "--model.config.num_hidden_layers=1"]
    Path("mine.yaml").write_text(yaml.safe_dump({"model": {"config": f"{folder}/config.json"}}))
    code, _, err = cli("fit", "--config=mine.yaml", *words)
    assert code == 0, err
    saved = yaml.safe_load(Path("runs/default/config.yaml").read_text())["model"]["init_args"]["config"]
    assert (saved["hidden_size"], saved["num_hidden_layers"]) == (32, 1)
    assert "eos_token_id" not in saved


# ------------------------------------------------------------------ on two ranks

RANKS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"},
}


def small(**fields: Any) -> Transformer:
    """61 ids on 2 ranks, and a norm of 32 numbers: parts that are uneven, and small ones."""
    return transformer(**{**SIZES, "vocab_size": 61, **fields})


class Started(LitLLM):
    """Looks at its weights before the first step."""

    def on_train_start(self) -> None:
        super().on_train_start()
        state = self.transformer.state_dict()
        self.initial = {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in state.items()}


def rank_runs(folder: str) -> dict[str, Any]:
    """Each layout under MeshStrategy and one under ddp: what a rank reads, and what is saved from there."""
    read = {"bytes": 0}
    plain = SafetensorsFile._fill

    def count(self: SafetensorsFile, target: torch.Tensor, start: int) -> None:
        read["bytes"] += target.numel() * target.element_size()
        plain(self, target, start)

    SafetensorsFile._fill = count  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    rank = int(os.environ["RANK"])
    for name in (*RANKS, "ddp"):
        source = f"{folder}/{'tied' if name == 'ddp' else name}"
        read["bytes"] = 0
        lit = Started(pretrained=source, optimizer={"lr": 0.0, "weight_decay": 0.0}, schedule={"warmup_steps": 0})
        strategy: Any = "ddp" if name == "ddp" else MeshStrategy()
        rows = DataLoader(micro_batches(4)[rank::2], batch_size=None)
        trainer(folder, devices=2, strategy=strategy, max_steps=1).fit(lit, rows)
        torch.save(lit.initial, f"{folder}/{name}-{rank}.pt")
        found[name] = {"read": read["bytes"], "local": local_bytes(lit.transformer.parameters())}
        if name != "ddp":
            lit.transformer.save_pretrained(f"{folder}/{name}-saved", max_shard_size="20KB")
            found[name]["saved"] = Path(folder, f"{name}-saved/config.json").exists()
            try:
                lit.transformer.save_pretrained(f"{folder}/untied/config.json")
            except UserError as error:
                found[name]["refused"] = str(error)
    damaged = Started(pretrained=f"{folder}/damaged")
    with pytest.raises(UserError) as error_of_damage:
        trainer(folder, devices=2, strategy=MeshStrategy(), max_steps=1).fit(damaged, DataLoader(micro_batches(2)))
    found["damaged"] = str(error_of_damage.value)
    return found


def test_two_ranks_read_their_parts_and_save_the_whole(tmp_path: Path) -> None:
    models = {name: small(**fields) for name, fields in RANKS.items()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    shutil.copytree(tmp_path / "untied", tmp_path / "damaged")
    tensors = load_file(tmp_path / "damaged/model.safetensors")
    tensors["lm_head.weight"][-1, -1] = float("inf")  # which the second rank alone reads
    save_file(tensors, tmp_path / "damaged/model.safetensors")
    ranks = run_ranks("tests.test_pretrained:rank_runs", 2, folder=str(tmp_path))
    assert all("damaged: lm_head.weight holds NaN or infinity" in found["damaged"] for found in ranks)
    for name in (*RANKS, "ddp"):
        model = models["tied" if name == "ddp" else name]
        size = sum(4 * p.numel() for p in model.parameters())
        for rank, found in enumerate(ranks):
            initial = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert set(initial) == set(model.state_dict())
            assert all(torch.equal(initial[key], t) for key, t in model.state_dict().items()), (name, rank)
            assert found[name]["read"] == found[name]["local"]
            assert found[name]["local"] == size if name == "ddp" else found[name]["local"] < 0.6 * size
        if name == "ddp":
            continue
        assert sum(found[name]["read"] for found in ranks) == size
        assert all(found[name]["saved"] for found in ranks)  # there when any rank goes on
        files = list((tmp_path / f"{name}-saved").glob("*.safetensors"))
        assert len(files) > 1
        saved = {key: tensor for file in files for key, tensor in load_file(file).items()}
        original = load_file(tmp_path / name / "model.safetensors")
        assert set(saved) == set(original)
        assert all(torch.equal(saved[key], tensor) for key, tensor in original.items())
        assert all("is a file; choose another folder" in found[name]["refused"] for found in ranks)  # on both


def test_damaged_weights_are_refused_by_name(folder: str, tmp_path: Path) -> None:
    """Training on them would skip step after step and blame the batches."""
    tensors = load_file(Path(folder) / "model.safetensors")
    name = sorted(name for name in tensors if name.endswith("norm.weight"))[-1]
    tensors[name][3] = float("nan")
    shutil.copytree(folder, tmp_path / "broken")
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    with pytest.raises(UserError, match=r"norm\.weight holds NaN or infinity"):
        LitLLM(pretrained=str(tmp_path / "broken")).configure_model()
