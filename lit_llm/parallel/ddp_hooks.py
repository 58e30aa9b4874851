"""How replicas average a bucket of gradients: in float32, or compressed.

Each is a hook of DistributedDataParallel: given a state and a bucket it returns a future of the bucket's buffer, which
holds the mean over the ranks by then. All run on gloo and NCCL and wait for nothing on the host of a GPU.
"""

# No annotations from __future__: torch looks at those of a hook and wants types, not strings.

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_LARGEST_SUM = 2.0**15  # float16 ends at 65504; roundings of the terms may add up
_WORTH_IT = 2  # a matrix is sent as two factors if they have at most 1/2 of its numbers
_TINY = 1e-30


def reduce_in_float32(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Averages gradients in float32, whatever their own dtype, to which the mean is cast back.

    Args:
        state: the process group; None: all ranks.
        bucket: of gradients; those of at least 32 bits are averaged in their own dtype.
    """
    buffer = bucket.buffer()
    wide = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
    wide.div_(_ranks(state))
    work = dist.all_reduce(wide, group=state, async_op=True)
    return _then(work, lambda: buffer if wide is buffer else buffer.copy_(wide))


def reduce_in_bfloat16(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums gradients in bfloat16, half the bytes of float32, and divides in float32.

    A sum of n ranks has 8 bits at each of its additions. No range is lost.

    Args:
        state: the process group; None: all ranks.
        bucket: of gradients.
    """
    buffer, ranks = bucket.buffer(), _ranks(state)
    narrow = buffer.to(torch.bfloat16, copy=True)
    work = dist.all_reduce(narrow, group=state, async_op=True)
    return _then(work, lambda: buffer.copy_(narrow.float().div_(ranks)))


def reduce_in_float16(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums gradients in float16, half the bytes of float32, and divides in float32.

    float16 has 11 bits but a small range, in which most gradients of a language model vanish. So each bucket is
    multiplied by the largest power of two with which the sum can't overflow; the ranks agree on it by a reduction of
    one number. Only a gradient below ranks x 2^-40 times the bucket's largest becomes 0. A bucket with a value that is
    not finite keeps one.

    Args:
        state: the process group; None: all ranks.
        bucket: of gradients.
    """
    buffer, ranks = bucket.buffer(), _ranks(state)
    largest = buffer.abs().max().float()
    largest = torch.where(largest.isfinite(), largest, torch.inf)  # how NaN fares in a maximum is up to the library
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=state, async_op=True)

    def send() -> Tensor:
        room = torch.log2(_LARGEST_SUM / (ranks * largest.clamp(min=_TINY))).floor()
        scale = torch.where(largest.isfinite(), torch.exp2(room), 1.0)
        narrow = (buffer.float() * scale).to(torch.float16)
        dist.all_reduce(narrow, group=state, async_op=True).wait()
        return buffer.copy_(narrow.float() / (scale * ranks))

    return _in_turn(work, buffer, send)


@dataclass
class PowerSGD:
    """What :func:`reduce_by_powersgd` needs and remembers, per parameter.

    Args:
        rank: of the approximation.
        start_step: the first optimizer step, from 0, that is compressed.
        step: gives the present optimizer step.
        names: of the parameters, by id; the first projection is a function of the name.
        group: the process group; None: all ranks.
    """

    rank: int
    start_step: int
    step: Callable[[], int]
    names: Mapping[int, str]
    group: Any = None
    errors: dict[int, Tensor] = field(default_factory=dict)
    """(rows, columns) float32 of each matrix: what this rank's gradients had that was not sent yet."""
    factors: dict[int, Tensor] = field(default_factory=dict)
    """(columns, rank) float32 of each matrix: the right factor of the last step; equal on all ranks."""

    def pays_for(self, gradient: Tensor) -> bool:
        """Whether its factors are smaller than itself."""
        if gradient.dim() < 2:
            return False
        rows, columns = gradient.shape[0], gradient[0].numel()
        return _WORTH_IT * self.rank * (rows + columns) <= rows * columns

    def remembered(self, parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The error and the factor of a parameter; made once and then changed in place, so no stream outlives them."""
        key = id(parameter)
        if key not in self.errors:
            columns = gradient[0].numel()
            name = self.names.get(key, str(tuple(gradient.shape)))
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(columns, self.rank, generator=generator)
            self.factors[key] = start.to(gradient.device)
            self.errors[key] = torch.zeros(gradient.shape[0], columns, device=gradient.device)
        return self.errors[key], self.factors[key]


def reduce_by_powersgd(state: PowerSGD, bucket: dist.GradBucket) -> Future[Tensor]:
    """Averages matrices of gradients as products of two thin factors (Vogels et al. 2019, PowerSGD, algorithms 1, 2).

    With M a rank's gradient and what earlier steps left out of it: P = mean(M Q), made orthogonal; Q = mean(M^T P); the
    mean gradient is taken to be P Q^T, and M - P Q^T is left for the next step. Q begins the next step (warm start).
    Vectors, and matrices that would not become smaller, are averaged whole. All in float32.

    What is remembered belongs to a parameter, not to a bucket, and the first projection is a function of its name, so
    the result does not depend on the size of the buckets. After a step whose gradient is not finite nothing of it is
    remembered.
    """
    buffer = bucket.buffer()
    if state.step() < state.start_step:
        return reduce_in_float32(state.group, bucket)
    ranks = _ranks(state.group)
    whole: list[Tensor] = []
    matrices: list[tuple[Tensor, Tensor, Tensor]] = []  # the gradient, M, Q
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if not state.pays_for(gradient):
            whole.append(gradient)
            continue
        error, factor = state.remembered(parameter, gradient)
        error.add_(gradient.reshape(error.shape))
        matrices.append((gradient, error, factor))
    thin = [m @ orthogonal(q) for _, m, q in matrices]
    first = torch.cat([part.reshape(-1).float() for part in [*whole, *thin]]).div_(ranks)
    work = dist.all_reduce(first, group=state.group, async_op=True)

    def finish() -> Tensor:
        lefts = _cut(first, [*whole, *thin])
        for gradient, mean in zip(whole, lefts, strict=False):
            gradient.copy_(mean)
        if not matrices:
            return buffer
        lefts = [orthogonal(left) for left in lefts[len(whole) :]]
        second = torch.cat([(m.T @ p).reshape(-1) for (_, m, _), p in zip(matrices, lefts, strict=True)]).div_(ranks)
        dist.all_reduce(second, group=state.group, async_op=True).wait()
        good = torch.isfinite(first).all() & torch.isfinite(second).all()  # equal on all ranks
        rights = _cut(second, [q for _, _, q in matrices])
        for (gradient, m, q), left, right in zip(matrices, lefts, rights, strict=True):
            mean = left @ right.T
            m.copy_(torch.where(good, m - mean, 0.0))
            q.copy_(torch.where(good, right, q))
            gradient.copy_(mean.view(gradient.shape))
        return buffer

    return _in_turn(work, buffer, finish)


def orthogonal(matrix: Tensor) -> Tensor:
    """(rows, columns) with the same span and orthonormal columns, by Gram-Schmidt; a column of zeros stays one."""
    columns: list[Tensor] = []
    for column in matrix.unbind(1):
        for _ in range(2):  # a second time: what one subtraction leaves over may be mostly rounding
            for other in columns:
                column = column - (other @ column) * other
        columns.append(column / column.norm().clamp(min=_TINY))
    return torch.stack(columns, 1)


def _cut(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Parts of a vector in the shapes of ``like``."""
    parts = flat.split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _ranks(group: Any) -> int:
    return dist.get_world_size(group)


def _then(work: Any, function: Callable[[], Tensor]) -> Future[Tensor]:
    future: Future[Tensor] = work.get_future().then(lambda _: function())
    return future


def _in_turn(work: Any, buffer: Tensor, function: Callable[[], Tensor]) -> Future[Tensor]:
    """As :func:`_then`, for a function that communicates itself.

    NCCL runs it at once, on a stream that waits, as a work's ``wait`` does there. gloo would run it in one of its few
    threads when the work has ended, in another order on each rank, and pair what does not belong together: there the
    host waits instead.
    """
    if buffer.device.type != "cpu":
        return _then(work, function)
    work.wait()
    future: Future[Tensor] = Future()
    future.set_result(function())
    return future
