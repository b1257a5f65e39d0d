"""Movement scores against the formula by hand, and what they mean."""

import torch

from qsparse.models import MLP
from qsparse.sparse.movement import _BATCH, _LR, movement_scores


def images_and_labels(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 12, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def test_the_sum_of_minus_gradient_times_weight_while_a_copy_trains():
    model, (x, y) = MLP((12, 4)), images_and_labels(_BATCH + 9)
    before = [parameter.clone() for parameter in model.parameters()]
    scores = movement_scores(model, x, y)["fc1"]
    w, b = (parameter.detach().double() for parameter in before)
    expected = torch.zeros_like(w)
    for rows in (slice(0, _BATCH), slice(_BATCH, None)):
        inputs, labels = x[rows].double(), y[rows]
        error = (inputs @ w.T + b).softmax(dim=1)
        error[torch.arange(len(labels)), labels] -= 1
        gradient = error.T @ inputs / len(labels)
        expected -= gradient * w
        w, b = w - _LR * gradient, b - _LR * error.mean(dim=0)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_weight_that_shrinks_scores_below_zero():
    model = MLP((12, 4))
    x, _ = images_and_labels(512)
    y = torch.zeros(512, dtype=torch.int64)
    x[:, 0] = 1.0  # always on, and the class is always 0: its weight to class 0 grows
    with torch.no_grad():
        model.fc1.weight[:, 0] = torch.tensor([0.5, 0.5, -0.5, -0.5])
    signs = movement_scores(model, x, y)["fc1"][:, 0].sign()
    assert signs.tolist() == [1, -1, 1, 1]
