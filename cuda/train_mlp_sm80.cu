// Stochastic gradient descent on a multilayer perceptron of any widths, batch after batch, in one cooperative launch.
//
//   As in train_mlp_sm90.cu; sizes and batch are free, up to 16 classes. params and velocities: weights (N, K) and biases
//   (N,) by turns, one behind the other; mask: bytes of their shape or null, 0 where they become zero and stay so.
//   layers: where everything is, see Layer. scratch: zeros at first.
//
// The ideas, outermost first:
//   phases               a step is 2 L products, each shared out in tiles among all blocks, with a barrier of the whole
//                        grid between them: forward layer by layer, the head, the gradients back layer by layer, and
//                        then all weights at once. No launch, no host between steps.
//   the update at once   a tile of the weights' gradient lies in registers when it is complete: there it moves the
//                        weights, and is never written.
//   one more column      every layer's input has a last column of ones, and its weights one of biases: so the bias is
//                        added, and its gradient summed, by the same products.
//   PARTS, T             how many halves stand for a float, see common/halves.cuh. Products read the halves; the floats
//                        that they are rounded from are kept beside them.
// Tiles are multiplied by common/sm80_tile.cuh. Everything is summed in a fixed order: two runs give the same bits.

#include "common/phases.cuh"
#include "common/sm80_tile.cuh"

constexpr int THREADS = 128, WARPS = THREADS / WARP;
constexpr int CLASSES = 16, HEAD_ROWS = 16;  // the head's tile
constexpr int SHARED_BYTES = 48 * 1024;

using Half = __half;
template <int BM, int BN, int WM, int WN> using Tile = Config<Half, BM, BN, 64, WM, WN, 3>;
using Large = Tile<64, 64, 32, 32>;  // for many tiles
using Small = Tile<32, 64, 16, 32>;  // twice as many
static_assert(Large::THREADS == THREADS && Small::THREADS == THREADS, "a block multiplies tiles of either size");
static_assert(3 * Large::STAGE_BYTES <= SHARED_BYTES, "the host asks for SHARED_BYTES");

struct Layer {
    long long inputs, outputs;
    long long params;     // place of the weights among all parameters; the biases lie behind them
    long long copy;       // of the halves of weights and biases, (outputs, line(inputs))
    long long input;      // of the halves of its input, (batch, line(inputs)); the first layer's has two turns
    long long gradient;   // of the halves of the loss's gradient by its output before the ReLU, (batch, line(outputs))
};

// Lines hold one more column and whole chunks of 16 bytes.
__host__ __device__ constexpr int line(long long width) { return static_cast<int>((width + 8) / 8 * 8); }

// f(row, column, value, next column's value, before) for all of x · wᵀ (M, N), N even, where `before` is what
// prepare(row, column) loaded, for many at once: f's stores would keep later loads waiting. `turn` is this block's next
// tile, counted through all products of a phase. X_K / W_K as in multiply.
template <typename C, int PARTS, typename T, bool X_K, bool W_K, typename P, typename F>
__device__ __forceinline__ void product(Halves x, Halves w, int M, int N, int K, int& turn, unsigned stages, P prepare,
                                        F f) {
    using Before = decltype(prepare(0, 0));
    const int tiles_n = (N + C::BN - 1) / C::BN, tiles = (M + C::BM - 1) / C::BM * tiles_n;
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    Block<C> block(M, N, K, 1, 1);
    block.begin = 0, block.count = (K + C::BK - 1) / C::BK;
    for (; turn < tiles; turn += gridDim.x) {
        block.m0 = turn / tiles_n * C::BM, block.n0 = turn % tiles_n * C::BN;
        float acc[C::WM / 16][C::WN / 8][4] = {};
#pragma unroll 1
        for (int pass = 0; pass < (PARTS == 2 ? 3 : 1); ++pass) {  // high · high, high · low, low · high
            multiply<T, X_K, W_K>(acc, block, reinterpret_cast<const T*>(x.data + pass / 2 * x.part), x.ld,
                                  reinterpret_cast<const T*>(w.data + pass % 2 * w.part), w.ld, M, N, K, stages);
            copy_wait<0>();
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < C::WM / 16; ++i) {
            Before before[C::WN / 8][2];
            const auto each = [&](auto f) {
#pragma unroll
                for (int j = 0; j < C::WN / 8; ++j)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int m = block.m0 + block.m_warp + i * 16 + g + h * 8;
                        const int n = block.n0 + block.n_warp + j * 8 + t * 2;
                        if (m < M && n < N) f(j, h, m, n);
                    }
            };
            each([&](int j, int h, int m, int n) { before[j][h] = prepare(m, n); });
            each([&](int j, int h, int m, int n) {
                f(m, n, acc[i][j][h * 2], acc[i][j][h * 2 + 1], before[j][h]);
            });
        }
    }
    turn -= tiles;
}

template <int PARTS, typename T, bool X_K, bool W_K, typename P, typename F>
__device__ __forceinline__ void product(Halves x, Halves w, int M, int N, int K, int& turn, unsigned stages, P prepare,
                                        F f) {
    if ((M + 63) / 64 * ((N + 63) / 64) >= gridDim.x / 2)
        product<Large, PARTS, T, X_K, W_K>(x, w, M, N, K, turn, stages, prepare, f);
    else
        product<Small, PARTS, T, X_K, W_K>(x, w, M, N, K, turn, stages, prepare, f);
}

// A weight before it moves.
struct Entry {
    float value, velocity;
};
struct Entries {
    Entry low, high;
};

// Copy the images of a batch, normalised, into the first layer's input.
template <int PARTS, typename T>
__device__ __forceinline__ void gather(Halves to, const unsigned char* images, const long long* order, int count,
                                       int inputs, float scale, float shift) {
    const int chunks = to.ld / 8;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count * chunks; i += gridDim.x * THREADS) {
        const int row = i / chunks, first = i % chunks * 8;
        const unsigned char* const image = images + order[row] * inputs;
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int k = first + e;
            x[e] = k < inputs ? fmaf(static_cast<float>(image[k]), scale, shift) : k == inputs ? 1.0f : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 8; e += 2) put<PARTS, T>(to, row, first + e, x[e], x[e + 1]);
    }
}

// The loss of each image and its gradient by the logits (times D_SCALE). A block takes HEAD_ROWS images, its warps
// divide the logits' sums among them.
template <int PARTS, typename T>
__device__ __forceinline__ void head(Halves x, Halves w, Halves gradient, const long long* labels,
                                     const long long* order, float* losses, int count, int classes,
                                     float (*sums)[HEAD_ROWS][CLASSES]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const auto load = [](Halves from, int part, long long row, int rows, int k) {
        return row < rows && k < from.ld
                   ? __ldcg(reinterpret_cast<const uint4*>(from.data + part * from.part + row * from.ld + k))
                   : uint4{};
    };
    for (int first = blockIdx.x * HEAD_ROWS; first < count; first += gridDim.x * HEAD_ROWS) {
        const int row = threadIdx.x / 8, at = threadIdx.x % 8 * 2, m = first + row;  // 8 lanes an image, 2 classes each
        const long long label = m < count ? labels[order[m]] : 0;
        float acc[2][4] = {};
        // A lane reads 8 neighbours along K at once; the products take them in any order, the same for both operands.
#pragma unroll(4 / PARTS)
        for (int k0 = warp * 32; k0 < x.ld; k0 += WARPS * 32) {
            const int k = k0 + 8 * t;
            uint4 a[PARTS][2], b[PARTS][2];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    a[part][high] = load(x, part, first + g + 8 * high, count, k);
                    b[part][high] = load(w, part, g + 8 * high, classes, k);
                }
            const auto add = [&](const uint4(&p)[2], const uint4(&q)[2]) {
                const unsigned low[4] = {p[0].x, p[1].x, p[0].y, p[1].y}, high[4] = {p[0].z, p[1].z, p[0].w, p[1].w};
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    mma<T>(acc[j], low, q[j].x, q[j].y);
                    mma<T>(acc[j], high, q[j].z, q[j].w);
                }
            };
            add(a[0], b[0]);
            if constexpr (PARTS == 2) add(a[0], b[1]), add(a[1], b[0]);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) sums[warp][g + c / 2 * 8][j * 8 + 2 * t + c % 2] = acc[j][c];
        __syncthreads();

        float logit[2], e[2], d[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = 0.0f;
            for (int part = 0; part < WARPS; ++part) sum += sums[part][row][at + i];
            logit[i] = at + i < classes ? sum * (1.0f / W_SCALE) : -infinity();
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
                if (valid ? chosen : at + i == 0) losses[m] = valid ? logf(total) - (logit[i] - largest) : d[i];
                if (at + i >= classes) d[i] = 0.0f;
            }
            if (at < gradient.ld) put<PARTS, T>(gradient, m, at, d[0], d[1]);  // few classes have shorter lines
        }
        __syncthreads();  // the sums are read before the next images' are written
    }
}

template <int PARTS, bool MOMENTUM, typename T = __half>
__global__ void __launch_bounds__(THREADS, 2)
train_mlp_sm80(const unsigned char* __restrict__ images, const long long* __restrict__ labels,
               const long long* __restrict__ order, const float* __restrict__ rates, float* params, float* velocities,
               const unsigned char* __restrict__ mask, float* losses, const Layer* __restrict__ layers, Half* scratch,
               unsigned* arrived, int depth, int rows, int batch, float scale, float shift, float momentum,
               float weight_decay) {
    extern __shared__ __align__(128) char shared[];
    const unsigned stages = shared_address(shared);
    auto* const sums = reinterpret_cast<float(*)[HEAD_ROWS][CLASSES]>(shared);  // in a phase of its own
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
    // Where weight (n, k) is among the parameters, fewer than 2^31: column `inputs` holds the biases.
    const auto place = [](const Layer& l, int n, int k) {
        const int inputs = l.inputs, outputs = l.outputs;
        return static_cast<int>(l.params) + (k < inputs ? n * inputs + k : outputs * inputs + n);
    };

    for (int i = 0; i < depth; ++i) {
        const Layer l = layers[i];
        const Halves copy = copy_of(layers[i]);
        const long long first = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
        for (long long at = 2 * first; at < copy.part; at += 2 * all) {
            const int n = at / copy.ld, k = at % copy.ld;
            const auto weight = [&](int k) { return k <= l.inputs ? params[place(l, n, k)] * W_SCALE : 0.0f; };
            put<PARTS, T>(copy, n, k, weight(k), weight(k + 1));
        }
    }
    gather<PARTS, T>(input_of(layers[0], 0), images, order, min(batch, rows), layers[0].inputs, scale, shift);
    grid_barrier(arrived, target);

    for (int step = 0; step < steps; ++step) {
        const long long first = static_cast<long long>(step) * batch;
        const int count = min(batch, rows - step * batch);
        const float rate = rates[step], mean = 1.0f / (D_SCALE * static_cast<float>(count));

        for (int i = 0; i < depth - 1; ++i) {
            const Halves to = input_of(layers[i + 1], 0);
            const int outputs = layers[i].outputs;
            int turn = blockIdx.x;
            product<PARTS, T, true, true>(
                input_of(layers[i], step % 2), copy_of(layers[i]), count, line(outputs), line(layers[i].inputs), turn,
                stages, [](int, int) { return 0; },
                [&](int m, int n, float a, float b, int) {
                    const auto output = [&](int n, float v) {
                        return n < outputs ? relu_of(v * (1.0f / W_SCALE)) : n == outputs ? 1.0f : 0.0f;
                    };
                    put<PARTS, T>(to, m, n, output(n, a), output(n + 1, b));
                });
            grid_barrier(arrived, target);
        }

        const Layer& last = layers[depth - 1];
        head<PARTS, T>(input_of(last, step % 2), copy_of(last), gradient_of(last), labels, order + first,
                    losses + first, count, last.outputs, sums);
        if (step + 1 < steps)
            gather<PARTS, T>(input_of(layers[0], (step + 1) % 2), images, order + first + batch,
                          min(batch, rows - (step + 1) * batch), layers[0].inputs, scale, shift);
        grid_barrier(arrived, target);

        for (int i = depth - 1; i > 0; --i) {
            const Halves to = gradient_of(layers[i - 1]), y = input_of(layers[i], 0);
            const int width = layers[i].inputs;
            int turn = blockIdx.x;
            product<PARTS, T, true, false>(
                gradient_of(layers[i]), copy_of(layers[i]), count, line(width), layers[i].outputs, turn, stages,
                [&](long long m, int n) { return __ldcg(reinterpret_cast<const unsigned*>(y.data + m * y.ld + n)); },
                [&](int m, int n, float a, float b, unsigned outputs) {
                    const float2 out = floats_of<T>(outputs);
                    put<PARTS, T>(to, m, n, n < width && out.x > 0.0f ? a * (1.0f / W_SCALE) : 0.0f,
                               n + 1 < width && out.y > 0.0f ? b * (1.0f / W_SCALE) : 0.0f);
                });
            grid_barrier(arrived, target);
        }

        int turn = blockIdx.x;
        for (int i = 0; i < depth; ++i) {
            const Layer l = layers[i];
            const Halves copy = copy_of(layers[i]);
            const auto before = [&](int n, int k) {
                Entry e[2];
                for (int i = 0; i < 2; ++i)
                    if (k + i <= l.inputs) {
                        const int at = place(l, n, k + i);
                        e[i] = {__ldcg(params + at), MOMENTUM ? __ldcg(velocities + at) : 0.0f};
                    }
                return Entries{e[0], e[1]};
            };
            const auto moved = [&](int n, int k, float gradient, Entry e) {
                if (k > l.inputs) return 0.0f;
                const int at = place(l, n, k);
                const bool alive = !mask || mask[at];
                float move = fmaf(weight_decay, e.value, gradient * mean);
                if constexpr (MOMENTUM) velocities[at] = move = alive ? fmaf(momentum, e.velocity, move) : 0.0f;
                params[at] = e.value = alive ? fmaf(-rate, move, e.value) : 0.0f;
                return e.value * W_SCALE;
            };
            product<PARTS, T, false, false>(gradient_of(layers[i]), input_of(layers[i], step % 2), l.outputs,
                                         line(l.inputs), count, turn, stages, before,
                                         [&](int n, int k, float a, float b, Entries e) {
                                             const float low = moved(n, k, a, e.low);
                                             put<PARTS, T>(copy, n, k, low, moved(n, k + 1, b, e.high));
                                         });
        }
        grid_barrier(arrived, target);
    }
}
