"""A whole int8 network (W8A8), its activations quantized on the way."""

from __future__ import annotations

import contextlib

import torch

from qsparse.kernels import _mlp_int8_row_sm90, _mlp_int8_rows_sm90, _mlp_int8_sm90, _mlp_int8_tall_sm90
from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, face, kind_of
from qsparse.kernels._load import following
from qsparse.kernels.gemm_int8 import gemm_int8
from qsparse.kernels.linear_int8 import linear_int8
from qsparse.kernels.quantize_rows import quantize_for, quantize_rows

# Each takes what it is fastest at.
HOSTS = (_mlp_int8_tall_sm90, _mlp_int8_rows_sm90, _mlp_int8_row_sm90, _mlp_int8_sm90)
SOURCES = {host.SOURCE: host.INSTANCES for host in HOSTS}
# Static layers as wide as this gain by a shorter chain, wider ones lose (timings on an NVIDIA H200, 2026-11-30).
_NARROW = 1024


@face(SOURCES)
def mlp_int8(x, weights, weight_scales, biases, *, input_scales=None, one_launch: bool | None = None):
    """Logits of fully connected int8 layers with a ReLU after each but the last.

    Each layer computes ``gemm_int8(q, w, scale_x, scale_w, bias)`` in float32 of ``q, scale_x = quantize_rows(x,
    input_scale)``, and the results have the bits of that chain of calls.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16, any strides
    weights : sequence of (N, K) int8
        One a layer, from input to output; the K of each is the N of the one before.
    weight_scales : sequence of (N,) or (1,) float32
    biases : sequence of (N,) float32 or None
    input_scales : sequence of (1,) float32 or None, optional
        A layer that has one clips its input to 127 of these (static activations) instead of giving each row a scale of
        its own. A row of ``x`` that holds NaN or Inf still gives NaN; what overflows in between is clipped too.
    one_launch : bool, optional
        On a GPU, True demands the kernel that computes all layers at once, False the chain; None takes what is faster.

    Returns
    -------
    (M, N) float32, row-major, of the last layer's N.

    On Hopper small networks run in one launch: of few rows the weights wait in registers or shared memory, and the
    blocks that share rows exchange their activations between the layers; of batches that fill the card each block takes
    its rows through all layers, and the weights pass by. Everything else, and every other device, runs the chain.
    Raises TypeError and ValueError naming the argument, ValueError too where ``one_launch`` is demanded and there is
    none.

    Sources: the arithmetic is that of :func:`quantize_rows` and :func:`gemm_int8`; weights that wait on the chip, after
    G. Diamos et al., "Persistent RNNs: Stashing Recurrent Weights On-Chip" (ICML 2016); PTX ISA, ``barrier.cluster``.
    """
    if torch.compiler.is_compiling():
        return _operator(x, list(weights), list(weight_scales), list(biases), _listed(input_scales, weights))
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    lists = {"weights": weights, "weight_scales": weight_scales, "biases": biases, "input_scales": input_scales}
    for name, values in lists.items():
        given = values is not None or name != "input_scales"
        if given and not isinstance(values, list | tuple):
            raise TypeError(f"{name} must be a list or a tuple with one entry a layer, got {kind_of(values)}")
    input_scales = _listed(input_scales, weights)
    _check_layers(x, weights, weight_scales, biases, input_scales)
    layers = list(zip(weights, weight_scales, biases, input_scales, strict=True))
    if x.device.type == "cuda" and one_launch is not False and mlp_int8.tier(x.device) == "sm90":
        for host in HOSTS:
            y = host.launch_mlp(x, layers)
            if y is not None:
                return y
    if one_launch:
        sizes = "-".join(str(size) for size in (x.shape[1], *(len(w) for w in weights)))
        raise ValueError(f"one_launch is not possible for {sizes} at {x.shape[0]} rows on {x.device}")
    return _chain(x, layers)


@torch.library.custom_op("qsparse::mlp_int8", mutates_args=())
def _operator(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    weight_scales: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    input_scales: list[torch.Tensor | None],
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return mlp_int8(x, weights, weight_scales, biases, input_scales=input_scales)


@_operator.register_fake
def _(x, weights, weight_scales, biases, input_scales):
    return x.new_empty((x.shape[0], weights[-1].shape[0]), dtype=torch.float32)


def _listed(input_scales, weights) -> list:
    return [None] * len(weights) if input_scales is None else list(input_scales)


def _check_layers(x, weights, weight_scales, biases, input_scales) -> None:
    """Raise unless every layer fits the one before, and its scales and bias fit it."""
    if not weights:
        raise ValueError("weights must hold at least one layer")
    for name, values in (("weight_scales", weight_scales), ("biases", biases), ("input_scales", input_scales)):
        if len(values) != len(weights):
            raise ValueError(f"{name} must have one entry for each of the {len(weights)} layers, got {len(values)}")
    k = x.shape[1]
    for i, (w, scale_w, bias, scale_x) in enumerate(zip(weights, weight_scales, biases, input_scales, strict=True)):
        check_tensor(f"weights[{i}]", w, (torch.int8,), (None, k))
        k = w.shape[0]
        one = isinstance(scale_w, torch.Tensor) and scale_w.numel() == 1
        check_tensor(f"weight_scales[{i}]", scale_w, (torch.float32,), (1 if one else k,))
        if bias is not None:
            check_tensor(f"biases[{i}]", bias, (torch.float32,), (k,))
        if scale_x is not None:
            check_tensor(f"input_scales[{i}]", scale_x, (torch.float32,), (1,))
        named = {"weights": w, "weight_scales": scale_w, "biases": bias, "input_scales": scale_x}
        check_same_device(x, **{f"{name}[{i}]": value for name, value in named.items()})


def _chain(x, layers):
    """The layers one after the other; what goes into a layer with a static scale leaves the one before as int8."""
    q = scale_x = lost = None  # lost is NaN for the rows that held NaN or Inf, which int8 cannot hold
    following_scales = [scale for *_, scale in layers[1:]]
    static = all(scale is not None for *_, scale in layers)
    if static and len(layers) > 1 and max(len(w) for w, *_ in layers) <= _NARROW:
        return _static_chain(x, layers, following_scales)
    with contextlib.ExitStack() as stack:
        for (w, scale_w, bias, given), after in zip(layers[:-1], following_scales, strict=True):
            if q is None:
                q, scale_x = quantize_rows(x, given)
                lost = scale_x
            stack.enter_context(following())
            if after is None:
                x, q = gemm_int8(q, w, _without(lost, scale_x), scale_w, bias, relu=True), None
            else:
                q = gemm_int8(q, w, scale_x, scale_w, bias, relu=True, out_dtype=torch.int8, scale_y=after)
                scale_x = after
        w, scale_w, bias, given = layers[-1]
        if q is None:
            return linear_int8(x, w, scale_w, bias, scale_x=given)
        return gemm_int8(q, w, _without(lost, scale_x), scale_w, bias)


def _static_chain(x, layers, following_scales):
    """Layers whose inputs all have static scales: the first launch says which rows the last layer will lose."""
    q, scale_x = quantize_for(x, layers[0][-1], following_scales[-1])
    with following():
        for (w, scale_w, bias, given), after in zip(layers[:-1], following_scales, strict=True):
            q = gemm_int8(q, w, given, scale_w, bias, relu=True, out_dtype=torch.int8, scale_y=after)
        w, scale_w, bias, _ = layers[-1]
        return gemm_int8(q, w, scale_x, scale_w, bias)


def _without(lost, scale_x):
    """The scale of each row, NaN for those that are lost."""
    return scale_x if scale_x is lost else torch.add(scale_x, lost, alpha=0)
