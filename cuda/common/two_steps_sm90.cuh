// The phases of a step of train_mlp_two_sm90.cu, which tells the ideas.
#pragma once
#include "pixels.cuh"
#include "sm90.cuh"

constexpr int WARP = 32;
constexpr int BLOCKS = 16, UNITS = 32, CLASSES = 16, BATCH = 64, INPUTS = 784;
constexpr int WARPS = 16, THREADS = WARPS * WARP;
constexpr int UNIT_TILES = UNITS / 16;               // of 16 hidden units, the M of one mma
constexpr int PARTITION = 7;                         // of the pixels, by warps
constexpr int SWEEPERS = UNIT_TILES * PARTITION;     // warps that own weights; the last two move w2
constexpr int GROUPS = INPUTS / 16 / PARTITION;      // of 16 pixels, the K of one mma
constexpr int TILES = BATCH / 8;                     // of 8 images, the N of one mma
constexpr int PASSES = 4;                            // over the weights in the forward pass, 16 images each
constexpr int SLICES = BATCH / 16;                   // of 16 images: K in the gradients' products
constexpr int ROWS = BATCH / BLOCKS;                 // images that a block finishes, by four warps each
constexpr int WIDTH = 160, ROUND = 32;               // the second layer's largest width, and what it is rounded up to
constexpr int SHARED_BYTES = 227 * 1024;
static_assert(PARTITION * GROUPS * 16 == INPUTS, "the sweepers' pixels are all pixels");
static_assert(UNIT_TILES * TILES == WARPS, "each warp adds up one tile of the hidden layer");

struct Shared {
    union Stage {
        unsigned char images[BATCH][INPUTS];
        float4 hidden_shares[UNIT_TILES][PARTITION][TILES][WARP];  // in the layout of mma's sums
    };
    alignas(128) Stage stages[2];
    alignas(128) unsigned char hidden[BATCH * UNITS * 2];  // images x units, swizzled lines of 64 bytes
    alignas(128) unsigned char w2[WIDTH * UNITS * 2];      // columns x units, likewise: times W_SCALE
    float4 w2_floats[2][WIDTH / 16][2][WARP];              // the same, in the layout of mma's sums
    alignas(16) unsigned short second[BATCH][WIDTH + 8];   // the second layer, and its gradient before the ReLU
    alignas(16) unsigned short d_second[BATCH][WIDTH + 8];
    alignas(16) unsigned short w3[WIDTH][CLASSES];         // times W_SCALE
    alignas(16) __half sums[BLOCKS][ROWS][WIDTH];          // the blocks' shares of the second layer
    uint4 d_hidden[UNIT_TILES][SLICES][WARP];              // the gradient before the first ReLU, as operands of mma
    float d_hidden_sums[UNIT_TILES][TILES][16];
    alignas(16) unsigned short d_logits[BATCH][CLASSES];
    alignas(16) unsigned short rows[ROWS][WIDTH];          // of the second layer, before they are sent
    alignas(16) unsigned short d_rows[ROWS][CLASSES];
    float logits[ROWS][4][CLASSES];
    alignas(16) float b1[UNITS], b2[WIDTH], b3[CLASSES];
    int labels[3][ROWS];
    unsigned long long images_full[2], sums_full, second_full;

    // The chunk of 16 bytes with units 8 `chunk` and up.
    __device__ __forceinline__ unsigned char* w2_at(int row, int chunk) { return w2 + swizzled<64>(row, chunk); }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host asks for SHARED_BYTES");

__device__ __forceinline__ unsigned halves(float a, float b) {
    unsigned parts[1];
    split<1>(a, b, parts);
    return parts[0];
}

__device__ __forceinline__ void descend(float& w, float gradient, float rate, float weight_decay) {
    w = fmaf(-rate, fmaf(weight_decay, w, gradient), w);
}

// --- the sweep: see train_mlp_sm90.cu -----------------------------------------------------------------------------

struct Weights {
    float w[GROUPS][8];
};

struct Gradient {
    const uint4 (*d)[WARP];
    float keep, factor, offset[2];   // a weight becomes itself times `keep`, plus its sum times `factor`, plus `offset`
};

__device__ __forceinline__ unsigned image_address(const unsigned char (&images)[BATCH][INPUTS], int lane, int pixel) {
    return shared_address(&images[lane][pixel]);
}

__device__ __forceinline__ void pixel_gradient(float (&sums)[8], const Gradient& gradient, unsigned at,
                                               __half2 zero, int lane) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned raw[4];
        load_matrices<true>(raw, at + half * (BATCH / 2 * INPUTS));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned b[2] = {raw[2 * k], raw[2 * k + 1]};
            const unsigned even0 = pixels<__half, 0x4240>(b[0], zero), even1 = pixels<__half, 0x4240>(b[1], zero);
            const unsigned odd0 = pixels<__half, 0x4341>(b[0], zero), odd1 = pixels<__half, 0x4341>(b[1], zero);
            const uint4 v = gradient.d[2 * half + k][lane];
            const unsigned d[4] = {v.x, v.y, v.z, v.w};
            mma<__half>(even, d, even0, even1);
            mma<__half>(odd, d, odd0, odd1);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = i % 2 ? odd[i / 2] : even[i / 2];
}

// Move w1 by the gradient of one batch (BACKWARD), then start the forward pass of the next with it: `hidden` gets the
// sums of pixel times weight (times W_SCALE) for the images of a pass, from `first_image` on.
template <bool BACKWARD>
__device__ __forceinline__ void sweep(Weights& weights, const Gradient& gradient,
                                      const unsigned char (&batch)[BATCH][INPUTS],
                                      const unsigned char (&next)[BATCH][INPUTS], float (&hidden)[TILES / PASSES][4],
                                      int first_image, __half2 zero, int first_pixel, int lane) {
#pragma unroll
    for (int i = 0; i < TILES / PASSES; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) hidden[i][c] = 0.0f;

    unsigned raw[4];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        float(&w)[8] = weights.w[j];
        if constexpr (BACKWARD) {
            float sums[8];
            pixel_gradient(sums, gradient, image_address(batch, lane, first_pixel + j * 16), zero, lane);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                w[i] = fmaf(sums[i], gradient.factor, fmaf(w[i], gradient.keep, gradient.offset[i / 4]));
        }
        unsigned operand[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) operand[i] = halves(w[i % 2 * 4 + i / 2 * 2], w[i % 2 * 4 + i / 2 * 2 + 1]);
        // 16 images of two groups at once; the second group of the last load is nobody's.
        if (j % 2 == 0)
            load_matrices<false>(
                raw, image_address(next, first_image + lane % 16, first_pixel + (j + lane / 16) * 16));
#pragma unroll
        for (int k = 0; k < TILES / PASSES; ++k) {
            const unsigned bytes = raw[j % 2 * 2 + k];
            mma<__half>(hidden[k], operand, pixels<__half, 0x4140>(bytes, zero), pixels<__half, 0x4342>(bytes, zero));
        }
    }
}

// --- images -------------------------------------------------------------------------------------------------------

// Fetches all images of batch after batch by the copy engine, and the labels of those that this block finishes. Which
// come is loaded ahead, so that a call waits for nothing.
struct Fetcher {
    Shared& shared;
    const unsigned char* images;
    const long long *labels, *order;
    int rows, batch, next = 0;
    long long now[2], own;  // images of the batch `next`, and, a batch ahead of it, the one with this lane's label
    int label;              // in the batch `next`

    __device__ __forceinline__ long long image(int step, int row) const {
        const long long at = static_cast<long long>(step) * batch + row;
        return row < batch && at < rows ? order[at] : -1;
    }

    __device__ __forceinline__ long long own_image(int step) const {
        const int lane = threadIdx.x % WARP;
        return lane < ROWS ? image(step, cluster_rank() * ROWS + lane) : -1;
    }

    __device__ __forceinline__ void look_ahead() {
        const int lane = threadIdx.x % WARP;
        now[0] = image(next, lane), now[1] = image(next, lane + WARP);
        const long long given = own < 0 ? -1 : labels[own];
        label = given >= 0 && given < CLASSES ? static_cast<int>(given) : -1;
        own = own_image(next + 1);
    }

    __device__ __forceinline__ Fetcher(Shared& shared, const unsigned char* images, const long long* labels,
                                       const long long* order, int rows, int batch)
        : shared(shared), images(images), labels(labels), order(order), rows(rows), batch(batch) {
        own = own_image(0);
        look_ahead();
    }

    // Only when the block has left what was in this place.
    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP, stage = next % 2;
        const int count = min(batch, rows - next * batch);
        if (count <= 0) return;
        if (lane == 0) mbarrier_expect_bytes(&shared.images_full[stage], count * INPUTS);
        if (lane < ROWS) shared.labels[next % 3][lane] = label;
        __syncwarp();
        for (int i = 0; i < 2; ++i)
            if (now[i] >= 0)
                bulk_load(shared.stages[stage].images[lane + i * WARP], images + now[i] * INPUTS, INPUTS,
                          &shared.images_full[stage]);
        ++next;
        look_ahead();
    }
};

// --- the phases of a step -----------------------------------------------------------------------------------------

// A warp's tile, 16 units by 8 images: add the shares, apply bias and ReLU, and keep it for the products. Returns units
// lane / 4 and + 8 of two images, in mma's layout of sums.
__device__ __forceinline__ uint2 finish_hidden(Shared& shared, int lane, const float4 (*shares)[TILES][WARP],
                                               int unit_tile, int tile) {
    const int g = lane / 4, t = lane % 4;
    float4 sum = shares[0][tile][lane];
#pragma unroll
    for (int i = 1; i < PARTITION; ++i) {
        const float4 share = shares[i][tile][lane];
        sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
    }
    const float low = shared.b1[unit_tile * 16 + g], high = shared.b1[unit_tile * 16 + g + 8];
    const unsigned first = halves(relu_of(sum.x + low), relu_of(sum.y + low));
    const unsigned second = halves(relu_of(sum.z + high), relu_of(sum.w + high));
    unsigned char* const line = shared.hidden + t * 4;
    *reinterpret_cast<unsigned*>(line + swizzled<64>(tile * 8 + g, unit_tile * 2)) = transposed(first);
    *reinterpret_cast<unsigned*>(line + swizzled<64>(tile * 8 + g, unit_tile * 2 + 1)) = transposed(second);
    return {first, second};
}

// This block's share of the second layer's sums (times W_SCALE), to the blocks that finish it: images x columns, a warp
// takes 16 images. In four tiles the columns are so distributed that a lane has eight neighbours.
__device__ __forceinline__ void share_second(Shared& shared, int lane, int warp, int width) {
    const int g = lane / 4, t = lane % 4, images = warp % 4 * 16;
    unsigned a[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k)
        load_matrices<false>(a[k], shared_address(shared.hidden + swizzled<64>(images + lane % 16, k * 2 + lane / 16)));
#pragma unroll 1
    for (int first = warp / 4 * 32; first < width; first += 128) {
        float acc[4][4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            unsigned b[4];
            load_matrices<false>(b,
                                 shared_address(shared.w2_at(first + lane % 8 / 2 * 8 + lane % 2 + 2 * j, lane / 8)));
#pragma unroll
            for (int k = 0; k < 2; ++k) mma<__half>(acc[j], a[k], b[2 * k], b[2 * k + 1]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned owner = (images + g + 8 * h) / ROWS;
            cluster_send(cluster_address(&shared.sums[cluster_rank()][g % ROWS][first + 8 * t], owner),
                         uint4{halves(acc[0][2 * h], acc[0][2 * h + 1]),
                               halves(acc[1][2 * h], acc[1][2 * h + 1]),
                               halves(acc[2][2 * h], acc[2][2 * h + 1]),
                               halves(acc[3][2 * h], acc[3][2 * h + 1])},
                         cluster_address(&shared.sums_full, owner));
        }
    }
}

// Add lanes 2 COUNT apart, each of which then has half of the sums.
template <int COUNT> __device__ __forceinline__ void halve(float* sums, int lane) {
    const bool upper = lane & (2 * COUNT);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float low = sums[i], high = sums[i + COUNT];
        const float give = upper ? low : high, keep = upper ? high : low;
        sums[i] = keep + __shfl_xor_sync(~0u, give, 2 * COUNT);
    }
    if constexpr (COUNT > 1) halve<COUNT / 2>(sums, lane);
}

// The second layer of one image by four warps, each a quarter of its columns, two a lane; and what it adds to the logits.
__device__ __forceinline__ void finish_second(Shared& shared, int lane, int row, int quarter, int width, int active) {
    const int share = width / 4, column = quarter * share + 2 * lane;
    float2 y = {};
    if (2 * lane < share) {
#pragma unroll 5
        for (int i = 0; i < active; ++i) {
            const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&shared.sums[i][row][column]));
            y.x += v.x, y.y += v.y;
        }
        const float2 b = *reinterpret_cast<const float2*>(&shared.b2[column]);
        y = {relu_of(fmaf(y.x, 1.0f / W_SCALE, b.x)), relu_of(fmaf(y.y, 1.0f / W_SCALE, b.y))};
        *reinterpret_cast<unsigned*>(&shared.rows[row][column]) = halves(y.x, y.y);
    }
    float logits[CLASSES] = {};
    if (2 * lane < share)
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 v = reinterpret_cast<const uint4*>(shared.w3[column + e])[half];
                const unsigned w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 two = floats_of<__half>(w[i]);
                    float* const sum = &logits[half * 8 + 2 * i];
                    sum[0] = fmaf(e ? y.y : y.x, two.x, sum[0]), sum[1] = fmaf(e ? y.y : y.x, two.y, sum[1]);
                }
            }
    halve<CLASSES / 2>(logits, lane);  // lane l is left with class l / 2
    logits[0] += __shfl_xor_sync(~0u, logits[0], 1);
    if (lane % 2 == 0) shared.logits[row][quarter][lane / 2] = logits[0];
    __syncwarp();
}

// A quarter of the second layer of one image, to every block.
__device__ __forceinline__ void send_second(Shared& shared, int lane, int row, int quarter, int width) {
    const int first = quarter * (width / 4), chunks = width / 4 / 8;
    for (int i = lane; i < chunks * BLOCKS; i += WARP) {
        const int to = i % BLOCKS, at = first + i / BLOCKS * 8;
        const uint4 v = *reinterpret_cast<const uint4*>(&shared.rows[row][at]);
        cluster_send(cluster_address(&shared.second[cluster_rank() * ROWS + row][at], to), v,
                     cluster_address(&shared.second_full, to));
    }
}

// The softmax of one image by one warp, and the gradient by its logits (times D_SCALE) to every block. A row beyond
// the batch has the gradient zero; a label that is none gives NaN.
__device__ __forceinline__ void finish_logits(Shared& shared, int lane, int row, bool inside, int label, int classes,
                                              float* loss) {
    const int k = lane % CLASSES;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += shared.logits[row][i][k];
    const float logit = k < classes ? fmaf(sum, 1.0f / W_SCALE, shared.b3[k]) : -infinity();
    float largest = logit;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float shifted = logit - largest, e = k < classes ? __expf(shifted) : 0.0f;
    float total = e;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    const bool valid = label >= 0 && label < classes;
    float d = inside && k < classes ? (__fdividef(e, total) - (k == label ? 1.0f : 0.0f)) * D_SCALE : 0.0f;
    if (inside && !valid) d = not_a_number();
    // Two neighbours make a word, four words the 16 bytes that a lane sends to one block.
    const float next = __shfl_down_sync(~0u, d, 1);
    if (lane < CLASSES && lane % 2 == 0) *reinterpret_cast<unsigned*>(&shared.d_rows[row][k]) = halves(d, next);
    __syncwarp();
    const unsigned to = lane / 2, chunk = lane % 2;
    const uint4 v = reinterpret_cast<const uint4*>(shared.d_rows[row])[chunk];
    cluster_send(cluster_address(&shared.d_logits[cluster_rank() * ROWS + row][chunk * 8], to), v,
                 cluster_address(&shared.second_full, to));
    if (inside && lane == (valid ? label : 0)) *loss = valid ? logf(total) - shifted : not_a_number();
}

// mma's first operand, 16 x 16, out of memory that holds it transposed: `at(k, half)` is the address of 8 values of line
// k.
template <typename At> __device__ __forceinline__ void load_transposed(unsigned (&a)[4], int lane, At at) {
    load_matrices<true>(a, at(lane / 16 * 8 + lane % 8, lane / 8 % 2));
}

// The gradient before the second layer's ReLU: a warp's 16 images, and every fourth pair of tiles of columns.
__device__ __forceinline__ void second_gradient(Shared& shared, int lane, int warp, int width) {
    const int g = lane / 4, t = lane % 4, images = warp % 4 * 16;
    unsigned a[4];
    load_matrices<false>(a, shared_address(&shared.d_logits[images + lane % 16][lane / 16 * 8]));
#pragma unroll 1
    for (int first = warp / 4 * 16; first < width; first += 64) {
        unsigned b[4], y[2][2];
        load_matrices<false>(b, shared_address(&shared.w3[first + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]));
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                y[j][h] =
                    *reinterpret_cast<const unsigned*>(&shared.second[images + g + 8 * h][first + 8 * j + 2 * t]);
        float sum[2][4] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) mma<__half>(sum[j], a, b[2 * j], b[2 * j + 1]);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 out = floats_of<__half>(y[j][h]);
                *reinterpret_cast<unsigned*>(&shared.d_second[images + g + 8 * h][first + 8 * j + 2 * t]) =
                    halves(out.x > 0.0f ? sum[j][2 * h] * (1.0f / W_SCALE) : 0.0f,
                              out.y > 0.0f ? sum[j][2 * h + 1] * (1.0f / W_SCALE) : 0.0f);
            }
    }
}

// A warp's tile of the gradient before the first layer's ReLU, 16 units x 8 images, into shared memory as half an
// operand of mma, and its sums over the images (times D_SCALE). hidden: what finish_hidden returned.
__device__ __forceinline__ void tile_gradient(Shared& shared, int lane, int width, int unit_tile, int tile,
                                              uint2 hidden) {
    const int g = lane / 4;
    float sums[2][4] = {};
#pragma unroll 5
    for (int first = 0; first < width; first += 32) {
        unsigned a[2][4], b[4];
        load_matrices<false>(b, shared_address(&shared.d_second[tile * 8 + lane % 8][first + lane / 8 * 8]));
#pragma unroll
        for (int k = 0; k < 2; ++k)
            load_transposed(a[k], lane, [&](int line, int half) {
                return shared_address(shared.w2_at(first + k * 16 + line, unit_tile * 2 + half));
            });
#pragma unroll
        for (int k = 0; k < 2; ++k) mma<__half>(sums[k], a[k], b[2 * k], b[2 * k + 1]);
    }
    const float2 y[2] = {floats_of<__half>(hidden.x), floats_of<__half>(hidden.y)};
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
        const float low = sums[0][2 * unit] + sums[1][2 * unit], high = sums[0][2 * unit + 1] + sums[1][2 * unit + 1];
        const float a = y[unit].x > 0.0f ? low * (1.0f / W_SCALE) : 0.0f;
        const float b = y[unit].y > 0.0f ? high * (1.0f / W_SCALE) : 0.0f;
        reinterpret_cast<unsigned*>(&shared.d_hidden[unit_tile][tile / 2][lane])[tile % 2 * 2 + unit] = halves(a, b);
        const float both = quad_sum(a + b);
        if (lane % 4 == 0) shared.d_hidden_sums[unit_tile][tile][g + 8 * unit] = both;
    }
}
