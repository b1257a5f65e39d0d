"""Check and time SiLU and vector addition, composed, in CUDA and in Triton; write rows.jsonl and README's table.

    python experiments/04_custom_op/run.py           # on a GPU, half a minute
    python experiments/04_custom_op/run.py --draw    # the table again, from the rows that there are

Exits with 1 when something computes another result than the float64 reference; that has no time.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from qsparse.bench.harness import TOLERANCES, Call, Contender, Reference, Tolerance, compete, row
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.measure import environment

HERE = Path(__file__).resolve().parent
ROWS, README = HERE / "rows.jsonl", HERE / "README.md"
BEGIN, END = "<!-- table: written by run.py -->", "<!-- end of the table -->"
SHAPES = ((1024, 1024), (8192, 8192))
WAYS = ("composed", "torch", "cuda", "triton")


@functools.cache
def module(name: str) -> ModuleType:
    """Import a file that lies beside this one, once."""
    spec = importlib.util.spec_from_file_location(f"custom_op_{name}", HERE / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def composed(x: torch.Tensor) -> torch.Tensor:
    """SiLU of tensor operations; autograd knows their gradients, and keeps what these need."""
    return x * torch.sigmoid(x)


def differentiable(silu: Callable, silu_grad: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
    """A kernel and the kernel of its gradient as one operation that autograd can go through."""

    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return silu(x)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return silu_grad(x, dy.contiguous())

    return Silu.apply


def ways() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """SiLU in every way that this machine has."""
    found = {"composed": composed, "torch": torch.nn.functional.silu}
    for name in ("cuda", "triton"):
        if name == "cuda" or importlib.util.find_spec("triton"):
            kernels = module(f"in_{name}")
            found[name] = differentiable(kernels.silu, kernels.silu_grad)
    return found


def gradient(silu: Callable, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Forward and backward, as in a step of training."""
    x = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(silu(x), x, dy)
    return dx


def measure(device: torch.device) -> list[dict]:
    """A row for each operation, shape, dtype and way; the peer is the composed one (for addition: PyTorch's)."""
    rows = []
    for shape in SHAPES:
        generator = torch.Generator(device).manual_seed(4)
        for dtype in (torch.float32, torch.float16):
            x, dy = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
            exact, by = x.double(), dy.double()
            forward = {name: functools.partial(silu, x) for name, silu in ways().items()}
            training = {name: functools.partial(gradient, silu, x, dy) for name, silu in ways().items()}
            # Bytes that must move: x in and y out; then x and dy in and dx out.
            rows += _rows("silu", forward, Reference(composed(exact)), x, 2)
            rows += _rows("silu_training", training, Reference(gradient(composed, exact, by)), x, 5)
        a, b = x.float(), dy.float()
        added = {"torch": functools.partial(torch.add, a, b)}
        for name in ("cuda", "triton"):
            if name in ways():
                added[name] = functools.partial(module(f"in_{name}").vector_add, a, b)
        rows += _rows("vector_add", added, Reference(a.double() + b.double()), a, 3)
    return rows


def _rows(op: str, calls: dict[str, Callable], reference: Reference, x: torch.Tensor, passes: int) -> list[dict]:
    print(op, tuple(x.shape), x.dtype, file=sys.stderr, flush=True)
    dtype = str(x.dtype).removeprefix("torch.")
    strict = TOLERANCES[dtype]
    loose = Tolerance(4 * strict.norm, 4 * strict.worst)  # composed operations round in between
    contenders = {
        name: Contender(Call(call), reference, loose if name == "composed" else strict) for name, call in calls.items()
    }
    peer = next(iter(contenders))
    ours = {name: each for name, each in contenders.items() if name in ("cuda", "triton")}
    measured, telemetry = compete(ours, {name: contenders[name] for name in contenders if name not in ours}, x.device)
    return [
        row(
            op=op,
            tier="simt" if name in ours else None,
            dtype=dtype,
            shape=tuple(x.shape),
            kernel=measured[name],
            peer=peer,
            against=measured[peer],
            flop=0,
            nbytes=passes * x.nbytes,
            environment=environment(x.device),
            way=name,
            **telemetry,
        )
        for name in contenders
    ]


def table(rows: list[dict]) -> str:
    if not rows:
        return "Not measured yet: `python experiments/04_custom_op/run.py` fills this in."
    lines = [
        f"| operation | elements | dtype | {' | '.join(f'{way}, µs' for way in WAYS)} | cuda, GB/s | composed / cuda |",
        "| --- | ---: | --- |" + " ---: |" * (len(WAYS) + 2),
    ]
    groups: dict[tuple, dict[str, dict]] = {}
    for each in rows:
        groups.setdefault((each["op"], tuple(each["shape"]), each["dtype"]), {})[each["way"]] = each
    for (op, shape, dtype), by_way in groups.items():
        times = [f"{by_way[way]['us']:.1f}" if way in by_way and by_way[way]["us"] else "-" for way in WAYS]
        cuda = by_way.get("cuda", {})
        rate, ratio = cuda.get("gbps"), cuda.get("ratio") if "composed" in by_way else None
        cells = [f"`{op}`", f"{shape[0] * shape[1]:,}", dtype, *times]
        cells += [f"{rate:,.0f}" if rate else "-", f"{ratio:.2f}x" if ratio else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]
    where = f"{first['gpu']}, PyTorch {first['torch']}, CUDA {first['cuda']}, {first['date'][:10]}."
    return "\n".join((*lines, "", f"{where} Median of CUDA-graph replays, L2 cache flushed before each, in turn."))


def publish(rows: list[dict]) -> None:
    head, rest = README.read_text().split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="only the table, from rows.jsonl")
    if parser.parse_args().draw:
        publish([json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else [])
        return 0
    try:
        device = resolve_device("cuda")
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    rows = measure(device)
    ROWS.write_text("".join(json.dumps(each, allow_nan=False) + "\n" for each in rows))
    publish(rows)
    print(table(rows))
    wrong = [each for each in rows if not each["correct"]]
    for each in wrong:
        print(f"WRONG: {each['op']} {each['way']} {each['shape']}, error {each['error']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
