"""What does a step of fine-tuning take, dense with a mask, and sparse through SpMM and SDDMM? On a CPU.

    python experiments/06_sparsity/finetune.py

Each network is pruned by magnitude, the same fraction of each layer, and takes steps of the fine-tuning of
`qsparse sparsify` on normal random numbers, dense and sparse in turn. A row holds the medians, and the table in
README.md their ratios; the thresholds in `qsparse/sparse/finetune.py` are read off it. Rows go to finetune.jsonl beside
this file.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import torch
from run import README, put

from qsparse.measure import environment
from qsparse.models import MLP
from qsparse.sparse import SparseConfig, prune
from qsparse.sparse.finetune import through_csr
from qsparse.timing import percentile, wall_times
from qsparse.train.config import TrainConfig
from qsparse.train.torch_backend import TorchBackend

ROWS = Path(__file__).parent / "finetune.jsonl"
BEGIN, END = "<!-- table: written by finetune.py -->", "<!-- end of finetune.py's table -->"
NETWORKS = ((784, 256, 10), (784, 512, 10), (784, 1024, 10), (784, 1024, 1024, 10), (784, 4096, 10))
DENSITIES, BATCHES = (0.1, 0.05, 0.02, 0.01), (16, 64, 128)
BUDGET_S = 1.0
_WHERE = ("cpu", "threads", "torch", "date", "commit")


def row_of(sizes: tuple[int, ...], density: float, batch: int) -> dict:
    """The times of a dense and of a sparse step of one network, in microseconds."""
    model, masks = prune(MLP(sizes), SparseConfig(density, distribution="uniform"))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, sizes[0], generator=generator)
    labels = torch.randint(sizes[-1], (batch,), generator=generator)
    of_weights = {f"{name}.weight": mask for name, mask in masks.items()}
    ways = {"dense": (model, of_weights), "sparse": (through_csr(model, masks), {})}
    steps = {
        way: functools.partial(TorchBackend(trained, TrainConfig(), {}, held).step, images, labels, 1e-6)
        for way, (trained, held) in ways.items()
    }
    samples, _ = wall_times(steps, BUDGET_S)
    us = {way: round(percentile(each, 50), 3) for way, each in samples.items()}
    where = {key: value for key, value in environment(torch.device("cpu")).items() if key in _WHERE}
    times = {"dense_us": us["dense"], "sparse_us": us["sparse"], "ratio": us["dense"] / us["sparse"]}
    return {"op": "finetune_step", "sizes": list(sizes), "density": density, "batch": batch, **times, **where}


def table(rows: list[dict]) -> str:
    """How many times as fast the sparse step is; a line a network and density."""
    lines = [
        f"| network | density | {' | '.join(f'batch {batch}' for batch in BATCHES)} |",
        f"| --- | ---: | {' | '.join('---:' for _ in BATCHES)} |",
    ]
    for sizes in NETWORKS:
        for density in DENSITIES:
            found = {row["batch"]: row for row in rows if (row["sizes"], row["density"]) == (list(sizes), density)}
            cells = " | ".join(f"{found[batch]['ratio']:.2f}" for batch in BATCHES)
            lines.append(f"| {'-'.join(map(str, sizes))} | {density:g} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for sizes in NETWORKS:
        for density in DENSITIES:
            rows += [row_of(sizes, density, batch) for batch in BATCHES]
            print(rows[-1], flush=True)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    README.write_text(put(README.read_text(), BEGIN, END, table(rows)))


if __name__ == "__main__":
    main()
