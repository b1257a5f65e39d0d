"""The dense product at shapes that the tuning table has not, where costs choose the tile, beside cuBLAS.

    python experiments/10_gemm_bench/unseen.py    measures them on a GPU and writes unseen.jsonl

`draw.py` then puts them into the README.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

ROWS = Path(__file__).parent / "unseen.jsonl"
SHAPES = (
    *((8, 1024, 1024), (40, 6000, 2000), (48, 2000, 3000), (96, 4096, 4096), (128, 1024, 1024), (200, 10, 784)),
    *((256, 784, 1024), (300, 700, 1504), (333, 1000, 1008), (640, 640, 64), (700, 2048, 2048), (700, 3000, 768)),
    *((1000, 1000, 1008), (1024, 784, 1024), (1024, 1024, 16384), (1024, 4096, 1024), (1536, 1536, 1536)),
    *(
        (2048, 256, 784),
        (2048, 512, 512),
        (2048, 1024, 4096),
        (2500, 1000, 1200),
        (3000, 3072, 768),
        (4096, 2048, 2048),
    ),
    *((5000, 4096, 1024), (7000, 300, 3008), (8192, 1024, 4096), (16384, 2048, 512), (35000, 512, 784)),
    *((60000, 10, 1024), (60000, 512, 784)),
)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    if not torch.cuda.is_available():
        print("Error: PyTorch finds no CUDA GPU, whose tiles these are", file=sys.stderr)
        return 2
    from qsparse.bench.gemm import bench

    measured = ROWS.with_suffix(".new")  # what was there stays until all is measured
    measured.unlink(missing_ok=True)
    say = functools.partial(print, file=sys.stderr, flush=True)
    result = bench(torch.device("cuda", 0), dtypes=["float16"], shapes=SHAPES, out=measured, say=say)
    measured.replace(ROWS)
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
