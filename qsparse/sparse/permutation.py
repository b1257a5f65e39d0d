"""The order of the columns in which an N:M pattern costs least: columns that matter alike should not share a group.

Pool & Yu, "Channel Permutations for N:M Sparsity", 2021 (bounded search by swaps). Symbols:

    S      (N, K)  scores of the weights, larger for one that matters more
    p      (K,)    an order of the columns; group g of the permuted matrix is columns p[gM], ..., p[gM + M - 1]
    E(p) = the sum of the scores that stay: of each group of each row the n largest

A round pairs the groups at random and makes in each pair the swap of two columns that raises E most, if one does; so E
never falls. The rounds end when some in a row found nothing, or after a bound. A last group that K leaves short takes
no part. For scores that may be negative E is compared all the same.

Permuting a layer's inputs leaves its outputs as they are when the layer before gives its own in that order. Formats
that hold any place, such as CSR, do not need the order at all.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from qsparse.sparse.masks import largest_of_each_group

_ROUNDS, _PATIENCE = 100, 20


def best_permutation(scores: Tensor, n: int, m: int, *, seed: int = 0) -> Tensor:
    """p (K,) int64 on the scores' device: an order that E found no better one than. seed: of the pairs.

    E(p) is at least that of the columns as they stand.
    """
    whole = scores.shape[1] // m
    order = torch.arange(scores.shape[1], device=scores.device)
    groups, columns = order[: whole * m].reshape(whole, m), scores.double().T.contiguous()
    generator, idle = torch.Generator().manual_seed(seed), 0
    for _ in range(_ROUNDS if whole > 1 else 0):
        pairs = torch.randperm(whole, generator=generator)[: whole // 2 * 2].reshape(2, -1).to(scores.device)
        idle = 0 if _swap(columns, groups, pairs, n) else idle + 1
        if idle == _PATIENCE:
            break
    return torch.cat((groups.flatten(), order[whole * m :]))


def permuted_mask(scores: Tensor, n: int, m: int, order: Tensor) -> Tensor:
    """The mask (N, K), in the columns' own order, that is n:m once they are permuted by `order` (K,)."""
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    mask[:, order] = largest_of_each_group(scores[:, order], n, m)
    return mask


def _swap(columns: Tensor, groups: Tensor, pairs: Tensor, n: int) -> bool:
    """Make the best swap of each of `pairs` (2, P) of `groups` (G, M), in place; whether there was any."""
    (a, rest_a, next_a, now_a), (b, rest_b, next_b, now_b) = (_parts(columns, groups[each], n) for each in pairs)
    m, now = groups.shape[1], now_a + now_b
    best, swap = now.clone(), torch.full_like(pairs[0], -1)
    for i, j in itertools.product(range(m), range(m)):
        stay = rest_a[:, i] + torch.maximum(next_a[:, i], b[:, j]) + rest_b[:, j] + torch.maximum(next_b[:, j], a[:, i])
        total = stay.sum(dim=1)
        better = total > best + 1e-9 * now.abs()  # beyond rounding, or two swaps could undo each other
        best, swap = torch.where(better, total, best), torch.where(better, i * m + j, swap)
    found = swap >= 0
    i, j = swap[found] // m, swap[found] % m
    ga, gb = pairs[0][found], pairs[1][found]
    groups[ga, i], groups[gb, j] = groups[gb, j], groups[ga, i]
    return bool(found.any())


def _parts(columns: Tensor, groups: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each of `groups` (P, M): its scores (P, M, N); without column m the sum of the n - 1 largest of a row, and the
    n-th largest, which another column has to beat (P, M, N); and E (P,)."""
    s = columns[groups]
    largest = s.topk(n + 1, dim=1).values
    total, last, after = largest[:, :n].sum(dim=1, keepdim=True), largest[:, n - 1 : n], largest[:, n:]
    stays = s >= last
    return s, total - torch.where(stays, s, last), torch.where(stays, after, last), total.sum(dim=(1, 2))
