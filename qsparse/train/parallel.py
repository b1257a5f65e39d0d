"""Data parallel training: the processes that `torchrun` started share every batch.

Each rank takes the gradient of its share of the batch, and one all-reduce sums them, weighted by the rows of the
shares, so that the step is the one that a single process takes on the whole batch, up to float rounding. Tensors on a
CPU go through gloo, those on a GPU through NCCL. Rank 0 alone writes and prints.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.train.config import TrainConfig
from qsparse.train.torch_backend import TorchBackend


class RankGoneError(UserError):
    """This rank stops because another failed, whose own message says why, or because torchrun was stopped."""


def rank() -> int:
    """The number of this process among those that train together, 0 for one alone."""
    return int(os.environ.get("RANK", 0)) if size() > 1 else 0


def size() -> int:
    """How many processes train together, as torchrun says in the environment."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "MASTER_ADDR" in os.environ else 1


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Be one of the processes that train together while inside; nothing for a process alone."""
    if size() == 1:
        yield
        return
    with_gpus = torch.cuda.is_available() and distributed.is_nccl_available()
    if with_gpus and (local := int(os.environ["LOCAL_RANK"])) < torch.cuda.device_count():
        torch.cuda.set_device(local)
    _at_termination(_terminated)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if with_gpus else "gloo")
    try:
        yield
    except UserError as error:
        raise UserError(f"rank {rank()} of {size()}: {error}") from None
    finally:
        distributed.destroy_process_group()


def active() -> bool:
    """Whether this process is inside `joined` with others."""
    return distributed.is_available() and distributed.is_initialized()


def _terminated(*_: object) -> None:
    """Say why the run ends: torchrun, seeing that one rank failed, terminates the others at once."""
    _at_termination(signal.SIG_IGN)  # what is saved is still to be said
    raise RankGoneError("torchrun ended this rank, as it does when another fails")


def _at_termination(handler: Any) -> None:
    with contextlib.suppress(ValueError):  # in another thread than the main one, where signals have no handlers
        signal.signal(signal.SIGTERM, handler)


def share(rows: int, number: int, of: int) -> slice:
    """Return the rows of a batch that are rank `number`'s: shares differ by one row at most, and may be empty."""
    return slice(rows * number // of, rows * (number + 1) // of)


class ParallelBackend(TorchBackend):
    """Steps on a batch that the ranks share. Arguments: see `backends.make`."""

    def __init__(
        self, model: MLP, config: TrainConfig, momentum: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(model, config, momentum, masks)
        leaves = list(self._parameters.values())
        # The loss travels behind the gradients, in the same all-reduce.
        self._flat = leaves[0].new_empty(sum(leaf.numel() for leaf in leaves) + 1)
        self._views = [
            view.view_as(leaf)
            for view, leaf in zip(self._flat[:-1].split([leaf.numel() for leaf in leaves]), leaves, strict=True)
        ]
        self._bytes = 0
        self._marks: list[tuple[Any, Any]] = []

    def step(self, images: torch.Tensor, labels: torch.Tensor, lr: float) -> torch.Tensor:
        """Take one step; return the mean loss of the whole batch before it."""
        mine = share(len(labels), rank(), size())
        if mine.start == mine.stop:
            self._flat.zero_()
        else:
            loss, gradients = self.gradients(images[mine], labels[mine])
            for view, gradient in zip(self._views, gradients, strict=True):
                view.copy_(gradient)
            self._flat[-1] = loss
            self._flat.mul_((mine.stop - mine.start) / len(labels))
        started = self._mark()
        try:
            distributed.all_reduce(self._flat)
        except RuntimeError as error:
            _at_termination(signal.SIG_IGN)
            raise RankGoneError("another rank failed, and this one stops too") from error
        self._marks.append((started, self._mark()))
        self._bytes += self._flat.nbytes
        self.update(self._views, lr)
        return self._flat[-1].clone()

    def _mark(self) -> float | torch.cuda.Event:
        """Now: by the clock, or on a GPU, where the host does not wait, by its stream."""
        if self._flat.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_metrics(self) -> dict[str, Any]:
        """Return what the all-reduces since the last call cost this rank, waiting for the others included.

        all_reduce_bytes counts the buffer that is reduced; all_reduce_s, on a GPU, is the time of its stream.
        """
        if self._flat.device.type == "cpu":
            seconds = sum(end - start for start, end in self._marks)
        else:
            torch.cuda.synchronize(self._flat.device)
            seconds = sum(start.elapsed_time(end) for start, end in self._marks) / 1000
        taken = {"processes": size(), "all_reduce_bytes": self._bytes, "all_reduce_s": seconds}
        self._bytes, self._marks = 0, []
        return taken
