"""Which device the work runs on: the one place that turns `--device` into a `torch.device`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from qsparse.errors import UserError

NAMES = ("auto", "cpu", "cuda")


def resolve_device(name: str, say: Callable[[str], None] | None = None) -> torch.device:
    """Turn `auto`, `cpu` or `cuda` into a device.

    `auto` takes the GPU only when PyTorch sees one and CuPy, which compiles and launches the kernels, imports. say: is
    called with a sentence where `auto` leaves a GPU aside.

    Raises UserError for another name, and for `cuda` when the GPU or CuPy is missing: the message says which, and
    the command that installs it.
    """
    if name not in NAMES:
        raise UserError(f"unknown device {name!r}: choose one of {', '.join(NAMES)}")
    if name == "cpu":
        return torch.device("cpu")
    missing = missing_for_cuda()
    if missing is None:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        if say and torch.cuda.is_available():
            say(f"the GPU is left aside, and the CPU used: {missing}")
        return torch.device("cpu")
    raise UserError(f"--device cuda: {missing}; or leave --device out to run on the CPU")


def missing_for_cuda() -> str | None:
    """Say what keeps the kernels from running on a GPU, and how to mend it; None when nothing does."""
    if torch.version.cuda is None:
        return (
            f"this PyTorch ({torch.__version__}) is built without CUDA (where there is an NVIDIA GPU, get a CUDA build "
            "with `pip install torch`)"
        )
    if not torch.cuda.is_available():
        return "PyTorch sees no NVIDIA GPU (`nvidia-smi` should list one; where there is one, install its driver)"
    if not _cupy_imports():
        return f"CuPy, which launches the kernels, is missing (install it with `{cupy_command()}`)"
    return None


def cupy_command() -> str:
    """Return the command that installs the CuPy of this PyTorch's CUDA."""
    return f"pip install cupy-cuda{12 if (torch.version.cuda or '').startswith('12.') else 13}x"


def _cupy_imports() -> bool:
    """Whether CuPy is there and loads (an installed CuPy whose CUDA libraries are missing does not)."""
    if importlib.util.find_spec("cupy") is None:
        return False
    try:
        import cupy  # noqa: F401
    except ImportError:
        return False
    return True
