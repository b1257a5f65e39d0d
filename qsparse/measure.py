"""Models and the test split -> rows: accuracy, time and bytes of the very module that ran.

One row a model, from one run, with the baseline and (on a GPU) the library kernels that a user would pick instead. The
fields' names and units are those of `measure`.
"""

import datetime
import functools
import math
import numbers
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from qsparse.data import Split, as_inputs, as_split
from qsparse.errors import UserError
from qsparse.kernels import _load
from qsparse.models import MLP
from qsparse.nn import (
    EntryLinear,
    Fp8Linear,
    Linear,
    QuantLinear,
    QuantSparseLinear,
    QuantTwoFourLinear,
    WeightOnlyLinear,
    ZeroPointLinear,
    stored_bytes,
)
from qsparse.timing import graph_times, percentile, wall_times

BATCHES = (1, 64, 1024, 10_000)
_CHUNK = 10_000
# A batch of another size may take another kernel. Its outputs must still be those whose accuracy is reported, up to
# rounding: ‖out - ref‖ <= tolerance * ‖ref‖, in the worst row (of small outputs: against the mean row). Few bits, and
# layers of several dtypes, make more of what the layers before them round differently.
_TOLERANCE = {"float32": 1e-3, "int8": 1e-3}
_COARSE = 2e-2
_QUANTIZED = (QuantLinear, ZeroPointLinear, Fp8Linear, QuantSparseLinear, QuantTwoFourLinear)

_OF_WHAT_RAN = (
    *("latency_us", "latency_us_p10", "latency_us_p90", "repetitions", "speedup"),
    *("weight_bytes", "weight_ratio", "file_bytes", "peak_bytes", "timer", "l2"),
)


class PeerWarning(UserWarning):
    """A library peer gave outputs that are NaN or Inf (float16 overflows where float32 does not), so it has no row."""


def measure(
    models: dict[str, MLP],
    test: Split,
    *,
    baseline: str = "baseline",
    device: str | torch.device = "cpu",
    run: str | None = None,
    details: dict[str, dict] | None = None,
    batches: Iterable[int] = BATCHES,
    budget_s: float = 0.7,
    peers: bool = True,
    compiled_peers: bool = False,
) -> list[dict]:
    """Measure `models` against each other and return one JSON-able row for each, in their order, then the peers'.

    Args:
        models: variant name -> model; they are moved to `device` and set to evaluation.
        test: the images and labels of the accuracy, a `Split` or a pair of arrays, and the first `batch` of them
            (repeated if fewer) of the latency.
        baseline: the name in `models` that changes, agreement and speed-ups refer to.
        device: where everything runs. On "cpu" the time is wall-clock; on "cuda" it is device time of a CUDA-graph
            replay with the L2 cache flushed before it. Inputs are resident, normalised, in the model's input dtype.
        run: the run's name, for the row.
        details: variant name -> fields that only the caller knows (file_bytes, seed, method, ...); they add to the
            row, or override what was derived from the model.
        batches: batch sizes to time.
        budget_s: seconds for each model and batch size on the CPU (20 repetitions may take up to twice that).
        peers: on a GPU, also measure the dense baseline built of `torch.nn.Linear` in float32 and float16, in graphs.
        compiled_peers: and these two under torch.compile (slow to start).

    Returns:
        Rows with the fields
        op ("mlp"), run, variant, peer (null for our own kernels), sizes, dtype, activations, granularity, calibration,
        method, format, density (the fraction of the weights that stay, however many a format stores; null when all
        layers are dense), accuracy (fraction), accuracy_change (points
        against the baseline), agreement (fraction of predictions equal to the baseline's), test_images, latency_us,
        latency_us_p10, latency_us_p90 (batch as a string -> microseconds: median and percentiles), repetitions (batch
        -> count), speedup (batch -> baseline's latency / this latency), weight_bytes (all stored tensors),
        weight_ratio (to the baseline's), file_bytes, peak_bytes (device memory during inference of 10,000 images, its
        weights and input included; null on the CPU), kernel, device, simulated (false: what ran is what is reported;
        true: rounded numbers in float32, so times and bytes are null), seed, date (UTC), commit, timer, l2, gpu, cpu,
        threads, torch, cuda. What does not apply is null.

    Warns:
        PeerWarning: a peer's outputs are not finite; it gets no row, and the others do.

    Raises:
        UserError: outputs that are not finite, or that change with the batch size beyond rounding; the message names
            the variant. Such a model gets no row.
        ValueError: `baseline` or a name in `details` is not in `models`, the test split is empty or has labels that the
            baseline has no output for, or a batch size or the budget is none.
        TypeError: `models` is no dict, what stands in it is no model of linear layers, or gives no logits; `test` is no
            split, `details` are no dict of dicts.
    """
    _check_models(models)
    test = as_split(test)
    device, details, batches = torch.device(device), details or {}, tuple(batches)
    _check_numbers(details, batches, budget_s)
    if baseline not in models or not details.keys() <= models.keys():
        raise ValueError(f"baseline {baseline!r} and details {list(details)} must be among the models {list(models)}")
    if len(test) == 0:
        raise ValueError("the test split is empty")
    modules: dict[str, torch.nn.Module] = {name: model.to(device).eval() for name, model in models.items()}
    if peers:
        modules |= _torch_peers(models[baseline], device, compiled_peers)
    dtypes = {name: _input_dtype(module) for name, module in modules.items()}
    simulated = {name for name, module in modules.items() if _is_simulated(module)}

    with torch.inference_mode():
        images, labels = test.images.to(device), test.labels.to(device)
        inputs = {dtype: as_inputs(images, dtype) for dtype in set(dtypes.values())}
        logits = {}
        for name, module in list(modules.items()):
            try:
                logits[name] = _logits(name, module, inputs[dtypes[name]])
            except UserError as error:
                if name in models:
                    raise
                warnings.warn(str(error), PeerWarning, stacklevel=2)
                del modules[name]
        timed = {name: module for name, module in modules.items() if name not in simulated}
        peak_bytes = {name: _peak_bytes(module, inputs[dtypes[name]][:_CHUNK]) for name, module in timed.items()}
        times: dict[str, dict[str, list[float]]] = {name: {} for name in modules}
        for batch in batches:
            for name, samples in _time(timed, dtypes, inputs, logits, batch, device, budget_s).items():
                times[name][str(batch)] = samples
    predictions = {name: out.argmax(dim=1) for name, out in logits.items()}
    classes = logits[baseline].shape[1]
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"the labels must be from 0 to {classes - 1}, the outputs of {baseline}")
    baseline_correct = int((predictions[baseline] == labels).sum())

    where = environment(device)
    rows = []
    for name, module in modules.items():
        correct = int((predictions[name] == labels).sum())
        latency_us = _percentiles(times[name], 50)
        row = {
            "op": "mlp",
            "run": run,
            "variant": name,
            "peer": None,
            **_description(module),
            "kernel": _kernel(module, inputs[dtypes[name]][:1], device),
            "accuracy": correct / len(test),
            "accuracy_change": 100 * (correct - baseline_correct) / len(test),
            "agreement": int((predictions[name] == predictions[baseline]).sum()) / len(test),
            "test_images": len(test),
            "latency_us": latency_us,
            "latency_us_p10": _percentiles(times[name], 10),
            "latency_us_p90": _percentiles(times[name], 90),
            "repetitions": {batch: len(samples) for batch, samples in times[name].items()},
            "speedup": {b: _percentiles(times[baseline], 50)[b] / us for b, us in latency_us.items()},
            "weight_bytes": stored_bytes(module),
            "weight_ratio": stored_bytes(module) / stored_bytes(modules[baseline]),
            "file_bytes": None,
            "peak_bytes": peak_bytes.get(name),
            "device": device.type,
            "simulated": name in simulated,
            "seed": None,
            **where,
        }
        if name in simulated:  # what ran is not what would be stored and computed
            row |= dict.fromkeys(_OF_WHAT_RAN)
        if name in models:
            row |= details.get(name, {})
        else:
            row |= {"peer": name, "seed": details.get(baseline, {}).get("seed")}
        rows.append(row)
    return rows


def _check_models(models: object) -> None:
    if not isinstance(models, Mapping):
        raise TypeError(f"models must be a dict from a variant's name to its model, not {type(models).__name__}")
    for name, model in models.items():
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{name} must be a model, a torch.nn.Module, not {type(model).__name__}")
        if not (isinstance(model, MLP) or any(isinstance(part, torch.nn.Linear) for part in model.modules())):
            raise TypeError(f"{name} must be a model of linear layers, and this {type(model).__name__} has none")


def _check_numbers(details: object, batches: tuple[object, ...], budget_s: object) -> None:
    if not (isinstance(details, Mapping) and all(isinstance(fields, Mapping) for fields in details.values())):
        raise TypeError(f"details must be a dict from a variant's name to a dict of fields, not {details!r:.40}")
    for batch in batches:
        if not isinstance(batch, numbers.Integral) or isinstance(batch, bool) or batch < 1:
            raise ValueError(f"a batch size is {batch!r}: it must be a whole number, at least 1")
    if not isinstance(budget_s, numbers.Real) or isinstance(budget_s, bool) or not 0 <= budget_s < math.inf:
        raise ValueError(f"budget_s is {budget_s!r}: it must be a number of seconds, at least 0")


def _logits(name: str, module: torch.nn.Module, x: Tensor) -> Tensor:
    """The outputs for all of `x`, float32; UserError unless all are finite, TypeError where they are no logits."""
    outs = []
    for chunk in x.split(_CHUNK):
        out = module(chunk)
        if not (isinstance(out, Tensor) and out.ndim == 2 and len(out) == len(chunk)):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(f"{name} must give logits, a tensor ({len(chunk)}, classes), not {got}")
        outs.append(out.float())
    out = torch.cat(outs)
    if not bool(torch.isfinite(out).all()):
        rows = int((~torch.isfinite(out)).any(dim=1).sum())
        raise UserError(
            f"The outputs of {name} are NaN or Inf for {rows:,} of {len(out):,} test images: no row for it."
        )
    return out


def _time(modules, dtypes, inputs, logits, batch: int, device: torch.device, budget_s: float) -> dict[str, list[float]]:
    """Microseconds of every repetition of every module at one batch size, after a check of what they computed."""
    index = torch.arange(batch, device=device) % len(next(iter(inputs.values())))
    resident = {dtype: x[index] for dtype, x in inputs.items()}
    calls = {name: functools.partial(module, resident[dtypes[name]]) for name, module in modules.items()}
    samples, outputs = graph_times(calls, device) if device.type == "cuda" else wall_times(calls, budget_s)
    for name, out in outputs.items():
        reference = logits[name][index]
        error, size = (out.float() - reference).norm(dim=1), reference.norm(dim=1)
        tolerance = _TOLERANCE.get(_description(modules[name])["dtype"], _COARSE)
        wrong = ~(error <= tolerance * size.clamp(min=size.mean()))  # a NaN is wrong too
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise UserError(
                f"The outputs of {name} at batch {batch:,} differ from those that gave its accuracy (row {row} by "
                f"{error[row]:.3g}, of {size[row]:.3g}): no row for it. This is a fault in a kernel; please report it."
            )
    return samples


def _percentiles(times: dict[str, list[float]], percent: float) -> dict[str, float]:
    return {batch: round(percentile(samples, percent), 3) for batch, samples in times.items()}


def _input_dtype(module: torch.nn.Module) -> torch.dtype:
    return module.input_dtype if isinstance(module, MLP) else next(module.parameters()).dtype


def _is_simulated(module: torch.nn.Module) -> bool:
    return any(getattr(part, "simulated", False) for part in module.modules())


def _description(module: torch.nn.Module) -> dict:
    """The fields that follow from what the module is made of."""
    if isinstance(module, MLP):
        layers = list(module.layers().values())
    else:
        layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    quantized = [layer for layer in layers if isinstance(layer, _QUANTIZED)]
    weights_only = [layer for layer in layers if isinstance(layer, WeightOnlyLinear)]
    grouped = any(layer.group for layer in weights_only)
    sparse = any(hasattr(layer, "nnz") for layer in layers)
    sizes = [layer.in_features * layer.out_features for layer in layers]
    return {
        "sizes": [layers[0].in_features, *(layer.out_features for layer in layers)],
        "dtype": _joined(_dtype_name(layer) for layer in layers),
        "activations": _joined(layer.activations for layer in quantized) if quantized else None,
        "granularity": ("group" if grouped else "channel") if quantized or weights_only else None,
        "calibration": None,
        "method": "absmax" if quantized or weights_only else None,
        "format": _joined(getattr(layer, "format", "dense") for layer in layers),
        "density": sum(map(_kept, layers)) / sum(sizes) if sparse else None,
    }


def _kept(layer: torch.nn.Module) -> int:
    """Weights that stay; of those of a dense layer of floats beside sparse ones, the ones that are not zero."""
    if isinstance(layer, Linear):
        return int(layer.weight.count_nonzero())
    return getattr(layer, "nnz", layer.in_features * layer.out_features)


def _kernel(module: torch.nn.Module, x: Tensor, device: torch.device) -> str:
    """What computes the module: on a GPU, the kernels that one pass was seen to launch, as OPERATION:TIER."""
    if not isinstance(module, MLP):
        return "torch.nn.Linear"
    if device.type == "cpu":
        return module.cpu_kernel()
    with torch.inference_mode(), _load.launched() as launches:
        module(x)
    sources = dict.fromkeys(launch.partition(".cu:")[0] for launch in launches)
    return ", ".join(f"{name.removesuffix('_' + _load.tier_of(name))}:{_load.tier_of(name)}" for name in sources)


def _dtype_name(layer: torch.nn.Module) -> str:
    if isinstance(layer, WeightOnlyLinear):
        return f"int{layer.bits}wo"
    if isinstance(layer, Fp8Linear):
        return "float8_e4m3fn"
    if isinstance(layer, EntryLinear):
        return str(layer.dtype).removeprefix("torch.")
    stored = layer.values if hasattr(layer, "values") else layer.weight
    return str(stored.dtype).removeprefix("torch.")


def _joined(names: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(names))


def _torch_peers(model: MLP, device: torch.device, compiled: bool) -> dict[str, torch.nn.Module]:
    """What a user would run instead of the dense `model` on a GPU: PyTorch's own layers; nothing if it is not dense."""
    if device.type != "cuda" or not all(isinstance(layer, Linear) for layer in model.layers().values()):
        return {}
    peers: dict[str, torch.nn.Module] = {}
    for short, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        parts: list[torch.nn.Module] = []
        for layer in model.layers().values():
            n, k, device = layer.out_features, layer.in_features, layer.weight.device
            plain = torch.nn.Linear(k, n, bias=layer.bias is not None, device=device, dtype=dtype)
            plain.load_state_dict({key: tensor.detach() for key, tensor in layer.named_parameters()})  # casts
            parts += [plain, torch.nn.ReLU()] if layer.activation == "relu" else [plain]
        peers[f"torch_{short}_graph"] = torch.nn.Sequential(*parts).eval()
    if compiled:
        for name, peer in list(peers.items()):
            peers[name.replace("graph", "compiled")] = torch.compile(peer, mode="max-autotune-no-cudagraphs")
    return peers


def _peak_bytes(module: torch.nn.Module, x: Tensor) -> int | None:
    """Device memory that inference on `x` needs: stored weights, `x`, and the peak of what both allocators add."""
    if x.device.type != "cuda":
        return None
    cupy = sys.modules.get("cupy")  # whoever allocates through CuPy has imported it
    with torch.cuda.device(x.device):
        pool = cupy.get_default_memory_pool() if cupy else None
        if pool:
            pool.free_all_blocks()
        pool_before = pool.total_bytes() if pool else 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(x)
        torch.cuda.synchronize()
        added = torch.cuda.max_memory_allocated() - before
        added += pool.total_bytes() - pool_before if pool else 0
    return added + stored_bytes(module) + x.nbytes


def environment(device: torch.device) -> dict:
    """Where and when: the same for every row of a run."""
    on_gpu = device.type == "cuda"
    return {
        "timer": "cuda_graph" if on_gpu else "wall",
        "l2": "cold" if on_gpu else None,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout that this file belongs to, "-dirty" appended if files changed; None if there is none.

    An installed copy may lie inside an unrelated checkout: the file itself must be tracked. For a copy of a checkout
    without its history, on a machine that only measures, $QSPARSE_COMMIT says which it was.
    """
    if told := os.environ.get("QSPARSE_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=environment).stdout

    try:
        git("ls-files", "--error-unmatch", __file__)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip()
    except (OSError, subprocess.SubprocessError):
        return None
