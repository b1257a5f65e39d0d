"""The layer of entries: what sets its arrays and their dtype, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsparse import nn
from qsparse.sparse import from_entry_tiles, to_csr, to_entry_tiles


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(30)
        yield


def test_entries_are_of_the_dtype_that_they_were_packed_of():
    w = torch.randn(8, 16).half()
    tiles = to_entry_tiles(w, w > 0)
    for dtype in (torch.float32, torch.int8):
        with pytest.raises(TypeError, match=r"^dtype must be one of torch.float16, torch.bfloat16, got "):
            nn.EntryLinear.from_tiles(*tiles, shape=(8, 16), dtype=dtype)
    layer = nn.EntryLinear.from_tiles(*tiles, shape=(8, 16), dtype=torch.float16)
    with pytest.raises(TypeError, match=r"^x must be one of torch.float16, got torch.bfloat16"):
        layer(torch.ones(2, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("bias", [None, torch.arange(8.0).half()])
def test_entries_are_rounded_to_another_dtype(bias):
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(5)).half()
    w[0, 0], w[0, 1], w[0, 2] = float("inf"), float("nan"), -0.0
    mask = w > -0.5
    mask[0, :3] = True
    tiles = to_entry_tiles(w, mask)
    layer = nn.EntryLinear.from_tiles(*tiles, shape=(8, 16), dtype=torch.float16, bias=bias)
    for refused in (torch.float32, torch.float64):
        with pytest.raises(TypeError, match=r"^dtype must be one of torch.float16, torch.bfloat16, got "):
            layer.to(refused)
    expected = nn.EntryLinear.from_tiles(
        *to_entry_tiles(w.bfloat16(), mask), shape=(8, 16), dtype=torch.bfloat16, bias=bias
    )
    assert layer.to(torch.bfloat16) is layer
    assert layer.dtype == torch.bfloat16
    assert torch.equal(layer.offsets, expected.offsets)
    stored = from_entry_tiles(layer.tiles, layer.offsets, (8, 16), torch.bfloat16)
    assert torch.equal(stored.view(torch.int16), (w * 1).bfloat16().where(mask, 0).view(torch.int16))
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(6)).bfloat16()
    torch.testing.assert_close(layer(x), expected(x), rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused_when_entries_are_set():
    w = torch.randn(33, 65).half()
    entries, offsets = to_entry_tiles(w, w > 0)

    def make(error, match, entries=entries, offsets=offsets, shape=(33, 65), bias=None, dtype=torch.float16):
        with pytest.raises(error, match=match):
            nn.EntryLinear.from_tiles(entries, offsets, shape=shape, dtype=dtype, bias=bias)
        if bias is None:
            with pytest.raises(error, match=match):
                from_entry_tiles(entries, offsets, shape, dtype)

    for short in (offsets[:2], offsets[:0], torch.cat([offsets, offsets[-1:]])):
        make(ValueError, r"^offsets must", offsets=short)
    for wrong in (entries.long(), entries.float(), entries.byte()):
        make(TypeError, r"^entries must", entries=wrong)
    make(ValueError, r"^entries must", entries=entries.view(-1, 4))
    make(TypeError, r"^offsets must", offsets=offsets.float())
    make(ValueError, r"^shape must be two sizes", shape=(33,))
    make(TypeError, r"^shape must be two whole numbers", shape=None)
    make(ValueError, r"^shape must be two sizes", shape=(-1, 65))
    make(TypeError, r"^dtype must be one of", dtype="float16")
    make(ValueError, r"^bias must be of shape \(33,\), got \(32,\)", bias=torch.zeros(32))
    make(TypeError, r"^bias must be a torch.Tensor, not ndarray", bias=np.zeros(33))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("bias", "said"), [(True, True), (True, False), (False, True)])
def test_a_layer_of_entries_loads_weights_of_the_other_dtype(bias, said, assign):
    """Their bits alone would be taken for other numbers: the state dict, or else the bias, says what they are."""
    w, x = torch.randn(8, 16).bfloat16(), torch.randn(3, 16)
    dtype = torch.bfloat16 if assign else torch.float16
    options = {"shape": (8, 16), "bias": torch.randn(8).bfloat16() if bias else None}
    theirs = torch.nn.Sequential(nn.EntryLinear.from_tiles(*to_entry_tiles(w, w > 0), **options, dtype=torch.bfloat16))
    ours = torch.nn.Sequential(nn.EntryLinear(16, 8, theirs[0].tiles.numel(), bias))
    state = theirs.state_dict()
    ours.load_state_dict(state if said else dict(state), assign=assign)
    expected = nn.EntryLinear.from_tiles(*to_entry_tiles(w.to(dtype), w > 0), **options, dtype=dtype)
    assert ours[0].describe() == expected.describe()
    assert torch.equal(theirs[0].entries()[0], w[w > 0].float())  # as they were
    ours.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x.to(dtype)), expected(x.to(dtype)))


@pytest.mark.parametrize("bias", [False, True])
def test_a_refused_state_leaves_the_dtype_of_entries_as_it_was(bias):
    ours, theirs = (
        nn.EntryLinear.from_tiles(
            *to_entry_tiles(w, w > 0), shape=tuple(w.shape), dtype=w.dtype, bias=w[:, 0] if bias else None
        )
        for w in (torch.randn(8, 16).half(), torch.randn(40, 130).bfloat16())
    )
    numbers = ours.entries()[0]
    for assign in (False, True):
        with pytest.raises(RuntimeError, match="size mismatch"):
            ours.load_state_dict(theirs.state_dict(), assign=assign)
        assert ours.dtype == torch.float16
        assert torch.equal(ours.entries()[0], numbers)
        assert ours(torch.ones(2, 16).half()).dtype == torch.float16


def test_the_bias_of_entries_has_the_dtype_of_the_layer_whatever_is_loaded():
    w = torch.randn(8, 16)
    ours, theirs = (
        nn.EntryLinear.from_tiles(
            *to_entry_tiles(w.to(dtype), w > 0), shape=(8, 16), dtype=dtype, bias=torch.arange(8.0)
        )
        for dtype in (torch.float16, torch.bfloat16)
    )
    plain = {name: part.float() if part.is_floating_point() else part for name, part in ours.state_dict().items()}
    ours.load_state_dict(plain)  # its tiles have the layer's dtype: a float32 bias says nothing of them
    assert torch.equal(ours.entries()[0], w[w > 0].half().float())
    state = theirs.state_dict()
    del state["bias"]
    ours.load_state_dict(state, strict=False, assign=True)
    assert ours.dtype == ours.bias.dtype == torch.bfloat16
    assert torch.equal(ours(torch.ones(2, 16).bfloat16()), theirs(torch.ones(2, 16).bfloat16()))


def test_an_empty_layer_of_entries_gives_zeros():
    layer = nn.EntryLinear(65, 33, 8)
    layer.check()
    assert torch.equal(layer(torch.ones(2, 65).half()), torch.zeros(2, 33).half())
    assert layer.nnz == 1  # the first weight of the last tile, which fills it up
    for entries, sizes in ((3, (65, 33)), (4, (0, 33))):
        with pytest.raises(ValueError, match=r"^entries must be a multiple of 4, and 0 of no weights, got "):
            nn.EntryLinear(*sizes, entries)


def of_kind(kind: str, w: torch.Tensor):
    """A layer of the positive weights of ``w``."""
    if kind == "entries":
        return nn.EntryLinear.from_tiles(*to_entry_tiles(w, w > 0), shape=tuple(w.shape), dtype=w.dtype)
    return nn.SparseLinear.from_csr(*to_csr(w, w > 0), shape=tuple(w.shape))


@pytest.mark.parametrize("kind", ["entries", "csr"])
def test_a_refused_state_says_what_does_not_fit_and_is_not_multiplied(kind):
    """PyTorch takes the arrays whose sizes fit, and leaves the others: the kernels would read out of bounds."""
    w = torch.randn(8, 16).half()
    layer, other = of_kind(kind, w), of_kind(kind, torch.ones(8, 16).half())
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), layer)
    state = {f"1.{name}": part for name, part in other.state_dict().items()} | {"0.bias": torch.ones(3)}
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for 0.bias.*size mismatch for 1.(tiles|values)"):
        model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match="does not fit together: load it again, whole"):
        layer(torch.ones(2, 16).half())
    good = of_kind(kind, w)
    layer.load_state_dict(good.state_dict())
    assert torch.equal(layer(torch.ones(2, 16).half()), good(torch.ones(2, 16).half()))


@pytest.mark.parametrize("assign", [False, True])
def test_tiles_that_are_no_tiles_of_a_known_dtype_are_named(assign):
    w = torch.randn(8, 16).half()
    model = torch.nn.Sequential(of_kind("entries", w))
    expected = model(torch.ones(2, 16).half())
    for dtype in (torch.int64, torch.int16, torch.float16):
        state = {name: part.to(dtype) for name, part in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=f"0.tiles must be int32, got {dtype}"):
            model.load_state_dict(state, assign=assign)
    state = model.state_dict()
    state._metadata["0"]["dtype"] = torch.float32
    with pytest.raises(RuntimeError, match=r"the dtype of 0\.tiles must be one of torch.float16, torch.bfloat16, got "):
        model.load_state_dict(state, assign=assign)
    assert torch.equal(model(torch.ones(2, 16).half()), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_a_bias_that_is_loaded_is_a_buffer_of_the_layers_dtype(assign):
    w = torch.randn(8, 16).half()
    layer = nn.EntryLinear.from_tiles(*to_entry_tiles(w, w > 0), shape=(8, 16), dtype=torch.float16, bias=w[:, 0])
    layer.load_state_dict(layer.state_dict() | {"bias": torch.nn.Parameter(torch.arange(8.0))}, assign=assign)
    assert torch.equal(layer.bias, torch.arange(8.0).half())
    assert not list(layer.parameters())
    with pytest.raises(RuntimeError, match=r"expected torch\.Tensor"):
        layer.load_state_dict(layer.state_dict() | {"bias": "x"}, assign=assign)
