"""The order of samples: a bijection, new each epoch, dealt to ranks without overlap."""

import numpy as np
import pytest

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
