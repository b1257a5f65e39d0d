"""Options and comma lists of values in; a `QuantConfig` for each combination out."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from qsparse.errors import UserError
from qsparse.quant.config import QuantConfig

_FIELDS = {field.name.replace("_", "-"): field for field in dataclasses.fields(QuantConfig)}
SWEPT = tuple(name for name, field in _FIELDS.items() if field.type in (str, str | None, int, float))
"""The options that take one text or one number."""


def sweep(options: Mapping[str, Any], lists: Sequence[str]) -> list[QuantConfig]:
    """The configurations of `options` (fields of `QuantConfig`) with each combination of the values in `lists`.

    lists: texts like "calibration=minmax,mse", each of another option; they take the place of what `options` says.
    Combinations that come to the same variant count once. Raises UserError for an option that cannot be swept, a value
    that is no number where one is needed, and as `QuantConfig` for combinations that do not go together.
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
    combinations = itertools.product(*values.values())
    configs = [QuantConfig(**{**options, **dict(zip(values, each, strict=True))}) for each in combinations]
    return list({config.variant: config for config in configs}.values())


def _value(field: dataclasses.Field, text: str, value: str) -> Any:
    if field.type not in (int, float):
        return value
    try:
        return field.type(value)
    except ValueError:
        raise UserError(f"--sweep {text}: {value!r} is no number of --{field.name.replace('_', '-')}.") from None
