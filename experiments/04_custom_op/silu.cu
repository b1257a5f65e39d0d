// y = x · s with s = 1 / (1 + exp(-x)), and backwards dx = dy · s · (1 + x · (1 - s)); n floats or halves.
//
// The idea: the formula happens in registers, between one read and one write of memory. Composed of tensor operations it
// is the same arithmetic, but every operation reads and writes whole arrays. A thread takes 16 bytes at a time.
//
// Arrays start on 16 bytes; the last thread takes what is left over, one by one.

#include "../../cuda/common/numeric.cuh"

template <typename T> struct alignas(16) Chunk {
    static constexpr int SIZE = 16 / sizeof(T);
    T v[SIZE];
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, typename F> __device__ __forceinline__ void each_chunk(long long n, F f) {
    constexpr int SIZE = Chunk<T>::SIZE;
    const long long first = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * SIZE;
    if (first < n) f(first, n - first < SIZE ? static_cast<int>(n - first) : SIZE);
}

template <typename T> __device__ __forceinline__ Chunk<T> load(const T* from, int count) {
    if (count == Chunk<T>::SIZE) return *reinterpret_cast<const Chunk<T>*>(from);
    Chunk<T> chunk{};
    for (int i = 0; i < Chunk<T>::SIZE; ++i)
        if (i < count) chunk.v[i] = from[i];
    return chunk;
}

template <typename T> __device__ __forceinline__ void store(T* to, const Chunk<T>& chunk, int count) {
    if (count == Chunk<T>::SIZE) {
        *reinterpret_cast<Chunk<T>*>(to) = chunk;
        return;
    }
    for (int i = 0; i < Chunk<T>::SIZE; ++i)
        if (i < count) to[i] = chunk.v[i];
}

template <typename T>
__global__ void __launch_bounds__(256) silu(const T* __restrict__ x, T* __restrict__ y, long long n) {
    each_chunk<T>(n, [&](long long at, int count) {
        Chunk<T> chunk = load(x + at, count);
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; ++i) {
            const float v = to_float(chunk.v[i]);
            chunk.v[i] = from_float<T>(v * sigmoid(v));
        }
        store(y + at, chunk, count);
    });
}

template <typename T>
__global__ void __launch_bounds__(256)
silu_grad(const T* __restrict__ x, const T* __restrict__ dy, T* __restrict__ dx, long long n) {
    each_chunk<T>(n, [&](long long at, int count) {
        const Chunk<T> chunk = load(x + at, count);
        Chunk<T> gradient = load(dy + at, count);
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; ++i) {
            const float v = to_float(chunk.v[i]), s = sigmoid(v);
            gradient.v[i] = from_float<T>(to_float(gradient.v[i]) * s * fmaf(v, 1.0f - s, 1.0f));
        }
        store(dx + at, gradient, count);
    });
}
