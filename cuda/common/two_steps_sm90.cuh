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
    alignas(128) unsigned char w3[WIDTH * CLASSES * 2];    // columns x classes, swizzled by pairs: times W_SCALE
    alignas(16) __half sums[BLOCKS][ROWS][WIDTH];          // the blocks' shares of the second layer
    uint4 d_hidden[UNIT_TILES][SLICES][WARP];              // the gradient before the first ReLU, as operands of mma
    float d_hidden_sums[UNIT_TILES][TILES][16];
    alignas(16) unsigned short d_logits[BATCH][CLASSES];
    alignas(16) unsigned short rows[ROWS][WIDTH];          // of the second layer, before they are sent
    alignas(16) unsigned short d_rows[ROWS][CLASSES];
    alignas(16) float b1[UNITS], b2[WIDTH], b3[CLASSES];
    int coming[ROWS], labels[3][ROWS];                     // of the block's own images of a batch; none is -1
    unsigned long long images_full[2], sums_full, second_full;

    // The chunk of 16 bytes with units 8 `chunk` and up.
    __device__ __forceinline__ unsigned char* w2_at(int row, int chunk) { return w2 + swizzled<64>(row, chunk); }

    // The chunk with classes 8 `half` and up of a column: two columns share a line of 64 bytes.
    __device__ __forceinline__ unsigned char* w3_at(int column, int half) {
        return w3 + swizzled<64>(column / 2, column % 2 * 2 + half);
    }
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

// One warp tells which of a batch's images this block fetches and finishes, and their labels. They are loaded ahead, so
// that a call waits for nothing.
struct Announcer {
    Shared& shared;
    const long long *labels, *order;
    int rows, batch, next = 0;
    int now, later;        // the lane's image of the batch `next`, and of the one behind it
    int label;             // in the batch `next`

    __device__ __forceinline__ int image(int step) const {
        const int lane = threadIdx.x % WARP, row = cluster_rank() * ROWS + lane;
        const long long at = static_cast<long long>(step) * batch + row;
        return lane < ROWS && row < batch && at < rows ? static_cast<int>(order[at]) : -1;
    }

    __device__ __forceinline__ void look_ahead() {
        now = later;
        const long long given = now < 0 ? -1 : labels[now];
        label = given >= 0 && given < CLASSES ? static_cast<int>(given) : -1;
        later = image(next + 1);
    }

    __device__ __forceinline__ Announcer(Shared& shared, const long long* labels, const long long* order, int rows,
                                         int batch)
        : shared(shared), labels(labels), order(order), rows(rows), batch(batch) {
        later = image(0);
        look_ahead();
    }

    // Only when the block has fetched the batch before.
    __device__ __forceinline__ void announce() {
        const int lane = threadIdx.x % WARP;
        if (lane < ROWS) shared.coming[lane] = now, shared.labels[next % 3][lane] = label;
        ++next;
        look_ahead();
    }
};

// Four warps fetch an image each of those that were announced, by the copy engine, for all blocks: only when all have
// left what was in their place.
__device__ __forceinline__ void fetch(Shared& shared, int lane, int warp, const unsigned char* images, int step,
                                      int count) {
    unsigned long long* const full = &shared.images_full[step % 2];
    if (threadIdx.x == 0 && count > 0) mbarrier_expect_bytes(full, count * INPUTS);
    if (warp % 4 == 3 && lane == 0) {
        const int row = warp / 4, image = shared.coming[row];
        if (image >= 0)
            bulk_load_multicast(shared.stages[step % 2].images[cluster_rank() * ROWS + row],
                                images + static_cast<long long>(image) * INPUTS, INPUTS, full, (1 << BLOCKS) - 1);
    }
}

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
    unsigned there[2], full[2];  // the images' place with the blocks that finish them
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const unsigned owner = (images + g + 8 * h) / ROWS;
        there[h] = cluster_address(&shared.sums[cluster_rank()][g % ROWS][0], owner);
        full[h] = cluster_address(&shared.sums_full, owner);
    }
    const int first = warp / 4 * 32;
    if (first < width) {
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
        for (int h = 0; h < 2; ++h)
            cluster_send(there[h] + (first + 8 * t) * 2,
                         uint4{halves(acc[0][2 * h], acc[0][2 * h + 1]),
                               halves(acc[1][2 * h], acc[1][2 * h + 1]),
                               halves(acc[2][2 * h], acc[2][2 * h + 1]),
                               halves(acc[3][2 * h], acc[3][2 * h + 1])},
                         full[h]);
    }
    if (width > 128) {
        const int column = 128 + warp / 4 * 8;
        float acc[4] = {};
        unsigned b[4];
        load_matrices<false>(b, shared_address(shared.w2_at(column + lane % 8, lane / 8)));
#pragma unroll
        for (int k = 0; k < 2; ++k) mma<__half>(acc, a[k], b[2 * k], b[2 * k + 1]);
        // Of two lanes with four columns of two rows each takes a row.
        const unsigned low = halves(acc[0], acc[1]), high = halves(acc[2], acc[3]);
        const int h = t % 2;
        const unsigned other = __shfl_xor_sync(~0u, h ? low : high, 1);
        cluster_send((h ? there[1] : there[0]) + (column + t / 2 * 4) * 2, __uint_as_float(h ? other : low),
                     __uint_as_float(h ? high : other), h ? full[1] : full[0]);
    }
}

// The second layer of one image by four warps, each a quarter of its columns, two a lane.
__device__ __forceinline__ void finish_second(Shared& shared, int lane, int row, int quarter, int width, int active) {
    const int share = width / 4, column = quarter * share + 2 * lane;
    if (2 * lane < share) {
        float2 y = {};
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            if (i >= active) break;
            const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&shared.sums[i][row][column]));
            y.x += v.x, y.y += v.y;
        }
        const float2 b = *reinterpret_cast<const float2*>(&shared.b2[column]);
        *reinterpret_cast<unsigned*>(&shared.rows[row][column]) =
            halves(relu_of(fmaf(y.x, 1.0f / W_SCALE, b.x)), relu_of(fmaf(y.y, 1.0f / W_SCALE, b.y)));
    }
    __syncwarp();
}

// A quarter of the second layer of one image, to every block.
__device__ __forceinline__ void send_second(Shared& shared, int lane, int row, int quarter, int width) {
    const int first = quarter * (width / 4), chunks = width / 4 / 8, to = lane % BLOCKS;
    const unsigned full = cluster_address(&shared.second_full, to);
    const unsigned row_there = cluster_address(&shared.second[cluster_rank() * ROWS + row][first], to);
    for (int chunk = lane / BLOCKS; chunk < chunks; chunk += WARP / BLOCKS)
        cluster_send(row_there + chunk * 16, *reinterpret_cast<const uint4*>(&shared.rows[row][first + chunk * 8]), full);
}

// The largest of a warp's values; NaN if there is one: the order of floats is that of their bits, turned where negative.
__device__ __forceinline__ float warp_max(float v) {
    const auto turned = [](int bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; };
    const int bits = v == v ? turned(__float_as_int(v)) : 0x7fffffff;
    return __int_as_float(turned(__reduce_max_sync(~0u, bits)));
}

// The logits of one image by one warp, their softmax, and the gradient by them (times D_SCALE) to every block. A row beyond
// the batch has the gradient zero; a label that is none gives NaN.
__device__ __forceinline__ void finish_logits(Shared& shared, int lane, int row, int width, bool inside, int label,
                                              int classes, float* loss) {
    const int g = lane / 4, t = lane % 4;
    const unsigned w_at = shared_address(shared.w3_at(lane / 16 * 8 + lane % 8, lane / 8 % 2));
    float sums[2][4] = {};  // classes x images, of which every column is this image
#pragma unroll
    for (int first = 0; first < WIDTH; first += 32) {
        if (first >= width) break;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            unsigned w[4];
            load_matrices<true>(w, w_at + (first + k * 16) * (CLASSES * 2));
            const auto* const y = reinterpret_cast<const unsigned*>(&shared.rows[row][first + k * 16 + 2 * t]);
            mma<__half>(sums[k], w, y[0], y[4]);
        }
    }
    float logit[2], e[2], d[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int k = g + 8 * i;
        const float sum = sums[0][2 * i] + sums[1][2 * i];
        logit[i] = k < classes ? fmaf(sum, 1.0f / W_SCALE, shared.b3[k]) : -infinity();
    }
    const float largest = warp_max(max_nan(logit[0], logit[1]));
#pragma unroll
    for (int i = 0; i < 2; ++i) e[i] = g + 8 * i < classes ? __expf(logit[i] - largest) : 0.0f;
    // The sum as an integer, of 25 bits below the point; four lanes have the same classes.
    constexpr float ONE = 1 << 25;
    const float total = static_cast<float>(__reduce_add_sync(~0u, __float2uint_rn((e[0] + e[1]) * ONE))) * (0.25f / ONE);
    const bool valid = label >= 0 && label < classes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int k = g + 8 * i;
        d[i] = inside && k < classes ? (__fdividef(e[i], total) - (k == label ? 1.0f : 0.0f)) * D_SCALE : 0.0f;
        if (inside && !valid) d[i] = not_a_number();
    }
    if (t == 0) {
        const unsigned both = halves(d[0], d[1]);
        shared.d_rows[row][g] = static_cast<unsigned short>(both);
        shared.d_rows[row][g + 8] = static_cast<unsigned short>(both >> 16);
    }
    __syncwarp();
    const unsigned to = lane / 2, chunk = lane % 2;
    const uint4 v = reinterpret_cast<const uint4*>(shared.d_rows[row])[chunk];
    cluster_send(cluster_address(&shared.d_logits[cluster_rank() * ROWS + row][chunk * 8], to), v,
                 cluster_address(&shared.second_full, to));
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (inside && t == 0 && g + 8 * i == (valid ? label : 0))
            *loss = valid ? __logf(total) - (logit[i] - largest) : not_a_number();
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
        load_matrices<false>(b, shared_address(shared.w3_at(first + lane / 16 * 8 + lane % 8, lane / 8 % 2)));
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
    const unsigned d_at = shared_address(&shared.d_second[tile * 8 + lane % 8][lane / 8 * 8]);
    const unsigned w_at = shared_address(shared.w2_at(lane / 16 * 8 + lane % 8, unit_tile * 2 + lane / 8 % 2));
#pragma unroll
    for (int first = 0; first < WIDTH; first += 32) {
        if (first >= width) break;
        unsigned a[2][4], b[4];
        load_matrices<false>(b, d_at + first * 2);
#pragma unroll
        for (int k = 0; k < 2; ++k) load_matrices<true>(a[k], w_at + (first + k * 16) * (UNITS * 2));
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
