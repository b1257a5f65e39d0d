import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsparse.errors import UserError
from qsparse.sparse import DISTRIBUTIONS, layer_counts

SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4)


def scores_of(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"fc{i}": torch.randint(0, 4, shape, generator=generator).float() for i, shape in enumerate(shapes, start=1)
    }


@settings(deadline=None, max_examples=200)
@given(SHAPES, st.floats(0, 1, exclude_min=True), st.sampled_from(DISTRIBUTIONS), st.floats(0, 1))
def test_the_sum_is_exact_and_each_count_possible(shapes, density, distribution, part):
    scores = scores_of(shapes)
    total = sum(score.numel() for score in scores.values())
    for min_density in (0.0, density * part):
        try:
            counts = layer_counts(scores, density, distribution, min_density)
        except UserError:
            assert min_density
            continue
        assert list(counts) == list(scores)
        assert sum(counts.values()) == round(density * total)
        for name, score in scores.items():
            least = min(score.numel(), max(1, round(min_density * score.numel()))) if min_density else 0
            assert least <= counts[name] <= score.numel()


@settings(deadline=None, max_examples=100)
@given(SHAPES, st.floats(0, 1, exclude_min=True))
def test_uniform_is_the_density_of_each_layer_to_one_weight(shapes, density):
    scores = scores_of(shapes)
    for name, count in layer_counts(scores, density, "uniform").items():
        assert abs(count - density * scores[name].numel()) <= 1


def test_uniform_of_the_default_network():
    scores = {"fc1": torch.zeros(256, 784), "fc2": torch.zeros(10, 256)}
    assert layer_counts(scores, 0.1, "uniform") == {"fc1": 20070, "fc2": 256}


def test_erk_gives_in_proportion_to_rows_and_columns():
    scores = {"fc1": torch.zeros(100, 300), "fc2": torch.zeros(100, 100)}
    counts = layer_counts(scores, 0.05, "erk")  # 2,000 weights as 400 to 200
    assert counts == {"fc1": 1333, "fc2": 667}


def test_a_layer_that_erk_would_fill_is_dense():
    scores = {"fc1": torch.zeros(256, 784), "fc2": torch.zeros(10, 256)}
    assert layer_counts(scores, 0.3, "erk") == {"fc1": round(0.3 * 203264) - 2560, "fc2": 2560}


def test_global_counts_what_the_ranking_keeps():
    scores = {"fc1": torch.tensor([[5.0, 4.0], [0.1, 0.2]]), "fc2": torch.tensor([[3.0, 0.3]])}
    assert layer_counts(scores, 0.5, "global") == {"fc1": 2, "fc2": 1}


def test_the_earlier_layer_wins_a_tie():
    scores = {"fc1": torch.ones(2, 5), "fc2": torch.ones(2, 5)}
    assert layer_counts(scores, 0.6, "global") == {"fc1": 10, "fc2": 2}


def test_min_density_keeps_a_layer_alive():
    scores = {"fc1": torch.full((10, 10), 9.0), "fc2": torch.full((4, 5), 0.01)}
    assert layer_counts(scores, 0.2, "global") == {"fc1": 24, "fc2": 0}
    assert layer_counts(scores, 0.2, "global", 0.1) == {"fc1": 22, "fc2": 2}
    assert layer_counts(scores, 0.2, "global", 0.001) == {"fc1": 23, "fc2": 1}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_least_count_beyond_the_density_is_refused(distribution):
    scores = {f"fc{i}": torch.ones(1, 3) for i in range(3)}
    with pytest.raises(UserError, match=r"keeps 1 weights of 9, and min_density 0\.1 asks for 3"):
        layer_counts(scores, 0.15, distribution, 0.1)
