"""Measure every range, granularity and method on MNIST over five seeds, and put the answer's table into the README.

python experiments/05_quantization/run.py            # train, measure, write rows.jsonl and the table (minutes)
python experiments/05_quantization/run.py --table    # the table alone, from rows.jsonl
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from qsparse import checkpoint, data
from qsparse.measure import measure
from qsparse.quant import QuantConfig, quantize
from qsparse.train.config import TrainConfig
from qsparse.train.run import train

HERE = Path(__file__).parent
ROWS, README = HERE / "rows.jsonl", HERE / "README.md"
BEGIN, END = "<!-- table: written by run.py -->", "<!-- end of the table -->"
SEEDS = range(5)
T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t of a 95 % interval, by the number of seeds
STATIC = {"activations": "static"}
SIMULATED = {"simulate": True}


def configs() -> list[QuantConfig]:
    found = [
        QuantConfig(),
        QuantConfig(granularity="tensor"),
        *(QuantConfig(**STATIC, calibration=name) for name in ("minmax", "mse", "entropy")),
        *(QuantConfig(**STATIC, calibration="percentile", percentile=p) for p in (99.99, 99.9, 99)),
        *(QuantConfig(**STATIC, calibration="fixed", range=(-r, r)) for r in (1, 3, 10, 30, 100)),
        *(QuantConfig(method=method) for method in ("gptq", "smoothquant", "bias-correction")),
    ]
    for dtype in ("int4wo", "int4", "int3wo", "int2wo"):
        found += [QuantConfig(dtype, **SIMULATED, granularity=name) for name in ("tensor", "channel")]
        found += [QuantConfig(dtype, **SIMULATED, granularity="group", group=size) for size in (128, 64, 32)]
        found += [QuantConfig(dtype, **SIMULATED, symmetric=False)]
        found += [QuantConfig(dtype, **SIMULATED, method=method) for method in ("gptq", "bias-correction")]
        found += [QuantConfig(dtype, **SIMULATED, granularity="group", group=64, method="gptq")]
    return [*found, QuantConfig("int4", **SIMULATED, method="smoothquant")]


def measured(seed: int, dataset: data.Dataset, directory: Path) -> list[dict]:
    """Train 784-256-10, and measure each quantization of it beside it on the CPU."""
    config = TrainConfig(seed=seed, device="cpu")
    model = checkpoint.load(train(config, out=directory / str(seed)).run)
    models, details = {"baseline": model}, {"baseline": {"seed": seed}}
    for one in configs():
        models[one.variant] = quantize(model, one, dataset.validation.images if one.needs_data else None)
        details[one.variant] = {"seed": seed, **one.fields()}
    run = f"784-256-10, seed {seed}"
    return measure(models, dataset.test, run=run, details=details, batches=(64, 1024), budget_s=0.2)


def table(rows: list[dict]) -> str:
    """A line a variant: the mean over the seeds of the change against the same seed's baseline, its 95 % interval."""
    variants: dict[str, list[dict]] = {}
    for row in rows:
        variants.setdefault(row["variant"], []).append(row)
    lines = [
        "| variant | accuracy, mean | change, points | worst seed | weight bytes | computed by |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, of_seeds in variants.items():
        changes = [row["accuracy_change"] for row in of_seeds]
        half = T[len(changes)] * statistics.stdev(changes) / math.sqrt(len(changes))
        size = of_seeds[0]["weight_bytes"]
        cells = [
            name,
            f"{100 * statistics.mean(row['accuracy'] for row in of_seeds):.2f} %",
            f"{points(statistics.mean(changes))} ± {half:.2f}",
            points(min(changes)),
            "-" if size is None else f"{size:,}",
            of_seeds[0]["kernel"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def points(change: float) -> str:
    return f"{change:+.2f}" if round(change, 2) else "0.00"


def main() -> None:
    if "--table" not in sys.argv:
        dataset = data.load("mnist")
        with tempfile.TemporaryDirectory() as directory:
            rows = [row for seed in SEEDS for row in measured(seed, dataset, Path(directory))]
        ROWS.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    head, rest = README.read_text().split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
