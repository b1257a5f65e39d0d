"""Whole networks in int8, their activations' quantization and the head included, against what the libraries offer.

On a GPU each network is one CUDA graph with its float16 input resident and the L2 cache flushed; the peers are
PyTorch's float16, plain and compiled, and torchao's int8, all in graphs too. What counts is a cell: a network at a
batch size, ours beside the fastest of the peers there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from qsparse import nn
from qsparse.bench.harness import (
    EXACT,
    REPETITIONS,
    TOLERANCES,
    Call,
    Contender,
    Reference,
    Tolerance,
    append,
    compete,
    geometric_mean,
    row,
    willing,
)
from qsparse.bench.int8 import quantized, scaled
from qsparse.bench.peers import pytorch, torchao
from qsparse.bench.tables import show_networks
from qsparse.errors import UserError
from qsparse.measure import BATCHES, environment
from qsparse.models import MLP
from qsparse.quant import QuantConfig, quantize

Sizes = tuple[int, ...]

NETWORKS: tuple[Sizes, ...] = ((784, 256, 10), (784, 1024, 1024, 10), (784, 4096, 4096, 10))
CPU_NETWORKS, CPU_BATCHES = NETWORKS[:2], BATCHES[:3]
_CALIBRATION = 1024
_CHAIN = Tolerance(2e-3, 5e-3)  # float16 rounded after each layer
_LIBRARY = Tolerance(6e-2, 0.2)  # torchao rounds weights and activations of each layer in its own way


@dataclass(frozen=True)
class Network:
    """A network of ours with what it has to give for `x`, and the fields that tell it from its siblings."""

    model: MLP
    expected: Reference
    tolerance: Tolerance
    dtype: str
    activations: str | None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.dtype, self.activations)))


def networks(dense: MLP, x: Tensor, calibration: Tensor) -> list[Network]:
    """Ours, of one dense float32 network: int8 with a scale for each row or for the layer, and int8 weights alone."""
    static = QuantConfig("int8", activations="static", calibration="minmax")
    found = []
    for config in (QuantConfig("int8"), static):
        model = quantize(dense, config, calibration if config.static else None).eval()
        found.append(Network(model, Reference(_int8_logits(model, x)), EXACT, "int8", config.activations))
    layers = {name: nn.WeightOnlyLinear.from_linear(layer, dtype=x.dtype) for name, layer in dense.layers().items()}
    expected = Reference(_logits([(_weights(layer), layer.bias) for layer in layers.values()], x))
    return [*found, Network(dense.replace(layers).eval(), expected, _CHAIN, "int8wo", None)]


def _int8_logits(model: MLP, x: Tensor) -> Tensor:
    """What every bit of an int8 network's logits has to be: exact integers, each step of the scaling rounded."""
    for layer in model.layers().values():
        if layer.input_scale is None:
            q, scale = quantized(x)
        else:
            q = (x.float() / layer.input_scale).round().clamp(-127, 127)
            scale = layer.input_scale.expand(len(x))
        acc = q.to(torch.float64) @ layer.weight.to(torch.float64).t()
        x = scaled(acc, scale, layer.weight_scale, layer.bias, relu=layer.activation == "relu")
    return x.to(torch.float64)


def _weights(layer: nn.WeightOnlyLinear) -> Tensor:
    return layer.weight.to(torch.float64) * layer.weight_scale[:, None]


def _logits(layers: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """The network in float64."""
    x = x.to(torch.float64)
    for i, (weight, bias) in enumerate(layers):
        x = x @ weight.to(torch.float64).t() + bias.to(torch.float64)
        if i < len(layers) - 1:
            x = x.relu()
    return x


def peers(dense: MLP, x: Tensor, compile: str, say: Callable[[str], None]) -> dict[str, Contender]:
    """The libraries' networks of the same weights in the dtype of `x`: PyTorch's layers, and torchao's int8."""
    parts: list[torch.nn.Module] = []
    for layer in dense.layers().values():
        plain = torch.nn.Linear(layer.in_features, layer.out_features, device=x.device, dtype=x.dtype)
        plain.load_state_dict(layer.state_dict())  # casts
        parts += [plain, torch.nn.ReLU()] if layer.activation == "relu" else [plain]
    model = torch.nn.Sequential(*parts).eval().requires_grad_(False)
    linears = [part for part in parts if isinstance(part, torch.nn.Linear)]
    expected = Reference(_logits([(part.weight, part.bias) for part in linears], x))
    if not x.is_cuda:
        return willing({"torch_fp32": _call(model, x)}, expected, TOLERANCES["float32"], say)
    floats = {"torch_fp16_graph": _call(model, x)}
    if compile == "off":
        return willing(floats, expected, _CHAIN, say)
    floats["torch_fp16_compiled"] = _call(pytorch.compiled(model, compile), x)
    found = willing(floats, expected, _CHAIN, say)
    if torchao.installed():  # its weight-only layers collapse beyond one row
        schemes = [peer for peer in torchao.SCHEMES if peer == "torchao" or len(x) == 1]
        calls = {peer: _call(pytorch.compiled(torchao.quantized(model, peer), compile), x) for peer in schemes}
        found |= willing(calls, expected, _LIBRARY, say)
    return found


def _call(model: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    return Call(functools.partial(model, x), torch.inference_mode)


def measure_cell(
    sizes: Sizes,
    batch: int,
    device: torch.device,
    environment: dict,
    compile: str = "off",
    repetitions: int = REPETITIONS,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Check and time all networks of ours and the peers' in one interleaved run; a row for each pair."""
    dense = MLP(sizes, seed=0).to(device)
    generator = torch.Generator(device).manual_seed(0)
    x, calibration = (
        torch.randn((count, sizes[0]), generator=generator, device=device) for count in (batch, _CALIBRATION)
    )
    x = x.half() if device.type == "cuda" else x
    if compile != "off":
        torch.compiler.reset()
    with torch.inference_mode():
        found = networks(dense, x, calibration)
        theirs = peers(dense, x, compile, say)
    ours = {each.name: Contender(_call(each.model, x), each.expected, each.tolerance) for each in found}
    measured, telemetry = compete(ours, theirs, device, repetitions)
    products = sum(n * k for k, n in itertools.pairwise(sizes))
    return [
        row(
            op="mlp",
            dtype=each.dtype,
            shape=(batch, sizes[-1], sizes[0]),
            kernel=measured[each.name],
            peer=peer,
            against=measured[peer],
            flop=2 * batch * products,
            nbytes=sum(t.nbytes for t in each.model.state_dict().values()) + x.nbytes + 4 * batch * sizes[-1],
            environment=environment,
            sizes=list(sizes),
            batch=batch,
            activations=each.activations,
            compile=compile,
            **telemetry,
        )
        for each in found
        for peer in theirs
    ]


def cells(rows: Iterable[dict]) -> list[dict]:
    """Each network and batch: the times of ours and of the peers, and the ratio of the fastest peer to each of ours."""
    grouped: dict[tuple, list[dict]] = {}
    for each in rows:
        grouped.setdefault((tuple(each["sizes"]), each["batch"]), []).append(each)
    found = []
    for (sizes, batch), members in grouped.items():
        ours = {_name(each): each["us"] for each in members}
        theirs = {each["peer"]: each["peer_us"] for each in members}
        best = min((us for us in theirs.values() if us), default=None)
        found.append(
            {
                "sizes": list(sizes),
                "batch": batch,
                "us": ours,
                "peers_us": theirs,
                "best_peer": next((peer for peer, us in theirs.items() if us and us == best), None),
                "ratio": {name: round(best / us, 4) if us and best else None for name, us in ours.items()},
            }
        )
    return found


def _name(row: dict) -> str:
    return " ".join(filter(None, (row["dtype"], row["activations"])))


def means(found: list[dict]) -> dict[str, dict]:
    """Over all cells, by variant: the geometric mean and the least of the ratios; null where a cell has none."""
    names = dict.fromkeys(name for cell in found for name in cell["ratio"])
    ratios = {name: [cell["ratio"].get(name) for cell in found] for name in names}
    return {
        name: {
            "cells": len(values),
            "ratio": round(geometric_mean(values), 4) if all(values) else None,
            "worst_ratio": min(filter(None, values), default=None),
        }
        for name, values in ratios.items()
    }


@dataclass(frozen=True)
class Result:
    """All rows of a run, and what they say cell by cell."""

    rows: list[dict]
    cells: list[dict]
    means: dict[str, dict]

    @property
    def wrong(self) -> list[dict]:
        """Rows whose network gave a wrong output."""
        return [each for each in self.rows if not each["correct"]]

    def to_json(self) -> dict:
        return {"rows": self.rows, "cells": self.cells, "means": self.means, "wrong": len(self.wrong)}

    def show(self, file: IO[str]) -> None:
        """Print the table."""
        show_networks(self.cells, self.means, file)


def bench(
    device: torch.device,
    *,
    networks: Iterable[Sizes] = (),
    batches: Iterable[int] = (),
    compile: str = "off",
    repetitions: int = REPETITIONS,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Measure every network at every batch size (nothing given: those that make sense on `device`).

    `compile` is the mode in which the peers are compiled, or "off": then they are left out. Rows are appended to `out`
    as they come, `say` hears what is being measured and which peer refuses what.
    """
    on_gpu = device.type == "cuda"
    if compile != "off" and not on_gpu:
        raise UserError("--compile is of the peers on a GPU, and this is a CPU: leave it out")
    where = environment(device)
    batches = tuple(batches)
    if any(batch >= 2**31 for batch in batches):
        raise UserError(f"--batch is {max(batches)}: it must be at most 2^31 - 1")
    rows: list[dict] = []
    if out:
        append(out, ())  # refused now, and not after the first measurement
    for sizes in tuple(networks) or (NETWORKS if on_gpu else CPU_NETWORKS):
        for batch in tuple(batches) or (BATCHES if on_gpu else CPU_BATCHES):
            say(f"{'-'.join(map(str, sizes))}, batch {batch}")
            more = measure_cell(sizes, batch, device, where, compile, repetitions, say)
            rows.extend(more)
            if out:
                append(out, more)
    found = cells(rows)
    return Result(rows, found, means(found))
