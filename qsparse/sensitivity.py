"""A run in; what each of its layers, quantized or sparsified alone, does to the accuracy and the bytes, out."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsparse import checkpoint
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.measure import environment
from qsparse.models import MLP
from qsparse.nn import stored_bytes
from qsparse.quant import DTYPES, QuantConfig, budget, quantize
from qsparse.quant.config import FLOAT32, spelt
from qsparse.sparse import EmptyLayerWarning, SparseConfig, prune, sparsify
from qsparse.train.fit import evaluate
from qsparse.train.progress import say
from qsparse.train.run import load_dataset

ALL = "all"
_WHERE = ("gpu", "cpu", "torch", "cuda", "date", "commit")  # of what a row says of its machine: nothing is timed
_WIDE = 160  # columns of a table that no terminal shows


@dataclass(frozen=True)
class Budget:
    """What a choice of a dtype for each layer may take: bytes of all weights, or points of accuracy."""

    bytes: int | None = None
    drop: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.drop is None):
            raise UserError("give one of --budget-bytes and --budget-drop.")
        if self.drop is not None and not (self.drop >= 0 and math.isfinite(self.drop)):
            raise UserError(f"--budget-drop is {self.drop} points: it must be at least 0, and finite.")


@dataclass(frozen=True)
class Chosen:
    """What fits the budget. change: of the accuracy in points, measured with all layers as chosen, on the validation
    split; estimated: the sum of what the layers cost alone."""

    layers: dict[str, str]
    bytes: int
    change: float
    estimated: float

    @property
    def config(self) -> QuantConfig | None:
        """The quantization that this is; None where every layer stays as it is."""
        dtypes = set(self.layers.values())
        if len(dtypes) > 1:
            return QuantConfig(FLOAT32, layers=self.layers)
        return None if dtypes == {FLOAT32} else QuantConfig(*dtypes)


@dataclass(frozen=True)
class Sensitivity:
    """A row for each layer and choice, and for all layers at once; what was chosen, if there was a budget."""

    run: Path
    rows: list[dict[str, Any]]
    chosen: Chosen | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse sensitivity --json` prints, but for what it saves."""
        return {"run": str(self.run), "rows": self.rows, "chosen": None if self.chosen is None else asdict(self.chosen)}


def sensitivity(
    run: str | Path | None,
    dtypes: Sequence[str],
    densities: Sequence[float] = (),
    *,
    allowed: Budget | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Sensitivity:
    """Compress each layer of a run alone, and then all, in each way; the rest stays float32.

    run: the run directory; None for the newest. dtypes: as of `QuantConfig`; those without a kernel are simulated.
    densities: fractions of a layer's weights that stay, those of largest magnitude, stored as CSR. The accuracy is that
    of the validation split, since it serves to choose; the test split is not looked at.
    allowed: choose a dtype for each layer within it, of `dtypes` that kernels compute and float32.

    Returns rows of run, layer (or "all"), dtype, density (null: dense), choice (what a picture calls the two), split
    ("validation"), images, accuracy (a fraction), accuracy_change (points, against the float32 model on the same
    images), weights (their number in the layer), bytes (of all that the layer stores; null where simulated),
    float32_bytes, simulated, gpu, cpu, torch, cuda, date, commit.
    Raises UserError for an unknown dtype, a density outside (0, 1], a run that is not there or not done, or one without
    a validation split, a budget that nothing keeps within.
    """
    if not dtypes and not densities:
        raise UserError("sensitivity needs a dtype or a density at least, as --dtype int8.")
    dtypes, densities = list(dict.fromkeys(dtypes)), list(dict.fromkeys(densities))
    for dtype in dtypes:
        _config(dtype)
    sparse = [SparseConfig(density, distribution="uniform") for density in densities]
    if allowed is not None and not set(dtypes) & set(DTYPES):
        raise UserError(f"A budget is of what kernels compute: give --dtype one of {', '.join(DTYPES)}.")
    run = checkpoint.find_run(run)
    target = resolve_device(device, lambda sentence: say(console, sentence))
    model = checkpoint.load(run, target)
    split = load_dataset(run, console).validation.to(target)
    if not len(split):
        raise UserError("The run has no validation split to measure on: train with --validation above 0.")
    base, _ = evaluate(model, split)
    where = {key: value for key, value in environment(target).items() if key in _WHERE}
    rows = []
    for name, choice, compressed in _variants(model, dtypes, sparse):
        accuracy, _ = evaluate(compressed, split)
        names = list(model.layers()) if name == ALL else [name]
        simulated = choice["density"] is None and choice["choice"] not in DTYPES
        rows.append(
            {
                "run": str(run),
                "layer": name,
                **choice,
                "split": "validation",
                "images": len(split),
                "accuracy": accuracy,
                "accuracy_change": 100 * (accuracy - base),
                "weights": sum(model.layers()[each].weight.numel() for each in names),
                "bytes": None if simulated else _bytes(compressed, names),
                "float32_bytes": _bytes(model, names),
                "simulated": simulated,
                **where,
            }
        )
    if allowed is None:
        return Sensitivity(run, rows)

    def change(plan: budget.Plan) -> float:
        found = quantize(model, config) if (config := Chosen(plan.layers, 0, 0, 0).config) else model
        return 100 * (evaluate(found, split)[0] - base)

    found = budget.plans(_costs(rows))
    if allowed.bytes is not None:
        plan = budget.within_bytes(found, allowed.bytes)
    else:
        plan = budget.within_drop(found, allowed.drop, lambda plan: -change(plan))
    return Sensitivity(run, rows, Chosen(plan.layers, plan.bytes, change(plan), 0.0 - plan.drop))


def _variants(
    model: MLP, dtypes: Sequence[str], sparse: Sequence[SparseConfig]
) -> Iterator[tuple[str, dict[str, Any], MLP]]:
    """Every model to measure: the layer that is compressed, how, and the model; last all layers at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyLayerWarning)  # the rows show what that costs
        sparsified = [sparsify(*prune(model, config)) for config in sparse]
    for name in (*model.layers(), ALL):
        for dtype in dtypes:
            config = _config(dtype, None if name == ALL else name)
            yield name, {"dtype": spelt(dtype), "density": None, "choice": dtype}, quantize(model, config)
        for config, whole in zip(sparse, sparsified, strict=True):
            choice = {"dtype": spelt(FLOAT32), "density": config.density, "choice": f"csr-{config.density:g}"}
            yield name, choice, whole if name == ALL else model.replace({name: whole.layers()[name]})


def _config(dtype: str, layer: str | None = None) -> QuantConfig:
    """One layer, or all, in `dtype`."""
    of = {"dtype": dtype} if layer is None else {"dtype": FLOAT32, "layers": {layer: dtype}}
    return QuantConfig(**of, simulate=dtype not in DTYPES)


def _bytes(model: MLP, names: Iterable[str]) -> int:
    """Of all that these layers store."""
    return sum(stored_bytes(model.layers()[name]) for name in names)


def _costs(rows: list[dict[str, Any]]) -> dict[str, dict[str, tuple[int, float]]]:
    """Layer -> dtype that a kernel computes -> bytes, change in points; float32 costs nothing."""
    costs: dict[str, dict[str, tuple[int, float]]] = {}
    for row in rows:
        if row["layer"] != ALL and row["density"] is None and not row["simulated"]:
            of_layer = costs.setdefault(row["layer"], {FLOAT32: (row["float32_bytes"], 0.0)})
            of_layer[row["choice"]] = (row["bytes"], row["accuracy_change"])
    return costs


def show(rows: list[dict[str, Any]], file: IO[str] | None = None) -> None:
    """Print the changes and the bytes, two lines a layer and a column a choice, to `file` (standard output)."""
    choices = list(dict.fromkeys((row["choice"], row["simulated"]) for row in rows))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("layer")
    table.add_column("float32\nbytes", justify="right")
    for choice, simulated in choices:
        table.add_column(f"{choice}\n{'simulated' if simulated else ''}", justify="right")
    for layer in dict.fromkeys(row["layer"] for row in rows):
        of_layer = {row["choice"]: row for row in rows if row["layer"] == layer}
        cells = (Text(_cell(of_layer[choice])) for choice, _ in choices)
        table.add_row(layer, f"{next(iter(of_layer.values()))['float32_bytes']:,}", *cells)
    table.caption = Text(
        f"Change of the accuracy in points on {rows[0]['images']:,} validation images, one layer at a time; its bytes.",
        style="table.caption",
    )
    table.caption_justify = "left"
    file = file or sys.stdout
    Console(file=file, width=None if file.isatty() else _WIDE).print(table)


def _cell(row: dict[str, Any]) -> str:
    size = "" if row["bytes"] is None else f"{row['bytes']:,}"
    return f"{points(row['accuracy_change'])}\n{size}"


def points(change: float) -> str:
    return f"{change:+.2f}" if round(change, 2) else "0.00"
