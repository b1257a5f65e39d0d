import pytest
import torch

from qsparse.bench.peers import pytorch


def state():
    return torch.backends.cuda.preferred_blas_library(), torch.get_float32_matmul_precision()


def test_the_switches_are_set_inside_and_restored_even_after_an_error():
    before, inside = state(), []

    def fails():
        with pytorch.blas("cublaslt", "high"):
            inside.append(state())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert [(library.name.lower(), precision) for library, precision in inside] == [("cublaslt", "high")]
    assert state() == before


@pytest.mark.parametrize(("precision", "suffix"), [(None, ""), ("ieee", ""), ("highest", ""), ("high", "_tf32")])
def test_every_peer_computes_the_same(normal, precision, suffix):
    a, b, bias = normal(6, 8), normal(4, 8), normal(4)
    plain = pytorch.products(a, b, precision)
    fused = pytorch.bias_relu_products(a, b, bias, precision)
    assert list(plain) == ["cublas" + suffix, "cublaslt" + suffix]
    assert list(fused) == ["torch_eager" + suffix, "torch._addmm_activation" + suffix]
    for call in (*plain.values(), *pytorch.cpu_products(a, b).values()):
        torch.testing.assert_close(call(), a @ b.t())
    for call in (*fused.values(), *pytorch.cpu_bias_relu_products(a, b, bias).values()):
        torch.testing.assert_close(call(), torch.relu(a @ b.t() + bias))
