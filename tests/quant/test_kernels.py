"""int8wo, int4wo and fp8 on their kernels: against simulation, an oracle, the bytes and the disk."""

import dataclasses

import numpy as np
import pytest
import torch

import qsparse
from qsparse import checkpoint
from qsparse.data import Split
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.nn import Fp8Linear, WeightOnlyLinear, from_description
from qsparse.quant import QuantConfig, quantize

IMAGES = torch.randint(0, 256, (200, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
STATIC = {"activations": "static", "calibration": "mse"}
CONFIGS = [
    QuantConfig("int8wo"),
    QuantConfig("int4wo"),
    *(QuantConfig("int4wo", granularity="group", group=group) for group in (32, 64, 128)),
    QuantConfig("int8wo", granularity="tensor", weight_calibration="percentile"),
    QuantConfig("int4wo", granularity="group", group=64, method="gptq"),
    QuantConfig("int4wo", method="bias-correction"),
    QuantConfig("fp8"),
    QuantConfig("fp8", granularity="tensor", method="equalisation"),
    QuantConfig("fp8", **STATIC),
]


@pytest.fixture(scope="module")
def model() -> MLP:
    return MLP((784, 40, 10), seed=1)


def check_the_kernel(model, config, device):
    """The same rounded numbers; weight-only keeps the rest in float16, and Hopper's fp8 adds with fewer bits."""
    kind = Fp8Linear if config.dtype == "fp8" else WeightOnlyLinear
    simulated = quantize(model, dataclasses.replace(config, simulate=True), IMAGES)
    real = quantize(model, config, IMAGES).to(device)
    assert all(isinstance(layer, kind) for layer in real.layers().values())
    out, expected = real(IMAGES.to(device)).cpu(), simulated(IMAGES)
    assert out.dtype == torch.float32
    assert float((out - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.variant)
def test_the_kernel_computes_what_is_simulated(model, config):
    check_the_kernel(model, config, "cpu")


@pytest.mark.gpu
def test_a_gpu_computes_what_is_simulated(model):
    for config in CONFIGS:
        check_the_kernel(model, config, "cuda")


@pytest.mark.parametrize("static", [False, True])
def test_fp8_is_its_oracle(model, static):
    """Exact products of e4m3 numbers, in float64."""
    layer = quantize(model, QuantConfig("fp8", **STATIC if static else {}), IMAGES).fc1
    x = 3 * torch.randn(50, 784)
    scale = layer.input_scale.numpy() if static else x.abs().amax(dim=1, keepdim=True).numpy() / np.float32(448)
    q = torch.tensor(x.numpy() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    w = layer.weight.view(torch.float8_e4m3fn).double() * layer.weight_scale.double()[:, None]
    expected = ((q * torch.tensor(scale).double()) @ w.T + layer.bias.double()).relu()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.variant)
def test_they_survive_the_disk_and_their_description(model, config, tmp_path):
    quantized = quantize(model, config, IMAGES)
    file = checkpoint.save_model(tmp_path / "v", quantized, {"variant": "v"})
    loaded = qsparse.load(tmp_path / "v")
    assert torch.equal(loaded(IMAGES), quantized(IMAGES))
    assert from_description(quantized.fc1.describe()).describe() == quantized.fc1.describe()
    stored = sum(tensor.numel() * tensor.element_size() for tensor in quantized.state_dict().values())
    assert stored <= file.stat().st_size < stored + 2000


def test_the_bytes_are_those_of_the_packed_weights(model):
    sizes = {dtype: _bytes(quantize(model, QuantConfig(dtype))) for dtype in ("int8wo", "int4wo", "fp8")}
    weights = 784 * 40 + 40 * 10
    assert sizes == {
        "int8wo": weights + 50 * (4 + 2),  # scales in float32, biases in float16
        "int4wo": weights // 2 + 50 * (4 + 2),
        "fp8": weights + 50 * (4 + 4),
    }
    grouped = quantize(model, QuantConfig("int4wo", granularity="group", group=64))
    assert grouped.fc1.weight_scale.shape == (40, 13)  # 784 = 12 * 64 + 16: the last group is short


def _bytes(model) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def test_a_row_that_is_not_finite_spoils_only_itself(model):
    layer = quantize(model, "fp8").fc1
    x = torch.randn(5, 784)
    for value in (torch.nan, torch.inf):
        spoilt = x.clone()
        spoilt[2, 7] = value
        out = layer(spoilt)
        assert bool(out[2].isnan().all())
        assert torch.equal(out[[0, 1, 3, 4]], layer(x)[[0, 1, 3, 4]])
    assert torch.equal(layer(torch.zeros(2, 784)), layer.bias.relu().expand(2, 40))
    assert layer(torch.zeros(0, 784)).shape == (0, 40)


def test_their_rows_name_them(model):
    models = {"baseline": model}
    models |= {c.variant: quantize(model, c) for c in (QuantConfig("int4wo", granularity="group"), QuantConfig("fp8"))}
    rows = measure(models, Split(IMAGES, torch.zeros(200, dtype=torch.int64)), batches=(1,), budget_s=0.002)
    assert [(row["dtype"], row["granularity"], row["activations"], row["kernel"]) for row in rows[1:]] == [
        ("int4wo", "group", None, "gemm_weight_only:cpu"),
        ("float8_e4m3fn", "channel", "dynamic", "gemm_fp8:cpu (float32)"),
    ]
    assert not any(row["simulated"] for row in rows)
