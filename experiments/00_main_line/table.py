"""Put rows.jsonl (what `qsparse quantize` and `qsparse sparsify` wrote) into this folder's README, and in short into
the project's, as one table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROWS, README, FRONT = HERE / "rows.jsonl", HERE / "README.md", HERE.parents[1] / "README.md"
BEGIN, END = "<!-- table: written by table.py -->", "<!-- end of the table -->"
SHORT = ("1", "1024", "10000")
"""The batches of the project's README."""


def table(rows: list[dict]) -> str:
    """The newest row of each variant and peer: accuracy, latency by batch with the speed-up, bytes, kernels."""
    batches = list(rows[0]["latency_us"])
    lines = [
        f"| variant | accuracy | change, points | agrees | {_head(batches)} | weight bytes | kernels |",
        "| --- | ---: | ---: | ---: |" + " ---: |" * len(batches) + " ---: | --- |",
    ]
    for name, row in _newest(rows).items():
        cells = [
            name,
            f"{100 * row['accuracy']:.2f} %",
            f"{row['accuracy_change']:+.2f}",
            f"{100 * row['agreement']:.2f} %",
            *_times(row, batches),
            f"{row['weight_bytes']:,} ({100 * row['weight_ratio']:.1f} %)",
            row["kernel"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    sizes = "-".join(map(str, rows[0]["sizes"]))
    return "\n".join((*lines, "", f"{sizes} on MNIST, seed {rows[0]['seed']}; {_where(rows)}."))


def short_table(rows: list[dict]) -> str:
    """The same with what fits on the front page."""
    lines = [
        f"| variant | accuracy | change, points | {_head(SHORT)} | weight bytes |",
        "| --- | ---: | ---: |" + " ---: |" * len(SHORT) + " ---: |",
    ]
    for name, row in _newest(rows).items():
        cells = [name, f"{100 * row['accuracy']:.2f} %", f"{row['accuracy_change']:+.2f}", *_times(row, SHORT)]
        lines.append(f"| {' | '.join(cells)} | {row['weight_bytes']:,} |")
    return "\n".join((*lines, "", f"{_where(rows)}."))


def _newest(rows: list[dict]) -> dict[str, dict]:
    return {row["variant"]: row for row in rows}


def _head(batches) -> str:
    return " | ".join(f"batch {int(batch):,} µs" for batch in batches)


def _times(row: dict, batches) -> list[str]:
    return [f"{row['latency_us'][b]:.1f} ({row['speedup'][b]:.2f}x)" for b in batches]


def _where(rows: list[dict]) -> str:
    last = rows[-1]
    when = last["date"][:10] + (f" at commit {last['commit'][:7]}" if last["commit"] else "")
    return f"{last['gpu']}, PyTorch {last['torch']}, CUDA {last['cuda']}, {when}. L2 cache {last['l2']}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for readme, text in ((README, table(rows)), (FRONT, short_table(rows))):
        head, rest = readme.read_text().split(BEGIN)
        readme.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
