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
//   PARTS                  how many halves stand for a float: with one, products have 11 bits an operand, as in tf32;
//                          with two (x = high + low) about 22, as in float. Sums are in float. Powers of two keep the
//                          low halves of weights and gradients out of half's subnormal numbers.
// Everything is summed in a fixed order: two runs give the same bits.

#include "common/sm80.cuh"
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
constexpr float W_SCALE = 256.0f, D_SCALE = 1024.0f;
static_assert(SWEEPERS * GROUPS * 16 == INPUTS, "the sweepers' pixels are all pixels");
static_assert(TILES == WARPS, "each warp adds up the hidden layer of one tile of images");

template <int PARTS> struct Shared {
    alignas(128) unsigned char images[STAGES][BATCH][INPUTS];
    float4 hidden_shares[SWEEPERS][TILES][WARP];  // in the layout of mma's sums, each over a sweeper's pixels
    uint2 hidden[PARTS][TILES][WARP];             // units x images, as mma's first operand
    uint4 w2_units[2][PARTS][WARP];               // w2 as an operand units x classes, and classes x units, by turns
    uint4 w2_classes[2][PARTS][WARP];
    alignas(16) __half d_logits[PARTS][BATCH][CLASSES];
    alignas(16) __half d_rows[ROWS][PARTS][CLASSES];
    alignas(16) float logits[BLOCKS][CLASSES][ROWS];
    alignas(16) float b1[UNITS], v_b1[UNITS], b2[CLASSES];
    int labels[STAGES + 1][ROWS];
    unsigned long long images_full[STAGES], logits_full, d_logits_full, hidden_full;
};

// --- numbers in halves --------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned bits(__half2 v) { return *reinterpret_cast<const unsigned*>(&v); }
__device__ __forceinline__ __half2 half2_of(unsigned v) { return *reinterpret_cast<const __half2*>(&v); }

// Two floats as pairs of halves: the nearest, and with two PARTS also the nearest to what is left.
template <int PARTS> __device__ __forceinline__ void split(float a, float b, unsigned (&parts)[PARTS]) {
    const __half2 high = __floats2half2_rn(a, b);
    parts[0] = bits(high);
    if constexpr (PARTS == 2) parts[1] = bits(__floats2half2_rn(a - __low2float(high), b - __high2float(high)));
}

// The product of operands in PARTS; low times low is below float's last bit.
template <int PARTS>
__device__ __forceinline__ void product(float (&d)[4], const unsigned (&a)[PARTS][4], const unsigned (&b0)[PARTS],
                                        const unsigned (&b1)[PARTS]) {
    mma<__half>(d, a[0], b0[0], b1[0]);
    if constexpr (PARTS == 2) {
        mma<__half>(d, a[0], b0[1], b1[1]);
        mma<__half>(d, a[1], b0[0], b1[0]);
    }
}

// Two of four bytes, chosen by SELECT, as exact halves.
template <int SELECT> __device__ __forceinline__ unsigned pixels(unsigned bytes, __half2 zero) {
    return bits(__hsub2(half2_of(__byte_perm(bytes, 0x64646464, SELECT)), zero));
}

__device__ __forceinline__ float quad_sum(float v) {  // over the four lanes that share a row of an operand
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

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

// Move w1 by the gradient of one batch (BACKWARD), then start the forward pass of the next with it: `hidden` gets the
// sums of pixel times weight (times W_SCALE), and `row_sums` the weights' sums.
template <int PARTS, bool MOMENTUM, bool BACKWARD>
__device__ __forceinline__ void sweep(Weights<MOMENTUM>& weights, const Gradient<PARTS>& gradient,
                                      const unsigned char (&batch)[BATCH][INPUTS],
                                      const unsigned char (&next)[BATCH][INPUTS], float (&hidden)[TILES][4],
                                      float (&row_sums)[2], __half2 zero, int first_pixel, Rule rule) {
    row_sums[0] = row_sums[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) hidden[i][c] = 0.0f;

#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        float(&w)[8] = weights.w[j];
        if constexpr (BACKWARD) {
            // ldmatrix.trans moves pairs of bytes: a register holds pixels 2 g and 2 g + 1 of two images, and gives an
            // operand of the even pixels and one of the odd ones.
            float even[4] = {}, odd[4] = {};
            const unsigned at = image_address(batch, first_pixel + j * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned raw[4];
                load_matrices<true>(raw, at + half * (BATCH / 2 * INPUTS));
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const unsigned b[2] = {raw[2 * k], raw[2 * k + 1]};
                    const unsigned even0 = pixels<0x4240>(b[0], zero), even1 = pixels<0x4240>(b[1], zero);
                    const unsigned odd0 = pixels<0x4341>(b[0], zero), odd1 = pixels<0x4341>(b[1], zero);
                    for (int part = 0; part < PARTS; ++part) {
                        mma<__half>(even, gradient.d[2 * half + k][part], even0, even1);
                        mma<__half>(odd, gradient.d[2 * half + k][part], odd0, odd1);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float sum = i % 2 ? odd[i / 2] : even[i / 2];
                float* velocity = MOMENTUM ? &weights.v[MOMENTUM ? j : 0][i] : nullptr;
                descend<MOMENTUM>(w[i], velocity, fmaf(sum, gradient.factor, gradient.offset[i / 4]), gradient.rate,
                                  rule);
            }
        }
        row_sums[0] += (w[0] + w[1]) + (w[2] + w[3]);
        row_sums[1] += (w[4] + w[5]) + (w[6] + w[7]);

        unsigned operand[PARTS][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // registers of the operand: units g, g + 8, g, g + 8; pixels 4 t, 4 t, + 2, + 2
            const int at = i % 2 * 4 + i / 2 * 2;
            unsigned parts[PARTS];
            split<PARTS>(w[at], w[at + 1], parts);
            for (int part = 0; part < PARTS; ++part) operand[part][i] = parts[part];
        }
        const unsigned at = image_address(next, first_pixel + j * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned raw[4];
            load_matrices<false>(raw, at + half * (BATCH / 2 * INPUTS));
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const unsigned b0 = pixels<0x4140>(raw[k], zero), b1 = pixels<0x4342>(raw[k], zero);
                for (int part = 0; part < PARTS; ++part) mma<__half>(hidden[4 * half + k], operand[part], b0, b1);
            }
        }
    }
}

// --- the last warp ------------------------------------------------------------------------------------------------

// Fetches batch after batch: the images by the copy engine, and the labels of the images whose softmax this block
// takes. Which images come is loaded one batch ahead, so that a call waits for nothing.
template <int PARTS> struct Fetcher {
    Shared<PARTS>& shared;
    const unsigned char* images;
    const long long *labels, *order;
    int rows, batch, first_row, next = 0;
    long long now[2], own;  // images of the batch `next`, and, a batch ahead of it, the one with this lane's label
    int label;              // in the batch `next`

    __device__ __forceinline__ long long image(int step, int row) const {
        const long long at = static_cast<long long>(step) * batch + row;
        return row < batch && at < rows ? order[at] : -1;
    }

    __device__ __forceinline__ void look_ahead() {
        const int lane = threadIdx.x % WARP;
        now[0] = image(next, lane), now[1] = image(next, lane + WARP);
        const long long given = own < 0 ? 0 : labels[own];
        label = given >= 0 && given < CLASSES ? static_cast<int>(given) : -1;
        own = lane < ROWS ? image(next + 1, first_row + lane) : -1;
    }

    __device__ __forceinline__ Fetcher(Shared<PARTS>& shared, const unsigned char* images, const long long* labels,
                                       const long long* order, int rows, int batch, int first_row)
        : shared(shared), images(images), labels(labels), order(order), rows(rows), batch(batch), first_row(first_row) {
        const int lane = threadIdx.x % WARP;
        own = lane < ROWS ? image(0, first_row + lane) : -1;
        look_ahead();
    }

    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP, stage = next % STAGES;
        const int count = min(batch, rows - next * batch);
        if (count <= 0) return;
        if (lane == 0) mbarrier_expect_bytes(&shared.images_full[stage], count * INPUTS);
        if (lane < ROWS) shared.labels[next % (STAGES + 1)][lane] = label;
        __syncwarp();
        for (int i = 0; i < 2; ++i)
            if (now[i] >= 0)
                bulk_load(shared.images[stage][lane + i * WARP], images + now[i] * INPUTS, INPUTS,
                          &shared.images_full[stage]);
        ++next;
        look_ahead();
    }
};

// This block's columns of w2, in the layout of mma's sums (units x classes, two tiles of 8 classes), and b2, of which
// every block keeps and moves a copy.
template <int PARTS, bool MOMENTUM> struct Head {
    float w[2][4], v[MOMENTUM ? 2 : 1][4], b[2][2], vb[MOMENTUM ? 2 : 1][2];

    // f(value, where it is in memory) for each entry of w2, then of b2, that this lane holds.
    template <typename F, typename G>
    __device__ __forceinline__ void each(int first_unit, int units, int classes, F on_w, G on_b) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int unit = first_unit + g + c / 2 * 8, k = j * 8 + 2 * t + c % 2;
                on_w(j, c, unit < units && k < classes ? k * units + unit : -1);
                if (c < 2) on_b(j, c, k < classes ? k : -1);
            }
    }

    __device__ __forceinline__ void publish(Shared<PARTS>& shared, int turn) const {
        const int lane = threadIdx.x % WARP;
        unsigned by_units[PARTS][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned parts[PARTS];
            split<PARTS>(w[i / 2][i % 2 * 2] * W_SCALE, w[i / 2][i % 2 * 2 + 1] * W_SCALE, parts);
            for (int part = 0; part < PARTS; ++part) by_units[part][i] = parts[part];
        }
        for (int part = 0; part < PARTS; ++part) {
            const unsigned(&u)[4] = by_units[part];
            shared.w2_units[turn][part][lane] = {u[0], u[1], u[2], u[3]};
            shared.w2_classes[turn][part][lane] = {transposed(u[0]), transposed(u[2]), transposed(u[1]),
                                                   transposed(u[3])};
        }
        if (lane < 4)
#pragma unroll
            for (int j = 0; j < 2; ++j) reinterpret_cast<float2*>(shared.b2)[j * 4 + lane] = {b[j][0], b[j][1]};
    }

    __device__ __forceinline__ void move(const Shared<PARTS>& shared, float factor, float rate, Rule rule) {
        const int lane = threadIdx.x % WARP;
        constexpr unsigned ONE = 0x3c003c00;
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
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unsigned b0[PARTS], b1[PARTS];
                for (int part = 0; part < PARTS; ++part) b0[part] = d[part][2 * j], b1[part] = d[part][2 * j + 1];
                product<PARTS>(by_w[j], a, b0, b1);
                for (int part = 0; part < PARTS; ++part) mma<__half>(by_b[j], ones, b0[part], b1[part]);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int k = MOMENTUM ? j : 0;
                descend<MOMENTUM>(w[j][c], &v[k][c], by_w[j][c] * factor, rate, rule);
                if (c < 2) descend<MOMENTUM>(b[j][c], &vb[k][c], by_b[j][c] * factor, rate, rule);
            }
    }
};

// --- the kernel ---------------------------------------------------------------------------------------------------

// A warp's tile of 8 images: add the sweepers' shares, apply bias and ReLU, keep the hidden layer for the backward
// pass, and send this block's share of the logits to the blocks that take these images' softmax.
template <int PARTS>
__device__ __forceinline__ void finish_hidden(Shared<PARTS>& shared, int tile, int turn, int classes) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    float4 sum = shared.hidden_shares[0][tile][lane];
#pragma unroll
    for (int i = 1; i < SWEEPERS; ++i) {
        const float4 share = shared.hidden_shares[i][tile][lane];
        sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
    }
    const float low = shared.b1[g], high = shared.b1[g + 8];
    unsigned first[PARTS], second[PARTS];  // units g and g + 8 of images 2 t and 2 t + 1
    split<PARTS>(relu_of(sum.x + low), relu_of(sum.y + low), first);
    split<PARTS>(relu_of(sum.z + high), relu_of(sum.w + high), second);
    unsigned w2[PARTS][4], b0[PARTS], b1[PARTS];
    for (int part = 0; part < PARTS; ++part) {
        shared.hidden[part][tile][lane] = {first[part], second[part]};
        const uint4 v = shared.w2_classes[turn][part][lane];
        w2[part][0] = v.x, w2[part][1] = v.y, w2[part][2] = v.z, w2[part][3] = v.w;
        b0[part] = transposed(first[part]), b1[part] = transposed(second[part]);
    }
    float logits[4] = {};  // classes g and g + 8
    product<PARTS>(logits, w2, b0, b1);

    const unsigned owner = 2 * tile + t / 2, row = t % 2 * 2;
    const unsigned to = cluster_address(&shared.logits[cluster_rank()][0][row], owner);
    const unsigned barrier = cluster_address(&shared.logits_full, owner);
    if (g < classes) cluster_send(to + g * (ROWS * 4), logits[0], logits[1], barrier);
    if (g + 8 < classes) cluster_send(to + (g + 8) * (ROWS * 4), logits[2], logits[3], barrier);

    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.hidden_full);
}

// The softmax of one image by one warp, and the gradient by its logits (times D_SCALE) to every block. A row beyond
// the batch has the gradient zero; a label that is none gives NaN.
template <int PARTS>
__device__ __forceinline__ void finish_logits(Shared<PARTS>& shared, int row, bool inside, int label, int classes,
                                              float* loss) {
    const int lane = threadIdx.x % WARP, k = lane % 16;
    float sum = 0.0f;
    if (k < classes)
#pragma unroll
        for (int i = 0; i < BLOCKS / 2; ++i) sum += shared.logits[lane / 16 * (BLOCKS / 2) + i][k][row];
    sum += __shfl_xor_sync(~0u, sum, 16);
    const float logit = k < classes ? fmaf(sum, 1.0f / W_SCALE, shared.b2[k]) : -infinity();
    float largest = logit;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float shifted = logit - largest, e = k < classes ? expf(shifted) : 0.0f;
    float total = e;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    const bool valid = label >= 0 && label < classes;
    if (inside && lane == (valid ? label : 0)) *loss = valid ? logf(total) - shifted : not_a_number();

    float d = inside && k < classes ? (e / total - (k == label ? 1.0f : 0.0f)) * D_SCALE : 0.0f;
    if (inside && !valid) d = not_a_number();
    const __half high = __float2half_rn(d);
    if (lane < 16) {
        shared.d_rows[row][0][k] = high;
        if constexpr (PARTS == 2) shared.d_rows[row][1][k] = __float2half_rn(d - __half2float(high));
    }
    __syncwarp();
    const unsigned to = lane / 2, chunk = lane % 2;  // a lane serves half a row of one block
    const unsigned barrier = cluster_address(&shared.d_logits_full, to);
    for (int part = 0; part < PARTS; ++part) {
        const uint4 v = reinterpret_cast<const uint4*>(shared.d_rows[row][part])[chunk];
        __half* place = &shared.d_logits[part][cluster_rank() * ROWS + row][chunk * 8];
        cluster_send(cluster_address(place, to), v, barrier);
    }
    __syncwarp();  // d_rows is read before the next step writes it
}

// The gradient before the ReLU, all images by this block's units, as mma's operand; a sweeper makes it for itself.
// Returns its sums over the images, of units lane / 4 and + 8 (times D_SCALE).
template <int PARTS>
__device__ __forceinline__ float2 hidden_gradient(const Shared<PARTS>& shared, int turn, Gradient<PARTS>& gradient) {
    const int lane = threadIdx.x % WARP;
    unsigned w2[PARTS][4];
    for (int part = 0; part < PARTS; ++part) {
        const uint4 v = shared.w2_units[turn][part][lane];
        w2[part][0] = v.x, w2[part][1] = v.y, w2[part][2] = v.z, w2[part][3] = v.w;
    }
    float sums[2] = {};
#pragma unroll
    for (int q = 0; q < SLICES; ++q) {
        unsigned d[PARTS][4];  // classes 0 to 7 and 8 to 15 of 8 images, then of the next 8
        for (int part = 0; part < PARTS; ++part)
            load_matrices<false>(d[part], shared_address(&shared.d_logits[part][q * 16 + lane / 16 * 8 + lane % 8]
                                                                        [lane / 8 % 2 * 8]));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned b0[PARTS], b1[PARTS];
            for (int part = 0; part < PARTS; ++part) b0[part] = d[part][2 * i], b1[part] = d[part][2 * i + 1];
            float sum[4] = {};
            product<PARTS>(sum, w2, b0, b1);
            const uint2 hidden = shared.hidden[0][2 * q + i][lane];
            const float2 y[2] = {__half22float2(half2_of(hidden.x)), __half22float2(half2_of(hidden.y))};
#pragma unroll
            for (int unit = 0; unit < 2; ++unit) {
                const float a = y[unit].x > 0.0f ? sum[2 * unit] * (1.0f / W_SCALE) : 0.0f;
                const float b = y[unit].y > 0.0f ? sum[2 * unit + 1] * (1.0f / W_SCALE) : 0.0f;
                sums[unit] += a + b;
                unsigned parts[PARTS];
                split<PARTS>(a, b, parts);
                for (int part = 0; part < PARTS; ++part) gradient.d[q][part][2 * i + unit] = parts[part];
            }
        }
    }
    return {quad_sum(sums[0]), quad_sum(sums[1])};
}

template <int PARTS, bool MOMENTUM>
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
    const __half2 zero = __half2half2(__int2half_rn(1024 + centre));
    const float rest = fmaf(static_cast<float>(centre), scale, shift);  // a pixel is (p - centre) * scale + rest
    const unsigned logits_bytes = BLOCKS * ROWS * 4 * classes, d_logits_bytes = PARTS * BATCH * CLASSES * 2;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(&shared.images_full[i], 1);
        mbarrier_init(&shared.logits_full, 1);
        mbarrier_init(&shared.d_logits_full, 1);
        mbarrier_init(&shared.hidden_full, WARPS);
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
#pragma unroll
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
#pragma unroll
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
        sweep<PARTS, MOMENTUM, false>(weights, gradient, shared.images[0], shared.images[0], hidden, row_sums, zero,
                                      first_pixel, rule);
        share_hidden();

        for (int step = 0; step < steps; ++step) {
            __syncthreads();
            const float rate = rates[step];
            const int count = min(batch, rows - step * batch), stage = step % STAGES, next = (step + 1) % STAGES;
            finish_hidden<PARTS>(shared, warp, step % 2, classes);
            if (warp < ROWS) {
                mbarrier_wait(&shared.logits_full, step % 2);
                const int row = rank * ROWS + warp;
                finish_logits<PARTS>(shared, warp, row < count, shared.labels[step % (STAGES + 1)][warp], classes,
                                     losses + static_cast<long long>(step) * batch + row);
            }
            mbarrier_wait(&shared.hidden_full, step % 2);
            mbarrier_wait(&shared.d_logits_full, step % 2);
            if (threadIdx.x == 0) {
                mbarrier_expect_bytes(&shared.logits_full, logits_bytes);
                mbarrier_expect_bytes(&shared.d_logits_full, d_logits_bytes);
            }
            const float2 sums = hidden_gradient<PARTS>(shared, step % 2, gradient);
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
            sweep<PARTS, MOMENTUM, true>(weights, gradient, shared.images[stage], shared.images[next], hidden,
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
        Fetcher<PARTS> fetcher(shared, images, labels, order, rows, batch, rank * ROWS);
        for (int i = 0; i < STAGES; ++i) fetcher.fetch();
        Head<PARTS, MOMENTUM> head;
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
            finish_hidden<PARTS>(shared, warp, step % 2, classes);
            if (step > 0) fetcher.fetch();  // batch step + 2, into the place of step - 1, which all warps have left
            mbarrier_wait(&shared.hidden_full, step % 2);
            mbarrier_wait(&shared.d_logits_full, step % 2);
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
