"""SparseGPT: prune column by column, and let the columns to the right make up for what is lost.

Frantar & Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", 2023 (algorithm 1).
Symbols:

    W     (N, K)  weights of a layer
    X     (M, K)  its inputs on M calibration images, after the layers before it were pruned
    H     = X^T X + lambda I (K, K), lambda = 1 % of the mean of X^T X's diagonal: the Hessian of ||X W^T - X W'^T||^2,
          up to a factor
    U     upper triangle, U^T U = H^-1: row j of it holds the inverse of H without the columns before j, scaled
    B     columns of a block; the mask of a block is chosen when the block begins, by W_ij^2 / U_jj^2

Pruning W_ij costs W_ij^2 / U_jj^2, and the best answer of the columns to its right is -W_ij / U_jj * U_j,j+1:.
Inputs that are always zero have no say: their weights get the least score. All is computed in float64.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qsparse.sparse.masks import largest, largest_of_each_group

BLOCK = 128
DAMPING = 0.01


def sparsegpt(
    w: Tensor,
    x: Tensor,
    count: int | None = None,
    *,
    pattern: tuple[int, int] | None = None,
    round: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Prune `w` (N, K) for inputs `x` (M, K): the new weights (N, K), zero where pruned, and their mask (N, K) bool.

    Args:
        w: any floating dtype, which the new weights have too. Left as it was.
        x: any floating dtype.
        count: weights that stay, exactly. The first j columns of blocks keep their part of it, to one.
        round: W_:j (N,) -> its values on the grid that the weights are to be stored on. What rounding loses, the
            columns to the right make up for too: the paper's joint pass (section 3.5).
        pattern: (n, m) instead: n of each m consecutive weights of a row stay, chosen as their group is reached.

    Raises:
        ValueError: both of count and pattern, or none; a count outside 0..N * K.
    """
    if (count is None) == (pattern is None) or (count is not None and not 0 <= count <= w.numel()):
        raise ValueError(f"give a count from 0 to {w.numel()} or a pattern, not {count} and {pattern}")
    U = _upper(x)
    W = w.detach().double().clone()
    mask = torch.zeros_like(W, dtype=torch.bool)
    n, m = pattern or (0, 1)
    block = BLOCK // m * m
    for start in range(0, W.shape[1], block):
        stop = min(start + block, W.shape[1])
        if count is not None:
            kept = count * stop // W.shape[1] - count * start // W.shape[1]
            mask[:, start:stop] = largest(_cost(W, U, start, stop), kept)
        errors = torch.zeros_like(W[:, start:stop])
        for j in range(start, stop):
            if pattern and j % m == 0:
                end = min(j + m, stop)
                mask[:, j:end] = largest_of_each_group(_cost(W, U, j, end), n, m)
            kept = W[:, j] if round is None else round(W[:, j])
            error = (W[:, j] - torch.where(mask[:, j], kept, 0.0)) / U[j, j]
            W[:, j:stop] -= error[:, None] * U[j, j:stop]
            errors[:, j - start] = error
        W[:, stop:] -= errors @ U[start:stop, stop:]
    return torch.where(mask, W, 0.0).to(w.dtype), mask


def sparsegpt_scores(w: Tensor, x: Tensor) -> Tensor:
    """W_ij^2 / [H^-1]_jj (N, K) float64: what pruning a weight alone costs when all others answer (ranks layers)."""
    U = _upper(x)
    return w.detach().double().square() / (U * U).sum(dim=0)


def _upper(x: Tensor) -> Tensor:
    """U (K, K) of the inputs `x`."""
    X = x.double()
    H = X.T @ X
    diagonal = H.diagonal()  # a view: what is added to it is added to H
    damping = DAMPING * diagonal.mean()
    diagonal[diagonal == 0] = 1.0
    diagonal += damping
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)


def _cost(W: Tensor, U: Tensor, start: int, stop: int) -> Tensor:
    return W[:, start:stop].square() / U.diagonal()[start:stop].square()
