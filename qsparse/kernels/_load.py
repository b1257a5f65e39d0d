"""Compile the CUDA sources and launch them: the only place that does either.

``compile_source`` turns one ``cuda/*.cu`` file into a cubin with NVRTC. It needs no GPU, so the tests compile every
kernel for every architecture with the very options that a run uses. ``launch`` loads the cubin through CuPy once a
device and hands the function to the driver's ``cuLaunchKernel`` (with attributes, ``cuLaunchKernelEx``).

Includes are pasted in before compiling, with ``#line`` so that errors keep their place: the cache key is then the
whole text, and an edited header is never missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Compute capabilities that each tier is compiled for in the tests; a run compiles for the card it finds.
ARCHITECTURES = {
    "simt": ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"),
    "sm80": ("sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"),
    "sm90": ("sm_90a",),
}
_OPTIONS = ("-std=c++17", "-default-device", "-lineinfo")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[ \t]*$', re.MULTILINE)


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message is its log."""


@dataclass(frozen=True)
class Cubin:
    """One compiled source file: the machine code, the mangled name of each instance, and the assembler's log."""

    code: bytes
    names: dict[str, str]
    log: str = ""


def tier_of(source: str) -> str:
    """The tier that a source file belongs to, by the end of its name: ``gemm_sm90.cu`` is ``sm90``."""
    suffix = source.removesuffix(".cu").rsplit("_", 1)[-1]
    return suffix if suffix in ARCHITECTURES else "simt"


def source_dir() -> Path:
    """Where the CUDA sources lie: inside an installed package, or the repository's ``cuda/``."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "_cuda", package.parent / "cuda"):
        if any(place.glob("*.cu")):
            return place
    raise FileNotFoundError(f"the CUDA sources are missing: neither {package / '_cuda'} nor the repository's cuda/")


def cache_root() -> Path:
    """Where things are kept that can be had again: $QSPARSE_CACHE, else qsparse in $XDG_CACHE_HOME or ~/.cache.

    A user without a home (in a container) has it in the directory of temporary files.
    """
    if place := os.environ.get("QSPARSE_CACHE"):
        return Path(place)
    if place := os.environ.get("XDG_CACHE_HOME"):
        return Path(place) / "qsparse"
    try:
        return Path.home() / ".cache" / "qsparse"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"qsparse-{os.getuid()}"


def cache_dir() -> Path:
    """Where compiled kernels are kept; it need not exist."""
    return cache_root() / "kernels"


@functools.cache
def source_text(name: str) -> str:
    """A source file with its own includes pasted in, each once."""
    seen: set[Path] = set()

    def paste(path: Path) -> str:
        seen.add(path)
        text = path.read_text()
        parts, last = [f'#line 1 "{path.name}"\n'], 0
        for match in _INCLUDE.finditer(text):
            parts.append(text[last : match.start()])
            included = (path.parent / match[1]).resolve()
            following = text.count("\n", 0, match.end()) + 2
            if included not in seen:
                parts.append(paste(included) + f'\n#line {following} "{path.name}"')
            last = match.end()
        parts.append(text[last:])
        return "".join(parts)

    return paste((source_dir() / name).resolve())


@functools.cache
def include_dirs() -> tuple[str, ...]:
    """Directories with CUDA's own headers (``cuda_fp16.h``), from PyTorch's wheels or from a toolkit."""
    found = []
    with contextlib.suppress(ImportError):
        import nvidia

        found += [str(place) for root in nvidia.__path__ for place in sorted(Path(root).glob("cu*/include"))]
        found += [str(place) for root in nvidia.__path__ for place in Path(root).glob("cuda_runtime/include")]
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            found.append(str(Path(root) / "include"))
    return tuple(place for place in found if Path(place, "cuda_fp16.h").is_file())


def compile_source(name: str, instances: tuple[str, ...], arch: str, *, verbose: bool = False) -> Cubin:
    """Compile ``cuda/NAME`` for ``arch`` (such as ``sm_90a``) with the kernel ``instances`` given as C++ names.

    ``verbose`` fills ``log`` with the assembler's report of registers, shared memory and spills. Raises
    :class:`CompileError` with the compiler's log. Needs no GPU.
    """
    from cuda.bindings import nvrtc

    def check(result):
        status, *values = result
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} for {arch}: {status.name}\n{log()}")
        return values[0] if values else None

    def log() -> str:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, buffer)
        return buffer.rstrip(b"\0").decode(errors="replace")

    _, program = nvrtc.nvrtcCreateProgram(source_text(name).encode(), name.encode(), 0, [], [])
    try:
        for instance in instances:
            check(nvrtc.nvrtcAddNameExpression(program, instance.encode()))
        options = [*_OPTIONS, f"--gpu-architecture={arch}", *(f"-I{place}" for place in include_dirs())]
        if verbose:
            options.append("--ptxas-options=-v")
        check(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
        names = {i: check(nvrtc.nvrtcGetLoweredName(program, i.encode())).decode() for i in instances}
        code = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc.nvrtcGetCUBIN(program, code))
        return Cubin(bytes(code), names, log())
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _cached_cubin(name: str, instance: str, arch: str) -> tuple[bytes, str]:
    """Machine code and mangled name of one instance, compiled now or found on disk.

    The file is written beside its place and renamed, so that the ranks of one job may all compile at once and none
    ever reads half a file.
    """
    from cuda.bindings import nvrtc

    key = "\0".join((source_text(name), instance, arch, *_OPTIONS, str(nvrtc.nvrtcVersion()[1:])))
    path = cache_dir() / f"{Path(name).stem}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    with contextlib.suppress(OSError, ValueError):
        digest, mangled, code = path.read_bytes().split(b"\n", 2)
        if digest.decode() == hashlib.sha256(code).hexdigest():  # else a disk gave up in between: compile again
            return code, mangled.decode()
    if sys.stderr.isatty():
        print(f"qsparse: compiling {name} for {arch} (once; kept in {path.parent})", file=sys.stderr)
    cubin = compile_source(name, (instance,), arch)
    with contextlib.suppress(OSError):  # a read-only home costs a compilation a process, nothing more
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                digest = hashlib.sha256(cubin.code).hexdigest()
                file.write(f"{digest}\n{cubin.names[instance]}\n".encode() + cubin.code)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    return cubin.code, cubin.names[instance]


@functools.cache
def _architecture(device: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


Key = tuple[int, int, int, int, bool]  # grid, block, stream, blocks of a cluster, cooperative


class _Arguments:
    """A kernel's arguments packed one after another, and the list of their addresses that the driver asks for."""

    def __init__(self, layout: struct.Struct, offsets: list[int]):
        self._layout = layout
        self._buffer = ctypes.create_string_buffer(max(layout.size, 1))
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)

    def pack(self, arguments: tuple) -> None:
        self._layout.pack_into(self._buffer, 0, *arguments)


class _Function:
    """A kernel loaded on one device, with a reusable room for arguments laid out as the driver wants them."""

    def __init__(self, device: int, name: str, instance: str, formats: str, shared: int):
        import cupy
        from cuda.bindings import driver

        code, mangled = _cached_cubin(name, instance, _architecture(device))
        with cupy.cuda.Device(device), tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            self._module = cupy.RawModule(path=file.name)  # owns the loaded code
            raw = self._module.get_function(mangled)
            if shared > 40 * 1024:  # beyond 48 KB, what the kernel itself declares included, it must be asked for
                raw.max_dynamic_shared_size_bytes = shared
            self._pointer = raw.kernel.ptr
            self._handle = driver.CUfunction(self._pointer)
        self._driver, self._device = driver, device
        self._plainly, self._refusal = cupy.cuda.driver.launchKernel, cupy.cuda.driver.CUDADriverError
        self._layout = struct.Struct("@" + formats)
        letters = re.findall(r"\d*[a-zA-Z]", formats)
        # "0P" adds no bytes but rounds up to P's alignment: the offset at which the next parameter is packed
        self._offsets = [struct.calcsize(f"@{''.join(letters[:i])}0{letters[i][-1]}") for i in range(len(letters))]
        self._room = self.arguments()
        self._configs: dict[tuple, object] = {}
        self._lock = threading.Lock()
        self._shared = shared
        # Whether it may start before the kernel that it follows has ended (common/dependent.cuh).
        waits = "wait_for_predecessor();" in source_text(name)
        self._waits = waits and int(re.sub(r"\D", "", _architecture(device))) >= 90

    def arguments(self) -> _Arguments:
        return _Arguments(self._layout, self._offsets)

    def __call__(self, key: Key, arguments: tuple) -> None:
        with self._lock:  # the driver copies the arguments before it returns
            self._room.pack(arguments)
            self.launch(key, self._room)

    def launch(self, key: Key, packed: _Arguments) -> None:
        try:
            self._launch(key, packed.address)
        except self._refusal as refusal:
            if refusal.status != int(self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT):
                raise RuntimeError(f"the kernel launch failed: {refusal}") from None
            _bind_context(self._device)  # a thread's first use of the GPU
            self._launch(key, packed.address)

    def _launch(self, key: Key, address: int) -> None:
        grid, block, stream, cluster, cooperative = key
        follows = self._waits and getattr(_following, "on", False)
        if cluster == 1 and not (cooperative or follows):  # cheaper for the host than a launch with attributes
            self._plainly(self._pointer, grid, 1, 1, block, 1, 1, self._shared, stream, address, 0)
            return
        config = self._configs.get((*key, follows)) or self._config(key, follows)
        (status,) = self._driver.cuLaunchKernelEx(config, self._handle, address, 0)
        if status:
            raise self._refusal(int(status))

    def fits(self, key: Key) -> bool:
        try:
            config = self._configs.get((*key, False)) or self._config(key)
        except RuntimeError:
            return False
        _bind_context(self._device)
        status, clusters = self._driver.cuOccupancyMaxActiveClusters(self._handle, config)
        grid, _, _, cluster, cooperative = key
        return not status and clusters >= (grid // cluster if cooperative else 1)

    def _config(self, key: Key, follows: bool = False):
        grid, block, stream, cluster, cooperative = key
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = self._shared
        config.hStream = stream
        config.attrs = self._attributes(cluster, cooperative, follows)
        config.numAttrs = len(config.attrs)
        if len(self._configs) > 4096:
            self._configs.clear()
        self._configs[(*key, follows)] = config
        return config

    def _attributes(self, cluster: int, cooperative: bool, follows: bool) -> list:
        driver, found = self._driver, []
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            found.append(attribute)
        if cluster > 8:  # what every card with clusters has
            allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            (status,) = driver.cuFuncSetAttribute(self._handle, allowed, 1)
            if status:
                raise RuntimeError(f"clusters of {cluster} blocks are not possible: {status.name}")
        if cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            found.append(attribute)
        if follows:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            found.append(attribute)
        return found


def _bind_context(device: int) -> None:
    """Make the device's context current in this thread, whose first CUDA call this may be (a backward pass's)."""
    import cupy

    cupy.cuda.Device(device).use()
    cupy.cuda.runtime.free(0)


@functools.cache
def multiprocessors(device: int) -> tuple[str, int]:
    """The full name of a GPU and its number of multiprocessors."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count


@functools.lru_cache(maxsize=1024)
def tensor_map(
    address: int,
    dtype,
    rows: int,
    columns: int,
    stride: int,
    box: tuple[int, int],
    as_it_is: bool = False,
    swizzle: int = 128,
) -> bytes:
    """A TMA descriptor of a row-major matrix for a ``__grid_constant__`` parameter (``128s``).

    ``stride`` is the distance between rows in elements; ``box`` is (rows, columns) of one load or store, the columns
    spanning ``swizzle`` bytes at most: 128, 64, 32, or 0 for rows in order. The address, the stride and the columns
    that loads begin at must be multiples of 16 bytes. What a load reads beyond the matrix is zero. float32 is rounded
    to tf32 on the way, but not ``as_it_is``.
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    full, tf32 = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
    kind = {
        "float32": full if as_it_is else tf32,
        "int32": kinds.CU_TENSOR_MAP_DATA_TYPE_INT32,
        "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "int8": kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,  # bytes: the copy engine only moves them
        "uint8": kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "float8_e4m3fn": kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[str(dtype).removeprefix("torch.")]
    sizes, strides = (columns, rows), (stride * dtype.itemsize,)
    what = f"{rows} x {columns}, stride {stride}, box {box}"
    return _encoded(kind, address, sizes, strides, (box[1], box[0]), what, swizzle)


@functools.lru_cache(maxsize=1024)
def pairs_map(address: int, rows: int, columns: int, groups: int) -> bytes:
    """A TMA descriptor of a row-major int8 matrix whose boxes interleave rows, for a ``__grid_constant__`` parameter.

    A box is 128 columns of ``groups`` times 16 rows, which arrive as 0, 2, ..., 14, 1, 3, ..., 15 of each 16, 128-byte
    swizzled. ``rows`` and ``columns`` are multiples of 16, the address too.
    """
    from cuda.bindings import driver

    sizes, strides = (columns, 8, 2, rows // 16), (2 * columns, columns, 16 * columns)
    bytes_ = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    return _encoded(bytes_, address, sizes, strides, (128, 8, 2, groups), f"pairs of rows of {rows} x {columns}")


def _encoded(kind, address: int, sizes: tuple, strides: tuple, box: tuple, what: str, swizzle: int = 128) -> bytes:
    """``sizes`` and ``box`` from the contiguous dimension outwards, ``strides`` in bytes of all but that one."""
    from cuda.bindings import driver

    status, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1) for _ in sizes],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise RuntimeError(f"no tensor map for {what}: {status.name}")
    return ctypes.string_at(encoded.getPtr(), 128)


@functools.cache
def _function(device: int, name: str, instance: str, formats: str, shared: int) -> _Function:
    return _Function(device, name, instance, formats, shared)


_following = threading.local()


@contextlib.contextmanager
def following():
    """Kernels launched inside may start before the one launched last has ended, if they wait for it themselves.

    What they follow must have been launched on the same stream by this module, or in PyTorch's way.
    """
    before, _following.on = getattr(_following, "on", False), True
    try:
        yield
    finally:
        _following.on = before


_seen: list[str] | None = None  # where `launched` notes kernels, while it does


@contextlib.contextmanager
def launched():
    """A list that every kernel launched inside is added to, as ``SOURCE:INSTANCE``: what ran, not what should have."""
    global _seen
    before, _seen = _seen, []
    try:
        yield _seen
    finally:
        _seen = before


class Launch:
    """A kernel with its grid on one device, ready for arguments: what a repeated call keeps."""

    def __init__(
        self, device: int, name: str, instance: str, formats: str, grid: int, block: int, shared: int, *attributes
    ):
        import torch

        self._function = _function(device, name, instance, formats, shared)
        self._label = f"{Path(name).name}:{instance}"
        self._device, self._grid, self._block, self._attributes = device, grid, block, attributes
        self._stream, self._current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
        self._on = functools.partial(torch.cuda.device, device)

    def fits(self) -> bool:
        """Whether the device can run the launch: a cluster may be larger than what its multiprocessors form."""
        with self._on():
            return self._function.fits((self._grid, self._block, 0, *self._attributes))

    def __call__(self, arguments: tuple) -> None:
        self._run(self._function, arguments)

    def bind(self, arguments: tuple) -> Callable[[], None]:
        """What launches with these arguments, which are packed once and for all."""
        packed = self._function.arguments()
        packed.pack(arguments)
        return functools.partial(self._run, self._function.launch, packed)

    def _run(self, launch: Callable, arguments: tuple | _Arguments) -> None:
        if _seen is not None:
            _seen.append(self._label)
        key = (self._grid, self._block, self._stream(self._device), *self._attributes)
        if self._device == self._current_device():
            launch(key, arguments)
        else:
            with self._on():
                launch(key, arguments)


@functools.lru_cache(maxsize=4096)
def prepare(
    device: int,
    name: str,
    instance: str,
    formats: str,
    grid: int,
    block: int,
    shared: int = 0,
    *,
    cluster: int = 1,
    cooperative: bool = False,
) -> Launch | None:
    """What :func:`launch` calls, for those who launch the same kernel again and again; None for an empty grid.

    ``cluster`` blocks form a cluster (where the kernel does not say so itself); a ``cooperative`` launch runs all its
    blocks at once or fails.
    """
    return Launch(device, name, instance, formats, grid, block, shared, cluster, cooperative) if grid else None


def launch(
    device, name: str, instance: str, formats: str, arguments: tuple, *, grid: int, block: int, shared: int = 0
) -> None:
    """Launch one kernel instance on ``device`` (a ``torch.device``) and PyTorch's current stream there.

    ``formats`` has one ``struct`` letter a kernel parameter (``P`` pointer, ``q`` int64, ``i`` int32, ``f`` float);
    ``grid`` and ``block`` are one-dimensional, ``shared`` is dynamic shared memory in bytes. Nothing is launched for
    an empty grid.
    """
    prepared = prepare(device.index, name, instance, formats, grid, block, shared)
    if prepared:
        prepared(arguments)
