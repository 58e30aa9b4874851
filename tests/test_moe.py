"""The mixture of experts against transformers' own, its router's losses, and what else a model does with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_llm import LitLLM, ModelConfig, Transformer
from lit_llm.errors import UserError
from lit_llm.model.moe import MoE, RouterLosses, inactive_parameters
from lit_llm.optim import parameter_groups
from lit_llm.parallel.activation_checkpointing import checkpoint_activations
from lit_llm.parallel.dry_run import dry_run

SHAPE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **EXPERTS, **changes})


def moe(seed: int = 0, **changes: Any) -> MoE:
    """With weights large enough that tokens differ in what they choose."""
    module = MoE(config(**changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return module


def inputs(batch: int = 3, seq: int = 11) -> Tensor:
    return torch.randn(batch, seq, 32, generator=torch.Generator().manual_seed(5))


# Against transformers


def theirs(family: str, module: MoE, normalised: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_experts_per_tok": 2, "hidden_act": "silu"}
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        options = transformers.MixtralConfig(**shape, num_local_experts=6, intermediate_size=24)
    else:
        options_of: Any
        if family == "qwen3_moe":
            from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

            options_of = transformers.Qwen3MoeConfig
        else:
            from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock as Block

            options_of = transformers.Qwen2MoeConfig
            shape["shared_expert_intermediate_size"] = 40
        options = options_of(**shape, num_experts=6, moe_intermediate_size=24, norm_topk_prob=normalised)
    options._experts_implementation = "eager"
    block = Block(options)
    block.load_state_dict(module.state_dict())  # strict: the names are theirs
    return block


@pytest.mark.parametrize(
    ("family", "normalised"), [("mixtral", True), ("qwen3_moe", True), ("qwen3_moe", False), ("qwen2_moe", False)]
)
def test_equals_transformers(family: str, normalised: bool) -> None:
    shared = {"shared_expert_intermediate_size": 40} if family == "qwen2_moe" else {}
    module = moe(norm_topk_prob=normalised, **shared)
    block = theirs(family, module, normalised)
    x = inputs()
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = module(mine), block(other)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.linspace(-1, 1, x.numel()).view(x.shape)
    got.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(mine.grad, other.grad, atol=1e-5, rtol=1e-5)
    gradients = {name: p.grad for name, p in block.named_parameters()}
    assert gradients.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-5)


# The router's losses


@pytest.mark.parametrize("masked", [False, True])
def test_balance_of_one_row_is_that_of_transformers(masked: bool) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    module, x = moe(), inputs(batch=1)
    weights = torch.ones(1, 11)
    if masked:
        weights[0, [0, 4, 10]] = 0
    _, term = module(x, RouterLosses(weights, 0.3, 0.0))
    mask = weights if masked else None
    expected = mixtral.load_balancing_loss_func((module.gate(x)[0],), 6, 2, mask)
    torch.testing.assert_close(term, 0.3 * weights.sum() * expected, atol=1e-5, rtol=1e-5)
    assert abs(expected.item() - 2.0) > 1e-3  # what an even load has


def by_hand(module: MoE, x: Tensor, weights: Tensor, aux: float, z: float) -> float:
    """Token by token, in float64."""
    total = 0.0
    logits = (x.double() @ module.gate.weight.double().T).tolist()
    for row, used in zip(logits, weights.tolist(), strict=True):
        tokens = [one for one, counts in zip(row, used, strict=True) if counts]
        slots, mass = [0.0] * 6, [0.0] * 6
        for one in tokens:
            norm = sum(math.exp(value) for value in one)
            total += z * math.log(norm) ** 2
            for expert, value in enumerate(one):
                mass[expert] += math.exp(value) / norm / len(tokens)
            for expert in sorted(range(6), key=lambda e: -one[e])[: module.chosen]:
                slots[expert] += 1 / len(tokens)
        total += len(tokens) * aux * 6 * sum(f * p for f, p in zip(slots, mass, strict=True))
    return total


@pytest.mark.parametrize(("aux", "z"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2), (0.0, 0.0)])
def test_terms_are_the_formula(aux: float, z: float) -> None:
    module, x = moe(), inputs()
    weights = (torch.rand(3, 11, generator=torch.Generator().manual_seed(2)) < 0.6).float()
    weights[1] = 0
    out, term = module(x, RouterLosses(weights, aux, z))
    assert torch.equal(out, module(x))
    assert term.dtype == torch.float32
    assert term.shape == ()
    assert term.item() == pytest.approx(by_hand(module, x, weights, aux, z), abs=1e-4, rel=1e-5)


def test_terms_do_not_depend_on_how_rows_are_spread() -> None:
    """And with them their gradients, which are the gate's and the input's alone."""
    module, x = moe(), inputs(batch=4)
    weights = (torch.rand(4, 11, generator=torch.Generator().manual_seed(2)) < 0.6).float()

    def of(rows: slice) -> tuple[Tensor, Tensor]:
        _, term = module(x[rows], RouterLosses(weights[rows], 0.3, 0.2))
        return term, torch.autograd.grad(term, module.gate.weight)[0]

    whole, parts = of(slice(0, 4)), [of(rows) for rows in (slice(0, 1), slice(1, 4))]
    assert whole[1].abs().max() > 0
    for one, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(one, sum(pieces), atol=1e-5, rtol=1e-5)


def test_training_on_the_balance_evens_the_load() -> None:
    module, x = moe(), inputs(batch=8, seq=64)
    optimizer = torch.optim.AdamW([module.gate.weight], lr=0.02)

    def load() -> list[float]:
        chosen = module.gate(x).topk(2, dim=-1).indices.flatten()
        return (torch.bincount(chosen, minlength=6) / chosen.numel()).tolist()

    with torch.no_grad():
        module.gate.weight[0] += 0.5 * x.mean(dim=(0, 1)).sign()
        x = x + 1.0 * module.gate.weight[0].sign()
    before = max(load())
    for _ in range(60):
        _, term = module(x, RouterLosses(torch.ones(8, 64), 1.0, 0.0))
        optimizer.zero_grad()
        (term / 512).backward()
        optimizer.step()
    assert before > 0.4  # of 1/6 each, and 1/2 at most
    assert max(load()) < 0.25


# In a model


def test_inactive_parameters_are_those_of_idle_experts() -> None:
    shapes = config(mlp_layer_types=("dense", "sparse"), shared_expert_intermediate_size=16)
    with torch.device("meta"):
        model = Transformer(shapes)
    parts = {name: p.numel() for name, p in model.named_parameters() if ".experts." in name}
    assert sorted(parts) == ["layers.1.mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj"]
    assert inactive_parameters(shapes) == sum(parts.values()) * 4 // 6 == 4 * 3 * 32 * 24
    assert inactive_parameters(config(num_experts_per_tok=6)) == 0
    assert inactive_parameters(ModelConfig(**SHAPE)) == 0


def test_initial_weights() -> None:
    model = Transformer(config(hidden_size=64, num_experts=8), seed=3)
    named = dict(model.named_parameters())
    for name, std in (("gate_up_proj", 0.02), ("down_proj", 0.02 / 2)):  # two layers: 1 / sqrt(4)
        weight = named[f"layers.0.mlp.experts.{name}"]
        assert weight.shape[0] == 8
        assert weight.std().item() == pytest.approx(std, rel=0.05)
        assert weight.mean().item() == pytest.approx(0, abs=0.05 * std)
        flat = weight.flatten(1)
        correlations = torch.corrcoef(torch.cat([flat, named[f"layers.1.mlp.experts.{name}"].flatten(1)]))
        assert (correlations - torch.eye(16)).abs().max() < 0.1, "each expert has a draw of its own"
    assert named["layers.0.mlp.gate.weight"].std().item() == pytest.approx(0.02, rel=0.15)
    # An expert's draw depends on its number, not on how many there are.
    fewer = dict(Transformer(config(hidden_size=64, num_experts=4), seed=3).named_parameters())
    for name in ("gate_up_proj", "down_proj"):
        name = f"layers.1.mlp.experts.{name}"
        assert torch.equal(fewer[name], named[name][:4])


def test_initial_gains() -> None:
    gains = [p for n, p in Transformer(config(norm_zero_centered=True)).named_parameters() if n.endswith("norm.weight")]
    assert len(gains) == 5
    assert not any(one.any() for one in gains)
    each = Transformer(ModelConfig(**SHAPE, use_qk_norm=True, qk_norm_scope="each_head"))
    named = dict(each.named_parameters())
    assert named["layers.0.self_attn.q_norm.weight"].shape == (4, 8)
    for name, parameter in named.items():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
    learned = Transformer(ModelConfig(**SHAPE, position_embedding="learned"))
    assert learned.embed_positions is not None
    assert learned.embed_positions.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_groups_of_the_optimizer() -> None:
    with torch.device("meta"):
        model = Transformer(config(use_qk_norm=True, qk_norm_scope="each_head", shared_expert_intermediate_size=16))
    of = {name: g["name"] for g in parameter_groups(model, 0.1, muon=True) for name in g["param_names"]}
    layer = {name.removeprefix("layers.0."): group for name, group in of.items() if name.startswith("layers.0.")}
    assert layer["self_attn.q_norm.weight"] == layer["input_layernorm.weight"] == "no_decay"
    assert layer["mlp.experts.gate_up_proj"] == layer["mlp.experts.down_proj"] == "decay"
    assert layer["mlp.shared_expert.up_proj.weight"] == layer["self_attn.q_proj.weight"] == "muon"
    assert layer["mlp.shared_expert_gate.weight"] == "decay"  # a single row
    assert layer["mlp.gate.weight"] == "decay"  # a classifier, of fewer rows than there may be shards


def loss_and_gradients(model: Transformer) -> list[Tensor]:
    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, -3:] = -100
    model.zero_grad()
    total, count = model(ids, labels=labels, router_aux_loss=0.3, router_z_loss=0.2)
    (total / count).backward()
    return [total.detach(), *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_changes_nothing(mode: str) -> None:
    model = Transformer(config(shared_expert_intermediate_size=16, mlp_layer_types=("sparse", "dense")))
    expected = loss_and_gradients(model)
    checkpoint_activations(list(model.layers), mode)
    for mine, theirs in zip(loss_and_gradients(model), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_model_adds_the_mean_over_its_sparse_layers() -> None:
    model = Transformer(config(mlp_layer_types=("dense", "sparse"), initializer_range=0.2))
    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[0, 5:] = -100
    seen: list[Tensor] = []
    model.layers[1].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    plain, _ = model(ids, labels=labels)
    total, count = model(ids, labels=labels, router_aux_loss=0.3, router_z_loss=0.2)
    term = by_hand(model.layers[1].mlp, seen[0], (labels != -100).float(), 0.3, 0.2)
    assert (total - plain).item() == pytest.approx(term, rel=1e-4)
    assert int(count) == 5 + 16


@pytest.mark.slow
def test_compiled_blocks_change_nothing() -> None:
    model = Transformer(config(shared_expert_intermediate_size=16))
    expected = loss_and_gradients(model)
    model.compile_blocks()
    for mine, theirs in zip(loss_and_gradients(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_big_one_on_many_processes() -> None:
    """8 experts on 128 processes: each holds a part of every expert, though 8 do not divide by 128."""
    mixtral = ModelConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,  # of 32, for time
        num_attention_heads=32,
        num_key_value_heads=8,
        num_experts=8,
        num_experts_per_tok=2,
    )
    found = [dry_run(mixtral, 128, rank=rank) for rank in (0, 127)]
    layer = 8 * 3 * 14336 * 4096 + 8 * 4096 + 2 * 4096 * 4096 + 2 * 1024 * 4096 + 2 * 4096
    assert found[0].parameters == 2 * layer + 2 * 32000 * 4096 + 4096
    assert [one.parameter_bytes for one in found] == [
        # The gate's 8 rows lie on the first 8 processes, all else on all of them alike.
        (found[0].parameters - 2 * 8 * 4096) * 4 // 128 + 2 * rows * 4096 * 4
        for rows in (1, 0)
    ]


def test_fit_trains_with_the_routers_losses_and_validates_without(tmp_path: Path) -> None:
    """LitLLM's own loss: the terms are in train/loss and in the gradient, and not in val/loss."""
    import lightning as L
    from torch.utils.data import DataLoader

    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    logged = {}
    for aux, z in ((0.0, 0.0), (0.7, 0.0), (0.0, 0.3)):
        lit = LitLLM(config(router_aux_loss_coef=aux, router_z_loss_coef=z), optimizer={"lr": 0.0}, seed=0)
        trainer = L.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            default_root_dir=tmp_path, log_every_n_steps=1, enable_model_summary=False,
        )  # fmt: skip
        loader = DataLoader([batch], batch_size=None)
        trainer.fit(lit, loader, loader)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        model = lit.transformer.eval()
        with torch.no_grad():
            plain, count = model(ids, labels=batch["labels"])
            trained, _ = model(ids, labels=batch["labels"], router_aux_loss=aux, router_z_loss=z)
        assert metrics["val/loss"] == pytest.approx(float(plain / count), abs=1e-5)
        assert metrics["train/loss"] == pytest.approx(float(trained / count), abs=1e-5)
        logged[aux, z] = metrics["train/loss"], metrics["train/grad_norm"]
    (loss, norm), *others = logged.values()
    for other_loss, other_norm in others:
        assert other_loss > loss + 1e-2
        assert abs(other_norm - norm) > 1e-4


def test_the_router_decides_in_float32() -> None:
    """In bfloat16 two experts with logits that differ by little would tie, or change places."""
    module = moe().bfloat16()
    x = inputs(4, 64).bfloat16()
    logits = module.gate(x)
    exact = torch.softmax(logits.float(), dim=-1).topk(2, dim=-1)
    wanted = exact.values / exact.values.sum(dim=-1, keepdim=True)
    seen: list[Tensor] = []
    module.experts.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[1:]))
    module(x)
    assert torch.equal(seen[0], exact.indices.flatten(0, 1))
    assert torch.equal(seen[1], wanted.flatten(0, 1).bfloat16())


def test_losses_below_zero_are_refused() -> None:
    model, ids = Transformer(config()), torch.zeros(1, 4, dtype=torch.int64)
    for wrong in (-1.0, math.nan):
        with pytest.raises(UserError, match="router_aux_loss is"):
            model(ids, labels=ids, router_aux_loss=wrong)
