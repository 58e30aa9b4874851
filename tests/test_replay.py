"""Saved batches of a bad step, and what their replay finds."""

from __future__ import annotations

import errno
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_llm import LitLLM
from lit_llm.data.rows import TokenRows
from lit_llm.data.store import TokenStore
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError
from lit_llm.training.replay import SavedBatches, describe, load_batches, replay, save_batches

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCAB = 40
FACTS: dict[str, Any] = {
    "step": 12,
    "rank": 1,
    "world_size": 4,
    "seed": 7,
    "reason": "the loss is not finite on rank 1",
    "loss": math.nan,
    "grad_norm": math.inf,
    "checkpoint": "run/checkpoints/step-10.ckpt",
}


def lit_llm(seed: int = 0, **fields: Any) -> LitLLM:
    lit = LitLLM({**MODEL, "vocab_size": VOCAB, "max_position_embeddings": 12, **fields}, seed=seed)
    lit.configure_model()
    return lit


def random_batch(seed: int, rows: int = 3) -> dict[str, Tensor]:
    """Ids 0 to 29; a third of the labels is ignored."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(30, (rows, 12), generator=g)
    labels[torch.rand(rows, 12, generator=g) < 0.3] = -100
    return {"input_ids": torch.randint(30, (rows, 12), generator=g), "labels": labels}


def saved(*batches: dict[str, Any]) -> SavedBatches:
    return SavedBatches(batches=list(batches), **FACTS)


# ------------------------------------------------------------------ files


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "replays" / "step-12.pt"
    large = torch.arange(1_000_000)
    batch = {**random_batch(0), "slice": large[5:10], "max_seqlen": 12, "names": ["a", "b"], "object": object()}
    weight = torch.ones(3, requires_grad=True)
    save_batches(path, batches=[batch, {**random_batch(1), "weight": weight}], **FACTS)
    assert [one.name for one in path.parent.iterdir()] == ["step-12.pt"]
    assert path.stat().st_size < 20_000  # not what a slice is of
    loaded = load_batches(path)
    for name, value in FACTS.items():
        assert getattr(loaded, name) == pytest.approx(value, nan_ok=True)
    assert loaded.left_out == ["object (object)"]
    assert loaded.batches[0].keys() == batch.keys() - {"object"}
    for name in ("input_ids", "labels", "slice"):
        assert torch.equal(loaded.batches[0][name], batch[name])
    assert (loaded.batches[0]["max_seqlen"], loaded.batches[0]["names"]) == (12, ["a", "b"])
    assert not loaded.batches[1]["weight"].requires_grad
    save_batches(path, batches=[], **{**FACTS, "checkpoint": None, "step": 13})  # replaces it
    assert (load_batches(path).step, load_batches(path).checkpoint) == (13, None)


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="x.pt can't be written: No space left"):
        save_batches(tmp_path / "x.pt", batches=[random_batch(0)], **FACTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "x.pt"
    save_batches(path, batches=[random_batch(0)], **FACTS)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(UserError, match=r"x\.pt is truncated or holds no saved batches"):
        load_batches(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no saved batches at .*nowhere\.pt"):
        load_batches(tmp_path / "nowhere.pt")
    with pytest.raises(UserError, match="can't be read"):
        load_batches(tmp_path)
    path = tmp_path / "x.pt"
    for content in ({"state_dict": {}}, [1, 2], {"kind": "other", "format": 1}):
        torch.save(content, path)
        with pytest.raises(UserError, match=r"x\.pt holds no saved batches"):
            load_batches(path)
    save_batches(path, batches=[], **FACTS)
    content = torch.load(path, weights_only=True)
    torch.save({**content, "format": 2}, path)
    with pytest.raises(UserError, match="has format 2, this lit-llm reads up to 1"):
        load_batches(path)
    del content["seed"]
    torch.save(content, path)
    with pytest.raises(UserError, match="lacks 'seed'"):
        load_batches(path)


def test_no_code_is_run(tmp_path: Path) -> None:
    torch.save({"kind": "lit_llm.batches", "format": 1, "batches": [Path("x")]}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="holds no saved batches"):
        load_batches(tmp_path / "x.pt")


# ------------------------------------------------------------------ replay


def test_good_batches_have_the_numbers_of_a_direct_computation() -> None:
    lit = lit_llm()
    batches = [random_batch(1), random_batch(2, rows=5)]
    parameter = next(lit.parameters())
    parameter.grad = torch.full_like(parameter, 3.0)
    before = {name: value.clone() for name, value in lit.state_dict().items()}
    reports = replay(lit, saved(*batches))
    assert all(torch.equal(value, before[name]) for name, value in lit.state_dict().items())
    assert torch.equal(parameter.grad, torch.full_like(parameter, 3.0))
    assert not any(part._forward_hooks for part in lit.modules())
    for index, (report, batch) in enumerate(zip(reports, batches, strict=True)):
        logits = lit(batch["input_ids"])
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        used = batch["labels"] != -100
        lit.zero_grad()
        losses[used].mean().backward()
        norm = torch.cat([p.grad.flatten() for p in lit.parameters()]).norm()
        assert (report.micro_batch, report.tokens) == (index, int(used.sum()))
        assert report.loss_sum == pytest.approx(losses.sum().item(), rel=1e-6)
        assert report.loss == pytest.approx(losses[used].mean().item(), rel=1e-6)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-6)
        rows = [row[mask].mean().item() for row, mask in zip(losses, used, strict=True)]
        assert report.row_losses == pytest.approx(rows, rel=1e-6)
        assert report.worst_row == max(range(len(rows)), key=rows.__getitem__)
        assert report.finite
        assert (report.bad_rows, report.first_module, report.bad_gradients, report.bad_weights) == ([], None, {}, {})
        assert report.text is None
        parameter.grad = torch.full_like(parameter, 3.0)
    told = describe(reports, saved(*batches))
    assert "every micro-batch is finite" in told
    assert "micro-batch 1: loss " in told


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_nan_in_one_embedding_row_is_found(store: str, compile_blocks: bool) -> None:
    tokenizer = Tokenizer(store)
    lit = LitLLM({**MODEL, "tie_word_embeddings": False}, vocab_size=tokenizer.vocab_size, seq_len=12)
    lit.configure_model()
    lit.tokenizer = tokenizer
    if compile_blocks:
        for block in lit.transformer.layers:
            block.compile(backend="eager")
    good, bad = random_batch(1), random_batch(2, rows=4)
    ids = torch.tensor(tokenizer.encode("alpha beta gamma alpha beta gamma")[:6])
    bad["input_ids"][2, :6] = ids
    bad["input_ids"][2, 6] = 39  # no other row has it
    with torch.no_grad():
        lit.transformer.embed_tokens.weight[39, 3] = math.nan
    reports = replay(lit, saved(good, bad))
    assert reports[0].finite
    assert reports[0].first_module is None
    report = reports[1]
    assert not report.finite
    assert (report.bad_rows, report.worst_row) == ([2], 2)
    assert all(math.isfinite(loss) for row, loss in enumerate(report.row_losses) if row != 2)
    assert report.first_module == "model.embed_tokens"
    assert not any(part._forward_hooks for part in lit.modules())
    assert report.bad_weights == {"model.embed_tokens.weight": 1}
    assert "model.embed_tokens.weight" in report.bad_gradients
    assert report.text is not None
    assert report.text.startswith(tokenizer.decode(ids))
    told = describe(reports, saved(good, bad)).splitlines()
    assert told[0] == (
        "step 12, rank 1 of 4: the loss is not finite on rank 1 (loss nan, gradient norm inf)"  # what, and where
    )
    assert "the weights are not finite already: model.embed_tokens.weight (1 entries)" in told[2]
    assert "  first output that is not finite: model.embed_tokens" in told
    assert any("row 2 of 4: not finite alone" in line and "alpha" in line for line in told)


def test_the_first_of_several_modules_is_named() -> None:
    lit = lit_llm()
    with torch.no_grad():
        lit.transformer.layers[1].mlp.down_proj.weight[0, 0] = math.inf
    (report,) = replay(lit, saved(random_batch(3)))
    assert report.first_module == "model.layers.1.mlp.down_proj"
    assert report.bad_weights == {"model.layers.1.mlp.down_proj.weight": 1}
    assert len(report.bad_rows) == 3


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.inf


def test_a_gradient_alone_that_is_not_finite() -> None:
    lit = lit_llm()
    lit.transformer.layers[1].register_forward_hook(lambda module, inputs, output: BadBackward.apply(output))
    reports = replay(lit, saved(random_batch(3)))
    (report,) = reports
    assert math.isfinite(report.loss)
    assert not report.finite
    assert (report.bad_rows, report.first_module, report.bad_weights) == ([], None, {})
    assert "model.layers.1.mlp.down_proj.weight" in report.bad_gradients
    assert "model.norm.weight" not in report.bad_gradients  # its gradient comes before
    told = describe(reports, saved(random_batch(3)))
    assert "here: 1 of 1 micro-batches are not finite: 0" in told
    assert "it is the backward" in told


def test_rows_of_isolated_documents(store: str) -> None:
    """A row alone has the batch's cumulative lengths cut to its own."""
    rows = TokenRows(TokenStore(store), 12)[np.arange(20, 30)]
    batch = {name: value if name == "max_seqlen" else torch.as_tensor(value) for name, value in rows.items()}
    assert len(batch["cu_seqlens"]) > 11, "some row should hold more than one document"
    lit = LitLLM({**MODEL, "initializer_range": 0.5}, vocab_size=400, seq_len=12)  # so that attention matters
    lit.configure_model()
    (report,) = replay(lit, saved(batch))
    logits = lit(batch["input_ids"], document_ids=batch["document_ids"])
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    expected = losses.sum(1) / (batch["labels"] >= 0).sum(1)
    assert report.row_losses == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_batch_without_labels() -> None:
    batch = random_batch(1)
    batch["labels"].fill_(-100)
    (report,) = replay(lit_llm(), saved(batch))
    assert (report.tokens, report.loss, report.grad_norm, report.row_losses) == (0, 0.0, 0.0, [0.0] * 3)
    assert report.finite


def test_dropout_repeats_with_the_seed() -> None:
    lit = lit_llm(attention_dropout=0.4)
    batches = saved(random_batch(1), random_batch(2))
    seeded = [replay(lit, batches, seed_microbatch=lambda index: torch.manual_seed(100 + index)) for _ in range(2)]
    assert seeded[0] == seeded[1]
    other = replay(lit, batches, seed_microbatch=lambda index: torch.manual_seed(200 + index))
    assert [one.loss for one in other] != [one.loss for one in seeded[0]]
    torch.manual_seed(101)  # the second micro-batch, as a training step would compute it
    assert float(lit.loss(batches.batches[1])[0].detach()) == seeded[0][1].loss_sum


def test_the_forward_runs_in_the_given_context() -> None:
    lit, batch = lit_llm(), random_batch(1)

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)

    (report,) = replay(lit, saved(batch), forward_context=context)
    with context():
        expected = float(lit.loss(batch)[0].detach())
    assert report.loss_sum == expected
    assert report.loss_sum != replay(lit, saved(batch))[0].loss_sum
