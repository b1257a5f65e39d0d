"""A trained run and a way to compress it in; the compressed model on disk and its measured rows out."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from qsparse import checkpoint
from qsparse.data import Dataset
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.measure import PeerWarning, measure
from qsparse.models import MLP
from qsparse.nn import QuantSparseLinear
from qsparse.quant import CalibrationWarning, QuantConfig, quantize, train_quantized
from qsparse.report import newest
from qsparse.report.crossover import crossovers
from qsparse.sparse import EmptyLayerWarning, SparseConfig, check_density, mask_density, prune, sparsify_as
from qsparse.sparse.blocks import BlockWarning
from qsparse.sparse.config import DYNAMIC, INT8, ORDERS, SCHEDULES, check_order, choose
from qsparse.sparse.dynamic import check_dynamic, train_dynamically
from qsparse.sparse.finetune import finetune
from qsparse.sparse.gradual import check_gradual, prune_gradually
from qsparse.sparse.int8 import prune_jointly
from qsparse.sparse.lottery import rewind
from qsparse.sparse.pruning import BiasWarning
from qsparse.train.config import TrainConfig
from qsparse.train.progress import Display, say
from qsparse.train.run import load_dataset, read_train_config

BASELINE = "baseline"
_OF_THE_MACHINE = ("device", "console", "measuring")
"""Options of `sparsify_run` that say nothing of the pruning."""


@dataclass(frozen=True)
class Compressed:
    """A compressed variant of a run: where it was saved (None: a simulation has nothing to store), and the rows
    of its measurement (the baseline's first)."""

    run: Path
    variant: str
    directory: Path | None
    rows: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse quantize --json` and `qsparse sparsify --json` print."""
        saved = None if self.directory is None else str(self.directory)
        return {"run": str(self.run), "variant": self.variant, "saved": saved, "rows": self.rows}


@dataclass(frozen=True)
class Swept:
    """Several compressed variants of a run, measured together: where each was saved (None: simulated), and the rows."""

    run: Path
    saved: dict[str, Path | None]
    rows: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse quantize --sweep ... --json` prints."""
        saved = {variant: None if place is None else str(place) for variant, place in self.saved.items()}
        return {"run": str(self.run), "saved": saved, "rows": self.rows}


def quantize_run(
    run: str | Path | None,
    config: str | QuantConfig,
    *,
    device: str = "auto",
    console: Console | None = None,
    measuring: Mapping[str, Any] | None = None,
) -> Compressed:
    """Quantize a run's model as `config` says (a dtype alone: fp16, bf16 or int8), save it as RUN/<variant>, measure it
    beside the baseline, and append the rows to the run's rows.jsonl. A simulation is measured and not saved.

    run: the run directory; None for the newest. device: auto, cpu or cuda. console: where progress goes. measuring:
    options of `measure` (batches, budget_s, peers). Calibration looks at images of the validation split. Training with
    the rounding in place goes on as the run was trained, but for `config.qat_epochs` and `config.lr`.
    Raises UserError for an unknown dtype, a run that is not there or not done, calibration without a validation split,
    and as `checkpoint.load`, `quantize` and `measure`.
    """
    if isinstance(config, str):
        config = QuantConfig(config)
    source = _open(run, device, console, measuring)
    model = _quantized(source, config)
    return _save_and_measure(source, config.variant, model, config.fields(), save=not config.simulate)


def sweep_run(
    run: str | Path | None, configs: list[QuantConfig], *, device: str = "auto", console: Console | None = None
) -> Swept:
    """Quantize a run's model in each of the ways `configs` (of different variants), and measure all in turn beside one
    baseline. The rest is as of `quantize_run`.
    """
    source = _open(run, device, console)
    models = {one.variant: _quantized(source, one) for one in configs}
    details = {one.variant: one.fields() for one in configs}
    return _save_and_measure_all(source, models, details, {one.variant for one in configs if one.simulate})


def sparsify_run(
    run: str | Path | None,
    density: float | None = None,
    format: str = "csr",
    *,
    finetune_epochs: int = 0,
    lr: float | None = None,
    device: str = "auto",
    console: Console | None = None,
    measuring: Mapping[str, Any] | None = None,
    seed: int | None = None,
    schedule: str = "one-shot",
    epochs: int = 0,
    order: str = "prune-first",
    **pruning: Any,
) -> Compressed:
    """Keep the fraction `density` of a run's weights, by default those of the largest magnitude over all layers, store
    them as `format` (csr, coo, 2:4, bitmap, entries or auto), save the model as RUN/<format>-<density> and whatever
    else tells this pruning from others, measure it beside the baseline, and append the rows to the run's rows.jsonl.

    run, device, console, measuring: as in `quantize_run`. finetune_epochs: epochs of training with the pruned weights
    held at zero, before they are dropped. Its learning rate decays linearly from `lr` (None: the run's own) to zero;
    all else is as the run was trained.
    schedule: "one-shot", or what happens over `epochs` epochs of training, which the fine-tuning goes on with.
    "gradual": the density falls (`sparse/gradual.py`). From the weights that the run began with: "rigl" and "set"
    train a network that is sparse from the start (`sparse/dynamic.py`), where `distribution` left out is erk; "lottery"
    trains what the pruner keeps of the trained one (`sparse/lottery.py`).
    order: with the dtype int8, of pruning and rounding: see `sparse/int8.py`.
    pruning: the other settings of a `SparseConfig`: dtype, pruner, distribution, min_density, pattern, permute, block,
    correct_bias, samples, auto, auto_batch. seed: its seed; None for the run's.
    Raises UserError for a density outside (0, 1], an unknown format, and as `SparseConfig` and `quantize_run`.
    """
    sparse = _settle(density, format, finetune_epochs, lr, seed, schedule, epochs, order, **pruning)
    source = _open(run, device, console, measuring)
    variant = sparse.variant + ("" if seed is None else f"-seed{seed}")
    variant += f"-{schedule}{epochs}" if epochs else ""
    variant += f"-ft{finetune_epochs}" if finetune_epochs else ""
    variant += "-joint" if order == "joint" else ""
    source = dataclasses.replace(source, of=variant)
    if seed is None:
        sparse = dataclasses.replace(sparse, seed=source.config.seed)
    trained = epochs + finetune_epochs
    if trained:
        config = dataclasses.replace(source.config, epochs=trained, lr=source.config.lr if lr is None else lr)
    if sparse.pruner == "movement" and schedule == "one-shot":
        source.say(
            "movement ranks weights by where training moves them, which a network that is trained already does not "
            "show: give --schedule gradual --epochs 4, say"
        )
    scales = None
    with _aloud(source, EmptyLayerWarning), _aloud(source, BlockWarning), _aloud(source, BiasWarning):
        if schedule == "gradual":
            model = source.model.replace({})
            masks = _watched(prune_gradually, source, model, sparse, config, epochs)
        elif schedule in DYNAMIC:
            model = _initial(source)
            masks = _watched(train_dynamically, source, model, sparse, config, epochs, schedule)
        elif order == "joint":
            model, masks, scales = prune_jointly(source.model, sparse, source.dataset)
        else:
            model, masks = prune(source.model, sparse, source.dataset)
    details: dict[str, Any] = {
        "method": schedule if schedule in DYNAMIC else sparse.pruner,
        "density": mask_density(masks),
        "density_asked": sparse.density,
        "distribution": sparse.distribution,
        "min_density": sparse.min_density,
        "pattern": sparse.pattern,
        "permute": sparse.permute,
        "block": sparse.block,
        "correct_bias": sparse.correct_bias,
        "bias_corrected": sparse.correct_bias and _biases_differ(model, source.model),
        "layer_density": {name: mask_density({name: mask}) for name, mask in masks.items()},
        "prune_seed": sparse.seed,
        "samples": sparse.samples if sparse.needs_data or schedule == "rigl" else None,
        "schedule": schedule,
        "gradual_epochs": epochs if schedule == "gradual" else 0,
        "schedule_epochs": epochs,
        "finetune_epochs": finetune_epochs,
    }
    if trained:
        details["finetune_lr"] = config.lr
    if schedule == "lottery":
        model = rewind(_initial(source), masks)
    if trained and schedule in ("one-shot", "lottery"):
        details["finetune_steps"] = "sparse" if _finetune(source, model, masks, config) else "dense"
    compressed, costs = sparsify_as(sparse, model, masks, scales)
    if costs is not None:
        rows_timed = sparse.auto_batch if sparse.auto == "time" else None
        details |= {"auto": sparse.auto, "auto_batch": rows_timed, "auto_costs": costs}
        source.say("; ".join(f"{name}: {_cheapest(each, sparse.auto)}" for name, each in costs.items()))
    if sparse.dtype == INT8:
        details["order"] = order
    if any(isinstance(layer, QuantSparseLinear) for layer in compressed.children()):
        details["computed_in"] = "float32"  # exact integers; there is no int8 CSR kernel
    return _save_and_measure(source, variant, compressed, details)


@dataclass(frozen=True)
class Sweep:
    """Variants of one run that differ by their density: each one's directory, and the baseline's row and theirs."""

    run: Path
    variants: list[Compressed]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all, the baseline's (as measured last) first; a speed-up is over the baseline beside it then."""
        return newest(row for variant in self.variants for row in variant.rows)

    @property
    def crossovers(self) -> dict[str, float | None]:
        """Batch size, or "bytes" -> the density below which the variants beat the baseline (see the report)."""
        return crossovers(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse sparsify --density 0.5,0.1 --json` prints."""
        each = [{"variant": variant.variant, "saved": str(variant.directory)} for variant in self.variants]
        return {"run": str(self.run), "variants": each, "rows": self.rows, "crossovers": self.crossovers}


def sparsify_sweep(run: str | Path | None, densities: Sequence[float], format: str = "csr", **options: Any) -> Sweep:
    """`sparsify_run` at each of `densities`, of which each starts from the run itself. Raises as it does, and UserError
    for a density that is bad, there twice, or does not go with the other options, before anything is computed."""
    if len(set(map(check_density, densities))) < max(len(densities), 1):
        raise UserError(f"the densities are {', '.join(map(str, densities)) or 'none'}: give each once")
    for density in densities:
        _settle(density, format, **{name: value for name, value in options.items() if name not in _OF_THE_MACHINE})
    run = checkpoint.find_run(run)
    return Sweep(run, [sparsify_run(run, density, format, **options) for density in densities])


@dataclass(frozen=True)
class _Source:
    """A finished run, opened: its dense model and its data on the device that everything runs on."""

    run: Path
    config: TrainConfig
    model: MLP
    dataset: Dataset
    device: torch.device
    console: Console | None
    measuring: Mapping[str, Any]
    of: str = ""  # the variant that is made of it, which may be one of several

    def say(self, sentence: str) -> None:
        say(self.console, f"{self.of}: {sentence}" if self.of else sentence)

    def display(self, epochs: int) -> Display:
        """What shows a training of the variant."""
        return Display(self.console or Console(quiet=True), epochs, self.of)


def _open(
    run: str | Path | None, device: str, console: Console | None, measuring: Mapping[str, Any] | None = None
) -> _Source:
    run = checkpoint.find_run(run)
    if not checkpoint.is_finished(run):
        raise UserError(checkpoint.unfinished(run))
    checkpoint.require_writable(run)
    target = resolve_device(device, partial(say, console))
    config = dataclasses.replace(read_train_config(run), backend="auto")  # fine-tuning goes through the layers
    model = checkpoint.load(run, target)
    dataset = load_dataset(run, console)
    return _Source(run, config, model, dataset.to(target), target, console, measuring or {})


def _quantized(source: _Source, config: QuantConfig) -> MLP:
    source = dataclasses.replace(source, of=config.variant)
    with _aloud(source, CalibrationWarning):
        if not config.qat_epochs:
            return quantize(source.model, config, source.dataset.validation.images if config.needs_data else None)
        source.say("training with its rounding")
        with source.display(config.qat_epochs) as display:
            watch = {"on_epoch": display.epoch_end, "progress": display.progress}
            return train_quantized(source.model, config, source.dataset, source.config, **watch)


def _settle(
    density: float | None,
    format: str,
    finetune_epochs: int = 0,
    lr: float | None = None,
    seed: int | None = None,
    schedule: str = SCHEDULES[0],
    epochs: int = 0,
    order: str = ORDERS[0],
    **pruning: Any,
) -> SparseConfig:
    """What `sparsify_run` is asked for, once all of its options are found to go together."""
    if schedule in DYNAMIC:
        pruning = _start(schedule, pruning)
    sparse = SparseConfig(density=density, format=format, seed=0 if seed is None else seed, **pruning)
    for option, count in (("--finetune-epochs", finetune_epochs), ("--epochs", epochs)):
        if type(count) is not int or count < 0:
            raise UserError(f"{option} is {count!r}: it must be a whole number, at least 0")
    if lr is not None:
        TrainConfig(lr=lr)  # refuses a bad rate before anything is loaded
    _check_schedule(sparse, schedule, epochs)
    check_order(sparse, order)
    if order == "joint" and epochs + finetune_epochs:
        raise UserError("joint leaves weights that are rounded already, which do not train: choose prune-first.")
    return sparse


def _check_schedule(sparse: SparseConfig, schedule: str, epochs: int) -> None:
    choose("schedule", schedule, SCHEDULES)
    if schedule != "one-shot" and sparse.correct_bias:
        raise UserError(f"{schedule} trains the biases: --correct-bias is of pruning at one stroke.")
    if (schedule != "one-shot") != (epochs > 0):
        of = "a --schedule other than one-shot" if schedule == "one-shot" else f"--schedule {schedule}"
        raise UserError(f"--epochs is {epochs}: it is of {of}, which needs at least 1")
    if schedule == "gradual":
        check_gradual(sparse)
    if schedule in DYNAMIC:
        check_dynamic(sparse, schedule)


def _start(schedule: str, pruning: dict[str, Any]) -> dict[str, Any]:
    """The settings of where a dynamic training begins: anywhere, in numbers that are erk's unless others are asked."""
    if pruning.get("pruner", "random") != "random":
        raise UserError(f"{schedule} begins with random connections: give no pruner with it.")
    return {**pruning, "pruner": "random", "distribution": pruning.get("distribution") or "erk"}


def _biases_differ(one: MLP, other: MLP) -> bool:
    pairs = zip(one.layers().values(), other.layers().values(), strict=True)
    return not all(torch.equal(a.bias, b.bias) for a, b in pairs if a.bias is not None)


def _initial(source: _Source) -> MLP:
    """The network as the run's training began with it."""
    return MLP(source.model.sizes, seed=source.config.seed).to(source.device)


def _cheapest(costs: dict[str, float], criterion: str) -> str:
    """What `--format auto` found of a layer, the format that it chose first."""
    unit = "bytes" if criterion == "bytes" else "µs"
    return ", ".join(f"{format} {cost:,.6g} {unit}" for format, cost in sorted(costs.items(), key=lambda pair: pair[1]))


@contextlib.contextmanager
def _aloud(source: _Source, category: type[Warning]) -> Iterator[None]:
    """Say the warnings of `category` that are given inside; others go their way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", category)
        yield
    for warning in caught:
        if issubclass(warning.category, category):
            source.say(f"warning: {warning.message}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _watched(
    training: Callable[..., dict[str, torch.Tensor]], source: _Source, model: MLP, sparse: SparseConfig, *how: Any
) -> dict[str, torch.Tensor]:
    """Let `training` change `model`, with its progress shown, and return its masks. how: the configuration, ..."""
    with source.display(how[0].epochs) as display:
        watch = {"on_epoch": display.epoch_end, "progress": display.progress}
        return training(model, sparse, source.dataset, *how, **watch)


def _finetune(source: _Source, model: MLP, masks: dict[str, torch.Tensor], config: TrainConfig) -> bool:
    """`finetune` with its progress shown."""
    with source.display(config.epochs) as display:
        watch = {"on_epoch": display.epoch_end, "progress": display.progress}
        return finetune(model, masks, source.dataset, config, **watch)


def _save_and_measure(
    source: _Source, variant: str, model: MLP, details: dict[str, Any], *, save: bool = True
) -> Compressed:
    swept = _save_and_measure_all(source, {variant: model}, {variant: details}, set() if save else {variant})
    return Compressed(source.run, variant, swept.saved[variant], swept.rows)


def _save_and_measure_all(
    source: _Source, models: dict[str, MLP], details: dict[str, dict[str, Any]], unsaved: set[str]
) -> Swept:
    """Save the models first, so that the rows' file bytes are the files'; but not those named in `unsaved`."""
    seed = source.config.seed
    facts = {BASELINE: {"file_bytes": (source.run / checkpoint.MODEL).stat().st_size, "seed": seed}}
    saved: dict[str, Path | None] = {}
    for variant, model in models.items():
        facts[variant] = {"seed": seed, **details[variant]}
        saved[variant] = None if variant in unsaved else source.run / variant
        if directory := saved[variant]:
            extra = {"run": str(source.run), "variant": variant, **details[variant]}
            facts[variant]["file_bytes"] = checkpoint.save_model(directory, model, extra).stat().st_size
    done = (f"{place}: saved" if place else f"{name}: simulated, so without a time" for name, place in saved.items())
    say(source.console, f"{', '.join(done)}; measuring beside the baseline (some seconds) ...")
    with _aloud(source, PeerWarning):
        rows = measure(
            {BASELINE: source.model, **models},
            source.dataset.test,
            baseline=BASELINE,
            device=source.device,
            run=str(source.run),
            details=facts,
            **source.measuring,
        )
    checkpoint.append_rows(source.run, rows)
    return Swept(source.run, saved, rows)
