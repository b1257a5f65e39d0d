"""What all faces promise: three array libraries, the caller's stream, nothing copied, and sentences for mistakes."""

from __future__ import annotations

import inspect
import math
import warnings

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _face
from qsparse.kernels._face import face, rows
from qsparse.sparse.bitmap_tiles import to_bitmap_tiles
from qsparse.sparse.entry_tiles import to_entry_tiles

M, N, K = 70, 66, 40


def _csr(device):
    offsets = torch.arange(0, 3 * N + 1, 3, dtype=torch.int32, device=device)
    return torch.arange(3 * N, dtype=torch.int32, device=device) % K, offsets


def _two_of_four(w):
    """``w`` (N, K) with the first and the last of every four columns kept, K being whole groups of eight."""
    n, k = w.shape
    values = w.reshape(n, k // 4, 4)[:, :, ::3].reshape(n, k // 2)
    return values, torch.full((n, k // 8), 0b1100_1100, dtype=torch.uint8, device=w.device)


def _bitmap_tiles(w):
    return to_bitmap_tiles(w, w > 0)


def _entry_tiles(w):
    return to_entry_tiles(w.half(), w > 0)


def _calls(normal, integers, device) -> dict[str, tuple[tuple, dict]]:
    """Arguments of one call of each face: arrays by position, the rest by name."""

    def draw(*shape):
        return normal(*shape, device=device)

    def draw_int8(*shape):
        return integers(-128, 128, *shape, device=device)

    def draw_e4m3(*shape):
        return normal(*shape).to(torch.float8_e4m3fn).view(torch.uint8).to(device)  # NumPy and CuPy have the bits alone

    labels = integers(0, N, M, dtype=torch.int64, device=device)
    images, weights = integers(0, 256, M, 784, dtype=torch.uint8, device=device), draw(784 * 20 + 20 + 210) / 20
    rows_of_w, cols = (integers(0, size, 300, dtype=torch.int32, device=device) for size in (N, K))
    return {
        "bias_relu_grad": ((draw(M, N), draw(M, N)), {}),
        "gemm": ((draw(M, K), draw(N, K), draw(N)), {"relu": True}),
        "gemm_24": ((draw(M, K), *_two_of_four(draw(N, K)), draw(N)), {"relu": True}),
        "gemm_fp8": ((draw_e4m3(M, K), draw_e4m3(N, K), draw(M), draw(N), draw(N)), {}),
        "gemm_int8": ((draw_int8(M, K), draw_int8(N, K), draw(M), draw(N), draw(N)), {}),
        "gemm_int8_24": ((draw_int8(M, K), *_two_of_four(draw_int8(N, K)), draw(M), draw(N), draw(N)), {}),
        "gemm_weight_only": ((draw(M, K).half(), draw_int8(N, K), draw(N), draw(N).half()), {"relu": True}),
        "linear_int8": ((draw(M, K), draw_int8(N, K), draw(N), draw(N)), {"relu": True}),
        "quantize_rows": ((draw(M, K),), {}),
        "sddmm": ((draw(M, N), draw(M, K), *_csr(device)), {}),
        "sgd": ((draw(M, K), draw(M, K), draw(M, K)), {"lr": 0.1, "momentum": 0.9, "mask": draw(M, K) > 0}),
        "softmax_cross_entropy": ((draw(M, N), labels), {}),
        "spmm_bitmap": ((draw(M, K), *_bitmap_tiles(draw(N, K)), draw(N)), {"shape": (N, K), "relu": True}),
        "spmm_coo": ((draw(M, K), draw(300), rows_of_w, cols, draw(N)), {"shape": (N, K)}),
        "spmm_csr": ((draw(M, K), draw(3 * N), *_csr(device), draw(N)), {"shape": (N, K)}),
        "spmm_entries": (
            (draw(M, K).half(), *_entry_tiles(draw(N, K)), draw(N).half()),
            {"shape": (N, K), "relu": True},
        ),
        "train_mlp": (
            (images, labels % 10, labels[::2].clone(), draw(2), weights),
            {"sizes": (784, 20, 10), "batch": 20},
        ),
    }


@pytest.fixture(params=[face for face in kernels.FACES if face != "mlp_int8"])  # which takes lists: see its own tests
def name(request) -> str:
    return request.param


@pytest.fixture
def call(name, normal, integers, device):
    """A face, its arguments and its options, on the device."""
    return getattr(kernels, name), *_calls(normal, integers, device)[name]


# The arguments that a face changes in place, by their position.
WRITTEN = {kernels.sgd: (0, 2), kernels.train_mlp: (4,)}


def convert(value, to):
    return to(value) if isinstance(value, torch.Tensor) else value


def run(function, args, options, to) -> list[torch.Tensor]:
    """Call with every array passed through ``to``; the outputs, or the arguments where they are changed in place."""
    args = tuple(convert(value, to) for value in args)
    result = function(*args, **{key: convert(value, to) for key, value in options.items()})
    outputs = [args[at] for at in WRITTEN[function]] if function in WRITTEN else result
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def expected(function, args, options) -> list[torch.Tensor]:
    return [output.cpu() for output in run(function, args, options, torch.clone)]


@pytest.fixture
def assert_equal(assert_close, assert_same_bits):
    """Integers to the bit; floats within their tolerance, since another layout may add in another order."""

    def check(output, reference: torch.Tensor) -> None:
        output = torch.as_tensor(output)
        assert output.dtype == reference.dtype
        if output.is_floating_point():
            assert_close(output, reference.double().numpy())
        else:
            assert_same_bits(output, reference)

    return check


# --- NumPy ----------------------------------------------------------------------------------------------------------


def _negative_strides(tensor):
    array = tensor.numpy()
    return np.flip(np.flip(array).copy())


def _read_only(tensor):
    array = tensor.numpy().copy()
    array.flags.writeable = False
    return array


NUMPY_LAYOUTS = {
    "plain": lambda tensor: tensor.numpy().copy(),
    "Fortran order": lambda tensor: np.asfortranarray(tensor.numpy()),
    "negative strides": _negative_strides,
    "read-only": _read_only,
    "big-endian": lambda tensor: tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">")),
    "memory-mapped": lambda tensor: tensor.numpy().copy().view(np.memmap),
}


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("layout", NUMPY_LAYOUTS)
def test_numpy_in_numpy_out(call, layout, assert_equal):
    function, args, options = call
    reference = expected(*call)
    if function in WRITTEN and layout != "plain":
        layouts = ["plain" if at in WRITTEN[function] else layout for at in range(len(args))]
        given = [NUMPY_LAYOUTS[each](value) for each, value in zip(layouts, args, strict=True)]
        function(*given, **{key: convert(value, NUMPY_LAYOUTS[layout]) for key, value in options.items()})
        outputs = [given[at] for at in WRITTEN[function]]
    else:
        outputs = run(*call, NUMPY_LAYOUTS[layout])
    assert len(outputs) == len(reference)
    for output, tensor in zip(outputs, reference, strict=True):
        assert type(output) is np.ndarray
        assert_equal(output, tensor)


@pytest.mark.parametrize("layout", ["Fortran order", "negative strides", "read-only", "big-endian"])
@pytest.mark.parametrize("which", ["param", "momentum_buffer"])
def test_numpy_arrays_changed_in_place_must_allow_it(layout, which, normal):
    arrays = {name: normal(4, 5).numpy() for name in ("param", "grad", "momentum_buffer")}
    arrays[which] = NUMPY_LAYOUTS[layout](torch.from_numpy(arrays[which]))
    before = arrays[which].copy()
    with pytest.raises(ValueError, match=rf"^{which} is changed in place and must be contiguous, writable"):
        kernels.sgd(**arrays, lr=0.1, momentum=0.9)
    assert np.array_equal(arrays[which], before)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("kind", [np.ma.MaskedArray, np.matrix, np.recarray])
def test_an_array_that_is_more_than_its_numbers_is_named(call, kind):
    """Only its numbers would be seen: a MaskedArray's mask would be lost, silently."""
    function, args, options = call
    names = [*inspect.signature(function).parameters]
    for at in (at for at, value in enumerate(args) if kind is not np.matrix or value.dim() == 2):
        changed = [value.numpy().copy() for value in args]
        changed[at] = changed[at].view(kind)
        sentence = rf"^{names[at]} must be a plain numpy\.ndarray, got numpy\..*{kind.__name__};"
        with pytest.raises(TypeError, match=sentence):
            function(*changed, **{key: convert(value, torch.Tensor.numpy) for key, value in options.items()})


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("dtype", ["U1", np.longdouble, [("field", "f4")]], ids=str)
def test_a_dtype_that_pytorch_has_not_is_named(call, dtype):
    function, args, options = call
    changed = [value.numpy() for value in args]
    changed[0] = np.zeros(changed[0].shape, dtype)
    with pytest.raises(TypeError, match=r"^\w+ is of dtype .*, which PyTorch does not have"):
        function(*changed, **{key: convert(value, torch.Tensor.numpy) for key, value in options.items()})


@face({})
def _identity(x):
    return x


def test_numpy_is_not_copied():
    for array in (np.ones((3, 4), np.float32), np.ones((3, 8), np.float32)[:, ::2], np.ones((4, 3), np.int8).T):
        assert np.shares_memory(_identity(array), array)
        assert np.shares_memory(_identity(x=array), array)
    assert _identity(3) == 3


# --- CuPy -----------------------------------------------------------------------------------------------------------


def _to_cupy(tensor):
    import cupy

    return cupy.from_dlpack(tensor.contiguous()).copy()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
@pytest.mark.parametrize("non_blocking", [None, False, True], ids=["default stream", "stream", "non-blocking stream"])
def test_cupy_in_cupy_out_on_its_current_stream(call, non_blocking, assert_same_bits):
    import cupy

    reference = expected(*call)
    run(*call, torch.clone)  # compile now, so that what follows is launched while the stream is still busy
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream.null if non_blocking is None else cupy.cuda.Stream(non_blocking=non_blocking)
    with stream:
        spin(stream)

        def late(tensor):
            """The array's values arrive on the stream only after the spinning."""
            array = cupy.zeros(tensor.shape, _to_cupy(tensor).dtype)
            array[...] = _to_cupy(tensor)
            return array

        outputs = run(*call, late)
    stream.synchronize()
    assert len(outputs) == len(reference)
    for output, tensor in zip(outputs, reference, strict=True):
        assert type(output) is cupy.ndarray
        assert_same_bits(cupy.asnumpy(output), tensor)


def spin(stream) -> None:
    """Keep a CuPy stream busy for some milliseconds."""
    torch_stream = torch.cuda.ExternalStream(stream.ptr) if stream.ptr else torch.cuda.default_stream()
    with torch.cuda.stream(torch_stream):
        torch.cuda._sleep(20_000_000)


@pytest.mark.gpu
def test_cupy_is_not_copied_and_its_stream_is_used():
    import cupy

    seen = []

    @face({})
    def spy(x):
        seen.append(torch.cuda.current_stream().cuda_stream)
        return x

    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)):
        with stream:
            for array in (cupy.ones((3, 4), "float32"), cupy.ones((3, 8), "int8")[:, ::2], cupy.ones((4, 3), "f2").T):
                out = spy(array)
                assert out.data.ptr == array.data.ptr
                assert out.strides == array.strides
                assert seen.pop() == stream.ptr
            stream.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_cupy_negative_strides_and_fortran_order(call, assert_equal):
    import cupy

    function, _, _ = call
    reference = expected(*call)
    for layout in (lambda a: cupy.flip(cupy.flip(a).copy()), cupy.asfortranarray):
        written = [layout(_to_cupy(call[1][at])) for at in WRITTEN.get(function, ())]
        if not all(array.flags.c_contiguous for array in written):
            with pytest.raises(ValueError, match=r"^param\w* is changed in place and must be contiguous"):
                run(*call, lambda tensor, layout=layout: layout(_to_cupy(tensor)))
            continue
        outputs = run(*call, lambda tensor, layout=layout: layout(_to_cupy(tensor)))
        for output, tensor in zip(outputs, reference, strict=True):
            assert_equal(cupy.asnumpy(output), tensor)


# --- PyTorch --------------------------------------------------------------------------------------------------------


def test_torch_in_torch_out(call, device):
    for output in run(*call, torch.clone):
        assert type(output) is torch.Tensor
        assert output.device == torch.device(device)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_torch_s_current_stream(call, assert_same_bits):
    reference = expected(*call)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        outputs = run(*call, torch.clone)  # the clones are made on the stream too, after the spinning
    stream.synchronize()
    for output, tensor in zip(outputs, reference, strict=True):
        assert_same_bits(output, tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_inside_a_cuda_graph(call, assert_same_bits):
    function, args, options = call
    reference = expected(*call)
    if "shape" in options or function is kernels.sddmm:
        options["check"] = False  # looking at the indices waits for the device, which a capture forbids
    if function is kernels.spmm_coo:
        order = torch.sort(args[2] * K + args[3], stable=True).indices
        args = (args[0], *(array[order] for array in args[1:4]), *args[4:])
        options["ordered"] = True
    run(function, args, options, torch.clone)  # compile outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(function, args, options, torch.clone)
    for _ in range(2):
        for output in outputs:
            output.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for output, tensor in zip(outputs, reference, strict=True):
            assert_same_bits(output, tensor)


def test_parameters_that_require_grad_are_taken_as_they_are(device, normal):
    weight = torch.nn.Parameter(normal(5, 6, device=device))
    y = kernels.gemm(normal(4, 6, device=device), weight)
    assert not y.requires_grad  # qsparse.nn makes the graph


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu"])
def test_array_libraries_are_not_mixed(call, name):
    function, args, options = call
    if len(args) == 1:
        pytest.skip(f"{name} takes one array")
    with pytest.raises(TypeError, match=r"must be an array, of the same library as the others, got numpy\.ndarray"):
        function(args[0], args[1].numpy(), *args[2:], **options)
    with pytest.raises(TypeError, match=r"arrays of one library are needed in one call, got numpy\.ndarray, torch\."):
        function(args[0].numpy(), *args[1:], **options)


@pytest.mark.parametrize("device", ["cpu"])
def test_another_device_is_named(call, name):
    """The meta device stands for any other: it needs no hardware."""
    function, args, options = call
    for at in range(len(args)):
        changed = [value.to("meta") if i == at else value for i, value in enumerate(args)]
        with pytest.raises(ValueError, match=r"^\w+ must be on the CPU or on a CUDA device, got meta"):
            function(*changed, **options)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_tensor_is_named(call, layout):
    function, args, options = call
    for at in (at for at, value in enumerate(args) if value.dim() == 2):
        changed = [value.to_sparse(layout=layout) if i == at else value for i, value in enumerate(args)]
        with pytest.raises(TypeError, match=r"^\w+ must be a dense array, got torch\.sparse_"):
            function(*changed, **options)


def test_a_tensor_of_another_one_s_memory_is_named(normal, device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype
        x = torch.masked.masked_tensor(normal(4, 6, device=device), normal(4, 6, device=device) > 0)
    with pytest.raises(TypeError, match=r"^x must be a plain torch\.Tensor, got .*\.MaskedTensor"):
        kernels.gemm(x, normal(5, 6, device=device))


def test_a_negative_view_is_named(call, device):
    """``z.conj().imag``, say: kernels read memory, where its values have the other sign; PyTorch on a CPU would not."""
    function, args, options = call
    names = [*inspect.signature(function).parameters]
    floats = [at for at, value in enumerate(args) if value.dtype in (torch.float32, torch.float16)]
    for at in floats:
        changed = [torch._neg_view(-value) if i == at else value for i, value in enumerate(args)]
        sentence = rf"^{names[at]} is a negative view, .* {names[at]}\.resolve_neg\(\) is a plain array"
        with pytest.raises(ValueError, match=sentence):
            function(*changed, **options)


def test_the_imaginary_part_of_a_conjugate_is_a_negative_view(device):
    view = torch.complex(torch.zeros(2, 2, device=device), torch.ones(2, 2, device=device)).conj().imag
    with pytest.raises(ValueError, match=r"^dy is a negative view"):
        kernels.bias_relu_grad(view)
    assert kernels.bias_relu_grad(view.resolve_neg())[1].tolist() == [-2, -2]


def test_a_tensor_without_memory_is_named(normal, device):
    w = torch._efficientzerotensor((5, 6), device=device)
    assert w.data_ptr() == 0
    with pytest.raises(ValueError, match=r"^w is a zero tensor without memory"):
        kernels.gemm(normal(4, 6, device=device), w)


@pytest.mark.parametrize("to", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("value", [2.0, [2.0]])
def test_an_array_for_a_number_is_called_an_array(to, value, normal):
    """Whatever library it is of: the check sees a tensor of NumPy's memory."""
    x, w = (to(normal(*shape)) for shape in ((4, 6), (5, 6)))
    with pytest.raises(TypeError, match=r"^alpha must be a number, got an array$"):
        kernels.gemm(x, w, alpha=to(value))


WRONG = {  # of each option: what it cannot be
    "alpha": ("x", None, [1.0], True),
    "batch": ("x", 2.5, True, 0, -3, math.nan),
    "group": ("x", 2.5, True, 0, -3, math.nan),
    "lr": ("x", None, [0.1], True),
    "momentum": ("x", None, [0.1], True),
    "out_dtype": ("float32", np.float32, torch.complex64, [], 0),
    "plan": ("x", 0, [], {}),
    "precision": ("x", "", None, 1, []),
    "scale": ("x", None, [0.1], True),
    "shift": ("x", None, [0.1], True),
    "sizes": (784, "x", None, (784.0, 10.0), ("784", "10")),
    "tier": ("x", "", 3, [], "sm70", "sm80"),
    "weight_decay": ("x", None, [0.1], True),
}


@pytest.mark.parametrize("device", ["cpu"])
def test_an_option_that_cannot_be_is_named(call, name):
    function, args, options = call
    parameters = inspect.signature(function).parameters.values()
    for option, default in ((each.name, each.default) for each in parameters if each.kind is each.KEYWORD_ONLY):
        for value in WRONG.get(option, ()):
            if value is default is None:
                continue
            with pytest.raises((TypeError, ValueError), match=rf"^{option}\b"):
                function(*args, **{**options, option: value})


@pytest.mark.parametrize("device", ["cpu"])
def test_a_tier_that_a_cpu_has_not_is_refused_with_those_that_it_has(call):
    function, args, options = call
    if "tier" not in inspect.signature(function).parameters:
        pytest.skip("no tier is chosen there")
    for tier in ("sm90", "sm80", "simt", "sm70"):
        with pytest.raises(ValueError, match=rf"^tier '{tier}' is not possible for these arguments on a CPU; cpu is"):
            function(*args, **options, tier=tier)
    reference = expected(*call)
    for output, same in zip(run(function, args, {**options, "tier": "cpu"}, torch.clone), reference, strict=True):
        assert torch.equal(output, same)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_an_unknown_tier_is_refused_with_those_that_there_are(call):
    function, args, options = call
    if "tier" not in inspect.signature(function).parameters:
        pytest.skip("no tier is chosen there")
    sentence = r"^tier 'sm70' is not possible for these arguments on this GPU; .*\bsimt (is|are)"
    with pytest.raises(ValueError, match=sentence):
        function(*args, **options, tier="sm70")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_cpu_and_cuda_are_not_mixed(call):
    function, args, options = call
    for at in range(1, len(args)):
        changed = [value.cpu() if i == at else value for i, value in enumerate(args)]
        with pytest.raises(ValueError, match=r"^\w+ is on cpu, but the first argument is on cuda:0"):
            function(*changed, **options)


# --- what the faces are built of ------------------------------------------------------------------------------------


def test_tier(name):
    assert getattr(kernels, name).tier("cpu") == "cpu"
    assert getattr(kernels, name).tier(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("sources", "capability", "tier"),
    [
        (("a.cu",), (9, 0), "simt"),
        (("a_simt.cu", "a_sm80.cu"), (7, 5), "simt"),
        (("a_simt.cu", "a_sm80.cu"), (8, 6), "sm80"),
        (("a_simt.cu", "a_sm80.cu", "a_sm90.cu"), (9, 0), "sm90"),
        (("a_simt.cu", "a_sm80.cu", "a_sm90.cu"), (12, 0), "sm80"),
        (("a_simt.cu", "a_sm90.cu"), (10, 0), "simt"),
        (("a_simt.cu", "a_sm90.cu"), (8, 9), "simt"),
    ],
)
def test_tier_by_compute_capability(sources, capability, tier, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    _face._tier.cache_clear()
    assert face(dict.fromkeys(sources, ()))(lambda x: x).tier("cuda:0") == tier
    _face._tier.cache_clear()


def test_rows_copies_only_what_is_not_row_major(normal):
    a = normal(4, 6)
    for plain in (a, a[1:3], a[:1], normal(0, 5), normal(5, 0), normal(3)):
        assert rows(plain) is plain
    for view in (a.t(), a[:, 1:], a[::2], a[:, :1], a[:1].expand(3, 6), a.as_strided((1, 6), (3, 1))):
        copy = rows(view)
        assert torch.equal(copy, view)
        assert copy.stride() == (max(view.shape[1], 1), 1)


# --- the yardstick --------------------------------------------------------------------------------------------------


def test_outputs_are_poisoned(device):
    assert torch.empty(9, device=device).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16, device=device)).isnan().all()
    assert (torch.empty(9, dtype=torch.int8, device=device) == 127).all()
    assert (torch.empty(9, dtype=torch.int64, device=device) == 2**63 - 1).all()


def test_assert_close_can_fail(assert_close):
    ones = torch.ones(1000)
    assert_close(ones, np.ones(1000))
    for wrong in (ones * 1.00001, torch.where(torch.arange(1000) == 5, 1.00002, ones)):
        with pytest.raises(AssertionError):
            assert_close(wrong, np.ones(1000))
    for out, reference in ((torch.nan, 1), (1, np.nan), (torch.nan, np.nan), (torch.inf, 1), (torch.inf, np.inf)):
        with pytest.raises(AssertionError), np.errstate(invalid="ignore"):
            assert_close(ones * out, np.full(1000, reference, np.float64))
    with pytest.raises(AssertionError):
        assert_close(ones, np.ones((1000, 1)))


def test_assert_same_bits_can_fail(assert_same_bits):
    nan = torch.tensor([0.0, torch.nan])
    assert_same_bits(nan, -nan.neg())
    assert_same_bits(nan, np.array([0, np.nan], np.float32))
    for other in (torch.tensor([-0.0, torch.nan]), torch.tensor([0.0, 1.0]), nan.double(), nan[:1]):
        with pytest.raises(AssertionError):
            assert_same_bits(nan, other)
