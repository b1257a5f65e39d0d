// The last layer of train_mlp_grid_sm90.cu, forth and back.
#pragma once
#include "grid_products_sm90.cuh"

constexpr int CLASSES = 16;

// The weights of the head to shared memory, (PARTS, CLASSES, pitch): ahead of the barrier.
constexpr int HEAD_SUMS = WARPS * GROUP * CLASSES * 4;  // bytes of shared memory before them, and the logits' gradient
__device__ __forceinline__ int head_pitch(int width) { return (width + 31) / 64 * 64 + 32; }  // two rows share no bank

template <int PARTS>
__device__ __forceinline__ void fetch_head(Halves w, int classes, Half* weights) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, chunks = w.ld / 8, pitch = head_pitch(w.ld);
#pragma unroll
    for (int row = warp; row < PARTS * CLASSES; row += WARPS) {
        const int k = row % CLASSES, of = row / CLASSES;
        const Half* const from = w.data + of * w.part + (k < classes ? k * w.ld : 0);
        for (int i = lane; i < chunks; i += WARP)
            copy_async(shared_address(weights + row * pitch + i * 8), from + i * 8, k < classes);
    }
    copy_commit();
}

// The loss of GROUP images and its gradients by the logits and by the layer below them, before its ReLU (times
// D_SCALE), with the sums of both. The warps divide K among them, then the units from `begin` to `end`, of 16 columns of
// the layer below; the first part writes what is not below. label: of image threadIdx / 8.
template <int PARTS, typename T>
__device__ __forceinline__ void head(Halves x, Halves gradient, Halves below, float* sums, float* sums_below,
                                     const float* bias, long long label, float* losses, int first, int count,
                                     int classes, int part, int begin, int end, char* shared, const Half* weights) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int pitch = head_pitch(x.ld);
    auto* const logits = reinterpret_cast<float(*)[GROUP][CLASSES]>(shared);
    auto* const d_logits = reinterpret_cast<Half(*)[GROUP][CLASSES + 8]>(logits + WARPS);

    const int row = threadIdx.x / 8 % GROUP, at = threadIdx.x % 8 * 2, m = first + row;  // 8 lanes an image
    float b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) b[i] = at + i < classes ? __ldcg(bias + at + i) : 0.0f;
    const auto load = [&](int part, int row, int k) {
        const int at = part * static_cast<int>(x.part) + row * x.ld + k;
        return row < count && k < x.ld ? __ldcg(reinterpret_cast<const uint4*>(x.data + at)) : uint4{};
    };
    // The outputs below that this warp takes the gradient of, the first of them ahead.
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
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<float2*>(&logits[warp][g + h * 8][j * 8 + 2 * t]) = {acc[j][2 * h], acc[j][2 * h + 1]};
    __syncthreads();

    // As exact as the operands.
    const auto exponential = [](float v) { return PARTS == 2 ? expf(v) : __expf(v); };
    const auto logarithm = [](float v) { return PARTS == 2 ? logf(v) : __logf(v); };
    const auto quotient = [](float a, float b) { return PARTS == 2 ? a / b : __fdividef(a, b); };
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
        for (int i = 0; i < 2; ++i) e[i] = at + i < classes ? exponential(logit[i] - largest) : 0.0f;
        float total = e[0] + e[1];
#pragma unroll
        for (int step = 4; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        if (m < count) {
            const bool valid = label >= 0 && label < classes;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool chosen = at + i == label;
                d[i] = valid ? (quotient(e[i], total) - (chosen ? 1.0f : 0.0f)) * D_SCALE : not_a_number();
                if (part == 0 && (valid ? chosen : at + i == 0))
                    losses[m] = valid ? logarithm(total) - (logit[i] - largest) : d[i];
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
