// A 2:4 matrix as a dense one, for the products that have no sparse kernel.
//
//   values (n, 4 · bytes), metadata (n, bytes) with strides of ldv and ldm; dense (n, ld), columns below 8 · bytes
//   written. Four bits a group of four columns: first column | second column << 2, the lower group in the lower bits.
//
// The idea: one thread turns one byte of metadata into eight neighbouring columns, which it stores at once.
#pragma once

template <typename T> struct alignas(8 * sizeof(T) < 16 ? 8 * sizeof(T) : 16) Eight {
    T columns[8];
};

template <typename T>
__global__ void __launch_bounds__(256)
expand_24(const T* __restrict__ values, long long ldv, const unsigned char* __restrict__ metadata, long long ldm,
          T* __restrict__ dense, long long ld, long long n, int bytes) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long row = i / bytes;
    const int at = static_cast<int>(i % bytes);
    if (row >= n) return;
    const unsigned byte = metadata[row * ldm + at];
    const T* const kept = values + row * ldv + 4 * at;
    Eight<T> eight;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const int pair = c / 4 * 2, shift = c / 4 * 4;
        T value = T(0);
        if ((byte >> shift & 3) == c % 4) value = kept[pair];
        if ((byte >> shift + 2 & 3) == c % 4) value = kept[pair + 1];
        eight.columns[c] = value;
    }
    *reinterpret_cast<Eight<T>*>(dense + row * ld + 8 * at) = eight;
}
