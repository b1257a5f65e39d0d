"""The chosen product: every way the same, the table's nearest entry decides, and bad tables are refused."""

import json

import pytest
import torch

from qsparse import kernels
from qsparse.sparse import product, to_csr
from qsparse.sparse.product import WAYS, Entry, SparseWeights, fastest, spmm

GPU = "Some GPU"


def entry(shape, density, us, **other):
    return {"gpu": GPU, "dtype": "float16", "shape": list(shape), "density": density, "us": us} | other


@pytest.fixture
def write_table(tmp_path, monkeypatch):
    """``write_table(*entries)`` puts a table in the place of the package's."""

    def write(*entries):
        path = tmp_path / "table.json"
        path.write_text(json.dumps(entries))
        fresh = product.table.__wrapped__(path)
        monkeypatch.setattr(product, "table", lambda: fresh)
        fastest.cache_clear()
        return fresh

    yield write
    fastest.cache_clear()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.mark.parametrize("m", [0, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_way_computes_the_same(device, m, dtype):
    generator = torch.Generator().manual_seed(3)
    w, x, bias = (torch.randn(*size, generator=generator).to(device, dtype) for size in ((20, 300), (m, 300), (20,)))
    weights = SparseWeights.from_dense(w, w > 0.5)
    wanted = (x.double() @ (w * (w > 0.5)).double().t() + bias.double()).relu()
    for way in (*WAYS, None):
        if way == "entries" and dtype == torch.float32:
            continue
        y, taken = spmm(x, weights, bias, relu=True, way=way)
        assert taken == (way or weights.way(m))
        torch.testing.assert_close(y.double(), wanted, rtol=2e-3, atol=2e-2 if dtype == torch.float16 else 1e-4)


@pytest.mark.gpu
def test_the_way_it_names_is_the_kernel_that_runs(write_table):
    write_table(
        entry((8, 20, 300), 0.3, {"csr": 3.0, "bitmap": 2.0, "dense": 9.0}, gpu=torch.cuda.get_device_name()),
        entry((8, 20, 300), 0.01, {"csr": 1.0, "bitmap": 2.0, "dense": 9.0}, gpu=torch.cuda.get_device_name()),
    )
    w, x = torch.randn(20, 300, device="cuda").half(), torch.randn(8, 300, device="cuda").half()
    for density, wanted in ((0.3, "bitmap"), (0.01, "csr")):
        weights = SparseWeights.from_dense(w, torch.rand(w.shape, device="cuda") < density)
        with kernels._load.launched() as launches:
            _, way = spmm(x, weights)
        assert way == wanted
        assert all(launch.startswith(f"spmm_{wanted}") for launch in launches)


def test_a_cpu_takes_csr():
    weights = SparseWeights.from_dense(torch.eye(4), torch.eye(4) > 0)
    assert weights.way(8) == "csr"


def test_the_nearest_entry_decides(write_table):
    write_table(
        entry((8, 4096, 4096), 0.1, {"csr": 9.0, "bitmap": 2.0, "dense": 5.0}),
        entry((8, 4096, 4096), 0.01, {"csr": 1.0, "bitmap": 2.0, "dense": 5.0}),
        entry((4096, 4096, 4096), 0.1, {"csr": 9.0, "bitmap": 3.0, "dense": 2.0}),
        entry((8, 4096, 4096), 0.1, {"csr": 1.0, "dense": 2.0}, dtype="float32"),
        entry((8, 4096, 4096), 0.1, {"dense": 2.0}, gpu="Another GPU"),
    )
    half = torch.float16
    assert fastest((4, 4000, 5000), 0.2, half, GPU) == "bitmap"
    assert fastest((16, 4096, 4096), 0.02, half, GPU) == "csr"
    assert fastest((3000, 4096, 4096), 0.2, half, GPU) == "dense"
    assert fastest((8, 4096, 4096), 0.1, torch.bfloat16, GPU) == "bitmap"
    assert fastest((8, 4096, 4096), 0.1, torch.float32, GPU) == "csr"
    assert fastest((8, 4096, 4096), 0.1, half, "Another GPU") == "dense"
    assert fastest((8, 4096, 4096), 0.1, half, "Unmeasured GPU") == "csr"
    assert fastest((0, 4096, 4096), 0.1, half, GPU) == "csr"
    assert fastest((8, 4096, 4096), 0.0, half, GPU) == "csr"


@pytest.mark.parametrize(
    "bad",
    [
        entry((8, 4096), 0.1, {"csr": 1.0}),
        entry((8, 4096, 0), 0.1, {"csr": 1.0}),
        entry((8, 4096, 4096), 1.5, {"csr": 1.0}),
        entry((8, 4096, 4096), 0.1, {}),
        entry((8, 4096, 4096), 0.1, {"best": 1.0}),
        entry((8, 4096, 4096), 0.1, {"csr": -1.0}),
        entry((8, 4096, 4096), 0.1, {"csr": 1.0}, dtype="int8"),
        {"gpu": GPU},
    ],
)
def test_a_bad_table_is_refused(bad, write_table):
    with pytest.raises(ValueError, match="has an entry"):
        write_table(bad)


def test_the_table_of_the_package_is_valid():
    if not product.TABLE.exists():  # nothing measured: CSR
        assert fastest((8, 4096, 4096), 0.5, torch.float16, "NVIDIA H200") == "csr"
    for each in product.table():
        assert isinstance(each, Entry)
        assert fastest(each.shape, each.density, getattr(torch, each.dtype), each.gpu) in WAYS


def test_no_table_no_entries(tmp_path):
    assert product.table(tmp_path / "none.json") == ()


def test_a_way_that_is_none():
    weights = SparseWeights(*to_csr(torch.ones(2, 3), torch.ones(2, 3) > 0), (2, 3))
    with pytest.raises(ValueError, match="way must be one of csr, bitmap, entries, dense"):
        spmm(torch.ones(1, 3), weights, way="best")
    with pytest.raises(ValueError, match="outside"):
        SparseWeights(torch.ones(1), torch.tensor([3]).int(), torch.tensor([0, 1, 1]).int(), (2, 3))


def test_what_is_no_tensor_and_no_weights_is_named():
    w = SparseWeights.from_dense(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"x must be a torch.Tensor, not list"):
        spmm([[1.0, 2.0, 3.0]], w)
    with pytest.raises(TypeError, match=r"w must be SparseWeights, .* not Tensor"):
        spmm(torch.ones(1, 3), torch.ones(2, 3))
