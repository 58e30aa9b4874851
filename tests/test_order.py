"""The order of samples: a bijection, new each epoch, dealt to ranks without overlap."""

import tracemalloc

import numpy as np
import pytest

from lit_llm.data.loaders import TokenLoader, TrainSampler
from lit_llm.data.mixture import Mixture
from lit_llm.data.order import EvalOrder, TrainOrder, permute, round_keys


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 255, 256, 257, 1000, 4096, 10_001])
def test_permute_is_a_bijection(n: int) -> None:
    out = permute(np.arange(n), n, round_keys("x", 1))
    assert np.array_equal(np.sort(out), np.arange(n))


def test_permute_is_a_pure_function_of_index_and_key() -> None:
    n = 1000
    whole = permute(np.arange(n), n, round_keys("a", 3))
    pieces = np.concatenate([permute(np.array([i]), n, round_keys("a", 3)) for i in range(n)])
    assert np.array_equal(whole, pieces)
    assert not np.array_equal(whole, permute(np.arange(n), n, round_keys("a", 4)))


def test_permute_is_stable_over_releases() -> None:
    # A change here would silently reorder the data of every run that is resumed.
    assert permute(np.arange(8), 10, round_keys("order", 0, 0)).tolist() == [2, 6, 8, 3, 9, 1, 4, 7]


def test_permute_spreads_a_billion_indices() -> None:
    n = 10**9
    out = permute(np.arange(10_000), n, round_keys("order", 0, 0))
    assert len(np.unique(out)) == 10_000
    counts = np.bincount(out * 20 // n, minlength=20)
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert 5 < chi_square < 44  # 19 degrees of freedom: outside with probability below 0.2%


def test_small_permutations_are_near_uniform() -> None:
    # 6 orders of 3 samples over 3,000 epochs: each about 500 times.
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(3000):
        order = tuple(permute(np.arange(3), 3, round_keys("order", 0, epoch)).tolist())
        seen[order] = seen.get(order, 0) + 1
    chi_square = sum((count - 500) ** 2 / 500 for count in seen.values())
    assert len(seen) == 6
    assert chi_square < 20.5  # 5 degrees of freedom: above with probability 0.1%


def _epoch(order: TrainOrder, step: int = 0) -> list[list[int]]:
    return [part.tolist() for part in order.epoch_from(step)]


@pytest.mark.parametrize("num_samples", [16, 33, 100, 10_000])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 4), (2, 2), (4, 1)])
def test_an_epoch_over_ranks_is_every_sample_once(num_samples: int, ranks: int, micro: int) -> None:
    orders = [TrainOrder(num_samples, 8, micro, seed=1, rank=r, num_replicas=ranks) for r in range(ranks)]
    epochs = [_epoch(order) for order in orders]
    lengths = {len(epoch) for epoch in epochs}
    assert lengths == {orders[0].micro_batches_per_epoch}
    assert lengths == {orders[0].steps_per_epoch * orders[0].accumulation}
    samples = [i for epoch in epochs for part in epoch for i in part if i >= 0]
    assert sorted(samples) == list(range(num_samples))


def test_global_batches_do_not_depend_on_the_layout() -> None:
    layouts = [(1, 8), (1, 1), (2, 2), (4, 2), (8, 1)]
    for step in (0, 3, 12, 13, 40):
        batches = []
        for ranks, micro in layouts:
            parts = [list(TrainOrder(100, 8, micro, 5, r, ranks).micro_batches(step)) for r in range(ranks)]
            batches.append(sorted(int(i) for rank in parts for part in rank for i in part if i >= 0))
        assert all(batch == batches[0] for batch in batches)


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    order = TrainOrder(32, 4, 4, seed=1)
    first, second = _epoch(order, 0), _epoch(order, 8)
    for epoch in (first, second):
        assert sorted(i for part in epoch for i in part) == list(range(32))
    assert first != second
    assert _epoch(TrainOrder(32, 4, 4, seed=1), 8) == second
    assert _epoch(TrainOrder(32, 4, 4, seed=2), 0) != first


def test_a_resumed_epoch_goes_on_where_it_was() -> None:
    order = TrainOrder(33, 4, 2, seed=1)
    whole = _epoch(order, 9)
    assert _epoch(order, 12) == whole[6:]


def test_endless_goes_on_into_the_next_epoch() -> None:
    order = TrainOrder(8, 4, 4, seed=1)
    stream = order.epoch_from(1, endless=True)
    parts = [next(stream).tolist() for _ in range(3)]
    assert parts == _epoch(order, 1) + _epoch(order, 2)


@pytest.mark.parametrize("num_samples", [1, 5, 16, 33])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, 4), (3, 2), (4, 8)])
def test_evaluation_deals_every_row_once_in_equal_numbers(num_samples: int, ranks: int, micro: int) -> None:
    parts = [list(EvalOrder(num_samples, micro, r, ranks)) for r in range(ranks)]
    assert len({len(p) for p in parts}) == 1
    assert len(parts[0]) == len(EvalOrder(num_samples, micro, 0, ranks))
    samples = sorted(int(i) for rank in parts for part in rank for i in part if i >= 0)
    assert samples == list(range(num_samples))


class _Numbers:
    """A data set whose rows are their own numbers."""

    def __len__(self) -> int:
        return 1  # samplers ask, nobody uses it

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return rows


def _loaded(order: TrainOrder, step: int, workers: int) -> list[int]:
    """The samples of an epoch from ``step`` on, through the loader that training uses."""
    numbers = _Numbers()
    sampler = TrainSampler(numbers, order, lambda: (step, 0), lambda: False)  # type: ignore[arg-type]
    loader = TokenLoader(
        numbers,  # type: ignore[arg-type]
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        collate_fn=lambda batch: batch.tolist(),  # type: ignore[attr-defined]
    )
    batches = list(loader)
    assert len(batches) == order.micro_batches_per_epoch - step * order.accumulation
    return [row for batch in batches for row in batch if row >= 0]


def _check_union(num_samples: int, ranks: int, workers: int) -> None:
    batch = 12  # divides by 1 to 4 ranks
    orders = [TrainOrder(num_samples, batch, batch // ranks // (1 + ranks % 2), 1, r, ranks) for r in range(ranks)]
    samples = [row for order in orders for row in _loaded(order, 0, workers)]
    assert sorted(samples) == list(range(num_samples))
    before = {row for step in range(1) for row in orders[0].global_batch(step).tolist()}
    resumed = [row for order in orders for row in _loaded(order, 1, workers)]
    assert sorted([*before, *resumed]) == list(range(num_samples))


@pytest.mark.parametrize(("num_samples", "ranks", "workers"), [(16, 2, 0), (100, 4, 0), (100, 3, 2)])
def test_ranks_and_workers_deal_every_sample_once(num_samples: int, ranks: int, workers: int) -> None:
    _check_union(num_samples, ranks, workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [16, 33, 1000, 10_000])
def test_all_ranks_and_workers_deal_every_sample_once(num_samples: int, ranks: int, workers: int) -> None:
    _check_union(num_samples, ranks, workers)


def test_a_billion_samples_take_no_memory() -> None:
    order = TrainOrder(10**9, 1000, 1000, seed=3)
    tracemalloc.start()
    seen = np.concatenate([order.global_batch(step) for step in (*range(10), 500_000, order.steps_per_epoch - 1)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert len(np.unique(seen)) == len(seen) == 12_000
    assert 0 <= seen.min() <= seen.max() < 10**9


def test_small_batches_equal_the_permutation() -> None:
    order = TrainOrder(10_000, 7, 7, seed=2)
    epoch = np.concatenate([order.global_batch(step) for step in range(order.steps_per_epoch)])
    assert np.array_equal(epoch, permute(np.arange(10_000), 10_000, round_keys("order", 2, 0)))


# ------------------------------------------------------------------- mixtures


def test_a_mixture_deals_each_source_in_its_own_epochs() -> None:
    sizes, mixture = (30, 7, 100), Mixture([1, 1, 2])
    order = TrainOrder(sizes, 8, 8, seed=1, mixture=mixture)
    assert order.samples_per_epoch == 137
    samples = np.concatenate([order.global_batch(step) for step in range(6 * order.steps_per_epoch)])
    assert len(samples) == 6 * 137
    for n in range(len(samples) + 1):
        counts = mixture.counts(n)
        first = 0
        for size, count in zip(sizes, counts, strict=True):
            mine = samples[:n][(samples[:n] >= first) & (samples[:n] < first + size)]
            assert len(mine) == count
            if n == len(samples):  # whole epochs of this source, each sample once in each
                for epoch in range(count // size):
                    assert sorted(mine[epoch * size : (epoch + 1) * size] - first) == list(range(size))
            first += size
    layouts = [[TrainOrder(sizes, 8, 2, 1, r, 2, mixture) for r in range(2)], [order]]
    for step in (0, 17, 18, 40):
        batches = [
            sorted(i for o in some for part in o.micro_batches(step) for i in part if i >= 0) for some in layouts
        ]
        assert batches[0] == batches[1]


def test_steps_and_samples_agree() -> None:
    order = TrainOrder(33, 4, 2, seed=1)
    assert [order.samples_before(step) for step in (0, 1, 8, 9, 10)] == [0, 4, 32, 33, 37]
    assert [order.step_after(samples) for samples in (0, 3, 4, 32, 33, 37)] == [0, 0, 1, 8, 9, 10]
