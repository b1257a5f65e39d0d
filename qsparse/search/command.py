"""`qsparse search`: parses, calls one function, and prints. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from qsparse.commandline import (
    Device,
    DeviceOption,
    JsonOption,
    RunArgument,
    print_json,
    progress_console,
    text_stream,
)
from qsparse.errors import refuse_idle
from qsparse.quant.config import DTYPES, FLOAT32


def search(
    run: RunArgument = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials of the study, over all processes that work on it.")] = 50,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            show_default=",".join((FLOAT32, *DTYPES)),
            help="What a layer may be; a sparse one only fp32, fp16 or bf16.",
        ),
    ] = None,
    density: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LEAST MOST", show_default="0.02 0.5", help="Of a layer that is stored as CSR."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="The batch size whose latency counts.")] = 1024,
    finetune_epochs: Annotated[int, typer.Option(min=0, help="Epochs of training after a plan's pruning.")] = 0,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Of timing for each plan, on a CPU.")] = 0.3,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default="search.db in the run",
            help="A database, as sqlite:///FILE, postgresql://... or mysql://...; all processes give the same.",
        ),
    ] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="named after the run's weights", help="Of the study.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the proposals.")] = 0,
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Search each layer's dtype and density. The best are then measured on the test split, and saved."""
    from qsparse.report import show
    from qsparse.search import study as studies

    given: dict[str, Any] = {} if dtype is None else {"dtypes": tuple(dtype.split(","))}
    given |= {} if density is None else {"least_density": density[0], "most_density": density[1]}
    config = studies.SearchConfig(
        **given,
        batch=batch,
        budget_s=budget,
        finetune_epochs=finetune_epochs,
    )
    if not config.may_prune:
        of_sparse = {"density": density is not None, "finetune_epochs": finetune_epochs > 0}
        refuse_idle(
            [{name: "sparse layers, whose --dtype is fp32, fp16 or bf16" for name, on in of_sparse.items() if on}]
        )
    found = studies.search(
        run,
        config,
        trials=trials,
        storage=storage,
        name=study,
        seed=seed,
        device=device.value,
        console=progress_console(),
    )
    text = text_stream(as_json)
    if found.rows:
        show(found.rows, text)
        for name, plan in found.plans.items():
            print(f"{name}: {', '.join(f'{layer} {choice}' for layer, choice in plan.items())}", file=text)
    print(f"{found.trials} trials in {found.storage}, study {found.study}", file=text)
    if as_json:
        print_json(found.to_json())
