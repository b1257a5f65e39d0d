// One step of SGD with momentum and weight decay, in place; masked-out entries become exactly zero.
//
//   param, grad, velocity (n,) float; velocity and mask (bytes) may be null. The learning rate is `lr`, or, for a graph
//   whose replays differ in it, what `lr_at` points at.
//
// The idea: one pass over memory; each thread owns one entry.

extern "C" __global__ void __launch_bounds__(256)
sgd(float* __restrict__ param, const float* __restrict__ grad, float* __restrict__ velocity,
    const unsigned char* __restrict__ mask, const float* __restrict__ lr_at, long long n, float lr, float momentum,
    float weight_decay) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (lr_at) lr = *lr_at;
    const bool kept = !mask || mask[i];
    float step = grad[i];
    if (weight_decay != 0.0f) step = fmaf(weight_decay, param[i], step);
    if (velocity) {
        step = fmaf(momentum, velocity[i], step);
        velocity[i] = kept ? step : 0.0f;
    }
    param[i] = kept ? fmaf(-lr, step, param[i]) : 0.0f;
}
