"""z-loss, label smoothing and the soft cap inside the loss, against their formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_llm.ops import linear_cross_entropy
from lit_llm.ops.cross_entropy import LossBackend
from tests.test_cross_entropy import IGNORED, Unseen, assert_close, inputs, kept_gradients

# One at a time, in pairs and all together; the cap bites, as logits here go up to about 6.
OPTIONS: dict[str, dict[str, float]] = {
    "z": {"z_loss": 0.01},
    "smooth": {"label_smoothing": 0.2},
    "cap": {"softcap": 1.5},
    "z_smooth": {"z_loss": 0.01, "label_smoothing": 0.2},
    "z_cap": {"z_loss": 0.01, "softcap": 1.5},
    "smooth_cap": {"label_smoothing": 0.2, "softcap": 1.5},
    "all": {"z_loss": 0.01, "label_smoothing": 0.2, "softcap": 1.5},
}
ALL = OPTIONS["all"]


def formula(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Written without lit_llm, row by row of what counts, in the dtype of its inputs."""
    counted = labels != IGNORED
    logits = hidden[counted] @ weight.t() + (0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_sum = logits.exp().sum(-1).log()
    target = torch.full_like(logits, label_smoothing / weight.shape[0])
    target += (1 - label_smoothing) * F.one_hot(labels[counted], weight.shape[0])
    return (target * (log_sum[:, None] - logits)).sum() + z_loss * (log_sum**2).sum()


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("backend", "chunk_size"),
    [("reference", None), ("auto", None), ("chunked", 1), ("chunked", 7), ("chunked", 9), ("chunked", 1000)],
)
@pytest.mark.parametrize(("shape", "hidden_size", "vocab_size"), [((26,), 5, 17), ((2, 9), 8, 64), ((1,), 3, 2)])
@pytest.mark.parametrize("unseen", [False, True])
def test_equals_the_formula(
    options: dict[str, float],
    backend: LossBackend,
    chunk_size: int | None,
    shape: tuple[int, ...],
    hidden_size: int,
    vocab_size: int,
    unseen: bool,
) -> None:
    """float32 within 1e-6 of the largest value of the formula in float64."""
    hidden, weight, labels = inputs(shape, hidden_size, vocab_size, ignored=0.3 if shape != (1,) else 0.0)
    bias = torch.linspace(-1, 1, vocab_size).requires_grad_()
    leaves = doubled(hidden, weight, bias)
    expected = formula(leaves[0], leaves[1], labels, leaves[2], **options)
    assert (expected - formula(leaves[0], leaves[1], labels, leaves[2])).abs() > 1e-3 * expected  # the options show
    wanted = torch.autograd.grad(expected * 0.37, leaves)

    given: Any = labels.as_subclass(Unseen) if unseen else labels
    loss, count = linear_cross_entropy(
        hidden, weight, given, bias=bias, chunk_size=chunk_size, backend=backend, **options
    )
    assert loss.dtype == torch.float32
    assert count.item() == (labels != IGNORED).sum().item()
    assert_close(loss.double(), expected, 1e-6)
    for actual, w in zip(torch.autograd.grad(loss * 0.37, [hidden, weight, bias]), wanted, strict=True):
        assert_close(actual.double(), w, 1e-6)


def test_smoothing_is_torchs_and_the_cap_comes_first() -> None:
    hidden, weight, labels = inputs((2, 9), 8, 64)
    logits = 1.5 * torch.tanh(hidden @ weight.t() / 1.5)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2, reduction="sum")
    loss, _ = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.2, softcap=1.5)
    assert_close(loss, expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float64_gradcheck(options: dict[str, float]) -> None:
    hidden, weight, labels = inputs()
    hidden, weight, bias = doubled(hidden, weight, torch.linspace(-1, 1, weight.shape[0]))

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=4, **options)[0]

    assert loss(hidden, weight, bias).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_many_pieces_of_many_chunks() -> None:
    """Chunks of 262 rows (the default) in pieces of 33, the last ones shorter. float32 sums over 16000 tokens of the
    vocabulary carry 9e-6, the reference's as well."""
    hidden, weight, labels = inputs((2, 500), 8, 16000)
    leaves = doubled(hidden, weight)
    expected = formula(leaves[0], leaves[1], labels, **ALL)
    loss, _ = linear_cross_entropy(hidden, weight, labels, **ALL)
    assert_close(loss.double(), expected, 1e-6)
    wanted = torch.autograd.grad(expected, leaves)
    for actual, w in zip(torch.autograd.grad(loss, [hidden, weight]), wanted, strict=True):
        assert_close(actual.double(), w, 2e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_extreme_logits(options: dict[str, float], backend: LossBackend) -> None:
    """Logits up to 1e4: no infinity and no NaN, in value and gradients, and right to float32's precision."""
    hidden, weight, labels = inputs((12,), 4, 9)
    hidden = (hidden.detach() * 1e4 / (hidden @ weight.t()).detach().abs().max()).requires_grad_()
    assert (hidden @ weight.t()).abs().max() > 9.9e3
    h, w = doubled(hidden, weight)
    capped = h @ w.t()
    if "softcap" in options:
        capped = options["softcap"] * torch.tanh(capped / options["softcap"])
    log_sum = capped.logsumexp(-1, keepdim=True)
    counted = labels != IGNORED
    nll = -(capped - log_sum).gather(-1, labels.where(counted, 0)[:, None])
    smoothing = options.get("label_smoothing", 0.0)
    each = (1 - smoothing) * nll + smoothing * (log_sum - capped.mean(-1, keepdim=True))
    expected = ((each + options.get("z_loss", 0.0) * log_sum**2)[:, 0] * counted).sum()
    loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_size=5, backend=backend, **options)
    assert_close(loss.double(), expected, 1e-6)
    wanted = torch.autograd.grad(expected, [h, w])
    for actual, want in zip(torch.autograd.grad(loss, [hidden, weight]), wanted, strict=True):
        assert_close(actual.double(), want, 1e-5)


def test_logsumexp_is_exact_where_the_label_is_far_below() -> None:
    """logsumexp is 1 + log(2) or so; a label at -1e6 must not blur it."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[1.0], [1.0], [-1e6]], requires_grad=True)
    labels = torch.tensor([2])
    with_z, without = (
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, z_loss=z)[0], weight)[0] for z in (1.0, 0.0)
    )
    half = 1.0 + torch.tensor(2.0).log()  # p is 1/2 on two tokens: 2 z_loss logsumexp / 2 is added
    torch.testing.assert_close(with_z - without, torch.stack([half, half, torch.zeros(())])[:, None], atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_counts(backend: LossBackend, unseen: bool, tokens: int) -> None:
    hidden, weight, labels = inputs((tokens,), ignored=1.0)
    bias = torch.zeros(weight.shape[0], requires_grad=True)
    given: Any = labels.as_subclass(Unseen) if unseen else labels
    loss, count = linear_cross_entropy(hidden, weight, given, bias=bias, backend=backend, **ALL)
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None
        assert not leaf.grad.any()


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("options", [OPTIONS["z"], OPTIONS["cap"], OPTIONS["z_cap"]])
def test_forbidden_tokens(unseen: bool, options: dict[str, float]) -> None:
    """A bias of -inf leaves the z-loss right; a soft cap lifts it to minus the cap, as the formula says."""
    hidden, weight, labels = inputs()
    bias = torch.zeros(weight.shape[0], dtype=torch.float64)
    bias[[0, 5]] = -torch.inf
    labels = labels.masked_fill((labels == 0) | (labels == 5), 1)
    given: Any = labels.as_subclass(Unseen) if unseen else labels
    loss, count = linear_cross_entropy(hidden, weight, given, bias=bias.float(), chunk_size=4, **options)
    h, w = doubled(hidden, weight)
    counted = labels != IGNORED
    logits = h[counted] @ w.t() + bias
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    expected = F.cross_entropy(logits, labels[counted], reduction="sum")
    expected = expected + options.get("z_loss", 0.0) * logits.logsumexp(-1).square().sum()
    assert count.item() == counted.sum().item() < len(labels)
    assert_close(loss.double(), expected, 1e-6)
    wanted = torch.autograd.grad(expected, [h, w])
    for actual, want in zip(torch.autograd.grad(loss, [hidden, weight]), wanted, strict=True):
        assert_close(actual.double(), want, 1e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_size", [7, None])
def test_autocast(options: dict[str, float], dtype: torch.dtype, chunk_size: int | None) -> None:
    hidden, weight, labels = inputs((60,), 16, 40)
    expected = formula(hidden, weight, labels, **options)
    wanted = torch.autograd.grad(expected, [hidden, weight])
    with torch.autocast("cpu", dtype):
        loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size, **options)
    assert loss.dtype == torch.float32
    tolerance = 8 * torch.finfo(dtype).eps
    assert_close(loss, expected, tolerance)
    for actual, want in zip(torch.autograd.grad(loss, [hidden, weight]), wanted, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, want, tolerance)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bfloat16_tensors(options: dict[str, float]) -> None:
    hidden, weight, labels = inputs((60,), 16, 40)
    narrow = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    expected = formula(wide[0], wide[1], labels, **options)
    wanted = torch.autograd.grad(expected, wide)
    loss, _ = linear_cross_entropy(narrow[0], narrow[1], labels, chunk_size=7, **options)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, 0.02)
    for actual, want in zip(torch.autograd.grad(loss, narrow), wanted, strict=True):
        assert actual.dtype == torch.bfloat16
        assert_close(actual, want.bfloat16(), 0.04)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_without_gradients(mode: Any, options: dict[str, float]) -> None:
    hidden, weight, labels = inputs()
    with mode():
        loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_size=4, **options)
    assert not loss.requires_grad
    assert_close(loss, formula(hidden, weight, labels, **options).detach(), 1e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    hidden, weight, labels = inputs()
    wanted = dict(
        zip(
            ("hidden", "weight"),
            torch.autograd.grad(formula(hidden, weight, labels, **ALL), [hidden, weight]),
            strict=True,
        )
    )
    leaves = {"hidden": hidden, "weight": weight}
    leaves[frozen].requires_grad_(False)
    loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_size=4, **ALL)
    assert [saved is None for saved in kept_gradients(loss)] == [frozen == "hidden", frozen == "weight", True]
    loss.backward()
    assert leaves.pop(frozen).grad is None
    for name, leaf in leaves.items():
        assert_close(leaf.grad, wanted[name], 1e-5)


def test_inside_a_compiled_region() -> None:
    hidden, weight, labels = inputs()
    wanted = torch.autograd.grad(formula(hidden * 2, weight, labels, **ALL), [hidden, weight])

    @torch.compile(backend="aot_eager")
    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 2, weight, labels, **ALL)[0] * 3

    for actual, want in zip(torch.autograd.grad(step(hidden, weight), [hidden, weight]), wanted, strict=True):
        assert_close(actual, 3 * want)


class Held(TorchDispatchMode):
    """Calls, and the sizes of what they make: new storages of at least ``least`` numbers."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.made: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no address is used twice
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append(str(func))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
                if numbers >= self.least:
                    self.made.setdefault(tensor.untyped_storage().data_ptr(), numbers)
                    self.alive.append(tensor)
        return out


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["none", *OPTIONS])
def test_one_buffer_of_a_chunk_is_made(options: dict[str, float], training: bool) -> None:
    """16 rows of logits for all chunks together, and 2 of the cap's slope when a gradient is wanted; no more."""
    hidden, weight, labels = (x.detach() for x in inputs((64,), 4, 1000, ignored=0))
    hidden.requires_grad_(training)
    with Held(least=1000) as held:
        linear_cross_entropy(hidden, weight, labels, chunk_size=16, **options)
    expected = [16 * 1000] + ([2 * 1000] if training and "softcap" in options else [])
    given = {weight.untyped_storage().data_ptr()}
    assert [size for at, size in held.made.items() if at not in given] == expected


def test_without_options_nothing_more_is_done() -> None:
    """The calls of a chunk that pass over its logits are those of the plain loss."""
    hidden, weight, labels = inputs((16,), 4, 1000, ignored=0)
    with Held(least=1000) as held:
        linear_cross_entropy(hidden, weight.detach(), labels, chunk_size=16, z_loss=0.0, label_smoothing=0.0)
    extra = ("amax", "mean", "tanh", "div", "addcmul", "logsumexp", "aten.sub", "aten.mul.Scalar")
    assert [c for c in held.calls if any(word in c for word in extra)] == []
    passes = ("aten.mm", "log_softmax", "exp_", "scatter_add_", "gather")
    assert [sum(word in c for c in held.calls) for word in passes] == [2, 1, 1, 1, 1]
