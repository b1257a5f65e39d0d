"""What a training run is made of. Imports no torch, so that a bad value is refused at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsparse.errors import UserError

BACKENDS = ("auto", "torch", "numpy", "c", "cuda")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_LARGEST = 3.4028234e38
"""The largest float32: the kernels take rates in float32."""


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run; the defaults are the default recipe.

    hidden: widths of the hidden layers, first to last; empty for none.
    epochs, batch_size: counts from 1 to 2^31 - 1, as are the widths. A last, smaller batch is used, not dropped.
    lr: learning rate of the first step; it decays linearly to zero over all steps of all epochs.
    momentum: in [0, 1). weight_decay: at least 0, on weights and biases alike. Both as in `torch.optim.SGD`.
    seed: of the initial weights and of the order of the batches.
    device: auto, cpu or cuda. data: auto, mnist, mnist-5k or a directory with the four IDX files.
    backend: what takes the steps: torch (PyTorch's kernels), numpy or c, all three on the CPU; cuda (our kernels on the
    GPU); or auto: cuda on a GPU, torch on a CPU.
    validation: training images held out for validation; None for the data set's default.
    precision: of the products' operands by the backend cuda: fp32, or what is faster: tf32 and fp16, one kernel of
    float16 operands and scaled gradients, 11 bits; or bf16, 8 bits. Weights and sums are float32 always.

    Raises UserError, naming the field, when a value is out of range.
    """

    hidden: tuple[int, ...] = (256,)
    epochs: int = 5
    batch_size: int = 64
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0
    device: str = "auto"
    data: str = "auto"
    validation: int | None = None
    backend: str = "auto"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        _require(isinstance(self.hidden, tuple | list), "hidden", self.hidden, "a list of widths")
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for width in self.hidden:
            _require(_is_count(width, 1), "hidden", width, "a width from 1 to 2^31 - 1")
        _require(_is_count(self.epochs, 1), "epochs", self.epochs, "a count from 1 to 2^31 - 1")
        _require(_is_count(self.batch_size, 1), "batch_size", self.batch_size, "a count from 1 to 2^31 - 1")
        for field in ("lr", "momentum", "weight_decay"):
            value = getattr(self, field)
            _require(isinstance(value, int | float) and not isinstance(value, bool), field, value, "a number")
        _require(0 < self.lr <= _LARGEST, "lr", self.lr, "a finite float32 above 0")
        _require(0 <= self.momentum < 1, "momentum", self.momentum, "a number in [0, 1)")
        _require(0 <= self.weight_decay <= _LARGEST, "weight_decay", self.weight_decay, "a finite float32, 0 or above")
        _require(_is_count(self.seed, 0, 2**63), "seed", self.seed, "a whole number in [0, 2^63)")
        for field in ("device", "data"):
            _require(isinstance(getattr(self, field), str), field, getattr(self, field), "a name")
        _require(self.backend in BACKENDS, "backend", self.backend, f"one of {', '.join(BACKENDS)}")
        _require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        fits = self.validation is None or _is_count(self.validation, 0)
        _require(fits, "validation", self.validation, "a count from 0 to 2^31 - 1")

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict."""
        return {**dataclasses.asdict(self), "hidden": list(self.hidden)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """Return the settings that `to_json` wrote. Raises TypeError or UserError when they are not settings."""
        return cls(**fields)


def _is_count(value: object, least: int, end: int = 2**31) -> bool:
    """Whether `value` is a whole number in [least, end): True and 2.0 are none, and torch takes none beyond int64."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{option(field)} is {value}: it must be {allowed}")


def option(field: str) -> str:
    """Return the command-line spelling of a field: batch_size -> --batch-size."""
    return "--" + field.replace("_", "-")
