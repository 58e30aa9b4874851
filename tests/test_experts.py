"""The experts' products: back ends, gradients of both orders, dtypes, and what runs where nothing may be looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lit_llm.errors import UserError
from lit_llm.ops import grouped
from lit_llm.ops.experts import experts
from lit_llm.parallel.activation_checkpointing import checkpoint_activations

# tokens, hidden_size, width, experts, k, and the experts that may be chosen (None: all)
SHAPES = {
    "plain": (61, 32, 48, 8, 2, None),
    "idle experts": (61, 32, 48, 8, 2, (1, 4, 6)),
    "two busy ones": (64, 16, 24, 8, 2, (0, 7)),
    "one token": (1, 16, 8, 5, 3, None),
    "all experts": (40, 16, 8, 4, 4, None),
    "one expert": (7, 8, 8, 1, 1, None),
    "no token": (0, 8, 8, 4, 2, None),
    "many experts": (200, 24, 8, 64, 6, None),
}


def problem(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, expert_ids, weights, gate_up, down."""
    tokens, hidden, width, number, k, allowed = SHAPES[name]
    generator = torch.Generator().manual_seed(tokens + number)
    scores = torch.rand(tokens, number, generator=generator)
    if allowed is not None:
        scores[:, [e for e in range(number) if e not in allowed]] = -1
    made = [
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((tokens, hidden), (tokens, k), (number, 2 * width, hidden), (number, hidden, width))
    ]
    return [made[0], scores.topk(k, dim=-1).indices, *made[1:]]


def outcome(backend: str, tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The result and the gradients of x, weights, gate_up and down."""
    x, ids, *rest = (t.to(dtype) if dtype is not None and t.is_floating_point() else t for t in tensors)
    leaves = [t.clone().requires_grad_() for t in (x, *rest)]
    out = experts(leaves[0], ids, *leaves[1:], F.silu, backend=backend)  # type: ignore[arg-type]
    ramp = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(ramp.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference, of the largest number."""
    if not theirs.numel():
        return 0.0
    return float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("name", SHAPES)
def test_both_ways_equal_the_reference(name: str, backend: str) -> None:
    tensors = problem(name)
    for mine, theirs in zip(outcome(backend, tensors), outcome("reference", tensors), strict=True):
        assert mine.shape == theirs.shape
        assert distance(mine, theirs) <= 1e-5


def test_the_loop_is_the_formula() -> None:
    """By hand for one token at a time, in float64."""
    x, ids, weights, gate_up, down = problem("plain", torch.float64)
    out = experts(x, ids, weights, gate_up, down, F.gelu, backend="reference")
    for token in (0, 17, 60):
        expected = torch.zeros(32, dtype=torch.float64)
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            hidden = F.gelu(gate_up[expert, :48] @ x[token]) * (gate_up[expert, 48:] @ x[token])
            expected += weight * (down[expert] @ hidden)
        torch.testing.assert_close(out[token], expected)


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_idle_experts_get_zeros(backend: str) -> None:
    _, _, _, gate_up, down = outcome(backend, problem("two busy ones"))
    for gradient in (gate_up, down):
        busy = gradient.flatten(1).abs().amax(dim=1) > 0
        assert busy.tolist() == [True, *[False] * 6, True]


@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_as_near_to_double_as_the_loop(dtype: torch.dtype, backend: str) -> None:
    tensors = problem("plain", dtype)
    exact = outcome("reference", tensors, torch.float64)
    for mine, loop, true in zip(outcome(backend, tensors), outcome("reference", tensors), exact, strict=True):
        assert mine.dtype == dtype
        error, allowed = (float((one.double() - true).square().mean()) for one in (mine, loop))
        assert error <= 1.2 * allowed


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_autocast_takes_its_dtype_and_gradients_theirs(backend: str) -> None:
    tensors = problem("plain")
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(backend, tensors)
    assert [one.dtype for one in found] == [torch.bfloat16, *[torch.float32] * 4]
    by_hand = outcome(backend, tensors, torch.bfloat16)
    for mine, theirs in zip(found, by_hand, strict=True):
        assert distance(mine, theirs) <= 1e-6
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert outcome(backend, tensors, torch.float64)[0].dtype == torch.float64


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_gradients_of_both_orders(backend: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[0, 2], [2, 0], [2, 3]])  # 1 is idle
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((3, 4), (3, 2), (4, 6, 4), (4, 4, 3))
    ]

    def function(*tensors: Tensor) -> Tensor:
        return experts(tensors[0], ids, *tensors[1:], torch.tanh, backend)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_frozen_weights_and_no_grad() -> None:
    x, ids, weights, gate_up, down = problem("plain")
    expected = outcome("auto", [x, ids, weights, gate_up, down])
    leaf = x.clone().requires_grad_()
    out = experts(leaf, ids, weights, gate_up, down, F.silu)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).float())
    assert torch.equal(leaf.grad, expected[1])  # type: ignore[arg-type]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(experts(x, ids, weights, gate_up, down, F.silu), expected[0])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_one_graph(backend: str) -> None:
    def function(x: Tensor, ids: Tensor, *rest: Tensor) -> Tensor:
        return experts(x, ids, *rest, F.silu)  # type: ignore[arg-type]

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for name in ("plain", "idle experts"):  # equal shapes, other loads
        x, ids, *rest = problem(name)
        leaves = [t.clone().requires_grad_() for t in (x, *rest)]
        out = compiled(leaves[0], ids, *leaves[1:])
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).float())
        for mine, theirs in zip([out, *(leaf.grad for leaf in leaves)], outcome("auto", [x, ids, *rest]), strict=True):
            assert distance(mine.detach(), theirs) <= 1e-5


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_shapes_where_there_are_no_values(device: str) -> None:
    """As a planner has them: fake tensors, which refuse to be read."""
    with FakeTensorMode():
        x, ids, *rest = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in problem("plain"))
        leaves = [t.requires_grad_() for t in (x, *rest)]
        out = experts(leaves[0], ids, *leaves[1:], F.silu)  # type: ignore[arg-type]
        out.sum().backward()
        assert out.shape == x.shape
        assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)


# The ways of a GPU, on the CPU


def groups(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, what comes back from the result, and ends; groups 0, 3 and 5 are empty, the largest has 9 rows."""
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 5, 9, 0, 2, 0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 8), (6, 24, 8), (16, 24))]
    return made[0], made[1], made[2], torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("most", [9, 16])
def test_windows_equal_the_loop(most: int) -> None:
    x, weight, upstream, ends = groups()
    linear, outer = grouped.linear_by_loop(x, weight, ends), grouped.outer_by_loop(upstream, x, ends)
    torch.testing.assert_close(grouped.linear_by_window(x, weight, ends, most), linear, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grouped.outer_by_window(upstream, x, ends, most), outer, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_the_loop(dtype: torch.dtype) -> None:
    x, weight, upstream, ends = groups(dtype)
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    pairs = [
        (grouped.linear_by_kernel(x, weight, ends), grouped.linear_by_loop(x, weight, ends)),
        (
            grouped.linear_by_kernel(upstream, weight.transpose(1, 2), ends),
            grouped.linear_by_loop(upstream, weight.transpose(1, 2), ends),
        ),
        (grouped.outer_by_kernel(upstream, x, ends), grouped.outer_by_loop(upstream, x, ends)),
    ]
    for mine, theirs in pairs:
        assert distance(mine, theirs) <= limit
    assert not pairs[2][0][[0, 3, 5]].any()


def test_the_kernel_leaves_no_memory_in_idle_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, upstream, ends = groups()
    monkeypatch.setattr(grouped, "_grouped_mm", lambda left, right, ends: torch.full((6, 24, 24), float("nan")))
    out = grouped.outer_by_kernel(upstream, upstream, ends)
    assert [bool(one.isnan().any()) for one in out] == [False, True, True, False, True, False]
    assert not out[[0, 3, 5]].any()


def test_what_a_gpu_runs_reads_nothing() -> None:
    """Fake tensors refuse every read on the host, which the loop shows."""
    with FakeTensorMode():
        x, weight, upstream, ends = (torch.empty(t.shape, dtype=t.dtype) for t in groups())
        assert grouped.linear_by_window(x, weight, ends, 9).shape == (16, 24)
        assert grouped.outer_by_window(upstream, x, ends, 9).shape == (6, 24, 8)
        assert grouped.linear_by_kernel(x.bfloat16(), weight.bfloat16(), ends).shape == (16, 24)
        assert grouped.outer_by_kernel(upstream.bfloat16(), x.bfloat16(), ends).shape == (6, 24, 8)
        with pytest.raises(DataDependentOutputException):
            grouped.linear_by_loop(x, weight, ends)


def test_rows_are_aligned_or_not() -> None:
    half = torch.empty(4, 16, 24, dtype=torch.bfloat16)
    assert grouped._has_aligned_rows(half)
    assert grouped._has_aligned_rows(half.transpose(1, 2))
    assert not grouped._has_aligned_rows(torch.empty(4, 16, 20, dtype=torch.bfloat16))
    assert not grouped._has_aligned_rows(half[:, :, ::2])
    assert not grouped._has_grouped_mm(half)  # of a CPU


class Recomputed(torch.nn.Module):
    """Has what checkpoint_activations asks for."""

    recompute: Any = None

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.ids, self.weights = tensors[1], tensors[2]
        self.gate_up, self.down = torch.nn.Parameter(tensors[3]), torch.nn.Parameter(tensors[4])

    def compute(self, x: Tensor) -> Tensor:
        return experts(x, self.ids, self.weights, self.gate_up, self.down, F.silu, backend="grouped")

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x) if self.recompute is None else self.recompute(self.compute, x)


@pytest.mark.parametrize(("mode", "products"), [("none", 4), ("selective", 4), ("full", 6)])
def test_checkpointing_keeps_products_as_it_says(mode: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forward, two for the gradient of their inputs, and with full two again."""
    tensors, calls = problem("plain"), []
    loop = grouped.linear_by_loop
    monkeypatch.setattr(grouped, "linear_by_loop", lambda *args: (calls.append(1), loop(*args))[1])
    expected = outcome("grouped", tensors)
    calls.clear()
    block = Recomputed(tensors)
    checkpoint_activations([block], mode)
    leaf = tensors[0].clone().requires_grad_()
    out = block(leaf)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).float())
    assert len(calls) == products
    for mine, theirs in zip(
        (out, leaf.grad, block.gate_up.grad, block.down.grad), (*expected[:2], *expected[3:]), strict=True
    ):
        assert torch.equal(mine, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"x": torch.zeros(61, 31)}, r"x \(61, 31\).* do not fit"),
        ({"down": torch.zeros(8, 32, 47)}, r"down \(8, 32, 47\) do not fit"),
        ({"weights": torch.zeros(61, 3)}, r"weights \(61, 3\) must both be \(61, k\)"),
        ({"expert_ids": torch.full((61, 2), 8)}, "id 8 is none of 8 experts"),
        ({"expert_ids": torch.full((61, 2), -1)}, "id -1 is none of 8 experts"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    names = ("x", "expert_ids", "weights", "gate_up", "down")
    arguments = {**dict(zip(names, problem("plain"), strict=True)), "activation": F.silu, **change}
    with pytest.raises(UserError, match=said) as caught:
        experts(**arguments)
    assert "\n" not in str(caught.value)


def test_odd_widths_through_the_kernel_have_the_shape_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are padded to 16 bytes, which torch.compile, having been told otherwise, would stumble over."""
    x, weight, ends = torch.randn(20, 16).bfloat16(), torch.randn(3, 18, 16).bfloat16(), torch.tensor([4, 4, 20]).int()

    def padded(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        dims = (left.shape[0], right.shape[-1]) if left.ndim == 2 and right.ndim == 3 else (3, 16, 18)
        return torch.zeros(*dims[:-1], 24).bfloat16()[..., : dims[-1]]

    monkeypatch.setattr(grouped, "_grouped_mm", padded)
    assert grouped.linear_by_kernel(x, weight, ends).is_contiguous()
    assert grouped.outer_by_kernel(x, torch.randn(20, 18).bfloat16(), ends).is_contiguous()
