"""The kernels' Python faces: one function an operation, arrays in, arrays of the same library out.

Every face takes PyTorch tensors, CuPy arrays or NumPy arrays (CPU), runs on the arrays' device and on the caller's
current stream, and returns what it was given: tensors for tensors, CuPy for CuPy, NumPy for NumPy. Shapes follow
``torch.nn.Linear``: activations ``x (M, K)``, weights ``w (N, K)``, outputs ``(M, N)``, row-major.

Each face has a sibling in ``qsparse.oracles`` that says in plain NumPy what it computes.
"""

from qsparse.kernels.bias_relu_grad import bias_relu_grad
from qsparse.kernels.gemm import gemm
from qsparse.kernels.gemm_24 import gemm_24
from qsparse.kernels.gemm_fp8 import gemm_fp8
from qsparse.kernels.gemm_int8 import gemm_int8
from qsparse.kernels.gemm_int8_24 import gemm_int8_24
from qsparse.kernels.gemm_weight_only import gemm_weight_only
from qsparse.kernels.linear_int8 import linear_int8
from qsparse.kernels.mlp_int8 import mlp_int8
from qsparse.kernels.quantize_rows import quantize_rows
from qsparse.kernels.sddmm import sddmm
from qsparse.kernels.sgd import sgd
from qsparse.kernels.softmax_cross_entropy import softmax_cross_entropy
from qsparse.kernels.spmm_bitmap import spmm_bitmap
from qsparse.kernels.spmm_coo import spmm_coo
from qsparse.kernels.spmm_csr import spmm_csr
from qsparse.kernels.spmm_entries import spmm_entries
from qsparse.kernels.train_mlp import train_mlp

__all__ = [
    "FACES",
    "bias_relu_grad",
    "gemm",
    "gemm_24",
    "gemm_fp8",
    "gemm_int8",
    "gemm_int8_24",
    "gemm_weight_only",
    "linear_int8",
    "mlp_int8",
    "quantize_rows",
    "sddmm",
    "sgd",
    "softmax_cross_entropy",
    "spmm_bitmap",
    "spmm_coo",
    "spmm_csr",
    "spmm_entries",
    "train_mlp",
]

FACES = tuple(__all__[1:])
