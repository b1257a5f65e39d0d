// losses[m] = log(sum over c of exp(logits[m][c])) - logits[m][label];  grad = (softmax(logits) - onehot(label)) / M.
//
//   logits, grad (M, C) row-major float, half or bfloat16; labels (M,) int64; losses (M,) float.
//
// The idea: one warp owns one row: the maximum and the sum are shuffles, no shared memory, no atomics.
// A label outside [0, C) gives NaN in its row.

#include "common/numeric.cuh"

constexpr int WARPS = 8;

template <typename T>
__global__ void __launch_bounds__(WARPS * 32)
softmax_cross_entropy(const T* __restrict__ logits, const long long* __restrict__ labels, float* __restrict__ losses,
                      T* __restrict__ grad, long long M, long long C) {
    const long long m = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (m >= M) return;  // whole warps leave together, so the shuffles below see all their lanes
    const int lane = threadIdx.x % 32;
    const T* row = logits + m * C;

    // NaN must survive the maximum, or a poisoned row would look healthy: fmaxf drops it, the sum below brings it back
    float largest = -infinity();
    for (long long c = lane; c < C; c += 32) largest = fmaxf(largest, to_float(row[c]));
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));

    float sum = 0.0f;
    for (long long c = lane; c < C; c += 32) sum += expf(to_float(row[c]) - largest);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);

    const long long label = labels[m];
    const bool valid = label >= 0 && label < C;
    const float log_sum = logf(sum);
    if (lane == 0) losses[m] = valid ? log_sum - (to_float(row[label]) - largest) : not_a_number();
    for (long long c = lane; c < C; c += 32) {
        const float p = expf(to_float(row[c]) - largest - log_sum);
        const float g = (p - (c == label ? 1.0f : 0.0f)) / static_cast<float>(M);
        grad[m * C + c] = from_float<T>(valid ? g : not_a_number());
    }
}
