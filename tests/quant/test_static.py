"""Static activations and simulation, from a configuration to the outputs."""

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest
import torch

import qsparse
from qsparse import checkpoint, nn
from qsparse.errors import UserError
from qsparse.models import MLP, from_description
from qsparse.oracles.gemm_int8 import gemm_int8 as int8_oracle
from qsparse.quant import CALIBRATIONS, CalibrationWarning, QuantConfig, quantize

MEASURED = [name for name in CALIBRATIONS if name not in ("fixed", "lsq")]
STATIC = {name: QuantConfig(activations="static", calibration=name) for name in MEASURED}
STATIC["fixed"] = QuantConfig(activations="static", calibration="fixed", range=(-10, 10))
IMAGES = torch.randint(0, 256, (200, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model() -> MLP:
    return MLP((784, 40, 10), seed=1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    return torch.device(request.param, 0 if request.param == "cuda" else None)


def by_oracle(quantized: MLP, x: torch.Tensor) -> np.ndarray:
    """The static int8 model in NumPy: exact integers, and the epilogue step by step."""
    x = x.numpy()
    for layer in quantized.cpu().layers().values():
        scale = layer.input_scale.numpy()
        q = np.clip(np.rint(x / scale), -127, 127).astype(np.int8)
        x = int8_oracle(q, layer.weight.numpy(), scale, layer.weight_scale.numpy(), layer.bias.numpy(),
                        relu=layer.activation == "relu")  # fmt: skip
        x = np.asarray(x, dtype=np.float32)
    return x


@pytest.mark.parametrize("config", STATIC.values(), ids=STATIC)
def test_static_int8_is_bit_for_bit_its_oracle(model, config, device):
    quantized = quantize(model, config, IMAGES).to(device)
    x = 2 * torch.randn(1500, 784)  # beyond the range too, and beyond a slice of the CPU's
    out = quantized(x.to(device)).cpu().numpy()
    np.testing.assert_array_equal(out, by_oracle(quantized, x))
    assert not np.array_equal(out, quantize(model, "int8")(x).numpy())


def test_one_scale_by_hand(model):
    quantized = quantize(model, STATIC["minmax"], IMAGES)
    x = (IMAGES.float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(quantized.fc1.input_scale, x.abs().max().reshape(1) / 127)
    hidden = model.fc1(x).detach()
    torch.testing.assert_close(quantized.fc2.input_scale, hidden.max().reshape(1) / 127)
    assert quantize(model, STATIC["fixed"]).fc2.input_scale == torch.tensor(10.0) / 127  # looks at no data


def test_a_static_layer_survives_its_description_and_the_disk(model, tmp_path):
    quantized = quantize(model, STATIC["minmax"], IMAGES)
    description = json.loads(json.dumps(quantized.describe()))
    empty = from_description(description)
    empty.load_state_dict(quantized.state_dict(), strict=True)
    assert torch.equal(empty(IMAGES), quantized(IMAGES))
    checkpoint.save_model(tmp_path / "v", quantized, {"variant": "v"})
    loaded = qsparse.load(tmp_path / "v")
    assert loaded.fc1.activations == "static"
    assert torch.equal(loaded(IMAGES), quantized(IMAGES))


def test_an_older_description_is_dynamic():
    layer = nn.from_description({"kind": "QuantLinear", "in_features": 3, "out_features": 2})
    assert layer.activations == "dynamic"
    with pytest.raises(ValueError, match="activations must be"):
        nn.QuantLinear(3, 2, activations="fixed")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_only_itself(model, value):
    quantized = quantize(model, STATIC["minmax"], IMAGES)
    x = torch.randn(5, 784)
    spoilt = x.clone()
    spoilt[2, 7] = value
    out = quantized.fc1(spoilt)
    assert bool(out[2].isnan().all())
    keep = [0, 1, 3, 4]
    assert torch.equal(out[keep], quantized.fc1(x)[keep])


def test_any_float_and_no_rows(model):
    layer = quantize(model, STATIC["minmax"], IMAGES).fc1
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(2, 3, 784).to(dtype)
        assert torch.equal(layer(x), layer(x.float()))
    assert layer(torch.zeros(0, 784)).shape == (0, 40)


def test_weights_of_one_scale(model):
    quantized = quantize(model, QuantConfig(granularity="tensor"))
    scale = model.fc1.weight.detach().abs().max() / 127
    torch.testing.assert_close(quantized.fc1.weight_scale, scale.expand(40))
    assert int(quantized.fc1.weight.abs().max()) == 127


BAD_RANGES = (5, (1,), (1, 2, 3), "ab", ("a", "b"), (-1e39, 1), (0, 10**400))


# --- what is refused, and what is said ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int9"}, "Unknown dtype 'int9'; the valid ones are fp16, bf16, int8"),
        ({"activations": "frozen"}, "Unknown activations 'frozen'; the valid ones are dynamic, static"),
        ({"calibration": "kl"}, "Unknown calibration 'kl'; the valid ones are minmax, percentile"),
        ({"granularity": "row"}, "Unknown granularity"),
        ({"method": "magic"}, "Unknown method"),
        ({"activations": "static"}, "Static activations need a range: give --calibration"),
        ({"calibration": "minmax"}, "give --activations static too"),
        ({"activations": "static", "calibration": "fixed"}, "--range LO HI is the range of --calibration fixed"),
        ({"activations": "static", "calibration": "mse", "range": (0, 1)}, "--range LO HI is the range of"),
        ({"activations": "static", "calibration": "fixed", "range": (1, 1)}, "--range is 1 1: LO must be below HI"),
        ({"activations": "static", "calibration": "fixed", "range": (0, math.nan)}, "--range is 0 nan"),
        ({"activations": "static", "calibration": "percentile", "percentile": 0}, r"--percentile is 0: .* \(0, 100\]"),
        ({"activations": "static", "calibration": "percentile", "percentile": 100.1}, "--percentile is 100.1"),
        ({"activations": "static", "calibration": "percentile", "percentile": math.nan}, "--percentile is nan"),
        *(({"activations": "static", "calibration": "fixed", "range": it}, "--range is ") for it in BAD_RANGES),
        ({"percentile": "x"}, "--percentile is x"),
        ({"lr": "fast", "qat_epochs": 1}, "--lr is fast"),
        ({"lr": 1e39, "qat_epochs": 1}, r"--lr is 1e\+39"),
        ({"qat_epochs": True}, "--qat-epochs is True"),
        ({"simulate": "no"}, "simulate is 'no'"),
        ({"symmetric": 0}, "symmetric is 0"),
        *(({"layers": it}, "layers is .*: it must name a dtype for each layer") for it in ("fc1", 5, {1: "int8"})),
        ({"dtype": "fp32", "layers": {"fc1": "fp32"}}, "All layers stay fp32"),
        ({"group": 2**31}, "--group is 2147483648"),
        ({"calibration_samples": 1.5}, "--calibration-samples is 1.5"),
        ({"calibration_samples": 0}, "--calibration-samples is 0"),
        ({"group": 0}, "--group is 0"),
        ({"dtype": "int4"}, "int4 has no kernel: add --simulate"),
        ({"dtype": "int5wo"}, "int5wo has no kernel: add --simulate"),
        ({"granularity": "group"}, "no --granularity group: add --simulate"),
        ({"dtype": "fp8", "granularity": "group"}, "The fp8 kernel has no --granularity group: add --simulate"),
        ({"dtype": "int4wo", "symmetric": False}, "no --asymmetric: add --simulate"),
        ({"dtype": "int4wo", "simulate": True, "activations": "static", "calibration": "mse"}, "leaves the activ"),
        ({"dtype": "fp16", "granularity": "tensor"}, "fp16 is a rounding of every number"),
        ({"dtype": "bf16", "simulate": True}, "bf16 is a rounding of every number"),
    ],
)  # fmt: skip
def test_options_that_do_not_exist_or_go_together(options, message):
    with pytest.raises(UserError, match=message):
        QuantConfig(**options)


def test_a_config_is_frozen_and_names_each_variant_differently():
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantConfig().dtype = "fp16"
    static = {"activations": "static", "calibration": "percentile"}
    configs = [
        *STATIC.values(),
        *(QuantConfig(dtype) for dtype in ("fp16", "bf16", "int8")),
        QuantConfig(**static, percentile=99),
        QuantConfig(**static, calibration_samples=10),
        QuantConfig(**static, simulate=True),
        QuantConfig(activations="static", calibration="fixed", range=(-1, 10)),
        QuantConfig(granularity="tensor"),
        *(QuantConfig("int4wo", granularity="group", group=g, simulate=True) for g in (32, 64)),
        *(QuantConfig(dtype, simulate=True) for dtype in ("int4", "int4wo", "int8")),
        QuantConfig("int4", simulate=True, symmetric=False),
    ]
    names = [config.variant for config in configs]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").replace("_", "").replace(".", "").isalnum() for name in names)
    assert QuantConfig().variant == "int8"


def test_calibration_needs_data(model):
    with pytest.raises(UserError, match="was given none"):
        quantize(model, STATIC["minmax"])
    with pytest.raises(UserError, match=r"There are no calibration data.*--validation above 0"):
        quantize(model, STATIC["minmax"], IMAGES[:0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_calibration_data_that_are_not_finite_name_the_layer(model, value):
    x = torch.randn(50, 784)
    x[7, 3] = value
    with pytest.raises(UserError, match="Calibration of layer fc1: 1 of its values are NaN or Inf"):
        quantize(model, STATIC["minmax"], x)
    with (
        pytest.warns(CalibrationWarning, match="layer fc1: 1 values that are NaN or Inf were ignored"),
        pytest.warns(CalibrationWarning, match="layer fc2: .* were ignored"),
    ):
        quantized = quantize(model, STATIC["percentile"], x)
    assert all(bool(torch.isfinite(layer.input_scale)) for layer in quantized.layers().values())


def test_a_dead_layer_is_said_aloud_and_stays_usable():
    dead = MLP((784, 40, 10))
    with torch.no_grad():
        dead.fc1.weight.zero_()
        dead.fc1.bias.fill_(-1)
    with pytest.warns(CalibrationWarning, match="Calibration of layer fc2: only zeros were seen"):
        quantized = quantize(dead, STATIC["minmax"], IMAGES)
    torch.testing.assert_close(quantized(IMAGES[:3]), dead.fc2.bias.detach().expand(3, 10))


def test_a_sample_is_drawn_over_all_and_always_the_same(model):
    x = torch.zeros(1000, 784)
    x[:, 0] = torch.arange(1000)
    config = QuantConfig(activations="static", calibration="minmax", calibration_samples=100)
    first, second = (quantize(model, config, x).fc1.input_scale for _ in range(2))
    assert torch.equal(first, second)
    assert 900 < 127 * float(first) < 999  # not the first hundred


# --- simulation -----------------------------------------------------------------------------------------------------


def test_simulated_int8_is_the_int8_path_up_to_float32(model):
    """The same rounded numbers, so the same outputs up to the order of the sums (and to what that rounds otherwise)."""
    x = torch.randn(100, 784)
    for config in (QuantConfig(), STATIC["minmax"]):
        simulated = quantize(model, dataclasses.replace(config, simulate=True), IMAGES)
        torch.testing.assert_close(simulated.fc1(x), quantize(model, config, IMAGES).fc1(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(simulated(x), quantize(model, config, IMAGES)(x), rtol=0.02, atol=0.02)


def test_more_bits_and_smaller_groups_are_nearer(model):
    model = model.replace({})
    with torch.no_grad():
        model.fc1.weight[0, 0] = 0.2  # the others lie within 0.036
    x = torch.randn(200, 784)
    exact = model(x).detach()

    def error(dtype, **options):
        return float((quantize(model, QuantConfig(dtype, simulate=True, **options), IMAGES)(x) - exact).norm())

    assert error("int8wo") < error("int6wo") < error("int4wo") < error("int3wo") < error("int2wo")
    assert error("int8") < error("int4")
    assert error("int4wo") < error("int4")
    assert error("int4wo", granularity="group", group=32) < error("int4wo") < error("int4wo", granularity="tensor")
    static = {"activations": "static", "calibration": "minmax", "simulate": True}
    asymmetric = QuantConfig("int4", symmetric=False, **static)
    assert int(quantize(model, asymmetric, IMAGES).fc1.input_zero) == round(15 * 0.4242 / (0.4242 + 2.8215))


def test_a_simulation_leaves_zeros_and_rows_alone():
    model = MLP((784, 6, 4))
    with torch.no_grad():
        model.fc1.weight[1] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = quantize(model, QuantConfig("int4", simulate=True, granularity="group", group=128))
        x = torch.randn(3, 784)
        assert not quantized.fc1.weight[1].any()
        spoilt = x.clone()
        spoilt[1] = math.nan
        out = quantized(spoilt)
        assert torch.equal(out[[0, 2]], quantized(x)[[0, 2]])
        assert bool(out[1].isnan().all())
        assert torch.isfinite(quantized(torch.zeros(2, 784))).all()


@pytest.mark.parametrize(
    "config", [STATIC["minmax"], QuantConfig("int4", simulate=True, symmetric=False)], ids=["static", "simulated"]
)
def test_torch_compile_takes_it_whole(model, config, device):
    quantized = quantize(model, config, IMAGES).to(device)
    x = torch.randn(9, 784, device=device)
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), quantized(x))


@pytest.mark.parametrize("config", [None, 5, {"dtype": "int8"}])
def test_a_configuration_of_another_kind_is_named(config):
    with pytest.raises(TypeError, match=r"^config must be a QuantConfig or the name of a dtype"):
        quantize(MLP((4, 3)), config)


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ([[1.0] * 4], TypeError, r"^calibration_data must be a torch\.Tensor of images \(S, K\), got list"),
        (torch.ones(4), ValueError, r"^calibration_data must have shape \(S, K\), got \(4,\)"),
        (torch.ones(2, 3), ValueError, r"^x must have shape \(M, 4\), got \(2, 3\)"),
    ],
)
def test_calibration_data_that_are_none_are_named(images, error, message):
    with pytest.raises(error, match=message):
        quantize(MLP((4, 3)), QuantConfig(activations="static", calibration="minmax"), images)
