"""The order of samples: a pure function of (seed, epoch, position), without a permutation in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

from lit_llm.data.mixture import Mixture

_ROUNDS = 8
_CHUNK = 4096


def round_keys(*parts: int | str) -> np.ndarray:
    """(rounds,) uint64 keys out of anything that names a permutation, such as (seed, epoch)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(indices: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Where a keyed pseudo-random permutation of range(n) sends each index.

    A Feistel network (Luby and Rackoff 1988) permutes a power of 4 that is at least n; an image outside range(n) is
    sent through again until it falls inside (cycle walking; Black and Rogaway 2002), which keeps it a bijection.

    Args:
        indices: integers in [0, n), any shape.
        n: number of samples, at most 2**62.
        keys: from :func:`round_keys`.

    Returns:
        int64, the shape of ``indices``.
    """
    half_bits = max(1, -(-max(n - 1, 1).bit_length() // 2))
    out = np.asarray(indices, dtype=np.uint64).copy()
    flat = out.reshape(-1)
    todo = np.arange(len(flat))
    while len(todo):
        flat[todo] = _feistel(flat[todo], half_bits, keys)
        todo = todo[flat[todo] >= n]
    return out.astype(np.int64)


def _feistel(x: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (multiply and fold) that spreads every input bit over the output; wraps on purpose."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


def _shuffled(first: int, stop: int, n: int, *key: int) -> np.ndarray:
    """``permute`` of the places ``first`` to ``stop`` of range(n) by the key ("order", *key), in chunks that are kept.

    A call costs much more than its numbers: a batch of 8 would take seven times as long as to gather its rows.
    """
    if n == 1:
        return np.zeros(stop - first, np.int64)
    parts = []
    while first < stop:
        number, begin = divmod(first, _CHUNK)
        end = min(begin + stop - first, _CHUNK)
        parts.append(_chunk(number, n, key)[begin:end])
        first += end - begin
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@lru_cache(maxsize=512)
def _chunk(number: int, n: int, key: tuple[int, ...]) -> np.ndarray:
    places = np.arange(number * _CHUNK, min((number + 1) * _CHUNK, n))
    chunk = permute(places, n, round_keys("order", *key))
    chunk.setflags(write=False)  # parts of it are handed out
    return chunk


@dataclass(frozen=True)
class TrainOrder:
    """Which samples each micro-batch of each rank holds.

    A global batch is ``global_batch_size`` consecutive places of the epoch's permutation. Micro-batch a of rank r takes
    the places (a x ranks + r) x micro_batch_size onward of it, so that the global batch of a step is the same set of
    samples whatever the number of ranks and the micro-batch size. The last global batch of an epoch holds what is left,
    in as many micro-batches as any other; those without a sample get one place -1, a row without labels. So a step is
    always the same number of micro-batches, which is how Lightning counts.

    Several sources are numbered one after another, and dealt by a mixture; each has a permutation and epochs of its
    own, in which every sample of it comes once. An epoch of the whole is as many samples as all sources hold.

    Args:
        num_samples: in an epoch; of each source where there are several.
        global_batch_size, micro_batch_size: samples.
        seed: of the shuffling.
        rank, num_replicas: of the data-parallel group.
        mixture: which source each sample comes from, needed for more than one.
    """

    num_samples: int | tuple[int, ...]
    global_batch_size: int
    micro_batch_size: int
    seed: int = 0
    rank: int = 0
    num_replicas: int = 1
    mixture: Mixture | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Samples in an epoch."""
        return self.num_samples if isinstance(self.num_samples, int) else sum(self.num_samples)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a full step."""
        return self.global_batch_size // (self.micro_batch_size * self.num_replicas)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sample once."""
        return -(-self.samples_per_epoch // self.global_batch_size)

    @property
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches of a rank in an epoch, equal on all ranks."""
        return self.steps_per_epoch * self.accumulation

    def global_batch(self, step: int) -> np.ndarray:
        """The samples of optimizer step ``step`` (counted from the start of training), int64."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch_size
        stop = min(start + self.global_batch_size, self.samples_per_epoch)
        if isinstance(self.num_samples, int):
            return _shuffled(start, stop, self.num_samples, self.seed, epoch)
        assert self.mixture is not None
        places = np.arange(start, stop) + epoch * self.samples_per_epoch
        sources, within = self.mixture.source_of(places)
        first = 0
        for source, count in enumerate(self.num_samples):
            chosen = sources == source
            if chosen.any():
                # those of a source follow one another in its own order, maybe over the end of its epoch
                begin, end = int(within[chosen][0]), int(within[chosen][-1]) + 1
                parts = []
                while begin < end:
                    own_epoch, place = divmod(begin, count)
                    upto = min(place + end - begin, count)
                    parts.append(_shuffled(place, upto, count, self.seed, own_epoch, source))
                    begin += upto - place
                places[chosen] = first + np.concatenate(parts)
            first += count
        return places

    def samples_before(self, step: int) -> int:
        """How many samples come before optimizer step ``step``."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return epoch * self.samples_per_epoch + position * self.global_batch_size

    def step_after(self, samples: int) -> int:
        """The step that begins after about so many samples: the nearest one that leaves none out."""
        epoch, position = divmod(samples, self.samples_per_epoch)
        return epoch * self.steps_per_epoch + position // self.global_batch_size

    def micro_batches(self, step: int) -> Iterator[np.ndarray]:
        """This rank's parts of a step."""
        samples = self.global_batch(step)
        per_round = self.micro_batch_size * self.num_replicas
        for start in range(0, self.global_batch_size, per_round):
            first = start + self.rank * self.micro_batch_size
            part = samples[first : first + self.micro_batch_size]
            yield part if len(part) else np.array([-1])

    def epoch_from(self, step: int, endless: bool = False, begun: int = 0) -> Iterator[np.ndarray]:
        """Micro-batches from optimizer step ``step`` (``begun`` of its own left out) to the end of its epoch, or on
        through the epochs after it."""
        end = None if endless else (step // self.steps_per_epoch + 1) * self.steps_per_epoch
        while end is None or step < end:
            yield from islice(self.micro_batches(step), begun, None)
            step, begun = step + 1, 0


@dataclass(frozen=True)
class EvalOrder:
    """Every sample once, in order, dealt to the ranks in equal numbers of batches; places -1 fill the end."""

    num_samples: int
    micro_batch_size: int
    rank: int = 0
    num_replicas: int = 1

    def __len__(self) -> int:
        return -(-self.num_samples // (self.micro_batch_size * self.num_replicas))

    def __iter__(self) -> Iterator[np.ndarray]:
        for batch in range(len(self)):
            first = (batch * self.num_replicas + self.rank) * self.micro_batch_size
            part = np.arange(first, min(first + self.micro_batch_size, self.num_samples))
            yield part if len(part) else np.array([-1])


PositionSource = Callable[[], tuple[int, int]]
