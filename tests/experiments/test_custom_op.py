"""Experiment 04: the kernels compile, and every way gives the operation and its gradient."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from qsparse.kernels import _load

EXPERIMENT = Path(__file__).resolve().parents[2] / "experiments" / "04_custom_op"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("custom_op_run", EXPERIMENT / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = set(sys.modules)
    yield module
    for name in set(sys.modules) - before:
        if name.startswith("custom_op_"):
            del sys.modules[name]


def test_kernels_compile_without_spills(run):
    pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    if not _load.include_dirs():
        pytest.skip("CUDA's headers are not installed")
    instances = run.module("in_cuda").INSTANCES
    assert {Path(source) for source in instances} == set(EXPERIMENT.glob("*.cu"))
    for source, names in instances.items():
        for arch in ("sm_75", "sm_90a"):
            log = _load.compile_source(source, tuple(names), arch, verbose=True).log
            spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
            assert spills == [("0", "0")] * len(names), log


def test_what_is_composed_is_silu(run):
    x = torch.linspace(-20, 20, 81, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(run.composed(x), torch.nn.functional.silu(x))
    assert torch.autograd.gradcheck(run.composed, x)


def test_an_operation_of_two_functions_has_their_gradient(run):
    """With PyTorch's own formula in place of the kernels, and a gradient that arrives as a view."""

    def silu_grad(x, dy):
        assert dy.is_contiguous()
        s = torch.sigmoid(x)
        return dy * s * (1 + x * (1 - s))

    silu = run.differentiable(torch.nn.functional.silu, silu_grad)
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: silu(x).t(), x)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_way_on_a_gpu(run, way, dtype):
    ways = run.ways()
    if way not in ways:
        pytest.skip(f"{way} is not installed")
    generator = torch.Generator().manual_seed(1)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-3, "atol": 1e-3}
    for shape in ((0,), (1,), (7,), (8,), (1023,), (33, 65), (300, 1024)):
        x, dy = ((5 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2))
        exact = x.double().requires_grad_()
        y = run.composed(exact)
        (dx,) = torch.autograd.grad(y, exact, dy.double())
        ours = x.cuda().requires_grad_()
        found = ways[way](ours)
        torch.testing.assert_close(found.detach().cpu().double(), y.detach(), **tolerance)
        (gradient,) = torch.autograd.grad(found, ours, dy.cuda())
        torch.testing.assert_close(gradient.cpu().double(), dx, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["cuda", "triton"])
def test_addition_on_a_gpu(run, way):
    if way not in run.ways():
        pytest.skip(f"{way} is not installed")
    for n in (0, 1, 255, 256, 257, 100_000):
        a, b = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
        assert torch.equal(run.module(f"in_{way}").vector_add(a, b), a + b)


@pytest.mark.gpu
def test_what_the_kernels_would_misread_is_refused(run):
    kernels = run.module("in_cuda")
    x = torch.zeros(64, 64, device="cuda")
    with pytest.raises(ValueError, match="contiguous"):
        kernels.silu(x.t()[1:])
    with pytest.raises(ValueError, match="start on 16 bytes"):
        kernels.silu(x.flatten()[1:])
    with pytest.raises(ValueError, match="one shape and one dtype"):
        kernels.silu_grad(x, x[:32])
    with pytest.raises(TypeError, match="float32 and float16"):
        kernels.silu(x.double())


def test_the_table_of_no_rows_says_so(run):
    assert "Not measured yet" in run.table([])


def test_a_table(run):
    where = {"gpu": "a GPU", "torch": "2", "cuda": "13", "date": "2026-11-30T00:00:00"}
    rows = [
        {
            "op": "silu",
            "shape": [8, 8],
            "dtype": "float32",
            "way": way,
            "us": us,
            "gbps": 10.0,
            "ratio": 2 / us,
            **where,
        }
        for way, us in (("composed", 2.0), ("torch", 1.0), ("cuda", 0.8), ("triton", None))
        if us
    ]
    line = run.table(rows).splitlines()[2]
    assert line == "| `silu` | 64 | float32 | 2.0 | 1.0 | 0.8 | - | 10 | 2.50x |"
