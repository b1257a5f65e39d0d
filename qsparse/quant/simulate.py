"""The layer of a simulation: float32 arithmetic on numbers rounded to few bits. It has an accuracy and no time."""

import torch
from torch import Tensor

from qsparse.quant.schemes import scale_and_zero, to_grid, to_reals


class SimulatedLinear(torch.nn.Module):
    """``y = act(round(x) @ weight.T + bias)`` in float32.

    weight: (N, K) float32, rounded already. bias: (N,) or None. activation: None or "relu". bits: of x, as of
    `to_grid`; None leaves it as it is. grid: scale and zero point, (1,) float32 each, that round all of x; None takes
    each row's extremes. symmetric: whether x is rounded without a zero point.
    """

    simulated = True

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        bits: int | str | None,
        grid: tuple[Tensor, Tensor] | None,
        symmetric: bool,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.activation, self.bits, self.symmetric = activation, bits, symmetric
        self.register_buffer("weight", weight)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        scale, zero = grid or (None, None)
        self.register_buffer("input_scale", scale)
        self.register_buffer("input_zero", zero)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(self._round(x), self.weight, self.bias)
        return y.relu() if self.activation == "relu" else y

    def _round(self, x: Tensor) -> Tensor:
        if self.bits is None:
            return x
        scale, zero = self.input_scale, self.input_zero
        if scale is None:
            scale, zero = scale_and_zero(*x.aminmax(dim=-1, keepdim=True), self.bits, self.symmetric)
        return to_reals(to_grid(x, scale, zero, self.bits, self.symmetric), scale, zero)

    def cpu_kernel(self) -> str:
        return "simulated in float32"

    def describe(self) -> dict:
        return {"kind": "SimulatedLinear", "in_features": self.in_features, "out_features": self.out_features}
