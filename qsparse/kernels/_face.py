"""What every face shares: the three array libraries, the choice of a tier, and the checks' wording."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from qsparse.kernels import _load

C_FLOATS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The dtypes that float kernels take, as C++ spells them."""


def face(sources: dict[str, tuple[str, ...]], *, in_place: tuple[str, ...] = ()):
    """Make a function over torch tensors into a face: CuPy and NumPy arrays work too, and come back as they came.

    ``sources`` maps each ``cuda/`` file of the operation to the C++ names of all kernel instances it may launch; the
    tests compile exactly these. The face gains ``sources`` and ``tier(device)``. ``in_place`` names the arguments that
    are written into, so an array that could only be read through a copy is refused there.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if args and isinstance(args[0], torch.Tensor):  # the hot path
                return function(*args, **kwargs)
            kind = _kind((*args, *kwargs.values()))
            if kind is torch.Tensor or kind is None:
                return function(*args, **kwargs)
            if in_place:
                _check_writable(signature.bind(*args, **kwargs).arguments, in_place)
            if kind is np.ndarray:
                bound = signature.bind(*args, **kwargs)
                bound.arguments.update({name: _from_numpy(name, value) for name, value in bound.arguments.items()})
                return _map(torch.Tensor.numpy, function(*bound.args, **bound.kwargs))
            return _with_cupy(function, args, kwargs)

        call.sources = sources
        call.tier = functools.partial(_tier, tuple(sources))
        return call

    return decorate


@functools.lru_cache(maxsize=256)
def _tier(sources: tuple[str, ...], device: torch.device | str) -> str:
    """The tier that runs on ``device``: ``cpu``, or the best of the face's tiers that the card's capability serves."""
    device = torch.device(device)
    if device.type == "cpu":
        return "cpu"
    major, _ = torch.cuda.get_device_capability(device)
    served = {_load.tier_of(name) for name in sources}
    if "sm90" in served and major == 9:
        return "sm90"
    return "sm80" if "sm80" in served and major >= 8 else "simt"


def _kind(values) -> type | None:
    """The array library in use; TypeError for a mixture."""
    kinds = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            kinds.add(torch.Tensor)
        elif isinstance(value, np.ndarray):
            kinds.add(np.ndarray)
        elif _is_cupy(value):
            kinds.add(type(value))
    if len(kinds) > 1:
        names = ", ".join(sorted(f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in kinds))
        raise TypeError(f"arrays of one library are needed in one call, got {names}")
    return kinds.pop() if kinds else None


def _is_cupy(value) -> bool:
    cupy = sys.modules.get("cupy")  # whoever holds a CuPy array has imported it
    return cupy is not None and isinstance(value, cupy.ndarray)


def _is_array(value) -> bool:
    return isinstance(value, np.ndarray) or _is_cupy(value)


def _map(convert: Callable, values):
    """Convert the arrays in a tuple, a list, a dict, or a single result; leave the rest alone."""
    if isinstance(values, tuple | list):
        return tuple(_map(convert, value) for value in values)
    if isinstance(values, dict):
        return {key: _map(convert, value) for key, value in values.items()}
    return convert(values) if isinstance(values, torch.Tensor) or _is_array(values) else values


def _check_writable(arguments: dict, names: tuple[str, ...]) -> None:
    for name in names:
        array = arguments.get(name)
        if _is_array(array) and not (
            array.flags.c_contiguous and getattr(array.flags, "writeable", True) and array.dtype.isnative
        ):
            raise ValueError(f"{name} is changed in place and must be contiguous, writable and of native byte order")


def _from_numpy(name: str, value):
    """An array, or each in a tuple or a list, as a tensor of the same memory where that can be; the rest as it is."""
    if isinstance(value, tuple | list):
        return tuple(_from_numpy(f"{name}[{i}]", each) for i, each in enumerate(value))
    if not isinstance(value, np.ndarray):
        return value
    check_plain(name, value)
    plain = all(stride >= 0 for stride in value.strides) and value.flags.writeable and value.dtype.isnative
    try:
        return torch.from_numpy(value if plain else np.array(value, dtype=value.dtype.newbyteorder("=")))
    except TypeError:
        raise TypeError(f"{name} is of dtype {value.dtype}, which PyTorch does not have") from None


def _with_cupy(function: Callable, args: tuple, kwargs: dict):
    """Run on CuPy's current stream, which need not be PyTorch's; the arrays are shared, not copied."""
    import cupy

    def to_torch(array):
        return torch.from_dlpack(array if all(stride >= 0 for stride in array.strides) else array.copy(order="C"))

    device = next(value.device.id for value in (*args, *kwargs.values()) if _is_cupy(value))
    pointer = cupy.cuda.get_current_stream(device).ptr
    # ExternalStream(0) would be a new stream of PyTorch's pool, not the default stream that 0 stands for
    stream = torch.cuda.ExternalStream(pointer, device) if pointer else torch.cuda.default_stream(device)
    with torch.cuda.stream(stream):
        return _map(cupy.from_dlpack, function(*_map(to_torch, args), **_map(to_torch, kwargs)))


def check_plain(name: str, array: np.ndarray) -> None:
    """Raise TypeError for an array that is more than its numbers, which is all that PyTorch would see of it.

    A MaskedArray's mask would be lost, the ``*`` of a matrix and the names of a record array; a memmap says no more
    than where its numbers are.
    """
    if type(array) not in (np.ndarray, np.memmap):
        instead = "its .filled(...)" if isinstance(array, np.ma.MaskedArray) else "numpy.asarray of it"
        raise TypeError(f"{name} must be a plain numpy.ndarray, got {kind_of(array)}; {instead} is one")


# --- checks ---------------------------------------------------------------------------------------------------------


def check_tensor(name: str, value, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> None:
    """Raise TypeError or ValueError unless ``value`` is a tensor of an allowed dtype and shape (None: any size).

    Its memory holds its values: kernels read nothing else.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be an array, of the same library as the others, got {kind_of(value)}")
    if type(value) is not torch.Tensor and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{name} must be a plain torch.Tensor, got {kind_of(value)}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense array, got {value.layout}; spmm_csr and spmm_coo take its parts")
    if value.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {str(value.dtype).removeprefix('torch.')}")
    if len(value.shape) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, value.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(value.shape)}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on the CPU or on a CUDA device, got {value.device}")
    if value.is_neg():  # z.conj().imag, say, is z.imag's memory; no dtype of a kernel has the other lazy bit, conj
        raise ValueError(
            f"{name} is a negative view, whose memory holds -{name}; {name}.resolve_neg() is a plain array"
        )
    if value._is_zerotensor():
        raise ValueError(f"{name} is a zero tensor without memory; {name}.clone() is a plain array")


def check_same_device(reference: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError when an argument lies on another device than the first."""
    for name, value in others.items():
        if value is not None and value.device != reference.device:
            raise ValueError(f"{name} is on {value.device}, but the first argument is on {reference.device}")


def pick_tier(asked: str | None, possible: Sequence[str], device: torch.device) -> str:
    """The first of the ``possible`` tiers, best first, or the one asked for; ValueError if it is not among them.

    A CPU has the tier ``cpu`` alone, whatever is possible elsewhere.
    """
    possible = ("cpu",) if device.type == "cpu" else possible
    if asked is None:
        return possible[0]
    if not isinstance(asked, str) or asked not in possible:
        where, verb = "a CPU" if device.type == "cpu" else "this GPU", "is" if len(possible) == 1 else "are"
        raise ValueError(f"tier {asked!r} is not possible for these arguments on {where}; {', '.join(possible)} {verb}")
    return asked


def check_choice(name: str, value, allowed: Iterable[str]) -> None:
    """Raise ValueError, naming what is allowed, unless ``value`` is one of these words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_dtype(name: str, value, allowed: Iterable[torch.dtype]) -> None:
    """Raise TypeError, naming what is allowed, unless ``value`` is one of these dtypes."""
    if not isinstance(value, torch.dtype) or value not in allowed:
        raise TypeError(f"{name} must be one of {', '.join(dict.fromkeys(map(str, allowed)))}, got {value!r}")


def check_number(name: str, value) -> float:
    """``value`` as a float; TypeError unless it is one number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {kind_of(value)}")
    return float(value)


def check_count(name: str, value) -> int:
    """``value`` as an int; TypeError unless it is a whole number, ValueError where it is below 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, got {kind_of(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def kind_of(value) -> str:
    """The type of ``value`` as messages name it: ``str``, ``numpy.ndarray``; a tensor may have been another's array."""
    if type(value) is torch.Tensor:
        return "an array"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def rows(value: torch.Tensor) -> torch.Tensor:
    """``value`` with plain row-major strides: itself, or a copy.

    ``is_contiguous`` ignores the strides of dimensions of size one, which matrix libraries do not; so they are
    compared one by one.
    """
    strides, step = [], 1
    for size in reversed(value.shape):
        strides.append(step)
        step *= max(size, 1)
    if value.stride() == tuple(reversed(strides)):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)


def matrix(a: torch.Tensor, k_major: bool = False) -> tuple[torch.Tensor, bool, int]:
    """The matrix, whether its rows are the contiguous direction, and the stride of the other direction.

    ``k_major`` allows only contiguous rows, by a copy if need be.
    """
    if a.stride(1) == 1 and a.stride(0) >= a.shape[1]:
        return a, True, a.stride(0)
    if not k_major and a.stride(0) == 1 and a.stride(1) >= a.shape[0]:
        return a, False, a.stride(1)
    return rows(a), True, max(a.shape[1], 1)


def new_matrix(like: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """An uninitialised (m, n) beside ``like``, of its dtype, aligned by 512 bytes; quicker than ``torch.empty``.

    What compiled PyTorch code allocates with costs the host half of ``new_empty``, but knows only the current device,
    and no filling.
    """
    here = like.get_device() == torch._C._cuda_getDevice()
    if here and _allocate and not torch.are_deterministic_algorithms_enabled():
        return _allocate((m, n), (n, 1), like.dtype)
    return like.new_empty((m, n))


_allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def cpu_slices(m: int, height: int = 1024):
    """Slices of at most ``height`` rows: on a CPU, what is computed in between then stays in cache."""
    return (slice(start, start + height) for start in range(0, m, height))
