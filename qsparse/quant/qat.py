"""Quantization-aware training: the network learns with the very arithmetic that it will infer with.

Forward, a layer is the one that inference runs: over its kernel, or a simulation of fewer bits. Rounding has no useful
derivative, so backward the rounding is taken for the identity (the straight-through estimator), and what was clipped
gets no gradient. Steps (scales) that `lsq` learns get the gradient of their paper.

Sources: Y. Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation"
(2013). S. K. Esser et al., "Learned Step Size Quantization" (ICLR 2020), equations 3 to 5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from qsparse.data import Dataset, check_dataset
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import Linear
from qsparse.quant.config import HALVES, QuantConfig
from qsparse.quant.convert import Grid, inference_layer, outputs, prepare, scheme, to_half
from qsparse.quant.schemes import limits, round_weights, scale_and_zero, spread, to_grid, to_reals, weight_grid
from qsparse.train.config import TrainConfig
from qsparse.train.fit import EpochEnd, Progress, fit

_LEAST = 1e-3  # of the scale that a learned one starts from


def train_quantized(
    model: MLP,
    config: QuantConfig,
    dataset: Dataset,
    train: TrainConfig,
    *,
    on_epoch: Callable[[EpochEnd], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> MLP:
    """A copy of `model` quantized as `config` says, after `config.qat_epochs` epochs of training with its rounding.

    model: dense, float32, on the device of `dataset`; it is left as it was. dataset: its training images train, its
    validation images calibrate. train: how; its learning rate is `config.lr` if that is given, and its epochs are
    `config.qat_epochs`. Layers in 16 bits train in float32 and are rounded at the end. on_epoch, progress: as of `fit`.

    Raises and warns as `quantize` and `fit`; TypeError for a `dataset` or a `train` that is none.
    """
    check_dataset(dataset)
    if not isinstance(train, TrainConfig):
        raise TypeError(f"train must be a TrainConfig, not {type(train).__name__}")
    if not config.qat_epochs:
        raise UserError("Quantization-aware training needs an epoch: give --qat-epochs.")
    prepared = prepare(model, config, dataset.validation.images if config.needs_data else None)
    layers = prepared.model.layers()
    learning = prepared.model.replace(
        {
            name: QatLinear(layers[name], one, prepared.grids.get(name))
            for name, one in prepared.configs.items()
            if one.dtype not in HALVES
        }
    )
    lr = train.lr if config.lr is None else config.lr
    train = dataclasses.replace(train, epochs=config.qat_epochs, lr=lr, backend="auto")
    fit(learning, dataset, train, on_epoch=on_epoch, progress=progress)
    learned = learning.layers()
    return learning.replace(
        {
            name: to_half(name, learned[name], one.dtype) if one.dtype in HALVES else learned[name].frozen()
            for name, one in prepared.configs.items()
        }
    )


class QatLinear(torch.nn.Module):
    """A layer that trains as it will infer, on ``x (M, K)`` float32; its outputs are exactly those of `frozen()`.

    layer: dense, float32, to start from. config: of this layer. grid: of static activations, where a learned step
    starts too. Parameters: weight (N, K), bias (N,), and where `lsq` learns them the values of weight_step, (1, 1),
    (N, 1) or (N, G), and of input_step, (1,).
    """

    def __init__(self, layer: Linear, config: QuantConfig, grid: Grid | None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.activation, self.config = layer.activation, config
        self.weight = torch.nn.Parameter(layer.weight.detach().clone())
        self.bias = None if layer.bias is None else torch.nn.Parameter(layer.bias.detach().clone())
        scale, zero = grid or (None, None)
        self.register_buffer("input_scale", scale)
        self.register_buffer("input_zero", zero)
        self.input_step = LearnedStep(scale) if config.calibration == "lsq" else None
        start = weight_grid(self.weight.detach(), *scheme(config))[0]
        self.weight_step = LearnedStep(start) if config.weight_calibration == "lsq" else None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            exact = outputs(self.frozen(), x)
        if not torch.is_grad_enabled():
            return exact
        y = functional.linear(self._inputs(x), self._weights(), self.bias)
        return _Standing.apply(y.relu() if self.activation == "relu" else y, exact)

    @torch.no_grad()
    def frozen(self) -> torch.nn.Module:
        """The layer that inference runs, with the weights and the steps as they are now."""
        config = self.config
        if self.weight_step is None:
            parts = round_weights(self.weight, *scheme(config))
        else:
            scale = self.weight_step().detach()
            zero = torch.zeros_like(scale)
            parts = to_grid(self.weight, *self._spread(scale, zero), config.bits), scale, zero
        return inference_layer(config, parts, self.bias, self.activation, self._grid())

    def _grid(self) -> Grid | None:
        if self.input_scale is None:
            return None
        return self.input_scale if self.input_step is None else self.input_step().detach(), self.input_zero

    def _inputs(self, x: Tensor) -> Tensor:
        """x as the product sees it, with the gradient of one that is not rounded."""
        config = self.config
        if config.weights_only:
            return x
        if self.input_step is not None:
            return FakeQuantize.apply(x, self.input_step(), self.input_zero, config.bits, True, x.shape[1])
        scale, zero = self._grid() or scale_and_zero(
            *x.detach().aminmax(dim=1, keepdim=True), config.bits, config.symmetric
        )
        return FakeQuantize.apply(x, scale, zero, config.bits, config.symmetric, None)

    def _weights(self) -> Tensor:
        config, w = self.config, self.weight
        if self.weight_step is not None:
            step = self.weight_step()
            grid = self._spread(step, torch.zeros_like(step))
            return FakeQuantize.apply(w, *grid, config.bits, True, w.numel() // step.numel())
        grid = weight_grid(w.detach(), *scheme(config))
        return FakeQuantize.apply(w, *self._spread(*grid), config.bits, config.symmetric_weights, None)

    def _spread(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        return tuple(spread(value, self.weight, config.granularity, config.group) for value in (scale, zero))


class LearnedStep(torch.nn.Module):
    """A scale that training moves, and that stays positive: what a step of training drove below a thousandth of where
    it started is put back there.
    """

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(start.clone())
        self.register_buffer("least", _LEAST * start)

    def forward(self) -> Tensor:
        with torch.no_grad():
            torch.maximum(self.value, self.least, out=self.value)
        return self.value


class FakeQuantize(torch.autograd.Function):
    """``s * (q - zero)`` of the q nearest to ``v / s``, with a gradient by v, and by s where that is learned.

    v: any shape. s, zero: as v, or of a shape that spreads over it. bits, symmetric: as of `to_grid`.
    sharing: how many v share a learned s, N of the paper, whose gradient is scaled by ``g = 1 / sqrt(N Q_P)``.
    What rounds to beyond the limits is clipped: it gives v no gradient, and s that of the limit.
    """

    @staticmethod
    def forward(ctx, v, s, zero, bits, symmetric, sharing):
        q = to_grid(v, s, zero, bits, symmetric)
        ctx.save_for_backward(v, s, zero, q)
        ctx.limits, ctx.sharing = limits(bits, symmetric), sharing
        return to_reals(q, s, zero)

    @staticmethod
    def backward(ctx, gradient):
        v, s, zero, q = ctx.saved_tensors
        lo, hi = ctx.limits
        ratio = v / s
        inside = (ratio + zero > lo - 0.5) & (ratio + zero < hi + 0.5)
        by_s = None
        if ctx.needs_input_grad[1]:
            g = 1 / math.sqrt(max(ctx.sharing, 1) * hi)
            by_s = (g * gradient * torch.where(inside, q - zero - ratio, q - zero)).sum_to_size(s.shape)
        return gradient * inside, by_s, None, None, None, None


class _Standing(torch.autograd.Function):
    """`exact` as the value, and the gradient as that of y, which is the same but for the order of its sums."""

    @staticmethod
    def forward(ctx, y, exact):
        return exact.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
