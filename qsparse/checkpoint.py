"""Weights and rows on disk: run directories, models, and the checkpoint that an interrupted training goes on from.

A run directory, `runs/3`, holds

    config.json             how it was trained, and what the model is made of
    checkpoint.safetensors  while it trains: weights, momentum and metrics after the last finished epoch
    metrics.json            one entry for each finished epoch
    model.safetensors       the trained weights; it appears when the last epoch is done
    rows.jsonl              what `quantize` and `sparsify` measured, a row a line
    int8/, csr-0.1/, ...    compressed variants: a config.json and a model.safetensors each

Every file but rows.jsonl is written under another name and renamed, so that no reader and no crash finds half of one.
A model file describes itself: the description that rebuilds the empty model stands in its header. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from qsparse import models
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import stored_bytes

RUNS = "runs"
CONFIG = "config.json"
ROOM = ".room"
METRICS = "metrics.json"
MODEL = "model.safetensors"
CHECKPOINT = "checkpoint.safetensors"
ROWS = "rows.jsonl"

# What each entry of metrics.json tells at least.
_METRICS = {"seconds", "validation_accuracy", "test_accuracy"}

# Keys of the header of a model file and of a checkpoint; a safetensors file without them is somebody else's.
_MODEL_KEY = "qsparse_model"
_CHECKPOINT_KEY = "qsparse_checkpoint"


# Run directories


def new_run(root: str | Path = RUNS) -> Path:
    """Make and return the next numbered directory under `root`; two processes never get the same one.

    Raises UserError when it cannot be made.
    """
    root = Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        number = max((int(child.name) for child in root.iterdir() if child.name.isdecimal()), default=0) + 1
        while True:
            run = root / str(number)
            try:
                run.mkdir()
            except FileExistsError:
                number += 1  # another process took it between the listing and the mkdir
            else:
                return run
    except OSError as error:
        raise UserError(f"cannot make a run directory under {root}: {_reason(error)}") from error


def runs(root: str | Path = RUNS) -> list[Path]:
    """Return the run directories under `root`, oldest first (by when their training began)."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = [child for child in root.iterdir() if (child / CONFIG).is_file()]

    def age(run: Path) -> tuple[int, int, str]:
        return (run / CONFIG).stat().st_mtime_ns, int(run.name) if run.name.isdecimal() else 0, run.name

    return sorted(found, key=age)


def newest_run(root: str | Path = RUNS) -> Path:
    """Return the run under `root` whose training began last. Raises UserError, naming `qsparse train`, without one."""
    found = runs(root)
    if not found:
        raise UserError(f"there is no run under {Path(root)}/ yet: make one with `qsparse train`")
    return found[-1]


def find_run(run: str | Path | None, root: str | Path = RUNS) -> Path:
    """Return `run` as the path of a run directory; left out, the newest under `root`.

    Raises UserError when there is none, and when the directory is a compressed variant of a run.
    """
    if run is None:
        return newest_run(root)
    run = Path(run)
    if not run.is_dir():
        raise UserError(f"there is no run {run}: make one with `qsparse train`")
    config = read_config(run)
    if "train" not in config:
        raise UserError(f"{run} holds the compressed model {config.get('variant')!r}: give its run, {run.parent}")
    return run


def holds_run(directory: Path) -> bool:
    """Whether `directory` holds a run, finished or not."""
    return any((directory / name).exists() for name in (CONFIG, METRICS, MODEL, CHECKPOINT, ROWS))


def is_finished(run: Path) -> bool:
    """Whether the training of `run` is done."""
    return (run / MODEL).is_file()


def require_writable(path: str | Path) -> None:
    """Raise UserError unless files can be made in directory `path`, or in the first of its parents that is there."""
    existing = Path(path).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"cannot write in {path}: {_reason(error)}") from error


def require_room(run: Path, model: MLP) -> None:
    """Raise UserError unless `run` has room for the weights of `model` and their momentum, beside what it holds."""
    file = run / ROOM
    try:
        _write(file, bytes(2 * stored_bytes(model)))
    finally:
        file.unlink(missing_ok=True)


def require_own(run: Path) -> None:
    """Raise UserError unless what `run` holds is a training run of qsparse's, which `clear_run` may delete."""
    try:
        own = "train" in read_config(run)
    except UserError:
        own = False
    if not own:
        raise UserError(f"{run} holds files that are named as a run's but are not one: choose another --out")


def is_variant(directory: Path) -> bool:
    """Whether `directory` holds a compressed model that qsparse wrote."""
    try:
        return "variant" in read_config(directory)
    except UserError:
        return False


def make_directory(path: str | Path) -> Path:
    """Make `path` and its parents where they are missing, and return it. Raises UserError when that fails."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {path}: {_reason(error)}") from error
    return path


@contextlib.contextmanager
def exclusive(run: Path) -> Iterator[None]:
    """Hold the directory `run` for one training, whose files two would mix. Raises UserError while another holds it.

    The system lets go of it when the process ends, however it ends. A file system without locks holds nothing.
    """
    try:
        descriptor = os.open(run, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot read {run}: {_reason(error)}") from error
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is training in {run}: wait for it, or choose another --out") from None
        yield
    finally:
        os.close(descriptor)


def clear_run(run: Path) -> None:
    """Delete what qsparse wrote in `run`, the compressed variants too, and nothing else."""
    for child in run.iterdir():
        if child.is_symlink() or not is_variant(child):  # what a link points at is not in the run
            continue
        for name in (MODEL, CONFIG):
            (child / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody's file lies there too
            child.rmdir()
    for name in (MODEL, CHECKPOINT, METRICS, ROWS, CONFIG, ROOM):
        (run / name).unlink(missing_ok=True)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the config.json of a run or of a compressed variant. Raises UserError when it is missing or foreign."""
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise UserError(f"{directory} holds no qsparse run ({CONFIG} is missing): make one with `qsparse train`")
    config = _read_json(path)
    if not isinstance(config, dict) or "model" not in config or not isinstance(config.get("train", {}), dict):
        raise UserError(f"{path} is not the config of a qsparse run")
    return config


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Return the metrics of each finished epoch of `run`, one at least. Raises UserError when there are none."""
    path = Path(run) / METRICS
    if not path.is_file():
        raise UserError(f"{path}, the metrics of the finished epochs, is missing")
    metrics = _read_json(path)
    epochs = metrics.get("epochs") if isinstance(metrics, dict) else None
    if not _are_metrics(epochs):
        raise UserError(f"{path} does not hold the metrics of a qsparse run")
    return epochs


def _are_metrics(epochs: object) -> bool:
    """Whether it is a list of one entry at least, each of which tells in numbers what it must."""
    return isinstance(epochs, list) and epochs != [] and all(map(_is_metrics, epochs))


def _is_metrics(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() >= _METRICS
        and all(type(entry[key]) in (int, float) for key in _METRICS if key != "validation_accuracy")
        and type(entry["validation_accuracy"]) in (int, float, type(None))  # null: no images were held out
    )


def write_config(run: Path, config: Mapping[str, Any], model: MLP) -> None:
    """Write the config.json of a run or a variant: `config` and the description of `model`."""
    _write_json(run / CONFIG, {**config, "model": model.describe()})


def write_metrics(run: Path, metrics: list[dict[str, Any]]) -> None:
    """Write the metrics.json of a run: one entry for each finished epoch."""
    _write_json(run / METRICS, {"epochs": metrics, "test_accuracy": metrics[-1]["test_accuracy"]})


# Models


def save_model(directory: str | Path, model: MLP, extra: Mapping[str, Any]) -> Path:
    """Write `model` (dense or compressed) into `directory`, made when missing; return the path of its weights.

    extra: what config.json tells besides the model's description. Raises UserError when the directory is not writable.
    """
    directory = make_directory(directory)
    file = write_weights(directory, model)
    write_config(directory, extra, model)
    return file


def write_weights(directory: Path, model: MLP) -> Path:
    """Write the model.safetensors of a run or a variant, and return its path."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    _write(directory / MODEL, to_bytes(tensors, {_MODEL_KEY: json.dumps(model.describe())}))
    return directory / MODEL


def load(path: str | Path, device: str | torch.device = "cpu") -> MLP:
    """Load the model of a run, of a compressed variant of it (`runs/3/int8`), or of a model file.

    device: auto, cpu, cuda, or a torch.device. Returns the module in eval mode, as it was saved: same layers, same
    bytes, same predictions.

    Raises UserError, in a sentence, when there is no such run, when its training is not done, when the file is
    truncated, foreign or does not fit its own description, and, naming the layer, when it holds NaN or infinite values.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a run's directory, as a text or a Path, got {type(path).__name__}")
    file = _model_file(Path(path))
    target = resolve_device(device) if isinstance(device, str) else device
    tensors, header = _read_safetensors(file)
    if _MODEL_KEY not in header:
        raise UserError(f"{file} is not a qsparse model: its header lacks the description of the layers")
    try:
        model = models.from_description(parse_json(header[_MODEL_KEY]))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"{file} describes a model that this version of qsparse does not know: {error}") from error
    _load_state(model, tensors, file)
    return model.to(target).eval()


def _model_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"there is no run {path}: make one with `qsparse train`")
    if is_finished(path):
        return path / MODEL
    if "train" not in read_config(path):
        raise UserError(f"{path} holds no {MODEL}: compress the run again")
    raise UserError(unfinished(path))


def unfinished(run: Path) -> str:
    """Return the sentence that says how far the training of `run` came and how to go on."""
    epochs = read_config(run)["train"].get("epochs", "?")
    done = len(read_metrics(run)) if (run / METRICS).is_file() else 0
    return (
        f"the training of {run} is not done ({done} of {epochs} epochs): "
        f"finish it with `qsparse train --resume --out {run}`"
    )


def _load_state(model: MLP, tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Put `tensors` into `model`. Raises UserError unless names, shapes, dtypes and values are what they must be."""
    expected = model.state_dict()
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UserError(f"{file} lacks {', '.join(missing)}")
    if surplus := sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{file} holds tensors that its model has no place for: {', '.join(surplus)}")
    for name, want in expected.items():
        got = tensors[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            raise UserError(f"{file}: {name} is {_kind(got)}, and its layer needs {_kind(want)}")
        if got.is_floating_point() and not torch.isfinite(got).all():
            layer, _, tensor = name.rpartition(".")
            raise UserError(f"{file}: layer {layer} holds NaN or infinite values in its {tensor}; train it again")
    try:
        model.load_state_dict(tensors, strict=True)
    except ValueError as error:  # a sparse layer checks its indices
        raise UserError(f"{file} holds a broken sparse layer: {error}") from error


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


# The checkpoint of a training


@dataclass(frozen=True)
class Checkpoint:
    """What stood after `len(metrics)` epochs: a momentum buffer for each parameter, and the metrics of each epoch."""

    momentum: dict[str, torch.Tensor]
    metrics: list[dict[str, Any]]


def save_checkpoint(run: Path, model: MLP, momentum: Mapping[str, torch.Tensor], metrics: list[dict[str, Any]]) -> None:
    """Write the weights, the momentum buffers (by parameter name) and the metrics of the finished epochs, at once."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"momentum.{name}": tensor for name, tensor in momentum.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _write(run / CHECKPOINT, to_bytes(tensors, {_CHECKPOINT_KEY: json.dumps({"metrics": metrics}, allow_nan=False)}))


def load_checkpoint(run: Path, model: MLP) -> Checkpoint | None:
    """Put the checkpoint's weights into `model` and return the rest; None when no epoch was finished.

    Raises UserError when the file is truncated, foreign or of another model.
    """
    file = run / CHECKPOINT
    if not file.exists():
        return None
    tensors, header = _read_safetensors(file)
    try:
        metrics = parse_json(header[_CHECKPOINT_KEY])["metrics"]
    except (KeyError, TypeError, ValueError):
        metrics = None
    if not (isinstance(metrics, list) and all(map(_is_metrics, metrics))):
        raise UserError(f"{file} is not a qsparse checkpoint")
    _load_state(model, _under("model.", tensors), file)
    parameters = dict(model.named_parameters())
    momentum = _under("momentum.", tensors)
    for name, buffer in momentum.items():
        parameter = parameters.get(name)
        if parameter is None or (buffer.shape, buffer.dtype) != (parameter.shape, parameter.dtype):
            raise UserError(f"{file} holds a momentum buffer {name} that its model has no place for")
        momentum[name] = buffer.to(parameter.device)
    return Checkpoint(momentum, metrics)


def drop_checkpoint(run: Path) -> None:
    """Delete the checkpoint of a run whose model is written."""
    (run / CHECKPOINT).unlink(missing_ok=True)


def _under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# Rows


def append_rows(run: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append `rows` to the run's rows.jsonl in one write under a lock, so that two processes do not mix their lines.

    Half a line that a crash left at the end stays a line of its own.

    Raises ValueError for a row with NaN (no JSON holds one), UserError when the file is not writable.
    """
    lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    path = Path(run) / ROWS
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # another's line, half written, must not look like a crash's
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                lines = b"\n" + lines
            if os.write(descriptor, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"cannot write {path}: {_reason(error)}") from error


def read_rows(run: str | Path) -> list[dict[str, Any]]:
    """Return the rows of `run` (or of a .jsonl file), oldest first; none when nothing was measured.

    Raises UserError for a broken line; NaN and Infinity, which no JSON holds and no row of ours, break one too.
    """
    path = Path(run) if Path(run).is_file() else Path(run) / ROWS
    if not path.exists():
        return []
    rows, lines = [], _read_text(path).split("\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line, parse_constant=_no_constant, parse_float=_finite)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is not a JSON object; delete that line")
        rows.append(row)
    return rows


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON's")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is beyond float64")
    return number


# Files


def parse_json(text: str | bytes, **options: Any) -> Any:
    """`json.loads`, which raises ValueError for lists within lists without end, too."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _write(path: Path, content: bytes) -> None:
    """Write `path` whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {_reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_json(path: Path, value: object) -> None:
    _write(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {_reason(error)}") from error


def _read_json(path: Path) -> Any:
    try:
        return parse_json(_read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors (on the CPU) and the header of a safetensors file."""
    try:
        with open(path, "rb"):  # its error says why; the next one's calls every file that it cannot open missing
            pass
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is truncated, or no safetensors file: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
