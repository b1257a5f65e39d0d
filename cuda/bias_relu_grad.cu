// dz = dy where y > 0 else 0;  db[n] = sum over m of dz[m][n]. Without y: dz is dy and only db is written.
//
//   dy, y, dz (M, N) row-major, db (N,); float, half or bfloat16; sums in float.
//
// The idea: a block owns COLUMNS columns and walks down all rows, so no atomics are needed and the order of the sum
// is fixed: two runs give the same bits. A warp reads 32 neighbouring columns of one row: coalesced.

#include "common/numeric.cuh"

constexpr int COLUMNS = 32, ROWS = 8;

template <typename T>
__global__ void __launch_bounds__(COLUMNS * ROWS)
bias_relu_grad(const T* __restrict__ dy, const T* __restrict__ y, T* dz, T* __restrict__ db, long long M, long long N) {
    const int lane = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
    const long long n = static_cast<long long>(blockIdx.x) * COLUMNS + lane;
    float sum = 0.0f;
    if (n < N) {
        for (long long m = row; m < M; m += ROWS) {
            float value = to_float(dy[m * N + n]);
            if (y) {
                if (!(to_float(y[m * N + n]) > 0.0f)) value = 0.0f;
                dz[m * N + n] = from_float<T>(value);
            }
            sum += value;
        }
    }
    __shared__ float sums[ROWS][COLUMNS];
    sums[row][lane] = sum;
    __syncthreads();
    if (row == 0 && n < N) {
        for (int i = 1; i < ROWS; ++i) sum += sums[i][lane];
        db[n] = from_float<T>(sum);
    }
}
