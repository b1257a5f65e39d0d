"""Inside a variant: the grid, the mask and the answers that changed are those of the saved model."""

from __future__ import annotations

import base64
import io
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import qsparse
from qsparse import checkpoint, data, sparse, variants
from qsparse.collect import collect
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import WeightOnlyLinear
from qsparse.quant import quantize
from qsparse.report import inside
from qsparse.report.inside import Insides
from qsparse.train.config import TrainConfig
from qsparse.train.run import train

VARIANTS = ("int8", "csr-0.02", "fp16", "coo-0.1", "int8-2of4")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "1"
    train(TrainConfig(hidden=(16,), epochs=1, data="mnist-5k", device="cpu"), out=run)
    options = {"device": "cpu", "measuring": {"batches": (1,), "budget_s": 0.001}}
    for dtype in ("int8", "fp16"):
        variants.quantize_run(run, dtype, **options)
    variants.quantize_run(run, variants.QuantConfig("int4", simulate=True), **options)
    variants.sparsify_run(run, 0.02, **options)
    variants.sparsify_run(run, 0.1, "coo", **options)
    variants.sparsify_run(run, format="2:4", dtype="int8", **options)
    return run


@pytest.fixture(scope="module")
def insides(run):
    insides = Insides()
    insides.look(run, VARIANTS)
    return insides


def of(insides, variant):
    return next(one for one in insides.variants if one["variant"] == variant)


@pytest.mark.parametrize(
    ("layer", "levels"),
    [
        (lambda dense: WeightOnlyLinear.from_linear(dense, 4, 32), 15),
        (lambda dense: WeightOnlyLinear.from_linear(dense, 8), 255),
        (lambda dense: quantize(MLP((784, 10), seed=0), "fp8").fc1, 253),
    ],
)
def test_the_grid_is_that_of_the_layer(layer, levels):
    """A dense weight lies at most half a step from its level, so the same number of weights lies around each."""
    dense = MLP((784, 10), seed=0).fc1
    q, scale, every = inside._grid(layer(dense))
    assert len(every) == levels
    assert set(q.unique().tolist()) <= set(every.tolist())
    error = (q * scale - dense.weight.detach()).abs()
    step = torch.diff(every)[(torch.searchsorted(every, q.contiguous()) - 1).clamp(min=0)]
    gap = torch.maximum(step, torch.diff(every)[torch.searchsorted(every, q.contiguous()).clamp(max=levels - 2)])
    assert (error <= 0.5001 * gap * scale).all()
    assert sum(inside._on_grid("fc1", dense.weight.detach(), q, scale, every)["bars"][1]["y"]) == q.numel()


def pixels(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_the_levels_count_the_integers(run, insides):
    for name, layer in qsparse.load(run / "int8").layers().items():
        shown = next(one for one in of(insides, "int8")["layers"] if one["name"] == name)
        counts = dict(zip(shown["bars"][1]["x"], shown["bars"][1]["y"], strict=True))
        assert counts == {level: int((layer.weight == level).sum()) for level in layer.weight.unique().tolist()}
        assert set(counts) <= set(shown["grid"])
        assert sum(shown["bars"][0]["y"]) == layer.weight.numel()  # no dense weight lies outside
        assert f"{int((layer.weight == 0).sum()):,} of" in shown["label"]


@pytest.mark.parametrize("variant", ["csr-0.02", "coo-0.1"])
def test_a_mask_is_the_pixels_that_keep_a_weight(run, insides, variant):
    layer = qsparse.load(run / variant).fc1
    columns = layer.col_indices if layer.format == "csr" else layer.cols
    kept = torch.bincount(columns.long(), minlength=784).reshape(28, 28).numpy()
    (mask,) = of(insides, variant)["masks"]
    opacity = pixels(mask["png"])[..., 3]
    assert opacity.shape == (28, 28)
    assert np.array_equal(opacity > 0, kept > 0)
    assert opacity[np.unravel_index(kept.argmax(), kept.shape)] == 255
    assert f"{int((kept > 0).sum())} of 784" in mask["caption"]


def test_2_of_4_shows_what_it_stores_as_it_multiplies_it(run, insides):
    layer = qsparse.load(run / "int8-2of4").fc1
    dense = sparse.expand_24(layer.values, layer.metadata, (16, 784)).float() * layer.weight_scale[:, None]
    shown = of(insides, "int8-2of4")["layers"][0]
    assert "the 6,272 of 12,544 weights that stay (50.0%)" in shown["label"]
    assert max(shown["bars"][1]["x"]) >= dense.abs().max() * 0.98
    assert sum(shown["bars"][1]["y"]) == 16 * 392
    (mask, *_) = of(insides, "int8-2of4")["masks"]
    assert "784 of 784 pixels keep a weight" in mask["caption"]


def test_only_sparse_layers_have_masks(insides):
    assert of(insides, "int8")["masks"] == of(insides, "fp16")["masks"] == []
    assert [one["name"] for one in of(insides, "csr-0.02")["layers"]] == ["fc1", "fc2"]
    assert of(insides, "csr-0.02")["layers"][0]["bars"][1]["name"] == "stay"


def test_the_digits_are_those_whose_answer_changed(run, insides):
    test = data.load("mnist-5k").test
    was, now = (qsparse.load(place)(test.images).argmax(dim=1) for place in (run, run / "csr-0.02"))
    lost = ((was == test.labels) & (now != test.labels)).nonzero().flatten().tolist()
    won = ((was != test.labels) & (now == test.labels)).nonzero().flatten().tolist()
    inside = of(insides, "csr-0.02")
    assert lost, "the test needs a variant that errs"
    assert f"{len(lost):,} that the baseline reads rightly" in inside["changed"]
    assert f"{len(won):,} the other way round" in inside["changed"]
    first = inside["digits"][0]
    assert np.array_equal(pixels(insides.images[first["png"]]), test.images[lost[0]].reshape(28, 28).numpy())
    assert first["caption"] == f"{test.labels[lost[0]]}: {was[lost[0]]} → {now[lost[0]]}"


def test_images_are_held_once(insides):
    assert len(set(insides.images)) == len(insides.images)


def test_report_writes_a_page_of_a_run_and_of_a_sweep(run, tmp_path, browser):
    sweep = tmp_path / "sweeps" / "first"
    sweep.mkdir(parents=True)
    cell = {**checkpoint.read_rows(run)[1], "cell": {}, "run": "sweeps/first/networks/a"}
    failed = {"cell": {}, "error": "it failed", "run": "x", "variant": "y"}
    checkpoint.append_rows(
        sweep, [{**cell, "variant": "baseline", "peers": [{**cell, "variant": "torch_fp16_graph"}]}, failed]
    )
    collected = collect([run, sweep], out=tmp_path / "p.png", html=tmp_path / "page.html")
    assert [row["variant"] for row in collected.rows[-2:]] == ["baseline", "torch_fp16_graph"]
    assert not any("error" in row for row in collected.rows)
    page = browser.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(collected.page.as_uri())
    assert page.locator("#variant option").all_inner_texts() == [
        f"{run}: {name}" for name in ("int8", "fp16", "csr-0.02", "coo-0.1", "int8-2of4")
    ]
    assert "cells failed" in page.inner_text("#notes")
    for place in range(4):
        page.select_option("#variant", str(place))
        assert page.locator("#layers .main-svg").count() >= 2
    assert page.locator("#masks img").count() == 1
    assert page.evaluate(
        "[...document.images].every(image => image.complete && image.naturalWidth === 28 && image.alt)"
    )
    page.close()
    assert faults == []


def test_a_broken_variant_is_named_and_the_others_are_shown(run, tmp_path):
    copied = tmp_path / "1"
    shutil.copytree(run, copied)
    weights = copied / "csr-0.02" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    checkpoint.save_model(copied / "int8", quantize(MLP((784, 24, 10), seed=0), "int8"), {"variant": "int8"})
    for name in ("model.safetensors", "config.json"):
        (copied / "fp16" / name).unlink()
    insides = Insides()
    broken = insides.look(copied, VARIANTS)
    assert [one["variant"] for one in insides.variants] == ["coo-0.1", "int8-2of4"]
    assert list(broken) == ["int8", "csr-0.02", "fp16"]
    page = collect([copied], out=tmp_path / "p.png", html=tmp_path / "p.html").page.read_text()
    assert f"{copied / 'csr-0.02'} is not shown: {weights} is truncated" in page
    assert f"{copied / 'fp16'} is not shown: " in page
    assert "holds a network 784-24-10, and its run one of 784-16-10" in page
    assert f'"run":"{copied}","variant":"coo-0.1","layers"' in page


@pytest.mark.parametrize("name", ["page.png", "page", "."])
def test_a_page_is_named_as_one(run, tmp_path, name):
    with pytest.raises(UserError, match="--html"):
        collect([run], out=tmp_path / "p.png", html=tmp_path / name)


def test_a_run_whose_data_are_gone_is_noted(run, tmp_path, monkeypatch):
    def gone(run):
        raise UserError("no such data")

    monkeypatch.setattr("qsparse.report.inside.load_dataset", gone)
    page = collect([run], out=tmp_path / "p.png", html=tmp_path / "p.html").page.read_text()
    assert "its models are not shown: no such data" in page


def test_a_file_of_rows_is_read(run, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text((run / "rows.jsonl").read_text())
    assert len(collect([file]).rows) == 7
    assert (tmp_path / "report.png").is_file()
