"""Training on a GPU without the host: all steps of an epoch are one call of one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qsparse import kernels
from qsparse.data import MEAN, STD, Split
from qsparse.models import MLP
from qsparse.train.config import TrainConfig
from qsparse.train.torch_backend import TorchBackend


class CudaBackend(TorchBackend):
    """Steps and whole epochs of gradient descent on `model`, on its GPU. Arguments: see `backends.make`."""

    def __init__(
        self, model: MLP, config: TrainConfig, momentum: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(model, config, momentum, masks)
        self._mask = None
        if masks:
            alive = {name: torch.ones_like(each, dtype=torch.bool) for name, each in self._parameters.items()}
            self._mask = _flat(list({**alive, **masks}.values()))

    @torch.no_grad()
    def epoch(self, train: Split, order: torch.Tensor, rates: Sequence[float]) -> torch.Tensor:
        """Take all steps of an epoch; return the mean loss of each before it, float32 (steps,) on the CPU.

        train: on the model's device. order: int64 (images,) on the CPU, which image comes when. rates: the learning
        rate of each step.
        """
        parameters = list(self._parameters.values())
        velocities = [self._momentum[name] for name in self._parameters] if self._momentum else []
        flat = _flat(parameters), _flat(velocities) if velocities else None
        losses = kernels.train_mlp(
            train.images,
            train.labels,
            order.to(train.images.device),
            torch.tensor(rates, device=train.images.device),
            *flat,
            self._mask,
            sizes=self._model.sizes,
            batch=self._config.batch_size,
            scale=1 / (255 * STD),
            shift=-MEAN / STD,
            momentum=self._config.momentum,
            weight_decay=self._config.weight_decay,
        )
        _copy_back(flat[0], parameters)
        if velocities:
            _copy_back(flat[1], velocities)
        return _means(losses.cpu(), self._config.batch_size)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors one behind the other, as the kernel takes them."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def _copy_back(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def _means(losses: torch.Tensor, batch: int) -> torch.Tensor:
    """The mean of each batch; the last one may be short."""
    whole = len(losses) // batch * batch
    parts = [losses[:whole].view(-1, batch).mean(1)]
    if whole < len(losses):
        parts.append(losses[whole:].mean()[None])
    return torch.cat(parts)
