"""`qsparse sparsify`, `compress` and `formats`: each parses, calls one function, and prints. Imports no torch."""

from __future__ import annotations

import enum
from typing import Annotated, Any

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
from qsparse.errors import UserError, refuse_idle
from qsparse.sparse import config

Format = choices("Format", *config.FORMATS)
Int8Format = choices("Int8Format", *config.INT8_FORMATS)
Pruner = choices("Pruner", *config.PRUNERS)
Distribution = choices("Distribution", *config.DISTRIBUTIONS)
Schedule = choices("Schedule", *config.SCHEDULES)
Order = choices("Order", *config.ORDERS)
Dtype = choices("Dtype", config.INT8)
FloatDtype = choices("FloatDtype", *(name for name in config.DTYPES if name != config.INT8))
Criterion = choices("Criterion", *config.CRITERIA)
ValueDtype = choices("ValueDtype", "float32", "float16", "bfloat16", "int8")


def _density(value: float) -> float:
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{value} is outside (0, 1]: 0.1 keeps a tenth of the weights, 1 keeps all")
    return value


def _densities(text: str | None) -> list[float] | None:
    """What --density names: one, or several with commas between."""
    if text is None:
        return None
    try:
        return [_density(float(part)) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor numbers with commas between") from None


DensityOption = Annotated[
    str | None,
    typer.Option(
        metavar="D[,D...]",
        callback=_densities,
        show_default=False,
        help="Fraction of the weights that stays, above 0 and at most 1; several make one table.",
    ),
]
PatternOption = Annotated[
    str | None,
    typer.Option(
        metavar="N:M", show_default=False, help="Instead of --density: N of each M weights of a row stay, as 2:4."
    ),
]
PermuteOption = Annotated[
    bool, typer.Option("--permute", help="With --pattern: search an order of the columns in which it costs less.")
]
BlockOption = Annotated[
    str | None,
    typer.Option(metavar="RxC", show_default=False, help="Whole blocks of R rows and C columns stay, as 1x16."),
]
CorrectBiasOption = Annotated[
    bool,
    typer.Option(
        "--correct-bias",
        help="Give what pruning takes from the mean of an output back to its bias, where the validation split gains.",
    ),
]
DistributionOption = Annotated[
    Distribution | None,
    typer.Option(
        show_default="global, of wanda and sparsegpt uniform",
        help="How many weights each layer keeps: by one ranking, the same fraction, or Erdős-Rényi-kernel.",
    ),
]
MinDensityOption = Annotated[float, typer.Option(help="Fraction of its weights that each layer keeps at least.")]
SamplesOption = Annotated[
    int | None, typer.Option(min=1, show_default="2048", help="Training images that the pruner looks at.")
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, show_default="the run's", help="Of random, and of the choice of images.")
]
AutoOption = Annotated[
    Criterion | None,
    typer.Option(show_default="bytes", help="What --format auto chooses each layer's format by, dense storage too."),
]
AutoBatchOption = Annotated[
    int | None, typer.Option(min=1, show_default="1024", help="Rows of the products that --auto time measures here.")
]
FinetuneOption = Annotated[
    int, typer.Option(min=0, help="Epochs of training after pruning, the pruned weights held at zero.")
]


def sparsify(
    density: DensityOption = None,
    run: RunArgument = None,
    pattern: PatternOption = None,
    permute: PermuteOption = False,
    block: BlockOption = None,
    correct_bias: CorrectBiasOption = False,
    pruner: Annotated[
        Pruner | None,
        typer.Option(
            show_default="magnitude",
            help="What ranks the weights; all but magnitude and random look at training images.",
        ),
    ] = None,
    distribution: DistributionOption = None,
    min_density: MinDensityOption = 0.0,
    samples: SamplesOption = None,
    seed: SeedOption = None,
    format: Annotated[
        Format,
        typer.Option(help="How the weights that stay are stored; 2:4 keeps 2 of each 4 where nothing else is said."),
    ] = Format.csr,
    dtype: Annotated[
        FloatDtype | None, typer.Option(show_default="fp32; of 2:4, bitmap and entries fp16", help="Of the weights.")
    ] = None,
    auto: AutoOption = None,
    auto_batch: AutoBatchOption = None,
    schedule: Annotated[
        Schedule,
        typer.Option(
            help="Prune at once, or over --epochs of training: of the run (gradual), or from its first weights, sparse "
            "from the start (rigl, set) or what pruning keeps (lottery)."
        ),
    ] = Schedule.one_shot,
    epochs: Annotated[int, typer.Option(min=0, help="Epochs of training of a --schedule other than one-shot.")] = 0,
    finetune_epochs: FinetuneOption = 0,
    lr: Annotated[
        float | None, typer.Option(show_default="the run's", help="First learning rate of --schedule and fine-tuning.")
    ] = None,
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Prune a run, and measure it beside the baseline. Only the weights that stay are stored and computed."""
    _run(
        density,
        run,
        as_json,
        format=format,
        dtype=dtype,
        auto=auto,
        auto_batch=auto_batch,
        pruner=pruner,
        distribution=distribution,
        min_density=min_density,
        pattern=pattern,
        permute=permute,
        block=block,
        correct_bias=correct_bias,
        samples=samples,
        seed=seed,
        schedule=schedule,
        epochs=epochs,
        finetune_epochs=finetune_epochs,
        lr=lr,
        device=device,
    )


def compress(
    density: DensityOption = None,
    run: RunArgument = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights that stay, one scale an output channel.")] = Dtype.int8,
    format: Annotated[Int8Format, typer.Option(help="How they are stored.")] = Int8Format.csr,
    auto: AutoOption = None,
    auto_batch: AutoBatchOption = None,
    order: Annotated[
        Order, typer.Option(help="Prune, then round what stays; or SparseGPT prunes and rounds in one pass.")
    ] = Order.prune_first,
    pattern: PatternOption = None,
    permute: PermuteOption = False,
    block: BlockOption = None,
    correct_bias: CorrectBiasOption = False,
    pruner: Annotated[
        Pruner | None, typer.Option(show_default="magnitude, of joint sparsegpt", help="As of sparsify.")
    ] = None,
    distribution: DistributionOption = None,
    min_density: MinDensityOption = 0.0,
    samples: SamplesOption = None,
    seed: SeedOption = None,
    finetune_epochs: FinetuneOption = 0,
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Prune a run and round what stays to int8. Measured beside the baseline.

    2:4 is multiplied in int8; there is no int8 kernel for csr, whose integers are multiplied in float32, which the row
    says.
    """
    own = Pruner.sparsegpt if order is Order.joint else Pruner.magnitude
    _run(
        density,
        run,
        as_json,
        dtype=dtype,
        format=format,
        auto=auto,
        auto_batch=auto_batch,
        order=order,
        pruner=pruner or own,
        distribution=distribution,
        min_density=min_density,
        pattern=pattern,
        permute=permute,
        block=block,
        correct_bias=correct_bias,
        samples=samples,
        seed=seed,
        finetune_epochs=finetune_epochs,
        device=device,
    )


def _run(density: Any, run: Any, as_json: bool, **given: Any) -> None:
    """Compress at one density, at several, or by a pattern, and print the table. given: options, None if left out."""
    options = {
        name: value.value if isinstance(value, enum.Enum) else value
        for name, value in given.items()
        if value is not None
    }
    says_itself = options["format"] == "2:4" and density is None and "pattern" not in options
    if (density is None) != ("pattern" in options) and not says_itself:
        raise UserError("give one of --density (0.1 keeps a tenth of the weights) and --pattern (2:4)")
    refuse_idle([config.idle(options)])

    from qsparse import variants
    from qsparse.report.crossover import sentences

    one = density is None or len(density) == 1
    sparsify_any = variants.sparsify_run if one else variants.sparsify_sweep
    asked = density[0] if one and density else density
    done = sparsify_any(run, asked, console=progress_console(), **options)
    print_compressed(done, as_json)
    if isinstance(done, variants.Sweep):
        print(sentences(done.crossovers), file=text_stream(as_json))


def formats(
    shape: Annotated[str, typer.Option(metavar="SIZE[,SIZE[,SIZE]]", help="Of the array: 1 to 3 sizes.")] = "256,784",
    density: Annotated[
        float, typer.Option(callback=_density, help="Fraction of the entries that is stored, above 0 and at most 1.")
    ] = 0.1,
    dtype: Annotated[ValueDtype, typer.Option(help="Of the values; indices are int32.")] = ValueDtype.float32,
    as_json: JsonOption = False,
) -> None:
    """Show what an array takes in each format. The densities below which they beat the dense array, too."""
    from qsparse.report.sizes import show_sizes
    from qsparse.sparse.compare import compare, parse_shape

    comparison = compare(parse_shape(shape), density, dtype.value)
    show_sizes(comparison, text_stream(as_json))
    if as_json:
        print_json(comparison.to_json())
