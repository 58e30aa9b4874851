"""Every attention back end against the reference, and the reference against what attention should do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from lit_llm.errors import UserError
from lit_llm.ops import attention, blocks, document_lengths, documents, sdpa
from tests.fake_flash import FakePackage, clear_decisions, use_flash, use_varlen

LENGTHS = (1, 7, 64)
# "blocks" is sdpa with blocks so small that every case is cut into several.
BACKENDS = ("sdpa", "blocks", "flash-2", "flash-3", "flash-3-tuples", "flash-4", "varlen", "flex")
TOLERANCE = 1e-5  # float32, absolute and relative


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Sets the named back end up, and gives the name that `attention` knows it by."""
    name: str = request.param
    if name == "blocks":
        monkeypatch.setattr(blocks, "_FUSED_ROWS", 5)
        monkeypatch.setattr(blocks, "_EXPLICIT_ROWS", (3, 5))
        monkeypatch.setattr(blocks, "_EXPLICIT_SCORES", 64)
    elif name == "varlen":
        use_varlen(monkeypatch, "enable_gqa")
    elif name.startswith("flash"):
        use_flash(monkeypatch, FakePackage(int(name[6]), tuples=name.endswith("tuples")))
    yield {"blocks": "sdpa", "varlen": "sdpa"}.get(name, name.split("-")[0])
    clear_decisions()


def make(q_len: int, k_len: int, heads: int = 4, kv_heads: int = 2, batch: int = 2, dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len * 1000 + k_len * 10 + kv_heads)
    shapes = [(batch, q_len, heads, dim), (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, dim)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def some_documents(batch: int, seq: int) -> Tensor:
    """Ids of which the same comes back after another, and a document of one token."""
    ids = torch.arange(seq).div(12, rounding_mode="floor") % 2 + torch.arange(batch)[:, None]
    ids[0, seq // 2] = 9
    return ids


def compare(backend: str, qkv: list[Tensor], **options: Any) -> None:
    """Output and gradients against the reference. flex is forward only on the CPU, flash's KV cache function is so."""
    want = attention(*qkv, backend="reference", **options)
    if backend == "flex" or (backend == "flash" and "key_lengths" in options):
        with torch.no_grad():
            out = attention(*qkv, backend=backend, **options)
        assert out.is_contiguous()
        torch.testing.assert_close(out, want.detach(), atol=TOLERANCE, rtol=TOLERANCE)
        if backend == "flex":
            return
    out = attention(*qkv, backend=backend, **options)
    assert out.is_contiguous()
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for mine, reference in zip(
        (out, *torch.autograd.grad(out, qkv, grad)), (want, *torch.autograd.grad(want, qkv, grad)), strict=True
    ):
        torch.testing.assert_close(mine, reference, atol=TOLERANCE, rtol=TOLERANCE)


def all_cases() -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """(q_len, k_len, kv_heads, options) over all that can be asked together."""
    kinds = ("", "documents", "key_lengths")
    for q_len, k_len, kv_heads, window, softcap, causal, kind in itertools.product(
        LENGTHS, LENGTHS, (1, 2, 4), (None, 1, 8), (None, 2.0), (True, False), kinds
    ):
        if (kind == "documents" and q_len != k_len) or (window is not None and not causal):
            continue
        options: dict[str, Any] = {"window": window, "softcap": softcap, "causal": causal}
        if kind == "documents":
            options["document_ids"] = some_documents(2, q_len)
        if kind == "key_lengths":
            options["key_lengths"] = torch.tensor([k_len, k_len // 2])
        yield q_len, k_len, kv_heads, options


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*flex_attention called without")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_equals_the_reference_everywhere(backend: str) -> None:
    for q_len, k_len, kv_heads, options in all_cases():
        compare(backend, make(q_len, k_len, kv_heads=kv_heads), **options)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_equals_the_reference(backend: str) -> None:
    # A prime step walks through every option. flex takes half a second a case without its compiler.
    step = 199 if backend == "flex" else 13
    for q_len, k_len, kv_heads, options in itertools.islice(all_cases(), 0, None, step):
        compare(backend, make(q_len, k_len, kv_heads=kv_heads), **options)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without")
@pytest.mark.parametrize("backend", ["reference", *BACKENDS], indirect=True)
def test_a_window_of_8_is_8_keys(backend: str) -> None:
    i = 20
    q, k, v = (x.detach() for x in make(32, 32))

    def outputs(changed: int | None, **options: Any) -> Tensor:
        new_k, new_v = k.clone(), v.clone()
        if changed is not None:
            new_k[:, changed], new_v[:, changed] = 3.0, -3.0
        if "queries" in options:  # generation: the last token alone, against the cache
            return attention(q[:, i : i + 1], new_k[:, : i + 1], new_v[:, : i + 1], window=8, backend=backend)[:, 0]
        if "key_lengths" in options:
            return attention(
                q[:, i : i + 1], new_k, new_v, window=8, backend=backend, key_lengths=torch.tensor([i + 1, i + 1])
            )[:, 0]
        return attention(q, new_k, new_v, window=8, backend=backend, **options)[:, i]

    one_document = {"document_ids": torch.zeros(2, 32, dtype=torch.long)}
    cases = [{}, {"key_lengths": 1}, {"queries": 1}, {"softcap": 5.0}, one_document]
    for options in cases[:2] if backend == "flex" else cases:
        before = outputs(None, **options)
        assert torch.equal(outputs(i - 8, **options), before)
        assert not torch.equal(outputs(i - 7, **options), before)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "flex"], indirect=True)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_without_a_key_give_zeros_and_no_gradient(
    backend: str, softcap: float | None, dtype: torch.dtype
) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in make(40, 40))
    options: dict[str, Any] = {"softcap": softcap, "key_lengths": torch.tensor([40, 1])}
    if backend == "flash":
        with torch.no_grad():
            out = attention(q, k, v, backend=backend, **options)
        assert not out[1, :39].any()
    out = attention(q, k, v, backend=backend, **options)
    assert not out[1, :39].any()
    assert out[1, 39].any()
    out.float().square().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
    assert q.grad is not None
    assert not q.grad[1, :39].any()
    assert k.grad is not None
    assert not k.grad[1, 1:].any()
    # More queries than keys.
    out = attention(q, k[:, :3], v[:, :3], backend=backend, softcap=softcap)
    assert not out[:, :37].any()
    assert out[:, 37:].any()
    assert torch.isfinite(torch.autograd.grad(out.float().sum(), q)[0]).all()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("window", [None, 3])
def test_a_packed_document_equals_the_document_alone(backend: str, window: int | None) -> None:
    ids = torch.tensor([[0] * 5 + [1] * 6] * 2)
    cu, longest = document_lengths(ids)
    for softcap in (5.0,) if backend == "flex" else (None, 5.0):
        q, k, v = (x.detach() for x in make(11, 11))
        options: dict[str, Any] = {"window": window, "softcap": softcap, "backend": backend}
        packed = attention(q, k, v, document_ids=ids, **options)
        alone = attention(q[:, 5:], k[:, 5:], v[:, 5:], **options)
        torch.testing.assert_close(packed[:, 5:], alone, atol=TOLERANCE, rtol=TOLERANCE)
        q[:, :5], k[:, :5], v[:, :5] = 7.0, 8.0, 9.0
        after = attention(q, k, v, cu_seqlens=cu, max_seqlen=longest, **options)
        assert torch.equal(after[:, 5:], packed[:, 5:])
        assert not torch.equal(after[:, :5], packed[:, :5])


@pytest.mark.parametrize("newest_parameter", ["is_causal", "window_size", "enable_gqa"])
def test_varlen_attn_of_every_torch(newest_parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_varlen(monkeypatch, newest_parameter)
    calls = []
    real = sdpa._varlen
    monkeypatch.setattr(sdpa, "_varlen", lambda *arguments: (calls.append(1), real(*arguments))[1])
    ids = some_documents(2, 64)
    served = 0
    for kv_heads, window, scale, causal in itertools.product((2, 4), (None, 8), (None, 0.3), (True, False)):
        if window is not None and not causal:
            continue
        options = {"window": window, "scale": scale, "causal": causal, "document_ids": ids}
        compare("sdpa", make(64, 64, kv_heads=kv_heads), **options)
        old, middle = newest_parameter == "is_causal", newest_parameter != "enable_gqa"
        served += not (old and (window or scale)) and not (middle and kv_heads != 4)
    assert len(calls) == served
    clear_decisions()


def test_value_heads_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (128, 5):
        monkeypatch.setattr(blocks, "_EXPLICIT_ROWS", (min(rows, 16), rows))
        for options in ({}, {"window": 8}, {"key_lengths": torch.tensor([64, 9])}, {"causal": False}):
            q, k, v = make(64, 64)
            compare("sdpa", [q, k, v[..., :5].detach().requires_grad_()], **options)


def test_views_of_a_fused_projection() -> None:
    fused = torch.randn(2, 64, 8, 8, requires_grad=True)
    for options in ({}, {"window": 8}, {"softcap": 3.0}, {"document_ids": some_documents(2, 64)}):
        q, k, v = fused.split((4, 2, 2), dim=2)
        compare("sdpa", [q, k, v], **options)
        grads = [
            torch.autograd.grad(attention(*fused.split((4, 2, 2), dim=2), backend=name, **options).sum(), fused)[0]
            for name in ("sdpa", "reference")
        ]
        torch.testing.assert_close(*grads, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 5.0}], ids=str)
def test_half_precision_is_near_the_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    qkv = make(16, 16)
    half = [x.detach().to(dtype).requires_grad_() for x in qkv]
    want, out = attention(*qkv, backend="reference", **options), attention(*half, backend="sdpa", **options)
    assert out.dtype == dtype
    wanted, grads = torch.autograd.grad(want.sum(), qkv), torch.autograd.grad(out.sum(), half)
    # A few units in the last place of bfloat16 (2**-8) at values of about 1.
    for mine, reference in zip((out, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(mine.float(), reference, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 5.0}], ids=str)
def test_autocast_casts_as_torch_does(backend: str, options: dict[str, Any]) -> None:
    qkv = make(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*qkv, backend=backend, **options)
        if backend == "sdpa":  # the plain computation's own backward would be cast too
            out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    half = [x.detach().bfloat16().requires_grad_() for x in qkv]
    want = attention(*half, backend=backend, **options)
    want.float().sum().backward()
    assert torch.equal(out, want)
    if backend == "sdpa":
        for x, y in zip(qkv, half, strict=True):
            assert x.grad is not None
            torch.testing.assert_close(x.grad, y.grad, check_dtype=False)


def test_autocast_takes_mixed_inputs() -> None:
    # Rotated queries and keys are float32, values come from a linear layer in bfloat16.
    q, k, v = make(16, 16)
    for options in ({}, {"window": 5}, {"softcap": 5.0}, {"backend": "reference"}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(q, k, v.bfloat16(), **options)
            torch.testing.assert_close(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options))


@pytest.mark.parametrize("backend", ["sdpa", "blocks"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"dropout": 0.5}, {"document_ids": 1}], ids=str)
def test_activation_checkpointing_and_inference_mode(backend: str, options: dict[str, Any]) -> None:
    if "document_ids" in options:
        options = {"document_ids": some_documents(2, 12)}

    def run(*inputs: Tensor) -> Tensor:
        return attention(*inputs, backend=backend, **options)

    qkv = make(12, 12)
    torch.manual_seed(0)
    out = run(*qkv)
    torch.manual_seed(0)
    again = torch.utils.checkpoint.checkpoint(run, *qkv, use_reentrant=False)
    assert isinstance(again, Tensor)
    assert torch.equal(out, again)
    for mine, want in zip(torch.autograd.grad(again.sum(), qkv), torch.autograd.grad(out.sum(), qkv), strict=True):
        assert torch.equal(mine, want)
    torch.manual_seed(0)
    with torch.inference_mode():
        torch.testing.assert_close(run(*qkv), out.detach())


def test_dropout_drops_and_scales() -> None:
    torch.manual_seed(0)
    seq, rate = 300, 0.3
    q, k = torch.zeros(1, seq, 2, 8), torch.zeros(1, seq, 1, 8)
    # Equal weights 1/seq against one-hot values show each weight after dropout.
    v = torch.eye(seq)[None, :, None, :]
    out = attention(q, k, v, causal=False, dropout=rate)
    kept = out > 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / seq / (1 - rate)))
    count = kept.float().mean().item()
    assert abs(count - (1 - rate)) < 4 * (rate * (1 - rate) / out.numel()) ** 0.5
    # Rows, heads and blocks of rows (of 256 here) differ.
    assert not torch.equal(kept[0, 0], kept[0, 256])
    assert not torch.equal(kept[0, 0], kept[0, 1])
    assert not torch.equal(kept[0, :, 0], kept[0, :, 1])


@pytest.mark.parametrize("backend", ["sdpa", "blocks"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 2.0}, {"document_ids": 1}], ids=str)
def test_dropout_repeats_with_the_seed_and_has_its_own_gradient(backend: str, options: dict[str, Any]) -> None:
    if "document_ids" in options:
        options = {"document_ids": some_documents(2, 12)}
    qkv = [x.detach().double().requires_grad_() for x in make(12, 12)]

    def run(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attention(*inputs, dropout=0.4, backend=backend, **options)

    out = run(*qkv)
    assert torch.equal(out, run(*qkv))
    torch.manual_seed(4)
    assert not torch.equal(out, attention(*qkv, dropout=0.4, backend=backend, **options))
    # Finite differences at a fixed seed: right only if the backward drops exactly what the forward dropped.
    assert torch.autograd.gradcheck(run, qkv, fast_mode=True)


@pytest.mark.parametrize(("batch", "seq", "k_len"), [(0, 4, 4), (2, 0, 0), (2, 0, 3), (2, 3, 0), (2, 1, 0)])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"softcap": 1.0}, {"backend": "reference"}], ids=str)
def test_empty_input(batch: int, seq: int, k_len: int, options: dict[str, Any]) -> None:
    qkv = make(seq, k_len, batch=batch)
    out = attention(*qkv, **options)
    assert out.shape == (batch, seq, 4, 8)
    assert not out.any()
    out.sum().backward()
    if seq == k_len:
        ids = torch.zeros(batch, seq, dtype=torch.long)
        assert attention(*qkv, document_ids=ids, **options).shape == out.shape


def test_document_lengths() -> None:
    ids = torch.tensor([[3, 3, 1, 3], [3, 3, 3, 3], [1, 2, 4, 4]])
    cu, longest = document_lengths(ids)
    assert cu.dtype == torch.int32
    assert cu.tolist() == [0, 2, 3, 4, 8, 9, 10, 12]
    assert longest == 4
    index = documents.document_index(cu, 3, 4)
    assert index.tolist() == [[0, 0, 1, 2], [3, 3, 3, 3], [4, 5, 6, 6]]
    for empty in (ids[:0], ids[:, :0]):
        cu, longest = document_lengths(empty)
        assert (cu.tolist(), longest) == ([0], 0)
    with pytest.raises(ValueError, match="integers"):
        document_lengths(torch.zeros(2, 3))


def test_cu_seqlens_may_hold_empty_documents() -> None:
    qkv = make(8, 8)
    padded = torch.tensor([0, 0, 3, 8, 8, 16, 16], dtype=torch.int32)
    plain = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    for backend in ("sdpa", "reference"):
        torch.testing.assert_close(
            attention(*qkv, cu_seqlens=padded, max_seqlen=8, backend=backend),
            attention(*qkv, cu_seqlens=plain, max_seqlen=8, backend="reference"),
        )


CU = torch.tensor([0, 8, 16], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cudnn"}, "unknown attention backend 'cudnn'"),
        ({"backend": "flash"}, "'flash' cannot run: flash-attn needs a CUDA device"),
        ({"backend": "flex"}, "'flex' on CPU is forward only"),
        ({"backend": "flex", "dropout": 0.1}, "'flex' has no dropout"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"softcap": 0.0}, "softcap"),
        ({"window": 0}, "window must be at least 1"),
        ({"window": 4, "causal": False}, "causal attention only"),
    ],
    ids=str,
)
def test_wrong_options_are_the_users(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        attention(*make(8, 8), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"document_ids": torch.zeros(2, 7, dtype=torch.long)}, "document_ids must be"),
        ({"document_ids": torch.zeros(2, 8)}, "document_ids must be integers"),
        ({"document_ids": torch.zeros(2, 8, dtype=torch.long), "cu_seqlens": CU}, "not both"),
        ({"document_ids": torch.zeros(2, 8, dtype=torch.long), "key_lengths": torch.tensor([8, 8])}, "not go together"),
        ({"cu_seqlens": CU}, "max_seqlen"),
        ({"max_seqlen": 2, "window": 3}, "give both or neither"),
        ({"cu_seqlens": CU.long(), "max_seqlen": 8}, "int32"),
        ({"cu_seqlens": CU[None], "max_seqlen": 8}, "int32 of shape"),
        ({"cu_seqlens": CU, "max_seqlen": 7}, "document of 8 tokens"),
        ({"cu_seqlens": CU[:2], "max_seqlen": 8}, "from 0 to 8"),
        ({"cu_seqlens": CU[[0, 2]], "max_seqlen": 16}, "crosses the row border at token 8"),
        ({"cu_seqlens": CU[[0, 1, 0, 1, 2]], "max_seqlen": 16}, "must not fall"),
        ({"key_lengths": torch.tensor([8])}, "key_lengths must be 2 integers"),
        ({"key_lengths": torch.tensor([8.0, 8.0])}, "key_lengths must be 2 integers"),
    ],
    ids=str,
)
def test_wrong_tensors_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*make(8, 8), **options)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = make(8, 8)
    for wrong, message in (
        ((q[0], k, v), "must be"),
        ((q, k[:1], v[:1]), "do not fit"),
        ((q, k, v[:, :3]), "do not fit"),
        ((q[..., :4], k, v), "do not fit"),
        ((q[:, :, :3], k, v), "multiple"),
        ((q, k.double(), v), "one dtype"),
        ((q, k.to("meta"), v.to("meta")), "one device"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*wrong, softcap=1.0)
    with pytest.raises(ValueError, match="as many queries as keys"):
        attention(q[:, :4], k, v, document_ids=torch.zeros(2, 4, dtype=torch.long))
