"""What the kernel tests share: the devices, the yardstick, seeded inputs, and poisoned outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest error allowed: of the whole array by its norm, and of the worst element by the largest of the array."""

    norm: float
    worst: float


# Outputs are rounded once to their dtype (half an ulp: 6e-8, 4.9e-4, 3.9e-3). The rest is the sum in float32: of K
# random terms one after the other it is off by about 2.5e-8 * sqrt(K).
TOLERANCES = {
    torch.float32: Tolerance(norm=2e-6, worst=1e-5),
    torch.float16: Tolerance(norm=5e-4, worst=1e-3),
    torch.bfloat16: Tolerance(norm=4e-3, worst=8e-3),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every kernel runs on both; CUDA with its index, as tensors carry it."""
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """``torch.empty`` gives NaN, or the largest integer: an element that a kernel forgets to write shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # the filling works in this mode only
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def normal():
    """``normal(*shape, dtype=, device=)``: normal random numbers, the same in every run and on every device."""
    generator = torch.Generator().manual_seed(20)

    def draw(*shape: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    return draw


@pytest.fixture
def integers():
    """``integers(low, high, *shape, dtype=, device=)``: uniform integers in [low, high), the same in every run."""
    generator = torch.Generator().manual_seed(21)

    def draw(low: int, high: int, *shape: int, dtype=torch.int8, device="cpu") -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(device=device, dtype=dtype)

    return draw


@pytest.fixture
def sparse(normal):
    """``sparse(n, k, density)``: a random (N, K) matrix, about ``1 - density`` of it exactly zero."""
    generator = torch.Generator().manual_seed(22)

    def draw(n: int, k: int, density: float, dtype=torch.float32) -> torch.Tensor:
        kept = torch.rand((n, k), generator=generator) < density
        return torch.where(kept, normal(n, k), 0).to(dtype)

    return draw


@pytest.fixture
def to_numpy():
    """``to_numpy(value)``: a tensor (float64 where it is floating), or a tuple of them, as NumPy for an oracle."""
    return _to_numpy


@pytest.fixture
def assert_close():
    """``assert_close(out, reference, dtype=None)``: within the tolerance of ``out.dtype``; NaN never is."""

    def check(out: torch.Tensor, reference: np.ndarray, dtype: torch.dtype | None = None) -> None:
        tolerance = TOLERANCES[dtype or out.dtype]
        out, reference = _to_numpy(out), np.asarray(reference, np.float64)
        assert out.shape == reference.shape
        if out.size == 0:
            return
        difference = np.abs(out - reference)
        norm = np.linalg.norm(difference) / (np.linalg.norm(reference) or 1)
        worst = difference.max() / (np.abs(reference).max() or 1)
        assert norm < tolerance.norm
        assert worst < tolerance.worst

    return check


@pytest.fixture
def assert_same_bits():
    """``assert_same_bits(out, reference)``: equal dtypes, shapes and bits; -0 is not 0, but any NaN equals any."""

    def check(out, reference) -> None:
        out, reference = (
            value.cpu() if isinstance(value, torch.Tensor) else torch.tensor(value) for value in (out, reference)
        )
        assert out.dtype == reference.dtype
        assert out.shape == reference.shape
        if out.is_floating_point():
            integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]
            assert torch.equal(out.isnan(), reference.isnan())
            out, reference = (torch.where(v.isnan(), 0, v).contiguous().view(integer) for v in (out, reference))
        differing = int((out != reference).sum())
        assert differing == 0, f"{differing} of {out.numel()} elements differ"

    return check


def _to_numpy(value):
    if isinstance(value, tuple):
        return tuple(map(_to_numpy, value))
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.double() if value.is_floating_point() else value).numpy()
