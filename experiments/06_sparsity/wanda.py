"""Why does Wanda lose to magnitude at density 0.3? Both rankings, within layers and rows, and the means given back.

    python experiments/06_sparsity/wanda.py [SEEDS]

For each seed trains 784-256-10 on MNIST and prunes it at one stroke to density 0.3, the same number of weights in each
layer (erk) whatever ranks them. Of the first layer, over the training images that Wanda looks at, it compares

    lost      ||X D^T||^2 / ||X W^T||^2, where D are the pruned weights: what the outputs lost
    constant  the share of `lost` that is the same for every image: a bias could give it back
    expected  sum of S_ij^2 of the pruned weights, S_ij = |W_ij| ||X_j||, over ||X D^T||^2: what Wanda's scores add up
              to, which is all that is lost if inputs are uncorrelated

and takes the accuracy twice: as it is, and with biases that give each output the mean that it has in the dense network,
as `--correct-bias` does (which keeps them only where the validation split gains). Rows go to wanda.jsonl beside this
file, the table of their means into README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
from run import README, mean_and_half, put
from torch import Tensor
from torch.nn import functional

from qsparse import checkpoint, data
from qsparse.models import MLP
from qsparse.quant.bias_correction import corrected_bias
from qsparse.sparse import layer_counts, prunable_weights
from qsparse.sparse.magnitude import magnitude_scores
from qsparse.sparse.masks import largest, largest_of_each_row
from qsparse.sparse.wanda import wanda_scores
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate
from qsparse.train.run import train

ROWS = Path(__file__).parent / "wanda.jsonl"
BEGIN, END = "<!-- table: written by wanda.py -->", "<!-- end of wanda.py's table -->"
DENSITY, SAMPLES = 0.3, 2048
GROUPS = {"layer": largest, "row": largest_of_each_row}
SCORES = {"magnitude": lambda w, x: magnitude_scores(w), "wanda": wanda_scores}


@torch.no_grad()
def pruned(model: MLP, x: Tensor, scores: str, group: str, corrected: bool) -> tuple[MLP, dict[str, float]]:
    """`model` pruned layer by layer, each seeing what the pruned ones before it give, and what its first layer lost."""
    counts = layer_counts(prunable_weights(model), DENSITY, "erk")
    result, measured, exact = model.replace({}), {}, x
    for name, layer in result.layers().items():
        dense = model.layers()[name]
        w = dense.weight
        mask = GROUPS[group](SCORES[scores](w, x), counts[name])
        missing = x @ w.masked_fill(mask, 0.0).T
        if not measured:
            energy = missing.square().sum()
            measured = {
                "lost": float(energy / (x @ w.T).square().sum()),
                "constant": float(len(x) * missing.mean(dim=0).square().sum() / energy),
                "expected": float(wanda_scores(w, x).masked_fill(mask, 0.0).square().sum() / energy),
            }
        layer.weight.masked_fill_(~mask, 0.0)
        if corrected:
            sums = (functional.linear(given, of.weight, of.bias) for given, of in ((exact, dense), (x, layer)))
            layer.bias.copy_(corrected_bias(layer.bias, *sums))
        x, exact = layer(x), dense(exact)
    return result, measured


def rows_of(seed: int) -> list[dict]:
    run = train(TrainConfig(seed=seed, data="mnist", device="cpu"), out=f"seed{seed}").run
    model, dataset = checkpoint.load(run), data.load("mnist")
    images, _ = next(iter(data.batches(dataset.train, SAMPLES, seed=seed, epoch=0)))
    x = data.normalize(images, torch.float32)
    dense = evaluate(model, dataset.test)[0]
    rows = []
    for scores in SCORES:
        for group in GROUPS:
            for corrected in (False, True):
                sparse, measured = pruned(model, x, scores, group, corrected)
                accuracy = evaluate(sparse, dataset.test)[0]
                rows.append(
                    {"scores": scores, "group": group, "bias_corrected": corrected, "density": DENSITY, "seed": seed,
                     "accuracy": accuracy, "accuracy_change": 100 * (accuracy - dense), **measured,
                     "constant_pixels": float((x.std(dim=0) == 0).double().mean()), "torch": torch.__version__,
                     "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
                )  # fmt: skip
    return rows


def table(rows: list[dict]) -> str:
    """Means over the seeds; a line a ranking and a group."""
    lines = [
        "| ranking | compared within | first layer loses | of it constant | expected / lost | change, points | ± "
        "| change, means given back | ± |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for scores in SCORES:
        for group in GROUPS:
            plain, corrected = (
                [row for row in rows if (row["scores"], row["group"], row["bias_corrected"]) == (scores, group, given)]
                for given in (False, True)
            )
            lost, constant, expected = (
                statistics.mean(row[field] for row in plain) for field in ("lost", "constant", "expected")
            )
            changes = [mean_and_half([row["accuracy_change"] for row in each]) for each in (plain, corrected)]
            texts = " | ".join(f"{mean:+.2f} | {half:.2f}" for mean, half in changes)
            lines.append(
                f"| {scores} | {group} | {100 * lost:.1f} % | {100 * constant:.0f} % | {expected:.2f} | {texts} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=5, help="how many, the first of them 0 (%(default)s)")
    seeds = parser.parse_args().seeds
    if seeds < 1:
        parser.error(f"seeds must be at least 1, not {seeds}")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        for seed in range(seeds):
            rows += rows_of(seed)
            print(table(rows), flush=True)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    README.write_text(put(README.read_text(), BEGIN, END, table(rows)))


if __name__ == "__main__":
    main()
