"""What int8 and pruning cost and gain together, beside each alone.

    python experiments/07_compress_both/run.py [--device auto|cpu|cuda] [--out DIR]

Makes the cases of config.toml. On a CPU: of 784-256-10, five seeds, for their accuracy; no time is kept. On a GPU: of
784-4096-4096-10, all timed in turn with the dense network. Puts the rows into rows.jsonl in place of those of the same
device, draws figure.png, and writes the tables into README.md; all three beside this file, or in DIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import tempfile
import tomllib
import traceback
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import qsparse
from qsparse import checkpoint
from qsparse.data import Dataset, Split
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.sparse import SparseConfig, prune, sparsify_as
from qsparse.sparse.int8 import prune_jointly
from qsparse.train.config import TrainConfig
from qsparse.train.fit import fit
from qsparse.train.run import load_dataset, read_train_config, train

HERE = Path(__file__).parent
BEGIN, END = "<!-- tables: written by run.py -->", "<!-- end of the tables -->"
BATCH = "4096"
TIMES = ("latency_us", "latency_us_p10", "latency_us_p90", "repetitions", "speedup")
# Okabe & Ito's colours, by what is stored.
COLOURS = {"fp16": "#0072B2", "int8": "#D55E00", "2:4 fp16": "#56B4E9", "2:4 int8": "#009E73", "bitmap": "#CC79A7",
           "CSR int8": "#E69F00"}  # fmt: skip


def made(model: MLP, case: dict[str, Any], seed: int, dataset: Dataset, training: TrainConfig) -> MLP:
    """What becomes of a trained network."""
    options = {key: value for key, value in case.items() if key not in ("label", "wide", "order", "finetune_epochs")}
    if options.keys() == {"dtype"}:
        return qsparse.quantize(model, options["dtype"])
    config = SparseConfig(**options, seed=seed)
    if case.get("order") == "joint":
        return sparsify_as(config, *prune_jointly(model, config, dataset))[0]
    pruned, masks = prune(model, config, dataset)
    if epochs := case.get("finetune_epochs"):
        fit(pruned, dataset, dataclasses.replace(training, epochs=epochs, backend="auto"), masks=masks)
    return sparsify_as(config, pruned, masks)[0]


def rows_of(network: dict[str, Any], cases: list[dict[str, Any]], seed: int, device: str) -> list[dict[str, Any]]:
    """Train one network, and measure it and all cases against each other."""
    with tempfile.TemporaryDirectory() as directory:
        config = TrainConfig(hidden=tuple(network["hidden"]), seed=seed, data="mnist", device=device)
        run = train(config, out=Path(directory) / "run").run
        model, training = checkpoint.load(run, resolve_device(device)), read_train_config(run)
        dataset = load_dataset(run).to(resolve_device(device))
    models = {"baseline": model} | {case["label"]: made(model, case, seed, dataset, training) for case in cases}
    details = {name: {"seed": seed} for name in models}
    for case in cases:
        more = {"order": "prune-first", "finetune_epochs": 0, **case}
        details[case["label"]] |= {key: more[key] for key in more.keys() - {"label", "wide", "dtype", "format"}}
    how = {"batches": network["batches"]} if "batches" in network else {"batches": (1,), "budget_s": 0.001}
    how |= {"device": resolve_device(device)}
    if device == "cuda":
        return timed(models, dataset.test, details, how)
    rows = measure(models, dataset.test, details=details, **how)
    return [{**row, **dict.fromkeys(TIMES), "timer": None} for row in rows]


def timed(models: dict[str, MLP], test: Split, details: dict[str, dict], how: dict[str, Any]) -> list[dict[str, Any]]:
    """All in turn; where one cannot run, each beside the baseline alone, and what fails is said and left out."""
    try:
        return measure(models, test, details=details, **how)
    except (RuntimeError, UserError):
        traceback.print_exc()
    baseline, rows = models.pop("baseline"), []
    for name, model in models.items():
        pair = {"baseline": baseline, name: model}
        try:
            found = measure(pair, test, details={each: details[each] for each in pair}, peers=not rows, **how)
        except (RuntimeError, UserError) as error:
            print(f"failed: {name}: {error}", flush=True)
        else:
            rows += found if not rows else found[1:2]
    return rows


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """The mean over the seeds, and half its 95 % interval (Student's t); NaN of one seed."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(values)]
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def accuracies(rows: list[dict[str, Any]]) -> str:
    """A line a case, of the CPU's rows: the change against the dense network of the same seed, and the bytes."""
    found = [row for row in rows if row["device"] == "cpu"]
    seeds = sorted({row["seed"] for row in found})
    dense = [row["accuracy"] for row in found if row["variant"] == "baseline"]
    lines = [
        f"**784-256-10 on a CPU**, seeds {seeds[0]} to {seeds[-1]} ({min(dense):.2%} to {max(dense):.2%} when dense)",
        "",
        "| what | change, points | ± | of each seed | bytes of float32's |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for variant in dict.fromkeys(row["variant"] for row in found if row["variant"] != "baseline"):
        own = [row for row in found if row["variant"] == variant]
        changes = [row["accuracy_change"] for row in own]
        mean, half = mean_and_half(changes)
        each = " ".join(f"{change:+.2f}" for change in changes)
        lines.append(f"| {variant} | {mean:+.2f} | {half:.2f} | {each} | {share(own[0])} |")
    return "\n".join(lines)


def times(rows: list[dict[str, Any]]) -> str:
    """A line a row of a GPU, and the sentence that the experiment is about."""
    found = [row for row in rows if row["device"] == "cuda"]
    if not found:
        return "No rows of a GPU yet."
    batches = list(found[0]["latency_us"])
    first = found[0]
    network = "-".join(map(str, first["sizes"]))
    lines = [
        f"**{network} on an {first['gpu']}** (PyTorch {first['torch']}, CUDA {first['cuda']}, {first['date'][:10]}), "
        "µs and speed-up over float32",
        "",
        "| what | accuracy | change | " + " | ".join(f"batch {int(b):,}" for b in batches) + " | bytes of float32's |",
        "| --- | ---: | ---: |" + " ---: |" * (len(batches) + 1),
    ]
    for row in found:
        cells = " | ".join(f"{row['latency_us'][b]:,.1f} {row['speedup'][b]:.2f}x" for b in batches)
        accuracy = f"{row['accuracy']:.2%} | {row['accuracy_change']:+.2f}"
        lines.append(f"| {row['variant']} | {accuracy} | {cells} | {share(row)} |")
    alone, both = (
        next((row for row in found if row["variant"].startswith(name)), None) for name in ("int8", "2:4 int8")
    )
    if alone is None or both is None:
        return "\n".join(lines)
    ratio = alone["latency_us"][BATCH] / both["latency_us"][BATCH]
    lines += [
        "",
        f"At batch {int(BATCH):,} int8 in 2:4 takes {both['latency_us'][BATCH]:,.1f} µs and int8 alone "
        f"{alone['latency_us'][BATCH]:,.1f} µs, {ratio:.2f} times as long, with {share(both)} of float32's bytes.",
    ]
    return "\n".join(lines)


def share(row: dict[str, Any]) -> str:
    return f"{100 * row['weight_ratio']:.1f} %"


def colour(variant: str) -> str:
    return next((found for name, found in COLOURS.items() if variant.startswith(name)), "#999999")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A line a case: the small network's accuracy and bytes; below, the wide one's time on a GPU and bytes."""
    small = [row for row in rows if row["device"] == "cpu" and row["variant"] != "baseline"]
    wide = [row for row in rows if row["device"] == "cuda"]
    names = list(dict.fromkeys(row["variant"] for row in small))
    heights = [len(names)] + ([len(wide)] if wide else [])
    figure = Figure(figsize=(10, 1.2 * len(heights) + 0.28 * sum(heights)), dpi=150, layout="constrained")
    panels = figure.subplots(len(heights), 2, squeeze=False, sharey="row", height_ratios=heights)
    left, right = panels[0]
    for place, name in enumerate(names):
        own = [row for row in small if row["variant"] == name]
        mean, half = mean_and_half([row["accuracy_change"] for row in own])
        left.errorbar(mean, place, xerr=half, fmt="o", color=colour(name), capsize=3, markersize=5)
        right.barh(place, 100 * own[0]["weight_ratio"], color=colour(name), height=0.6)
    left.axvline(0, color="#999999", linewidth=0.8)
    left.set(title="784-256-10: change of accuracy, points (95 % interval of 5 seeds)")
    right.set(title="stored bytes, % of float32's")
    left.set_yticks(range(len(names)), names)
    if wide:
        left, right = panels[1]
        for place, row in enumerate(wide):
            for axes, value in ((left, row["latency_us"][BATCH]), (right, 100 * row["weight_ratio"])):
                axes.barh(place, value, color=colour(row["variant"]), height=0.6)
                axes.annotate(f"{value:,.3g}", (value, place), (3, 0), textcoords="offset points", va="center", size=7)
        left.set(title=f"784-4096-4096-10, batch {int(BATCH):,}: µs on an {wide[0]['gpu']}")
        right.set(title="stored bytes, % of float32's")
        left.set_yticks(range(len(wide)), [row["variant"] for row in wide])
    for axes in panels.flat:
        axes.title.set_size(9)
        axes.tick_params(labelsize=8)
        axes.grid(True, axis="x", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes, _ in panels:
        axes.invert_yaxis()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--draw", action="store_true", help="only draw and write the tables of rows.jsonl again")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    device = resolve_device(asked.device).type
    config = tomllib.loads((HERE / "config.toml").read_text())
    cases = [case for case in config["case"] if device == "cpu" or case.get("wide")]
    stored = HERE / "rows.jsonl"
    rows = [json.loads(line) for line in stored.read_text().splitlines()] if stored.exists() else []
    if not asked.draw:
        rows = [row for row in rows if row["device"] != device]
        for seed in range(config[device]["seeds"]):
            rows += rows_of(config[device], cases, seed, device)
            print(f"{device}: seed {seed} is done", flush=True)
        (asked.out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(rows, asked.out / "figure.png")
    if asked.out != HERE:
        shutil.copy(HERE / "README.md", asked.out)
    readme = asked.out / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n\n{accuracies(rows)}\n\n{times(rows)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
