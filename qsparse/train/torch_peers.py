"""PyTorch's own training on a GPU, as the peer of backend cuda: step by step, and as a CUDA graph of one step.

Both train the model's own parameters by `torch.nn.functional`, autograd and the fused `torch.optim.SGD`, with products
in tf32, or in bfloat16 by autocast. They are rungs of the ladder, not of `qsparse train`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn import functional

from qsparse import data
from qsparse.data import Split
from qsparse.models import MLP
from qsparse.train.config import TrainConfig


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class EagerTorch:
    """Steps as a user writes them. Arguments: see `backends.make`; momentum starts at zero, and masks must be empty."""

    _bfloat16 = False

    def __init__(
        self, model: MLP, config: TrainConfig, momentum: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
    ) -> None:
        if masks:
            raise ValueError("PyTorch's optimiser knows no masks")
        self._config = config
        self._layers = list(model.children())
        self._rate = torch.zeros((), device=next(model.parameters()).device)
        self._optimizer = torch.optim.SGD(
            model.parameters(),
            lr=self._rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, images: torch.Tensor, labels: torch.Tensor, lr: float) -> torch.Tensor:
        """Take one step; return the mean loss before it, a tensor on the device."""
        self._rate.fill_(lr)
        return self._step(images, labels)

    def _step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = data.normalize(images)
        autocast = torch.autocast("cuda", torch.bfloat16, enabled=self._bfloat16, cache_enabled=False)
        with _tf32(), torch.enable_grad(), autocast:
            for layer in self._layers:
                y = functional.linear(y, layer.weight, layer.bias)
                y = functional.relu(y) if layer.activation else y
            loss = functional.cross_entropy(y, labels)
        self._optimizer.zero_grad(set_to_none=True)
        with _tf32():
            loss.backward()
        self._optimizer.step()
        return loss.detach()


class GraphedTorch(EagerTorch):
    """The same step in a CUDA graph, which finds its batch and its learning rate by a counter on the device."""

    _graph: torch.cuda.CUDAGraph | None = None

    def epoch(self, train: Split, epoch: int, rates: Sequence[float]) -> torch.Tensor:
        """Take all steps of an epoch; return the mean loss of each before it, float32 (steps,) on the CPU.

        ValueError for other images than those of the first epoch, which are what the graph reads.
        """
        batch, images = self._config.batch_size, len(train)
        order = data.order(images, seed=self._config.seed, epoch=epoch)
        if self._graph is None:
            self._capture(train, batch)
        if train is not self._train:
            raise ValueError("the graph was captured with another split, whose images it reads")
        self._order.copy_(order)
        self._rates.copy_(torch.tensor(rates))
        self._at.zero_()
        for _ in range(images // batch):
            self._graph.replay()
        if images % batch:
            rows = self._order[images // batch * batch :]
            self._losses[-1] = self.step(train.images[rows], train.labels[rows], rates[-1])
        return self._losses.cpu()

    def _capture(self, train: Split, batch: int) -> None:
        device, images = train.images.device, len(train)
        self._train = train  # kept, as all that a replay reads
        self._order = torch.zeros(images, dtype=torch.int64, device=device)
        self._rates, self._losses = (torch.zeros(-(-images // batch), device=device) for _ in range(2))
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._within = torch.arange(min(batch, images), device=device)

        def once() -> None:
            rows = self._order[self._at * batch + self._within]
            self._rate.copy_(self._rates[self._at][0])
            self._losses[self._at] = self._step(train.images[rows], train.labels[rows])
            self._at += 1

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # with a learning rate of zero nothing moves, and no momentum builds up at ...
            for _ in range(2):
                once()
                self._at.zero_()
        torch.cuda.current_stream(device).wait_stream(side)
        for state in self._optimizer.state.values():  # ... zero, which it is set to again
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            once()


class GraphedBfloat16(GraphedTorch):
    """The graph of a step whose products autocast takes in bfloat16."""

    _bfloat16 = True
