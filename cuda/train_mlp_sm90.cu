// Stochastic gradient descent on a network 784-H-C, H <= 256, C <= 16, in one launch: batch after batch, a cluster of
// 16 blocks takes every step, and the weights stay in registers from the first to the last.
//
//   images (any, 784) bytes, labels (any,) int64; order (rows,) int64: which image comes when, `batch` <= 64 a step;
//   rates (steps,) float; w1 (H, 784), b1 (H,), w2 (C, H), b2 (C,) float and the velocities v... of their shapes, all
//   updated; losses (rows,) float: of each image, before its step. A pixel p enters as p * scale + shift.
//
// The ideas, outermost first:
//   hidden units divided   block b owns hidden units 16 b to 16 b + 15: their rows of w1, their columns of w2. All it
//                          needs of the others are the logits, which are sums over all hidden units.
//   two exchanges a step   a block sends its share of the logits of image m to block m / 4, which adds the 16 shares,
//                          takes the softmax of its four images and sends the gradient by the logits to everybody.
//                          st.async stores into the other's shared memory and counts the bytes on a barrier there, so
//                          that a block waits for data and never for a block. What a block receives for a step proves
//                          that the others are done with what they received for the step before: no buffer is double.
//   weights in registers   mma's sums have the layout of mma's first operand. So a warp that owns 112 pixels of 16
//                          hidden units adds up their gradient, takes the step, rounds the new weights and multiplies
//                          the next batch by them without w1 ever leaving its registers: one sweep over its pixels is
//                          the backward pass of one step and the forward pass of the next.
//   pixels as they are     a byte is exact in half: 0x6400 | p is 1024 + p. Images stay bytes in shared memory, where
//                          the copy engine puts them three batches ahead; `centre` is subtracted, which is exact too,
//                          and scale and the rest of the shift are applied to the sums.
//   PARTS, T               how many halves stand for a float, see common/halves.cuh.
// Everything is summed in a fixed order: two runs give the same bits.

#include "common/pixels.cuh"
#include "common/sm90.cuh"

constexpr int WARP = 32;
constexpr int BLOCKS = 16, UNITS = 16, CLASSES = 16, BATCH = 64, INPUTS = 784;
constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int SWEEPERS = 7;                       // warps that own pixels; the last one owns w2 and fetches images
constexpr int GROUPS = INPUTS / 16 / SWEEPERS;    // of 16 pixels, the K of one mma
constexpr int TILES = BATCH / 8;                  // of 8 images, the N of one mma
constexpr int SLICES = BATCH / 16;                // of 16 images: K in the gradients' products
constexpr int ROWS = BATCH / BLOCKS;              // images whose softmax a block takes, a warp each
constexpr int STAGES = 3;
constexpr int SHARED_BYTES = 200 * 1024;
static_assert(SWEEPERS * GROUPS * 16 == INPUTS, "the sweepers' pixels are all pixels");
static_assert(TILES == WARPS, "each warp adds up the hidden layer of one tile of images");

template <int PARTS> struct Shared {
    alignas(128) unsigned char images[STAGES][BATCH][INPUTS];
    float4 hidden_shares[SWEEPERS][TILES][WARP];  // in the layout of mma's sums, each over a sweeper's pixels
    uint2 hidden[PARTS][TILES][WARP];             // units x images, as mma's first operand
    uint4 d_hidden[PARTS][SLICES][WARP];          // the gradient before the ReLU, likewise, and its sums over a tile
    float d_hidden_sums[TILES][UNITS];
    uint4 w2_units[2][PARTS][WARP];               // w2 as an operand units x classes, and classes x units, by turns
    uint4 w2_classes[2][PARTS][WARP];
    alignas(16) __half d_logits[PARTS][BATCH][CLASSES];
    alignas(16) float logits[BLOCKS][ROWS][CLASSES];
    alignas(16) float b1[UNITS], v_b1[UNITS], b2[CLASSES];
    int labels[STAGES + 1][ROWS];
    unsigned long long images_full[STAGES], logits_full, d_logits_full;
};

struct Rule {
    float momentum, weight_decay;
};

template <bool MOMENTUM>
__device__ __forceinline__ void descend(float& w, float* velocity, float gradient, float rate, Rule rule) {
    float step = fmaf(rule.weight_decay, w, gradient);
    if constexpr (MOMENTUM) *velocity = step = fmaf(rule.momentum, *velocity, step);
    w = fmaf(-rate, step, w);
}

// --- the sweep ----------------------------------------------------------------------------------------------------

// A sweeper's rows of w1 and their velocities, times W_SCALE: [group][0..3] are four neighbouring pixels of unit
// lane / 4, [4..7] of unit lane / 4 + 8.
template <bool MOMENTUM> struct Weights {
    float w[GROUPS][8], v[MOMENTUM ? GROUPS : 1][8];
};

// What a step needs to move w1: the gradient before the ReLU, units x images, as operands of mma; its sums over the
// images; and how the sums become a mean gradient by normalised pixels.
template <int PARTS> struct Gradient {
    unsigned d[SLICES][PARTS][4];
    float offset[2];  // of units lane / 4 and + 8
    float factor, rate;
};

// The matrix of an ldmatrix.x4 that this lane points at is lane / 8, and its line in it lane % 8.
__device__ __forceinline__ unsigned image_address(const unsigned char (&images)[BATCH][INPUTS], int pixel) {
    return shared_address(&images[threadIdx.x % WARP][pixel]);
}

// The gradient of 16 pixels' weights: sums over a batch of gradient times pixel, in the order of Weights. ldmatrix.trans
// moves pairs of bytes: a register holds pixels 2 g and 2 g + 1 of two images, and gives an operand of the even pixels
// and one of the odd ones. With two CHAINS each has two sums, and products wait less for each other.
template <int PARTS, typename T, int CHAINS>
__device__ __forceinline__ void pixel_gradient(float (&sums)[8], const Gradient<PARTS>& gradient, unsigned at,
                                               __half2 zero) {
    float even[CHAINS][4] = {}, odd[CHAINS][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned raw[4];
        load_matrices<true>(raw, at + half * (BATCH / 2 * INPUTS));
        for (int k = 0; k < 2; ++k) {
            const unsigned b[2] = {raw[2 * k], raw[2 * k + 1]};
            const unsigned even0 = pixels<T, 0x4240>(b[0], zero), even1 = pixels<T, 0x4240>(b[1], zero);
            const unsigned odd0 = pixels<T, 0x4341>(b[0], zero), odd1 = pixels<T, 0x4341>(b[1], zero);
            for (int part = 0; part < PARTS; ++part) {
                const int which = (PARTS == 2 ? part : k) % CHAINS;
                mma<T>(even[which], gradient.d[2 * half + k][part], even0, even1);
                mma<T>(odd[which], gradient.d[2 * half + k][part], odd0, odd1);
            }
        }
    }
    for (int i = 0; i < 8; ++i) {
        sums[i] = i % 2 ? odd[0][i / 2] : even[0][i / 2];
        if constexpr (CHAINS == 2) sums[i] += i % 2 ? odd[1][i / 2] : even[1][i / 2];
    }
}

// Move w1 by the gradient of one batch (BACKWARD), then start the forward pass of the next with it: `hidden` gets the
// sums of pixel times weight (times W_SCALE), and `row_sums` the weights' sums.
template <int PARTS, typename T, bool MOMENTUM, bool BACKWARD>
__device__ __forceinline__ void sweep(Weights<MOMENTUM>& weights, const Gradient<PARTS>& gradient,
                                      const unsigned char (&batch)[BATCH][INPUTS],
                                      const unsigned char (&next)[BATCH][INPUTS], float (&hidden)[TILES][4],
                                      float (&row_sums)[2], __half2 zero, int first_pixel, Rule rule) {
    row_sums[0] = row_sums[1] = 0.0f;
    for (int i = 0; i < TILES; ++i)
        for (int c = 0; c < 4; ++c) hidden[i][c] = 0.0f;

    // A group's backward products run ahead of the forward products of the group before, so that its weights can move
    // while the tensor cores are busy.
    // How many products wait for no other one; registers bound it.
    constexpr int WIDE = MOMENTUM ? 2 : 4, CHAINS = MOMENTUM || PARTS == 2 ? 1 : 2;
    unsigned operand[PARTS][4];
#pragma unroll
    for (int j = 0; j <= GROUPS; ++j) {
        float sums[8] = {};
        if constexpr (BACKWARD)
            if (j < GROUPS)
                pixel_gradient<PARTS, T, CHAINS>(sums, gradient, image_address(batch, first_pixel + j * 16), zero);
        if (j > 0) {
            const unsigned at = image_address(next, first_pixel + (j - 1) * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned raw[4];
                load_matrices<false>(raw, at + half * (BATCH / 2 * INPUTS));
                for (int k = 0; k < 4; k += WIDE) {
                    unsigned b0[WIDE], b1[WIDE];
                    for (int i = 0; i < WIDE; ++i)
                        b0[i] = pixels<T, 0x4140>(raw[k + i], zero), b1[i] = pixels<T, 0x4342>(raw[k + i], zero);
                    for (int part = 0; part < PARTS; ++part)
                        for (int i = 0; i < WIDE; ++i)
                            mma<T>(hidden[4 * half + k + i], operand[part], b0[i], b1[i]);
                }
            }
        }
        if (j == GROUPS) break;
        float(&w)[8] = weights.w[j];
        if constexpr (BACKWARD)
            for (int i = 0; i < 8; ++i) {
                float* velocity = MOMENTUM ? &weights.v[MOMENTUM ? j : 0][i] : nullptr;
                const float mean = fmaf(sums[i], gradient.factor, gradient.offset[i / 4]);
                descend<MOMENTUM>(w[i], velocity, mean, gradient.rate, rule);
            }
        row_sums[0] += (w[0] + w[1]) + (w[2] + w[3]);
        row_sums[1] += (w[4] + w[5]) + (w[6] + w[7]);
        for (int i = 0; i < 4; ++i) {  // registers of the operand: units g, g + 8, g, g + 8; pixels 4 t, 4 t, + 2, + 2
            const int at = i % 2 * 4 + i / 2 * 2;
            unsigned parts[PARTS];
            split<PARTS, T>(w[at], w[at + 1], parts);
            for (int part = 0; part < PARTS; ++part) operand[part][i] = parts[part];
        }
    }
}

// --- the last warp ------------------------------------------------------------------------------------------------

// Fetches this block's images of batch after batch, by the copy engine, for all blocks, and their labels for itself.
// Which images come is loaded ahead, so that a call waits for nothing.
template <int PARTS> struct Fetcher {
    Shared<PARTS>& shared;
    const unsigned char* images;
    const long long *labels, *order;
    int rows, batch, row, next = 0;  // the lane's row of a batch
    long long now, later;            // the image there in the batch `next`, and in the one behind it
    int label;                       // in the batch `next`

    __device__ __forceinline__ long long image(int step) const {
        const long long at = static_cast<long long>(step) * batch + row;
        return threadIdx.x % WARP < ROWS && row < batch && at < rows ? order[at] : -1;
    }

    __device__ __forceinline__ void look_ahead() {
        now = later;
        const long long given = now < 0 ? -1 : labels[now];
        label = given >= 0 && given < CLASSES ? static_cast<int>(given) : -1;
        later = image(next + 1);
    }

    __device__ __forceinline__ Fetcher(Shared<PARTS>& shared, const unsigned char* images, const long long* labels,
                                       const long long* order, int rows, int batch)
        : shared(shared), images(images), labels(labels), order(order), rows(rows), batch(batch) {
        row = cluster_rank() * ROWS + threadIdx.x % WARP;
        later = image(0);
        look_ahead();
    }

    // Only when all blocks have left the batch that was in this place.
    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP, stage = next % STAGES;
        const int count = min(batch, rows - next * batch);
        if (count <= 0) return;
        if (lane == 0) mbarrier_expect_bytes(&shared.images_full[stage], count * INPUTS);
        if (lane < ROWS) shared.labels[next % (STAGES + 1)][lane] = label;
        if (now >= 0)
            bulk_load_multicast(shared.images[stage][row], images + now * INPUTS, INPUTS, &shared.images_full[stage],
                                (1 << BLOCKS) - 1);
        ++next;
        look_ahead();
    }
};

// This block's columns of w2, in the layout of mma's sums (units x classes, two tiles of 8 classes), and b2, of which
// every block keeps and moves a copy.
template <int PARTS, typename T, bool MOMENTUM> struct Head {
    float w[2][4], v[MOMENTUM ? 2 : 1][4], b[2][2], vb[MOMENTUM ? 2 : 1][2];

    // f(value, where it is in memory) for each entry of w2, then of b2, that this lane holds.
    template <typename F, typename G>
    __device__ __forceinline__ void each(int first_unit, int units, int classes, F on_w, G on_b) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        for (int j = 0; j < 2; ++j)
            for (int c = 0; c < 4; ++c) {
                const int unit = first_unit + g + c / 2 * 8, k = j * 8 + 2 * t + c % 2;
                on_w(j, c, unit < units && k < classes ? k * units + unit : -1);
                if (c < 2) on_b(j, c, k < classes ? k : -1);
            }
    }

    __device__ __forceinline__ void publish(Shared<PARTS>& shared, int turn) const {
        const int lane = threadIdx.x % WARP;
        unsigned by_units[PARTS][4];
        for (int i = 0; i < 4; ++i) {
            unsigned parts[PARTS];
            split<PARTS, T>(w[i / 2][i % 2 * 2] * W_SCALE, w[i / 2][i % 2 * 2 + 1] * W_SCALE, parts);
            for (int part = 0; part < PARTS; ++part) by_units[part][i] = parts[part];
        }
        for (int part = 0; part < PARTS; ++part) {
            const unsigned(&u)[4] = by_units[part];
            shared.w2_units[turn][part][lane] = {u[0], u[1], u[2], u[3]};
            shared.w2_classes[turn][part][lane] = {transposed(u[0]), transposed(u[2]), transposed(u[1]),
                                                   transposed(u[3])};
        }
        if (lane < 4)
            for (int j = 0; j < 2; ++j) reinterpret_cast<float2*>(shared.b2)[j * 4 + lane] = {b[j][0], b[j][1]};
    }

    __device__ __forceinline__ void move(const Shared<PARTS>& shared, float factor, float rate, Rule rule) {
        const int lane = threadIdx.x % WARP;
        constexpr unsigned ONE = is_same<T, __half> ? 0x3c003c00 : 0x3f803f80;
        const unsigned ones[4] = {ONE, ONE, ONE, ONE};
        float by_w[2][4] = {}, by_b[2][4] = {};
#pragma unroll
        for (int q = 0; q < SLICES; ++q) {
            unsigned a[PARTS][4], d[PARTS][4];
            for (int part = 0; part < PARTS; ++part) {
                const uint2 first = shared.hidden[part][2 * q][lane], second = shared.hidden[part][2 * q + 1][lane];
                a[part][0] = first.x, a[part][1] = first.y, a[part][2] = second.x, a[part][3] = second.y;
                load_matrices<true>(d[part],
                                    shared_address(&shared.d_logits[part][q * 16 + lane % 16][lane / 16 * 8]));
            }
            for (int j = 0; j < 2; ++j) {
                unsigned b0[PARTS], b1[PARTS];
                for (int part = 0; part < PARTS; ++part) b0[part] = d[part][2 * j], b1[part] = d[part][2 * j + 1];
                multiply_parts<PARTS, T>(by_w[j], a, b0, b1);
                for (int part = 0; part < PARTS; ++part) mma<T>(by_b[j], ones, b0[part], b1[part]);
            }
        }
        for (int j = 0; j < 2; ++j)
            for (int c = 0; c < 4; ++c) {
                const int k = MOMENTUM ? j : 0;
                descend<MOMENTUM>(w[j][c], &v[k][c], by_w[j][c] * factor, rate, rule);
                if (c < 2) descend<MOMENTUM>(b[j][c], &vb[k][c], by_b[j][c] * factor, rate, rule);
            }
    }
};

// --- the kernel ---------------------------------------------------------------------------------------------------

// An operand as it lies in shared memory, a lane's registers side by side.
template <int PARTS>
__device__ __forceinline__ void load_operand(unsigned (&to)[PARTS][4], const uint4 (&from)[PARTS][WARP]) {
    for (int part = 0; part < PARTS; ++part) {
        const uint4 v = from[part][threadIdx.x % WARP];
        to[part][0] = v.x, to[part][1] = v.y, to[part][2] = v.z, to[part][3] = v.w;
    }
}

// A warp's tile of 8 images: add the sweepers' shares, apply bias and ReLU, keep the hidden layer for the backward
// pass, and send this block's share of the logits to the blocks that take these images' softmax. Returns the lane's part
// of the hidden layer: units lane / 4 and + 8 of two images.
template <int PARTS, typename T>
__device__ __forceinline__ uint2 finish_hidden(Shared<PARTS>& shared, int tile, int turn, int classes) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    unsigned w2[PARTS][4];
    load_operand<PARTS>(w2, shared.w2_classes[turn]);
    float4 sum = shared.hidden_shares[0][tile][lane];
#pragma unroll
    for (int i = 1; i < SWEEPERS; ++i) {
        const float4 share = shared.hidden_shares[i][tile][lane];
        sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
    }
    const float low = shared.b1[g], high = shared.b1[g + 8];
    unsigned first[PARTS], second[PARTS];
    split<PARTS, T>(relu_of(sum.x + low), relu_of(sum.y + low), first);
    split<PARTS, T>(relu_of(sum.z + high), relu_of(sum.w + high), second);
    unsigned images[PARTS][4];  // images x units; half of mma's 16 rows are used
    for (int part = 0; part < PARTS; ++part) {
        shared.hidden[part][tile][lane] = {first[part], second[part]};
        images[part][0] = transposed(first[part]), images[part][2] = transposed(second[part]);
        images[part][1] = images[part][3] = 0;
    }
    const unsigned owner = 2 * tile + g / 4, row = g % 4;
    const unsigned to = cluster_address(&shared.logits[cluster_rank()][row][2 * t], owner);
    const unsigned barrier = cluster_address(&shared.logits_full, owner);
    for (int j = 0; j < 2; ++j) {  // classes 8 j and up: of image g, two in each lane
        unsigned b0[PARTS], b1[PARTS];
        for (int part = 0; part < PARTS; ++part) b0[part] = w2[part][j], b1[part] = w2[part][j + 2];
        float logits[4] = {};
        multiply_parts<PARTS, T>(logits, images, b0, b1);
        if (8 * j + 2 * t < classes) cluster_send(to + j * 32, logits[0], logits[1], barrier);
    }
    return {first[0], second[0]};
}

// The softmax of one image by one warp, and the gradient by its logits (times D_SCALE) to every block. A lane has the
// four classes from 4 (lane % 4) on. A row beyond the batch has the gradient zero; a label that is none gives NaN.
template <int PARTS, typename T>
__device__ __forceinline__ void finish_logits(Shared<PARTS>& shared, int row, bool inside, int label, int classes,
                                              float* loss) {
    const int lane = threadIdx.x % WARP, first = lane % 4 * 4;
    const float4 one = *reinterpret_cast<const float4*>(&shared.logits[lane / 4][row][first]);
    const float4 two = *reinterpret_cast<const float4*>(&shared.logits[lane / 4 + BLOCKS / 2][row][first]);
    float logit[4] = {one.x + two.x, one.y + two.y, one.z + two.z, one.w + two.w}, e[4];
    float largest = -infinity(), total = 0.0f;
#pragma unroll
    for (int step = 4; step < WARP; step *= 2)
        for (int i = 0; i < 4; ++i) logit[i] += __shfl_xor_sync(~0u, logit[i], step);
    for (int i = 0; i < 4; ++i) {
        logit[i] = first + i < classes ? fmaf(logit[i], 1.0f / W_SCALE, shared.b2[first + i]) : -infinity();
        largest = fmaxf(largest, logit[i]);
    }
    for (int step = 1; step < 4; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    for (int i = 0; i < 4; ++i) {
        e[i] = first + i < classes ? __expf(logit[i] - largest) : 0.0f;
        total += e[i];
    }
    total = quad_sum(total);
    const bool valid = label >= 0 && label < classes;
    const float scale = valid ? D_SCALE : not_a_number(), by = scale / total;
    float d[4];
    for (int i = 0; i < 4; ++i)
        d[i] = inside && first + i < classes ? fmaf(e[i], by, first + i == label ? -scale : 0.0f) : 0.0f;

    // Two lanes have the 16 bytes of a chunk; each sends it to other blocks.
    unsigned low[PARTS], high[PARTS];
    split<PARTS, T>(d[0], d[1], low);
    split<PARTS, T>(d[2], d[3], high);
    const unsigned to = lane / 4 * 2 + lane % 2;
    const unsigned barrier = cluster_address(&shared.d_logits_full, to);
    for (int part = 0; part < PARTS; ++part) {
        const unsigned other_low = __shfl_xor_sync(~0u, low[part], 1), other_high = __shfl_xor_sync(~0u, high[part], 1);
        const uint4 chunk = lane % 2 ? uint4{other_low, other_high, low[part], high[part]}
                                     : uint4{low[part], high[part], other_low, other_high};
        __half* const place = &shared.d_logits[part][cluster_rank() * ROWS + row][lane % 4 / 2 * 8];
        cluster_send(cluster_address(place, to), chunk, barrier);
    }
    if (inside && lane < 4)
        for (int i = 0; i < 4; ++i)
            if (first + i == (valid ? label : 0)) *loss = valid ? logf(total) - (logit[i] - largest) : not_a_number();
}

// A warp's tile of the gradient before the ReLU, units x 8 images, into shared memory as half an operand of mma, and its
// sums over the images (times D_SCALE). hidden: what finish_hidden returned.
template <int PARTS, typename T>
__device__ __forceinline__ void tile_gradient(Shared<PARTS>& shared, int tile, uint2 hidden,
                                              const unsigned (&w2)[PARTS][4]) {
    const int lane = threadIdx.x % WARP, g = lane / 4;
    unsigned b0[PARTS], b1[PARTS];
    if constexpr (PARTS == 2) {  // classes 0 to 7 and 8 to 15, high and low
        unsigned d[4];
        load_matrices<false>(d, shared_address(&shared.d_logits[lane / 16][tile * 8 + lane % 8][lane / 8 % 2 * 8]));
        b0[0] = d[0], b1[0] = d[1], b0[1] = d[2], b1[1] = d[3];
    } else {
        const unsigned* const d = reinterpret_cast<const unsigned*>(shared.d_logits[0][tile * 8 + g]);
        b0[0] = d[lane % 4], b1[0] = d[4 + lane % 4];
    }
    float sum[4] = {};
    multiply_parts<PARTS, T>(sum, w2, b0, b1);
    const float2 y[2] = {floats_of<T>(hidden.x), floats_of<T>(hidden.y)};
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
        const float a = y[unit].x > 0.0f ? sum[2 * unit] * (1.0f / W_SCALE) : 0.0f;
        const float b = y[unit].y > 0.0f ? sum[2 * unit + 1] * (1.0f / W_SCALE) : 0.0f;
        unsigned parts[PARTS];
        split<PARTS, T>(a, b, parts);
        for (int part = 0; part < PARTS; ++part)
            reinterpret_cast<unsigned*>(&shared.d_hidden[part][tile / 2][lane])[tile % 2 * 2 + unit] = parts[part];
        const float both = quad_sum(a + b);
        if (lane % 4 == 0) shared.d_hidden_sums[tile][g + 8 * unit] = both;
    }
}

template <int PARTS, bool MOMENTUM, typename T = __half>
__global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
train_mlp_sm90(const unsigned char* __restrict__ images, const long long* __restrict__ labels,
               const long long* __restrict__ order, const float* __restrict__ rates, float* __restrict__ w1,
               float* __restrict__ b1, float* __restrict__ w2, float* __restrict__ b2, float* __restrict__ v_w1,
               float* __restrict__ v_b1, float* __restrict__ v_w2, float* __restrict__ v_b2,
               float* __restrict__ losses, int rows, int batch, int units, int classes, float scale, float shift,
               int centre, float momentum, float weight_decay) {
    extern __shared__ __align__(128) char dynamic[];
    Shared<PARTS>& shared = *reinterpret_cast<Shared<PARTS>*>(dynamic);
    static_assert(sizeof(Shared<PARTS>) <= SHARED_BYTES, "the host asks for SHARED_BYTES");
    // By a shuffle the compiler knows that a warp's number is uniform, and keeps what follows out of the registers.
    const int warp = __shfl_sync(~0u, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int rank = cluster_rank(), first_unit = rank * UNITS, first_pixel = warp * GROUPS * 16;
    const int steps = (rows + batch - 1) / batch;
    const Rule rule = {momentum, weight_decay};
    if constexpr (!is_same<T, __half>) centre = 0;
    const __half2 zero = __half2half2(__int2half_rn(1024 + centre));
    const float rest = fmaf(static_cast<float>(centre), scale, shift);  // a pixel is (p - centre) * scale + rest
    const unsigned logits_bytes = BLOCKS * ROWS * 8 * ((classes + 1) / 2), d_logits_bytes = PARTS * BATCH * CLASSES * 2;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(&shared.images_full[i], 1);
        mbarrier_init(&shared.logits_full, 1);
        mbarrier_init(&shared.d_logits_full, 1);
        mbarrier_init_fence();
        mbarrier_expect_bytes(&shared.logits_full, logits_bytes);
        mbarrier_expect_bytes(&shared.d_logits_full, d_logits_bytes);
    }
    cluster_sync();

    const bool sweeper = warp < SWEEPERS;
    float hidden[TILES][4], row_sums[2] = {};
    const auto share_hidden = [&] {
        const float by = scale / W_SCALE, rest_by = rest / W_SCALE;
        const float low = rest_by * quad_sum(row_sums[0]), high = rest_by * quad_sum(row_sums[1]);
        for (int i = 0; i < TILES; ++i)
            shared.hidden_shares[warp][i][lane] = {fmaf(hidden[i][0], by, low), fmaf(hidden[i][1], by, low),
                                                   fmaf(hidden[i][2], by, high), fmaf(hidden[i][3], by, high)};
    };

    // f(group, entry, where it is in memory) for each four entries of a sweeper's share of w1.
    const auto each_w1 = [&](auto f) {
        int first = (first_unit + g) * INPUTS + first_pixel + 4 * t;
        asm volatile("" : "+r"(first));  // else the addresses of the first time wait in registers for the second
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            for (int i = 0; i < 8; i += 4)
                f(j, i, first_unit + g + i * 2 < units ? first + i * 2 * INPUTS + j * 16 : -1);
    };

    if (sweeper) {
        Weights<MOMENTUM> weights;
        Gradient<PARTS> gradient;
        const auto load = [](float* to, const float* from, int at) {
            const float4 v = at < 0 ? float4{} : *reinterpret_cast<const float4*>(from + at);
            to[0] = v.x * W_SCALE, to[1] = v.y * W_SCALE, to[2] = v.z * W_SCALE, to[3] = v.w * W_SCALE;
        };
        const auto store = [](float* to, const float* from, int at) {
            constexpr float BACK = 1.0f / W_SCALE;
            *reinterpret_cast<float4*>(to + at) = {from[0] * BACK, from[1] * BACK, from[2] * BACK, from[3] * BACK};
        };
        each_w1([&](int j, int i, int at) {
            load(&weights.w[j][i], w1, at);
            if constexpr (MOMENTUM) load(&weights.v[j][i], v_w1, at);
        });
        if (warp == 0 && lane < UNITS) {
            const bool mine = first_unit + lane < units;
            shared.b1[lane] = mine ? b1[first_unit + lane] : 0.0f;
            if constexpr (MOMENTUM) shared.v_b1[lane] = mine ? v_b1[first_unit + lane] : 0.0f;
        }
        mbarrier_wait(&shared.images_full[0], 0);
        sweep<PARTS, T, MOMENTUM, false>(weights, gradient, shared.images[0], shared.images[0], hidden, row_sums, zero,
                                      first_pixel, rule);
        share_hidden();

        for (int step = 0; step < steps; ++step) {
            __syncthreads();
            const float rate = rates[step];
            const int count = min(batch, rows - step * batch), stage = step % STAGES, next = (step + 1) % STAGES;
            const uint2 y = finish_hidden<PARTS, T>(shared, warp, step % 2, classes);
            if (warp < ROWS) {
                mbarrier_wait(&shared.logits_full, step % 2);
                const int row = rank * ROWS + warp;
                finish_logits<PARTS, T>(shared, warp, row < count, shared.labels[step % (STAGES + 1)][warp], classes,
                                     losses + static_cast<long long>(step) * batch + row);
            }
            unsigned w2_units[PARTS][4];
            load_operand<PARTS>(w2_units, shared.w2_units[step % 2]);
            mbarrier_wait(&shared.d_logits_full, step % 2);
            tile_gradient<PARTS, T>(shared, warp, y, w2_units);
            __syncthreads();  // the gradient is whole, and nobody waits for this step's barriers any more
            if (threadIdx.x == 0) {
                mbarrier_expect_bytes(&shared.logits_full, logits_bytes);
                mbarrier_expect_bytes(&shared.d_logits_full, d_logits_bytes);
            }
            for (int q = 0; q < SLICES; ++q)
                for (int part = 0; part < PARTS; ++part) {
                    const uint4 v = shared.d_hidden[part][q][lane];
                    unsigned(&d)[4] = gradient.d[q][part];
                    d[0] = v.x, d[1] = v.y, d[2] = v.z, d[3] = v.w;
                }
            float2 sums = {};
            for (int i = 0; i < TILES; ++i)
                sums.x += shared.d_hidden_sums[i][g], sums.y += shared.d_hidden_sums[i][g + 8];
            const float mean = 1.0f / (D_SCALE * static_cast<float>(count));
            gradient.factor = W_SCALE * scale * mean, gradient.rate = rate;
            gradient.offset[0] = W_SCALE * rest * mean * sums.x;
            gradient.offset[1] = W_SCALE * rest * mean * sums.y;
            if (warp == 0 && t == 0) {
                descend<MOMENTUM>(shared.b1[g], &shared.v_b1[g], sums.x * mean, rate, rule);
                descend<MOMENTUM>(shared.b1[g + 8], &shared.v_b1[g + 8], sums.y * mean, rate, rule);
            }
            // After the last step the forward pass is of some older batch, and nobody reads it.
            if (step + 1 < steps) mbarrier_wait(&shared.images_full[next], (step + 1) / STAGES % 2);
            sweep<PARTS, T, MOMENTUM, true>(weights, gradient, shared.images[stage], shared.images[next], hidden,
                                         row_sums, zero, first_pixel, rule);
            share_hidden();
        }

        each_w1([&](int j, int i, int at) {
            if (at < 0) return;
            store(w1, &weights.w[j][i], at);
            if constexpr (MOMENTUM) store(v_w1, &weights.v[j][i], at);
        });
        __syncwarp();
        if (warp == 0 && lane < UNITS && first_unit + lane < units) {
            b1[first_unit + lane] = shared.b1[lane];
            if constexpr (MOMENTUM) v_b1[first_unit + lane] = shared.v_b1[lane];
        }
    } else {
        Fetcher<PARTS> fetcher(shared, images, labels, order, rows, batch);
        for (int i = 0; i < STAGES; ++i) fetcher.fetch();
        Head<PARTS, T, MOMENTUM> head;
        head.each(
            first_unit, units, classes,
            [&](int j, int c, int at) {
                head.w[j][c] = at < 0 ? 0.0f : w2[at];
                if constexpr (MOMENTUM) head.v[j][c] = at < 0 ? 0.0f : v_w2[at];
            },
            [&](int j, int c, int at) {
                head.b[j][c] = at < 0 ? 0.0f : b2[at];
                if constexpr (MOMENTUM) head.vb[j][c] = at < 0 ? 0.0f : v_b2[at];
            });
        head.publish(shared, 0);

        for (int step = 0; step < steps; ++step) {
            __syncthreads();
            const float rate = rates[step];
            const int count = min(batch, rows - step * batch);
            const uint2 y = finish_hidden<PARTS, T>(shared, warp, step % 2, classes);
            mbarrier_wait(&shared.logits_full, step % 2);
            if (step > 0) fetcher.fetch();  // batch step + 2, into the place of step - 1
            unsigned w2_units[PARTS][4];
            load_operand<PARTS>(w2_units, shared.w2_units[step % 2]);
            mbarrier_wait(&shared.d_logits_full, step % 2);
            tile_gradient<PARTS, T>(shared, warp, y, w2_units);
            __syncthreads();
            head.move(shared, 1.0f / (D_SCALE * static_cast<float>(count)), rate, rule);
            head.publish(shared, (step + 1) % 2);
        }

        head.each(
            first_unit, units, classes,
            [&](int j, int c, int at) {
                if (at < 0) return;
                w2[at] = head.w[j][c];
                if constexpr (MOMENTUM) v_w2[at] = head.v[j][c];
            },
            [&](int j, int c, int at) {
                if (at < 0 || rank > 0 || g > 0) return;
                b2[at] = head.b[j][c];
                if constexpr (MOMENTUM) v_b2[at] = head.vb[j][c];
            });
    }
    cluster_sync();  // a block's memory is there until all that was sent to it has arrived
}
