"""Which attention back end runs and why, what it costs in memory, and that torch.compile can look inside."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_llm.errors import UserError
from lit_llm.ops import attention, document_lengths, flash
from lit_llm.ops.attention_problem import Needs, Problem
from tests.fake_flash import FakePackage, clear_decisions, use_flash, use_varlen

choosing = importlib.import_module("lit_llm.ops.attention")
REPO = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def fresh_decisions() -> Any:
    clear_decisions()
    yield
    clear_decisions()


def make(q_len: int, k_len: int, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> list[Tensor]:
    shapes = [(1, q_len, heads, dim), (1, k_len, kv_heads, dim), (1, k_len, kv_heads, dim)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


# ---- which back end


@pytest.mark.parametrize(
    ("capability", "installed", "needs", "backend", "says"),
    [
        ((9, 0), (2, 3, 4), {}, "flash", "FlashAttention-3"),
        ((9, 0), (2, 4), {}, "flash", "FlashAttention-4"),
        ((9, 0), (2,), {}, "sdpa", "faster here than FlashAttention-2"),
        ((9, 0), (2,), {"window": True}, "flash", "FlashAttention-2"),
        ((9, 0), (2,), {"softcap": True}, "flash", "FlashAttention-2"),
        ((9, 0), (2,), {"documents": True}, "flash", "FlashAttention-2"),
        ((9, 0), (2, 3), {"dropout": True, "window": True}, "flash", "FlashAttention-2"),
        ((9, 0), (3,), {"dropout": True}, "sdpa", "FlashAttention-3 has no dropout"),
        ((9, 0), (3, 4), {"key_lengths": True}, "flash", "FlashAttention-3"),
        ((9, 0), (3,), {"key_lengths": True, "training": True}, "sdpa", "no gradient for ragged keys"),
        ((9, 0), (4,), {"key_lengths": True}, "sdpa", "no function for a KV cache"),
        ((9, 0), (3,), {"head_dim": 257, "value_dim": 257}, "sdpa", "head sizes"),
        ((9, 0), (3,), {"value_dim": 128}, "sdpa", "one head size"),
        ((9, 0), (3,), {"dtype": torch.float32}, "sdpa", "not torch.float32"),
        ((9, 0), (), {}, "sdpa", "FlashAttention-3 is absent (flash_attn_interface: ModuleNotFoundError"),
        ((9, 0), (), {"window": True}, "flex", "flex_attention"),
        ((9, 0), (), {"softcap": True, "documents": True}, "flex", "flex_attention"),
        ((9, 0), (), {"softcap": True, "dropout": True}, "sdpa", "fused"),
        ((9, 0), (), {"softcap": True, "key_lengths": True}, "sdpa", "fused"),
        ((9, 0), (), {"window": True, "head_dim": 8, "value_dim": 8}, "sdpa", "fused"),
        ((9, 0), (), {"documents": True}, "sdpa", "varlen_attn"),
        ((9, 0), (), {"documents": True, "softcap": True}, "flex", "flex_attention"),
        ((9, 0), (), {"documents": True, "dtype": torch.float32}, "flex", "flex_attention"),
        ((10, 0), (2, 3, 4), {}, "flash", "FlashAttention-4"),
        ((10, 0), (2, 3), {}, "sdpa", "faster here than FlashAttention-2"),
        ((10, 0), (4, 2), {"head_dim": 256, "value_dim": 256, "window": True}, "flash", "FlashAttention-2"),
        ((8, 0), (2, 3, 4), {}, "flash", "FlashAttention-2"),
        ((7, 5), (2, 3, 4), {}, "sdpa", "no FlashAttention for this GPU"),
    ],
    ids=str,
)
def test_the_choice_on_a_gpu(
    capability: tuple[int, int],
    installed: tuple[int, ...],
    needs: dict[str, Any],
    backend: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use_flash(monkeypatch, *(FakePackage(generation) for generation in installed), capability=capability)
    monkeypatch.setattr(flash, "device_problem", REAL_DEVICE_PROBLEM)
    if needs.get("dtype") != torch.float32:
        use_varlen(monkeypatch, "enable_gqa")
    fields = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "head_dim": 64, "value_dim": 64, **needs}
    with caplog.at_level(logging.INFO, "lit_llm.ops.attention"):
        assert choosing._choose(*Needs(**fields)) == backend
        choosing._choose(*Needs(**fields))
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith(f"attention: {backend}, ")
    assert says in caplog.records[0].message


REAL_DEVICE_PROBLEM = flash.device_problem


def test_one_line_says_what_runs_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lit_llm.ops.attention"):
        for options in ({}, {}, {"window": 3}, {"backend": "sdpa"}, {"backend": "reference"}):
            attention(*make(8, 8), **options)
    assert [record.message for record in caplog.records] == ["attention: sdpa, torch's fused kernels (not on CUDA)"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise OSError('libcudart.so.12: cannot open\\nmore')", "flash_attn: OSError: libcudart.so.12: cannot open"),
        ("raise RuntimeError", "flash_attn: RuntimeError: no message"),
        ("", "flash_attn: AttributeError"),
        (None, "flash_attn: AttributeError"),  # a folder without code: what flash-attn-4 alone leaves
    ],
)
def test_any_failure_of_the_import_is_absence(
    body: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    if body is not None:
        (tmp_path / "flash_attn" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    attention(*make(4, 4))
    assert "flash_attn" not in sys.modules  # never imported where it cannot run
    monkeypatch.setattr(flash, "device_problem", lambda needs: None)
    monkeypatch.setattr(flash, "compute_capability", lambda device: (8, 0))
    try:
        with pytest.raises(UserError, match="'flash' cannot run: FlashAttention-2 is absent") as caught:
            attention(*make(4, 4), backend="flash")
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        sys.modules.pop("flash_attn", None)


def test_what_flash_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    package = FakePackage(2)
    use_flash(monkeypatch, package)
    qkv = make(8, 8)
    attention(*qkv, backend="flash", window=3, dropout=0.25, scale=0.5)
    assert package.calls == ["dense"]
    assert package.options["dropout_p"] == 0.25
    assert package.options["window_size"] == (2, 0)
    assert package.options["softmax_scale"] == 0.5
    assert package.options["deterministic"] is False
    torch.use_deterministic_algorithms(True)
    try:
        attention(*qkv, backend="flash", document_ids=torch.zeros(1, 8, dtype=torch.long))
    finally:
        torch.use_deterministic_algorithms(False)
    assert package.calls[1:] == ["varlen"]
    assert package.options["deterministic"] is True
    with torch.no_grad():
        attention(*qkv, backend="flash", key_lengths=torch.tensor([5]))
    assert package.calls[2:] == ["kvcache"]
    # With gradients the KV cache function cannot, and sdpa does it.
    attention(*qkv, backend="flash", key_lengths=torch.tensor([5])).sum().backward()
    assert len(package.calls) == 3


@pytest.mark.parametrize("generation", [3, 4])
def test_flash_refuses_dropout_that_no_package_has(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash(monkeypatch, FakePackage(generation))
    with pytest.raises(UserError, match=f"FlashAttention-{generation} has no dropout.*use backend='auto' or 'sdpa'"):
        attention(*make(8, 8), backend="flash", dropout=0.1)


@pytest.mark.parametrize("generation", [2, 3, 4])
def test_the_fakes_are_strict(generation: int) -> None:
    module: Any = FakePackage(generation).module()
    q, k, v = (x.detach() for x in make(4, 4, kv_heads=4))
    good = {"softmax_scale": 0.25, "causal": True, "softcap": 0.0}
    unlimited = None if generation == 4 else -1
    module.flash_attn_func(q, k, v, window_size=(unlimited, unlimited), **good)
    with pytest.raises(TypeError):
        module.flash_attn_func(q, k, v, 0.0, window_size=(unlimited, unlimited), **good)
    with pytest.raises(TypeError):
        module.flash_attn_func(q, k, v, window_size=(unlimited, unlimited), attn_mask=None, **good)
    cu = torch.tensor([0, 4])  # int64
    with pytest.raises(AssertionError):
        module.flash_attn_varlen_func(
            *(x[0] for x in (q, k, v)),
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=4,
            max_seqlen_k=4,
            window_size=(unlimited, unlimited),
            **good,
        )
    if generation == 4:
        for trap in ((3, -1), (-1, 0)):
            with pytest.raises(AssertionError):
                module.flash_attn_func(q, k, v, window_size=trap, **good)


# ---- memory


class Sizes(TorchDispatchMode):
    """Records the numbers in the largest tensor that any operation makes, and what the fused kernel is given."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.kernel_keys: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "flash_attention" in str(func) and "backward" not in str(func):
            self.kernel_keys.append(tuple(args[1].shape))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not (func.is_view or x.is_meta):
                self.largest = max(self.largest, x.numel())
        return out


KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 512},
    "documents": {"document_ids": torch.arange(4096).div(1000, rounding_mode="floor")[None]},
    "documents, window": {"document_ids": torch.arange(4096).div(2000, rounding_mode="floor")[None], "window": 300},
    "softcap": {"softcap": 20.0},
    "softcap, window": {"softcap": 20.0, "window": 512},
    "dropout": {"dropout": 0.1},
    "ragged": {"key_lengths": torch.tensor([4000])},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_square_of_the_sequence_is_ever_alive(kind: str) -> None:
    seq = 4096
    qkv = make(seq, seq, heads=1, kv_heads=1)
    with Sizes() as sizes:
        attention(*qkv, **KINDS[kind]).sum().backward()
    assert sizes.largest <= seq * seq // 16


@pytest.mark.parametrize(
    "options", [{}, {"window": 100}, {"softcap": 5.0}, {"key_lengths": torch.tensor([300])}, {"dropout": 0.5}], ids=str
)
@pytest.mark.parametrize("q_len", [1, 4])
def test_grouped_heads_copy_no_keys(q_len: int, options: dict[str, Any]) -> None:
    k_len, heads, kv_heads, dim = 512, 16, 2, 64
    qkv = make(q_len, k_len, heads, kv_heads, dim)
    with Sizes() as sizes:
        attention(*qkv, **options).sum().backward()
    # The scores of four queries and the keys themselves are both half of that.
    assert sizes.largest < k_len * heads * dim // 4


@pytest.mark.parametrize("options", [{}, {"window": 32}, {"document_ids": torch.tensor([[0] * 30 + [1] * 98])}])
def test_grouped_heads_reach_the_kernel_as_groups(options: dict[str, Any]) -> None:
    qkv = make(128, 128, heads=8, kv_heads=2)
    with Sizes() as sizes:
        attention(*qkv, **options).sum().backward()
    assert sizes.kernel_keys
    assert all(shape[1] == 2 for shape in sizes.kernel_keys)


def grown_peaks(cases: list[str], seqs: list[int]) -> dict[str, list[float]]:
    """MiB above the baseline per case and length, measured one after the other in one process of their own."""
    code = f"""
import json
from benchmarks.attention_memory import peak_above_baseline
print(json.dumps({{c: [peak_above_baseline(c, s, 1, 1, 64)["peak_mib"] for s in {seqs}] for c in {cases}}}))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_grows_with_the_sequence_not_its_square() -> None:
    peaks = grown_peaks(["causal", "window 512", "documents of 500"], [4096, 16384])
    print(peaks)
    for small, large in peaks.values():
        assert 0 < large <= 4.5 * small


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_of_every_kind() -> None:
    from benchmarks.attention_memory import CASES, measure

    for case in CASES:
        peaks = [measure(case, seq)["peak_mib"] for seq in (4096, 16384)]
        print(case, peaks)
        assert peaks[1] <= 4.5 * peaks[0]


# ---- torch.compile


@pytest.mark.parametrize(
    ("q_len", "options"),
    [(16, {}), (16, {"causal": False}), (1, {}), (1, {"window": 4}), (1, {"key_lengths": torch.tensor([7])})],
    ids=str,
)
def test_compiles_without_a_graph_break(q_len: int, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    qkv = make(q_len, 16)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **options), fullgraph=True, backend="aot_eager")
    out, want = compiled(*qkv), attention(*qkv, **options)
    torch.testing.assert_close(out, want)
    for mine, eager in zip(torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(want.sum(), qkv), strict=True):
        torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize(
    "options",
    [{"window": 4}, {"softcap": 5.0}, {"document_ids": torch.tensor([[0] * 5 + [1] * 11])}, {"backend": "flash"}],
    ids=str,
)
def test_what_breaks_the_graph_still_compiles(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    if options.get("backend") == "flash":
        use_flash(monkeypatch, FakePackage(2))
    qkv = make(16, 16)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **options) * 2, backend="aot_eager")
    out, want = compiled(*qkv), attention(*qkv, **options) * 2
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(want.sum(), qkv))


def test_one_compilation_serves_growing_keys() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def step(q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        keys = k.unflatten(-1, (2, 16))
        return attention(q.unflatten(-1, (4, 16)), keys, keys, key_lengths=lengths)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for k_len in range(9, 14):
        q, k = torch.randn(2, 1, 64), torch.randn(2, k_len, 32)
        lengths = torch.tensor([k_len, 3])
        torch.testing.assert_close(compiled(q, k, lengths), step(q, k, lengths))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 5.0}], ids=str)
def test_flex_compiled_with_our_block_mask(options: dict[str, Any]) -> None:
    from lit_llm.ops import flex

    q, k, v = (x.detach() for x in make(300, 300))
    for problem in (
        Problem(0.25, **options),
        Problem(0.25, cu_seqlens=torch.tensor([0, 140, 300], dtype=torch.int32), max_seqlen=160, **options),
        Problem(0.25, key_lengths=torch.tensor([200]), **options),
    ):
        mask = flex._block_mask(q, k, problem)
        score_mod = None if problem.softcap is None else lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0)
        out = flex._run_compiled(
            *(x.transpose(1, 2) for x in (q, k, v)), score_mod=score_mod, block_mask=mask, scale=0.25, enable_gqa=True
        )
        want = choosing.reference_attention(q, k, v, problem)
        torch.testing.assert_close(out.transpose(1, 2), want, atol=1e-5, rtol=1e-5)


# ---- on a GPU


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU_OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window": 70},
    {"softcap": 10.0},
    {"documents": True},
    {"documents": True, "window": 70},
    {"documents": True, "softcap": 10.0},
    {"key_lengths": True},
]


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float32, 2e-3)])
def test_a_gpu_equals_the_reference(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    for options, kv_heads, (q_len, k_len) in itertools.product(GPU_OPTIONS, (2, 4), ((257, 257), (1, 257), (100, 257))):
        sizes = ((q_len, 4), (k_len, kv_heads), (k_len, kv_heads))
        qkv = [torch.randn(2, seq, heads, 64, device="cuda", requires_grad=True) for seq, heads in sizes]
        asked = {key: value for key, value in options.items() if key not in ("documents", "key_lengths")}
        if options.get("documents"):
            if q_len != k_len:
                continue
            ids = torch.arange(q_len, device="cuda").div(50, rounding_mode="floor").expand(2, q_len)
            asked["cu_seqlens"], asked["max_seqlen"] = document_lengths(ids)
        if options.get("key_lengths"):
            asked["key_lengths"] = torch.tensor([k_len, 60], device="cuda")
        low = [x.detach().to(dtype).requires_grad_() for x in qkv]
        want, out = attention(*qkv, backend="reference", **asked), attention(*low, backend=backend, **asked)
        grad = torch.randn_like(want)
        wanted, grads = torch.autograd.grad(want, qkv, grad), torch.autograd.grad(out, low, grad.to(dtype))
        for mine, reference, much in zip((out, *grads), (want, *wanted), (1, 4, 4, 4), strict=True):
            torch.testing.assert_close(
                mine.float(),
                reference,
                atol=tolerance * much,
                rtol=tolerance * much,
                msg=lambda text, case=(options, kv_heads, q_len): f"{case}: {text}",
            )


@GPU
@pytest.mark.gpu
def test_memory_on_a_gpu_grows_with_the_sequence() -> None:
    for kind, options in KINDS.items():
        peaks = []
        for seq in (4096, 16384):
            qkv = [torch.randn(1, seq, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
            asked = dict(options)
            if "document_ids" in asked:
                asked["document_ids"] = torch.arange(seq, device="cuda").div(1000, rounding_mode="floor")[None]
            if "key_lengths" in asked:
                asked["key_lengths"] = torch.tensor([seq - 96], device="cuda")
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            attention(*qkv, **asked).sum().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        assert peaks[1] <= 4.5 * peaks[0], (kind, peaks)
