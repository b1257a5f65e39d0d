"""How long a product should take by a configuration that was not timed at its shape: a line through other shapes.

    us = fixed + rounds * (steps * step + out_bytes * (store + ragged * ragged_store)) + megabytes * megabyte

A configuration has clusters of blocks, each with a tile of y, and K divided by ``split``. The five constants of each
are fitted to what it took at the shapes of the tuning table. A step is 128 bytes of K, which cost about the same in any
dtype.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Protocol

STEP = 128  # bytes of K that a pipeline stage holds of each row


class Tiles(Protocol):
    """What a configuration says of its work."""

    split: int

    @property
    def cluster(self) -> int:
        """Blocks that belong together."""

    def tiles(self, m: int, n: int) -> int:
        """Tiles of whole clusters."""


@dataclass(frozen=True)
class Costs:
    """Of one configuration, in microseconds: the constants of the line, in the order of ``terms``."""

    fixed: float
    step: float
    store: float
    ragged_store: float
    megabyte: float

    def us(self, config: Tiles, m: int, n: int, row_bytes: int, out_bytes: int, multiprocessors: int) -> float:
        """What the product should take; the arguments are those of ``terms``."""
        found = terms(config, m, n, row_bytes, out_bytes, multiprocessors)
        return sum(cost * count for cost, count in zip(astuple(self), found, strict=True))


def terms(config: Tiles, m: int, n: int, row_bytes: int, out_bytes: int, multiprocessors: int) -> tuple[float, ...]:
    """How often each of the constants counts.

    ``row_bytes`` are those of a row of x (M, K) and of w (N, K), ``out_bytes`` those of an element of y (M, N). A round
    is a tile of those that the busiest blocks have. Ragged are rows of y that are no whole pieces of 16 bytes, as the
    copy engine takes them. Megabytes are what has to be read and written at least.
    """
    rounds = -(-config.tiles(m, n) // (multiprocessors // config.cluster))
    steps = -(-row_bytes // (STEP * config.split))
    ragged = n * out_bytes % 16 > 0
    megabytes = ((m + n) * row_bytes + m * n * out_bytes) / 1e6
    return 1, rounds * steps, rounds * out_bytes, rounds * out_bytes * ragged, megabytes
