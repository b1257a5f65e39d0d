"""`qsparse quantize` and `qsparse sensitivity`: each parses, calls one function, and prints. Imports no torch."""

from __future__ import annotations

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
from qsparse.quant import config

Dtype = choices("Dtype", *config.DTYPES, *config.SIMULATED)
Activations = choices("Activations", *config.ACTIVATIONS)
Calibration = choices("Calibration", *config.CALIBRATIONS)
Method = choices("Method", *config.METHODS)
Granularity = choices("Granularity", *config.GRANULARITIES)


def quantize(
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="fp16|bf16|int8|intB|intBwo",
            help="int8 quantizes weights and activations. With --simulate also intB, and intBwo (weights only), "
            "of B = 2 to 8 bits.",
        ),
    ],
    run: RunArgument = None,
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
        int, typer.Option(min=1, help="Images of the validation split that calibration looks at.")
    ] = 1024,
    percentile: Annotated[float, typer.Option(help="Percent of all |x| that --calibration percentile holds.")] = 99.99,
    granularity: Annotated[
        Granularity, typer.Option(help="What of the weights shares a scale; group needs --simulate.")
    ] = Granularity.channel,
    group: Annotated[int, typer.Option(min=1, help="Inputs in a group; the last may be short.")] = 64,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="Ranges with a zero point; needs --simulate.")
    ] = False,
    method: Annotated[
        Method, typer.Option(help="absmax rounds to the nearest; the others look at calibration data to do better.")
    ] = Method.absmax,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Round in float32: accuracy alone, no time and no bytes.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=A,B,...",
            show_default=False,
            help="Measure each value of an option, as calibration=minmax,mse, in one table; repeat it for all "
            "combinations.",
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Quantize a run, and measure it beside the baseline. It is stored and computed in fewer bits."""
    from qsparse import compress
    from qsparse.quant.sweep import sweep as combinations

    options = {
        "dtype": dtype.value,
        "activations": activations.value,
        "calibration": calibration.value if calibration else None,
        "range": range,
        "calibration_samples": calibration_samples,
        "percentile": percentile,
        "granularity": granularity.value,
        "group": group,
        "symmetric": not asymmetric,
        "method": method.value,
        "simulate": simulate,
    }
    configs = combinations(options, sweep or ())
    if sweep:
        done = compress.sweep_run(run, configs, device=device.value, console=progress_console())
    else:
        done = compress.quantize_run(run, configs[0], device=device.value, console=progress_console())
    print_compressed(done, as_json)


def sensitivity(
    run: RunArgument = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="A,B,...", help="fp16, bf16 and int8 are computed, intB and intBwo simulated."),
    ] = "int8,int4wo,int3wo,int2wo",
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Quantize each layer of a run alone, and show what it costs. Looks at the validation split."""
    from qsparse.sensitivity import sensitivity, show

    found = sensitivity(run, dtype.split(","), device=device.value, console=progress_console())
    show(found.rows, text_stream(as_json))
    if as_json:
        print_json(found.to_json())
