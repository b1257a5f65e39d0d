import pytest
import torch


@pytest.fixture
def normal():
    """``normal(*shape)``: float32 normal random numbers, the same in every run."""
    generator = torch.Generator().manual_seed(30)
    return lambda *shape: torch.randn(shape, generator=generator)
