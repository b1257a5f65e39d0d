"""qsparse.doctor: what it says about this machine, and about machines that lack something."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import qsparse
from qsparse import data, doctor, kernels
from qsparse.kernels import _load


@pytest.fixture(autouse=True)
def no_data(monkeypatch, tmp_path):
    monkeypatch.delenv("QSPARSE_DATA", raising=False)
    monkeypatch.setenv("QSPARSE_CACHE", str(tmp_path))


@pytest.fixture
def full_mnist(monkeypatch):
    monkeypatch.setattr(data, "locate", lambda: data.Location("mnist", "/somewhere", None))


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A machine whose PyTorch sees one GPU, of the capability given, and whose CuPy may be missing."""

    def pretend(capability: tuple[int, int], device: str) -> None:
        gpu = SimpleNamespace(name="A GPU", major=capability[0], minor=capability[1], total_memory=2**34)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(doctor, "resolve_device", lambda _: torch.device(device))

    return pretend


def commands(found: dict) -> list[str]:
    return [item["command"] for item in found["missing"]]


def test_this_machine(tmp_path):
    found = doctor.report()
    assert json.loads(json.dumps(found)) == found
    assert found["qsparse"] == qsparse.__version__
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert set(found["tiers"]) == set(kernels.FACES)
    assert found["kernel_cache"] == str(tmp_path / "kernels")
    assert found["kernel_sources"] == str(_load.source_dir())
    assert found["cpu_int8"]["method"] in ("torch._int_mm", "float32 slices")
    if found["device"] == "cpu":
        assert set(found["tiers"].values()) == {"cpu"}
        assert found["no_gpu"]


def test_missing_data_comes_with_its_command():
    found = doctor.report()
    assert found["data"]["name"] == "mnist-5k"
    assert {"what": "the full MNIST", "command": "qsparse train --data mnist"} in found["missing"]


def test_a_wrong_data_variable_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("QSPARSE_DATA", str(tmp_path))
    found = doctor.report()
    assert found["data"]["name"] is None
    assert any("QSPARSE_DATA" in command for command in commands(found))
    assert any(line.startswith("data ") and "unusable" in line for line in doctor.lines(found))


@pytest.mark.usefixtures("full_mnist")
def test_a_missing_package_comes_with_its_command(monkeypatch):
    version = importlib.metadata.version

    def without_scipy(name: str) -> str:
        if name == "scipy":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_scipy)
    found = doctor.report()
    assert found["packages"]["scipy"] is None
    assert "pip install scipy" in commands(found)
    assert "scipy missing" in "\n".join(doctor.lines(found))


@pytest.mark.usefixtures("full_mnist")
def test_missing_sources(monkeypatch):
    def nowhere():
        raise FileNotFoundError("the CUDA sources are missing")

    monkeypatch.setattr(_load, "source_dir", nowhere)
    found = doctor.report()
    assert found["kernel_sources"] is None
    # The project of this name on the package index is another one.
    assert "pip install --force-reinstall ." in commands(found)


@pytest.mark.usefixtures("full_mnist")
@pytest.mark.parametrize(("cuda", "package"), [("13.0", "cupy-cuda13x"), ("12.8", "cupy-cuda12x")])
def test_a_gpu_without_cupy(monkeypatch, pretend_gpu, cuda, package):
    pretend_gpu((9, 0), device="cpu")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = doctor.report()
    assert found["gpus"] == [{"name": "A GPU", "compute_capability": "9.0", "memory_bytes": 2**34}]
    assert f"pip install {package}" in commands(found)


@pytest.mark.usefixtures("full_mnist")
def test_a_gpu_that_is_too_old_or_just_new_enough(pretend_gpu):
    pretend_gpu((7, 0), device="cuda")
    found = doctor.report()
    assert any("7.5" in item["what"] for item in found["missing"])
    pretend_gpu((7, 5), device="cuda")
    found = doctor.report()
    assert not any("7.5" in item["what"] for item in found["missing"])
    assert set(found["tiers"].values()) == {"simt"}
    assert any(line.startswith("GPU") and "A GPU, compute capability 7.5" in line for line in doctor.lines(found))


@pytest.mark.usefixtures("full_mnist")
def test_a_gpu_without_what_compiles(monkeypatch, pretend_gpu):
    pretend_gpu((9, 0), device="cuda")
    monkeypatch.setattr(_load, "include_dirs", lambda: ())
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    found = doctor.report()
    assert "pip install cuda-bindings" in commands(found)
    assert "pip install nvidia-cuda-runtime" in commands(found)


@pytest.mark.usefixtures("full_mnist")
@pytest.mark.parametrize(("method", "words"), [("torch._int_mm", "has VNNI"), ("float32 slices", "no VNNI")])
def test_the_cpu_remark(monkeypatch, method, words):
    monkeypatch.setattr(doctor, "cpu_method", lambda: method)
    found = doctor.report()
    assert found["cpu_int8"]["method"] == method
    assert words in "\n".join(doctor.lines(found))


@pytest.mark.usefixtures("full_mnist")
def test_nothing_missing_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.report()
    assert found["missing"] == []
    lines = doctor.lines(found)
    assert lines[-1] == "Nothing is missing for a CPU."
    assert any(line.startswith("GPU ") and line.endswith("none: everything runs on the CPU") for line in lines)
    assert not any("install cupy" in line for line in lines)


@pytest.mark.gpu
def test_a_real_gpu():
    found = doctor.report()
    assert found["device"] == "cuda"
    assert found["no_gpu"] is None
    assert found["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert "cpu" not in found["tiers"].values()
