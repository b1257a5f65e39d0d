"""Which device the work runs on: the one place that turns `--device` into a `torch.device`."""

from __future__ import annotations

import importlib.util

import torch

from qsparse.errors import UserError

NAMES = ("auto", "cpu", "cuda")


def resolve_device(name: str) -> torch.device:
    """Turn `auto`, `cpu` or `cuda` into a device.

    `auto` takes the GPU only when PyTorch sees one and CuPy, which compiles and launches the kernels, imports.

    Raises UserError for another name, and for `cuda` when the GPU or CuPy is missing: the message says which, and
    the command that installs it.
    """
    if name not in NAMES:
        raise UserError(f"unknown device {name!r}: choose one of {', '.join(NAMES)}")
    if name == "cpu":
        return torch.device("cpu")
    missing = _missing_for_cuda()
    if missing is None:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cpu")
    raise UserError(f"--device cuda: {missing}; or leave --device out to run on the CPU")


def _missing_for_cuda() -> str | None:
    """Say what keeps the kernels from running on a GPU, and how to mend it; None when nothing does."""
    reasons = []
    if torch.version.cuda is None:
        reasons.append(
            f"this PyTorch ({torch.__version__}) is built without CUDA (get a CUDA build with `pip install torch`)"
        )
    elif not torch.cuda.is_available():
        reasons.append(
            "PyTorch sees no NVIDIA GPU (`nvidia-smi` should list one; where there is one, install its driver)"
        )
    if not _cupy_imports():
        extra = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda"
        reasons.append(f"CuPy is missing (install it with `pip install 'qsparse[{extra}]'`)")
    return " and ".join(reasons) or None


def _cupy_imports() -> bool:
    """Whether CuPy is there and loads (an installed CuPy whose CUDA libraries are missing does not)."""
    if importlib.util.find_spec("cupy") is None:
        return False
    try:
        import cupy  # noqa: F401
    except ImportError:
        return False
    return True
