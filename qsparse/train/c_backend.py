"""Training in C: `mlp.c`, compiled on first use with the system's compiler and called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from qsparse.data import normalize
from qsparse.errors import UserError
from qsparse.kernels._load import cache_root
from qsparse.models import MLP
from qsparse.train.config import TrainConfig

SOURCE = Path(__file__).with_name("mlp.c")
# No -ffast-math: it lets the compiler assume that no loss is NaN.
FLAGS = ("-std=c99", "-O3", "-march=native", "-fopenmp-simd", "-ffp-contract=fast", "-fPIC", "-shared")


def compiler() -> list[str]:
    """Return the C compiler's command: $CC with its options, else the first of cc, gcc and clang.

    Raises UserError, naming a package, where there is none.
    """
    given = os.environ.get("CC", "")
    try:
        own = shlex.split(given)
    except ValueError as error:
        raise UserError(f"CC is {given!r}, which is no command: {error}") from None
    names = own[:1] or ["cc", "gcc", "clang"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise UserError(
            f"--backend c needs a C compiler, and there is no {' or '.join(names)} on the path: install one (package "
            "gcc: `apt install gcc libc6-dev` or `dnf install gcc`), or take --backend numpy"
        )
    return [found, *own[1:]]


def library_path() -> Path:
    """Return where the compiled library is kept: its name tells the source, the flags, $CC and the CPU it is for."""
    made_of = SOURCE.read_text(), *FLAGS, os.environ.get("CC", ""), _cpu()
    key = hashlib.blake2b("\0".join(made_of).encode(errors="surrogateescape"), digest_size=16)
    return cache_root() / "train" / f"mlp-{key.hexdigest()}.so"


def _cpu() -> str:
    """What -march=native depends on: a home that two machines share must not hand one the other's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {features}"


def _compile(path: Path) -> None:
    """Write the library, whole or not at all: another process may do the same."""
    command = compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".so.tmp", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise UserError(
            f"--backend c cannot be compiled into {path.parent}: {error.strerror}; QSPARSE_CACHE can name another place"
        ) from error
    try:
        whole = [*command, *FLAGS, str(SOURCE), "-o", temporary, "-lm"]
        done = subprocess.run(whole, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise UserError(f"{command[0]} cannot compile --backend c: {done.stderr.strip() or done.returncode}")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{command[0]} cannot compile --backend c: {error.strerror}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def load() -> ctypes.CDLL:
    """Return the compiled `mlp.c`. Raises UserError when it is not compiled yet and there is no compiler."""
    return _load(library_path())


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    """Load the library, compiled first where it is missing or damaged."""
    if not path.exists():
        _compile(path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        _compile(path)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise UserError(
                f"--backend c was compiled by {compiler()[0]} and cannot be loaded: {error}; CC can name another "
                "compiler, QSPARSE_CACHE another place"
            ) from error
    pointers, count, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    library.qsparse_gradients.restype = ctypes.c_double
    library.qsparse_gradients.argtypes = [count, *[pointers] * 5, count, pointers, pointers]
    library.qsparse_sgd.restype = None
    library.qsparse_sgd.argtypes = [ctypes.c_int64, *[pointers] * 4, *[real] * 3]
    return library


class CBackend:
    """Steps of gradient descent in C, on the model's own memory. Arguments: see `backends.make`.

    Raises UserError when there is no C compiler and no library compiled before.
    """

    def __init__(
        self, model: MLP, config: TrainConfig, momentum: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
    ) -> None:
        self._library = load()
        self._config = config
        parameters = dict(model.named_parameters())
        self._parameters = [tensor.detach() for tensor in parameters.values()]
        self._momentum = [momentum.get(name) for name in parameters]
        self._masks = [masks[name].contiguous() if name in masks else None for name in parameters]
        self._sizes = model.sizes
        self._rows = 0
        self.gradients = [torch.empty_like(tensor) for tensor in self._parameters]

    def backward(self, x: torch.Tensor, labels: torch.Tensor) -> float:
        """Return the mean loss of a batch x float32 (B, K); `gradients` then holds its gradient by each parameter."""
        if len(x) > self._rows:
            self._rows = len(x)
            self._outputs = [torch.empty(self._rows, width) for width in self._sizes[1:]]
            self._d_outputs = [torch.empty(self._rows, width) for width in self._sizes[1:-1]]
        return self._library.qsparse_gradients(
            len(self._sizes) - 1,
            (ctypes.c_int * len(self._sizes))(*self._sizes),
            *(_pointers(each) for each in (self._parameters, self.gradients, self._outputs, self._d_outputs)),
            len(x),
            x.data_ptr(),
            labels.data_ptr(),
        )

    def step(self, images: torch.Tensor, labels: torch.Tensor, lr: float) -> float:
        """Take one step; return the mean loss before it."""
        loss = self.backward(normalize(images), labels)
        rates = (lr, self._config.momentum, self._config.weight_decay)
        for parameter, *others in zip(self._parameters, self.gradients, self._momentum, self._masks, strict=True):
            addresses = [None if each is None else each.data_ptr() for each in others]
            self._library.qsparse_sgd(parameter.numel(), parameter.data_ptr(), *addresses, *rates)
        return loss


def _pointers(tensors: list[torch.Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
