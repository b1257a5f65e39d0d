"""GPTQ: round the weights column by column, and let the columns that follow make up for each one's error.

Source: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (ICLR
2023), algorithm 1.
"""

import torch
from torch import Tensor

from qsparse.quant.schemes import Extremes, groups, minmax, to_grid, to_reals, weight_grid

_BLOCK = 128  # columns whose errors reach the columns behind the block at once: B of the paper
_DAMPING = 0.01  # of the mean of H's diagonal


def gptq(
    W: Tensor,
    X: Tensor,
    bits: int | str,
    granularity: str = "channel",
    group: int = 64,
    symmetric: bool = True,
    extremes: Extremes = minmax,
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of few bits for W (N, K) that keep ``X @ W.T`` rather than W.

    W: (N, K) float32. X: (S, K), the layer's inputs on calibration data, finite. The others: as of `round_weights`. The
    scales of a tensor or a channel are those of W; a group's are those of its columns when their turn comes.
    Returns what `round_weights` does: q in float32 (N, K), scales and zero points, (1, 1), (N, 1) or (N, G).
    """
    (N, K), size = W.shape, groups(W.shape[1], granularity, group)
    U = inverse_factor(X)
    W = W.double().clone()
    Q = torch.empty(N, K, dtype=torch.float32, device=W.device)
    grids = [] if granularity == "group" else [weight_grid(W.float(), bits, granularity, group, symmetric, extremes)]
    E = torch.zeros_like(W)  # of column i: its rounding error over U_ii
    start = 0  # of the block: what lies before it has reached all columns
    for i in range(K):
        new_group = granularity == "group" and i % size == 0
        if i - start == _BLOCK or new_group:
            W[:, i:] -= E[:, start:i] @ U[start:i, i:]
            start = i
        if new_group:
            grids.append(weight_grid(W[:, i : i + size].float(), bits, "channel", size, symmetric, extremes))
        scale, zero = (value[:, 0] for value in grids[-1])
        w = W[:, i] - E[:, start:i] @ U[start:i, i]
        Q[:, i] = to_grid(w.float(), scale, zero, bits, symmetric)
        E[:, i] = (w - to_reals(Q[:, i], scale, zero)) / U[i, i]
    if not grids:  # K = 0
        return Q, *weight_grid(W.float(), bits, granularity, group, symmetric)
    scales, zeros = (torch.cat(values, dim=1) for values in zip(*grids, strict=True))
    return Q, scales, zeros


def inverse_factor(X: Tensor) -> Tensor:
    """U (K, K), upper triangular in float64: ``U.T @ U`` is the inverse of ``H = 2 X.T X``, damped by 1 % of its mean.

    Row i of U is, up to the factor U_ii, row i of the inverse of what H is without the first i columns.
    """
    X = X.double()
    H = 2 * X.T @ X
    H.diagonal().add_(_DAMPING * (float(H.diagonal().mean()) if H.any() else 1.0))
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
