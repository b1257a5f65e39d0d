"""What a quantization is asked to be. Imports no torch, so that a bad option is refused at once."""

import math
from dataclasses import dataclass, fields
from typing import Any

from qsparse.errors import UserError

BITS = {f"int{bits}{suffix}": bits for suffix in ("", "wo") for bits in range(2, 9)}
DTYPES = ("fp16", "bf16", "int8")
"""What kernels compute."""
SIMULATED = tuple(name for name in BITS if name != "int8")
"""Accuracy studies: ``intB`` is weights and activations, ``intBwo`` weights only."""
METHODS = ("absmax", "gptq", "smoothquant", "bias-correction")
ACTIVATIONS = ("dynamic", "static")
CALIBRATIONS = ("minmax", "percentile", "mse", "entropy", "fixed")
GRANULARITIES = ("tensor", "channel", "group")


@dataclass(frozen=True)
class QuantConfig:
    """One quantization of a model; UserError for what does not exist or does not go together.

    dtype: "fp16", "bf16", "int8", or with `simulate` any of int2 ... int8 (weights and activations) and
        int2wo ... int8wo (weights only).
    activations: "dynamic", a scale for each row when it arrives, or "static", one for the layer, of `calibration`.
    calibration: how the static range is found: "minmax", "percentile", "mse", "entropy", or "fixed", which is `range`.
    range: (lo, hi) in the units of a layer's input, of every layer.
    calibration_samples: images of the validation split that are looked at.
    percentile: in (0, 100], the share of ``|x|`` that the percentile's range holds.
    granularity: what shares a scale of the weights: "tensor", "channel" (a row of W) or "group" of `group` inputs.
    symmetric: without a zero point.
    method: "absmax" rounds to the nearest; "gptq" rounds the weights so that the layer's outputs keep; "smoothquant"
        first moves large activations into the weights; "bias-correction" then takes back the shift of each output's
        mean. All but the first look at calibration data.
    simulate: round in float32 instead of computing in integers: accuracy alone.
    """

    dtype: str = "int8"
    activations: str = "dynamic"
    calibration: str | None = None
    range: tuple[float, float] | None = None
    calibration_samples: int = 1024
    percentile: float = 99.99
    granularity: str = "channel"
    group: int = 64
    symmetric: bool = True
    method: str = "absmax"
    simulate: bool = False

    def __post_init__(self) -> None:
        for option, value, choices in (
            ("dtype", self.dtype, (*DTYPES, *SIMULATED)),
            ("activations", self.activations, ACTIVATIONS),
            ("granularity", self.granularity, GRANULARITIES),
            ("method", self.method, METHODS),
            ("calibration", self.calibration, (None, *CALIBRATIONS)),
        ):
            if value not in choices:
                raise UserError(f"Unknown {option} {value!r}; the valid ones are {', '.join(filter(None, choices))}.")
        self._check_numbers()
        if self.dtype in BITS:
            self._check_integers()
        elif any(getattr(self, option.name) != option.default for option in fields(self)[1:]):
            raise UserError(f"{self.dtype} is a rounding of every number: it has no other options.")

    def _check_numbers(self) -> None:
        if self.calibration_samples < 1:
            raise UserError(f"--calibration-samples is {self.calibration_samples}: it must be at least 1.")
        if not 0 < self.percentile <= 100:
            raise UserError(f"--percentile is {self.percentile}: it must lie in (0, 100].")
        if self.group < 1:
            raise UserError(f"--group is {self.group}: it must be at least 1.")
        if self.range is not None and not (all(map(math.isfinite, self.range)) and self.range[0] < self.range[1]):
            raise UserError(f"--range is {self.range[0]:g} {self.range[1]:g}: LO must be below HI, and both finite.")

    def _check_integers(self) -> None:
        if self.weights_only and (self.static or self.calibration):
            raise UserError(f"{self.dtype} leaves the activations as they are: no --activations, no --calibration.")
        if self.weights_only and self.method == "smoothquant":
            raise UserError(f"{self.dtype} leaves the activations as they are: smoothquant has nothing to smooth.")
        if self.static and self.calibration is None:
            raise UserError(f"Static activations need a range: give --calibration, one of {', '.join(CALIBRATIONS)}.")
        if self.calibration and not self.static:
            raise UserError("--calibration finds the range of static activations: give --activations static too.")
        if (self.calibration == "fixed") != (self.range is not None):
            raise UserError("--range LO HI is the range of --calibration fixed: give both or neither.")
        if self.simulate:
            return
        if self.dtype != "int8":
            raise UserError(f"{self.dtype} has no kernel: add --simulate for its accuracy alone, without a time.")
        for wrong, what in ((self.granularity == "group", "--granularity group"), (not self.symmetric, "--asymmetric")):
            if wrong:
                raise UserError(f"The int8 kernel has no {what}: add --simulate for its accuracy alone.")

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

    @property
    def weights_only(self) -> bool:
        return self.dtype.endswith("wo")

    @property
    def static(self) -> bool:
        return self.activations == "static"

    @property
    def needs_data(self) -> bool:
        """Whether it looks at calibration data."""
        return (self.static and self.calibration != "fixed") or self.method != "absmax"

    @property
    def variant(self) -> str:
        """A name that differs where any option does that counts."""
        parts = [self.dtype]
        parts += ["sim"] if self.simulate else []
        parts += ["static", self._calibration] if self.static else []
        if self.granularity != "channel":
            parts.append("tensor" if self.granularity == "tensor" else f"g{self.group}")
        parts += [] if self.symmetric else ["asym"]
        parts += [] if self.method == "absmax" else [self.method]
        if self.needs_data and self.calibration_samples != QuantConfig.calibration_samples:
            parts.append(f"n{self.calibration_samples}")
        return "-".join(parts)

    @property
    def _calibration(self) -> str:
        if self.calibration == "fixed":
            return "fixed_{:g}_{:g}".format(*self.range)
        return f"percentile{self.percentile:g}" if self.calibration == "percentile" else self.calibration

    def fields(self) -> dict[str, Any]:
        """What a result row says of it beyond what the model shows."""
        if self.dtype not in BITS:
            return {}
        return {
            "dtype": self.dtype,
            "activations": None if self.weights_only else self.activations,
            "granularity": self.granularity,
            "group": self.group if self.granularity == "group" else None,
            "symmetric": self.symmetric,
            "calibration": self.calibration,
            "percentile": self.percentile if self.calibration == "percentile" else None,
            "range": list(self.range) if self.range else None,
            "calibration_samples": self.calibration_samples if self.needs_data else None,
            "method": self.method,
        }
