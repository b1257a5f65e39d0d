// Stochastic gradient descent on a network 784-H-G-C with two hidden layers, H <= 512, G <= 160, C <= 16, in one launch:
// train_mlp_sm90.cu with one layer more. Arguments as there, without velocities.
//
//   first layer            as there, but a block owns 32 of its hidden units: their rows of w1, in the registers of 14
//                          warps, and their columns of w2.
//   two exchanges a step   a block's units give it a share of the second layer's sums of every image. It sends those of
//                          image m to block m / 4, which adds up the shares, finishes the second layer and the head of
//                          its four images and sends both, the second layer and the gradient by the logits, to
//                          everybody. All blocks then know all that the gradients of w2 and w3 are made of. Who has
//                          received all shares knows that everybody has left the last images, and fetches its four of
//                          the next for all.
//   beside the sweep       while 14 warps sweep, two move the block's columns of w2, whose floats lie in shared memory,
//                          and its own copy of w3, which lies in their registers.
//   one place, two uses    the images of a batch make room, when it is done, for the sums of the sweep, and these for
//                          the images of the batch after the next.
//   halves                 are what products read, see common/halves.cuh, and what the shares of the second layer's
//                          sums travel as.
// Everything is summed in a fixed order: two runs give the same bits.

#include "common/two_steps_sm90.cuh"

// --- beside the sweep: what one of two warps moves ----------------------------------------------------------------

// Its half of this block's columns of w2, 16 units, and every second tile of b2.
__device__ __forceinline__ void move_second(Shared& shared, int lane, int half, int width, float mean, float rate,
                                            float weight_decay) {
    const int g = lane / 4, t = lane % 4;
    constexpr unsigned ONE = 0x3c003c00;
    unsigned b[SLICES][4];
#pragma unroll
    for (int q = 0; q < SLICES; ++q)
        load_matrices<true>(b[q],
                            shared_address(shared.hidden + swizzled<64>(q * 16 + lane % 16, half * 2 + lane / 16)));
    unsigned a[SLICES][4];
    const auto load = [&](int first) {
#pragma unroll
        for (int q = 0; q < SLICES; ++q)
            load_transposed(a[q], lane, [&](int k, int half) {
                return shared_address(&shared.d_second[q * 16 + k][first + half * 8]);
            });
    };
    load(0);
#pragma unroll 1
    for (int first = 0; first < width; first += 16) {
        float4* const place = &shared.w2_floats[half][first / 16][0][lane];
        float4 w[2] = {place[0], place[WARP]};
        float sums[2][4] = {}, by_b[4] = {};
        const bool with_bias = first / 16 % 2 == half;
#pragma unroll
        for (int q = 0; q < SLICES; ++q)
#pragma unroll
            for (int j = 0; j < 2; ++j) mma<__half>(sums[j], a[q], b[q][2 * j], b[q][2 * j + 1]);
        if (with_bias)
#pragma unroll
            for (int q = 0; q < SLICES; ++q) mma<__half>(by_b, a[q], ONE, ONE);
        if (first + 16 < width) load(first + 16);  // before what follows is stored
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            descend(w[j].x, sums[j][0] * mean, rate, weight_decay);
            descend(w[j].y, sums[j][1] * mean, rate, weight_decay);
            descend(w[j].z, sums[j][2] * mean, rate, weight_decay);
            descend(w[j].w, sums[j][3] * mean, rate, weight_decay);
            place[j * WARP] = w[j];
            unsigned char* const line = shared.w2_at(first + g, half * 2 + j) + t * 4;
            *reinterpret_cast<unsigned*>(line) = halves(w[j].x * W_SCALE, w[j].y * W_SCALE);
            *reinterpret_cast<unsigned*>(line + 8 * 64) = halves(w[j].z * W_SCALE, w[j].w * W_SCALE);
        }
        if (with_bias && t == 0) {
            descend(shared.b2[first + g], by_b[0] * mean, rate, weight_decay);
            descend(shared.b2[first + g + 8], by_b[2] * mean, rate, weight_decay);
        }
    }
}

// Its half of w3, classes x columns in mma's layout of sums, every second tile of 8 columns; the first one b3 too.
struct Head {
    static constexpr int COUNT = WIDTH / 16;
    float4 w[COUNT];

    template <typename F> __device__ __forceinline__ static void each(int half, int width, F f) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if ((2 * i + half) * 8 < width) f(i, (2 * i + half) * 8);
    }

    // Where its floats lie in memory, (classes, width) without gaps; f(value, place).
    template <typename F>
    __device__ __forceinline__ void in_memory(int lane, int half, int width, int classes, int second_units, F f) {
        const int g = lane / 4, t = lane % 4;
        each(half, width, [&](int i, int first) {
            const auto at = [&](int k, int column, float& v) {
                if (k < classes && column < second_units) f(v, k * second_units + column);
            };
            const int column = first + 2 * t;
            at(g, column, w[i].x), at(g, column + 1, w[i].y), at(g + 8, column, w[i].z), at(g + 8, column + 1, w[i].w);
        });
    }

    __device__ __forceinline__ void move(Shared& shared, int lane, int half, int width, float mean, float rate,
                                         float weight_decay) {
        const int g = lane / 4, t = lane % 4;
        constexpr unsigned ONE = 0x3c003c00;
        unsigned a[SLICES][4];
#pragma unroll
        for (int q = 0; q < SLICES; ++q)
            load_transposed(a[q], lane, [&](int k, int half) {
                return shared_address(&shared.d_logits[q * 16 + k][half * 8]);
            });
        if (half == 0) {
            float by_b[4] = {};
#pragma unroll
            for (int q = 0; q < SLICES; ++q) mma<__half>(by_b, a[q], ONE, ONE);
            if (t == 0) {
                descend(shared.b3[g], by_b[0] * mean, rate, weight_decay);
                descend(shared.b3[g + 8], by_b[2] * mean, rate, weight_decay);
            }
        }
        // Beyond the width, too: nobody reads what comes of it.
        unsigned b[2][SLICES / 2][4];
        const auto load = [&](int i) {
#pragma unroll
            for (int q = 0; q < SLICES / 2; ++q)
                load_matrices<true>(b[i % 2][q], shared_address(&shared.second[q * 32 + lane][(2 * i + half) * 8]));
        };
        load(0);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i % 2 == 0) asm volatile("" : "+r"(lane));  // else all addresses wait in registers
            const int first = (2 * i + half) * 8;
            if (i + 1 < COUNT) load(i + 1);  // before this tile is stored
            float sum[4] = {};
#pragma unroll
            for (int q = 0; q < SLICES / 2; ++q) {
                mma<__half>(sum, a[2 * q], b[i % 2][q][0], b[i % 2][q][1]);
                mma<__half>(sum, a[2 * q + 1], b[i % 2][q][2], b[i % 2][q][3]);
            }
            descend(w[i].x, sum[0] * mean, rate, weight_decay), descend(w[i].y, sum[1] * mean, rate, weight_decay);
            descend(w[i].z, sum[2] * mean, rate, weight_decay), descend(w[i].w, sum[3] * mean, rate, weight_decay);
            // Turned, a lane has two classes of one column.
            reinterpret_cast<unsigned*>(shared.w3_at(first + g, 0))[t] =
                transposed(halves(w[i].x * W_SCALE, w[i].y * W_SCALE));
            reinterpret_cast<unsigned*>(shared.w3_at(first + g, 1))[t] =
                transposed(halves(w[i].z * W_SCALE, w[i].w * W_SCALE));
        }
    }
};

// --- the kernel ---------------------------------------------------------------------------------------------------

__global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
train_mlp_two_sm90(const unsigned char* __restrict__ images, const long long* __restrict__ labels,
                   const long long* __restrict__ order, const float* __restrict__ rates, float* w1, float* b1, float* w2,
                   float* b2, float* w3, float* b3, float* losses, int rows, int batch, int units, int second_units,
                   int classes, float scale, float shift, int centre, float weight_decay) {
    extern __shared__ __align__(128) char dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    // By a shuffle the compiler knows that a warp's number is uniform, and keeps what follows out of the registers.
    const int warp = __shfl_sync(~0u, threadIdx.x / WARP, 0);
    int lane = threadIdx.x % WARP;
    const int rank = cluster_rank(), first_unit = rank * UNITS;
    const int steps = (rows + batch - 1) / batch, active = (units + UNITS - 1) / UNITS;
    const int width = (second_units + ROUND - 1) / ROUND * ROUND;
    const __half2 zero = __half2half2(__int2half_rn(1024 + centre));
    const float rest = fmaf(static_cast<float>(centre), scale, shift);  // a pixel is (p - centre) * scale + rest
    const unsigned sums_bytes = active * ROWS * width * 2, second_bytes = BATCH * (width + CLASSES) * 2;

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) mbarrier_init(&shared.images_full[i], 1);
        mbarrier_init(&shared.sums_full, 1 + BLOCKS - active);
        mbarrier_init(&shared.second_full, 1);
        mbarrier_init_fence();
        mbarrier_expect_bytes(&shared.sums_full, sums_bytes);
        mbarrier_expect_bytes(&shared.second_full, second_bytes);
    }
    const auto put = [](void* to, float v) {
        *static_cast<unsigned short*>(to) = static_cast<unsigned short>(halves(v * W_SCALE, 0.0f));
    };
    for (int i = threadIdx.x; i < width * UNITS; i += THREADS) {
        const int row = i / UNITS, unit = i % UNITS;
        const bool inside = row < second_units && first_unit + unit < units;
        const float v = inside ? w2[row * units + first_unit + unit] : 0.0f;
        put(shared.w2_at(row, unit / 8) + unit % 8 * 2, v);
        float4& place = shared.w2_floats[unit / 16][row / 16][unit / 8 % 2][row % 8 * 4 + unit % 8 / 2];
        reinterpret_cast<float*>(&place)[row / 8 % 2 * 2 + unit % 2] = v;
    }
    for (int i = threadIdx.x; i < width * CLASSES; i += THREADS) {
        const int row = i / CLASSES, k = i % CLASSES;
        put(shared.w3_at(row, k / 8) + k % 8 * 2, row < second_units && k < classes ? w3[k * second_units + row] : 0.0f);
    }
    for (int i = threadIdx.x; i < UNIT_TILES * SLICES * WARP; i += THREADS) (&shared.d_hidden[0][0][0])[i] = {};
    for (int i = threadIdx.x; i < UNIT_TILES * TILES * 16; i += THREADS) (&shared.d_hidden_sums[0][0][0])[i] = 0.0f;
    for (int i = threadIdx.x; i < width; i += THREADS) shared.b2[i] = i < second_units ? b2[i] : 0.0f;
    if (threadIdx.x < CLASSES) shared.b3[threadIdx.x] = threadIdx.x < classes ? b3[threadIdx.x] : 0.0f;
    if (threadIdx.x < UNITS)
        shared.b1[threadIdx.x] = first_unit + threadIdx.x < units ? b1[first_unit + threadIdx.x] : 0.0f;
    __syncthreads();
    cluster_sync();

    const int unit_tile = warp / TILES, tile = warp % TILES;  // of the hidden layer
    const int row = warp / 4, quarter = warp % 4;             // of the block's images
    // All warps, from the sums of a sweep to the gradient before the ReLU.
    const auto between = [&](int step) {
        __syncthreads();  // the sums are whole, w2 and w3 have moved
        asm volatile("" : "+r"(lane));  // else all addresses of a step are computed once, and fill the registers
        const int count = min(batch, rows - step * batch), parity = step % 2;
        const uint2 y = finish_hidden(shared, lane, shared.stages[(step + 1) % 2].hidden_shares[unit_tile],
                                         unit_tile, tile);
        __syncthreads();
        if (rank < active) share_second(shared, lane, warp, width);
        else if (threadIdx.x < BLOCKS) mbarrier_arrive_at(&shared.sums_full, threadIdx.x);
        mbarrier_wait(&shared.sums_full, parity);
        fetch(shared, lane, warp, images, step + 1, min(batch, rows - (step + 1) * batch));  // where the sums were
        finish_second(shared, lane, row, quarter, width, active);
        if (quarter != row) {  // the warps that go on share no scheduler
            barrier_arrive(1 + row, 4 * WARP);
        } else {
            barrier_sync(1 + row, 4 * WARP);
            const int image = rank * ROWS + row;
            finish_logits(shared, lane, row, width, image < count, shared.labels[step % 3][row], classes,
                          losses + static_cast<long long>(step) * batch + image);
        }
        send_second(shared, lane, row, quarter, width);
        mbarrier_wait(&shared.second_full, parity);
        second_gradient(shared, lane, warp, width);
        __syncthreads();
        if (threadIdx.x == 0) {
            mbarrier_expect_bytes(&shared.sums_full, sums_bytes);
            mbarrier_expect_bytes(&shared.second_full, second_bytes);
        }
        tile_gradient(shared, lane, width, unit_tile, tile, y);
        __syncthreads();
    };

    Announcer announcer(shared, labels, order, warp == WARPS - 1 ? rows : 0, batch);
    if (warp == WARPS - 1) announcer.announce();
    __syncthreads();
    fetch(shared, lane, warp, images, 0, min(batch, rows));
    __syncthreads();
    if (warp == WARPS - 1) announcer.announce();

    if (warp < SWEEPERS) {
        const int own_tile = warp / PARTITION, part = warp % PARTITION, first_pixel = part * GROUPS * 16;
        const int own_unit = first_unit + own_tile * 16;
        Weights weights;
        Gradient gradient;
        // The forward pass of the images in `next`, and before it the backward pass of those in `stage`, whose place the
        // sums take.
        const auto sweep_all = [&](Shared::Stage& stage, const Shared::Stage& next) {
            float hidden[TILES / PASSES][4];
            sweep<true>(weights, gradient, stage.images, next.images, hidden, 0, zero, first_pixel, lane);
            float rows[2] = {};
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                for (int i = 0; i < 8; ++i) rows[i / 4] += weights.w[j][i];
            const float by = scale / W_SCALE, low = rest / W_SCALE * quad_sum(rows[0]);
            const float high = rest / W_SCALE * quad_sum(rows[1]);
            const auto store = [&](int first) {
#pragma unroll
                for (int i = 0; i < TILES / PASSES; ++i)
                    stage.hidden_shares[own_tile][part][first + i][lane] = {
                        fmaf(hidden[i][0], by, low), fmaf(hidden[i][1], by, low), fmaf(hidden[i][2], by, high),
                        fmaf(hidden[i][3], by, high)};
            };
            barrier_sync(1 + ROWS, SWEEPERS * WARP);  // the images there are read
            store(0);
#pragma unroll
            for (int pass = 1; pass < PASSES; ++pass) {
#pragma unroll
                for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                    for (int i = 0; i < 8; ++i)  // else the operands of the first pass wait in registers for the others
                        asm volatile("" : "+f"(weights.w[j][i]));
                sweep<false>(weights, gradient, stage.images, next.images, hidden, pass * (BATCH / PASSES), zero,
                                first_pixel, lane);
                store(pass * (TILES / PASSES));
            }
            fence_proxy_async();  // before the copy engine writes there
        };
        // f(group, entry, where it is in memory) for each four entries of a sweeper's share of w1.
        const auto each_w1 = [&](auto f) {
            const int unit = own_unit + lane / 4;
            int first = unit * INPUTS + first_pixel + lane % 4 * 4;
            asm volatile("" : "+r"(first));  // else the addresses of the first time wait in registers for the second
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
#pragma unroll
                for (int i = 0; i < 8; i += 4) f(j, i, unit + i * 2 < units ? first + i * 2 * INPUTS + j * 16 : -1);
        };
        each_w1([&](int j, int i, int at) {
            const float4 v = at < 0 ? float4{} : *reinterpret_cast<const float4*>(w1 + at);
            float* const to = &weights.w[j][i];
            to[0] = v.x * W_SCALE, to[1] = v.y * W_SCALE, to[2] = v.z * W_SCALE, to[3] = v.w * W_SCALE;
        });
        // Before the first batch nothing moves: its gradient is zero.
        for (int step = -1; step < steps; ++step) {
            if (step >= 0) between(step);
            const int count = min(batch, rows - step * batch), g = lane / 4;
            const float mean = 1.0f / (D_SCALE * static_cast<float>(count)), rate = step < 0 ? 0.0f : rates[step];
            float2 sums = {};
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                sums.x += shared.d_hidden_sums[own_tile][i][g], sums.y += shared.d_hidden_sums[own_tile][i][g + 8];
            const float by = -rate * mean * W_SCALE;
            gradient.d = shared.d_hidden[own_tile];
            gradient.keep = fmaf(-rate, weight_decay, 1.0f), gradient.factor = by * scale;
            gradient.offset[0] = by * rest * sums.x, gradient.offset[1] = by * rest * sums.y;
            if (part == 0 && lane % 4 == 0) {
                descend(shared.b1[own_tile * 16 + g], sums.x * mean, rate, weight_decay);
                descend(shared.b1[own_tile * 16 + g + 8], sums.y * mean, rate, weight_decay);
            }
            // After the last step the forward pass is of what is left of older batches, and nobody reads it.
            if (step + 1 < steps) mbarrier_wait(&shared.images_full[(step + 1) % 2], (step + 1) / 2 % 2);
            sweep_all(shared.stages[(step + 2) % 2], shared.stages[(step + 1) % 2]);
        }

        each_w1([&](int j, int i, int at) {
            constexpr float BACK = 1.0f / W_SCALE;
            const float* const from = &weights.w[j][i];
            if (at >= 0)
                *reinterpret_cast<float4*>(w1 + at) = {from[0] * BACK, from[1] * BACK, from[2] * BACK, from[3] * BACK};
        });
    } else {
        const int half = warp - SWEEPERS;
        Head head = {};
        head.in_memory(lane, half, width, classes, second_units, [&](float& v, int at) { v = w3[at]; });
        for (int step = 0; step < steps; ++step) {
            between(step);
            if (half == 1) announcer.announce();
            const int count = min(batch, rows - step * batch);
            const float mean = 1.0f / (D_SCALE * static_cast<float>(count)), rate = rates[step];
            move_second(shared, lane, half, width, mean, rate, weight_decay);
            head.move(shared, lane, half, width, mean, rate, weight_decay);
        }
        cluster_sync();  // all blocks have read the first w3
        if (rank == 0)
            head.in_memory(lane, half, width, classes, second_units, [&](float& v, int at) { w3[at] = v; });
    }
    if (warp < SWEEPERS) cluster_sync();
    __syncthreads();
    if (threadIdx.x < UNITS && first_unit + threadIdx.x < units) b1[first_unit + threadIdx.x] = shared.b1[threadIdx.x];
    for (int i = threadIdx.x; i < width * UNITS; i += THREADS) {
        const int row = i / UNITS, unit = i % UNITS;
        const float4& place = shared.w2_floats[unit / 16][row / 16][unit / 8 % 2][row % 8 * 4 + unit % 8 / 2];
        if (row < second_units && first_unit + unit < units)
            w2[row * units + first_unit + unit] = reinterpret_cast<const float*>(&place)[row / 8 % 2 * 2 + unit % 2];
    }
    if (rank == 0) {
        for (int i = threadIdx.x; i < second_units; i += THREADS) b2[i] = shared.b2[i];
        if (threadIdx.x < classes) b3[threadIdx.x] = shared.b3[threadIdx.x];
    }
    cluster_sync();  // a block's memory is there until all that was sent to it has arrived
}
