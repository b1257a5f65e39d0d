"""Kernels that may start before those that they follow have ended: `following` launches all of a source so, or none."""

from __future__ import annotations

import re

import pytest

from qsparse.kernels import _load

# A function with a body: its name, its parameters, maybe the initializers of a constructor.
FUNCTION = re.compile(
    r"\b(?!(?:if|for|while|switch)\b)(\w+)\s*\(((?:[^(){};]|\([^()]*\))*)\)\s*(?:const\s*)?(?::[^{};]*)?\{"
)
KERNEL = re.compile(r"__global__[^;{]*?\b(?!__)(\w+)\s*\((?=[^()]*(?:const|long|int|float|unsigned|\)))")
NONE = re.compile(r"//[^\n]*|= *\{\}")  # comments, and the defaults of parameters


def body(text: str, start: int) -> str:
    """From the brace at ``start`` to the one that closes it."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if not depth:
            return text[start : i + 1]
    raise ValueError("a brace is not closed")


def kernels_that_do_not_wait(text: str) -> set[str]:
    """The kernels that call `wait_for_predecessor` neither themselves nor through functions, as far as names tell."""
    text = NONE.sub("", text)
    bodies: dict[str, str] = {}
    for found in FUNCTION.finditer(text):
        bodies[found[1]] = bodies.get(found[1], "") + body(text, found.end() - 1)
    waits, last = {"wait_for_predecessor"}, set()
    while waits != last:
        last, calls = waits, re.compile(rf"\b(?:{'|'.join(waits)})\b")
        waits = waits | {name for name, own in bodies.items() if calls.search(own)}
    return set(KERNEL.findall(text)) - waits


WAITING = [
    path.name
    for path in sorted(_load.source_dir().glob("*.cu"))
    if "wait_for_predecessor();" in _load.source_text(path.name)
]


@pytest.mark.parametrize("name", WAITING)
def test_every_kernel_of_a_source_waits_where_one_does(name):
    assert not kernels_that_do_not_wait(_load.source_text(name))


def test_a_kernel_that_does_not_wait_is_seen():
    text = """
        struct Stream { Stream(int i) : i(i) { wait_for_predecessor(); } int i; };
        template <int N> __global__ void __launch_bounds__(N, 1) first(const int* a) { wait_for_predecessor(); }
        __global__ void
        second(const int* a, int n) { Stream stream(n); }
        __global__ void third(const int* a) { if (a) { } }  // wait_for_predecessor();
        __global__ void fourth(const int* a) { if (a) { wait_for_predecessor(); } }
    """
    assert kernels_that_do_not_wait(text) == {"third"}
