"""Training through the layers and autograd: PyTorch's kernels on a CPU, ours on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qsparse import kernels, nn
from qsparse.models import MLP
from qsparse.train.config import TrainConfig


class TorchBackend:
    """Steps of gradient descent on `model`, in place, on the device that it is on. Arguments: see `backends.make`."""

    def __init__(
        self, model: MLP, config: TrainConfig, momentum: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
    ) -> None:
        self._model, self._config, self._momentum, self._masks = model, config, momentum, masks
        self._parameters = dict(model.named_parameters())

    def step(self, images: torch.Tensor, labels: torch.Tensor, lr: float) -> torch.Tensor:
        """Take one step; return the mean loss before it, a tensor on the device, so that nothing waits for a GPU."""
        loss, gradients = self.gradients(images, labels)
        self.update(gradients, lr)
        return loss

    def gradients(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the mean loss of a batch and its gradient by each parameter."""
        loss = nn.cross_entropy(self._model(images), labels)
        return loss.detach(), torch.autograd.grad(loss, list(self._parameters.values()))

    @torch.no_grad()
    def update(self, gradients: Sequence[torch.Tensor], lr: float) -> None:
        """Move each parameter by its gradient."""
        for (name, parameter), gradient in zip(self._parameters.items(), gradients, strict=True):
            kernels.sgd(
                parameter.detach(),
                gradient,
                self._momentum.get(name),
                lr=lr,
                momentum=self._config.momentum,
                weight_decay=self._config.weight_decay,
                mask=self._masks.get(name),
            )
