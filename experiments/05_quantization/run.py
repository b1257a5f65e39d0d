"""Measure every range, granularity, method and training on MNIST over five seeds, and put the tables into the README.

python experiments/05_quantization/run.py            # train, measure, write rows.jsonl and the tables (minutes)
python experiments/05_quantization/run.py --table    # the tables alone, from rows.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from qsparse import checkpoint, data
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.oracles.gemm_int8 import gemm_int8
from qsparse.oracles.quantize_rows import quantize_rows
from qsparse.quant import QuantConfig, quantize, train_quantized
from qsparse.train.config import TrainConfig
from qsparse.train.fit import fit
from qsparse.train.run import train

HERE = Path(__file__).parent
ROWS, README = HERE / "rows.jsonl", HERE / "README.md"
BEGIN, END = "<!-- tables: written by run.py -->", "<!-- end of the tables -->"
SEEDS = range(5)
T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t of a 95 % interval, by the number of seeds
STATIC = {"activations": "static"}
LSQ = {**STATIC, "calibration": "lsq", "weight_calibration": "lsq"}
SIMULATED = {"simulate": True}
QAT_EPOCHS = 2
TRAINED_ON = f"float32-{QAT_EPOCHS} more epochs"
"""What quantization-aware training is compared with: the same epochs without rounding."""


def configs() -> list[QuantConfig]:
    found = [
        *(QuantConfig(dtype) for dtype in ("int8", "fp16", "bf16", "fp8", "int8wo")),
        QuantConfig(granularity="tensor"),
        *(QuantConfig(**STATIC, calibration=name) for name in ("minmax", "mse", "entropy")),
        *(QuantConfig(**STATIC, calibration="percentile", percentile=p) for p in (99.99, 99.9, 99)),
        *(QuantConfig(**STATIC, calibration="fixed", range=(-r, r)) for r in (1, 3, 10, 30, 100)),
        *(QuantConfig(method=method) for method in ("gptq", "smoothquant", "bias-correction")),
        QuantConfig(granularity="tensor", method="equalisation"),
        *(QuantConfig(**STATIC, calibration="minmax", weight_calibration=name) for name in ("mse", "percentile")),
    ]
    for dtype in ("int4wo", "int4", "int3wo", "int2wo"):
        real = {} if dtype == "int4wo" else SIMULATED
        found += [QuantConfig(dtype, **real, granularity=name) for name in ("tensor", "channel")]
        found += [QuantConfig(dtype, **real, granularity="group", group=size) for size in (128, 64, 32)]
        found += [QuantConfig(dtype, **SIMULATED, symmetric=False)]
        found += [QuantConfig(dtype, **real, weight_calibration=name) for name in ("mse", "percentile")]
        found += [QuantConfig(dtype, **real, granularity="tensor", method="equalisation")]
        found += [QuantConfig(dtype, **real, method=method) for method in ("gptq", "bias-correction")]
        found += [QuantConfig(dtype, **real, granularity="group", group=64, method="gptq")]
    found += [QuantConfig("int4", **SIMULATED, method="smoothquant")]
    for dtype in ("fp4wo", "fp4"):
        found += [QuantConfig(dtype, **SIMULATED, granularity="tensor"), QuantConfig(dtype, **SIMULATED)]
        found += [QuantConfig(dtype, **SIMULATED, granularity="group", group=32)]
        found += [QuantConfig(dtype, **SIMULATED, method="gptq")]
    qat = {"qat_epochs": QAT_EPOCHS}
    found += [QuantConfig(**qat), QuantConfig(**LSQ, **qat)]
    found += [QuantConfig(**STATIC, calibration="fixed", range=(-10, 10), **qat)]
    for dtype in ("int4", "int3", "int2"):
        found += [QuantConfig(dtype, **SIMULATED, **learned, **qat) for learned in ({}, LSQ)]
    return [*found, QuantConfig("fp4", **SIMULATED, **qat)]


def pairs() -> list[tuple[str, str, str]]:
    """What a step gains: its name, the variant with it, the variant without."""
    static, g64 = "int8-static-fixed_-10_10", "int4wo-g64"
    qat = f"qat{QAT_EPOCHS}"
    return [
        ("bounded range of 10 against measured extremes, int8", static, "int8-static-minmax"),
        ("bounded range of 10, trained with it", f"{static}-{qat}", TRAINED_ON),
        ("GPTQ, int4wo by channel", "int4wo-gptq", "int4wo"),
        ("GPTQ, int4wo in groups of 64", f"{g64}-gptq", g64),
        ("GPTQ, int3wo by channel", "int3wo-sim-gptq", "int3wo-sim"),
        ("ranges of least square error, int4wo by channel", "int4wo-w_mse", "int4wo"),
        ("ranges of least square error, int3wo by channel", "int3wo-sim-w_mse", "int3wo-sim"),
        ("ranges of least square error, int2wo by channel", "int2wo-sim-w_mse", "int2wo-sim"),
        ("equalisation, int8 by tensor", "int8-tensor-equalisation", "int8-tensor"),
        ("equalisation, int4wo by tensor", "int4wo-tensor-equalisation", "int4wo-tensor"),
        ("equalisation, int3wo by tensor", "int3wo-sim-tensor-equalisation", "int3wo-sim-tensor"),
        ("fp4 instead of int4, weights by channel", "fp4wo-sim", "int4wo"),
        ("fp4 instead of int4, weights and activations", "fp4-sim", "int4-sim"),
        ("training with 8 bits, against the same without", f"int8-{qat}", TRAINED_ON),
        ("training with 4 bits, against the same without", f"int4-sim-{qat}", TRAINED_ON),
        ("learned scales, 8 bits", f"int8-static-lsq-w_lsq-{qat}", f"int8-{qat}"),
        ("learned scales, 4 bits", f"int4-sim-static-lsq-w_lsq-{qat}", f"int4-sim-{qat}"),
        ("learned scales, 3 bits", f"int3-sim-static-lsq-w_lsq-{qat}", f"int3-sim-{qat}"),
        ("learned scales, 2 bits", f"int2-sim-static-lsq-w_lsq-{qat}", f"int2-sim-{qat}"),
    ]


def by_oracle(model: MLP, images: torch.Tensor) -> np.ndarray:
    """The logits of an int8 model (M, N), float32, in NumPy: exact integers, the epilogue step by step."""
    x = data.normalize(images, torch.float32).numpy()
    for layer in model.cpu().layers().values():
        if layer.input_scale is None:
            q, scale = quantize_rows(x)
        else:
            scale = layer.input_scale.numpy()
            q = np.clip(np.rint(x / scale), -127, 127).astype(np.int8)
        parts = (layer.weight.numpy(), scale, layer.weight_scale.numpy(), layer.bias.numpy())
        x = gemm_int8(q, *parts, relu=layer.activation == "relu")
    return x


def is_integer(config: QuantConfig) -> bool:
    """Whether it computes in integers: the path whose oracle must agree to the bit."""
    return config.dtype == "int8" and not config.simulate


def measured(seed: int, dataset: data.Dataset, directory: Path) -> list[dict]:
    """Train 784-256-10, and measure each quantization of it beside it on the CPU."""
    config = TrainConfig(seed=seed, device="cpu")
    model = checkpoint.load(train(config, out=directory / str(seed)).run)
    models, details = {"baseline": model}, {"baseline": {"seed": seed}}
    models[TRAINED_ON] = model.replace({})
    fit(models[TRAINED_ON], dataset, dataclasses.replace(config, epochs=QAT_EPOCHS))
    details[TRAINED_ON] = {"seed": seed}
    for one in configs():
        if one.qat_epochs:
            models[one.variant] = train_quantized(model, one, dataset, config)
        else:
            models[one.variant] = quantize(model, one, dataset.validation.images if one.needs_data else None)
        details[one.variant] = {"seed": seed, **one.fields()}
        if is_integer(one):
            exact = by_oracle(models[one.variant], dataset.test.images)
            with torch.inference_mode():
                same = np.array_equal(models[one.variant](dataset.test.images).numpy(), exact)
            if not same:
                raise SystemExit(f"seed {seed}: the outputs of {one.variant} are not those of its oracle")
            correct = int((exact.argmax(axis=1) == dataset.test.labels.numpy()).sum())
            details[one.variant]["oracle_accuracy"] = correct / len(dataset.test)
    run = f"784-256-10, seed {seed}"
    return measure(models, dataset.test, run=run, details=details, batches=(64, 1024), budget_s=0.1)


def by_variant(rows: list[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(row["variant"], []).append(row)
    return found


def half_width(values: list[float]) -> float:
    """Half of the 95 % interval of the mean of `values`, one a seed."""
    return T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def gains(rows: list[dict]) -> str:
    """A line a step: the mean over the seeds of the difference of the same seed's two accuracies, its 95 % interval."""
    variants = by_variant(rows)
    lines = ["| step | gain, points | with | without |", "| --- | ---: | --- | --- |"]
    for step, name, reference in pairs():
        each = zip(variants[name], variants[reference], strict=True)
        differences = [100 * (one["accuracy"] - other["accuracy"]) for one, other in each]
        gain = f"{points(statistics.mean(differences))} ± {half_width(differences):.2f}"
        lines.append(f"| {step} | {gain} | {name} | {reference} |")
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    """A line a variant: the mean over the seeds of the change against the same seed's baseline, its 95 % interval."""
    lines = [
        "| variant | accuracy, mean | change, points | worst seed | weight bytes | computed by |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, of_seeds in by_variant(rows).items():
        changes = [row["accuracy_change"] for row in of_seeds]
        size = of_seeds[0]["weight_bytes"]
        cells = [
            name,
            f"{100 * statistics.mean(row['accuracy'] for row in of_seeds):.2f} %",
            f"{points(statistics.mean(changes))} ± {half_width(changes):.2f}",
            points(min(changes)),
            "-" if size is None else f"{size:,}",
            of_seeds[0]["kernel"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def points(change: float) -> str:
    return f"{change:+.2f}" if round(change, 2) else "0.00"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only the tables, from the rows")
    if not parser.parse_args().table:
        dataset = data.load("mnist")
        with tempfile.TemporaryDirectory() as directory:
            rows = [row for seed in SEEDS for row in measured(seed, dataset, Path(directory))]
        ROWS.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    head, rest = README.read_text().split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n\n{gains(rows)}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
