"""The chunked loss against plain logits and ``F.cross_entropy``, and its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_llm.errors import UserError
from lit_llm.ops import linear_cross_entropy
from lit_llm.ops.cross_entropy import LossBackend

IGNORED = -100


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """Written without lit_llm: the sum over the labels that count of -log softmax(logits)[label]."""
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    counted = labels != IGNORED
    picked = logits.log_softmax(-1).gather(-1, labels.where(counted, 0)[..., None]).squeeze(-1)
    return -(picked * counted).sum()


def inputs(
    shape: tuple[int, ...] = (13,), hidden_size: int = 5, vocab_size: int = 17, ignored: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, hidden_size, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, hidden_size, generator=generator).requires_grad_()
    labels = torch.randint(vocab_size, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = IGNORED
    return hidden, weight, labels


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 1e-5) -> None:
    """Within ``tolerance`` of the largest expected value (for a scalar: relative)."""
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    scale = expected.abs().max().item() if expected.numel() else 0.0
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=0, atol=tolerance * max(scale, 1e-30))


def kept_gradients(loss: Tensor) -> tuple[Any, ...]:
    """What forward left for backward: the gradients of hidden, weight and bias."""
    node: Any = loss.grad_fn
    return node.saved_tensors


class Unseen(Tensor):
    """Labels whose values must not be looked at: the path that a GPU takes, here on the CPU."""


@pytest.mark.parametrize(
    ("backend", "chunk_size"),
    [("reference", None), ("auto", None), ("chunked", 1), ("chunked", 7), ("chunked", 1000), ("chunked", None)],
)
@pytest.mark.parametrize(
    ("shape", "hidden_size", "vocab_size"), [((13,), 5, 17), ((2, 9), 8, 64), ((1,), 3, 2), ((2, 3, 5), 1, 33)]
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("unseen", [False, True])
def test_equals_plain(
    backend: LossBackend,
    chunk_size: int | None,
    shape: tuple[int, ...],
    hidden_size: int,
    vocab_size: int,
    with_bias: bool,
    unseen: bool,
) -> None:
    hidden, weight, labels = inputs(shape, hidden_size, vocab_size)
    bias = torch.randn(vocab_size).requires_grad_() if with_bias else None
    leaves = [hidden, weight, *([bias] if bias is not None else [])]
    expected = plain(hidden, weight, labels, bias)
    expected_gradients = torch.autograd.grad(expected * 0.37, leaves)

    given = labels.as_subclass(Unseen) if unseen else labels
    loss, count = linear_cross_entropy(hidden, weight, given, bias=bias, chunk_size=chunk_size, backend=backend)
    assert (loss.dtype, loss.shape, count.dtype, count.shape) == (torch.float32, (), torch.int64, ())
    assert count.item() == (labels != IGNORED).sum().item()
    assert_close(loss, expected)
    for actual, wanted in zip(torch.autograd.grad(loss * 0.37, leaves), expected_gradients, strict=True):
        assert_close(actual, wanted)


def test_many_chunks_of_the_default_size() -> None:
    hidden, weight, labels = inputs((2, 500), 8, 8000)
    expected = torch.autograd.grad(plain(hidden, weight, labels), [hidden, weight])
    actual = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels)[0], [hidden, weight])
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels = inputs((6,), 4, 9, ignored=0)
    hidden, weight = (hidden.detach() * 100).requires_grad_(), (weight.detach() * 10).requires_grad_()
    expected = plain(hidden, weight, labels)
    loss, _ = linear_cross_entropy(hidden, weight, labels)
    assert_close(loss, expected)
    actual, wanted = (torch.autograd.grad(x, [hidden, weight]) for x in (loss, expected))
    for a, e in zip(actual, wanted, strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_counts(backend: LossBackend, unseen: bool, tokens: int) -> None:
    hidden, weight, labels = inputs((tokens,), ignored=1.0)
    bias = torch.zeros(weight.shape[0], requires_grad=True)
    assert (labels == IGNORED).all()
    labels = labels.as_subclass(Unseen) if unseen else labels
    loss, count = linear_cross_entropy(hidden, weight, labels, bias=bias, backend=backend)
    loss.backward()
    assert loss.item() == 0.0
    assert count.item() == 0
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@pytest.mark.parametrize("unseen", [False, True])
def test_forbidden_tokens(unseen: bool) -> None:
    """A bias of -inf, as for rows that pad the vocabulary, also where an ignored label is stood in for by token 0."""
    hidden, weight, labels = inputs()
    bias = torch.zeros(weight.shape[0])
    bias[[0, 5]] = -torch.inf
    labels = labels.masked_fill((labels == 0) | (labels == 5), 1)
    assert (labels == IGNORED).any()
    given = labels.as_subclass(Unseen) if unseen else labels
    loss, _ = linear_cross_entropy(hidden, weight, given, bias=bias, chunk_size=4)
    kept = labels != IGNORED
    expected = plain(hidden[kept], weight, labels[kept], bias)
    assert_close(loss, expected)
    for a, e in zip(*(torch.autograd.grad(x, [hidden, weight]) for x in (loss, expected)), strict=True):
        assert_close(a, e)


def test_another_ignore_index_and_narrow_labels() -> None:
    hidden, weight, labels = inputs(ignored=0)
    marked = labels.masked_fill(labels == 3, IGNORED)
    loss, count = linear_cross_entropy(hidden, weight, labels.to(torch.int32), ignore_index=3)
    assert_close(loss, plain(hidden, weight, marked))
    assert count.item() == (labels != 3).sum().item() < labels.numel()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(plain(hidden, weight, labels), [hidden, weight])
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        leaf.requires_grad_(frozen not in (name, "both"))
    loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_size=4)
    assert loss.requires_grad == (frozen != "both")
    if frozen == "both":
        return
    # What is frozen is not computed either: only the other gradient is kept for backward.
    assert [saved is None for saved in kept_gradients(loss)] == [frozen == "hidden", frozen == "weight", True]
    loss.backward()
    for leaf, wanted in zip((hidden, weight), expected, strict=True):
        if leaf.requires_grad:
            assert_close(leaf.grad, wanted)
        else:
            assert leaf.grad is None


def test_without_gradients() -> None:
    hidden, weight, labels = inputs()
    expected = plain(hidden, weight, labels).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_size=4)
        assert not loss.requires_grad
        assert_close(loss, expected)


def test_backward_twice_with_the_graph_kept() -> None:
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(plain(hidden, weight, labels), [hidden, weight])
    loss, count = linear_cross_entropy(hidden, weight, labels, chunk_size=4)
    mean = loss / count
    mean.backward(retain_graph=True)
    first = weight.grad
    assert first is not None
    kept = first.clone()
    mean.backward(retain_graph=True)
    mean.backward()
    for leaf, wanted in zip((hidden, weight), expected, strict=True):
        assert_close(leaf.grad, 3 * wanted / count)
    assert_close(kept, expected[1] / count)


def test_no_copy_of_the_weight_gradient() -> None:
    """The tensor made in forward is the one that arrives in ``.grad``, scaled in place."""
    hidden, weight, labels = inputs()
    loss, count = linear_cross_entropy(hidden, weight, labels)
    address = kept_gradients(loss)[1].data_ptr()
    (loss / count).backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == address


def test_tied_weight_used_twice() -> None:
    _, weight, labels = inputs((2, 9), 8, 64)
    ids = torch.randint(64, (2, 9))
    expected = torch.autograd.grad(plain(F.embedding(ids, weight).tanh(), weight, labels), weight)[0]
    loss, _ = linear_cross_entropy(F.embedding(ids, weight).tanh(), weight, labels, chunk_size=5)
    loss.backward()
    assert_close(weight.grad, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_checkpoint(use_reentrant: bool) -> None:
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(plain(hidden.tanh(), weight, labels), [hidden, weight])

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.tanh(), weight, labels, chunk_size=4)[0]

    loss = checkpoint(head, hidden, weight, use_reentrant=use_reentrant)
    loss.backward()
    for leaf, wanted in zip((hidden, weight), expected, strict=True):
        assert_close(leaf.grad, wanted)


def test_float64_gradcheck() -> None:
    hidden, weight, labels = inputs()
    bias = torch.randn(weight.shape[0], dtype=torch.float64, requires_grad=True)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=4)[0]

    assert loss(hidden, weight, bias).dtype == torch.float64
    # gradcheck walks back through one graph many times: it keeps the graph, as a retained backward does.
    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_no_second_derivatives() -> None:
    hidden, weight, labels = inputs()
    loss, _ = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(UserError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_size", [7, None])
def test_autocast(dtype: torch.dtype, chunk_size: int | None) -> None:
    hidden, weight, labels = inputs((60,), 16, 40)
    expected = torch.autograd.grad(plain(hidden, weight, labels), [hidden, weight])
    with torch.autocast("cpu", dtype):
        loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    assert loss.dtype == torch.float32
    # The upstream gradient of a fp16 run: a loss scale beyond float16's largest number.
    (loss * 65536.0).backward()
    tolerance = 8 * torch.finfo(dtype).eps
    assert_close(loss, plain(hidden, weight, labels), tolerance)
    for leaf, wanted in zip((hidden, weight), expected, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        assert_close(leaf.grad / 65536.0, wanted, tolerance)


def test_autocast_of_a_half_precision_trunk() -> None:
    hidden, weight, labels = inputs((60,), 16, 40)
    trunk = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, count = linear_cross_entropy(trunk, weight, labels)
    (loss / count).backward()
    assert trunk.grad is not None
    assert weight.grad is not None
    assert (trunk.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    expected = torch.autograd.grad(plain(hidden, weight, labels) / count, [hidden, weight])
    assert_close(trunk.grad.float(), expected[0], 0.05)
    assert_close(weight.grad, expected[1], 0.05)


def test_half_precision_weight_gradient_is_summed_in_float32() -> None:
    """One column gets the same small push from 4096 tokens: bfloat16 sums would stop growing at 256 of them."""
    tokens = 4096
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long), chunk_size=1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.squeeze(1).tolist() == [-tokens / 2, tokens / 2]


def test_float16_weight_gradient_does_not_overflow() -> None:
    tokens = 512
    hidden = torch.full((tokens, 1), 300.0)
    weight = torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss, count = linear_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long), chunk_size=tokens)
    (loss / count).backward()  # the sum over the tokens is 76800, beyond float16; the mean is not
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.tensor([[-150.0], [150.0]]))


def test_inside_a_compiled_region() -> None:
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(plain(hidden * 2, weight, labels), [hidden, weight])

    @torch.compile(backend="aot_eager")
    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 2, weight, labels)[0] * 3

    for _ in range(2):
        actual = torch.autograd.grad(step(hidden, weight), [hidden, weight])
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, 3 * e)


@pytest.mark.parametrize("hidden_layout", ["transposed", "expanded", "vector"])
def test_layouts(hidden_layout: str) -> None:
    hidden, weight, labels = inputs((13,), 5, 17)
    view = {
        "transposed": lambda h: h.t().contiguous().t(),
        "expanded": lambda h: h[:1].expand(13, 5),
        "vector": lambda h: h[0],
    }[hidden_layout]
    labels = labels.masked_fill(labels == IGNORED, 2)
    labels = labels[0] if hidden_layout == "vector" else labels
    loss, _ = linear_cross_entropy(view(hidden), weight.t().contiguous().t(), labels, chunk_size=4)
    expected = plain(view(hidden), weight, labels)
    for a, e in zip(*(torch.autograd.grad(x, [hidden, weight]) for x in (loss, expected)), strict=True):
        assert_close(a, e)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-4, "label_smoothing": 0.1, "softcap": 30.0}])
def test_cuda_without_synchronisation(options: dict[str, float]) -> None:
    leaves = inputs((4, 300), 64, 500)
    loss, _ = linear_cross_entropy(*leaves, **options, backend="reference")
    expected = torch.autograd.grad(loss if options else plain(*leaves), leaves[:2])
    hidden, weight, labels = (x.detach().cuda() for x in leaves)
    hidden.requires_grad_(), weight.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, count = linear_cross_entropy(hidden, weight, labels, **options)
        (loss / count).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for leaf, wanted in zip((hidden, weight), expected, strict=True):
        assert leaf.grad is not None
        assert_close((leaf.grad * count).cpu(), wanted)


def test_fake_tensors() -> None:
    """The planner runs a model on shapes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden, weight = torch.empty(6, 4, requires_grad=True), torch.empty(9, 4, requires_grad=True)
        loss, _ = linear_cross_entropy(hidden, weight, torch.zeros(6, dtype=torch.long))
        loss.backward()
    assert weight.grad is not None
    assert weight.grad.shape == (9, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 17])}, "label 17 is outside the vocabulary of 17"),
        ({"labels": torch.tensor([-1, IGNORED])}, "label -1 is outside"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "labels \\(3,\\) do not match hidden \\(2, 5\\)"),
        ({"labels": torch.zeros(2)}, "labels are torch.float32"),
        ({"weight": torch.zeros(17, 4)}, "weight \\(17, 4\\) do not fit"),
        ({"weight": torch.zeros(17, 5, dtype=torch.bfloat16)}, "weight torch.bfloat16"),
        ({"bias": torch.zeros(5)}, "bias \\(5,\\) must be \\(17,\\)"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"z_loss": -1e-4}, "z_loss is -0.0001; it must be a finite number at least 0"),
        ({"z_loss": float("inf")}, "z_loss is inf"),
        ({"z_loss": "1"}, "z_loss is '1'"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; it must be a finite number in \\[0, 1\\)"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        ({"label_smoothing": float("nan")}, "label_smoothing is nan"),
        ({"softcap": 0}, "softcap is 0; it must be a finite number above 0, or None"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"softcap": True}, "softcap is True"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(2, 5),
        "weight": torch.zeros(17, 5),
        "labels": torch.tensor([0, IGNORED]),
    }
    with pytest.raises(UserError, match=message):
        linear_cross_entropy(**{**arguments, **change})


# Run in a process of its own, whose peak is then this computation's. Prints bytes above inputs and gradients.
PEAK = """
import json, sys
from pathlib import Path
import torch
from lit_llm.ops import linear_cross_entropy

tokens, hidden_size, vocab_size, training, options = json.loads(sys.argv[1])

def resident(kind):  # not getrusage, whose peak starts at the parent's
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))

def peak(tokens, hidden_size, vocab_size):
    hidden = torch.randn(tokens, hidden_size, requires_grad=training)
    weight = (torch.randn(vocab_size, hidden_size) * 0.02).requires_grad_(training)
    labels = torch.randint(vocab_size, (tokens,))
    before = resident("VmRSS:")
    value, count = linear_cross_entropy(hidden, weight, labels, **options)
    if training:
        (value / count).backward()
    gradients = hidden.nbytes + weight.nbytes if training else 0
    return resident("VmHWM:") - before - gradients

peak(8, 64, 512)  # loads the libraries
print(json.dumps(peak(tokens, hidden_size, vocab_size)))
"""


def peak_share_of_logits(
    tokens: int, hidden_size: int, vocab_size: int, training: bool = True, **options: float
) -> float:
    size = json.dumps([tokens, hidden_size, vocab_size, training, options])
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PEAK, size], stdout=subprocess.PIPE, check=True, env=environment)
    return json.loads(done.stdout) / (4 * tokens * vocab_size)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-4, "label_smoothing": 0.1, "softcap": 30.0}])
def test_peak_memory(training: bool, options: dict[str, float]) -> None:
    share = peak_share_of_logits(4096, 64, 32000, training, **options)
    print(f"peak above inputs and gradients: {share:.1%} of the float32 logits")
    assert share <= 0.20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_at_full_size() -> None:
    share = peak_share_of_logits(4096, 768, 128256)
    print(f"peak above inputs and gradients: {share:.1%} of the float32 logits")
    assert share <= 0.20


@pytest.mark.slow
def test_equals_plain_at_full_size() -> None:
    hidden, weight, labels = inputs((4096,), 768, 128256)
    weight = (weight.detach() * 0.05).requires_grad_()
    loss, count = linear_cross_entropy(hidden, weight, labels)
    actual = torch.autograd.grad(loss / count, [hidden, weight])
    expected_loss = plain(hidden, weight, labels)
    expected = torch.autograd.grad(expected_loss / count, [hidden, weight])
    assert_close(loss, expected_loss)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)
