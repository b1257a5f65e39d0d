"""sweep.toml -> cells: every combination of the values that it lists.

[train]                      # fields of TrainConfig: each combination is one network, trained once
hidden = [256, [1024, 1024]] # of a list every value has its turn; a network of two layers is a list itself
seed = [0, 1, 2]

[[quantize]]                 # fields of QuantConfig; any number of such tables
dtype = ["int8", "fp16"]

[[sparsify]]                 # fields of SparseConfig, and finetune_epochs, lr, schedule, epochs, order
density = [0.5, 0.1]
format = ["csr", "coo"]

[measure]                    # optional: the batch sizes, and seconds for each model and batch on a CPU
batches = [1, 1024]
budget_s = 0.2
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsparse.errors import UserError, refuse_idle
from qsparse.quant import QuantConfig
from qsparse.quant import config as quant
from qsparse.sparse import SparseConfig
from qsparse.sparse import config as sparse
from qsparse.train.config import TrainConfig

BASELINE = "baseline"
_LONGEST_NAME = 100
"""Characters of a directory's name, before the digest: a file system takes 255 bytes."""


def _names(config: type, *others: str) -> tuple[str, ...]:
    return (*(field.name for field in dataclasses.fields(config)), *others)


# The device is the machine's, not the cell's.
_FIELDS = {
    "train": tuple(name for name in _names(TrainConfig) if name != "device"),
    "quantize": _names(QuantConfig),
    "sparsify": _names(SparseConfig, "finetune_epochs", "lr", "schedule", "epochs", "order"),
    "measure": ("batches", "budget_s"),
}
_IDLE = {"quantize": quant.idle, "sparsify": sparse.idle}
_PAIRS = {"range", "weight_range"}
"""Fields whose one value is a list of numbers: they are swept by a list of lists."""


@dataclass(frozen=True)
class Cell:
    """One measurement: the settings of its network, and what is done to that: `kind` is "baseline" (nothing),
    "quantize" or "sparsify", with the options that the TOML names."""

    train: Mapping[str, Any]
    kind: str
    options: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """What the row's field `cell` holds: the cell's identity."""
        return {"train": dict(self.train)} | ({} if self.kind == BASELINE else {self.kind: dict(self.options)})

    @property
    def key(self) -> str:
        return key(self.settings)

    @property
    def network(self) -> str:
        """The name of the network's directory, which differs where any setting does."""
        hidden = "-".join(map(str, _as_list(self.train.get("hidden", TrainConfig.hidden)))) or "0"
        digest = hashlib.blake2b(key(dict(self.train)).encode(), digest_size=3).hexdigest()
        name = re.sub(r"[^a-z0-9-]", "_", f"{hidden}-seed{self.train.get('seed', TrainConfig.seed)}", flags=re.I)
        return f"{name[:_LONGEST_NAME]}-{digest}"

    @property
    def title(self) -> str:
        """What a person reads of it."""
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.options.items())])


@dataclass(frozen=True)
class Grid:
    """The cells, each network's baseline before its other cells, and the options of the measurement."""

    cells: list[Cell]
    measuring: dict[str, Any]


def key(settings: Mapping[str, Any]) -> str:
    """Settings as one text, the same however they are ordered."""
    return json.dumps(settings, sort_keys=True)


def read(path: str | Path) -> Grid:
    """The grid that the TOML file `path` describes.

    Values that do not go together are no error here: that cell fails in its turn. Raises UserError where the file
    cannot be read, names a table or an option that there is not, lists no value for one, or gives one that has no
    effect in any combination of its table.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        described = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from error
    except RecursionError:
        raise UserError(f"{path} is no TOML of ours: it is nested too deeply") from None
    if unknown := described.keys() - _FIELDS.keys():
        raise UserError(
            f"{path} has no use for {', '.join(sorted(unknown))}: the tables are [train], [[quantize]], [[sparsify]] "
            "and [measure]"
        )
    tables = {name: _tables(path, name, described.get(name, [])) for name in _FIELDS}
    if len(tables["measure"]) > 1:
        raise UserError(f"{path} has {len(tables['measure'])} tables [[measure]]: every cell is measured alike, by one")
    measuring = tables["measure"][0] if tables["measure"] else {}
    _check_measuring(path, measuring)
    swept = [(kind, _combinations(path, kind, table)) for kind in _IDLE for table in tables[kind]]
    for kind, combinations in swept:
        refuse_idle(map(_IDLE[kind], combinations), f"{path}: [{kind}] ")
    cells = {}
    for train in [each for table in tables["train"] or [{}] for each in _combinations(path, "train", table)]:
        cells[key(train)] = Cell(train, BASELINE, {})
        for kind, combinations in swept:
            for options in combinations:
                cell = Cell(train, kind, options)
                cells[cell.key] = cell
    return Grid(list(cells.values()), measuring)


def _tables(path: str | Path, name: str, value: Any) -> list[dict[str, Any]]:
    tables = value if isinstance(value, list) else [value]
    for table in tables:
        if not isinstance(table, dict):
            raise UserError(f"{path}: {name} must be a table, [{name}]")
        if unknown := table.keys() - set(_FIELDS[name]):
            raise UserError(
                f"{path}: [{name}] has no option {', '.join(sorted(unknown))}; the options are "
                f"{', '.join(_FIELDS[name])}"
            )
    return tables


def _combinations(path: str | Path, kind: str, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    values = {}
    for name, value in table.items():
        single = not isinstance(value, list) or (name in _PAIRS and not any(isinstance(each, list) for each in value))
        values[name] = [value] if single else value
        if not values[name]:
            raise UserError(f"{path}: [{kind}] lists no value of {name}")
        try:
            json.dumps(values[name], allow_nan=False)
        except (TypeError, ValueError):
            raise UserError(f"{path}: [{kind}] {name} holds a date, NaN or infinity, which no option is") from None
    if "hidden" in values:
        values["hidden"] = [_as_list(width) for width in values["hidden"]]
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def _as_list(hidden: Any) -> list[Any]:
    """The widths of the hidden layers: one number is one layer, 0 is none."""
    if isinstance(hidden, list | tuple):
        return list(hidden)
    return [] if hidden == 0 else [hidden]


def _check_measuring(path: str | Path, measuring: Mapping[str, Any]) -> None:
    batches, budget = measuring.get("batches", [1]), measuring.get("budget_s", 1.0)
    if not (isinstance(batches, list) and batches and all(type(b) is int and 0 < b < 2**31 for b in batches)):
        raise UserError(f"{path}: [measure] batches is {batches}: it must list batch sizes from 1 to 2^31 - 1")
    if not (type(budget) in (int, float) and 0 < budget < math.inf):
        raise UserError(f"{path}: [measure] budget_s is {budget}: it must be a number of seconds above 0")
