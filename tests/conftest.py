"""What every test relies on: no network, no data or cache of the user's, and GPU tests that skip with a reason."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

_REAL_DATA = pytest.StashKey[str | None]()
_CACHE = pytest.StashKey[tempfile.TemporaryDirectory]()

# Nothing listens there: a download fails at once, in this process and in those that tests start.
_NOWHERE = "http://127.0.0.1:9"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def pytest_configure(config: pytest.Config) -> None:
    # Under another name, so that the workers of pytest-xdist, which start later, still find it.
    data = os.environ.pop("QSPARSE_DATA", None) or os.environ.get("QSPARSE_TEST_DATA")
    if data:
        os.environ["QSPARSE_TEST_DATA"] = data
    config.stash[_REAL_DATA] = data
    config.stash[_CACHE] = tempfile.TemporaryDirectory(prefix="qsparse-tests-")
    os.environ.pop("QSPARSE_CACHE", None)
    # Set before any module is imported: some read them once.
    os.environ["XDG_CACHE_HOME"] = config.stash[_CACHE].name
    os.environ["MPLCONFIGDIR"] = str(Path(config.stash[_CACHE].name) / "matplotlib")
    os.environ.update(dict.fromkeys(_PROXIES, _NOWHERE))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ""


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_CACHE].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    reason = _why_no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA GPU"
    try:
        import cupy
    except ImportError:
        from qsparse.device import cupy_command

        return f"CuPy is not installed: {cupy_command()}"
    return None if cupy.cuda.is_available() else "CuPy finds no CUDA GPU"


@pytest.fixture
def real_data(request: pytest.FixtureRequest) -> Path:
    """The directory that $QSPARSE_DATA named when pytest began; skips the test where it was not set."""
    value = request.config.stash[_REAL_DATA]
    if not value:
        pytest.skip("QSPARSE_DATA is not set")
    return Path(value).absolute()
