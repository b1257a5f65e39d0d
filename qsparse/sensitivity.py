"""A run in; what each of its layers, quantized alone, does to the accuracy, out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsparse import checkpoint
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.quant import DTYPES, QuantConfig, quantize
from qsparse.quant.config import FLOAT32
from qsparse.train.fit import evaluate
from qsparse.train.progress import say
from qsparse.train.run import load_dataset

ALL = "all"


@dataclass(frozen=True)
class Sensitivity:
    """A row for each layer and dtype, and for all layers at once."""

    run: Path
    rows: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse sensitivity --json` prints."""
        return {"run": str(self.run), "rows": self.rows}


def sensitivity(
    run: str | Path | None, dtypes: Sequence[str], *, device: str = "auto", console: Console | None = None
) -> Sensitivity:
    """Quantize each layer of a run alone, and then all, to each of `dtypes`, the rest staying float32.

    run: the run directory; None for the newest. dtypes: as of `QuantConfig`; fp16, bf16 and int8 are computed by their
    kernels, the others are simulated. The accuracy is that of the validation split, since it serves to choose a dtype
    for each layer; the test split is not looked at.

    Returns rows of run, layer (or "all"), dtype, split ("validation"), images, accuracy (a fraction), accuracy_change
    (points, against the float32 model on the same images), weights (their number in the layer), simulated.
    Raises UserError for an unknown dtype, a run that is not there or not done, or one without a validation split.
    """
    if not dtypes:
        raise UserError("sensitivity needs a dtype at least, as --dtype int8.")
    dtypes = list(dict.fromkeys(dtypes))
    for dtype in dtypes:
        _config(dtype)
    run = checkpoint.find_run(run)
    target = resolve_device(device, lambda sentence: say(console, sentence))
    model = checkpoint.load(run, target)
    split = load_dataset(run, console).validation.to(target)
    if not len(split):
        raise UserError("The run has no validation split to measure on: train with --validation above 0.")
    base, _ = evaluate(model, split)
    sizes = {name: layer.weight.numel() for name, layer in model.layers().items()}
    rows = []
    for name in (*sizes, ALL):
        for dtype in dtypes:
            config = _config(dtype, None if name == ALL else name)
            accuracy, _ = evaluate(quantize(model, config), split)
            rows.append(
                {
                    "run": str(run),
                    "layer": name,
                    "dtype": dtype,
                    "split": "validation",
                    "images": len(split),
                    "accuracy": accuracy,
                    "accuracy_change": 100 * (accuracy - base),
                    "weights": sizes.get(name, sum(sizes.values())),
                    "simulated": config.simulate,
                }
            )
    return Sensitivity(run, rows)


def _config(dtype: str, layer: str | None = None) -> QuantConfig:
    """One layer, or all, in `dtype`."""
    of = {"dtype": dtype} if layer is None else {"dtype": FLOAT32, "layers": {layer: dtype}}
    return QuantConfig(**of, simulate=dtype not in DTYPES)


def show(rows: list[dict[str, Any]], file: IO[str] | None = None) -> None:
    """Print the changes, a line a layer and a column a dtype, to `file` (standard output)."""
    dtypes = list(dict.fromkeys((row["dtype"], row["simulated"]) for row in rows))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("layer")
    table.add_column("weights", justify="right")
    for dtype, simulated in dtypes:
        table.add_column(f"{dtype}\n{'simulated' if simulated else ''}", justify="right")
    for layer in dict.fromkeys(row["layer"] for row in rows):
        of_layer = {row["dtype"]: row for row in rows if row["layer"] == layer}
        changes = (Text(f"{of_layer[dtype]['accuracy_change']:+.2f}") for dtype, _ in dtypes)
        table.add_row(layer, f"{next(iter(of_layer.values()))['weights']:,}", *changes)
    table.caption = Text(
        f"Change of the accuracy in points on {rows[0]['images']:,} validation images, one layer quantized at a time.",
        style="table.caption",
    )
    table.caption_justify = "left"
    Console(file=file or sys.stdout).print(table)
