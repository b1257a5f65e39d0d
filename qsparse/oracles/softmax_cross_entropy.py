"""Softmax and cross-entropy."""

import numpy as np
from scipy.special import log_softmax


def softmax_cross_entropy(logits, labels):
    """``(losses (M,), grad (M, C))`` in float64; the gradient is that of the mean loss."""
    log_p = log_softmax(np.asarray(logits, np.float64), axis=1)
    picked = np.arange(len(labels)), np.asarray(labels)
    grad = np.exp(log_p)
    grad[picked] -= 1
    return -log_p[picked], grad / max(len(labels), 1)
