"""The product with sparse weights, by whichever way was measured to be the fastest: CSR, either kind of tiles, dense.

The table, ``product.json``, is written by ``qsparse bench spmm --tune``; without it every product takes CSR. It is a
list of entries {gpu, dtype, shape ([M, N, K]), density, us ({way: microseconds}), date, commit, torch, cuda}; the entry
nearest to a product, by the ratios of its three sizes and of its density, decides. Another card than the measured ones
takes the H200's entries.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qsparse import kernels
from qsparse.sparse.bitmap_tiles import csr_to_bitmap_tiles
from qsparse.sparse.entry_tiles import csr_to_entry_tiles
from qsparse.sparse.formats import from_csr, to_csr

TABLE = Path(__file__).with_name("product.json")
WAYS = ("csr", "bitmap", "entries", "dense")
_BASE_GPU = "NVIDIA H200"
_FIELDS = {"gpu": str, "dtype": str, "shape": list, "density": float, "us": dict}


@dataclass(frozen=True)
class Entry:
    """A measured product: which way took how many microseconds."""

    gpu: str
    dtype: str
    shape: tuple[int, int, int]
    density: float
    us: dict[str, float]

    def __post_init__(self) -> None:
        """Raise ValueError for what no measurement gives."""
        sizes = len(self.shape) == 3 and all(isinstance(size, int) and size > 0 for size in self.shape)
        times = self.us and set(self.us) <= set(WAYS) and all(0 < each < math.inf for each in self.us.values())
        if not (sizes and times and 0 < self.density <= 1 and self.dtype in ("float32", "float16", "bfloat16")):
            raise ValueError(f"{TABLE.name} has an entry that is none: {self}")

    def distance(self, shape: tuple[int, int, int], density: float) -> float:
        """How far a product is from this one: 1 for a factor of two in one of the four."""
        pairs = zip((*self.shape, self.density), (*shape, density), strict=True)
        return math.dist(*zip(*((math.log2(a), math.log2(b)) for a, b in pairs), strict=True))


@functools.cache
def table(path: Path = TABLE) -> tuple[Entry, ...]:
    """The entries of a table, each checked as it is read; ValueError names a bad one. No file: none."""
    if not path.exists():
        return ()
    entries = []
    for row in json.loads(path.read_text()):
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(row.get(name), kind)]
        if wrong:
            raise ValueError(f"{path.name} has an entry without {wrong[0]}: {row}")
        entries.append(Entry(**{name: row[name] for name in _FIELDS} | {"shape": tuple(row["shape"])}))
    return tuple(entries)


@functools.lru_cache(maxsize=4096)
def fastest(shape: tuple[int, int, int], density: float, dtype: torch.dtype, gpu: str) -> str:
    """The way that the table's nearest entry names for a product of ``shape`` (M, N, K): one of `WAYS`.

    bfloat16 may go by float16's entries. Without any entry, and where nothing is multiplied, ``csr``.
    """
    name = str(dtype).removeprefix("torch.")
    if min(shape) < 1 or density <= 0:
        return "csr"
    for key in ((gpu, name), (gpu, "float16"), (_BASE_GPU, name), (_BASE_GPU, "float16")):
        if key[1] != name and dtype != torch.bfloat16:
            continue
        near = [entry for entry in table() if (entry.gpu, entry.dtype) == key]
        if near:
            us = min(near, key=lambda entry: entry.distance(shape, density)).us
            return min(us, key=lambda way: us[way])
    return "csr"


class SparseWeights:
    """W (N, K), stored in CSR; what another way needs of it is made when it is first taken, and kept."""

    def __init__(self, values: Tensor, col_indices: Tensor, row_offsets: Tensor, shape: tuple[int, int]) -> None:
        """CSR as `kernels.spmm_csr` takes it, not copied. Raises as `kernels.spmm_csr.plan` does."""
        self._plan = kernels.spmm_csr.plan(col_indices, row_offsets, shape=shape)
        self.csr, self.shape = (values, col_indices, row_offsets), (int(shape[0]), int(shape[1]))

    @classmethod
    def from_dense(cls, w: Tensor, mask: Tensor) -> SparseWeights:
        """The entries of `w` (N, K) where `mask` (N, K) bool is True; raises as `to_csr`."""
        return cls(*to_csr(w, mask), w.shape)

    @property
    def density(self) -> float:
        """Stored entries by weights, 0 for none of either."""
        return self.csr[0].numel() / max(math.prod(self.shape), 1)

    @functools.cached_property
    def tiles(self) -> tuple[Tensor, Tensor, Tensor]:
        """The bitmap tiles: about 1/8 byte a weight beside the values."""
        return csr_to_bitmap_tiles(*self.csr, self.shape)

    @functools.cached_property
    def entries(self) -> tuple[Tensor, Tensor]:
        """The tiles of entries, of values of 16 bits: 4 bytes an entry."""
        return csr_to_entry_tiles(*self.csr, self.shape)

    @functools.cached_property
    def dense(self) -> Tensor:
        """The dense matrix (N, K), zeros and all."""
        return from_csr(*self.csr, self.shape)

    def way(self, m: int) -> str:
        """Which of `WAYS` `spmm` takes for M rows of x, on the device where W lies; a CPU takes ``csr``."""
        values = self.csr[0]
        if not values.is_cuda:
            return "csr"
        return fastest((m, *self.shape), self.density, values.dtype, torch.cuda.get_device_name(values.device))


def spmm(x: Tensor, w: SparseWeights, bias: Tensor | None = None, *, relu: bool = False, way: str | None = None):
    """``y = act(x @ W.T + bias)``, and the way it was computed.

    Parameters
    ----------
    x : (M, K), dtype of W's values, any strides
    w : W (N, K)
    bias : (N,), dtype of ``x``, optional
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    way : str, optional
        One of `WAYS`: take this one, whatever the table says.

    Returns
    -------
    (y, way) : y (M, N), dtype of ``x``, row-major, and one of `WAYS`.

    ``csr`` never touches x where nothing is stored; the others multiply zeros there, so NaN and Inf in x reach all
    of their row. ``entries`` takes values of 16 bits. Raises as the kernels do, TypeError for an x or a w that is none,
    and ValueError for a way that is none.
    """
    if not isinstance(w, SparseWeights):
        raise TypeError(f"w must be SparseWeights, as SparseWeights.from_dense makes them, not {type(w).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, not {type(x).__name__}")
    if x.dtype != w.csr[0].dtype:  # entries are bits alone, which would be taken for others
        raise TypeError(f"x must be {w.csr[0].dtype}, as the values of W are, not {x.dtype}")
    way = w.way(x.shape[0]) if way is None else way
    if way == "csr":
        return kernels.spmm_csr(x, *w.csr, bias, shape=w.shape, relu=relu, check=False, plan=w._plan), way
    if way == "bitmap":
        return kernels.spmm_bitmap(x, *w.tiles, bias, shape=w.shape, relu=relu, check=False), way
    if way == "entries":
        return kernels.spmm_entries(x, *w.entries, bias, shape=w.shape, relu=relu, check=False), way
    if way == "dense":
        return kernels.gemm(x, w.dense, bias, relu=relu), way
    raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
