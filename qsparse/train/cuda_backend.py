"""Training on a GPU without the host: an epoch is one kernel, where the network fits it, or a graph replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsparse import kernels
from qsparse.data import MEAN, STD, Split
from qsparse.kernels.train_mlp import fits
from qsparse.train.torch_backend import TorchBackend


class CudaBackend(TorchBackend):
    """Steps and whole epochs of gradient descent on `model`, on its GPU. Arguments: see `backends.make`."""

    _graph: _Graph | None = None

    def epoch(self, train: Split, order: torch.Tensor, rates: Sequence[float]) -> torch.Tensor:
        """Take all steps of an epoch; return the mean loss of each before it, float32 (steps,) on the CPU.

        train: on the model's device. order: int64 (images,) on the CPU, which image comes when. rates: the learning
        rate of each step.
        """
        batch = self._config.batch_size
        order, rates = order.to(train.images.device), torch.tensor(rates, device=train.images.device)
        if self._masks or not fits(self._model.sizes, batch, train.images.device):
            if self._graph is None:
                self._graph = _Graph(self, train, batch)
            return self._graph.epoch(order, rates)
        return _means(self._fused(train, order, rates, batch).cpu(), batch)

    @torch.no_grad()
    def _fused(self, train: Split, order: torch.Tensor, rates: torch.Tensor, batch: int) -> torch.Tensor:
        """The loss of each image. The kernel takes the parameters one behind the other."""
        kept = [list(self._parameters.values()), [self._momentum[name] for name in self._parameters if self._momentum]]
        flat = [torch.cat([tensor.flatten() for tensor in tensors]) if tensors else None for tensors in kept]
        losses = kernels.train_mlp(
            train.images,
            train.labels,
            order,
            rates,
            *flat,
            sizes=self._model.sizes,
            batch=batch,
            scale=1 / (255 * STD),
            shift=-MEAN / STD,
            momentum=self._config.momentum,
            weight_decay=self._config.weight_decay,
        )
        for tensors, values in zip(kept, flat, strict=True):
            if tensors:
                parts = values.split([tensor.numel() for tensor in tensors])
                views = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
                torch._foreach_copy_(tensors, views)
        return losses


def _means(losses: torch.Tensor, batch: int) -> torch.Tensor:
    """The mean of each batch; the last one may be short."""
    whole = len(losses) // batch * batch
    parts = [losses[:whole].view(-1, batch).mean(1)]
    if whole < len(losses):
        parts.append(losses[whole:].mean()[None])
    return torch.cat(parts)


class _Graph:
    """One step as a CUDA graph, which finds its batch, its learning rate and its loss's place by a counter there."""

    def __init__(self, backend: CudaBackend, train: Split, batch: int) -> None:
        self._backend, self._train, self._batch = backend, train, batch
        images, device = len(train), train.images.device
        self._order = torch.zeros(images, dtype=torch.int64, device=device)
        self._rates, self._losses = (torch.zeros(-(-images // batch), device=device) for _ in range(2))
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._within = torch.arange(min(batch, images), device=device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # compile and allocate without moving anything
            for _ in range(2):
                self._gradients()
            kernels.sgd(torch.zeros(1, device=device), torch.zeros(1, device=device), lr=0.0)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            loss, gradients = self._gradients()
            backend.update(gradients, self._rates[self._step])
            self._losses[self._step] = loss
            self._step += 1

    def _gradients(self) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        rows = self._order[self._step * self._batch + self._within]
        return self._backend.gradients(self._train.images[rows], self._train.labels[rows])

    def epoch(self, order: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
        self._order.copy_(order)
        self._rates.copy_(rates)
        self._step.zero_()
        whole, batch = len(order) // self._batch, self._batch
        for _ in range(whole):
            self._graph.replay()
        if whole * batch < len(order):
            rows = order[whole * batch :]
            self._losses[whole] = self._backend.step(self._train.images[rows], self._train.labels[rows], rates[whole])
        return self._losses.cpu()
