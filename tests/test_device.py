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
    heard: list[str] = []
    assert str(resolve_device("auto")) == str(resolve_device("auto", heard.append)) == expected
    if gpu and not cupy:
        (sentence,) = heard
        assert "the CPU used: CuPy" in sentence
        assert "`pip install cupy-cuda13x`" in sentence
    else:
        assert heard == []


def test_cuda_with_both(machine):
    machine(gpu=True, cupy=True)
    assert str(resolve_device("cuda")) == "cuda:0"


def test_cuda_without_a_gpu(machine):
    machine(gpu=False, cupy=True)
    with pytest.raises(UserError, match="PyTorch sees no NVIDIA GPU") as caught:
        resolve_device("cuda")
    assert "CuPy" not in str(caught.value)


@pytest.mark.parametrize(("cuda", "package"), [("13.0", "cupy-cuda13x"), ("12.8", "cupy-cuda12x")])
def test_cuda_without_cupy_names_the_command_that_fits_pytorch(machine, cuda, package):
    machine(gpu=True, cupy=False, cuda=cuda)
    with pytest.raises(UserError, match=rf"CuPy, .*, is missing \(install it with `pip install {package}`\)") as e:
        resolve_device("cuda")
    assert "GPU (" not in str(e.value)


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_without_a_gpu_cupy_would_not_help(machine, cuda):
    machine(gpu=False, cupy=False, cuda=cuda)
    with pytest.raises(UserError, match=r"no NVIDIA GPU|where there is an NVIDIA GPU") as e:
        resolve_device("cuda")
    assert "CuPy" not in str(e.value)
    assert "cupy" not in str(e.value)


def test_cuda_with_a_cpu_build_of_pytorch(machine):
    machine(gpu=False, cupy=True, cuda=None)
    with pytest.raises(UserError, match=r"built without CUDA .*`pip install torch`"):
        resolve_device("cuda")


def test_a_cupy_that_does_not_load_is_missing(machine, monkeypatch):
    machine(gpu=True, cupy=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # there, and its import fails
    with pytest.raises(UserError, match="CuPy, which launches the kernels, is missing"):
        resolve_device("cuda")
