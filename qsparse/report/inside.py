"""Saved models of a run -> what a page shows of each: its weights on their grid, its mask, the answers that changed."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from PIL import Image
from torch import Tensor

from qsparse import checkpoint
from qsparse.data import Split
from qsparse.dense import dense_layers
from qsparse.errors import UserError
from qsparse.kernels.gemm_weight_only import spread_groups, unpack_int4
from qsparse.models import MLP
from qsparse.nn import (
    BitmapLinear,
    EntryLinear,
    Fp8Linear,
    Linear,
    QuantLinear,
    SparseLinear,
    TwoFourLinear,
    WeightOnlyLinear,
    ZeroPointLinear,
)
from qsparse.nn.fp8_linear import FP8
from qsparse.train.run import load_dataset

SIDE = 28
_BINS = 120
_STEPS_A_BIN = 0.25
_MOST_BINS = 1024
_DIGITS = 12
"""Shown of those that got wrong, and of those that got right."""
_CHUNK = 10_000
_ACCENT = (11, 95, 173)


@dataclass
class Insides:
    """What `look` collects: a JSON-able dict a variant; the test images that these show, as PNG in base64."""

    variants: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    _places: dict[tuple[str, int], int] = field(default_factory=dict)

    def look(self, run: Path, variants: Sequence[str]) -> dict[str, str]:
        """Add each of the `variants` saved in `run`, beside its dense model, on the CPU; return why which could not be.

        Raises UserError where the dense model cannot be loaded, or the data that the run was trained on are not there.
        """
        dense = checkpoint.load(run)
        weights = dense_layers(dense, "look into")
        test = load_dataset(run).test
        before = _answers(dense, test)
        broken = {}
        for variant in variants:
            try:
                model = _variant(run / variant, dense.sizes)
            except UserError as error:
                broken[variant] = str(error)
                continue
            self.variants.append(
                {
                    "run": str(run),
                    "variant": variant,
                    "layers": [_weights(name, layer, weights[name]) for name, layer in model.layers().items()],
                    "masks": _masks(model),
                    **self._changes(run, test, before, _answers(model, test)),
                }
            )
        return broken

    def _changes(self, run: Path, test: Split, before: Tensor, after: Tensor) -> dict[str, Any]:
        lost = ((before == test.labels) & (after != test.labels)).nonzero().flatten().tolist()
        won = ((before != test.labels) & (after == test.labels)).nonzero().flatten().tolist()
        digits = []
        for index in (*lost[:_DIGITS], *won[:_DIGITS]):
            is_a, was, now = (int(answers[index]) for answers in (test.labels, before, after))
            digits.append(
                {
                    "png": self._image(run, test, index),
                    "label": f"Test image {index}, a {is_a}: the baseline reads {was}, the variant {now}",
                    "caption": f"{is_a}: {was} → {now}",
                }
            )
        shown = min(len(lost), _DIGITS) + min(len(won), _DIGITS)
        changed = (
            f"Of {len(test):,} test images {len(lost):,} that the baseline reads rightly are now read wrongly, and "
            f"{len(won):,} the other way round; {shown} of them are shown (digit: baseline's answer → variant's)."
        )
        return {"digits": digits, "changed": changed}

    def _image(self, run: Path, test: Split, index: int) -> int:
        """The place in `images` of a test image."""
        key = (str(run), index)
        if key not in self._places:
            self._places[key] = len(self.images)
            self.images.append(_png(test.images[index].reshape(SIDE, SIDE).to(torch.uint8)))
        return self._places[key]


def _variant(directory: Path, sizes: tuple[int, ...]) -> MLP:
    """The model of a variant. Raises UserError where it cannot be loaded, or is of a network of other `sizes`."""
    model = checkpoint.load(directory)
    if model.sizes != sizes:
        own, wanted = ("-".join(map(str, each)) for each in (model.sizes, sizes))
        raise UserError(f"{directory} holds a network {own}, and its run one of {wanted}; compress the run again")
    return model


@torch.inference_mode()
def _answers(model: MLP, test: Split) -> Tensor:
    return torch.cat([model(chunk).argmax(dim=1) for chunk in test.images.split(_CHUNK)])


def _weights(name: str, layer: torch.nn.Module, dense: Linear) -> dict[str, Any]:
    """The histogram of a layer's weights over those of the dense model."""
    w = dense.weight.detach().float()
    if _is_sparse(layer):
        kept, _ = layer.entries()
        share = kept.numel() / max(w.numel(), 1)
        note = f"the {kept.numel():,} of {w.numel():,} weights that stay ({share:.1%})"
        return _in_reals(name, w, {"stay": kept}, note)
    if (grid := _grid(layer)) is not None:
        return _on_grid(name, w, *grid)
    if isinstance(layer, Linear):
        kind = str(layer.weight.dtype).removeprefix("torch.")
        note = f"stored as {kind}, whose grid is finer than a bar"
        return _in_reals(name, w, {kind: layer.weight.detach().float()}, note)
    return _in_reals(name, w, {}, f"stored by {type(layer).__name__}, which shows no grid")


def _is_sparse(layer: torch.nn.Module) -> TypeGuard[SparseLinear | TwoFourLinear | BitmapLinear | EntryLinear]:
    return isinstance(layer, SparseLinear | TwoFourLinear | BitmapLinear | EntryLinear)


def _grid(layer: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
    """What a layer stores of each weight, (N, K), the scale of each, and all numbers that could stand there."""
    if isinstance(layer, Fp8Linear):
        every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
        return layer.weight.view(FP8).float(), layer.weight_scale[:, None], every[torch.isfinite(every)].unique()
    if isinstance(layer, WeightOnlyLinear):
        q = layer.weight if layer.bits == 8 else unpack_int4(layer.weight, layer.in_features)
        scale = spread_groups(layer.weight_scale, layer.group, layer.in_features)
    elif isinstance(layer, QuantLinear | ZeroPointLinear):
        q, scale = layer.weight, layer.weight_scale[:, None]
    else:
        return None
    largest = 7 if isinstance(layer, WeightOnlyLinear) and layer.bits == 4 else 127
    return q.float(), scale, torch.arange(-largest, largest + 1).float()


def _on_grid(name: str, w: Tensor, q: Tensor, scale: Tensor, every: Tensor) -> dict[str, Any]:
    """In steps of the grid, which differ by channel or group: the dense weights, and how many each level holds."""
    largest = round(float(every.max()))
    levels, counts = q.unique(return_counts=True)
    unused = len(every) - len(levels)
    bins = min(round(2 * (largest + 1) / _STEPS_A_BIN), _MOST_BINS)
    return {
        "name": name,
        "note": f"On a grid of {len(every)} levels, of which {unused} hold no weight. The dense weights are divided by "
        "the scale of their channel or group.",
        "axis": "weight in steps of its grid",
        "bars": [
            _bars("dense", w / scale, -largest - 1, largest + 1, bins),
            {"name": "on the grid", "x": levels.tolist(), "y": counts.tolist(), "width": _STEPS_A_BIN},
        ],
        "grid": every.tolist(),
        "label": f"Histogram of the weights of layer {name} in steps of its quantization grid: levels from {-largest} "
        f"to {largest}, of which {unused} hold no weight; {int((q == 0).sum()):,} of {q.numel():,} weights became 0.",
    }


def _in_reals(name: str, w: Tensor, others: dict[str, Tensor], note: str) -> dict[str, Any]:
    largest = max([float(t.abs().max()) for t in (w, *others.values()) if t.numel()], default=0.0) or 1.0
    bars = [_bars(what, tensor, -largest, largest, _BINS) for what, tensor in {"dense": w, **others}.items()]
    label = f"Histogram of the weights of layer {name}, from {-largest:.3g} to {largest:.3g}: {note}."
    return {
        "name": name,
        "note": f"{note[0].upper()}{note[1:]}.",
        "axis": "weight",
        "bars": bars,
        "grid": None,
        "label": label,
    }


def _bars(name: str, values: Tensor, low: float, high: float, bins: int) -> dict[str, Any]:
    counts = torch.histc(values.flatten(), bins=bins, min=low, max=high).int()
    width = (high - low) / bins
    centres = [float(f"{low + (place + 0.5) * width:.6g}") for place in range(bins)]
    return {"name": name, "x": centres, "y": counts.tolist(), "width": width}


def _masks(model: MLP) -> list[dict[str, Any]]:
    """A picture for each sparse layer that reads pixels: how many weights of each of them stay."""
    pictures = []
    for name, layer in model.layers().items():
        if not _is_sparse(layer) or layer.in_features != SIDE * SIDE:
            continue
        kept = torch.bincount(layer.entries()[1].long(), minlength=SIDE * SIDE).reshape(SIDE, SIDE)
        alive = int((kept > 0).sum())
        caption = (
            f"{name}: {alive} of {SIDE * SIDE} pixels keep a weight, at most {int(kept.max())} of {layer.out_features}"
        )
        pictures.append({"png": _mask_png(kept), "caption": caption, "label": f"28 x 28 picture of {caption}"})
    return pictures


def _mask_png(kept: Tensor) -> str:
    """The more weights a pixel keeps the more opaque it is; one that keeps none is not there."""
    opacity = torch.where(kept > 0, 64 + 191 * kept / kept.max().clamp(min=1), 0).to(torch.uint8)
    colour = torch.tensor(_ACCENT, dtype=torch.uint8).expand(SIDE, SIDE, 3)
    return _png(torch.cat((colour, opacity[..., None]), dim=2))


def _png(pixels: Tensor) -> str:
    """uint8 (H, W) or (H, W, 4) as a PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
