"""The machine code holds the matrix instructions that its tier is for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import torch

from qsparse.kernels import _gemm_int8_sm80, _gemm_int8_sm90, _gemm_sm80, _gemm_sm90, _gemm_sm90_configs, _load


def int8(x: torch.dtype, out: torch.dtype) -> str:
    return _gemm_int8_sm90.instance(_gemm_int8_sm90.CONFIGS[1], x, out)


INSTANCES = {
    "half": ("gemm_sm90.cu", _gemm_sm90.CONFIGS[0].instance(torch.float16, torch.float16), "HGMMA.64x256x16.F32"),
    "bfloat16": (
        "gemm_sm90.cu",
        _gemm_sm90.CONFIGS[3].instance(torch.bfloat16, torch.bfloat16),
        "HGMMA.64x128x16.F32.BF16",
    ),
    "tf32": (
        "gemm_sm90.cu",
        _gemm_sm90_configs.TF32[0].instance(torch.float32, torch.float32),
        "HGMMA.64x256x8.F32.TF32",
    ),
    "int8": ("gemm_int8_sm90.cu", int8(torch.int8, torch.float16), "IGMMA.64x256x32.S8.S8"),
    "uint8": ("gemm_int8_sm90.cu", int8(torch.uint8, torch.int8), "IGMMA.64x256x32.U8.S8"),
    "fp8": ("gemm_fp8_sm90.cu", int8(torch.float8_e4m3fn, torch.float16), "QGMMA.64x256x32.F32.E4M3.E4M3"),
    "int8 sm80": ("gemm_int8_sm80.cu", _gemm_int8_sm80.CONFIGS[0].instance(torch.int8), "IMMA.16832.S8.S8"),
    "uint8 sm80": ("gemm_int8_sm80.cu", _gemm_int8_sm80.CONFIGS[-1].instance(torch.uint8), "IMMA.16832.U8.S8"),
    "sm80": ("gemm_sm80.cu", _gemm_sm80.CONFIGS[0].instance(torch.float16, True, True), "HMMA.16816.F32"),
}


@pytest.mark.parametrize("kind", INSTANCES)
def test_the_machine_code_holds_the_matrix_instructions(kind, tmp_path):
    source, instance, instruction = INSTANCES[kind]
    triton = importlib.util.find_spec("triton")
    tool = Path(triton.submodule_search_locations[0], "backends/nvidia/bin/cuobjdump") if triton else None
    if tool is None or not tool.is_file():
        assert "CI" not in os.environ, "CI must have Triton's cuobjdump"
        pytest.skip("Triton's cuobjdump is not here")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(_load.compile_source(source, (instance,), "sm_90a").code)
    code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    assert instruction in code
    assert "LDL" not in code  # no local memory: nothing was spilled
    assert "STL" not in code
