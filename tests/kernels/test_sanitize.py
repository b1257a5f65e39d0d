"""What the sanitizer watches is everything: ``sanitize.py`` launches every source of every face."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _load

SCRIPT = Path(__file__).with_name("sanitize.py")


def test_every_face_is_called():
    called = set(re.findall(r"\bkernels\.(\w+)\(", SCRIPT.read_text()))
    assert called >= set(kernels.FACES)


@pytest.mark.gpu
def test_every_source_is_launched():
    if kernels.gemm.tier("cuda:0") != "sm90":
        pytest.skip("only a Hopper GPU has all tiers")
    script: dict = {"__name__": "sanitize"}
    exec(compile(SCRIPT.read_text(), SCRIPT.name, "exec"), script)
    with _load.launched() as launches:
        for part in script["PARTS"].values():
            part()
    torch.cuda.synchronize()
    sources = {name for face in kernels.FACES for name in getattr(kernels, face).sources}
    assert sources - {launch.partition(":")[0] for launch in launches} == set()
