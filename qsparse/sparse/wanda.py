"""Wanda: a weight matters as much as what it adds to its output, its size times its input's.

Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2024. Symbols:

    W  (N, K)  weights of a layer
    X  (M, K)  its inputs on M calibration images, after the layers before it were pruned
    S_ij = |W_ij| * ||X_j||_2, where X_j is input j over all images

Scores are compared within a row of W (one output), so each output keeps as many weights as any other, to one.
"""

from torch import Tensor


def wanda_scores(w: Tensor, x: Tensor) -> Tensor:
    """S (N, K) float32 of `w` (N, K) and `x` (M, K), any floating dtypes."""
    return w.detach().float().abs() * x.float().norm(dim=0)
