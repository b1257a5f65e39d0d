"""`--device`: what auto takes, and what cuda says when something is missing."""

import importlib.util
import sys

import pytest
import torch

from qsparse.device import NAMES, resolve_device
from qsparse.errors import UserError


@pytest.fixture
def machine(monkeypatch):
    """Return a function that makes this machine look like another."""

    def look(*, gpu: bool, cupy: bool, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setitem(sys.modules, "cupy", type(sys)("cupy") if cupy else None)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cupy else None)

    return look


def test_cpu_is_always_there():
    assert resolve_device("cpu") == torch.device("cpu")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match="unknown device 'gpu': choose one of auto, cpu, cuda"):
        resolve_device("gpu")
    assert NAMES == ("auto", "cpu", "cuda")


@pytest.mark.parametrize(
    ("gpu", "cupy", "expected"), [(True, True, "cuda:0"), (True, False, "cpu"), (False, True, "cpu")]
)
def test_auto_takes_the_gpu_only_with_cupy(machine, gpu, cupy, expected):
    machine(gpu=gpu, cupy=cupy)
    assert str(resolve_device("auto")) == expected


def test_cuda_with_both(machine):
    machine(gpu=True, cupy=True)
    assert str(resolve_device("cuda")) == "cuda:0"


def test_cuda_without_a_gpu(machine):
    machine(gpu=False, cupy=True)
    with pytest.raises(UserError, match="PyTorch sees no NVIDIA GPU") as caught:
        resolve_device("cuda")
    assert "CuPy" not in str(caught.value)


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "cuda"), ("12.8", "cuda12")])
def test_cuda_without_cupy_names_the_command_that_fits_pytorch(machine, cuda, extra):
    machine(gpu=True, cupy=False, cuda=cuda)
    with pytest.raises(
        UserError, match=rf"CuPy is missing \(install it with `pip install 'qsparse\[{extra}\]'`\)"
    ) as e:
        resolve_device("cuda")
    assert "GPU (" not in str(e.value)


def test_cuda_with_neither_says_both(machine):
    machine(gpu=False, cupy=False)
    with pytest.raises(UserError, match=r"no NVIDIA GPU .* and CuPy is missing"):
        resolve_device("cuda")


def test_cuda_with_a_cpu_build_of_pytorch(machine):
    machine(gpu=False, cupy=True, cuda=None)
    with pytest.raises(UserError, match=r"built without CUDA .*`pip install torch`"):
        resolve_device("cuda")


def test_a_cupy_that_does_not_load_is_missing(machine, monkeypatch):
    machine(gpu=True, cupy=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # there, and its import fails
    with pytest.raises(UserError, match="CuPy is missing"):
        resolve_device("cuda")
