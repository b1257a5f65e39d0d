// y = act(x · Wᵀ + bias), W (N, K) in CSR, where the columns of x for some batch rows fit shared memory.
//
//   x (M, K), y (M, N) in any strides; values (nnz,) of x's type, cols (nnz,) int or unsigned short; sums in float.
//
// A block turns x of BATCH = 32 V batch rows into a slab [k][m] of shared memory, once, and then has no one to wait for:
// its warps take the rows of W in turns. A line of the slab is read in pieces of 16 bytes a lane, so that a warp reads the
// lines of AT_ONCE entries at once: reading an entry itself costs as much as 128 bytes of a line, however few lanes need
// it. The sums of the lanes that hold the same batch rows come together at the end of a row.
//
// Where K is wider, a cluster of `split` blocks has a slice of the columns each. Each block owns a share of the rows, and
// the others write their sums of these into its memory as they go; it adds them up in order: the same bits every run. Then
// a plan (see spmm_csr_sm80.cu) says where a row's entries of a slice lie; rows are its virtual rows, and those in parts
// are left to spmm_csr_join.

#include "common/slab.cuh"
#include "common/sm90.cuh"

constexpr int LAST = 64, IN_PARTS = 128;  // of a chunk, beside its count

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
              int block_rows, int split, int width, int slabs, int total, int reciprocal) {
    constexpr int BATCH = WARP * V, LINE = BATCH * sizeof(T), PIECE = VECTOR<T>;  // batch rows that a lane reads at once
    constexpr int AT_ONCE = 512 / LINE, LANES = WARP / AT_ONCE;  // entries that a warp reads lines of, lanes of each
    constexpr int STEP = 2 * AT_ONCE;                            // entries between two tests for the end
    constexpr int LEFT = PIECE / AT_ONCE, PITCH = BATCH + 4;     // sums that a lane has in the end; floats of a row of them
    extern __shared__ __align__(1024) char shared[];  // a line's address has no bits in common with a piece's place in it
    __shared__ __align__(2 * WARP * sizeof(Entry)) Entry chunks[WARPS][2][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int part = blockIdx.x % split, block = blockIdx.x / split;
    const int n0 = block % row_blocks * block_rows, rows = max(0, min(block_rows, (total >= 0 ? total : first[N]) - n0));
    const long long m0 = static_cast<long long>(block / row_blocks) * BATCH, k0 = static_cast<long long>(part) * width;
    // Sums of this block's share of the rows, from each block of the cluster: [block][row][m].
    float* const tile = reinterpret_cast<float*>(shared + (width + 1) * LINE);
    const int share = (block_rows + split - 1) / split;
    if (split > 1) cluster_arrive();  // they may write here

    // A lane's row of the warp's, which has 32 at most: its entries in the slice, at once but for those of a row in parts.
    int begin = 0, end = 0;
    bool has_more = false;  // entries that the slices leave over
    const int slab_begin = part * (width / PLAN_WIDTH), slab_end = min(slab_begin + width / PLAN_WIDTH, slabs);
    if (const int r = lane * WARPS + warp; r < rows) {
        if (!parts) {
            begin = row_offsets[n0 + r], end = row_offsets[n0 + r + 1];
        } else {
            if (part == 0) has_more = parts[n0 + r].begin < parts[n0 + r].end;
            if (total < 0 && parts[n0 + r].slot >= 0) {
                begin = end = -1;
            } else if (slab_begin < slab_end) {
                begin = segments[static_cast<long long>(slab_begin) * stride + n0 + r].begin;
                end = segments[static_cast<long long>(slab_end - 1) * stride + n0 + r].end;
            }
        }
    }
    // What is on its way: up to 32 entries of a row, one a lane; each row has such a chunk at least.
    T value = {};
    unsigned col = 0;
    int count = 0;                       // and whether the row ends there, and whether it is in parts
    int next_row = 0, from = 0, to = 0;  // where the chunk after it begins, and its row ends
    const auto fetch = [&] {
        count = min(WARP, to - from);
        if (lane < count) value = values[from + lane], col = static_cast<unsigned>(cols[from + lane]);
        const int kind = from < 0 ? LAST | IN_PARTS : LAST;
        from += WARP;
        if (from < to) return;
        count |= kind;
        ++next_row;
        from = __shfl_sync(~0u, begin, next_row), to = __shfl_sync(~0u, end, next_row);
    };
    fill<T, V, WARPS>(shared, x, m0, k0, static_cast<int>(min(static_cast<long long>(width), x.K - k0)), [&] {
        from = __shfl_sync(~0u, begin, 0), to = __shfl_sync(~0u, end, 0);
        fetch();
    });
    if (threadIdx.x < LINE / 4) *reinterpret_cast<unsigned*>(shared + width * LINE + threadIdx.x * 4) = 0;
    __syncthreads();

    // Kept in registers, not computed again for every row: where column 0 would be; what chunk a lane writes and reads next.
    unsigned lines, put_at, read_at;
    asm volatile("mov.u32 %0, %1;" : "=r"(lines) : "r"(shared_address(shared) - part * width * LINE));
    asm volatile("mov.u32 %0, %1;" : "=r"(put_at) : "r"(shared_address(&chunks[warp][0][lane])));
    asm volatile("mov.u32 %0, %1;" : "=r"(read_at) : "r"(shared_address(&chunks[warp][0][lane / LANES * 2])));
    const unsigned nothing = lines + (part + 1) * width * LINE, place = lane % LANES * 16;
    float sums[PIECE] = {};
    // A lane's entry of a chunk, for the whole warp; and the chunk's entries times their lines.
    const auto put = [&](float value, unsigned col, bool inside) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(put_at), "r"(__float_as_uint(inside ? value : 0.0f)),
                     "r"(inside ? lines + col * LINE + turned<T>(col) : nothing) : "memory");
        put_at ^= sizeof(chunks[0][0]);
    };
    const auto add = [&](int count) {
        __syncwarp();
        const unsigned end = read_at + count * sizeof(Entry);
#pragma unroll 1
        for (unsigned at = read_at; at < end; at += STEP * sizeof(Entry)) {
            Entry two[2];
            load_entries(two, at);
            unsigned words[2][4];
#pragma unroll
            for (int u = 0; u < 2; ++u) load_words(words[u], two[u].line ^ place);
#pragma unroll
            for (int u = 0; u < 2; ++u)
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const float factor = two[u].value;
                    if constexpr (WORD<T> == 1) {
                        sums[q] = fmaf(factor, __uint_as_float(words[u][q]), sums[q]);
                    } else {
                        const auto pair = *reinterpret_cast<const typename Pair<T>::type*>(&words[u][q]);
                        sums[2 * q] = fmaf(factor, to_float(pair.x), sums[2 * q]);
                        sums[2 * q + 1] = fmaf(factor, to_float(pair.y), sums[2 * q + 1]);
                    }
                }
        }
        read_at ^= sizeof(chunks[0][0]);
    };
    if (split > 1) cluster_wait();
    for (int r = warp; r < rows;) {
        const int now = count;
        put(to_float(value), col, lane < (now & (LAST - 1)));
        fetch();
        add(now & (LAST - 1));
        if (!(now & LAST)) continue;
        if (now & IN_PARTS)
            for (int s = slab_begin; s < slab_end; ++s) {
                const Segment segment = segments[static_cast<long long>(s) * stride + n0 + r];
                for (int i = segment.begin; i < segment.end; i += WARP) {
                    const bool inside = i + lane < segment.end;
                    put(inside ? to_float(values[i + lane]) : 0.0f, inside ? static_cast<unsigned>(cols[i + lane]) : 0u,
                        inside);
                    add(min(WARP, segment.end - i));
                }
            }
        if (__shfl_sync(~0u, has_more, r / WARPS) && lane < LANES)  // what the slices leave over: entry by entry, from x
            for (int i = parts[n0 + r].begin; i < parts[n0 + r].end; ++i)
#pragma unroll
                for (int q = 0; q < PIECE; ++q)
                    if (const long long m = m0 + lane * PIECE + q; m < x.M)
                        sums[q] = fmaf(to_float(values[i]), to_float(x.at(m, cols[i])), sums[q]);
        // The sums of the lanes that hold the same batch rows: at each step half of them goes to the other half of lanes.
        int m = lane % LANES * PIECE;
#pragma unroll
        for (int step = WARP / 2, half = PIECE / 2; step >= LANES; step /= 2, half /= 2) {
            m += lane & step ? half : 0;
#pragma unroll
            for (int q = 0; q < half; ++q) {
                const float kept = lane & step ? sums[q + half] : sums[q], given = lane & step ? sums[q] : sums[q + half];
                sums[q] = kept + __shfl_xor_sync(~0u, given, step);
            }
        }
        const int owner = r * reciprocal >> 20;  // r / share
        float* const to_sum = &tile[(part * share + r - owner * share) * PITCH + m];
        if (split > 1) {
            const unsigned peer = cluster_address(to_sum, owner);
            if constexpr (LEFT == 2)
                asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(peer), "f"(sums[0]), "f"(sums[1])
                             : "memory");
            else
                asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(peer), "f"(sums[0]) : "memory");
        } else if constexpr (LEFT == 2) {
            *reinterpret_cast<float2*>(to_sum) = make_float2(sums[0], sums[1]);
        } else {
            *to_sum = sums[0];
        }
#pragma unroll
        for (int q = 0; q < PIECE; ++q) sums[q] = 0.0f;
        r += WARPS;
    }
    if (split > 1) cluster_sync();
    else __syncthreads();
    const int r_begin = part * share, mine = min(share, rows - r_begin);
    const int left = static_cast<int>(min(static_cast<long long>(BATCH), y.M - m0));
    const bool across = y.n_step == 1;  // neighbours in a warp have neighbouring rows of W, or batch rows
    for (int i = threadIdx.x; i < mine * (BATCH / 4); i += WARPS * WARP) {
        const int m = (across ? i / mine : i % (BATCH / 4)) * 4, r = across ? i % mine : i / (BATCH / 4);
        float4 sum = *reinterpret_cast<const float4*>(&tile[r * PITCH + m]);
        for (int peer = 1; peer < split; ++peer) {
            const float4 more = *reinterpret_cast<const float4*>(&tile[(peer * share + r) * PITCH + m]);
            sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
        }
        int n = n0 + r_begin + r, slot = -1;
        if (parts && total < 0) slot = parts[n].slot, n = parts[n].n;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            if (m + q >= left) break;
            const float one = q == 0 ? sum.x : q == 1 ? sum.y : q == 2 ? sum.z : sum.w;
            if (slot >= 0) y.partial[slot * y.M + m0 + m + q] = one;
            else finish(&y.data[(m0 + m + q) * y.m_step + n * y.n_step], one, y.bias, n, y.relu);
        }
    }
}
