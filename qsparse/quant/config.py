"""What a quantization is asked to be. Imports no torch, so that a bad option is refused at once."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qsparse.errors import UserError

FLOAT32 = "fp32"
"""A layer that stays as it is."""
HALVES = ("fp16", "bf16")
BITS: dict[str, int | str] = {f"int{bits}{suffix}": bits for suffix in ("", "wo") for bits in range(2, 9)}
BITS |= {"fp4": "e2m1", "fp4wo": "e2m1", "fp8": "e4m3"}
"""What is rounded to few bits, and to which: see `schemes.py`. ``wo``: the weights only."""
DTYPES = (*HALVES, "int8", "int8wo", "int4wo", "fp8")
"""What kernels compute."""
SIMULATED = tuple(name for name in BITS if name not in DTYPES)
"""Accuracy studies."""
_SPELT = {FLOAT32: "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
METHODS = ("absmax", "gptq", "smoothquant", "bias-correction", "equalisation")
ACTIVATIONS = ("dynamic", "static")
CALIBRATIONS = ("minmax", "percentile", "mse", "entropy", "fixed", "lsq")
GRANULARITIES = ("tensor", "channel", "group")
_LARGEST = 3.4028234e38
"""The largest float32: what ranges and rates are computed in."""


def spelt(dtype: str) -> str:
    """The name of a dtype in rows and reports: torch's own where it has one, as float16 for fp16."""
    return _SPELT.get(dtype, dtype)


@dataclass(frozen=True)
class QuantConfig:
    """One quantization of a model; UserError for what does not exist or does not go together.

    dtype: "fp16", "bf16"; "int8" or "fp8" (e4m3), of weights and activations; "int8wo" or "int4wo", of the weights, the
        rest in float16. With `simulate` also int2 ... int7, fp4 (e2m1), int2wo ... int7wo and fp4wo. "fp32" leaves
        alone what `layers` does not name.
    layers: name of a layer -> its dtype, where that is another.
    activations: "dynamic", a scale for each row when it arrives, or "static", one for the layer, of `calibration`.
    calibration: how the static range is found: "minmax", "percentile", "mse", "entropy", or "fixed", which is `range`.
    range: (lo, hi) in the units of a layer's input, of every layer.
    calibration_samples: images of the validation split that are looked at.
    percentile: in (0, 100], the share of ``|x|`` that the percentile's range holds.
    weight_calibration, weight_range, weight_percentile: the same of the weights, over each set of weights that shares
        a scale. "entropy" needs all weights of a layer for its histogram, so `granularity` "tensor".
    granularity: what shares a scale of the weights: "tensor", "channel" (a row of W) or "group" of `group` inputs.
    symmetric: without a zero point. Otherwise the int8 kernel's activations have one, and its weights have none; in
        simulation both have.
    method: "absmax" rounds to the nearest; "gptq" rounds the weights so that the layer's outputs keep; "smoothquant"
        first moves large activations into the weights; "bias-correction" then takes back the shift of each output's
        mean; "equalisation" first makes the ranges of neighbouring layers alike. "gptq", "smoothquant" and
        "bias-correction" look at calibration data.
    qat_epochs: epochs of quantization-aware training (see `qat.py`). Either calibration may then be "lsq": the scales
        are learned. lr: its first learning rate, which decays linearly to zero; None: the one that the run began with.
    simulate: round in float32 instead of computing in integers: accuracy alone.
    """

    dtype: str = "int8"
    layers: Mapping[str, str] | tuple[tuple[str, str], ...] = ()  # kept as sorted pairs
    activations: str = "dynamic"
    calibration: str | None = None
    range: tuple[float, float] | None = None
    calibration_samples: int = 1024
    percentile: float = 99.99
    weight_calibration: str = "minmax"
    weight_range: tuple[float, float] | None = None
    weight_percentile: float = 99.9
    granularity: str = "channel"
    group: int = 64
    symmetric: bool = True
    method: str = "absmax"
    qat_epochs: int = 0
    lr: float | None = None
    simulate: bool = False

    def __post_init__(self) -> None:
        try:
            named: dict[object, object] = dict(self.layers)
        except (TypeError, ValueError):
            named = {None: None}
        if not all(isinstance(name, str) for name in named):
            raise UserError(f"layers is {self.layers!r}: it must name a dtype for each layer, as {{'fc1': 'int8'}}.")
        if named and {self.dtype, *map(str, named.values())} == {FLOAT32}:
            raise UserError(f"All layers stay {FLOAT32}: give a dtype to one at least.")
        layers = {name: dtype for name, dtype in sorted(named.items()) if dtype != self.dtype}
        object.__setattr__(self, "layers", tuple(layers.items()))
        self._check_choices()
        self._check_numbers()
        if self.layers:
            for dtype in self._dtypes:
                self._alone(dtype)  # checks itself
        elif self.dtype in BITS:
            self._check_rounding()
        elif any(getattr(self, option.name) != option.default for option in fields(self)[1:]):
            raise UserError(f"{self.dtype} is a rounding of every number: it has no other options.")

    def _check_choices(self) -> None:
        rounding = (*DTYPES, *SIMULATED)
        for option, value, choices in (
            ("dtype", self.dtype, (FLOAT32, *rounding) if self.layers else rounding),
            *(("dtype", dtype, (FLOAT32, *rounding)) for _, dtype in self.layers),
            ("activations", self.activations, ACTIVATIONS),
            ("granularity", self.granularity, GRANULARITIES),
            ("method", self.method, METHODS),
            ("calibration", self.calibration, (None, *CALIBRATIONS)),
            ("weight calibration", self.weight_calibration, CALIBRATIONS),
        ):
            if value not in choices:
                raise UserError(f"Unknown {option} {value!r}; the valid ones are {', '.join(filter(None, choices))}.")

    def _check_numbers(self) -> None:
        for field, least in (("calibration_samples", 1), ("qat_epochs", 0), ("group", 1)):
            value = getattr(self, field)
            if type(value) is not int or not least <= value < 2**31:
                raise UserError(f"{_option(field)} is {value}: it must be a whole number from {least} to 2^31 - 1.")
        for field in ("percentile", "weight_percentile"):
            percent = getattr(self, field)
            if not (_is_number(percent) and 0 < percent <= 100):
                raise UserError(f"{_option(field)} is {percent}: it must lie in (0, 100].")
        if self.lr is not None and not (_is_number(self.lr) and 0 < self.lr <= _LARGEST):
            raise UserError(f"--lr is {self.lr}: it must be above 0, and finite in float32.")
        for field in ("symmetric", "simulate"):
            if not isinstance(getattr(self, field), bool):
                raise UserError(f"{field} is {getattr(self, field)!r}: it must be True or False.")
        for field in ("range", "weight_range"):
            limits = getattr(self, field)
            if limits is None:
                continue
            pair = isinstance(limits, tuple | list) and len(limits) == 2 and all(map(_is_number, limits))
            if not (pair and -_LARGEST <= limits[0] < limits[1] <= _LARGEST):
                named = " ".join(map(str, limits)) if isinstance(limits, tuple | list) else limits
                raise UserError(f"{_option(field)} is {named}: LO must be below HI, and both finite in float32.")
            object.__setattr__(self, field, tuple(limits))

    def _check_rounding(self) -> None:
        """Check what goes together where all layers are rounded to few bits."""
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
        if (self.weight_calibration == "fixed") != (self.weight_range is not None):
            raise UserError("--weight-range LO HI is the range of --weight-calibration fixed: give both or neither.")
        if self.weight_calibration == "entropy" and self.granularity != "tensor":
            raise UserError("--weight-calibration entropy needs the weights of a whole layer: --granularity tensor.")
        self._check_training()
        if isinstance(self.bits, str):
            if not self.symmetric:
                raise UserError(f"{self.dtype} is a float, which has its sign and no zero point: no --asymmetric.")
            if "entropy" in (self.calibration, self.weight_calibration):
                raise UserError(f"entropy is of even steps, which {self.dtype}, a float, has not.")
        if self.simulate:
            return
        if self.dtype not in DTYPES:
            raise UserError(f"{self.dtype} has no kernel: add --simulate for its accuracy alone, without a time.")
        grouped = self.granularity == "group" and not self.weights_only
        zeros = not self.symmetric and self.dtype != "int8"
        for wrong, what in ((grouped, "--granularity group"), (zeros, "--asymmetric")):
            if wrong:
                raise UserError(f"The {self.dtype} kernel has no {what}: add --simulate for its accuracy alone.")

    def _check_training(self) -> None:
        learned = "lsq" in (self.calibration, self.weight_calibration)
        if learned and not self.qat_epochs:
            raise UserError("lsq learns its ranges in quantization-aware training: give --qat-epochs too.")
        if learned and not self.symmetric:
            raise UserError("lsq learns scales, and no zero points: no --asymmetric.")
        if self.lr is not None and not self.qat_epochs:
            raise UserError("--lr is of quantization-aware training: give --qat-epochs too.")
        if self.qat_epochs and self.method in ("gptq", "bias-correction"):
            raise UserError(f"{self.method} is of weights that stay, and --qat-epochs trains them: choose one of both.")

    def of(self, layer: str) -> "QuantConfig | None":
        """What one layer is asked to be; None: it stays as it is."""
        return self._alone(dict(self.layers).get(layer, self.dtype)) if self.layers else self

    def _alone(self, dtype: str) -> "QuantConfig | None":
        """This configuration with one dtype for all, and of the options those that are not meant for other dtypes."""
        if dtype == FLOAT32:
            return None
        rounded = [other for other in self._dtypes if other in BITS]
        if dtype in HALVES and rounded:
            return QuantConfig(dtype)
        dropped = {}
        if _weights_only(dtype) and not all(map(_weights_only, rounded)):
            dropped = {"activations": "dynamic", "calibration": None, "range": None}
        return dataclasses.replace(self, dtype=dtype, layers=(), **dropped)

    @property
    def _dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.dtype, *(dtype for _, dtype in self.layers))))

    @property
    def bits(self) -> int | str:
        """Of an integer, or those of a float's exponent and mantissa: see `schemes.py`."""
        return BITS[self.dtype]

    @property
    def weights_only(self) -> bool:
        return _weights_only(self.dtype)

    @property
    def symmetric_weights(self) -> bool:
        return self.symmetric or not self.simulate

    @property
    def static(self) -> bool:
        return self.activations == "static"

    @property
    def needs_data(self) -> bool:
        """Whether it looks at calibration data."""
        return _looks(self.activations, self.calibration, self.method)

    @property
    def variant(self) -> str:
        """A name that differs where any option does that counts."""
        parts = [self.dtype, *(f"{name}_{dtype}" for name, dtype in self.layers)]
        parts += ["sim"] if self.simulate else []
        parts += ["static", _ranges(self.calibration, self.range, self.percentile)] if self.static else []
        if self.weight_calibration != "minmax":
            parts.append("w_" + _ranges(self.weight_calibration, self.weight_range, self.weight_percentile))
        if self.granularity != "channel":
            parts.append("tensor" if self.granularity == "tensor" else f"g{self.group}")
        parts += [] if self.symmetric else ["asym"]
        parts += [] if self.method == "absmax" else [self.method]
        if self.qat_epochs:
            parts.append(f"qat{self.qat_epochs}" + ("" if self.lr is None else f"_lr{self.lr:g}"))
        if self.needs_data and self.calibration_samples != QuantConfig.calibration_samples:
            parts.append(f"n{self.calibration_samples}")
        return "-".join(parts)

    def fields(self) -> dict[str, Any]:
        """What a result row says of it beyond what the model shows."""
        layers = {"layers": {name: spelt(dtype) for name, dtype in self.layers}} if self.layers else {}
        rounded = [dtype for dtype in self._dtypes if dtype in BITS]
        if not rounded:
            return layers
        named = (
            {} if layers and not self.simulate else {"dtype": "+".join(map(spelt, self._dtypes))}
        )  # a kernel's layers say theirs
        return (
            layers
            | named
            | {
                "activations": None if all(map(_weights_only, rounded)) else self.activations,
                "granularity": self.granularity,
                "group": self.group if self.granularity == "group" else None,
                "symmetric": self.symmetric,
                "calibration": self.calibration,
                "percentile": self.percentile if self.calibration == "percentile" else None,
                "range": list(self.range) if self.range else None,
                "weight_calibration": self.weight_calibration,
                "weight_percentile": self.weight_percentile if self.weight_calibration == "percentile" else None,
                "weight_range": list(self.weight_range) if self.weight_range else None,
                "calibration_samples": self.calibration_samples if self.needs_data else None,
                "method": self.method,
                "qat_epochs": self.qat_epochs,
                "qat_lr": self.lr,
            }
        )


def idle(options: Mapping[str, Any]) -> dict[str, str]:
    """Of the options given of a quantization, those that have no effect beside the others, and whose they are.

    options: fields of `QuantConfig`.
    """
    chosen = {field.name: options.get(field.name, field.default) for field in fields(QuantConfig)}
    looks = _looks(chosen["activations"], chosen["calibration"], chosen["method"])
    owners = {
        "calibration_samples": (
            looks,
            "--activations static without --range, or a --method that looks at data, such as gptq",
        ),
        "percentile": (chosen["calibration"] == "percentile", "--calibration percentile"),
        "weight_percentile": (chosen["weight_calibration"] == "percentile", "--weight-calibration percentile"),
        "group": (chosen["granularity"] == "group", "--granularity group"),
    }
    return {option: owner for option, (used, owner) in owners.items() if option in options and not used}


def _looks(activations: object, calibration: object, method: object) -> bool:
    """Whether a quantization looks at calibration data."""
    return (activations == "static" and calibration != "fixed") or method not in ("absmax", "equalisation")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _weights_only(dtype: str) -> bool:
    return dtype.endswith("wo")


def _ranges(calibration: str, limits: tuple[float, float] | None, percent: float) -> str:
    """How a range is found, as a variant's name says it."""
    if calibration == "fixed":
        return "fixed_{:g}_{:g}".format(*limits)
    return f"percentile{percent:g}" if calibration == "percentile" else calibration
