// Stochastic gradient descent on a multilayer perceptron with hidden layers, batch after batch, in one cooperative
// launch of clusters: train_mlp_sm80.cu for Hopper and for networks whose weights all multiprocessors together can hold.
//
//   Arguments as there, without a mask. Every block owns at most one tile of 128 x 128 weights; there are blocks enough.
//
// The ideas that it adds, outermost first:
//   weights stay           a block's tile of the weights, in float, lies in its shared memory from the first step to the
//                          last. What travels through L2 are halves: the new weights' for the products of all blocks.
//   clusters divide K      the products of the forward and backward pass have few outputs and a long K. Two blocks share
//                          a tile of 64 x 64 outputs, half of K each, and half of the outputs each to finish: so fewer
//                          blocks read an operand than with tiles small enough for one.
//   the head at once       all blocks that need them compute the logits of their 16 images for themselves, and take the
//                          gradient back to their share of the last hidden layer.
// Everything is summed in a fixed order: two runs give the same bits.

#include "common/phases.cuh"
#include "common/sm80_tile.cuh"
#include "common/sm90.cuh"

constexpr int CLUSTER = 2;
constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int CLASSES = 16, GROUP = 16;  // the head's tile; so many images are summed at once for a bias

using Half = __half;
using Wide = Config<Half, 64, 64, 64, 16, 32, 6>;       // forward and backward
using Square = Config<Half, 128, 128, 64, 64, 32, 3>;   // weights
constexpr int STAGES_BYTES = 96 * 1024, WEIGHTS = Square::BM * Square::BN;
static_assert(Wide::THREADS == THREADS && Square::THREADS == THREADS, "a block multiplies tiles of either kind");
static_assert(6 * Wide::STAGE_BYTES <= STAGES_BYTES && 3 * Square::STAGE_BYTES <= STAGES_BYTES, "the stages have room");
static_assert(Wide::WM == 16 && Wide::WN / 8 % CLUSTER == 0, "a block finishes whole tiles of 8 columns of every warp");

struct Layer {
    long long inputs, outputs;
    long long params;     // place of the weights among all parameters; the biases lie behind them
    long long copy;       // of the halves of the weights, (outputs, line(inputs))
    long long input;      // of the halves of its input, (batch, line(inputs)); the first layer's has two turns
    long long gradient;   // of the halves of the loss's gradient by its output before the ReLU, (batch, line(outputs))
    long long sums;       // of that gradient's sums over GROUP images each, float (groups, line(outputs))
};

// Lines hold whole chunks of 16 bytes.
__host__ __device__ constexpr int line(long long width) { return static_cast<int>((width + 7) / 8 * 8); }

// acc += x · wᵀ of one tile over the block's slices of K, in PARTS.
template <typename C, int PARTS, typename T, bool X_K, bool W_K>
__device__ __forceinline__ void multiply_all(float (&acc)[C::WM / 16][C::WN / 8][4], const Block<C>& block, Halves x,
                                             Halves w, int M, int N, int K, unsigned stages) {
#pragma unroll 1
    for (int pass = 0; pass < (PARTS == 2 ? 3 : 1); ++pass) {  // high · high, high · low, low · high
        multiply<T, X_K, W_K>(acc, block, reinterpret_cast<const T*>(x.data + pass / 2 * x.part), x.ld,
                              reinterpret_cast<const T*>(w.data + pass % 2 * w.part), w.ld, M, N, K, stages);
        copy_wait<0>();
        __syncthreads();
    }
}

// The sum over the warp's rows of an operand's tile, for the four lanes that share a column.
__device__ __forceinline__ float column_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 4);
    v += __shfl_xor_sync(~0u, v, 8);
    return v + __shfl_xor_sync(~0u, v, 16);
}

// f(row, column, value, next column's value, before) for all of x · wᵀ (M, N), N even, by all clusters; `before` is
// what prepare(row, column) loaded. With SUMS, what f returns is summed over every GROUP rows, into `groups` of N
// columns. W_K as in multiply.
template <int PARTS, typename T, bool W_K, bool SUMS, typename P, typename F>
__device__ __forceinline__ void product(Halves x, Halves w, int M, int N, int K, char* shared, float* groups, P prepare,
                                        F f) {
    using C = Wide;
    constexpr int TILES = C::WN / 8 / CLUSTER;  // of 8 columns, that a block finishes of a warp's
    static_assert(CLUSTER == 2 && C::WM == GROUP, "two blocks exchange halves, a warp has a group of rows");
    const int tiles_n = (N + C::BN - 1) / C::BN, tiles = (M + C::BM - 1) / C::BM * tiles_n;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int rank = cluster_rank(), slices = (K + C::BK - 1) / C::BK, share = (slices + CLUSTER - 1) / CLUSTER;
    auto* const sums = reinterpret_cast<float4(*)[TILES][WARP]>(shared);  // [warp], from the other block
    Block<C> block(M, N, K, 1, 1);
    block.begin = rank * share, block.count = min(share, slices - block.begin);
    for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {
        block.m0 = tile / tiles_n * C::BM, block.n0 = tile % tiles_n * C::BN;
        float acc[1][C::WN / 8][4] = {};
        multiply_all<C, PARTS, T, true, W_K>(acc, block, x, w, M, N, K, shared_address(shared));
        cluster_sync();  // nobody's stages are in use any more
        float4 sum[TILES];
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const float(&low)[4] = acc[0][j];
            const float(&high)[4] = acc[0][TILES + j];
            const float4 first = {low[0], low[1], low[2], low[3]}, second = {high[0], high[1], high[2], high[3]};
            cluster_store(cluster_address(&sums[warp][j][lane], rank ^ 1), rank ? first : second);
            sum[j] = rank ? second : first;
        }
        using Before = decltype(prepare(0, 0));
        Before before[TILES][2];
        const auto each = [&](auto f) {
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int m = block.m0 + block.m_warp + g + h * 8;
                    const int n = block.n0 + block.n_warp + (rank * TILES + j) * 8 + t * 2;
                    if (m < M && n < N) f(j, h, m, n);
                }
        };
        each([&](int j, int h, int m, int n) { before[j][h] = prepare(m, n); });
        cluster_sync();  // the other block's sums are here
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const float4 v = sums[warp][j][lane];
            sum[j].x += v.x, sum[j].y += v.y, sum[j].z += v.z, sum[j].w += v.w;
        }
        float2 results[TILES] = {};
        each([&](int j, int h, int m, int n) {
            const float2 v = f(m, n, h ? sum[j].z : sum[j].x, h ? sum[j].w : sum[j].y, before[j][h]);
            results[j].x += v.x, results[j].y += v.y;
        });
        if constexpr (SUMS) {
            const int group = (block.m0 + block.m_warp) / GROUP;
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const float2 all = {column_sum(results[j].x), column_sum(results[j].y)};
                const int n = block.n0 + block.n_warp + (rank * TILES + j) * 8 + t * 2;
                if (g == 0 && group * GROUP < M && n < N)
                    *reinterpret_cast<float2*>(groups + static_cast<long long>(group) * N + n) = all;
            }
        }
        __syncthreads();  // the sums are read
    }
}

// Images on their way, normalised, into the first layer's input: 8 pixels a thread. `load` starts a chunk, so that its
// bytes come while others work.
struct Gather {
    const unsigned char* images;
    const long long* order;
    int count, inputs, chunks;
    float scale, shift;

    __device__ __forceinline__ uint2 load(int i) const {
        uint2 raw = {};
        if (i >= count * chunks) return raw;
        const int first = i % chunks * 8;
        const unsigned char* const from = images + order[i / chunks] * inputs + first;
        if (inputs % 8 == 0) return *reinterpret_cast<const uint2*>(from);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (first + e < inputs) (e < 4 ? raw.x : raw.y) |= static_cast<unsigned>(from[e]) << e % 4 * 8;
        return raw;
    }

    template <int PARTS, typename T> __device__ __forceinline__ void store(Halves to, int i, uint2 raw) const {
        if (i >= count * chunks) return;
        const int row = i / chunks, first = i % chunks * 8;
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const auto pixel = [&](int e) {
                const unsigned p = (e < 4 ? raw.x : raw.y) >> e % 4 * 8 & 255;
                return first + e < inputs ? fmaf(static_cast<float>(p), scale, shift) : 0.0f;
            };
            put<PARTS, T>(to, row, first + e, pixel(e), pixel(e + 1));
        }
    }
};

// The loss of GROUP images and its gradients by the logits and by the layer below them, before its ReLU (times
// D_SCALE), with the sums of both. The warps divide K among them, then a share of the width of the layer below, part
// `part` of `parts`; the first part writes what is not below. label: of image threadIdx / 8.
template <int PARTS, typename T>
__device__ __forceinline__ void head(Halves x, Halves w, Halves gradient, Halves below, float* sums, float* sums_below,
                                     const float* bias, long long label, float* losses, int first, int count,
                                     int classes, int part, int parts, char* shared) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int pitch = x.ld + 8, chunks = x.ld / 8;
    auto* const logits = reinterpret_cast<float(*)[GROUP][CLASSES]>(shared);
    auto* const d_logits = reinterpret_cast<Half(*)[GROUP][CLASSES + 8]>(logits + WARPS);
    Half* const weights = reinterpret_cast<Half*>(d_logits + PARTS);  // (PARTS, CLASSES, pitch)
    for (int row = warp; row < PARTS * CLASSES; row += WARPS) {
        const int k = row % CLASSES, of = row / CLASSES;
        const Half* const from = w.data + of * w.part + (k < classes ? k * w.ld : 0);
        for (int i = lane; i < chunks; i += WARP)
            copy_async(shared_address(weights + row * pitch + i * 8), from + i * 8, k < classes);
    }
    copy_commit();

    const int row = threadIdx.x / 8 % GROUP, at = threadIdx.x % 8 * 2, m = first + row;  // 8 lanes an image
    float b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) b[i] = at + i < classes ? __ldcg(bias + at + i) : 0.0f;
    const auto load = [&](int part, int row, int k) {
        const long long at = part * x.part + static_cast<long long>(row) * x.ld + k;
        return row < count && k < x.ld ? __ldcg(reinterpret_cast<const uint4*>(x.data + at)) : uint4{};
    };
    // The outputs below that this warp takes the gradient of, the first of them ahead.
    const int units = (x.ld + 15) / 16, width = (units + parts - 1) / parts;  // of 16 columns
    const int begin = part * width, end = min(units, begin + width);
    const auto outputs_at = [&](int unit, unsigned (&y)[2][2]) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int n = unit * 16 + tile * 8 + 2 * t;
                const long long row = first + g + 8 * high;
                const bool inside = unit < end && n < x.ld && row < count;
                y[tile][high] = inside ? __ldcg(reinterpret_cast<const unsigned*>(x.data + row * x.ld + n)) : 0;
            }
    };
    unsigned y[2][2];
    // A lane reads 8 neighbours along K at once; the products take them in any order, the same for both operands.
    constexpr int AHEAD = 4 / PARTS;
    float acc[2][4] = {};
    bool arrived = false;
    for (int base = warp * 32; base < x.ld || !arrived; base += AHEAD * WARPS * 32) {
        uint4 a[AHEAD][PARTS][2];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int high = 0; high < 2; ++high)
                    a[j][part][high] = load(part, first + g + 8 * high, base + j * WARPS * 32 + 8 * t);
        if (!arrived) {
            outputs_at(begin + warp, y);
            copy_wait<0>();
            __syncthreads();
            arrived = true;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int k = base + j * WARPS * 32 + 8 * t;
            uint4 q[PARTS][2];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int high = 0; high < 2; ++high)
                    q[part][high] = k < x.ld ? *reinterpret_cast<const uint4*>(
                                                   weights + (part * CLASSES + g + 8 * high) * pitch + k)
                                             : uint4{};
            const auto add = [&](const uint4(&p)[2], const uint4(&q)[2]) {
                const unsigned low[4] = {p[0].x, p[1].x, p[0].y, p[1].y}, high[4] = {p[0].z, p[1].z, p[0].w, p[1].w};
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    mma<T>(acc[n], low, q[n].x, q[n].y);
                    mma<T>(acc[n], high, q[n].z, q[n].w);
                }
            };
            add(a[j][0], q[0]);
            if constexpr (PARTS == 2) add(a[j][0], q[1]), add(a[j][1], q[0]);
        }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) logits[warp][g + c / 2 * 8][j * 8 + 2 * t + c % 2] = acc[j][c];
    __syncthreads();

    if (threadIdx.x < GROUP * 8) {
        float logit[2], e[2], d[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int from = 0; from < WARPS; ++from) sum += logits[from][row][at + i];
            logit[i] = at + i < classes ? fmaf(sum, 1.0f / W_SCALE, b[i]) : -infinity();
        }
        float largest = fmaxf(logit[0], logit[1]);
#pragma unroll
        for (int step = 4; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
#pragma unroll
        for (int i = 0; i < 2; ++i) e[i] = at + i < classes ? expf(logit[i] - largest) : 0.0f;
        float total = e[0] + e[1];
#pragma unroll
        for (int step = 4; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        if (m < count) {
            const bool valid = label >= 0 && label < classes;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool chosen = at + i == label;
                d[i] = valid ? (e[i] / total - (chosen ? 1.0f : 0.0f)) * D_SCALE : not_a_number();
                if (part == 0 && (valid ? chosen : at + i == 0))
                    losses[m] = valid ? logf(total) - (logit[i] - largest) : d[i];
                if (at + i >= classes) d[i] = 0.0f;
            }
            if (part == 0 && at < gradient.ld) put<PARTS, T>(gradient, m, at, d[0], d[1]);  // few classes: shorter lines
        }
        unsigned halves[PARTS];
        split<PARTS, T>(d[0], d[1], halves);
        for (int of = 0; of < PARTS; ++of) *reinterpret_cast<unsigned*>(&d_logits[of][row][at]) = halves[of];
    }
    __syncthreads();

    if (part == 0 && threadIdx.x < gradient.ld && threadIdx.x < CLASSES) {
        float sum = 0.0f;
        for (int of = 0; of < PARTS; ++of)
            for (int m = 0; m < GROUP; ++m) sum += to_float(reinterpret_cast<const T&>(d_logits[of][m][threadIdx.x]));
        sums[first / GROUP * gradient.ld + threadIdx.x] = sum;
    }
    unsigned d[PARTS][4];
#pragma unroll
    for (int of = 0; of < PARTS; ++of)
        load_matrices<false>(d[of], shared_address(&d_logits[of][lane % 16][lane / 16 * 8]));
    for (int unit = begin + warp; unit < end; unit += WARPS) {
        if (unit != begin + warp) outputs_at(unit, y);
        unsigned b[PARTS][4];
#pragma unroll
        for (int of = 0; of < PARTS; ++of) {
            const int n = min(unit * 16 + lane / 16 * 8, x.ld - 8);
            load_matrices<true>(b[of], shared_address(weights + (of * CLASSES + lane % 16) * pitch + n));
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            unsigned b0[PARTS], b1[PARTS];
            for (int of = 0; of < PARTS; ++of) b0[of] = b[of][2 * tile], b1[of] = b[of][2 * tile + 1];
            float sum[4] = {};
            multiply_parts<PARTS, T>(sum, d, b0, b1);
            const int n = unit * 16 + tile * 8 + 2 * t;
            float2 all = {};
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const float2 out = floats_of<T>(y[tile][high]);
                const float low = out.x > 0.0f ? sum[2 * high] * (1.0f / W_SCALE) : 0.0f;
                const float next = out.y > 0.0f ? sum[2 * high + 1] * (1.0f / W_SCALE) : 0.0f;
                const int row = first + g + 8 * high;
                if (n < x.ld && row < count) put<PARTS, T>(below, row, n, low, next);
                all.x += low, all.y += next;
            }
            all = {column_sum(all.x), column_sum(all.y)};
            if (g == 0 && n < x.ld)
                *reinterpret_cast<float2*>(sums_below + static_cast<long long>(first / GROUP) * x.ld + n) = all;
        }
    }
    __syncthreads();  // all is read before the next images' is written
}

template <int PARTS, bool MOMENTUM, typename T = __half>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
train_mlp_grid_sm90(const unsigned char* __restrict__ images, const long long* __restrict__ labels,
                    const long long* __restrict__ order, const float* __restrict__ rates, float* params,
                    float* velocities, float* losses, const Layer* __restrict__ layers, Half* scratch, unsigned* arrived,
                    int depth, int rows, int batch, float scale, float shift, float momentum, float weight_decay) {
    extern __shared__ __align__(128) char shared[];
    const unsigned stages = shared_address(shared);
    // The block's weights, and their velocities: each thread's behind one another, so that neither bank conflicts.
    float4* const master = reinterpret_cast<float4*>(shared + STAGES_BYTES);
    float4* const speed = master + WEIGHTS / 4;
    const int steps = (rows + batch - 1) / batch;
    unsigned target = 0;

    const auto copy_of = [&](const Layer& l) {
        return Halves{scratch + l.copy, line(l.inputs), l.outputs * line(l.inputs)};
    };
    const auto input_of = [&](const Layer& l, int turn) {
        const long long size = static_cast<long long>(batch) * line(l.inputs);
        return Halves{scratch + l.input + (&l == layers ? turn * PARTS * size : 0), line(l.inputs), size};
    };
    const auto gradient_of = [&](const Layer& l) {
        return Halves{scratch + l.gradient, line(l.outputs), static_cast<long long>(batch) * line(l.outputs)};
    };

    const auto sums_of = [&](const Layer& l) { return reinterpret_cast<float*>(scratch + l.sums); };
    const auto gather_of = [&](long long first, int count) {
        return Gather{images, order + first, count, static_cast<int>(layers[0].inputs), line(layers[0].inputs) / 8,
                      scale, shift};
    };
    const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;

    // Which tile is this block's.
    using C = Square;
    int own = 0, own_tile = blockIdx.x;
    for (; own < depth; ++own) {
        const int tiles = (layers[own].outputs + C::BM - 1) / C::BM * ((layers[own].inputs + C::BN - 1) / C::BN);
        if (own_tile < tiles) break;
        own_tile -= tiles;
    }
    const bool owner = own < depth;
    const Layer mine = layers[owner ? own : 0];
    const int outputs = mine.outputs, inputs = mine.inputs, across = (inputs + C::BN - 1) / C::BN;
    Block<C> block(1, 1, 1, 1, 1);
    block.m0 = own_tile / across * C::BM, block.n0 = own_tile % across * C::BN, block.begin = 0;
    // f(i, j, h, e, row, column) for each of the weights of this thread; float e of h of the tile (i, j).
    const auto each_weight = [&](auto f) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < C::WM / 16; ++i)
#pragma unroll
            for (int j = 0; j < C::WN / 8; ++j)
                f(i, j, block.m0 + block.m_warp + i * 16 + lane / 4, block.n0 + block.n_warp + j * 8 + lane % 4 * 2);
    };
    const auto place = [&](int i, int j) { return (i * (C::WN / 8) + j) * THREADS + threadIdx.x; };
    const auto load_tile = [&](float4* to, const float* from) {
        each_weight([&](int i, int j, int m, int n) {
            const auto at = [&](int m, int n) {
                return m < outputs && n < inputs ? from[mine.params + static_cast<long long>(m) * inputs + n] : 0.0f;
            };
            to[place(i, j)] = {at(m, n), at(m, n + 1), at(m + 8, n), at(m + 8, n + 1)};
        });
    };
    const auto store_tile = [&](float* to, const float4* from) {
        each_weight([&](int i, int j, int m, int n) {
            const auto at = [&](int m, int n, float v) {
                if (m < outputs && n < inputs) to[mine.params + static_cast<long long>(m) * inputs + n] = v;
            };
            const float4 v = from[place(i, j)];
            at(m, n, v.x), at(m, n + 1, v.y), at(m + 8, n, v.z), at(m + 8, n + 1, v.w);
        });
    };
    const auto publish = [&](int m, int n, float4 v) {
        const Halves copy = copy_of(layers[own]);
        if (m < outputs && n < copy.ld) put<PARTS, T>(copy, m, n, v.x * W_SCALE, v.y * W_SCALE);
        if (m + 8 < outputs && n < copy.ld) put<PARTS, T>(copy, m + 8, n, v.z * W_SCALE, v.w * W_SCALE);
    };
    if (owner) {
        load_tile(master, params);
        if constexpr (MOMENTUM) load_tile(speed, velocities);
        each_weight([&](int i, int j, int m, int n) { publish(m, n, master[place(i, j)]); });
    }
    const Gather first_images = gather_of(0, min(batch, rows));
    for (int i = thread; i < first_images.count * first_images.chunks; i += threads)
        first_images.store<PARTS, T>(input_of(layers[0], 0), i, first_images.load(i));
    grid_barrier(arrived, target);

    for (int step = 0; step < steps; ++step) {
        const long long first = static_cast<long long>(step) * batch;
        const int count = min(batch, rows - step * batch);
        const float rate = rates[step], mean = 1.0f / (D_SCALE * static_cast<float>(count));

        // Who takes which images' head, and their labels, which are loaded long before they are needed.
        const int heads = (count + GROUP - 1) / GROUP, shares = max(1, static_cast<int>(gridDim.x) / heads);
        const bool working = blockIdx.x < heads * shares;
        const auto label_of = [&](int group) {
            const int m = group * GROUP + threadIdx.x / 8;
            return threadIdx.x < GROUP * 8 && m < count ? labels[order[first + m]] : 0;
        };
        const long long label = working ? label_of(blockIdx.x % heads) : 0;

        for (int i = 0; i < depth - 1; ++i) {
            const Halves to = input_of(layers[i + 1], 0);
            const int width = layers[i].outputs;
            const float* const bias = params + layers[i].params + layers[i].inputs * layers[i].outputs;
            product<PARTS, T, true, false>(
                input_of(layers[i], step % 2), copy_of(layers[i]), count, line(width), layers[i].inputs, shared, nullptr,
                [&](int, int n) {
                    return float2{n < width ? __ldcg(bias + n) : 0.0f, n + 1 < width ? __ldcg(bias + n + 1) : 0.0f};
                },
                [&](int m, int n, float a, float b, float2 bias) {
                    put<PARTS, T>(to, m, n, n < width ? relu_of(fmaf(a, 1.0f / W_SCALE, bias.x)) : 0.0f,
                               n + 1 < width ? relu_of(fmaf(b, 1.0f / W_SCALE, bias.y)) : 0.0f);
                    return float2{};
                });
            grid_barrier(arrived, target);
        }

        const Layer& last = layers[depth - 1];
        const Gather next = gather_of(first + batch, max(0, min(batch, rows - (step + 1) * batch)));
        const uint2 raw = next.load(thread);
        if (working)
            for (int group = blockIdx.x % heads; group < heads; group += gridDim.x)
                head<PARTS, T>(input_of(last, 0), copy_of(last), gradient_of(last), gradient_of(layers[depth - 2]),
                            sums_of(last), sums_of(layers[depth - 2]), params + last.params + last.inputs * last.outputs,
                            group == blockIdx.x % heads ? label : label_of(group), losses + first, group * GROUP, count,
                            last.outputs, blockIdx.x / heads, shares, shared);
        const Halves to = input_of(layers[0], (step + 1) % 2);
        next.store<PARTS, T>(to, thread, raw);
        for (int i = thread + threads; i < next.count * next.chunks; i += threads)
            next.store<PARTS, T>(to, i, next.load(i));
        grid_barrier(arrived, target);

        for (int i = depth - 2; i > 0; --i) {
            const Halves to = gradient_of(layers[i - 1]), y = input_of(layers[i], 0);
            const int width = layers[i].inputs;
            product<PARTS, T, false, true>(
                gradient_of(layers[i]), copy_of(layers[i]), count, line(width), layers[i].outputs, shared,
                sums_of(layers[i - 1]),
                [&](long long m, int n) { return __ldcg(reinterpret_cast<const unsigned*>(y.data + m * y.ld + n)); },
                [&](int m, int n, float a, float b, unsigned outputs) {
                    const float2 out = floats_of<T>(outputs);
                    const float2 v = {out.x > 0.0f ? a * (1.0f / W_SCALE) : 0.0f,
                                      out.y > 0.0f ? b * (1.0f / W_SCALE) : 0.0f};
                    put<PARTS, T>(to, m, n, v.x, v.y);
                    return v;
                });
            grid_barrier(arrived, target);
        }

        if (owner) {
            // The sums of the biases of these rows, by the tiles at their beginning; a thread takes every second group.
            const bool with_bias = block.n0 == 0;
            const int n = block.m0 + threadIdx.x % C::BM, half = threadIdx.x / C::BM;
            const auto sum_at = [&](int group) {
                const bool inside = with_bias && n < outputs && group < heads;
                return inside ? __ldcg(sums_of(layers[own]) + static_cast<long long>(group) * line(outputs) + n) : 0.0f;
            };
            constexpr int AHEAD = 8;
            float ahead[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) ahead[i] = sum_at(half + 2 * i);

            float acc[C::WM / 16][C::WN / 8][4] = {};
            block.count = (count + C::BK - 1) / C::BK;
            multiply_all<C, PARTS, T, false, false>(acc, block, gradient_of(layers[own]), input_of(layers[own], step % 2),
                                                 outputs, line(inputs), count, stages);
            const auto moved = [&](float w, float& velocity, float gradient) {
                float move = fmaf(weight_decay, w, gradient * mean);
                if constexpr (MOMENTUM) velocity = move = fmaf(momentum, velocity, move);
                return fmaf(-rate, move, w);
            };
            // The halves of the new weights leave in whole lines.
            constexpr int PITCH = C::BN + 8;
            Half* const lines = reinterpret_cast<Half*>(shared);  // (PARTS, BM, PITCH)
            each_weight([&](int i, int j, int m, int n) {
                const float(&sum)[4] = acc[i][j];
                float4 w = master[place(i, j)], v = MOMENTUM ? speed[place(i, j)] : float4{};
                w = {moved(w.x, v.x, sum[0]), moved(w.y, v.y, sum[1]), moved(w.z, v.z, sum[2]), moved(w.w, v.w, sum[3])};
                const bool low = n < inputs, high = n + 1 < inputs;
                w = {low ? w.x : 0.0f, high ? w.y : 0.0f, low ? w.z : 0.0f, high ? w.w : 0.0f};
                master[place(i, j)] = w;
                if constexpr (MOMENTUM) speed[place(i, j)] = v;
                const Halves tile = {lines, PITCH, C::BM * PITCH};
                put<PARTS, T>(tile, m - block.m0, n - block.n0, w.x * W_SCALE, w.y * W_SCALE);
                put<PARTS, T>(tile, m - block.m0 + 8, n - block.n0, w.z * W_SCALE, w.w * W_SCALE);
            });
            float* const totals = reinterpret_cast<float*>(lines + PARTS * C::BM * PITCH);
            if (with_bias) {
                float total = 0.0f;
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) total += ahead[i];
                for (int group = half + 2 * AHEAD; group < heads; group += 2) total += sum_at(group);
                totals[threadIdx.x] = total;
            }
            __syncthreads();
            const Halves copy = copy_of(layers[own]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = threadIdx.x; i < C::BM * C::BN / 8; i += THREADS) {
                    const int row = i / (C::BN / 8), column = i % (C::BN / 8) * 8;
                    if (block.m0 + row < outputs && block.n0 + column < copy.ld)
                        *reinterpret_cast<uint4*>(copy.data + part * copy.part +
                                                  static_cast<long long>(block.m0 + row) * copy.ld + block.n0 + column) =
                            *reinterpret_cast<const uint4*>(lines + (part * C::BM + row) * PITCH + column);
                }
            if (with_bias && threadIdx.x < C::BM && n < outputs) {
                const long long at = mine.params + static_cast<long long>(outputs) * inputs + n;
                float v = MOMENTUM ? velocities[at] : 0.0f;
                params[at] = moved(__ldcg(params + at), v, totals[threadIdx.x] + totals[C::BM + threadIdx.x]);
                if constexpr (MOMENTUM) velocities[at] = v;
            }
        }
        grid_barrier(arrived, target);
    }
    if (owner) {
        store_tile(params, master);
        if constexpr (MOMENTUM) store_tile(velocities, speed);
    }
    cluster_sync();
}
