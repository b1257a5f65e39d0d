"""How much accuracy each way of pruning costs: for each seed trains 784-256-10 on MNIST and prunes it, a row a way.

    python experiments/06_sparsity/run.py [SEEDS]

Rows go to rows.jsonl beside this file (a case that it holds for a seed is not run again), and the table of their means
into README.md. Accuracy and bytes are those of the stored model. Latencies are left null: this experiment is about
accuracy, and its machine was busy.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import tempfile
from pathlib import Path

from qsparse import variants
from qsparse.measure import measure
from qsparse.train.config import TrainConfig
from qsparse.train.run import train

HERE = Path(__file__).parent
ROWS, README = HERE / "rows.jsonl", HERE / "README.md"
BEGIN, END = "<!-- table: written by run.py -->", "<!-- end of the table -->"
PAIRS_BEGIN, PAIRS_END = "<!-- pairs: written by run.py -->", "<!-- end of the pairs -->"
TIMES = ("latency_us", "latency_us_p10", "latency_us_p90", "repetitions", "speedup")

CASES: list[tuple[str, dict]] = [
    *((f"{pruner}, {distribution}", {"density": 0.3, "pruner": pruner, "distribution": distribution})
      for pruner in ("random", "magnitude", "snip", "wanda", "sparsegpt")
      for distribution in ("uniform", "erk", "global")),
    *((f"{pruner}", {"pattern": pattern, "pruner": pruner})
      for pattern in ("2:4", "4:8", "1:4")
      for pruner in ("magnitude", "wanda", "sparsegpt")),
    *((f"{pruner}, fine-tuned 2 epochs", {"pattern": "2:4", "pruner": pruner, "finetune_epochs": 2})
      for pruner in ("magnitude", "sparsegpt")),
    ("magnitude", {"density": 0.1}),
    ("sparsegpt, erk", {"density": 0.1, "pruner": "sparsegpt", "distribution": "erk"}),
    *((f"{pruner}, global, fine-tuned 2 epochs",
       {"density": 0.1, "pruner": pruner, "distribution": "global", "finetune_epochs": 2})
      for pruner in ("random", "magnitude", "snip", "wanda", "sparsegpt")),
    ("magnitude, fine-tuned 6 epochs", {"density": 0.02, "finetune_epochs": 6}),
    ("magnitude, gradual 4 epochs, fine-tuned 2",
     {"density": 0.02, "schedule": "gradual", "epochs": 4, "finetune_epochs": 2}),
    ("movement, global", {"density": 0.3, "pruner": "movement"}),
    ("movement, gradual 4 epochs, fine-tuned 2",
     {"density": 0.1, "pruner": "movement", "schedule": "gradual", "epochs": 4, "finetune_epochs": 2}),
    ("magnitude, permuted", {"pattern": "2:4", "permute": True}),
    *((f"magnitude, blocks of {block}, fine-tuned 2 epochs", {"density": 0.1, "block": block, "finetune_epochs": 2})
      for block in ("1x16", "16x16")),
    *((f"{schedule}, 6 epochs from the start", {"density": 0.1, "schedule": schedule, "epochs": 6})
      for schedule in ("rigl", "set", "lottery")),
    ("magnitude, fine-tuned 2 epochs, then int8", {"density": 0.1, "finetune_epochs": 2, "dtype": "int8"}),
    *((f"sparsegpt, erk, int8 {order}",
       {"density": 0.1, "pruner": "sparsegpt", "distribution": "erk", "dtype": "int8", "order": order})
      for order in ("prune-first", "joint")),
    *((f"{pruner}, {distribution}, biases corrected",
       {"density": 0.3, "pruner": pruner, "distribution": distribution, "correct_bias": True})
      for pruner in ("magnitude", "wanda", "sparsegpt")
      for distribution in ("uniform", "erk", "global")),
    *((f"{pruner}, biases corrected", {"pattern": pattern, "pruner": pruner, "correct_bias": True})
      for pattern in ("2:4", "1:4")
      for pruner in ("magnitude", "wanda", "sparsegpt")),
    *((f"{pruner}, global{more}", {"density": density, "pruner": pruner, "distribution": "global", **options})
      for density in (0.2, 0.05)
      for pruner in ("magnitude", "wanda", "sparsegpt")
      for more, options in (("", {}), (", biases corrected", {"correct_bias": True}))),
    *((f"sparsegpt, of {samples:,} images", {"pattern": "2:4", "pruner": "sparsegpt", "samples": samples})
      for samples in (8192, 32768)),
]  # fmt: skip


def rows_of(seed: int, done: list[dict]) -> list[dict]:
    """One row a case, with the label of the case, of one trained network; of the cases that are not `done`."""
    had = {(row["label"], row["density_asked"], row["pattern"]) for row in done if row["seed"] == seed}
    cases = [
        (label, options)
        for label, options in CASES
        if (label, options.get("density"), options.get("pattern")) not in had
    ]
    if not cases:
        return []
    run = train(TrainConfig(seed=seed, data="mnist", device="cpu"), out=f"seed{seed}").run
    rows = []
    for label, options in cases:
        row = variants.sparsify_run(run, options.get("density"), device="cpu",
                                    **{k: v for k, v in options.items() if k != "density"}).rows[1]  # fmt: skip
        rows.append({**row, "label": label, **dict.fromkeys(TIMES), "timer": None})
    return rows


def table(rows: list[dict]) -> str:
    """Means over the seeds, with the 95 % interval of the paired change (Student's t)."""
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        cases.setdefault((row["pattern"] or f"{row['density_asked']:g}", row["label"]), []).append(row)
    lines = [
        "| density | pruner | change, points | ± | of each seed | weight bytes of dense |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ]
    for (density, label), found in cases.items():
        changes = [row["accuracy_change"] for row in found]
        mean, half = mean_and_half(changes)
        share = statistics.mean(row["weight_ratio"] for row in found)
        each = " ".join(f"{change:+.2f}" for change in changes)
        if found[0].get("correct_bias"):
            label += f", kept in {sum(row['bias_corrected'] for row in found)} of {len(found)}"
        lines.append(f"| {density} | {label} | {mean:+.2f} | {half:.2f} | {each} | {100 * share:.1f} % |")
    return "\n".join(lines)


def pairs(rows: list[dict]) -> str:
    """What wanda and sparsegpt keep more than magnitude does, at density 0.3 in the same network, in points."""

    def changes(label: str) -> dict[int, float]:
        return {
            row["seed"]: row["accuracy_change"] for row in rows if (row["label"], row["density_asked"]) == (label, 0.3)
        }

    lines = ["| minus magnitude, at density 0.3 | uniform | erk | global |", "| --- | ---: | ---: | ---: |"]
    for pruner in ("wanda", "sparsegpt"):
        for more in ("", ", biases corrected"):
            cells = []
            for distribution in ("uniform", "erk", "global"):
                others, own = changes(f"magnitude, {distribution}"), changes(f"{pruner}, {distribution}{more}")
                mean, half = mean_and_half([own[seed] - others[seed] for seed in own])
                cells.append(f"{mean:+.2f} ± {half:.2f}")
            lines.append(f"| {pruner}{more} | {' | '.join(cells)} |")
    return "\n".join(lines)


def put(text: str, begin: str, end: str, table: str) -> str:
    """`text` with `table` between the two marks."""
    head, rest = text.split(begin)
    return f"{head}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """The mean over the seeds, and half its 95 % interval (Student's t); NaN of one seed."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    return statistics.mean(values), _T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5 % quantile of Student's t, by the number of seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=3, help="how many, the first of them 0 (%(default)s)")
    seeds = parser.parse_args().seeds
    if seeds < 1:
        parser.error(f"seeds must be at least 1, not {seeds}")
    variants.load_dataset = functools.cache(variants.load_dataset)  # once a network, not once a case
    # The times are thrown away, so one repetition is enough; the outputs are checked as ever.
    variants.measure = lambda *arguments, **options: measure(
        *arguments, **options, batches=(1,), budget_s=0.001, peers=False
    )
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for seed in range(seeds):
            rows += rows_of(seed, rows)
            print(table(rows), flush=True)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if README.exists():
        text = put(README.read_text(), BEGIN, END, table(rows))
        README.write_text(put(text, PAIRS_BEGIN, PAIRS_END, pairs(rows)))


if __name__ == "__main__":
    main()
