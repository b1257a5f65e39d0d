"""What the layers share."""

from __future__ import annotations

import contextlib
import numbers
from typing import Any, Self

import torch
from torch.utils.hooks import RemovableHandle

from qsparse.kernels._load import following

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def check_activation(activation: str | None) -> None:
    if activation not in (None, "relu"):
        raise ValueError(f'activation must be None or "relu", got {activation!r}')


def check_sizes(**sizes: object) -> None:
    """Raise TypeError or ValueError, naming the argument, unless all are whole numbers from 0 on."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):  # NumPy's among them
            raise TypeError(f"{name} must be an int, not {type(size).__name__}")
        if size < 0:
            raise ValueError(f"{name} must be at least 0, got {size}")


def check_tensors(**arrays: object) -> None:
    """Raise TypeError, naming the argument, unless all are tensors."""
    for name, array in arrays.items():
        if not isinstance(array, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(array).__name__}")


def chained() -> contextlib.AbstractContextManager[None]:
    """A layer called inside may be in place on a GPU before the one whose output it takes, called before, has ended.

    It may have read its weights by then: they must be there before the layer before is called.
    """
    return contextlib.nullcontext() if torch.compiler.is_compiling() else following()


def by_rows(x: torch.Tensor, function) -> torch.Tensor:
    """Apply a function of matrices to ``x (..., K)`` by flattening the leading dimensions.

    A negative view (``z.conj().imag``), which kernels refuse, is copied.
    """
    x = x.resolve_neg()
    if x.dim() == 2:
        return function(x)
    y = function(x.reshape(x.shape[:-1].numel(), x.shape[-1]))  # -1 would be ambiguous in an empty batch
    return y.reshape(*x.shape[:-1], y.shape[-1])


def stored_bytes(module: torch.nn.Module) -> int:
    """Bytes of all that a module stores: values, indices, scales, biases."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def describe(layer: torch.nn.Module, dtype: torch.dtype | None = None) -> dict:
    """What every layer says of itself, and the dtype of its numbers where it may be another."""
    common = {
        "kind": type(layer).__name__,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.bias is not None,
        "activation": layer.activation,
    }
    return common if dtype is None else {**common, "dtype": str(dtype).removeprefix("torch.")}


def options_of(description: dict) -> dict:
    """The arguments of a layer's constructor of what it said of itself, but for its kind."""
    return description | ({"dtype": DTYPES[description["dtype"]]} if "dtype" in description else {})


class InferenceLinear(torch.nn.Module):
    """A layer of ``buffers`` and a bias, empty at first; a subclass has ``_rows``, its product for ``x (M, K)``."""

    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        activation: str | None,
        dtype: torch.dtype,
        **buffers: torch.Tensor,
    ):
        check_activation(activation)
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(x, self._rows)

    def describe(self) -> dict:
        return describe(self)

    @classmethod
    def from_description(cls, options: dict) -> Self:
        return cls(**options_of(options))


# Functions with names, so that a layer can be pickled.
def _before_load(layer: SparseStorage, *others: Any) -> None:
    *_, errors = others
    layer._errors = errors, len(errors)
    layer._before_load()


def _loaded(layer: SparseStorage, _: object) -> None:
    layer._loaded()


def _refuse(layer: SparseStorage, _: object) -> None:
    raise RuntimeError(f"what was loaded into this {type(layer).__name__} does not fit together: load it again, whole")


class SparseStorage(InferenceLinear):
    """A layer that stores some of its weights, in arrays that ``check`` looks through whenever they are set.

    After a ``load_state_dict`` that was refused and left arrays that do not fit together, a call raises RuntimeError.
    """

    _errors: tuple[list[str], int] = ([], 0)  # what PyTorch says of a load, and how much before this layer's turn
    _refusal: RemovableHandle | None = None

    def __init__(self, *options, **buffers: torch.Tensor):
        super().__init__(*options, **buffers)
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_loaded)

    def _before_load(self) -> None:
        """What ``load_state_dict`` does before it sets the arrays."""

    def _after_load(self) -> None:
        self.check()

    def _loaded(self) -> None:
        (errors, before), self._errors = self._errors, ([], 0)
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None
        try:
            self._settle()
            self._after_load()
        except Exception:
            self._refusal = self.register_forward_pre_hook(_refuse)
            if len(errors) == before:  # else PyTorch will say which arrays it did not take
                raise

    def _settle(self) -> None:
        """Copy what does not lie as the kernels take it, so that no call copies: see ``chained``."""
        for name, array in self._buffers.items():
            if array is not None and not (array.is_contiguous() and array.data_ptr() % 16 == 0):
                self._buffers[name] = array.clone(memory_format=torch.contiguous_format)

    def _holding(self, **arrays: torch.Tensor | None) -> Self:
        """This layer with these very arrays, checked."""
        bias = arrays.get("bias")
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias must be of shape ({self.out_features},), got {tuple(bias.shape)}")
        for name, array in arrays.items():
            setattr(self, name, array)
        self._settle()
        self.check()
        return self
