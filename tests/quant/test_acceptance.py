"""What a quantization must hold to on a trained network: bytes, GPTQ's error, the same on every device, odd layers."""

import pytest
import torch

from qsparse import checkpoint, data
from qsparse.data import normalize
from qsparse.models import MLP
from qsparse.quant import QuantConfig, quantize, schemes
from qsparse.quant.calibrate import layer_inputs
from qsparse.quant.gptq import gptq
from qsparse.train.config import TrainConfig
from qsparse.train.fit import fit

STATIC = {"activations": "static", "calibration": "minmax"}


@pytest.fixture(scope="module")
def dataset():
    return data.load("mnist-5k", None)


@pytest.fixture(scope="module")
def trained(dataset) -> MLP:
    model = MLP((784, 64, 32, 10), seed=0)
    fit(model, dataset, TrainConfig(epochs=3))
    return model


@pytest.mark.parametrize("sizes", [(784, 256, 10), (784, 1024, 1024, 10)], ids=str)
@pytest.mark.parametrize("options", [{}, STATIC, {"granularity": "tensor"}], ids=["dynamic", "static", "tensor"])
def test_int8_takes_at_most_27_percent_in_memory_and_on_disk(sizes, options, tmp_path):
    model = MLP(sizes)
    quantized = quantize(model, QuantConfig(**options), torch.randn(20, 784))
    whole, small = (
        sum(tensor.numel() * tensor.element_size() for tensor in each.state_dict().values())
        for each in (model, quantized)
    )
    assert small <= 0.27 * whole
    files = [checkpoint.save_model(tmp_path / name, each, {}) for name, each in (("a", model), ("b", quantized))]
    assert files[1].stat().st_size <= 0.27 * files[0].stat().st_size


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, "e2m1"])
def test_gptq_s_error_is_no_larger_than_rounding_s_on_any_layer(trained, dataset, bits, granularity):
    for name, X in layer_inputs(trained, dataset.validation.images).items():
        W = trained.layers()[name].weight.detach()
        errors = []
        for parts in (gptq(W, X, bits, granularity), schemes.round_weights(W, bits, granularity)):
            q, scale, zero = parts
            s, z = (schemes.spread(value, W, granularity, 64) for value in (scale, zero))
            errors.append(float((X.double() @ (schemes.to_reals(q, s, z) - W).double().T).norm()))
        assert errors[0] <= errors[1], (name, bits, granularity)


@pytest.mark.gpu
def test_cpu_and_gpu_predict_the_same_of_every_image(trained, real_data):
    """Bit for bit, on the 10,000 test images."""
    x = normalize(data.load(str(real_data)).test.images, torch.float32)
    assert len(x) == 10_000
    for options in ({}, STATIC, {"granularity": "tensor", "method": "gptq"}, {"symmetric": False}):
        quantized = quantize(trained, QuantConfig(**options), x[:500])
        with torch.inference_mode():
            on_cpu = quantized(x)
            on_gpu = quantized.to("cuda")(x.to("cuda")).cpu()
        assert torch.equal(on_cpu.argmax(dim=1), on_gpu.argmax(dim=1)), options
        assert torch.equal(on_cpu, on_gpu), options


CONFIGS = [
    *(QuantConfig(**STATIC | {"calibration": name}) for name in ("minmax", "percentile", "mse", "entropy")),
    QuantConfig(method="gptq"),
    QuantConfig(method="smoothquant"),
    QuantConfig(granularity="tensor", method="equalisation", weight_calibration="mse"),
    QuantConfig("int4wo", granularity="group", weight_calibration="percentile"),
    QuantConfig("fp8"),
    QuantConfig("int4", symmetric=False, simulate=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.variant)
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25])
def test_a_constant_layer_of_constant_inputs(config, value):
    """All its weights are alike, and so are its inputs: it gives what float32 gives, as near as its numbers are."""
    model = MLP((20, 6, 4), seed=0)
    with torch.no_grad():
        model.fc1.weight.fill_(value)
        model.fc1.bias.fill_(4.0)
    x = torch.full((30, 20), 0.5)
    with torch.no_grad():
        exact = model(x)
    torch.testing.assert_close(quantize(model, config, x)(x), exact, rtol=0.15, atol=0.15)
