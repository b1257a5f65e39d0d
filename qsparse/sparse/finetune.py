"""Fine-tuning: training what pruning left, the pruned weights held at zero.

A step may go through the dense matrices and a mask, or through CSR: SpMM forward and for the inputs' gradient, SDDMM
for the weights', so that a pruned weight is neither multiplied nor moved. Both are the same descent, up to rounding.
Which one is taken depends on sizes alone, not on a clock, so one seed gives one result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qsparse.data import Dataset, check_dataset
from qsparse.dense import dense_layers
from qsparse.models import MLP
from qsparse.sparse.convert import sparsify
from qsparse.sparse.formats import from_csr
from qsparse.sparse.masks import check_masks
from qsparse.train.config import TrainConfig
from qsparse.train.fit import EpochEnd, Progress, fit
from qsparse.train.torch_backend import TorchBackend

MOST_DENSITY, MOST_ROWS, LEAST_WEIGHTS = 0.02, 64, 2**19
"""Within these a sparse step was the faster one on a CPU (experiments/06_sparsity, finetune.jsonl)."""


def sparse_steps_pay(masks: Mapping[str, Tensor], batch_size: int, device: torch.device) -> bool:
    """Whether a step through CSR is the faster one. Not on a GPU, where one kernel takes a dense epoch with masks."""
    weights, kept = (sum(map(count, masks.values())) for count in (Tensor.numel, Tensor.count_nonzero))
    fits = weights >= LEAST_WEIGHTS and batch_size <= MOST_ROWS and int(kept) <= round(MOST_DENSITY * weights)
    return fits and device.type == "cpu"


def finetune(
    model: MLP,
    masks: Mapping[str, Tensor],
    dataset: Dataset,
    config: TrainConfig,
    *,
    on_epoch: Callable[[EpochEnd], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> bool:
    """Train a dense `model` in place on what `masks` keep; return whether its steps were sparse.

    masks: layer name -> bool (N, K), for every layer; what they do not keep is exactly zero. config, on_epoch,
    progress: as of `fit`, which says what is raised beyond what is no model, mask or data set; a backend that is named
    takes dense steps, but for torch.
    """
    check_dataset(dataset)
    check_masks(masks, dense_layers(model, "fine-tune"))
    any_backend = config.backend in ("auto", "torch")
    if not (any_backend and sparse_steps_pay(masks, config.batch_size, dataset.train.images.device)):
        fit(model, dataset, config, masks=masks, on_epoch=on_epoch, progress=progress)
        return False
    sparse = through_csr(model, masks)
    fit(sparse, dataset, config, on_epoch=on_epoch, progress=progress, make=TorchBackend)
    with torch.no_grad():
        for (name, stored), layer in zip(sparse.layers().items(), model.layers().values(), strict=True):
            layer.weight.copy_(from_csr(stored.values, stored.col_indices, stored.row_offsets, masks[name].shape))
            if layer.bias is not None:
                layer.bias.copy_(stored.bias)
    return True


def through_csr(model: MLP, masks: Mapping[str, Tensor]) -> MLP:
    """A copy of a dense `model` whose layers hold what `masks` keep in CSR, and train."""
    sparse = sparsify(model, dict(masks), "csr", "fp32")
    for layer in sparse.layers().values():
        layer.make_trainable()
    return sparse
