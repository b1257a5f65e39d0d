"""The 2:4 part of `qsparse bench spmm`: what is multiplied, and what a row says."""

import pytest
import torch

from qsparse.bench import spmm, two_four
from qsparse.bench.peers import pytorch

CPU = torch.device("cpu")


@pytest.mark.parametrize(("op", "dtype"), [("gemm_24", "float16"), ("gemm_24", "bfloat16"), ("gemm_int8_24", "int8")])
def test_ours_and_the_dense_product_are_right(op, dtype):
    given = two_four.contest(op, dtype, (9, 24, 40), CPU)
    assert given.reference.error(given.ours()).within(given.tolerance)
    assert given.reference.error(given.peers[two_four.DENSE]()[two_four.DENSE]()).within(given.tolerance)
    assert not given.reference.error(given.ours() + 1).within(given.tolerance)


def test_weights_keep_two_of_four():
    w = two_four.weights(50, 80, torch.Generator().manual_seed(0))
    assert ((w != 0).reshape(50, 20, 4).sum(2) == 2).all()
    assert (w != 0).float().mean(0).std() < 0.15  # every column now and then


def test_a_row_for_each_peer_that_is_willing(monkeypatch):
    monkeypatch.setattr("qsparse.bench.harness._CPU_BUDGET_S", 0.01)

    def refuse(*_):
        raise RuntimeError("not here\nand more")

    monkeypatch.setattr(two_four.two_four, "products", refuse)
    monkeypatch.setattr(pytorch, "products", lambda x, w: {"cublas": two_four.Call(lambda: x @ w.t())})
    heard = []
    rows = two_four.measure("gemm_24", "float16", (9, 24, 40), CPU, {}, 3, heard.append)
    assert heard == ["cusparselt refused: not here"]
    assert [row["peer"] for row in rows] == [two_four.DENSE, "cublas"]
    for row in rows:
        assert (row["op"], row["dtype"], row["shape"], row["density"]) == ("gemm_24", "float16", [9, 24, 40], 0.5)
        assert row["correct"]
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["us"], abs=1e-4)
    assert {mean["cells"] for mean in spmm.means(rows)} == {1}


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch):
    """Without cuSPARSELt: where one of its calls fails, no other test of the process could use the GPU."""

    def refuse(*_):
        raise RuntimeError("not in a test")

    monkeypatch.setattr(two_four.two_four, "products", refuse)
    result = spmm.bench(torch.device("cuda", 0), ops=two_four.OPS, shapes=[(256, 512, 1024)], repetitions=3)
    assert {(row["op"], row["dtype"]) for row in result.rows} == {("gemm_24", "float16"), ("gemm_int8_24", "int8")}
    assert not result.wrong
