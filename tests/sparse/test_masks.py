import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsparse.errors import UserError
from qsparse.sparse import EmptyLayerWarning, check_density, magnitude_masks, mask_density

# Few different values, so that most magnitudes are equal to some other: the rule for ties decides.
ENTRIES = st.sampled_from([-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0])
MATRICES = st.tuples(st.integers(0, 4), st.integers(0, 4)).flatmap(
    lambda shape: st.lists(ENTRIES, min_size=math.prod(shape), max_size=math.prod(shape)).map(
        lambda values: torch.tensor(values).reshape(shape)
    )
)


def masks_by_sorting_in_python(weights, density):
    """The rule, word by word: largest magnitude first, then earlier layer, then lower flat index."""
    entries = [
        (-abs(float(value)), layer, index)
        for layer, weight in enumerate(weights.values())
        for index, value in enumerate(weight.numpy().reshape(-1))
    ]
    masks = [np.zeros(weight.numel(), dtype=bool) for weight in weights.values()]
    for _, layer, index in sorted(entries)[: round(density * len(entries))]:
        masks[layer][index] = True
    return {name: mask.reshape(tuple(weights[name].shape)) for name, mask in zip(weights, masks, strict=True)}


@settings(deadline=None, max_examples=200)
@given(st.lists(MATRICES, max_size=3), st.floats(0, 1, exclude_min=True))
def test_masks_are_those_of_a_plain_sort(matrices, density):
    weights = {f"fc{i}": matrix for i, matrix in enumerate(matrices, start=1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyLayerWarning)
        masks = magnitude_masks(weights, density)
    expected = masks_by_sorting_in_python(weights, density)
    assert list(masks) == list(expected)
    for name, mask in masks.items():
        assert mask.dtype == torch.bool
        np.testing.assert_array_equal(mask.numpy(), expected[name])


def test_one_threshold_serves_all_layers():
    weights = {"fc1": torch.tensor([[5.0, -4.0], [0.1, 0.2]]), "fc2": torch.tensor([[-3.0, 0.3]])}
    masks = magnitude_masks(weights, 0.5)
    assert masks["fc1"].tolist() == [[True, True], [False, False]]
    assert masks["fc2"].tolist() == [[True, False]]
    assert mask_density(masks) == 0.5


def test_equal_magnitudes_keep_the_exact_count_from_the_front():
    weights = {"fc1": torch.full((2, 5), -1.0), "fc2": torch.full((2, 5), 1.0)}
    masks = magnitude_masks(weights, 0.6)
    assert masks["fc1"].all()
    assert masks["fc2"].tolist() == [[True, True, False, False, False], [False] * 5]


@pytest.mark.parametrize("density", [0.1, 0.3, 0.5, 0.9])
def test_the_asked_density_is_reached(density):
    weights = {"fc1": torch.randn(256, 784), "fc2": torch.randn(10, 256)}
    masks = magnitude_masks(weights, density)
    total = 256 * 784 + 10 * 256
    assert sum(int(mask.sum()) for mask in masks.values()) == round(density * total)
    assert abs(mask_density(masks) - density) <= 0.5 / total


def test_density_one_keeps_everything_even_zeros():
    masks = magnitude_masks({"fc1": torch.zeros(3, 4)}, 1.0)
    assert masks["fc1"].all()


def test_a_layer_left_empty_is_named():
    weights = {"fc1": torch.randn(4, 5) + 10, "fc2": torch.full((2, 3), 0.01)}
    with pytest.warns(EmptyLayerWarning, match=r"leaves layer fc2 without any of its 6 weights") as caught:
        masks = magnitude_masks(weights, 0.2)
    assert len(caught) == 1
    assert int(masks["fc1"].sum()) == 5
    assert not masks["fc2"].any()


def test_a_density_that_rounds_to_nothing_empties_every_layer_aloud():
    with pytest.warns(EmptyLayerWarning) as caught:
        masks = magnitude_masks({"fc1": torch.ones(2, 2), "fc2": torch.ones(1, 2)}, 1e-6)
    assert [str(warning.message).split(" layer ")[1].split()[0] for warning in caught] == ["fc1", "fc2"]
    assert mask_density(masks) == 0


@pytest.mark.parametrize("density", [0, -0.1, 1.0001, math.nan, math.inf, -math.inf])
def test_a_density_outside_is_refused(density):
    with pytest.raises(UserError, match=r"density must be above 0 and at most 1"):
        check_density(density)
    with pytest.raises(UserError, match=r"density must be above 0 and at most 1"):
        magnitude_masks({"fc1": torch.ones(2, 2)}, density)


def test_nan_is_refused_naming_the_layer():
    with pytest.raises(UserError, match="layer fc2 holds NaN"):
        magnitude_masks({"fc1": torch.ones(2, 2), "fc2": torch.tensor([[1.0, math.nan]])}, 0.5)


def test_half_precision_and_strided_weights():
    w = torch.randn(6, 8)
    expected = masks_by_sorting_in_python({"a": w.half().t().contiguous()}, 0.4)["a"]
    masks = magnitude_masks({"a": w.half().t()}, 0.4)
    np.testing.assert_array_equal(masks["a"].numpy(), expected)


def test_no_weights_have_no_density():
    assert magnitude_masks({}, 0.5) == {}
    assert math.isnan(mask_density({}))
