// y = act(x · Wᵀ + bias), W (N, K) in CSR, where the columns of x for some batch rows fit shared memory.
//
//   x (M, K), y (M, N) in any strides; values (nnz,) of x's type, cols (nnz,) int or unsigned short; sums in float, in the
//   order of the entries.
//
// A block turns x of BATCH = 32 V batch rows into a slab [k][m] of shared memory, once, and then has no one to wait for:
// its warps take the rows of W in turns, V batch rows a lane, and an entry costs a line of the slab and its share of a read
// of two entries. The sums leave by way of shared memory, [m][row], so that what lies side by side in y is written at once.
//
// Where K is wider, a cluster of `split` blocks has a slice of the columns each, and adds up through distributed shared
// memory, in order: the same bits every run. Then a plan (see spmm_csr_sm80.cu) says where a row's entries of a slice lie;
// rows are its virtual rows, and those in parts are left to spmm_csr_join.

#include "common/slab.cuh"
#include "common/sm90.cuh"

constexpr int MOST_SPLIT = 8;

__device__ __forceinline__ float load_of_peer(const float* here, unsigned rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(cluster_address(here, rank)) : "memory");
    return v;
}

template <typename T> struct Output {  // y in any strides
    T* data;
    const T* bias;
    float* partial;  // [slot][m]
    long long m_step, n_step, M;
    int relu;
};

template <typename T, typename I, int V, int WARPS>
__global__ void __launch_bounds__(WARPS* WARP, 1)
spmm_csr_slab(const __grid_constant__ Matrix<T> x, const T* __restrict__ values, const I* __restrict__ cols,
              const int* __restrict__ row_offsets, const Segment* __restrict__ segments, const Part* __restrict__ parts,
              const int* __restrict__ first, const __grid_constant__ Output<T> y, int N, int stride, int row_blocks,
              int block_rows, int split, int width, int slabs) {
    constexpr int BATCH = WARP * V, LINE = BATCH * sizeof(T), WORDS = V / WORD<T>;
    constexpr int UNROLL = WORDS == 1 ? 2 : 1;  // as far as registers go
    extern __shared__ __align__(1024) char shared[];  // a line's address has no bits in common with a piece's place in it
    __shared__ __align__(16) Entry chunks[WARPS][2][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int part = blockIdx.x % split, block = blockIdx.x / split;
    const int n0 = block % row_blocks * block_rows, rows = max(0, min(block_rows, (parts ? first[N] : N) - n0));
    const long long m0 = static_cast<long long>(block / row_blocks) * BATCH, k0 = static_cast<long long>(part) * width;
    float* const tile = reinterpret_cast<float*>(shared + (width + 1) * LINE);  // of sums, [m][row], a pitch of PITCH
    const int PITCH = block_rows | 1;

    // A lane's row among the next 32 of the warp's: its entries in the slice, at once but for those of a row in parts.
    int begin = 0, end = 0, slot = -1;
    const int slab_begin = part * (width / PLAN_WIDTH), slab_end = min(slab_begin + width / PLAN_WIDTH, slabs);
    const auto look = [&](int base) {
        const int r = (base + lane) * WARPS + warp;
        begin = end = 0, slot = -1;
        if (r >= rows) return;
        if (parts) {
            slot = parts[n0 + r].slot;
            if (slot >= 0 || slab_begin >= slab_end) return;
            begin = segments[static_cast<long long>(slab_begin) * stride + n0 + r].begin;
            end = segments[static_cast<long long>(slab_end - 1) * stride + n0 + r].end;
        } else {
            begin = row_offsets[n0 + r], end = row_offsets[n0 + r + 1];
        }
    };
    T value = {};
    unsigned col = 0;
    const auto load = [&](int i, int end, T& value, unsigned& col) {
        if (i < end) value = values[i], col = static_cast<unsigned>(cols[i]);
    };
    look(0);
    load(__shfl_sync(~0u, begin, 0) + lane, __shfl_sync(~0u, end, 0), value, col);
    fill<T, V, WARPS>(shared, x, m0, k0, static_cast<int>(min(static_cast<long long>(width), x.K - k0)));
    if (threadIdx.x < LINE / 4) *reinterpret_cast<unsigned*>(shared + width * LINE + threadIdx.x * 4) = 0;
    __syncthreads();

    const unsigned slab = shared_address(shared), nothing = slab + width * LINE, place = lane * 4 * WORDS;
    int buffer = 0;
    float sums[V];
    // The entries [from, to) times their lines; the first are read already.
    const auto add = [&](int from, int to) {
        for (int i = from; i < to; i += WARP) {
            const unsigned k = col - static_cast<unsigned>(k0);
            const bool inside = i + lane < to;
            chunks[warp][buffer][lane] = {inside ? to_float(value) : 0.0f,
                                           inside ? slab + k * LINE + turned<T>(k) : nothing};
            load(i + WARP + lane, to, value, col);
            __syncwarp();
            const unsigned entries = shared_address(chunks[warp][buffer]);
            const int count = min(WARP, to - i);
#pragma unroll UNROLL
            for (int e = 0; e < count; e += 4) {
                Entry four[2][2];
                load_entries(four[0], entries + e * 8);
                load_entries(four[1], entries + e * 8 + 16);
                unsigned words[4][WORDS];
#pragma unroll
                for (int u = 0; u < 4; ++u) load_words(words[u], four[u / 2][u % 2].line ^ place);
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                    const float factor = four[u / 2][u % 2].value;
#pragma unroll
                    for (int q = 0; q < WORDS; ++q) {
                        if constexpr (WORD<T> == 1) {
                            sums[q] = fmaf(factor, __uint_as_float(words[u][q]), sums[q]);
                        } else {
                            const auto pair = *reinterpret_cast<const typename Pair<T>::type*>(&words[u][q]);
                            sums[2 * q] = fmaf(factor, to_float(pair.x), sums[2 * q]);
                            sums[2 * q + 1] = fmaf(factor, to_float(pair.y), sums[2 * q + 1]);
                        }
                    }
                }
            }
            buffer ^= 1;
        }
    };
    for (int j = 0; j * WARPS + warp < rows; ++j) {
        const int from = __shfl_sync(~0u, begin, j % WARP), to = __shfl_sync(~0u, end, j % WARP), r = j * WARPS + warp;
        const bool in_parts = __shfl_sync(~0u, slot, j % WARP) >= 0;
        if ((j + 1) % WARP == 0) look(j + 1);
        T next_value = {};
        unsigned next_col = 0;
        load(__shfl_sync(~0u, begin, (j + 1) % WARP) + lane, __shfl_sync(~0u, end, (j + 1) % WARP), next_value, next_col);
#pragma unroll
        for (int q = 0; q < V; ++q) sums[q] = 0.0f;
        add(from, to);
        if (in_parts)
            for (int s = slab_begin; s < slab_end; ++s) {
                const Segment segment = segments[static_cast<long long>(s) * stride + n0 + r];
                load(segment.begin + lane, segment.end, value, col);
                add(segment.begin, segment.end);
            }
        value = next_value, col = next_col;
#pragma unroll
        for (int q = 0; q < V; ++q) tile[(lane * V + q) * PITCH + r] = sums[q];
    }
    __syncthreads();
    if (parts && part == 0)  // what the slices leave over: rows whose columns do not ascend
        for (int r = warp; r < rows; r += WARPS) {
            const Part row = parts[n0 + r];
            for (int i = row.begin; i < row.end; ++i)
                for (int m = lane; m < BATCH && m0 + m < y.M; m += WARP) {
                    float& sum = tile[m * PITCH + r];
                    sum = fmaf(to_float(values[i]), to_float(x.at(m0 + m, cols[i])), sum);
                }
        }
    if (split > 1) cluster_sync();
    const int r_begin = rows * part / split, share = rows * (part + 1) / split - r_begin;
    const int left = static_cast<int>(min(static_cast<long long>(BATCH), y.M - m0));
    for (int i = threadIdx.x; i < share * left; i += WARPS * WARP) {
        const int m = y.n_step == 1 ? i / share : i % left, r = r_begin + (y.n_step == 1 ? i % share : i / left);
        const float* const from = &tile[m * PITCH + r];
        float sum = *from;
        int n = n0 + r, slot = -1;
        if (split > 1) {
            float sums[MOST_SPLIT];
#pragma unroll
            for (int peer = 0; peer < MOST_SPLIT; ++peer)
                if (peer < split) sums[peer] = load_of_peer(from, peer);
            sum = sums[0];
#pragma unroll
            for (int peer = 1; peer < MOST_SPLIT; ++peer)
                if (peer < split) sum += sums[peer];
            n = parts[n0 + r].n, slot = parts[n0 + r].slot;
        }
        if (slot >= 0) y.partial[slot * y.M + m0 + m] = sum;
        else finish(&y.data[(m0 + m) * y.m_step + n * y.n_step], sum, y.bias, n, y.relu);
    }
    if (split > 1) cluster_sync();  // the others have read this block's sums
}
