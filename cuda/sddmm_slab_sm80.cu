// The gradient of a sparse W (N, K) at its entries only: out[i] = sum over m of dy[m, n_i] * x[m, k_i].
//
//   x (M, K) in any strides; dyt (N, dyt_stride): dy turned, zeros from M up to dyt_stride, a multiple of 16 bytes; cols
//   (nnz,) int or unsigned short; out [range of the batch][entry] float: sddmm_sum adds up where there are several ranges.
//
// Where all columns of x, or a wide slice of them, fit shared memory for some batch rows. A block owns some rows of W, a
// slice of the columns, and `range` slabs of the batch, one after the other. A warp keeps its piece of dy's row n in
// registers, multiplies it with the line of each entry's column, and adds up over the lanes, 16 entries at a time. For a
// slice of the columns a plan says where a row's entries lie, as for the product.

#include "common/slab.cuh"

constexpr int WARPS = 16;
constexpr int TOGETHER = 16;  // entries that are added up over the lanes at once
constexpr int SUM_BLOCK = 256;

template <typename T, typename I, int V>
__global__ void __launch_bounds__(WARPS* WARP, 1)
sddmm_slab(const __grid_constant__ Matrix<T> x, const T* __restrict__ dyt, long long dyt_stride,
           const I* __restrict__ cols, const int* __restrict__ row_offsets, const Segment* __restrict__ segments,
           const Part* __restrict__ parts, const int* __restrict__ first, float* __restrict__ out, int N, int stride,
           int nnz, int row_blocks, int block_rows, int slices, int width, int slabs, int range) {
    constexpr int BATCH = WARP * V, LINE = BATCH * sizeof(T), WORDS = V / WORD<T>;
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(16) unsigned chunks[WARPS][2][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int v0 = blockIdx.x % row_blocks * block_rows, slice = blockIdx.x / row_blocks % slices;
    const int turn_of_batch = blockIdx.x / row_blocks / slices;
    const int rows = max(0, min(block_rows, (parts ? first[N] : N) - v0));
    const long long k0 = static_cast<long long>(slice) * width;
    const int here = static_cast<int>(min(static_cast<long long>(width), x.K - k0));
    const int turns = (rows + WARPS - 1) / WARPS;
    const int slab_begin = slice * (width / PLAN_WIDTH), slab_end = min(slab_begin + width / PLAN_WIDTH, slabs);
    out += static_cast<long long>(turn_of_batch) * nnz;

    // A lane's row among the next 32 of the warp's: its row of dy, and its entries in the slice.
    int begin = 0, end = 0, n = 0, slot = -1;
    const auto look = [&](int base) {
        const int r = (base + lane) * WARPS + warp;
        begin = end = n = 0, slot = -1;
        if (r >= rows) return;
        n = v0 + r;
        if (parts) {
            n = parts[v0 + r].n, slot = parts[v0 + r].slot;
            if (slot >= 0 || slab_begin >= slab_end) return;
            begin = segments[static_cast<long long>(slab_begin) * stride + v0 + r].begin;
            end = segments[static_cast<long long>(slab_end - 1) * stride + v0 + r].end;
        } else {
            begin = row_offsets[n], end = row_offsets[n + 1];
        }
    };
    const unsigned slab = shared_address(shared), nothing = slab + width * LINE, place = lane * 4 * WORDS;
    if (threadIdx.x < LINE / 4) *reinterpret_cast<unsigned*>(shared + width * LINE + threadIdx.x * 4) = 0;
    int buffer = 0;
    for (int t = 0; t < range; ++t) {
        const long long m0 = (static_cast<long long>(turn_of_batch) * range + t) * BATCH;
        if (m0 >= x.M) break;
        struct alignas(WORDS * 4) PieceOfDy {
            T v[V];
        };
        PieceOfDy now_dy = {}, next_dy = {};
        unsigned now = 0, next = 0;  // columns
        const auto load_row = [&](int j, PieceOfDy& dy, unsigned& col) {
            const int row = __shfl_sync(~0u, n, j % WARP), from = __shfl_sync(~0u, begin, j % WARP);
            const int to = __shfl_sync(~0u, end, j % WARP);
            if (m0 + lane * V < dyt_stride)
                dy = *reinterpret_cast<const PieceOfDy*>(dyt + row * dyt_stride + m0 + lane * V);
            if (from + lane < to) col = cols[from + lane];
        };
        look(0);
        load_row(0, now_dy, now);
        __syncthreads();  // the slab before has been read
        fill<T, V, WARPS>(shared, x, m0, k0, here);
        __syncthreads();
        for (int j = 0; j < turns; ++j) {
            const int from = __shfl_sync(~0u, begin, j % WARP), to = __shfl_sync(~0u, end, j % WARP);
            const bool in_parts = __shfl_sync(~0u, slot, j % WARP) >= 0;
            if ((j + 1) % WARP == 0) look(j + 1);
            load_row(j + 1, next_dy, next);
            const auto add = [&](int from, int to) {
                for (int i = from; i < to; i += WARP) {
                    const unsigned k = now - static_cast<unsigned>(k0);
                    chunks[warp][buffer][lane] = i + lane < to ? slab + k * LINE + turned<T>(k) : nothing;
                    if (i + WARP + lane < to) now = cols[i + WARP + lane];
                    __syncwarp();
                    const unsigned lines = shared_address(chunks[warp][buffer]);
#pragma unroll 1
                    for (int g = 0; g < WARP && i + g < to; g += TOGETHER) {
                        float dots[TOGETHER];
#pragma unroll
                        for (int q = 0; q < TOGETHER; q += 4) {
                            unsigned line[4];
                            load_words(line, lines + (g + q) * 4);
#pragma unroll
                            for (int u = 0; u < 4; ++u) {
                                unsigned words[WORDS];
                                load_words(words, line[u] ^ place);
                                float dot = 0.0f;
#pragma unroll
                                for (int e = 0; e < WORDS; ++e) {
                                    if constexpr (WORD<T> == 1) {
                                        dot = fmaf(to_float(now_dy.v[e]), __uint_as_float(words[e]), dot);
                                    } else {
                                        const auto pair = *reinterpret_cast<const typename Pair<T>::type*>(&words[e]);
                                        dot = fmaf(to_float(now_dy.v[2 * e]), to_float(pair.x), dot);
                                        dot = fmaf(to_float(now_dy.v[2 * e + 1]), to_float(pair.y), dot);
                                    }
                                }
                                dots[q + u] = dot;
                            }
                        }
                        const float sum = add_lanes(dots, lane);
                        const int at = i + g + lane / (WARP / TOGETHER);
                        if (lane % (WARP / TOGETHER) == 0 && at < to) out[at] = t ? out[at] + sum : sum;
                    }
                    buffer ^= 1;
                }
            };
            add(from, to);
            if (in_parts)
                for (int at = slab_begin; at < slab_end; ++at) {
                    const Segment segment = segments[static_cast<long long>(at) * stride + v0 + j * WARPS + warp];
                    if (segment.begin + lane < segment.end) now = cols[segment.begin + lane];
                    add(segment.begin, segment.end);
                }
            now_dy = next_dy, now = next;
        }
    }
    if (!parts || slice) return;
    for (int v = warp; v < rows; v += WARPS) {  // rows whose columns do not ascend, from x itself
        const Part part = parts[v0 + v];
        const long long m_begin = static_cast<long long>(turn_of_batch) * range * BATCH;
        const long long m_end = min(m_begin + static_cast<long long>(range) * BATCH, x.M);
        for (int i = part.begin; i < part.end; ++i) {
            float sum[1] = {0.0f};
            for (long long m = m_begin + lane; m < m_end; m += WARP)
                sum[0] = fmaf(to_float(dyt[part.n * dyt_stride + m]), to_float(x.at(m, cols[i])), sum[0]);
            add_lanes(sum, lane);
            if (lane == 0) out[i] = sum[0];
        }
    }
}

__global__ void __launch_bounds__(SUM_BLOCK)
sddmm_sum(const float* __restrict__ parts, float* __restrict__ out, int nnz, int count) {
    const int i = blockIdx.x * SUM_BLOCK + threadIdx.x;
    if (i >= nnz) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < count; ++part) sum += parts[static_cast<long long>(part) * nnz + i];
    out[i] = sum;
}
