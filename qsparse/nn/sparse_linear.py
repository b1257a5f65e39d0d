"""The sparse layer: weights stored and multiplied in CSR or COO."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.nn._common import SparseStorage, by_rows, check_sizes, check_tensors, describe
from qsparse.nn._sparse_pattern import Pattern

_INDEX_NAMES = {"csr": ("col_indices", "row_offsets"), "coo": ("rows", "cols")}


class SparseLinear(SparseStorage):
    """``y = act(x @ W.T + bias)`` with ``W (out_features, in_features)`` sparse; its pattern is fixed.

    Buffers are named as ``kernels.spmm_csr`` and ``kernels.spmm_coo`` name their arguments: ``values`` and
    ``col_indices``, ``row_offsets`` (CSR) or ``rows``, ``cols`` (COO, in ascending order of rows). Indices are checked
    when they are set by ``from_csr``, ``from_coo`` or ``load_state_dict``, and not again at each call.

    ``make_trainable`` turns ``values`` and ``bias`` into parameters. Gradients are computed where an entry is stored
    and nowhere else: no dense gradient is ever made. What the kernels find out about the pattern is kept between calls,
    and over a ``load_state_dict`` that copies the same pattern into the layer: a captured CUDA graph then computes with
    the new values. Another pattern, or ``assign=True``, lets go of what the graph reads: capture it again.
    """

    values: torch.Tensor
    col_indices: torch.Tensor
    row_offsets: torch.Tensor
    rows: torch.Tensor
    cols: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        nnz: int,
        format: str = "csr",
        bias: bool = True,
        activation: str | None = None,
        *,
        dtype=torch.float32,
    ):
        if not isinstance(format, str) or format not in _INDEX_NAMES:
            raise ValueError(f"format must be one of {', '.join(_INDEX_NAMES)}, got {format!r}")
        check_sizes(in_features=in_features, out_features=out_features, nnz=nnz)
        buffers = {"values": torch.zeros(nnz, dtype=dtype)}
        for name in _INDEX_NAMES[format]:
            buffers[name] = torch.zeros(out_features + 1 if name == "row_offsets" else nnz, dtype=torch.int32)
        super().__init__(in_features, out_features, bias, activation, dtype, **buffers)
        self.format = format
        self._pattern: Pattern | None = None  # of the indices that were checked last
        self._before: tuple[torch.Tensor, ...] = ()  # those indices, while others may be loaded

    @classmethod
    def from_csr(cls, values, col_indices, row_offsets, *, shape, bias=None, activation=None) -> SparseLinear:
        """From the arguments of ``kernels.spmm_csr``, which are kept, not copied; ValueError for a bad index."""
        check_tensors(values=values, col_indices=col_indices, row_offsets=row_offsets)
        return cls._from("csr", shape, bias, activation, values, (col_indices, row_offsets))

    @classmethod
    def from_coo(cls, values, rows, cols, *, shape, bias=None, activation=None) -> SparseLinear:
        """From the arguments of ``kernels.spmm_coo``, in any order; ValueError for a bad index."""
        check_tensors(values=values, rows=rows, cols=cols)
        rows, order = torch.sort(rows, stable=True)
        return cls._from("coo", shape, bias, activation, values[order], (rows, cols[order]))

    @classmethod
    def _from(cls, format, shape, bias, activation, values, indices) -> SparseLinear:
        n, k = shape
        layer = cls(k, n, values.numel(), format, bias is not None, activation, dtype=values.dtype)
        return layer._holding(values=values, bias=bias, **dict(zip(_INDEX_NAMES[format], indices, strict=True)))

    def check(self) -> None:
        """Raise ValueError unless every index lies inside W (and COO rows ascend)."""
        self._pattern = None
        if min(self.in_features, self.out_features) < 0:
            raise ValueError(f"in_features and out_features cannot be {self.in_features} and {self.out_features}")
        if self.format == "coo" and bool((self.rows[1:] < self.rows[:-1]).any()):
            raise ValueError("rows must ascend")
        self._spmm(self.values.new_zeros(0, self.in_features), check=True)  # the face's own checks; no row, no work

    def _before_load(self) -> None:
        self._before = () if self._pattern is None else tuple(array.clone() for array in self._indices())

    def _after_load(self) -> None:
        pattern, before, self._before = self._pattern, self._before, ()
        self.check()
        if pattern and before and pattern.of(self._indices()) and all(map(_same, before, self._indices())):
            self._pattern = pattern

    def _indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = _INDEX_NAMES[self.format]
        return getattr(self, first), getattr(self, second)

    @property
    def nnz(self) -> int:
        return self.values.numel()

    def entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers that are stored, float32 (nnz,), and the column of each."""
        return self._reals(), self.col_indices if self.format == "csr" else self.cols

    def _reals(self) -> torch.Tensor:
        return self.values.detach().float()

    def make_trainable(self) -> SparseLinear:
        """Make ``values`` and ``bias`` parameters, in place; returns the layer."""
        for name in ("values", "bias"):
            if name in self._buffers:
                buffer = self._buffers.pop(name)
                self.register_parameter(name, None if buffer is None else torch.nn.Parameter(buffer))
        return self

    def pattern(self) -> Pattern | None:
        """What is known of where the entries are; None while a CUDA graph captures and nothing is known yet.

        Finding out waits for the GPU, so call the layer once before it is captured.
        """
        indices = self._indices()
        if self._pattern is None or not self._pattern.of(indices):
            if indices[0].is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            self._pattern = Pattern(self.format, indices, (self.out_features, self.in_features))
        return self._pattern

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = (x, self.values, self.bias)
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs):
            return by_rows(x, lambda rows: _SparseFunction.apply(rows, self.values, self.bias, self))
        return by_rows(x, lambda rows: self._spmm(rows, check=False))

    def _spmm(self, x: torch.Tensor, check: bool) -> torch.Tensor:
        options = {
            "bias": self.bias,
            "shape": (self.out_features, self.in_features),
            "relu": self.activation == "relu",
            "check": check,
        }
        planned = x.is_cuda and not check and not torch.compiler.is_compiling()
        if self.format == "csr":
            pattern = self.pattern() if planned else None
            plan = None if pattern is None else pattern.plan
            return kernels.spmm_csr(x, self.values, self.col_indices, self.row_offsets, plan=plan, **options)
        if planned and (pattern := self.pattern()) is not None:
            return kernels.spmm_csr(x, self.values, pattern.cols, pattern.offsets, plan=pattern.plan, **options)
        return kernels.spmm_coo(x, self.values, self.rows, self.cols, ordered=True, **options)

    def cpu_kernel(self) -> str:
        return f"spmm_{self.format}:cpu"

    def describe(self) -> dict:
        return {**describe(self, self.values.dtype), "nnz": self.nnz, "format": self.format}


def _same(indices: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.equal(indices.int(), others.int())  # not every device compares uint16


class _SparseFunction(torch.autograd.Function):
    """Forward and backward in our kernels, the backward pass at W's entries only."""

    @staticmethod
    def forward(ctx, x, values, bias, layer):
        y = layer._spmm(x, check=False)
        ctx.save_for_backward(x, values, y if layer.activation == "relu" else None)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx, dy):
        x, values, y = ctx.saved_tensors
        pattern = ctx.layer.pattern()
        if pattern is None:
            raise RuntimeError("call a SparseLinear once before its backward pass is captured in a CUDA graph")
        dz, dbias = kernels.bias_relu_grad(dy.resolve_neg(), y)  # a complex loss may give a negative view
        needs_x, needs_values, needs_bias, _ = ctx.needs_input_grad
        dx = pattern.times(dz, values) if needs_x else None
        dvalues = pattern.sample(dz, x) if needs_values else None
        return dx, dvalues, dbias if needs_bias else None, None
