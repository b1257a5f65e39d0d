"""Put rows.jsonl (what `qsparse quantize` and `qsparse sparsify` wrote) into this folder's README as one table."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
ROWS, README = HERE / "rows.jsonl", HERE / "README.md"
BEGIN, END = "<!-- table: written by table.py -->", "<!-- end of the table -->"


def table(rows: list[dict]) -> str:
    """The newest row of each variant and peer: accuracy, latency by batch with the speed-up, bytes, kernels."""
    newest = {row["variant"]: row for row in rows}
    batches = list(rows[0]["latency_us"])
    head = " | ".join(f"batch {int(batch):,} µs" for batch in batches)
    lines = [
        f"| variant | accuracy | change, points | agrees | {head} | weight bytes | kernels |",
        "| --- | ---: | ---: | ---: |" + " ---: |" * len(batches) + " ---: | --- |",
    ]
    for name, row in newest.items():
        times = (f"{row['latency_us'][b]:.1f} ({row['speedup'][b]:.2f}x)" for b in batches)
        cells = [
            name,
            f"{100 * row['accuracy']:.2f} %",
            f"{row['accuracy_change']:+.2f}",
            f"{100 * row['agreement']:.2f} %",
            *times,
            f"{row['weight_bytes']:,} ({100 * row['weight_ratio']:.1f} %)",
            row["kernel"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]
    where = f"{first['gpu']}, PyTorch {first['torch']}, CUDA {first['cuda']}, {first['date'][:10]}"
    sizes = "-".join(map(str, first["sizes"]))
    return "\n".join((*lines, "", f"{sizes} on MNIST, seed {first['seed']}; {where}. L2 cache {first['l2']}."))


def main() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    head, rest = README.read_text().split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
