"""Training on a GPU without the host: all steps of an epoch are one call of one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qsparse import data, kernels
from qsparse.data import MEAN, STD, Split
from qsparse.models import MLP
from qsparse.train.config import TrainConfig
from qsparse.train.torch_backend import TorchBackend

_PRECISIONS = {"fp32": "highest", "tf32": "high", "fp16": "high", "bf16": "bfloat16"}


class CudaBackend(TorchBackend):
    """Steps and whole epochs of gradient descent on `model`, on its GPU. Arguments: see `backends.make`."""

    def __init__(
        self, model: MLP, config: TrainConfig, momentum: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(model, config, momentum, masks)
        self._coming: tuple[int, torch.Tensor] | None = None
        self._mask = None
        if masks:
            alive = {name: torch.ones_like(each, dtype=torch.bool) for name, each in self._parameters.items()}
            self._mask = _flat(list({**alive, **masks}.values()))

    @torch.no_grad()
    def epoch(self, train: Split, epoch: int, rates: Sequence[float]) -> torch.Tensor:
        """Take all steps of an epoch; return the mean loss of each before it. See `backends.EpochBackend`."""
        config = self._config
        if self._coming is None or self._coming[0] != epoch:
            self._coming = epoch, data.order(len(train), seed=config.seed, epoch=epoch)
        parameters = list(self._parameters.values())
        velocities = [self._momentum[name] for name in self._parameters] if self._momentum else []
        flat = _flat(parameters), _flat(velocities) if velocities else None
        losses = kernels.train_mlp(
            train.images,
            train.labels,
            self._coming[1].to(train.images.device),
            torch.tensor(rates, device=train.images.device),
            *flat,
            self._mask,
            sizes=self._model.sizes,
            batch=config.batch_size,
            scale=1 / (255 * STD),
            shift=-MEAN / STD,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            precision=_PRECISIONS[config.precision],
        )
        _copy_back(flat[0], parameters)
        if velocities:
            _copy_back(flat[1], velocities)
        if epoch + 1 < config.epochs:  # while the GPU is busy
            self._coming = epoch + 1, data.order(len(train), seed=config.seed, epoch=epoch + 1)
        return _means(losses.cpu(), config.batch_size)


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
