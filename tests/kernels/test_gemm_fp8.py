"""The product of 8-bit floats: on a Hopper card in its own tensor cores, elsewhere by wider ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.oracles.gemm_fp8 import gemm_fp8 as oracle

E4M3 = torch.float8_e4m3fn
# Hopper's tensor cores add fp8 products with about 14 bits: of the sum's size, not of the result's.
SUMS = 2.0**-11


def operands(normal, m, n, k, device):
    return tuple((normal(rows, k) * 4).to(E4M3).to(device) for rows in (m, n))


def check(y, x, w, *scaling, relu=False):
    x, w = x.float().cpu().numpy(), w.float().cpu().numpy()
    scaling = [None if a is None else a.cpu().numpy() for a in scaling]
    reference = oracle(x, w, *scaling, relu=relu)
    magnitude = oracle(np.abs(x), np.abs(w), *scaling[:2])  # of the terms of each sum
    rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}[y.dtype]
    error = np.abs(y.double().cpu().numpy() - reference)
    assert y.shape == reference.shape
    assert (error <= SUMS * magnitude + rounding * np.abs(reference) + 1e-7).all()
    if y.numel():
        assert np.linalg.norm(error) <= 2e-3 * np.linalg.norm(magnitude) / np.sqrt(max(x.shape[1], 1)) + 4e-3 * (
            np.linalg.norm(reference)
        )


@pytest.mark.parametrize("shape", [(1, 10, 784), (17, 64, 16), (64, 256, 784), (130, 200, 1024), (300, 129, 2064)])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_against_the_oracle(device, normal, shape, out_dtype):
    m, n, k = shape
    x, w = operands(normal, m, n, k, device)
    scaling = normal(m, device=device).abs() * 0.02, normal(n, device=device).abs() * 0.02, normal(n, device=device)
    for relu in (False, True):
        check(kernels.gemm_fp8(x, w, *scaling, relu=relu, out_dtype=out_dtype), x, w, *scaling, relu=relu)
    one = torch.tensor([0.01], device=device)
    check(kernels.gemm_fp8(x, w, one, one, out_dtype=out_dtype), x, w, one, one)


@pytest.mark.parametrize("shape", [(0, 5, 16), (5, 0, 16), (3, 4, 0), (1, 1, 1), (9, 7, 33), (40, 24, 100)])
def test_shapes_off_the_fast_path(device, normal, shape):
    m, n, k = shape
    x, w = operands(normal, m, n, k, device)
    check(kernels.gemm_fp8(x, w, out_dtype=torch.float32), x, w)


def test_strided_views(device, normal):
    x, w = operands(normal, 64, 96, 64, device)
    for a, b in ((x.t(), w.t()[:, :64]), (x[::2], w[::3]), (x[:, 16:48], w[:, :32])):
        check(kernels.gemm_fp8(a, b, out_dtype=torch.float32), a.contiguous(), b.contiguous())


def test_nan_stays_in_its_row(device, normal):
    x, w = operands(normal, 20, 32, 64, device)
    x[3, 5] = torch.nan
    y = kernels.gemm_fp8(x, w, relu=True, out_dtype=torch.float32)
    assert y[3].isnan().all()
    assert not y[[i for i in range(20) if i != 3]].isnan().any()


def test_refuses_what_does_not_fit(device, normal):
    x, w = operands(normal, 4, 6, 16, device)
    with pytest.raises(TypeError, match="x must be float8_e4m3fn, uint8, got float16"):
        kernels.gemm_fp8(x.half(), w)
    with pytest.raises(ValueError, match=r"w must have shape \(any, 16\), got \(6, 8\)"):
        kernels.gemm_fp8(x, w[:, :8])
    with pytest.raises(ValueError, match=r"scale_w must have shape \(6,\), got \(5,\)"):
        kernels.gemm_fp8(x, w, None, torch.ones(5, device=device))
    with pytest.raises(TypeError, match="out_dtype must be one of"):
        kernels.gemm_fp8(x, w, out_dtype=torch.int32)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch")  # Inductor's own, while it starts
def test_compiled(device, normal):
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    x, w = operands(normal, 16, 16, 32, device)
    compiled = torch.compile(lambda x, w: kernels.gemm_fp8(x, w, relu=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w), kernels.gemm_fp8(x, w, relu=True))
