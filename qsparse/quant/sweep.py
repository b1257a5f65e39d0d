"""Options and comma lists of values in; a `QuantConfig` for each combination out."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from qsparse.errors import UserError, refuse_idle
from qsparse.quant.config import QuantConfig, idle

_FIELDS = {field.name.replace("_", "-"): field for field in dataclasses.fields(QuantConfig) if field.name != "layers"}
SWEPT = tuple(_FIELDS)
_SWITCHES = {"yes": True, "no": False}


def sweep(options: Mapping[str, Any], lists: Sequence[str]) -> list[QuantConfig]:
    """The configurations of `options` with each combination of the values in `lists`.

    options: the fields of `QuantConfig` that were given.
    lists: texts like "calibration=minmax,mse", each of another option; they take the place of what `options` says. A
    range is LO:HI, and what is on or off is yes or no.
    Combinations that come to the same variant count once. Raises UserError for an option that cannot be swept, a value
    that is no number where one is needed, an option that has no effect in any combination, and as `QuantConfig` for
    combinations that do not go together.
    """
    values: dict[str, list[Any]] = {}
    for text in lists:
        name, _, listed = text.partition("=")
        if name not in SWEPT or not listed:
            raise UserError(f"--sweep {text}: give OPTION=VALUE,VALUE with OPTION one of {', '.join(SWEPT)}.")
        field = _FIELDS[name]
        if field.name in values:
            raise UserError(f"--sweep {text}: {name} is swept already; list all of its values at once.")
        values[field.name] = [_value(field, text, value) for value in listed.split(",")]
    combinations = [{**options, **dict(zip(values, each, strict=True))} for each in itertools.product(*values.values())]
    configs = [QuantConfig(**each) for each in combinations]
    refuse_idle(map(idle, combinations))
    return list({config.variant: config for config in configs}.values())


def _value(field: dataclasses.Field, text: str, value: str) -> Any:
    option = field.name.replace("_", "-")
    if field.type is bool:
        if value not in _SWITCHES:
            raise UserError(f"--sweep {text}: {option} is yes or no, not {value!r}.")
        return _SWITCHES[value]
    try:
        if field.type in (int, float):
            return field.type(value)
        if field.type == float | None:
            return float(value)
        if field.type == tuple[float, float] | None:
            lo, hi = value.split(":")
            return float(lo), float(hi)
    except ValueError:
        raise UserError(f"--sweep {text}: {value!r} is no number of --{option}, or no LO:HI.") from None
    return value
