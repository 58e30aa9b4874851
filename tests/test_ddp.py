"""DataParallelStrategy: its options on two gloo ranks, and the hooks that average a bucket of gradients."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lit_llm import LitLLM, TokenDataModule
from lit_llm.errors import UserError
from lit_llm.parallel.ddp import DataParallelStrategy, ensure_float32_reduction
from lit_llm.parallel.ddp_hooks import (
    PowerSGD,
    orthogonal,
    reduce_by_powersgd,
    reduce_in_bfloat16,
    reduce_in_float16,
    reduce_in_float32,
)
from tests.distributed import run_ranks
from tests.test_step import Steps, big_batch_run, flat, micro_batches, trainer
from tests.training import MODEL


class Wire(TorchDispatchMode):
    """Notes every reduction, by whoever starts it, also C++: its dtype and its number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ("c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_"):
            sent = args[0] if name == "c10d::allreduce_" else [args[1]] if "base" in name else args[1][0]
            self.sent.extend((str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in sent)
        return func(*args, **(kwargs or {}))


class OnTheWire(L.Callback):
    """What each backward sends."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, int]]] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        ensure_float32_reduction(trainer.strategy)

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.wire = Wire()
        self.wire.__enter__()

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.wire.__exit__(None, None, None)
        self.steps.append(self.wire.sent)


class Recorded(Steps):
    """Also the losses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[float] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.losses.append(float(self.trainer.callback_metrics["train/loss"]))


# Whole runs: 5 steps of 2 micro-batches, one of each rank
STEPS = 5
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_size_mb": 0.02},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "no view": {"gradient_as_bucket_view": False},
    "bf16": {"compression": "bf16", "bucket_size_mb": 0.02},
    "fp16": {"compression": "fp16", "bucket_size_mb": 0.02},
    "powersgd": {"compression": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 2, "bucket_size_mb": 0.02},
    "powersgd, one bucket": {"compression": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 2},
    "accumulating": {"accumulation": 2},
    "accumulating fp16": {"accumulation": 2, "compression": "fp16"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-true ddp": {"precision": "bf16-true", "strategy": "ddp"},
    "bf16-true bf16": {"precision": "bf16-true", "compression": "bf16"},
}
EXACT = ("plain", "small buckets", "static graph", "unused", "no view")


def one_run(folder: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    accumulation, precision = options.pop("accumulation", 1), options.pop("precision", "32-true")
    strategy = options.pop("strategy", None) or DataParallelStrategy(**options)
    rank = int(os.environ["RANK"])
    mine = micro_batches(2 * accumulation * STEPS)[rank::2]
    module, wire = Recorded("sgd"), OnTheWire()
    run = trainer(
        folder,
        devices=2,
        strategy=strategy,
        accumulate_grad_batches=accumulation,
        max_epochs=1,
        precision=precision,
        callbacks=[wire],
    )
    run.fit(module, DataLoader(mine, batch_size=None))
    if rank == 0:
        torch.save({"gradients": module.gradients, "weights": flat(module.parameters())}, f"{folder}/{name}.pt")
    return {"losses": module.losses, "norms": module.norms, "sent": wire.steps}


def all_runs(folder: str) -> dict[str, Any]:
    """Everything that needs two ranks; a start takes longer than all of it."""
    runs = {name: one_run(folder, name, options) for name, options in RUNS.items()}
    checks = {check.__name__: check() for check in (averages, floats16, powersgd, not_finite, left_alone)}
    return {"runs": runs, **checks, "refused": refusals(folder)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What both ranks found, and the folder with rank 0's tensors."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, run_ranks("tests.test_ddp:all_runs", 2, folder=str(folder))


def one_process() -> dict[str, Any]:
    """The same steps, each as one batch of both ranks' rows."""
    module = Steps("sgd")
    module.configure_model()
    optimizer, batches = module.configure_optimizers(), micro_batches(2 * STEPS)
    result: dict[str, Any] = {"gradients": [], "norms": [], "losses": []}
    for start in range(0, len(batches), 2):
        window = batches[start : start + 2]
        ids, labels = (torch.cat([b[key] for b in window]) for key in ("input_ids", "labels"))
        loss = nn.functional.cross_entropy(module.transformer(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        result["losses"].append(float(loss.detach()))
        result["gradients"].append(flat(p.grad for p in module.parameters()))
        result["norms"].append(float(result["gradients"][-1].norm()))
        optimizer.step()
        optimizer.zero_grad()
    return {**result, "weights": flat(module.parameters())}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return one_process()


@pytest.mark.parametrize("name", EXACT)
def test_two_replicas_equal_one_process(two_ranks: Any, expected: Any, name: str) -> None:
    folder, ranks = two_ranks
    got = torch.load(folder / f"{name}.pt")
    assert len(got["gradients"]) == STEPS
    for mine, theirs in zip(got["gradients"], expected["gradients"], strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-6
    assert float((got["weights"] - expected["weights"]).abs().max()) <= 1e-6
    for rank in ranks:
        for what in ("losses", "norms"):
            assert rank["runs"][name][what] == pytest.approx(expected[what], rel=1e-6, abs=1e-6)


def test_accumulation_reduces_once_a_step(two_ranks: Any) -> None:
    folder, ranks = two_ranks
    got = torch.load(folder / "accumulating.pt")
    plain = big_batch_run(4 * STEPS, "sgd", None, None)
    assert float((got["weights"] - plain["weights"]).abs().max()) <= 1e-6
    for rank in ranks:
        sent = rank["runs"]["accumulating"]["sent"]
        assert len(sent) == 2 * STEPS
        assert not any(sent[::2]), "the first micro-batch of a step communicates nothing"
        assert all(sent[1::2])


def numbers(sent: list[list[Any]], step: int) -> tuple[set[str], int, int]:
    """Dtypes, reductions, and bytes of a step's reductions."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    return {d for d, _ in sent[step]}, len(sent[step]), sum(sizes[d] * n for d, n in sent[step])


def parameters() -> int:
    module = Steps()
    module.configure_model()
    return sum(p.numel() for p in module.parameters())


def test_smaller_buckets_are_more_reductions_of_the_same_bytes(two_ranks: Any) -> None:
    whole = 4 * parameters()
    for rank in two_ranks[1]:
        plain, small = (numbers(rank["runs"][name]["sent"], 3) for name in ("plain", "small buckets"))
        assert plain == ({"float32"}, 1, whole)
        assert small[0] == {"float32"}
        assert small[2] == whole
        assert small[1] > 3


def test_compressions_send_what_they_say(two_ranks: Any) -> None:
    count = parameters()
    for rank in two_ranks[1]:
        runs = rank["runs"]
        assert numbers(runs["bf16"]["sent"], 3)[::2] == ({"bfloat16"}, 2 * count)
        buckets = numbers(runs["small buckets"]["sent"], 3)[1]
        dtypes, reductions, sent = numbers(runs["fp16"]["sent"], 3)
        assert (dtypes, reductions) == ({"float16", "float32"}, 2 * buckets)  # each sends its largest gradient first
        assert sent == 2 * count + 4 * buckets
        assert numbers(runs["powersgd"]["sent"], 1)[2] == 4 * count  # before it starts
        thin = thin_bytes(rank=2)
        assert thin < 4 * count / 4
        for name in ("powersgd", "powersgd, one bucket"):
            assert [numbers(runs[name]["sent"], step)[2] for step in (2, 3, 4)] == [thin] * 3


def thin_bytes(rank: int) -> int:
    """Of both factors of matrices that become half as large or less, and the rest whole, in float32."""
    module = Steps()
    module.configure_model()
    total = 0
    for p in module.parameters():
        factors = rank * sum(p.shape)
        total += factors if p.dim() == 2 and 2 * factors <= p.numel() else p.numel()
    return 4 * total


@pytest.mark.parametrize(("name", "near"), [("bf16", 2e-3), ("fp16", 2e-4), ("powersgd", 0.05)])
def test_compressed_runs_stay_near_the_plain_one(two_ranks: Any, expected: Any, name: str, near: float) -> None:
    folder, ranks = two_ranks
    got = torch.load(folder / f"{name}.pt")
    error = float((got["weights"] - expected["weights"]).abs().max())
    assert error > 1e-8, "it was compressed"
    for rank in ranks:
        assert rank["runs"][name]["losses"] == pytest.approx(expected["losses"], rel=near)
    first = [torch.load(folder / f"{name}.pt")["gradients"][0], expected["gradients"][0]]
    limit = {"bf16": 2**-8, "fp16": 2**-10, "powersgd": 1e-6}[name]  # of the largest; powersgd begins at step 2
    assert float((first[0] - first[1]).abs().max() / first[1].abs().max()) <= limit


def test_powersgd_does_not_depend_on_buckets(two_ranks: Any) -> None:
    folder = two_ranks[0]
    one, other = (torch.load(folder / f"{name}.pt")["weights"] for name in ("powersgd", "powersgd, one bucket"))
    assert float((one - other).abs().max()) <= 1e-6


def test_compression_follows_accumulation(two_ranks: Any) -> None:
    folder, ranks = two_ranks
    one, other = (torch.load(folder / f"{name}.pt")["weights"] for name in ("accumulating", "accumulating fp16"))
    assert 1e-9 < float((one - other).abs().max()) <= 1e-4
    assert not any(ranks[0]["runs"]["accumulating fp16"]["sent"][::2])


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16-true", "float32"), ("bf16-true ddp", "float32"), ("bf16-true bf16", "bfloat16")]
)
def test_gradients_of_16_bits_are_averaged_in_float32_unless_compressed(two_ranks: Any, name: str, dtype: str) -> None:
    for rank in two_ranks[1]:
        assert {d for step in rank["runs"][name]["sent"] for d, _ in step} == {dtype}


# Hooks on gradients that are chosen


class Chosen(nn.Module):
    """Gradients are what it is called with."""

    def __init__(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])

    def forward(self, *gradients: Tensor) -> Tensor:
        return sum(((w * g).sum() for w, g in zip(self.weights, gradients, strict=True)), torch.zeros(()))


def averaged(hook: Any, gradients: list[list[Tensor]], state: Any = None) -> list[list[Tensor]]:
    """What this rank gets, step by step, for (steps, parameters) of its own gradients."""
    model = DistributedDataParallel(Chosen(gradients[0][0].dtype, *(tuple(g.shape) for g in gradients[0])))
    if isinstance(state, PowerSGD):
        state.names = {id(p): name for name, p in model.module.named_parameters()}
    if hook is not None:
        model.register_comm_hook(state, hook)
    results = []
    for step in gradients:
        model(*step).backward()
        results.append([p.grad.clone() for p in model.module.weights])
        model.zero_grad()
    return results


def of_all(make: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's gradient, and the exact mean over the ranks."""
    every = [make(rank) for rank in range(dist.get_world_size())]
    return every[dist.get_rank()], torch.stack([g.double() for g in every]).mean(0)


def averages() -> dict[str, Any]:
    """bfloat16 gradients: their smallest positive number, of which DDP adds up halves, and random ones."""

    def make(rank: int) -> Tensor:
        smallest = torch.tensor([2.0**-133], dtype=torch.float64)
        return torch.cat([smallest, randn(1000, rank).double()]).bfloat16()

    mine, exact = of_all(make)
    results: dict[str, Any] = {}
    for name, hook in (("none", None), ("float32", reduce_in_float32), ("bf16", reduce_in_bfloat16)):
        [[got]] = averaged(hook, [[mine]])
        assert got.dtype == torch.bfloat16
        off = got.double() != exact.bfloat16().double()
        results[name] = {"smallest": float(got[0]) / 2.0**-133, "not nearest": int(off[1:].sum())}
    wide, exact = of_all(lambda rank: randn(50, rank))
    [[got]] = averaged(reduce_in_float32, [[wide]])
    results["float32 of float32"] = float((got - exact).abs().max())
    return results


def alone() -> dict[str, Any]:
    """:func:`averages` in a group of its own."""
    dist.init_process_group("gloo")
    return averages()


def randn(*shape: int) -> Tensor:
    """Random numbers; the last of ``shape`` is the seed."""
    return torch.randn(shape[:-1], generator=torch.Generator().manual_seed(shape[-1]))


def test_float32_averages_keep_what_16_bits_lose(two_ranks: Any) -> None:
    """With two ranks a sum is rounded once in any dtype; only the division before it loses something."""
    for rank in two_ranks[1]:
        found = rank["averages"]
        assert found["float32"] == {"smallest": 1.0, "not nearest": 0}
        assert found["none"]["smallest"] == 0.0, "what DDP does by itself"
        assert found["float32 of float32"] <= 1e-7


@pytest.mark.slow
def test_float32_averages_of_four_ranks_are_the_exact_ones_rounded_once() -> None:
    for found in run_ranks("tests.test_ddp:alone", 4, timeout=240):
        assert found["float32"] == {"smallest": 1.0, "not nearest": 0}
        assert found["none"]["not nearest"] > 100, "of 1000: DDP by itself rounds at each addition"
        assert found["bf16"]["not nearest"] > 100, "as asked for"


def floats16() -> dict[str, Any]:
    """Gradients over 36 binades, far below and far above float16's range, and sums that would overflow it."""
    results = {}
    for name, factor in (("tiny", 2.0**-60), ("huge", 2.0**60), ("plain", 1.0)):

        def make(rank: int, factor: float = factor) -> Tensor:
            generator = torch.Generator().manual_seed(rank)
            return (1 + torch.rand(37, generator=generator)) * torch.exp2(-torch.arange(37.0)) * factor

        mine, exact = of_all(make)
        for hook in (reduce_in_float16, fp16_compress_hook):
            [[got]] = averaged(hook, [[mine]])
            error = ((got.double() - exact).abs() / exact)[:24]
            lost = (got == 0).sum()
            results[f"{name} {hook.__name__}"] = [float(error.max()), int(lost)]
    mine, exact = of_all(lambda rank: torch.full((7,), 65504.0))
    [[got]] = averaged(reduce_in_float16, [[mine]])
    results["largest"] = float((got.double() / exact - 1).abs().max())
    mine, _ = of_all(lambda rank: torch.zeros(7))
    [[got]] = averaged(reduce_in_float16, [[mine]])
    results["zeros"] = float(got.abs().max())
    return results


def test_float16_keeps_gradients_of_any_scale(two_ranks: Any) -> None:
    for rank in two_ranks[1]:
        found = rank["floats16"]
        for name in ("tiny", "huge", "plain"):
            error, lost = found[f"{name} reduce_in_float16"]
            assert error <= 2**-9, "11 bits over the first 24 binades, less one for the sum"
            assert lost == 0
        assert found["tiny fp16_compress_hook"] == [1.0, 37], "torch's own loses all"
        assert found["plain fp16_compress_hook"][1] > 5
        assert found["largest"] <= 2**-11
        assert found["zeros"] == 0.0


def powersgd() -> dict[str, Any]:
    """Against the algorithm written down plainly in float64, on the mean gradients, since it is linear in them."""
    steps = []
    exact: list[Tensor] = []
    for step in range(4):
        mine, mean = of_all(lambda rank, step=step: randn(24, 40, 10 * step + rank))
        steps.append([mine, mine[0, :5].clone()])
        exact.append(mean)
    now = [0]
    state = PowerSGD(rank=3, start_step=1, step=lambda: now[0], names={})

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch takes its own annotations or none
        future = reduce_by_powersgd(state, bucket)
        now[0] += 1
        return future

    got = averaged(hook, steps, state)
    left = torch.zeros(24, 40, dtype=torch.float64)
    errors = [float((got[0][0] - exact[0]).abs().max())]
    factor: Tensor | None = None
    for step in range(1, 4):
        whole = exact[step] + left
        if factor is None:
            import hashlib

            seed = int.from_bytes(hashlib.blake2b(b"weights.0", digest_size=8).digest(), "big") >> 1
            factor = torch.randn(40, 3, generator=torch.Generator().manual_seed(seed)).double()
        p = torch.linalg.qr(whole @ torch.linalg.qr(factor)[0])[0]
        factor = whole.T @ p
        left = whole - p @ factor.T
        errors.append(float((got[step][0].double() - p @ factor.T).abs().max()))
    total = sum(g[0].double() for g in got[1:]) + left
    return {
        "errors": errors,
        "vector": max(float((g[1] - e[0, :5]).abs().max()) for g, e in zip(got, exact, strict=True)),
        "nothing lost": float((total - sum(exact[1:])).abs().max()),
        "rank": int(torch.linalg.matrix_rank(got[2][0], rtol=1e-4)),
        "hash": [float(g[0].double().sum()) for g in got],
    }


def test_powersgd_is_the_algorithm(two_ranks: Any) -> None:
    ranks = [rank["powersgd"] for rank in two_ranks[1]]
    for found in ranks:
        assert max(found["errors"]) <= 1e-5
        assert found["vector"] <= 1e-6
        assert found["nothing lost"] <= 1e-5, "what was sent and what is left make up all gradients"
        assert found["rank"] == 3
    assert ranks[0]["hash"] == ranks[1]["hash"], "replicas get the same bits"


def not_finite() -> dict[str, Any]:
    """The second of three steps has one inf or NaN on rank 1 alone."""
    results = {}
    for bad in ("inf", "nan"):
        steps = [[randn(24, 40, step)] for step in range(3)]
        if dist.get_rank() == 1:
            steps[1][0][3, 4] = float(bad)
        for hook in (reduce_in_float32, reduce_in_bfloat16, reduce_in_float16, reduce_by_powersgd):
            state = PowerSGD(2, 0, lambda: 0, {}) if hook is reduce_by_powersgd else None
            got = averaged(hook, steps, state)
            results[f"{bad} {hook.__name__}"] = [bool(torch.isfinite(step[0]).all()) for step in got]
    return results


def test_what_is_not_finite_stays_so_for_one_step(two_ranks: Any) -> None:
    for rank in two_ranks[1]:
        assert len(rank["not_finite"]) == 8
        for name, finite in rank["not_finite"].items():
            assert finite == [True, False, True], name


def left_alone() -> dict[str, Any]:
    """Where ensure_float32_reduction has nothing to do."""
    strategy = DDPStrategy()
    results = {"no model": ensure_float32_reduction(strategy), "other": ensure_float32_reduction(object())}
    for name, dtype, hook in (("32", torch.float32, None), ("16", torch.bfloat16, None), ("own", torch.bfloat16, True)):
        strategy._model = DistributedDataParallel(Chosen(dtype, (3,)))
        if hook:
            strategy._model.register_comm_hook(None, reduce_in_bfloat16)
        results[name] = ensure_float32_reduction(strategy)
        results[f"{name} again"] = ensure_float32_reduction(strategy)
    return results


def test_float32_reduction_is_registered_once_and_where_needed(two_ranks: Any) -> None:
    for rank in two_ranks[1]:
        found = rank["left_alone"]
        assert [name for name, registered in found.items() if registered] == ["16"]
        assert len(found) == 8


def test_orthogonal_columns() -> None:
    matrix = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    matrix[:, 2] = matrix[:, 0] * 3 + 1e-4 * matrix[:, 2]  # nearly dependent
    basis = orthogonal(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(basis @ (basis.T @ matrix), matrix, atol=1e-5, rtol=0)
    assert torch.equal(orthogonal(torch.zeros(5, 2)), torch.zeros(5, 2))


# Refusals


def refusals(folder: str) -> dict[str, str]:
    """What a fit on two ranks says, in one line each."""

    def message(**options: Any) -> str:
        fit, own = options.pop("trainer", {}), options.pop("data", None)
        module = Steps("sgd")
        run = trainer(folder, devices=2, strategy=DataParallelStrategy(**options), max_steps=1, **fit)
        try:
            run.fit(module, own if own is not None else DataLoader(micro_batches(4), batch_size=None))
        except UserError as error:
            return str(error)
        return "none"

    schedule = GradientAccumulationScheduler({1: 4})
    return {
        "accumulation": message(static_graph=True, trainer={"accumulate_grad_batches": 2}),
        "schedule": message(static_graph=True, trainer={"callbacks": [schedule]}),
        "none": message(static_graph=True),
    }


def test_static_graph_with_accumulation_is_refused(two_ranks: Any) -> None:
    for rank in two_ranks[1]:
        for name, count in (("accumulation", 2), ("schedule", 4)):
            said = rank["refused"][name]
            assert "static_graph" in said
            assert f"({count} micro-batches a step)" in said
            assert "\n" not in said
        assert rank["refused"]["none"] == "none"


def test_derived_accumulation_is_refused_too(store: str, tmp_path: Path) -> None:
    """In one process: what is refused comes before any communication of the strategy's setup."""
    data = TokenDataModule(store, seq_len=16, global_batch_size=4, micro_batch_size=1)
    run = trainer(str(tmp_path), devices=1, strategy=DataParallelStrategy(static_graph=True), max_steps=1)
    try:
        with pytest.raises(UserError, match=r"static_graph does not work with accumulation \(4 micro-batches"):
            run.fit(LitLLM(config=MODEL), data)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bucket_size_mb": 0}, "bucket_size_mb must be above 0"),
        ({"bucket_size_mb": float("nan")}, "bucket_size_mb must be above 0"),
        ({"compression": "int8"}, "compression must be bf16, fp16, powersgd or null; got int8"),
        ({"powersgd_rank": 0}, "powersgd_rank must be at least 1"),
        ({"powersgd_start_step": -1}, "powersgd_start_step must be 0 or more"),
        ({"static_graph": True, "find_unused_parameters": True}, "leave out trainer.strategy.find_unused_parameters"),
    ],
)
def test_options_that_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        DataParallelStrategy(**options)
    assert "\n" not in str(caught.value)


def test_powersgd_is_refused_with_a_changing_loss_scale() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    strategy = DataParallelStrategy(compression="powersgd")
    strategy.precision_plugin = MixedPrecision("16-mixed", "cpu")
    run = copy.copy(L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False))
    with pytest.raises(UserError, match="powersgd adds up gradients over steps"):
        strategy._refuse(run)
