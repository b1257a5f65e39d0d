// The gradient of a sparse W (N, K) at its entries only: out[i] = sum over m of dy[m, n_i] * x[m, k_i].
//
//   x (M, K) with either direction contiguous; dyt (N, stride): dy turned, zeros from M up to stride, a multiple of 16
//   bytes; out (nnz,) float; W's pattern as the plan of spmm_csr_sm80.cu has it.
//
// A block owns some rows of W and one slab of its columns, and walks down the batch: BATCH rows of x at a time come
// through shared memory, turned to [k][m], as for the product. A warp keeps its piece of dy's row n in registers,
// multiplies it with the line of each entry's column, and adds up over the lanes, four entries at a time.

#include "common/spmm.cuh"

constexpr int CONSUMERS = 12, PRODUCERS = 4;
constexpr int BLOCK_WARPS = CONSUMERS + PRODUCERS;
constexpr int MOST_ROWS = CONSUMERS * WARP;

template <typename T, typename I>
__global__ void __launch_bounds__(BLOCK_WARPS* WARP, 1)
sddmm_tiles(const __grid_constant__ Matrix<T> x, const T* __restrict__ dyt, long long dyt_stride,
            const __grid_constant__ Weights w, float* __restrict__ out, int row_blocks, int block_rows, int stages) {
    constexpr int V = VECTOR<T>;
    using L = Lane<T, V>;
    extern __shared__ __align__(1024) char shared[];  // a line's address has no bits in common with a piece's place in it
    __shared__ unsigned long long full[4], empty[4];
    __shared__ Part parts[MOST_ROWS];
    __shared__ __align__(16) unsigned chunks[CONSUMERS][2][WARP];

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int v0 = blockIdx.x % row_blocks * block_rows;
    const int s = blockIdx.x / row_blocks;
    const int rows = min(block_rows, w.first[w.N] - v0);
    if (rows <= 0) return;
    const long long k0 = static_cast<long long>(s) * w.width;
    const int width = static_cast<int>(min(static_cast<long long>(w.width), w.K - k0));
    const int slab_bytes = w.width * L::LINE;

    bool stored = false;
    for (int v = threadIdx.x; v < rows; v += BLOCK_WARPS * WARP) {
        parts[v] = w.parts[v0 + v];
        const Segment segment = w.segments[s * w.stride + v0 + v];
        stored |= segment.begin < segment.end;
    }
    if (threadIdx.x < stages) {
        pipe_init(&full[threadIdx.x], PRODUCERS * WARP);
        pipe_init(&empty[threadIdx.x], CONSUMERS * WARP);
    }
    const int tiles = __syncthreads_or(stored) ? static_cast<int>((x.M + L::BATCH - 1) / L::BATCH) : 0;

    if (warp >= CONSUMERS) {
        for (int t = 0; t < tiles; ++t) {
            const int stage = t % stages;
            if (t >= stages) pipe_wait(&empty[stage], (t / stages - 1) & 1);
            const bool copies = fill_slab<T, V, PRODUCERS>(shared + stage * slab_bytes, x,
                                                           static_cast<long long>(t) * L::BATCH, k0, width,
                                                           warp - CONSUMERS, lane);
            pipe_arrive(&full[stage], copies);
        }
    } else {
        const int mine = rows * warp / CONSUMERS;
        const int count = rows * (warp + 1) / CONSUMERS - mine;
        Segment segment = {0, 0};
        if (lane < count && tiles) segment = w.segments[s * w.stride + v0 + mine + lane];
        const I* cols = static_cast<const I*>(w.cols);
        // Of the entries in a chunk a lane gets the sum of this one: see below.
        const int lanes_entry = lane % 8 * 4 + lane / 8;
        int turns = 0;

        for (int t = 0; t < tiles; ++t) {
            const int stage = t % stages;
            const long long m = static_cast<long long>(t) * L::BATCH + lane * V;
            // the piece of dy's row that goes with the next row of W
            uint4 ahead = {0, 0, 0, 0};
            const auto load = [&](int r) {
                if (m < dyt_stride) ahead = *reinterpret_cast<const uint4*>(dyt + parts[mine + r].n * dyt_stride + m);
            };
            if (count) load(0);
            pipe_wait(&full[stage], (t / stages) & 1);
            const unsigned slab = shared_address(shared) + stage * slab_bytes - static_cast<unsigned>(k0) * L::LINE;
#pragma unroll 1
            for (int r = 0; r < count; ++r) {
                const uint4 dy_words = ahead;
                if (r + 1 < count) load(r + 1);
                const int end = __shfl_sync(~0u, segment.end, r);
                for (int begin = __shfl_sync(~0u, segment.begin, r); begin < end; begin += WARP) {
                    const int here = min(end - begin, WARP);
                    const unsigned col = lane < here ? static_cast<unsigned>(cols[begin + lane]) : static_cast<unsigned>(k0);
                    float* const sum_of_lane = &out[begin + lanes_entry];
                    const float before = t && lanes_entry < here ? *sum_of_lane : 0.0f;
                    unsigned* const chunk = chunks[warp][turns++ % 2];
                    chunk[lane] = slab + col * L::LINE + turn<T>(col);
                    __syncwarp();
                    float sum = 0.0f;
#pragma unroll 1
                    for (int g = 0; g * 4 < here; ++g) {
                        unsigned lines[4];
                        load_words(lines, shared_address(chunk) + g * 16);
                        Piece<T, V> pieces[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) pieces[j].load(lines[j] ^ lane * L::BYTES);
                        float dots[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) dots[j] = pieces[j].dot(dy_words);
                        const float dot = add_lanes(dots, lane);  // entry j's in lanes 8 j to 8 j + 7
                        if (lane % 8 == g) sum = dot;
                    }
                    if (lanes_entry < here) *sum_of_lane = before + sum;
                }
            }
            pipe_arrive(&empty[stage]);
        }
    }
    if (s) return;
    __syncthreads();
    for (int v = warp; v < rows; v += BLOCK_WARPS)  // rows whose columns do not ascend, from x itself
        for (int i = parts[v].begin; i < parts[v].end; ++i) {
            const I k = static_cast<const I*>(w.cols)[i];
            float sum[1] = {0.0f};
            for (long long m = lane; m < x.M; m += WARP)
                sum[0] = fmaf(to_float(dyt[parts[v].n * dyt_stride + m]), to_float(x.at(m, k)), sum[0]);
            add_lanes(sum, lane);
            if (lane == 0) out[i] = sum[0];
        }
}
