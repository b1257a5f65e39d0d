"""The command line: what each command prints, where, and how each mistake is answered."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qsparse
from qsparse import checkpoint, cli, data, quant, sparse, variants
from qsparse.demo import how_to_run
from qsparse.device import NAMES
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.sparse.command import Format
from qsparse.train.config import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ("train", "--data", "mnist-5k", "--device", "cpu", "--epochs", "2")


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A directory with one finished run, runs/1, to copy."""
    directory = tmp_path_factory.mktemp("trained")
    here = Path.cwd()
    os.chdir(directory)
    try:
        assert invoke(*TRAIN).exit_code == 0
    finally:
        os.chdir(here)
    return directory


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """The path of a finished run, runs/1, below the current directory."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return Path("runs/1")


@pytest.fixture
def no_cupy(monkeypatch):
    """A machine whose PyTorch, of CUDA 12, sees a GPU that CuPy is missing for."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("qsparse.device._cupy_imports", lambda: False)


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """Run a command that must fail; return what it says, after checking that it touched no file."""
    before = snapshot()
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert snapshot() == before
    return result.stderr


def snapshot() -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


def one_object(result) -> dict:
    """Return the JSON object on standard output, which must hold nothing else."""
    assert result.exit_code == 0, (result.output, result.exception)
    (line,) = result.stdout.splitlines()
    value = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(value, dict)
    return value


# What the commands do


def test_train_prints_the_accuracy_of_each_epoch_and_the_directory():
    result = invoke(*TRAIN)
    assert result.exit_code == 0
    accuracy = checkpoint.read_metrics("runs/1")[-1]["test_accuracy"]
    assert result.stdout == f"test accuracy {accuracy:.2%}, saved in runs/1\n"
    assert "epoch 1/2  loss " in result.stderr
    assert f"test {accuracy:.2%}" in result.stderr
    assert "images/s" in result.stderr


def test_train_options_reach_the_run():
    layers = ("--hidden", 32, "--hidden", 16)
    rates = ("--lr", 0.05, "--momentum", 0.9, "--weight-decay", 0.001)
    others = ("--batch-size", 50, "--seed", 3, "--validation", 100, "--out", "mine")
    result = one_object(invoke(*TRAIN, *layers, *rates, *others, "--json"))
    assert result["run"] == "mine"
    settings = checkpoint.read_config("mine")["train"]
    assert settings == result["config"]["train"]
    assert settings == {
        "hidden": [32, 16], "epochs": 2, "batch_size": 50, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.001,
        "seed": 3, "device": "cpu", "data": "mnist-5k", "validation": 100, "backend": "torch",
            "precision": "fp32",
    }  # fmt: skip
    assert qsparse.load("mine").sizes == (784, 32, 16, 10)


@pytest.mark.parametrize("hidden", [("--hidden", "12,8"), ("--hidden", "12", "--hidden", "8"), ("--hidden", "12, 8")])
def test_hidden_layers_are_named_one_by_one_or_with_commas(hidden):
    assert invoke(*TRAIN, *hidden).exit_code == 0
    assert qsparse.load("runs/1").sizes == (784, 12, 8, 10)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("train", "--out", ""), "--out is empty"),
        (("train", "--out="), "--out is empty"),
        (("sweep", "sweep.toml", "--out", ""), "--out is empty"),
        (("bench", "gemm", "--out", ""), "--out is empty"),
        (("quantize", "", "--dtype", "int8"), "an argument is empty"),
    ],
)
def test_a_variable_without_a_value_is_not_the_current_directory(line, said):
    assert f"{said}: give it a value, or leave it out" in refused(*line)


@pytest.mark.parametrize("hidden", ["12,", "12;8", "a", "", "-5", "1.5", "²", "12,0"])
def test_what_is_no_width_is_refused(hidden):
    said = refused(*TRAIN, "--hidden", hidden)
    assert "--hidden is" in said


def test_hidden_0_is_no_hidden_layer():
    assert invoke(*TRAIN, "--hidden", 0).exit_code == 0
    assert qsparse.load("runs/1").sizes == (784, 10)


def test_quantize_takes_the_newest_run_and_prints_one_table(run):
    result = invoke("quantize", "--dtype", "int8", "--device", "cpu")
    assert result.exit_code == 0
    assert "baseline" in result.stdout
    assert "gemm_int8:cpu" in result.stdout
    assert "runs/1/int8: saved" in result.stderr
    assert (run / "int8" / "model.safetensors").exists()
    rows = checkpoint.read_rows(run)
    assert set(rows[1]["latency_us"]) == {"1", "64", "1024", "10000"}


def test_sparsify_then_report(run):
    options = ("--density", 0.1, "--format", "coo", "--finetune-epochs", 1, "--lr", 0.05, "--device", "cpu")
    result = invoke("sparsify", run, *options)
    assert result.exit_code == 0
    assert "coo-0.1-ft1" in result.stdout
    assert "epoch 1/1" in result.stderr
    result = invoke("report")
    assert result.exit_code == 0
    assert "coo-0.1-ft1" in result.stdout
    assert "picture: runs/1/report.png" in result.stdout
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")


def test_json_of_each_command(run):
    quantized = one_object(invoke("quantize", run, "--dtype", "fp16", "--json"))
    assert (quantized["variant"], quantized["saved"]) == ("fp16", "runs/1/fp16")
    assert [row["variant"] for row in quantized["rows"]] == ["baseline", "fp16"]
    sparsified = one_object(invoke("sparsify", "--density", 0.2, "--json"))
    assert sparsified["rows"][1]["density"] == pytest.approx(0.2, abs=1e-4)
    reported = invoke("report", run, "--out", "p.png", "--json")
    assert [row["variant"] for row in one_object(reported)["rows"]] == ["baseline", "fp16", "csr-0.2"]
    assert "fp16" in reported.stderr
    assert one_object(reported)["png"] == "p.png"


def test_doctor():
    result = invoke("doctor")
    assert result.exit_code == 0
    assert torch.__version__.partition("+")[0] in result.stdout
    assert "qsparse" in one_object(invoke("doctor", "--json"))


@pytest.mark.usefixtures("no_cupy")
def test_demo_does_the_whole_line_and_names_each_command(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", [".venv/bin/qsparse", "demo"])
    result = invoke("demo", "--data", "mnist-5k", "--json")
    assert result.stderr.count("pip install cupy-cuda12x") == 1
    value = one_object(result)
    assert [row["variant"] for row in value["rows"]] == ["baseline", "int8", "csr-0.1-ft2"]
    assert value["test_accuracy"] > 0.88
    assert all(qsparse.load(directory) for directory in value["saved"])
    assert Path(value["png"]).exists()
    for command in ("train --data mnist-5k", "quantize runs/1 --dtype int8", "sparsify runs/1 ", "report runs/1"):
        assert f"$ qsparse {command}" in result.stderr
    assert result.stderr.endswith("More options: qsparse train --help. Write `.venv/bin/qsparse` for qsparse.\n")


def test_demo_says_what_to_write_for_qsparse(tmp_path, monkeypatch):
    bin = tmp_path / "venv" / "bin"
    bin.mkdir(parents=True)
    for name in ("qsparse", "activate"):
        (bin / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(bin))
    assert how_to_run() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(bin / "qsparse")])
    assert how_to_run() == " Write `venv/bin/qsparse` for qsparse, or first `. venv/bin/activate`."
    monkeypatch.setattr(sys, "argv", [str(ROOT / "qsparse" / "__main__.py")])
    monkeypatch.setattr(sys, "executable", str(bin / "python"))
    assert how_to_run() == " Write `venv/bin/python -m qsparse` for qsparse."


# Interruption and going on


def test_ctrl_c_says_what_is_saved_and_resume_goes_on(monkeypatch):
    batches = data.batches

    def interrupted(split, batch_size, *, seed, epoch):
        if epoch == 1:
            raise KeyboardInterrupt
        return batches(split, batch_size, seed=seed, epoch=epoch)

    with monkeypatch.context() as patch:
        patch.setattr(data, "batches", interrupted)
        result = invoke(*TRAIN)
    assert result.exit_code == 130
    assert "epoch 1 of 2 is saved in runs/1; go on with `qsparse train --resume --out runs/1`" in result.stderr
    assert "finish it with `qsparse train --resume --out runs/1`" in refused("quantize", "--dtype", "int8")
    assert "was begun with --epochs 2" in refused("train", "--resume", "--epochs", 5)
    value = one_object(invoke("train", "--resume", "--json"))
    assert [epoch["epoch"] for epoch in value["epochs"]] == [1, 2]
    assert one_object(invoke("train", "--resume", "--json")) == value


def test_sigint_to_a_real_process():
    process = start("train", "--data", "mnist-5k", "--device", "cpu", "--hidden", "0", "--epochs", "5000")
    deadline = time.monotonic() + 60
    while not Path("runs/1/checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "go on with `qsparse train --resume --out runs/1`" in err
    assert "Traceback" not in err


# Mistakes


def test_a_density_outside_its_range(run):
    for density in (0, -1, 1.5, "nan", "inf"):
        assert "outside (0, 1]" in refused("sparsify", run, "--density", density)


def test_unknown_names_list_the_valid_ones(run):
    said = refused("quantize", run, "--dtype", "int9")
    assert all(f"'{name}'" in said for name in ("int9", *quant.DTYPES))
    assert "Invalid value for '--dtype': 'int9' is not one of" in said
    assert "'--layout': 'no' is not one of" in refused("bench", "gemm", "--layout", "no")
    said = refused("sparsify", run, "--density", 0.1, "--format", "bsr")
    assert all(f"'{name}'" in said for name in ("bsr", *sparse.FORMATS))
    said = refused("train", "--device", "gpu")
    assert all(f"'{name}'" in said for name in ("gpu", *NAMES))
    said = refused("train", "--backend", "jax")
    assert all(f"'{name}'" in said for name in ("jax", *BACKENDS))


def test_the_choices_are_those_of_the_rooms():
    assert tuple(Format) == sparse.FORMATS
    assert tuple(cli.Device) == NAMES
    assert tuple(cli.Backend) == BACKENDS


@pytest.mark.parametrize(
    "command",
    [("quantize", "--dtype", "int8"), ("sparsify", "--density", 0.1), ("report",), ("train", "--resume")],
    ids=lambda command: command[0],
)
def test_no_run_yet(command):
    assert "make one with `qsparse train`" in refused(*command)


def test_a_run_that_is_not_there():
    assert "there is no run runs/7" in refused("quantize", "runs/7", "--dtype", "int8")
    assert "there is no run runs/7" in refused("report", "runs/7")


def test_a_truncated_checkpoint(run):
    file = run / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "is truncated" in refused("quantize", "--dtype", "int8")
    assert "is truncated" in refused("sparsify", "--density", 0.1)


def test_a_foreign_checkpoint(run):
    torch.save({"weight": torch.ones(3)}, run / "model.safetensors")
    assert "no safetensors file" in refused("quantize", "--dtype", "int8")


def test_weights_with_nan_name_the_layer(run):
    model = MLP((784, 256, 10))
    with torch.no_grad():
        model.fc2.weight[1, 2] = float("nan")
    checkpoint.write_weights(run, model)
    for command in (("quantize", "--dtype", "int8"), ("sparsify", "--density", 0.1)):
        assert "layer fc2 holds NaN" in refused(*command)


@pytest.mark.parametrize("missing", ["GPU", "CuPy"])
def test_cuda_without_a_gpu_or_cupy(run, monkeypatch, missing):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: missing != "GPU")
    monkeypatch.setattr("qsparse.device._cupy_imports", lambda: missing != "CuPy")
    expected = {"GPU": "PyTorch sees no NVIDIA GPU", "CuPy": "`pip install cupy-cuda13x`"}[missing]
    for command in (TRAIN[:3], ("quantize", "--dtype", "int8"), ("sparsify", "--density", 0.1)):
        assert expected in refused(*command, "--device", "cuda")


@pytest.mark.usefixtures("no_cupy")
def test_auto_says_when_it_leaves_a_gpu_aside(run):
    bench = ("bench", "gemm", "--shapes", "2,2,2", "--dtype", "float32", "--no-duel", "--repetitions", 1)
    for command in (("train", "--data", "mnist-5k", "--hidden", 0), ("quantize", "--dtype", "int8"), bench):
        said = [line for line in invoke(*command).stderr.splitlines() if "cupy-cuda12x" in line]
        assert len(said) == 1, command


@pytest.mark.parametrize("out", ["file", "file/run", "/proc/run"])
def test_an_unwritable_out(run, out):
    Path("file").write_text("kept")
    assert "cannot write in" in refused(*TRAIN, "--out", out)
    assert "cannot write in" in refused("report", "--out", f"{out}/x.png")


def test_a_data_directory_without_the_four_files():
    Path("empty").mkdir()
    assert "train-images-idx3-ubyte" in refused("train", "--data", "empty")
    assert "nowhere" in refused("train", "--data", "nowhere")


def test_a_corrupt_idx_file():
    Path("broken").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        Path("broken", f"{name}-ubyte").write_bytes(b"not an IDX file")
    assert "is not an IDX file" in refused("train", "--data", "broken")


def test_an_out_that_holds_a_run(run):
    said = refused(*TRAIN, "--out", run)
    assert "runs/1 already holds a run" in said
    assert "--resume" in said
    assert "--force" in said
    assert "already holds a run" in refused(*TRAIN, "--out", run, "--data", "nowhere")
    assert invoke(*TRAIN, "--out", run, "--hidden", 0, "--force").exit_code == 0
    assert qsparse.load(run).sizes == (784, 10)


def test_options_that_exclude_each_other(run):
    assert "give one of them" in refused("train", "--resume", "--force")
    assert "--force replaces the run in --out: give that too" in refused("train", "--force")
    assert "give --finetune-epochs too" in refused("sparsify", "--density", 0.1, "--lr", 0.1)


@pytest.mark.parametrize(
    "options",
    ["--epochs 0", "--batch-size 0", "--lr 0", "--lr nan", "--momentum 1", "--weight-decay -1", "--seed -1",
     "--validation -1", "--hidden 0 --hidden 5", "--hidden -5", "--epochs x", "--no-such-option", "--validation 9999"],
)  # fmt: skip
def test_numbers_out_of_range(options):
    assert options.split()[-2 if " " in options else 0] in refused("train", "--data", "mnist-5k", *options.split())


@pytest.mark.parametrize(
    "arguments", [("quantize", "--dtype", "int8", "{}"), ("report", "--out", "{}.png"), ("train", "--out", "{}"),
                  ("train", "--data", "{}")],
)  # fmt: skip
def test_a_name_that_is_too_long(run, arguments):
    assert "File name too long" in refused(*(argument.format("x" * 300) for argument in arguments))


def test_a_folder_that_must_not_be_read(monkeypatch, run):
    def barred(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "is_finished", barred)
    assert refused("quantize", run, "--dtype", "int8") == "Error: runs/1: Permission denied\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(checkpoint, "newest_run", lambda _: 1 / 0)
    result = invoke("quantize", "--dtype", "int8")
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1


# Whole processes


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "qsparse", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite in the background of a shell inherits an ignored SIGINT, and so would the process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("line", "owner"),
    [
        ("sparsify --density 0.1 --auto bytes", "--format auto"),
        ("sparsify --density 0.1 --auto-batch 8", "--format auto --auto time"),
        ("sparsify --density 0.1 --format auto --auto-batch 8", "--format auto --auto time"),
        ("sparsify --density 0.1 --samples 64", "pruners that look at training images"),
        ("sparsify --density 0.1 --pruner random --samples 64", "pruners that look at training images"),
        ("sparsify --density 0.1 --schedule set --epochs 1 --samples 64", "pruners that look at training images"),
        ("sparsify --density 0.1 --seed 1", "the pruner random, --permute"),
        ("sparsify --density 0.1 --lr 0.1", "the training"),
        ("compress --density 0.1 --auto time", "--format auto"),
        ("compress --density 0.1 --samples 64", "pruners that look at training images"),
        ("compress --density 0.1 --seed 1", "the pruner random"),
        ("quantize --dtype int8 --percentile 99", "--calibration percentile"),
        ("quantize --dtype int8 --activations static --calibration mse --percentile 99", "--calibration percentile"),
        ("quantize --dtype int8 --weight-percentile 99", "--weight-calibration percentile"),
        ("quantize --dtype int8wo --group 32", "--granularity group"),
        ("quantize --dtype int8 --calibration-samples 64", "--activations static without --range, or a --method"),
        (
            "quantize --dtype int8 --activations static --calibration fixed --range 0 1 --calibration-samples 64",
            "--activations static without --range",
        ),
        ("quantize --dtype int8 --sweep group=32,64", "--granularity group"),
        ("quantize --dtype int8 --sweep granularity=tensor,channel --group 32", "--granularity group"),
        ("search --dtype int8,int8wo --density 0.1 0.2", "sparse layers"),
        ("search --dtype int8 --finetune-epochs 1", "sparse layers"),
        ("bench gemm --tune --tier simt", "a benchmark"),
        ("bench gemm --tune --no-duel", "a benchmark"),
        ("bench spmm --tune --op spmm_csr", "a benchmark"),
        ("bench spmm --tune --repetitions 9", "a benchmark"),
    ],
)
def test_an_option_without_effect_is_refused(line, owner):
    said = refused(*line.split())
    assert "has no effect here: it is of " in said
    assert owner in said


@pytest.mark.parametrize(
    "line",
    [
        "sparsify --density 0.1 --format auto --auto time --auto-batch 8",
        "sparsify --density 0.1 --correct-bias --samples 64 --seed 1",
        "sparsify --density 0.1 --schedule rigl --epochs 1 --samples 64 --seed 1 --lr 0.1",
        "sparsify --pattern 2:4 --permute --seed 1",
        "compress --density 0.1 --order joint --samples 64 --seed 1",
        "quantize --dtype int4wo --sweep granularity=channel,group --group 32",
        "quantize --dtype int8 --method gptq --calibration-samples 64",
        "search --dtype int8,fp16 --density 0.1 0.2 --finetune-epochs 1",
    ],
)
def test_an_option_with_an_effect_comes_as_far_as_the_run(line):
    assert "there is no run under runs/ yet" in refused(*line.split())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("--help", 0), ("train --help", 0), ("--version", 0), ("quantize --dtype int9", 2), ("nothing", 2), ("", 2),
     ("sparsify --density 2", 2), ("train --lr nan", 2), ("train --resume --force", 2)],
)  # fmt: skip
def test_help_and_usage_errors_import_nothing_heavy(arguments, code):
    script = f"""
import sys
from qsparse.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == {code}, end.code
heavy = {{"torch", "cupy", "numpy", "scipy", "matplotlib"}} & sys.modules.keys()
assert not heavy, heavy
"""
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout if code == 0 else result.stderr or result.stdout


def test_the_list_of_commands_is_whole_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = invoke("--help").stdout
    assert "Time the kernels beside the libraries'.\n" in said
    assert "..." not in said.partition("Commands:")[2]


def test_python_m_qsparse():
    process = start("--version")
    assert process.communicate() == (f"qsparse {qsparse.__version__}\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), ""),
        (RuntimeError("x: can't allocate memory: you tried to allocate 99 bytes. y"), ": 99 bytes were"),
        (RuntimeError("Storage size calculation overflowed with sizes=[2147483647, 2147483647]"), ""),
    ],
)
def test_too_little_memory_is_a_sentence(monkeypatch, error, asked):
    def fail(**_):
        raise error

    monkeypatch.setattr("qsparse.demo.demo", fail)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: the memory does not hold this{asked}")


def test_other_runtime_errors_keep_their_traceback(monkeypatch):
    def fail(**_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("qsparse.demo.demo", fail)
    assert isinstance(CliRunner().invoke(cli.app, ["demo"]).exception, RuntimeError)


@pytest.mark.parametrize(
    ("streams", "environment"),
    [(">&-", {}), ("2>&-", {}), ("<&- >&- 2>&-", {}), ("", {"PYTHONIOENCODING": "ascii"}),
     ("", {"PYTHONIOENCODING": "utf-8:strict"})],
)  # fmt: skip
def test_closed_streams_and_poor_encodings_stop_nothing(run, streams, environment):
    odd = os.fsdecode(b"runs/\xff")  # a name that is no UTF-8
    run.rename(odd)
    checkpoint.append_rows(odd, [{"variant": "int8", "accuracy": 0.5, "latency_us": {"1": 2.0}}])
    process = subprocess.run(
        ["bash", "-c", f'"$0" -m qsparse report "$1" {streams}', sys.executable, os.fsencode(odd)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    if ">&-" not in streams:
        assert b"50.00 %" in process.stdout
    assert (Path(odd) / "report.png").exists()


def test_the_installed_entry_point(run):
    command = Path(sys.executable).with_name("qsparse")
    if not command.exists():
        pytest.skip("qsparse is not installed beside this Python: pip install -e .")

    def qsparse_(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([command, *arguments], capture_output=True, text=True, check=False)

    assert qsparse_("--version").stdout == f"qsparse {qsparse.__version__}\n"
    failed = qsparse_("quantize", "runs/9", "--dtype", "int8")
    assert failed.returncode == 2
    assert failed.stderr == "Error: there is no run runs/9: make one with `qsparse train`\n"
    done = qsparse_("train", "--data", "mnist-5k", "--device", "cpu", "--epochs", "1", "--hidden", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"] == "runs/2"
