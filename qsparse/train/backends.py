"""The rungs of training: what takes one step, by name.

A backend is an object with `step(images, labels, lr) -> loss`. It changes the model's own parameters and the momentum
buffers in place, so the loop around it, the checkpoints and the evaluation are the same for all. One that has
`epoch(train, epoch, rates) -> losses` too takes all steps of an epoch by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from qsparse.data import Split
from qsparse.models import MLP
from qsparse.nn import Linear
from qsparse.train import parallel
from qsparse.train.config import TrainConfig
from qsparse.train.cuda_backend import CudaBackend
from qsparse.train.torch_backend import TorchBackend


class Backend(Protocol):
    """What `fit` needs of a backend."""

    def step(self, images: torch.Tensor, labels: torch.Tensor, lr: float) -> torch.Tensor | float:
        """Take one step on a batch, images uint8 (B, 784) and labels int64 (B,); return the mean loss before it."""


@runtime_checkable
class EpochBackend(Backend, Protocol):
    """A backend that needs no host between steps."""

    def epoch(self, train: Split, epoch: int, rates: Sequence[float]) -> torch.Tensor:
        """Take all steps of an epoch (counted from 0); return the mean losses before them, float32 on the CPU.

        The images come as `data.order` says; rates: the learning rate of each step.
        """


def make(
    model: MLP, config: TrainConfig, momentum: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
) -> Backend:
    """Return the backend that `config.backend` names, over `model`.

    momentum: a buffer for each parameter, by its name; empty when `config.momentum` is 0. masks: bool tensors by the
    name of the parameter. Both on the model's device, and both kept, not copied.

    Raises UserError when the backend cannot run here, ValueError when the model is not where it runs.
    """
    places = {parameter.device.type for parameter in model.parameters()}
    if config.backend in ("auto", "torch", "cuda"):  # one code: the layers choose their kernels by the device
        if parallel.active():
            return parallel.ParallelBackend(model, config, momentum, masks)
        if places == {"cuda"} and all(isinstance(layer, Linear) for layer in model.layers().values()):
            return CudaBackend(model, config, momentum, masks)
        return TorchBackend(model, config, momentum, masks)
    if places != {"cpu"}:
        raise ValueError(f"the backend {config.backend} trains models on the CPU, and this one is on {places}")
    if config.backend == "numpy":
        from qsparse.train.numpy_backend import NumpyBackend

        return NumpyBackend(model, config, momentum, masks)
    from qsparse.train.c_backend import CBackend

    return CBackend(model, config, momentum, masks)


def metrics_of(backend: Backend) -> dict[str, Any]:
    """Return what a backend tells of its steps since the last call, besides their losses."""
    return backend.take_metrics() if isinstance(backend, parallel.ParallelBackend) else {}


@contextlib.contextmanager
def threads_for(backend: str) -> Iterator[None]:
    """Let PyTorch gather batches in one thread while `backend` computes without it.

    PyTorch's idle threads wait for their next work by spinning, on the cores that NumPy's threads need: an epoch of
    `numpy` then took up to 60 times as long.
    """
    before = torch.get_num_threads()
    if backend in ("numpy", "c"):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
