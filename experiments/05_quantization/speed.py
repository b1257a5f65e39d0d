"""Time a wide network in each dtype on the CPU, quantizing the activations included, and put the table into the README.

python experiments/05_quantization/speed.py            # train, measure, write speed.jsonl and the table (minutes)
python experiments/05_quantization/speed.py --table    # the table alone, from speed.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from qsparse import checkpoint, data
from qsparse.measure import measure
from qsparse.quant import QuantConfig, quantize
from qsparse.train.config import TrainConfig
from qsparse.train.run import train

HERE = Path(__file__).parent
ROWS, README = HERE / "speed.jsonl", HERE / "README.md"
BEGIN, END = "<!-- table: written by speed.py -->", "<!-- end of the speed table -->"
BATCHES = (1, 64, 1024, 10_000)
CONFIGS = (
    QuantConfig(),
    QuantConfig(activations="static", calibration="minmax"),
    QuantConfig("bf16"),
    QuantConfig("fp16"),
    QuantConfig("int8wo"),
    QuantConfig("int4wo", granularity="group"),
    QuantConfig("fp8"),
)


def measured() -> list[dict]:
    dataset = data.load("mnist")
    with tempfile.TemporaryDirectory() as directory:
        config = TrainConfig(hidden=(1024, 1024), device="cpu")
        model = checkpoint.load(train(config, out=Path(directory) / "run").run)
    images = dataset.validation.images
    models = {"baseline": model} | {one.variant: quantize(model, one, images) for one in CONFIGS}
    details = {one.variant: {"seed": config.seed, **one.fields()} for one in CONFIGS}
    return measure(models, dataset.test, run="784-1024-1024-10", details=details, batches=BATCHES, budget_s=2)


def table(rows: list[dict]) -> str:
    """A line a variant: what float32 takes, and how many times faster the others are; what is slower says so."""
    heads = [f"batch {batch:,}" for batch in BATCHES]
    lines = [
        f"| variant | accuracy | weight bytes | {' | '.join(heads)} | computed by |",
        f"| --- | ---: | ---: | {' | '.join(['---:'] * len(heads))} | --- |",
    ]
    for row in rows:
        cells = [row["variant"], f"{100 * row['accuracy']:.2f} %", f"{row['weight_bytes']:,}"]
        for batch in map(str, BATCHES):
            if row["variant"] == "baseline":
                cells.append(f"{row['latency_us'][batch]:,.0f} µs")
            else:
                speedup = row["speedup"][batch]
                cells.append(f"{speedup:.2f}x" + ("" if speedup >= 1 else ", slower"))
        lines.append(f"| {' | '.join([*cells, row['kernel']])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only the tables, from the rows")
    if not parser.parse_args().table:
        ROWS.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in measured()))
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    head, rest = README.read_text().split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
