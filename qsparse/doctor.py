"""What this machine has, what runs on it, and what is missing with the command that gets it."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from typing import Any

import torch

import qsparse
from qsparse import data, kernels
from qsparse.device import cupy_command, missing_for_cuda, resolve_device
from qsparse.kernels import _load
from qsparse.kernels.gemm_int8 import cpu_method

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "safetensors", "typer", "rich", "matplotlib", "mlxtend")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
OLDEST = (7, 5)
"""The oldest compute capability that the kernels are compiled for."""


def report() -> dict[str, Any]:
    """Examine this machine, without the network. JSON-able.

    Returns qsparse, python and platform (strings); packages (name to version or null); cuda (the CUDA version that
    PyTorch is built for, or null); gpus (name, compute_capability and memory_bytes of each); device (what `--device
    auto` takes); no_gpu (why not the GPU, or null); tiers (face to tier on that device); cpu_int8
    (method, remark); data (name, source, problem: see `data.Location`); kernel_sources; kernel_cache; data_cache; and
    missing, a list of {what, command}, empty where nothing is.
    """
    device = resolve_device("auto")
    found = data.locate()
    sources = _sources()
    return {
        "qsparse": qsparse.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES}
        | {"cupy": next(filter(None, map(_version, CUPY)), None)},
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "device": device.type,
        "no_gpu": missing_for_cuda(),
        "tiers": {name: getattr(kernels, name).tier(device) for name in kernels.FACES},
        "cpu_int8": _cpu_int8(),
        "data": {"name": found.name, "source": found.source, "problem": found.problem},
        "kernel_sources": sources,
        "kernel_cache": str(_load.cache_dir()),
        "data_cache": str(_load.cache_root()),
        "missing": _missing(device, sources, found),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the report as lines of text, for a person."""
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items())
    gpus = [f"{gpu['name']}, compute capability {gpu['compute_capability']}" for gpu in found["gpus"]]
    state = found["data"]
    text = [
        ("qsparse", f"{found['qsparse']}, Python {found['python']}, {found['platform']}"),
        ("packages", versions),
        ("CUDA", found["cuda"] or "PyTorch is built without it"),
        *(("GPU", gpu) for gpu in gpus or ["none: everything runs on the CPU"]),
        ("device", found["device"] + (f": {found['no_gpu']}" if found["no_gpu"] else "")),
        ("kernel tiers", ", ".join(f"{face} {tier}" for face, tier in found["tiers"].items())),
        ("int8 on CPU", f"{found['cpu_int8']['method']}: {found['cpu_int8']['remark']}"),
        ("data", f"{state['name'] or 'unusable'}: {state['source']}"),
        *([("", state["problem"])] if state["problem"] else []),
        ("data cache", found["data_cache"]),
        ("kernels", found["kernel_sources"] or "their sources are missing"),
        ("kernel cache", found["kernel_cache"]),
        *(("missing", f"{item['what']}: {item['command']}") for item in found["missing"]),
    ]
    enough = "Nothing is missing." if gpus else "Nothing is missing for a CPU."
    return [f"{name:<13}{value}" for name, value in text] + ([] if found["missing"] else [enough])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "compute_capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": gpu.total_memory}
        for gpu in properties
    ]


def _cpu_int8() -> dict[str, str]:
    method = cpu_method()
    if method == "torch._int_mm":
        remark = "this CPU has VNNI instructions, and int8 can beat float32"
    else:
        remark = "this CPU has no VNNI instructions, so int8 saves memory here and no time"
    return {"method": method, "remark": remark}


def _sources() -> str | None:
    try:
        return str(_load.source_dir())
    except FileNotFoundError:
        return None


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _missing(device: torch.device, sources: str | None, found: data.Location) -> list[dict[str, str]]:
    missing = [
        {"what": f"the package {name}", "command": f"pip install {name}"} for name in PACKAGES if not _version(name)
    ]
    if found.name is None:
        missing.append({"what": "the data that QSPARSE_DATA promises", "command": "unset QSPARSE_DATA, or mend it"})
    elif found.name == "mnist-5k":
        missing.append({"what": "the full MNIST", "command": "qsparse train --data mnist"})
    if sources is None:
        missing.append(
            {"what": "the CUDA sources, to be had in the checkout", "command": "pip install --force-reinstall ."}
        )
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() < OLDEST:
            missing.append(
                {
                    "what": f"a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer",
                    "command": "use --device cpu on this machine",
                }
            )
        if device.type == "cpu":
            missing.append({"what": "CuPy, which launches the kernels", "command": cupy_command()})
        if not _imports("cuda.bindings.nvrtc"):
            missing.append(
                {"what": "cuda.bindings, which compiles the kernels", "command": "pip install cuda-bindings"}
            )
        if not _load.include_dirs():
            missing.append({"what": "CUDA's headers", "command": "pip install nvidia-cuda-runtime"})
    return missing
