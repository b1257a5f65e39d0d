"""The machine code holds the matrix instructions that its tier is for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from qsparse.kernels import (
    _gemm_24_sm90,
    _gemm_int8_sm80,
    _gemm_int8_sm90,
    _gemm_sm80,
    _gemm_sm90,
    _gemm_sm90_configs,
    _load,
)


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
    "half 2:4": (
        "gemm_24_sm90.cu",
        _gemm_24_sm90.instance(_gemm_24_sm90.CONFIGS[0], torch.float16, torch.float16),
        "HGMMA.SP.64x256x32.F32",
    ),
    "bfloat16 2:4": (
        "gemm_24_sm90.cu",
        _gemm_24_sm90.instance(_gemm_24_sm90.CONFIGS[0], torch.bfloat16, torch.bfloat16),
        "HGMMA.SP.64x256x32.F32.BF16",
    ),
    "int8 2:4": (
        "gemm_int8_24_sm90.cu",
        _gemm_24_sm90.instance(_gemm_24_sm90.CONFIGS[0], torch.int8, torch.float16),
        "IGMMA.SP.64x256x64.S8.S8",
    ),
    "int8 sm80": ("gemm_int8_sm80.cu", _gemm_int8_sm80.CONFIGS[0].instance(torch.int8), "IMMA.16832.S8.S8"),
    "uint8 sm80": ("gemm_int8_sm80.cu", _gemm_int8_sm80.CONFIGS[-1].instance(torch.uint8), "IMMA.16832.U8.S8"),
    "sm80": ("gemm_sm80.cu", _gemm_sm80.CONFIGS[0].instance(torch.float16, True, True), "HMMA.16816.F32"),
}


@pytest.fixture
def disassemble(tmp_path):
    """``disassemble(source, instance)``: the machine code for Hopper, as text."""
    triton = importlib.util.find_spec("triton")
    tool = Path(triton.submodule_search_locations[0], "backends/nvidia/bin/cuobjdump") if triton else None
    if tool is None or not tool.is_file():
        assert "CI" not in os.environ, "CI must have Triton's cuobjdump"
        pytest.skip("Triton's cuobjdump is not here")

    def run(source: str, instance: str) -> str:
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(_load.compile_source(source, (instance,), "sm_90a").code)
        return subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout

    return run


@pytest.mark.parametrize("kind", INSTANCES)
def test_the_machine_code_holds_the_matrix_instructions(kind, disassemble):
    source, instance, instruction = INSTANCES[kind]
    code = disassemble(source, instance)
    assert instruction in code
    assert "LDL" not in code  # no local memory: nothing was spilled
    assert "STL" not in code


# --- 2:4: a product reads its metadata when it runs, which the compiler does not know ---------------------------------


def instructions(code: str) -> list[tuple[int, str]]:
    found = re.finditer(r"^ +/\*([0-9a-f]{4,})\*/ +(.*?) *;", code, re.MULTILINE)
    return [(int(match[1], 16), re.sub(r"^@!?U?P\w+ +", "@ ", match[2])) for match in found]


def written(instruction: str) -> range:
    """The registers that an instruction other than a product changes, if it changes any."""
    match = re.match(r"(?:@ )?([A-Z0-9_.]+) +(?:!?U?P\w+, +)*R(\d+)\b", instruction)
    if match is None or match[1].startswith(("ST", "SYNCS", "BAR", "UTMA", "R2UR", "ISETP", "FSETP", "HGMMA", "IGMMA")):
        return range(0)
    width = 4 if ".128" in match[1] else 2 if ".64" in match[1] or "WIDE" in match[1] else 1
    return range(int(match[2]), int(match[2]) + width)


def overwritten_too_early(code: str) -> tuple[int, list[str]]:
    """How many sparse products there are, and what writes the metadata of one on a way from it to its end.

    Products end at a wait that leaves none, or at the second that leaves one.
    """
    listing = instructions(code)
    place = {address: index for index, (address, _) in enumerate(listing)}
    products = [index for index, (_, text) in enumerate(listing) if re.search(r"[HI]GMMA\.SP", text)]
    bad = []
    for product in products:
        metadata = int(re.findall(r"\bR(\d+)", listing[product][1])[-1])
        ways, seen = [(product + 1, 0)], set()
        while ways:
            at, waits = ways.pop()
            text = listing[at][1]
            if metadata in written(text):
                bad.append(f"{listing[product][1]} / {text}")
            waits += "DEPBAR.LE gsb0, 0x1" in text
            if (at, waits) in seen or waits == 2 or "DEPBAR.LE gsb0, 0x0" in text or text.startswith("EXIT"):
                continue
            seen.add((at, waits))
            if branch := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text):
                ways.append((place[int(branch[1], 16)], waits))
            if branch is None or text.startswith("@"):
                ways.append((at + 1, waits))
    return len(products), bad


@pytest.mark.parametrize("x", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("config", _gemm_24_sm90.CONFIGS, ids=str)
def test_metadata_stay_until_their_products_are_done(config, x, disassemble):
    source = _gemm_24_sm90.SOURCE if x.is_floating_point else _gemm_24_sm90.INT8_SOURCE
    products, bad = overwritten_too_early(disassemble(source, _gemm_24_sm90.instance(config, x, torch.float16)))
    assert products >= 4
    assert bad == []


def test_metadata_that_do_not_stay_are_seen():
    code = """
        /*0000*/ LDS R5, [R9] ;
        /*0010*/ HGMMA.SP.64x64x32.F32 R24, gdesc[UR8], R24, R5, 0x0, gsb0 ;
        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0030*/ @P0 BRA 0x0 ;
        /*0040*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/ LDS.128 R4, [R9] ;
        /*0060*/ EXIT ;
"""
    products, bad = overwritten_too_early(code)
    assert products == 1
    assert len(bad) == 1
    assert bad[0].endswith("LDS R5, [R9]")
    assert overwritten_too_early(code.replace("0x1 ;", "0x0 ;")) == (1, [])
