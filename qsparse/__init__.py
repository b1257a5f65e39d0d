"""qsparse: quantization and sparsity whose accuracy, time and memory are measured by the kernels that run.

`import qsparse` is light: PyTorch is imported by the first call that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    import torch

    from qsparse.data import Dataset
    from qsparse.models import MLP
    from qsparse.quant import QuantConfig
    from qsparse.sparse import SparseConfig

__version__ = "0.1.0"
__all__ = ["__version__", "compress", "load", "quantize", "sparsify"]


def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> MLP:
    """Load the model of a run directory (`runs/3`) or of one of its compressed variants (`runs/3/int8`).

    Returns a module in eval mode on `device`, dense or compressed as it was saved, with the predictions that it had
    then. Raises `qsparse.errors.UserError` where the directory, its files or the device do not serve.
    """
    from qsparse import checkpoint

    return checkpoint.load(path, device)


def quantize(model: MLP, config: str | QuantConfig, calibration_data: torch.Tensor | None = None) -> MLP:
    """Return a quantized copy of `model` (see `qsparse.quant.quantize`).

    `config` is a `qsparse.quant.QuantConfig`, or a dtype alone: "fp16", "bf16", "int8", "fp8", "int8wo" or "int4wo".
    `calibration_data`, images (S, K) that are not of the test split, are needed where `config` measures ranges.
    Training with the rounding in place is `qsparse.quant.train_quantized`.
    """
    from qsparse import quant

    return quant.quantize(model, config, calibration_data)


def sparsify(
    model: MLP,
    masks: dict[str, torch.Tensor] | SparseConfig,
    data: Dataset | str | None = None,
    format: str | None = None,
) -> MLP:
    """Return a copy of `model` that stores only the weights that stay (see `qsparse.sparse`).

    `masks` maps a layer's name to a bool tensor (N, K), True where the weight stays; `format` is "csr" (left out),
    "coo", "2:4", "bitmap", "entries" or "auto", and may come third. Or `masks` is a `qsparse.sparse.SparseConfig`,
    which names the format too, and `data` the data set whose training images its pruner looks at (wanda, snip,
    sparsegpt and movement need it), or a pair of images and labels.
    """
    from qsparse import sparse

    if isinstance(data, str) and format is None:
        data, format = None, data
    if not isinstance(masks, sparse.SparseConfig):
        if data is not None:
            raise TypeError("masks choose the weights already: data are of a SparseConfig")
        return sparse.sparsify(model, masks, format or "csr")
    if format is not None:
        raise TypeError(f"a SparseConfig names the format itself, as SparseConfig(0.1, format={format!r})")
    if masks.dtype == "int8":
        return sparse.compress(model, masks, data)
    return sparse.sparsify_as(masks, *sparse.prune(model, masks, data))[0]


def compress(model: MLP, config: SparseConfig, data: Dataset | None = None, order: str = "prune-first") -> MLP:
    """Return a copy of `model` with int8 weights of which only those that stay are stored (see `qsparse.sparse.int8`).

    `config` is a `qsparse.sparse.SparseConfig` (of format csr, 2:4 or auto), and `data` the data set whose training
    images its pruner looks at, or a pair of images and labels.
    `order` is "prune-first", or "joint": SparseGPT prunes and rounds in one pass.
    """
    from qsparse import sparse

    return sparse.compress(model, config, data, order)
