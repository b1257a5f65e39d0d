// Stochastic gradient descent on a multilayer perceptron with hidden layers, batch after batch, in one cooperative
// launch of clusters: train_mlp_sm80.cu for Hopper and for networks whose weights all multiprocessors together can hold.
//
//   Arguments as there, without a mask. Every block owns at most one tile of 128 x 128 weights; there are blocks enough,
//   also for a group of 16 images each.
//
// The ideas that it adds, outermost first:
//   weights stay           a block's tile of the weights, in float, lies in its shared memory from the first step to the
//                          last. What travels through L2 are halves: the new weights' for the products of all blocks.
//   clusters divide K      the products of the forward and backward pass have few outputs and a long K. Two blocks share
//                          a tile of 64 x 64 outputs, half of K each, and half of the outputs each to finish: so fewer
//                          blocks read an operand than with tiles small enough for one. See common/grid_products_sm90.cuh.
//   the head at once       all blocks that need them compute the logits of their 16 images for themselves, and take the
//                          gradient back to their share of the last hidden layer.
//   nothing waits idly     the head's weights and the images of the next step are on their way before the barriers
//                          behind which they are needed.
// Everything is summed in a fixed order: two runs give the same bits.

#include "common/grid_head_sm90.cuh"

struct Layer {
    long long inputs, outputs;
    long long params;     // place of the weights among all parameters; the biases lie behind them
    long long copy;       // of the halves of the weights, (outputs, line(inputs))
    long long input;      // of the halves of its input, (batch, line(inputs)); the first layer's has two turns
    long long gradient;   // of the halves of the loss's gradient by its output before the ReLU, (batch, line(outputs))
    long long sums;       // of that gradient's sums over GROUP images each, float (groups, line(outputs))
};

// Images on their way, normalised, into the first layer's input: 8 pixels a thread, in three steps, so that what comes
// from far away comes while others work.
struct Gather {
    const unsigned char* images;
    const long long* order;
    int count, inputs, chunks;
    float scale, shift;

    __device__ __forceinline__ long long image(int row) const { return row < count ? order[row] : -1; }

    __device__ __forceinline__ uint2 load(long long image, int chunk) const {
        uint2 raw = {};
        if (image < 0) return raw;
        const int first = chunk * 8;
        const unsigned char* const from = images + image * inputs + first;
        if (inputs % 8 == 0) return *reinterpret_cast<const uint2*>(from);
#pragma unroll 1
        for (int e = 0; e < 8; ++e)
            if (first + e < inputs) (e < 4 ? raw.x : raw.y) |= static_cast<unsigned>(from[e]) << e % 4 * 8;
        return raw;
    }

    template <int PARTS, typename T>
    __device__ __forceinline__ void store(Halves to, int row, int chunk, uint2 raw) const {
        if (row >= count) return;
        unsigned halves[4][PARTS];
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const auto pixel = [&](int e) {
                const unsigned p = (e < 4 ? raw.x : raw.y) >> e % 4 * 8 & 255;
                return chunk * 8 + e < inputs ? fmaf(static_cast<float>(p), scale, shift) : 0.0f;
            };
            split<PARTS, T>(pixel(e), pixel(e + 1), halves[e / 2]);
        }
#pragma unroll
        for (int of = 0; of < PARTS; ++of)
            *reinterpret_cast<uint4*>(to.data + of * to.part + static_cast<long long>(row) * to.ld + chunk * 8) = {
                halves[0][of], halves[1][of], halves[2][of], halves[3][of]};
    }
};

// Who takes which images' head in a batch of `count`, and of the layer below it which share of its columns, 16 to a unit.
struct Plan {
    int count, heads, group, part, begin, end;
    bool working;
};

template <int PARTS, bool MOMENTUM, typename T = __half>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
train_mlp_grid_sm90(const unsigned char* __restrict__ images, const long long* __restrict__ labels,
                    const long long* __restrict__ order, const float* __restrict__ rates, float* params,
                    float* velocities, float* losses, const Layer* __restrict__ given, Half* scratch, unsigned* arrived,
                    int depth, int rows, int batch, float scale, float shift, float momentum, float weight_decay) {
    extern __shared__ __align__(1024) char shared[];
    // The block's weights, and their velocities: each thread's behind one another, so that neither bank conflicts.
    float4* const master = reinterpret_cast<float4*>(shared + STAGES_BYTES);
    float4* const speed = master + WEIGHTS / 4;
    auto* const received = reinterpret_cast<unsigned long long*>(master + WEIGHTS / 4 * (1 + MOMENTUM));
    Layer* const layers = reinterpret_cast<Layer*>(received + 2);  // the table, near
    const int steps = (rows + batch - 1) / batch;
    unsigned target = 0;
    Exchange exchange(received);
    if (threadIdx.x < depth) layers[threadIdx.x] = given[threadIdx.x];
    __syncthreads();
    cluster_sync();

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
    C block;
    const int m_warp = C::m_warp(), n_warp = C::n_warp();
    block.m0 = own_tile / across * C::BM, block.n0 = own_tile % across * C::BN, block.begin = 0;
    // f(j, row, column) for each tile of this warp's 16 x 8 weights: the thread has two columns there and 8 rows below.
    const auto each_weight = [&](auto f) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < C::COLUMNS / 8; ++j)
            f(j, block.m0 + m_warp + lane / 4, block.n0 + n_warp + j * 8 + lane % 4 * 2);
    };
    const auto place = [&](int j) { return j * THREADS + threadIdx.x; };
    const auto load_tile = [&](float4* to, const float* from) {
        each_weight([&](int j, int m, int n) {
            const auto at = [&](int m, int n) {
                return m < outputs && n < inputs ? from[mine.params + static_cast<long long>(m) * inputs + n] : 0.0f;
            };
            to[place(j)] = {at(m, n), at(m, n + 1), at(m + 8, n), at(m + 8, n + 1)};
        });
    };
    const auto store_tile = [&](float* to, const float4* from) {
        each_weight([&](int j, int m, int n) {
            const auto at = [&](int m, int n, float v) {
                if (m < outputs && n < inputs) to[mine.params + static_cast<long long>(m) * inputs + n] = v;
            };
            const float4 v = from[place(j)];
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
        each_weight([&](int j, int m, int n) { publish(m, n, master[place(j)]); });
    }
    const Gather first_images = gather_of(0, min(batch, rows));
    for (int i = thread; i < first_images.count * first_images.chunks; i += threads) {
        const int row = i / first_images.chunks, chunk = i % first_images.chunks;
        first_images.store<PARTS, T>(input_of(layers[0], 0), row, chunk,
                                     first_images.load(first_images.image(row), chunk));
    }
    Half* const head_weights = reinterpret_cast<Half*>(shared + HEAD_SUMS + PARTS * GROUP * (CLASSES + 8) * 2);
    const int own_row = thread / first_images.chunks, own_chunk = thread % first_images.chunks;
    grid_barrier(arrived, target);

    // The image of a batch whose chunk this thread gathers, and the one whose head it takes.
    const auto own_image_of = [&](int step) {
        return gather_of(static_cast<long long>(step) * batch, min(batch, rows - step * batch)).image(own_row);
    };
    const auto plan_of = [&](int count) {
        const int heads = (count + GROUP - 1) / GROUP, shares = gridDim.x / heads;
        const int group = blockIdx.x % heads, part = blockIdx.x / heads;
        const int units = (line(layers[depth - 1].inputs) + 15) / 16, each = (units + shares - 1) / shares;
        return Plan{count, heads, group, part, part * each, min(units, (part + 1) * each), part < shares};
    };
    Plan plan = plan_of(min(batch, rows));
    const auto head_image_of = [&](int step) {
        const int count = min(batch, rows - step * batch);
        if (threadIdx.x >= GROUP * 8 || count <= 0) return -1LL;
        const int group = count == plan.count ? plan.group : blockIdx.x % ((count + GROUP - 1) / GROUP);
        const int m = group * GROUP + threadIdx.x / 8;
        return m < count ? order[static_cast<long long>(step) * batch + m] : -1LL;
    };
    long long own_image = own_image_of(1), head_image = head_image_of(0);

    for (int step = 0; step < steps; ++step) {
        const long long first = static_cast<long long>(step) * batch;
        const int count = min(batch, rows - step * batch);
        const float rate = rates[step], mean = 1.0f / (D_SCALE * static_cast<float>(count));

        if (count != plan.count) plan = plan_of(count);
        // Images and labels are loaded long before they are needed, and which ones they are a step before that.
        const Gather next = gather_of(first + batch, max(0, min(batch, rows - (step + 1) * batch)));
        long long label = head_image >= 0 ? labels[head_image] : 0;
        uint2 raw = next.load(own_image, own_chunk);
        head_image = head_image_of(step + 1), own_image = own_image_of(step + 2);
        // Here, not where they are used:
        asm volatile("" : "+l"(label), "+l"(head_image), "+l"(own_image), "+r"(raw.x), "+r"(raw.y));

        for (int i = 0; i < depth - 1; ++i) {
            const Halves to = input_of(layers[i + 1], 0);
            const int width = layers[i].outputs;
            const float* const bias = params + layers[i].params + layers[i].inputs * layers[i].outputs;
            product<PARTS, T, true, false>(
                input_of(layers[i], step % 2), copy_of(layers[i]), count, line(width), layers[i].inputs, shared,
                exchange, nullptr,
                [&](int, int n) {
                    return float2{n < width ? __ldcg(bias + n) : 0.0f, n + 1 < width ? __ldcg(bias + n + 1) : 0.0f};
                },
                [&](int m, int n, float a, float b, float2 bias) {
                    put<PARTS, T>(to, m, n, n < width ? relu_of(fmaf(a, 1.0f / W_SCALE, bias.x)) : 0.0f,
                               n + 1 < width ? relu_of(fmaf(b, 1.0f / W_SCALE, bias.y)) : 0.0f);
                    return float2{};
                });
            if (i == depth - 2 && plan.working)
                fetch_head<PARTS>(copy_of(layers[depth - 1]), layers[depth - 1].outputs, head_weights);
            grid_arrive(arrived, target);
            if (i == depth - 2) next.store<PARTS, T>(input_of(layers[0], (step + 1) % 2), own_row, own_chunk, raw);
            grid_wait(arrived, target);
        }

        const Layer& last = layers[depth - 1];
        if (plan.working)
            head<PARTS, T>(input_of(last, 0), gradient_of(last), gradient_of(layers[depth - 2]), sums_of(last),
                           sums_of(layers[depth - 2]), params + last.params + last.inputs * last.outputs, label,
                           losses + first, plan.group * GROUP, count, last.outputs, plan.part, plan.begin, plan.end,
                           shared, head_weights);
        for (int i = thread + threads; i < next.count * next.chunks; i += threads) {
            const int row = i / next.chunks, chunk = i % next.chunks;
            next.store<PARTS, T>(input_of(layers[0], (step + 1) % 2), row, chunk, next.load(next.image(row), chunk));
        }
        grid_barrier(arrived, target);

        for (int i = depth - 2; i > 0; --i) {
            const Halves to = gradient_of(layers[i - 1]), y = input_of(layers[i], 0);
            const int width = layers[i].inputs;
            product<PARTS, T, false, true>(
                gradient_of(layers[i]), copy_of(layers[i]), count, line(width), layers[i].outputs, shared,
                exchange, sums_of(layers[i - 1]),
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
                const bool inside = with_bias && n < outputs && group < plan.heads;
                return inside ? __ldcg(sums_of(layers[own]) + static_cast<long long>(group) * line(outputs) + n) : 0.0f;
            };
            constexpr int AHEAD = 8;
            float ahead[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) ahead[i] = sum_at(half + 2 * i);
            const bool moves_bias = with_bias && threadIdx.x < C::BM && n < outputs;
            const long long bias_at = mine.params + static_cast<long long>(outputs) * inputs + n;
            float bias = moves_bias ? __ldcg(params + bias_at) : 0.0f;
            float bias_speed = MOMENTUM && moves_bias ? velocities[bias_at] : 0.0f;

            float acc[1][C::SUMS];
            block.count = (count + BK - 1) / BK, block.end = count;
            multiply_all<PARTS, T, false, false>(acc, block, gradient_of(layers[own]), input_of(layers[own], step % 2),
                                                 outputs, line(inputs), shared);
            const auto moved = [&](float w, float& velocity, float gradient) {
                float move = fmaf(weight_decay, w, gradient * mean);
                if constexpr (MOMENTUM) velocity = move = fmaf(momentum, velocity, move);
                return fmaf(-rate, move, w);
            };
            // The halves of the new weights leave in whole lines.
            constexpr int PITCH = C::BN + 8;
            Half* const lines = reinterpret_cast<Half*>(shared);  // (PARTS, BM, PITCH)
            each_weight([&](int j, int m, int n) {
                const float* const sum = &acc[0][j * 4];
                float4 w = master[place(j)], v = MOMENTUM ? speed[place(j)] : float4{};
                w = {moved(w.x, v.x, sum[0]), moved(w.y, v.y, sum[1]), moved(w.z, v.z, sum[2]), moved(w.w, v.w, sum[3])};
                const bool low = n < inputs, high = n + 1 < inputs;
                w = {low ? w.x : 0.0f, high ? w.y : 0.0f, low ? w.z : 0.0f, high ? w.w : 0.0f};
                master[place(j)] = w;
                if constexpr (MOMENTUM) speed[place(j)] = v;
                const Halves tile = {lines, PITCH, C::BM * PITCH};
                put<PARTS, T>(tile, m - block.m0, n - block.n0, w.x * W_SCALE, w.y * W_SCALE);
                put<PARTS, T>(tile, m - block.m0 + 8, n - block.n0, w.z * W_SCALE, w.w * W_SCALE);
            });
            float* const totals = reinterpret_cast<float*>(lines + PARTS * C::BM * PITCH);
            if (with_bias) {
                float total = 0.0f;
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) total += ahead[i];
                for (int group = half + 2 * AHEAD; group < plan.heads; group += 2) total += sum_at(group);
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
            if (moves_bias) {
                params[bias_at] = moved(bias, bias_speed, totals[threadIdx.x] + totals[C::BM + threadIdx.x]);
                if constexpr (MOMENTUM) velocities[bias_at] = bias_speed;
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
