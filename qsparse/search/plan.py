"""What becomes of each layer -> the model of it; and the choice among these that a search has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from qsparse.data import Dataset
from qsparse.models import MLP
from qsparse.nn._common import DTYPES as TORCH_DTYPES
from qsparse.quant import QuantConfig, config, quantize
from qsparse.quant.config import FLOAT32
from qsparse.sparse import prunable_weights, sparsify
from qsparse.sparse.magnitude import magnitude_scores
from qsparse.sparse.masks import largest
from qsparse.train.config import TrainConfig
from qsparse.train.fit import fit

if TYPE_CHECKING:
    from optuna import Trial

VALUES = {FLOAT32: "float32", "fp16": "float16", "bf16": "bfloat16"}
"""What the values of a sparse layer can be, as torch spells it."""
DTYPES = (FLOAT32, *config.DTYPES)
"""What a dense layer can be: what kernels compute, and nothing that is only simulated."""


@dataclass(frozen=True)
class Choice:
    """What becomes of one layer: its dtype (of `DTYPES`, or of `VALUES` where it is sparse), and, where it is stored as
    CSR, the fraction of its weights that stays, those of the largest magnitude."""

    dtype: str
    density: float | None = None

    def __str__(self) -> str:
        dtype = config.spelt(self.dtype)
        return dtype if self.density is None else f"csr {self.density:.3g} {dtype}"


Plan = dict[str, Choice]
"""Name of a layer -> what becomes of it."""


def suggest(trial: Trial, layers: Sequence[str], dtypes: Sequence[str], least: float, most: float) -> Plan:
    """The plan that an Optuna trial proposes: for each layer dense or CSR, its dtype, and its density.

    dtypes: those that may be chosen. least, most: the densities of a sparse layer; they are drawn logarithmically.
    """
    values = [dtype for dtype in dtypes if dtype in VALUES]
    plan = {}
    for name in layers:
        if values and trial.suggest_categorical(f"{name} stored", ["dense", "csr"]) == "csr":
            density = trial.suggest_float(f"{name} density", least, most, log=True)
            plan[name] = Choice(trial.suggest_categorical(f"{name} values", values), density)
        else:
            plan[name] = Choice(trial.suggest_categorical(f"{name} dtype", list(dtypes)))
    return plan


def build(model: MLP, plan: Mapping[str, Choice], dataset: Dataset, training: TrainConfig | None = None) -> MLP:
    """The model of `plan`: a copy of the dense float32 `model`, each layer as the plan says.

    training: with it the pruned weights are held at zero and the others trained on, before anything is rounded; only
    the training images are looked at. Raises UserError as `quantize` and `sparsify`.
    """
    masks = {
        name: _mask(weight, plan[name].density)
        for name, weight in prunable_weights(model).items()
        if plan[name].density is not None
    }
    trained = model.replace({})
    if masks and training:
        fit(trained, dataclasses.replace(dataset, test=dataset.train), training, masks=masks)
    rounded = {name: choice.dtype for name, choice in plan.items() if name not in masks and choice.dtype != FLOAT32}
    layers = quantize(trained, QuantConfig(FLOAT32, layers=rounded)).layers() if rounded else {}
    if masks:
        every = {name: masks.get(name, weight != 0) for name, weight in prunable_weights(trained).items()}
        sparse = sparsify(trained, every).layers()
        layers |= {name: sparse[name].to(TORCH_DTYPES[VALUES[plan[name].dtype]]) for name in masks}
    return trained.replace(layers)


def _mask(weight: Tensor, density: float | None) -> Tensor:
    return largest(magnitude_scores(weight), max(1, round((density or 1) * weight.numel())))
