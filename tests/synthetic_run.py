"""What a made run on GPUs is made of: see :mod:`tests.synthetic_traces`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Kernel = tuple[tuple[str, ...], str, float]
"""Ops of the host (outer first), name, us."""

# Of a layer's kernels: ops of the host (outer first), kernel, share of the mean time.
FORWARD = (
    (("aten::linear", "aten::mm"), "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", 2.6),
    (("aten::mul",), "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<c10::BFloat16> >", 0.2),
    (
        ("aten::scaled_dot_product_attention", "aten::_flash_attention_forward"),
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(flash::Flash_fwd_params)",
        1.5,
    ),
    (
        ("aten::add", "aten::add_"),
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>",
        0.2,
    ),
    (("aten::linear", "aten::addmm"), "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", 1.3),
    (("aten::silu",), "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", 0.2),
)
BACKWARD = (
    ("MmBackward0", ("aten::mm",), "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_cublas", 2.0),
    ("MulBackward0", ("aten::mul",), FORWARD[1][1], 0.2),
    (
        "ScaledDotProductFlashAttentionBackward0",
        ("aten::_scaled_dot_product_flash_attention_backward", "aten::_flash_attention_backward"),
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8> >",
        1.9,
    ),
    (
        "AddBackward0",
        ("aten::sum",),
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16> >",
        0.4,
    ),
    ("AddmmBackward0", ("aten::mm",), "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NTT", 1.3),
    ("SiluBackward0", ("aten::silu_backward",), "void at::native::vectorized_elementwise_kernel<4, silu_bwd>", 0.2),
)
COPY_IN = (("fsdp::all_gather_copy_in",), "void at::native::vectorized_elementwise_kernel<4, foreach_copy>", 5.0)
COPY_OUT = (
    ("fsdp::split_with_sizes_copy",),
    "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel",
    8.0,
)
CHUNK_CAT = (("fsdp::chunk_cat",), "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>", 6.0)
OPTIMIZER = (("aten::_fused_adamw_",), "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >")


COLLECTIVES = {  # op, annotation, "Collective name", kernel, dtype, is the (in, out) side a rank's part
    "all_gather": ("c10d::_allgather_base_", "nccl:_all_gather_base", "_allgather_base",
                   "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "BFloat16", (True, False)),
    "reduce_scatter": ("c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base", "_reduce_scatter_base",
                       "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "Float",
                       (False, True)),
    "all_reduce": ("c10d::allreduce_", "nccl:all_reduce", "allreduce",
                   "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "Float",
                   (False, False)),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A made run; times in us or ms by name. Faults are empty by default: then nothing is wrong."""

    ranks: int = 8
    layers: int = 4
    steps: int = 3
    kernels: int = 8
    """Of a layer's forward; its backward has twice as many."""
    first_step: int = 100
    seed: int = 0
    noise: float = 0.01
    """Relative spread of every duration."""
    kernel_us: float = 500.0
    """Mean of a compute kernel."""
    launch_us: float | None = None
    """Of the host for a kernel; None: a fifth of ``kernel_us``."""
    transfer: float = 0.25
    """Of a layer's gather and reduce-scatter, as a share of its forward's compute time."""
    loader_us: float = 300.0
    lead: float = 0.25
    """How far the host may run ahead of the device, in steps."""
    end_spread_us: float = 0.5
    """By how much the ends of a collective differ between ranks."""
    ranks_per_host: int = 8
    carry_over: bool = True
    """The window opens while kernels of the step before still run; else on a device that has just been waited for."""
    comm_args: bool = True
    """Arguments of collectives on their kernels; False: none, as of old."""
    closure: bool = True
    """The optimizer's annotation holds forward and backward, as with Lightning."""
    slow_rank: Mapping[int, float] = field(default_factory=dict)
    """Rank -> factor on its compute kernels."""
    slow_host: Mapping[int, float] = field(default_factory=dict)
    """Rank -> factor on its launches; the device starves where this passes ``kernel_us / launch_us``."""
    data_stall: Sequence[tuple[int, int, float]] = ()
    """(rank, step, ms) that this step's batch took longer; a step as its mark names it."""
    slow_loader: Mapping[int, float] = field(default_factory=dict)
    """Rank -> ms that every batch takes longer."""
    unhidden_layer: Sequence[int] = ()
    """Layers whose gather starts only when their turn has come."""
    uneven_work: Mapping[int, float] = field(default_factory=dict)
    """Rank -> share of kernels on top."""
    host_sync: int = 0
    """Times a step that every host reads a number off its device (``aten::item``), after layers of the forward."""
    sync_return_us: float = 100.0
    """From the end of the device's work to the host's next launch, after such a read."""
    skew_ns: Mapping[int, int] = field(default_factory=dict)
    """Rank -> ns that its clock is ahead."""
    truncated: Mapping[int, float] = field(default_factory=dict)
    """Rank -> share of its file's bytes that is there."""
