"""Every kernel is compiled for every architecture that its tier serves, without a GPU, and no register spills."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from qsparse import kernels
from qsparse.kernels import _load

STATIC_SHARED_LIMIT = 48 * 1024  # bytes a block may declare without asking the driver, on every architecture

SOURCES = {name: instances for face in kernels.FACES for name, instances in getattr(kernels, face).sources.items()}
TARGETS = [(name, arch) for name in SOURCES for arch in _load.ARCHITECTURES[_load.tier_of(name)]]

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* in, float* out, int steps) {
    float v[64];
    for (int i = 0; i < 64; ++i) v[i] = in[i * 1024 + threadIdx.x];
    for (int s = 0; s < steps; ++s)
        for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 7) % 64] + v[(i * 5 + 1) % 64];
    for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = v[i];
}
"""
HEALTHY = 'extern "C" __global__ void fine(float* out) { out[threadIdx.x] = 1.0f; }\n'


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """Skip without NVRTC or CUDA's headers; where $CI is set, fail instead: there the kernels must be compiled."""
    missing = None
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:
        missing = f"cuda.bindings and its NVRTC are needed to compile the kernels: {error}"
    if missing is None and not _load.include_dirs():
        missing = "CUDA's headers (cuda_fp16.h) are needed to compile the kernels"
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, nvrtc):
    """``compiled(name, arch)`` waits for that kernel; all that this run tests are compiled side by side.

    In processes: NVRTC holds a lock, so threads would only wait for each other.
    """
    wanted = [item.callspec.params for item in request.session.items if item.name.startswith("test_compiles[")]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=spawn) as pool:
        jobs: dict[tuple[str, str], Future] = {
            (name, arch): pool.submit(_load.compile_source, name, SOURCES[name], arch, verbose=True)
            for name, arch in ((params["name"], params["arch"]) for params in wanted)
        }
        yield lambda name, arch: jobs[name, arch].result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """An empty directory in place of ``cuda/``."""
    monkeypatch.setattr(_load, "source_dir", lambda: tmp_path)
    _load.source_text.cache_clear()
    yield tmp_path
    _load.source_text.cache_clear()


def complaints(log: str, functions: int) -> list[str]:
    """What a compiler's log holds against a kernel: warnings, spills, too much static shared memory.

    The assembler reports on each function in turn; a log with fewer reports than ``functions`` is itself wrong.
    """
    found = [line for line in log.splitlines() if re.search(r"warning|performance loss|error", line, re.IGNORECASE)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    found += [f"{stores} + {loads} bytes spilled" for stores, loads in spills if int(stores) or int(loads)]
    shared = [int(size) for size in re.findall(r"(\d+) bytes smem", log)]
    found += [f"{size} bytes of static shared memory" for size in shared if size > STATIC_SHARED_LIMIT]
    if len(spills) < functions:
        found.append(f"{len(spills)} functions reported, not {functions}")
    return found


@pytest.mark.parametrize(("name", "arch"), TARGETS)
def test_compiles(name, arch, compiled):
    cubin = compiled(name, arch)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.names.keys() == set(SOURCES[name])
    assert len(set(cubin.names.values())) == len(SOURCES[name])
    assert all(mangled.encode() in cubin.code for mangled in cubin.names.values())
    assert not complaints(cubin.log, len(SOURCES[name]))


def test_every_tier_is_compiled_for_the_architectures_it_serves():
    needed = {"sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"}
    assert needed == set(_load.ARCHITECTURES["simt"])
    assert all(_load.ARCHITECTURES[_load.tier_of(name)] for name in SOURCES)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_spills_are_seen(arch, sources, nvrtc):
    (sources / "spills.cu").write_text(SPILLING)
    (sources / "fine.cu").write_text(HEALTHY)
    log = _load.compile_source("spills.cu", ("spills",), arch, verbose=True).log
    assert any("bytes spilled" in line for line in complaints(log, 1)), log
    log = _load.compile_source("fine.cu", ("fine",), arch, verbose=True).log
    assert not complaints(log, 1)
    assert complaints(log, 2) == ["1 functions reported, not 2"]


def test_warnings_and_large_shared_memory_are_seen(sources, nvrtc):
    (sources / "unused.cu").write_text('extern "C" __global__ void k() { int unused; }\n')
    log = _load.compile_source("unused.cu", ("k",), "sm_80", verbose=True).log
    assert any("warning" in line and "unused" in line for line in complaints(log, 1)), log
    assert complaints("0 bytes spill stores, 0 bytes spill loads\nUsed 9 registers, 49153 bytes smem", 1) == [
        "49153 bytes of static shared memory"
    ]


@pytest.mark.parametrize("line", ["int broken = nonsense;", "#error here"])
def test_errors_keep_their_place(line, sources, nvrtc):
    """In the file, behind an include, in the included file, and behind an include that was pasted before."""
    (sources / "common").mkdir()
    header = sources / "common" / "header.cuh"
    clean = '// one\n#include "common/header.cuh"\n// three\n  #  include "common/header.cuh"  \n' + HEALTHY
    for place, expected in (("before", "kernel.cu(1)"), ("between", "kernel.cu(3)"), ("after", "kernel.cu(5)")):
        header.write_text("#pragma once\n// nothing\n")
        number = int(expected[-2])
        text = clean.splitlines()
        if place == "after":
            text.insert(4, line)
        else:
            text[number - 1] = line
        (sources / "kernel.cu").write_text("\n".join(text) + "\n")
        _load.source_text.cache_clear()
        with pytest.raises(_load.CompileError, match=re.escape(expected)):
            _load.compile_source("kernel.cu", ("fine",), "sm_80")
    (sources / "kernel.cu").write_text(clean)
    header.write_text(f"#pragma once\n// nothing\n{line}\n")
    _load.source_text.cache_clear()
    with pytest.raises(_load.CompileError, match=r"header\.cuh\(3\)"):
        _load.compile_source("kernel.cu", ("fine",), "sm_80")


def test_includes_are_pasted_once(sources):
    (sources / "common").mkdir()
    (sources / "common" / "a.cuh").write_text('#pragma once\n#include "b.cuh"\n#include <cuda_fp16.h>\nint a;\n')
    (sources / "common" / "b.cuh").write_text('#pragma once\n#include "a.cuh"\nint b;\n')
    (sources / "k.cu").write_text('#include "common/a.cuh"\n#include "common/b.cuh"\n// #include "no.cuh"\nint k;\n')
    text = _load.source_text("k.cu")
    assert [text.count(f"int {name};") for name in "abk"] == [1, 1, 1]
    assert text.index("int b;") < text.index("int a;") < text.index("int k;")
    assert "#include <cuda_fp16.h>" in text
    assert not re.search(r'^\s*#\s*include "', text, re.MULTILINE)


def test_unknown_instance_is_a_compile_error(sources, nvrtc):
    (sources / "fine.cu").write_text(HEALTHY)
    with pytest.raises(_load.CompileError, match=r"fine\.cu for sm_80"):
        _load.compile_source("fine.cu", ("absent<float>",), "sm_80")


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path_factory, monkeypatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("QSPARSE_CACHE", str(place))
    return place / "kernels"


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """The names of the sources compiled while the test runs."""
    done: list[str] = []
    compile_source = _load.compile_source

    def counted(name, *args, **kwargs):
        done.append(name)
        return compile_source(name, *args, **kwargs)

    monkeypatch.setattr(_load, "compile_source", counted)
    return done


def test_a_compiled_kernel_is_kept_and_found(sources, cache, compilations, nvrtc):
    (sources / "fine.cu").write_text(HEALTHY)
    first = _load._cached_cubin("fine.cu", "fine", "sm_80")
    (file,) = cache.iterdir()  # nothing temporary stays behind
    assert re.fullmatch(r"fine-sm_80-[0-9a-f]{32}\.cubin", file.name)
    assert first == (_load.compile_source("fine.cu", ("fine",), "sm_80").code, "fine")
    compilations.clear()
    assert _load._cached_cubin("fine.cu", "fine", "sm_80") == first
    assert not compilations
    assert _load._cached_cubin("fine.cu", "fine", "sm_75") != first
    assert compilations == ["fine.cu"]


def test_an_edited_header_is_compiled_anew(sources, cache, compilations, nvrtc):
    header = sources / "header.cuh"
    header.write_text("constexpr float VALUE = 1.0f;\n")
    (sources / "fine.cu").write_text('#include "header.cuh"\n' + HEALTHY.replace("1.0f", "VALUE"))
    first, _ = _load._cached_cubin("fine.cu", "fine", "sm_80")
    header.write_text("constexpr float VALUE = 2.0f;\n")
    _load.source_text.cache_clear()  # a new process reads the file again
    second, _ = _load._cached_cubin("fine.cu", "fine", "sm_80")
    assert first != second
    assert compilations == ["fine.cu"] * 2
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"fine\n", b"fine\nhalf", b"\x7fELF"])
def test_a_damaged_file_is_replaced(content, sources, cache, nvrtc):
    (sources / "fine.cu").write_text(HEALTHY)
    first = _load._cached_cubin("fine.cu", "fine", "sm_80")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    assert _load._cached_cubin("fine.cu", "fine", "sm_80") == first
    assert file.read_bytes() == whole


def test_ranks_of_one_job_do_not_race(sources, cache, nvrtc):
    """A reader that looks all the time sees no file or a whole one."""
    (sources / "fine.cu").write_text(HEALTHY)
    expected = len(_load.compile_source("fine.cu", ("fine",), "sm_80").code) + len("fine\n") + 65  # and a digest
    stop, sizes = threading.Event(), set()

    def watch():
        while not stop.is_set():
            sizes.update(file.stat().st_size for file in cache.glob("*.cubin"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: _load._cached_cubin("fine.cu", "fine", "sm_80"), range(8)))
    finally:
        stop.set()
        watcher.join()
    assert len(set(results)) == 1
    assert sizes <= {expected}
    assert [file.stat().st_size for file in cache.iterdir()] == [expected]


def test_a_cache_that_cannot_be_written_costs_only_time(sources, tmp_path, monkeypatch, nvrtc):
    (sources / "fine.cu").write_text(HEALTHY)
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("QSPARSE_CACHE", str(tmp_path / "file"))
    code, name = _load._cached_cubin("fine.cu", "fine", "sm_80")
    assert code.startswith(b"\x7fELF")
    assert name == "fine"


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("QSPARSE_CACHE", str(tmp_path))
    assert _load.cache_dir() == tmp_path / "kernels"
    monkeypatch.delenv("QSPARSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _load.cache_dir() == tmp_path / "xdg" / "qsparse" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _load.cache_dir() == tmp_path / "home" / ".cache" / "qsparse" / "kernels"


# --- where the sources are ------------------------------------------------------------------------------------------


def test_source_dir_holds_every_source():
    place = _load.source_dir()
    assert {path.name for path in place.glob("*.cu")} >= SOURCES.keys()


def test_source_dir_prefers_the_installed_package(tmp_path, monkeypatch):
    monkeypatch.setattr(_load, "__file__", str(tmp_path / "qsparse" / "kernels" / "_load.py"))
    with pytest.raises(FileNotFoundError, match=r"CUDA sources are missing: neither .*_cuda"):
        _load.source_dir()
    for place in (tmp_path / "cuda", tmp_path / "qsparse" / "_cuda"):
        place.mkdir(parents=True)
        (place / "a.cu").touch()
        assert _load.source_dir() == place


@pytest.mark.parametrize(
    ("name", "tier"),
    [("gemm_simt.cu", "simt"), ("gemm_sm80.cu", "sm80"), ("gemm_int8_sm90.cu", "sm90"), ("sgd.cu", "simt")],
)
def test_tier_of(name, tier):
    assert _load.tier_of(name) == tier
