"""What bounds the dense product: the GPU's counters beside cuBLAS's, shape by shape, read by Nsight Compute (`ncu`).

    python experiments/10_gemm_bench/counters.py    profiles each product once and writes counters.jsonl

`draw.py` then puts them into the README. Nsight Compute empties the caches before each kernel and repeats it until all
counters are read; the clocks are left alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COUNTERS = HERE / "counters.jsonl"
SHAPES = ((256, 256, 256), (1024, 1024, 1024), (1024, 1024, 784), (60000, 1024, 784), (60000, 256, 784))
SECTOR = 32  # bytes
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "mio_throttle", "no_instruction", "short_scoreboard", "sleeping", "wait"),
)
METRICS = {
    "us": "gpu__time_duration.sum",
    "multiprocessors": "launch__sm_count",
    "blocks": "launch__grid_size",
    "cluster": "launch__cluster_size",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    "sm_active_cycles": "sm__cycles_active.avg",
    "elapsed_cycles": "gpc__cycles_elapsed.max",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor_percent": (
        "sm__pipe_tensor_type_hmma_hgmma_qgmma_imma_igmma_bmma_bgmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
    ),
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes.sum",
    "l2_to_sm_sectors": "l1tex__m_xbar2l1tex_read_sectors.sum",
    **{f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS},
}


def products() -> None:
    """What is profiled: each product once by us and once by cuBLAS, compiled and warm."""
    import torch

    from qsparse import kernels

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.float16)

    operands = [(normal(m, k), normal(n, k)) for m, n, k in SHAPES]
    for profiled in (False, True):
        if profiled:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        for x, w in operands:
            kernels.gemm(x, w)
            torch.mm(x, w.t())
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profile() -> str:
    """The report of `ncu` on `products` in another process, as CSV."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS.values())]
    done = subprocess.run([*command, sys.executable, __file__, "--products"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"Error: ncu ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def parse(report: str) -> list[dict]:
    """One row for each shape and library, of the longest kernel where a product takes several."""
    lines = [line for line in csv.reader(report.splitlines()) if len(line) > len(METRICS)]
    names, _, *kernels = lines  # the second line holds the units
    products: list[list[dict]] = []
    for kernel in kernels:
        found = dict(zip(names, kernel, strict=True))
        row = {name: float(found[metric].replace(",", "")) for name, metric in METRICS.items()}
        row |= {"us": row["us"] / 1e3, "kernel": found["Kernel Name"]}
        row["ours"] = row["kernel"].removeprefix("void ").startswith("gemm_s")  # gemm_sm90, gemm_split, ...
        row["l2_to_sm_bytes"] = row.pop("l2_to_sm_sectors") * SECTOR
        if products and products[-1][0]["ours"] == row["ours"]:
            products[-1].append(row)
        else:
            products.append([row])
    if len(products) != 2 * len(SHAPES):
        raise SystemExit(f"Error: {len(products)} products were profiled, not {2 * len(SHAPES)}")
    return [
        {"shape": list(SHAPES[i // 2]), "kernels": len(group)} | max(group, key=lambda row: row["us"])
        for i, group in enumerate(products)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", action="store_true", help="run the products alone, as ncu does")
    asked = parser.parse_args()
    if not asked.products and not shutil.which("ncu"):
        raise SystemExit("Error: no ncu (Nsight Compute) here; it comes with the CUDA toolkit")

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("Error: no GPU here whose counters could be read")
    if asked.products:
        products()
        return
    rows = parse(profile())

    from qsparse.measure import environment

    where = environment(torch.device("cuda", torch.cuda.current_device()))
    where = {name: where[name] for name in ("gpu", "torch", "cuda", "date", "commit")}
    COUNTERS.write_text("".join(json.dumps(row | where) + "\n" for row in rows))
    print(f"{len(rows)} rows: {COUNTERS}")


if __name__ == "__main__":
    main()
