"""Norms against their formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_llm.ops import layer_norm, rms_norm

EPS = 1e-5


def exact_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True)
    return exact_rms_norm(x, weight) + (0.0 if bias is None else bias.double())


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return layer_norm(x, weight, bias, EPS)


def leaves(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, gain and bias."""
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, shape[-1:], shape[-1:])
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes]


@pytest.mark.parametrize("shape", [(2, 7, 24), (5, 3), (24,), (0, 24), (300, 33)])
@pytest.mark.parametrize(("norm", "exact", "inputs"), [(rms, exact_rms_norm, 2), (layer, exact_layer_norm, 3)])
def test_values_and_gradients(
    norm: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: int, shape: tuple[int, ...]
) -> None:
    arguments = leaves(*shape)[:inputs]
    out, expected = norm(*arguments), exact(*arguments)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad(out, arguments, upstream)
    wanted = torch.autograd.grad(expected, arguments, upstream.double())
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-5, atol=1e-5 * max(1.0, w.abs().max().item() if w.numel() else 0.0))
    with torch.no_grad():
        torch.testing.assert_close(norm(*arguments).double(), expected, rtol=1e-5, atol=1e-5)


def test_layer_norm_without_bias() -> None:
    x, weight, _ = leaves(4, 24)
    torch.testing.assert_close(layer(x, weight).double(), exact_layer_norm(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_parts(frozen: int) -> None:
    arguments = leaves(6, 24)[:2]
    arguments[frozen].requires_grad_(False)
    rms(*arguments).sum().backward()
    other = arguments[1 - frozen]
    (wanted,) = torch.autograd.grad(exact_rms_norm(*arguments).sum(), other)
    assert arguments[frozen].grad is None
    torch.testing.assert_close(other.grad, wanted, rtol=1e-5, atol=1e-5)
    (recorded,) = torch.autograd.grad(rms(*arguments).sum(), other, create_graph=True)
    torch.testing.assert_close(recorded, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [rms, layer])
def test_gradcheck_first_and_second(norm: Callable[..., Tensor]) -> None:
    x, weight, _ = leaves(3, 5, dtype=torch.float64)
    assert norm(x, weight).dtype == torch.float64
    assert torch.autograd.gradcheck(norm, (x, weight))
    assert torch.autograd.gradgradcheck(norm, (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("norm", "exact"), [(rms, exact_rms_norm), (layer, exact_layer_norm)])
def test_half_precision(
    norm: Callable[..., Tensor], exact: Callable[..., Tensor], dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """float32 statistics: 300 squared is beyond float16, and a bfloat16 mean over 4096 would be off by a lot."""
    x = (torch.randn(3, 4096) * 300).to(dtype).requires_grad_()
    weight = torch.randn(4096).to(weight_dtype).requires_grad_()
    out = norm(x, weight)
    assert out.dtype == dtype
    # two roundings (of the normalised value, of the product), or three where the gain's product rounds to bfloat16
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact(x, weight), rtol=1.5 * eps, atol=eps)
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (dtype, weight_dtype)
    assert torch.isfinite(x.grad).all()


def test_llama_rounds_before_the_gain() -> None:
    x, weight, _ = leaves(50, 64, dtype=torch.bfloat16)
    normalised = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    assert torch.equal(rms(x, weight), normalised.bfloat16() * weight)


@pytest.mark.parametrize("norm", [rms, layer])
def test_autocast_leaves_float32_alone(norm: Callable[..., Tensor]) -> None:
    x, weight, _ = leaves(6, 24)
    expected = norm(x, weight)
    wanted = torch.autograd.grad(expected.sum(), (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x, weight)
        gradients = torch.autograd.grad(out.sum(), (x, weight))
    assert torch.equal(out, expected)
    for a, w in zip(gradients, wanted, strict=True):
        assert torch.equal(a, w)


def test_rms_norm_compiled() -> None:
    x, weight, _ = leaves(6, 24)
    compiled = torch.compile(rms, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(x, weight).sum(), (x, weight))
    wanted = torch.autograd.grad(exact_rms_norm(x, weight).sum(), (x, weight))
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-5, atol=1e-5)
