"""`qsparse quantize` and `qsparse sensitivity`: each parses, calls one function, and prints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsparse.commandline import (
    Device,
    DeviceOption,
    JsonOption,
    RunArgument,
    choices,
    print_compressed,
    print_json,
    progress_console,
    text_stream,
)
from qsparse.errors import UserError
from qsparse.quant import config

Dtype = choices("Dtype", *config.DTYPES, *config.SIMULATED)
Activations = choices("Activations", *config.ACTIVATIONS)
Calibration = choices("Calibration", *config.CALIBRATIONS)
Method = choices("Method", *config.METHODS)
Granularity = choices("Granularity", *config.GRANULARITIES)


def quantize(
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="|".join(config.DTYPES) + "|intB|intBwo|fp4|fp4wo",
            show_default=False,
            help="int8 and fp8 (e4m3) are of weights and activations, int8wo and int4wo of the weights only. With "
            "--simulate also intB and intBwo of B = 2 to 7 bits, and fp4 (e2m1) and fp4wo.",
        ),
    ] = None,
    run: RunArgument = None,
    layer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=DTYPE,...",
            show_default=False,
            help="The dtype of single layers, as fc1=int8,fc2=fp16; fp32 leaves one alone. Without --dtype the others "
            "stay float32.",
        ),
    ] = None,
    activations: Annotated[
        Activations, typer.Option(help="A scale for each row when it arrives, or one for the layer, calibrated.")
    ] = Activations.dynamic,
    calibration: Annotated[
        Calibration | None, typer.Option(show_default=False, help="How the range of static activations is found.")
    ] = None,
    range: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LO HI", show_default=False, help="The range of --calibration fixed."),
    ] = None,
    calibration_samples: Annotated[
        int | None,
        typer.Option(min=1, show_default="1024", help="Images of the validation split that calibration looks at."),
    ] = None,
    percentile: Annotated[
        float | None,
        typer.Option(show_default="99.99", help="Percent of all |x| that --calibration percentile holds."),
    ] = None,
    weight_calibration: Annotated[
        Calibration, typer.Option(help="How the range of weights that share a scale is found.")
    ] = Calibration.minmax,
    weight_range: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LO HI", show_default=False, help="The range of --weight-calibration fixed."),
    ] = None,
    weight_percentile: Annotated[
        float | None,
        typer.Option(show_default="99.9", help="Percent of |w| that --weight-calibration percentile holds."),
    ] = None,
    granularity: Annotated[
        Granularity, typer.Option(help="What of the weights shares a scale; group is of int8wo, int4wo and --simulate.")
    ] = Granularity.channel,
    group: Annotated[
        int | None,
        typer.Option(min=1, show_default="64", help="Inputs of a --granularity group; the last group may be short."),
    ] = None,
    asymmetric: Annotated[
        bool,
        typer.Option(
            "--asymmetric",
            help="Ranges with a zero point: in int8 those of the activations, with --simulate the weights' too.",
        ),
    ] = False,
    method: Annotated[
        Method,
        typer.Option(
            help="absmax rounds to the nearest; the others do better, all but equalisation by calibration data."
        ),
    ] = Method.absmax,
    qat_epochs: Annotated[
        int,
        typer.Option(
            min=0,
            help="Epochs of training with the rounding in place, each forward pass as inference will run it. Then a "
            "calibration may be lsq: learned.",
        ),
    ] = 0,
    lr: Annotated[
        float | None, typer.Option(show_default="the run's", help="First learning rate of --qat-epochs.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Round in float32: accuracy alone, no time and no bytes.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=A,B,...",
            show_default=False,
            help="Measure each value of an option, as calibration=minmax,mse or range=-1:1,-10:10, in one table; "
            "repeat it for all combinations.",
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Quantize a run, and measure it beside the baseline. It is stored and computed in fewer bits."""
    from qsparse import variants
    from qsparse.quant.sweep import sweep as combinations

    layers = _layers(layer)
    if dtype is None and not layers and not any(text.startswith("dtype=") for text in sweep or ()):
        raise UserError("give --dtype, of all layers, or --layer NAME=DTYPE, of some.")
    options = {
        "dtype": dtype.value if dtype else config.FLOAT32,
        "layers": layers,
        "activations": activations.value,
        "calibration": calibration.value if calibration else None,
        "range": range,
        "calibration_samples": calibration_samples,
        "percentile": percentile,
        "weight_calibration": weight_calibration.value,
        "weight_range": weight_range,
        "weight_percentile": weight_percentile,
        "granularity": granularity.value,
        "group": group,
        "symmetric": not asymmetric,
        "method": method.value,
        "qat_epochs": qat_epochs,
        "lr": lr,
        "simulate": simulate,
    }
    given = {name: value for name, value in options.items() if value is not None}
    configs = combinations(given, sweep or ())
    if sweep:
        done = variants.sweep_run(run, configs, device=device.value, console=progress_console())
    else:
        done = variants.quantize_run(run, configs[0], device=device.value, console=progress_console())
    print_compressed(done, as_json)


def _layers(text: str | None) -> dict[str, str]:
    """What --layer names."""
    found: dict[str, str] = {}
    for pair in text.split(",") if text else ():
        name, _, dtype = pair.partition("=")
        if not (name and dtype) or name in found:
            raise UserError(f"--layer {text}: give each layer once, as fc1=int8,fc2=fp16.")
        found[name] = dtype
    return found


def sensitivity(
    run: RunArgument = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="A,B,...", help="As of quantize; those without a kernel are simulated."),
    ] = "int8,int4wo,int3wo,int2wo",
    density: Annotated[
        str | None,
        typer.Option(metavar="D,...", show_default=False, help="Fractions of a layer's weights that stay, in CSR."),
    ] = None,
    budget_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Choose a dtype for each layer that loses least within so many bytes."
        ),
    ] = None,
    budget_drop: Annotated[
        float | None,
        typer.Option(show_default=False, help="Choose the fewest bytes that lose at most so many points of accuracy."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PNG", show_default="sensitivity.png in the run", help="The heat map.")
    ] = None,
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Compress each layer of a run alone, and show what it costs. Looks at the validation split.

    With a budget a dtype is chosen for each layer, and the model of them is saved and measured.
    """
    from qsparse import checkpoint, variants
    from qsparse.report import show as show_rows
    from qsparse.report.heat import heat_map
    from qsparse.report.plot import require_picture
    from qsparse.sensitivity import Budget, points, show
    from qsparse.sensitivity import sensitivity as measure_each

    if out is not None:
        require_picture(out)
        checkpoint.make_directory(out.parent)
    wanted = budget_bytes is not None or budget_drop is not None
    console, text = progress_console(), text_stream(as_json)
    found = measure_each(
        run,
        [name for name in dtype.split(",") if name],
        _densities(density),
        allowed=Budget(budget_bytes, budget_drop) if wanted else None,
        device=device.value,
        console=console,
    )
    show(found.rows, text)
    picture = heat_map(found.rows, out or found.run / "sensitivity.png")
    print(f"picture: {picture}", file=text)
    result = {**found.to_json(), "png": str(picture), "saved": None, "measured": None}
    if (chosen := found.chosen) is not None:
        named = ",".join(f"{name}={each}" for name, each in chosen.layers.items())
        print(
            f"chosen: {named}, {chosen.bytes:,} bytes, {points(chosen.change)} points on the validation split "
            f"(the sum of the layers alone: {points(chosen.estimated)})",
            file=text,
        )
        if chosen.config is not None:
            done = variants.quantize_run(found.run, chosen.config, device=device.value, console=console)
            show_rows(done.rows, text)
            result |= {"saved": str(done.directory), "measured": done.rows}
    if as_json:
        print_json(result)


def _densities(text: str | None) -> list[float]:
    """What --density names."""
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UserError(f"--density {text}: give numbers above 0 and at most 1 with commas between.") from None
