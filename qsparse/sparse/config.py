"""What a pruning is made of. Every value is checked before a model is touched."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsparse.errors import UserError

STORED = {
    "csr": ("fp32", "fp16", "bf16", "int8"),
    "coo": ("fp32", "fp16", "bf16"),
    "2:4": ("fp16", "bf16", "fp32", "int8"),
    "bitmap": ("fp16", "bf16", "fp32"),
    "entries": ("fp16", "bf16"),
}
"""What each format stores: its own dtype first, then what may be asked for."""
AUTO = "auto"
INT8 = "int8"
FORMATS = (*STORED, AUTO)
DTYPES = tuple(dict.fromkeys(dtype for dtypes in STORED.values() for dtype in dtypes))
INT8_FORMATS = tuple(name for name in FORMATS if INT8 in STORED.get(name, DTYPES))
CRITERIA = ("bytes", "time")
"""What `auto` chooses by."""
PRUNERS = ("magnitude", "random", "wanda", "snip", "sparsegpt", "movement")
DISTRIBUTIONS = ("global", "uniform", "erk")
DYNAMIC = ("rigl", "set")
SCHEDULES = ("one-shot", "gradual", *DYNAMIC, "lottery")
ORDERS = ("prune-first", "joint")
"""Of pruning and rounding: see `int8.py`."""
_WIDEST_GROUP = 32
_LARGEST_BLOCK = 1024  # a side
_OF_2OF4 = 0.5
_OWN_DISTRIBUTION = {"wanda": "uniform", "sparsegpt": "uniform"}
"""The distribution of the paper, where it is not global."""


@dataclass(frozen=True)
class SparseConfig:
    """The settings of one pruning.

    density: fraction of the weights that stays, in (0, 1]. None with a pattern, which says it itself.
    pruner: what ranks the weights: magnitude, random, wanda, snip, sparsegpt or movement, each a file of this room.
    distribution: how many weights each layer keeps (see `distribution.py`): global, uniform or erk. None: the one of
        the pruner's paper, which is uniform for wanda and sparsegpt and global for the others.
    min_density: no layer keeps less than this fraction of its weights, in [0, density]; where it is above 0, no layer
        is left without a weight.
    pattern: "N:M", of each M consecutive weights of a row N stay (2:4, 1:4, 4:8 ...): 1 <= N < M <= 32. None: anywhere.
    permute: with a pattern, search an order of each layer's columns in which it costs less (`permutation.py`). What
        stays is N:M in that order.
    block: "RxC", whole blocks of R rows and C columns stay (1x16, 16x16 ...), each side up to 1024. Each layer then
        keeps less than one block fewer than its share. None: single weights.
    correct_bias: what pruning takes from the mean of an output of the dense network, over the images, is given back to
        its bias, layer after layer; kept where the validation split gains by it, as it does not where little stays.
    format: how the weights that stay are stored, "csr", "coo", "2:4", "bitmap", "entries" (three for tensor cores), or
        "auto", the best of these and of dense storage for each layer. "2:4" holds 2 of each 4 weights of a row, so it
        implies the pattern 2:4 where it stands alone or with a density of 0.5.
    dtype: of the values: "fp32", "fp16", "bf16" or "int8" (of what `STORED` allows). None: the format's own.
    auto: what `auto` chooses by, "bytes", or "time" on the device that the model lies on.
    auto_batch: rows of the products that are then timed.
    samples: training images that wanda, snip, sparsegpt, movement and correct_bias look at (all, where there are
        fewer).
    seed: of the choice of these images, and of random.

    Raises UserError, naming the field, when a value is out of range or two exclude each other.
    """

    density: float | None = None
    pruner: str = "magnitude"
    distribution: str | None = None
    min_density: float = 0.0
    pattern: str | None = None
    permute: bool = False
    block: str | None = None
    correct_bias: bool = False
    format: str = "csr"
    dtype: str | None = None
    auto: str = "bytes"
    auto_batch: int = 1024
    samples: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        choose("format", self.format, FORMATS)
        choose("auto", self.auto, CRITERIA)
        choose("pruner", self.pruner, PRUNERS)
        if self.dtype is not None:
            check_stored(self.format, self.dtype)
        for field, least in (("samples", 1), ("seed", 0), ("auto_batch", 1)):
            value = getattr(self, field)
            if type(value) is not int or not least <= value < 2**63:
                raise UserError(f"{field} is {value!r}: it must be a whole number, at least {least}")
        for field in ("permute", "correct_bias"):
            if type(value := getattr(self, field)) is not bool:
                raise UserError(f"{field} is {value!r}: it must be True or False")
        _check_number("min_density", self.min_density)
        if self.density is not None:
            object.__setattr__(self, "density", check_density(self.density))
        if self.format == "2:4" and self.pattern is None:
            self._take_pattern()
        if (self.density is None) == (self.pattern is None):
            raise UserError("Give one of a density (0.1 keeps a tenth of the weights) and a pattern (2:4), not both.")
        self._check_where()
        if self.pattern is not None:
            return
        if self.distribution is None:
            object.__setattr__(self, "distribution", _OWN_DISTRIBUTION.get(self.pruner, "global"))
        choose("distribution", self.distribution, DISTRIBUTIONS)
        if not 0 <= self.min_density <= self.density:
            raise UserError(f"min_density is {self.min_density}: it must be from 0 to the density, {self.density:g}")

    def _take_pattern(self) -> None:
        """The format 2:4 says the pattern itself."""
        if self.density not in (None, _OF_2OF4):
            raise UserError(
                f"2:4 stores 2 of each 4 weights, a density of 0.5, not {self.density:g}: leave the density out, "
                "give a sparser pattern such as 1:4, or choose another format."
            )
        object.__setattr__(self, "density", None)
        object.__setattr__(self, "pattern", "2:4")

    def _check_where(self) -> None:
        """Raise UserError unless pattern, permutation and blocks go together, and into the format."""
        if self.permute and (self.pattern is None or self.pruner == "sparsegpt"):
            raise UserError(
                "--permute orders the columns for an N:M pattern, by scores: give --pattern with it (2:4, say), and a "
                "pruner other than sparsegpt."
            )
        if self.permute and self.format == "2:4":
            raise UserError("2:4 stores the columns in their own order, and --permute makes another: choose csr.")
        if self.block is not None:
            parse_block(self.block)
            if self.pattern is not None:
                raise UserError("A pattern is of single weights: give no block with it.")
            if self.pruner == "sparsegpt":
                raise UserError("sparsegpt chooses single weights, column by column: choose another pruner for blocks.")
        if self.pattern is not None:
            n, m = parse_pattern(self.pattern)
            if self.format == "2:4" and not _fits_24(n, m):
                raise UserError(f"2:4 stores at most 2 of each 4 weights, and {self.pattern} may keep more.")
            if self.distribution is not None or self.min_density:
                raise UserError(f"The pattern {self.pattern} says what each layer keeps: give no distribution with it.")

    @property
    def needs_data(self) -> bool:
        """Whether this pruning looks at training images."""
        return self.correct_bias or self.pruner not in ("magnitude", "random")

    @property
    def variant(self) -> str:
        """A name that tells this pruning from others: what is not the default stands in it, such as csr-0.1-wanda."""
        parts = [INT8] if self.dtype == INT8 else []
        parts.append(self.format.replace(":", "of") + (self.auto if (self.format, self.auto) == (AUTO, "time") else ""))
        if (self.format, self.auto) == (AUTO, "time") and self.auto_batch != SparseConfig.auto_batch:
            parts[-1] += f"-batch{self.auto_batch}"
        if self.pattern != self.format:  # or it is there already
            parts.append(str(self.density) if self.pattern is None else self.pattern.replace(":", "of"))
        if self.dtype not in (None, INT8, STORED.get(self.format, (None,))[0]):
            parts.append(self.dtype)
        parts += [] if self.block is None else [self.block]
        parts += ["permuted"] if self.permute else []
        parts += ["bias"] if self.correct_bias else []
        if self.pruner != SparseConfig.pruner:
            parts.append(self.pruner)
        if self.distribution not in (None, _OWN_DISTRIBUTION.get(self.pruner, "global")):
            parts.append(self.distribution)
        if self.min_density:
            parts.append(f"min{self.min_density}")
        if self.needs_data and self.samples != SparseConfig.samples:
            parts.append(f"samples{self.samples}")
        return "-".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict."""
        return dataclasses.asdict(self)


def idle(options: Mapping[str, Any]) -> dict[str, str]:
    """Of the options given of a pruning, those that have no effect beside the others, and whose they are.

    options: as `qsparse.variants.sparsify_run` takes them.
    """
    pruner, schedule = options.get("pruner", SparseConfig.pruner), options.get("schedule", SCHEDULES[0])
    auto = options.get("format") == AUTO
    at_random = pruner == "random" or schedule in DYNAMIC
    looks = options.get("correct_bias") or schedule == "rigl" or not (at_random or pruner == SparseConfig.pruner)
    looking = "pruners that look at training images (not magnitude, not random), --correct-bias and rigl"
    owners = {
        "auto": (auto, "--format auto"),
        "auto_batch": (auto and options.get("auto") == "time", "--format auto --auto time"),
        "samples": (looks, looking),
        "seed": (looks or at_random or options.get("permute"), f"the pruner random, --permute, {looking}"),
        "lr": (options.get("epochs") or options.get("finetune_epochs"), "the training: give --finetune-epochs too"),
    }
    return {option: owner for option, (used, owner) in owners.items() if option in options and not used}


def check_density(density: float) -> float:
    """`density` as a float; raises UserError unless it is a number in (0, 1] (NaN does not)."""
    _check_number("The density", density)
    if not 0.0 < density <= 1.0:
        raise UserError(
            f"The density must be above 0 and at most 1 (1 keeps every weight), not {density:g}; "
            "for 90 % sparsity give 0.1."
        )
    return float(density)


def check_stored(format: str, dtype: str) -> None:
    """Raise UserError unless `format` stores values of `dtype`."""
    dtypes = STORED.get(format, DTYPES)
    if dtype not in dtypes:
        raise UserError(f"{format} stores {' or '.join(dtypes)}, not {dtype!r}.")


def check_order(config: SparseConfig, order: str) -> None:
    """Raise UserError unless what `config` keeps can be rounded in that `order`."""
    choose("order", order, ORDERS)
    if order == "joint" and config.dtype != INT8:
        raise UserError("The order joint is of int8: give that dtype.")
    if order == "joint" and config.pruner != "sparsegpt":
        raise UserError(f"joint is a pass of sparsegpt, which {config.pruner} is not: choose the pruner sparsegpt.")


def _check_number(what: str, value: object) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise UserError(f"{what} is {value!r}: it must be a number")


def _fits_24(n: int, m: int) -> bool:
    """Whether n of each m neighbours are at most 2 of each 4."""
    worst = (
        sum(min(n, min(start + 4, group + m) - max(start, group)) for group in range(start // m * m, start + 4, m))
        for start in range(0, math.lcm(4, m), 4)
    )
    return max(worst) <= 2


def parse_pattern(pattern: str) -> tuple[int, int]:
    """`"N:M"` as (N, M); raises UserError unless 1 <= N < M <= 32."""
    parts = re.fullmatch(r"(\d{1,3}):(\d{1,3})", str(pattern), re.ASCII)
    n, m = (int(part) for part in parts.groups()) if parts else (0, 0)
    if not 1 <= n < m <= _WIDEST_GROUP:
        raise UserError(
            f"The pattern must be N:M with 1 <= N < M <= {_WIDEST_GROUP}, such as 2:4, 1:4 or 4:8, not {pattern!r}"
        )
    return n, m


def parse_block(block: str) -> tuple[int, int]:
    """`"RxC"` as (R, C); raises UserError unless both are from 1 to 1024."""
    parts = re.fullmatch(r"(\d{1,4})x(\d{1,4})", str(block), re.ASCII)
    r, c = (int(part) for part in parts.groups()) if parts else (0, 0)
    if not (1 <= r <= _LARGEST_BLOCK and 1 <= c <= _LARGEST_BLOCK):
        raise UserError(
            f"The block must be RxC, rows by columns, each from 1 to {_LARGEST_BLOCK}, such as 1x16, not {block!r}"
        )
    return r, c


def choose(what: str, name: object, names: tuple[str, ...]) -> None:
    """Raise UserError, listing `names`, unless `name` is one of them."""
    if name not in names:
        raise UserError(f"unknown {what} {name!r}: choose one of {', '.join(names)}")
