// An int8 layer of float activations in one launch: q, s = quantize(x), y = act(((float)(q · wᵀ) · s) · scale_w + bias).
// The arithmetic, bit for bit, is that of quantize_rows and gemm_int8.
//
//   x (M, K) float, half or bfloat16, K <= 1,024; w (N, K) int8; y (M, N) float, half or bfloat16; all row-major.
//
// The idea: x is read once and its integers stay on the chip. A cluster of C blocks owns R rows; each block quantizes its
// share of them and sends it to the others, and then multiplies SLICE outputs of every C * SLICE for all R rows. The
// weights start to arrive before x does; they are read again for each cluster, from L2.
#include "common/rows_sm90.cuh"

struct Linear {
    const void* x;
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // a static scale, or null
    void* y;
    int M, N, K, step_w;
    int kind;    // of x: 0 float, 1 half, 2 bfloat16
    int stages;
    int relu, unused;
};

template <typename O, int R, int MI, int C>
__global__ void __launch_bounds__(THREADS, 1)
linear_int8_sm90(const __grid_constant__ TensorMap map, const __grid_constant__ Linear e) {
    constexpr int SLICE = 2 * MI * 64, SHARE = R / C, STAGE = SLICE * ROW;
    static_assert(R % 16 == 0 && R % C == 0 && SHARE % 8 == 0, "blocks share out whole groups of swizzled rows");
    static_assert(MI * R / 2 <= 160, "the sums must fit a thread's registers");
    extern __shared__ __align__(1024) char shared[];
    const int panels = panels_of(e.K);
    char* const act = shared;
    char* const ring = act + panels * R * ROW;
    float* const scales = reinterpret_cast<float*>(ring + e.stages * STAGE);  // of the rows, NaN for a spoilt one
    auto* const full = reinterpret_cast<unsigned long long*>(scales + R);
    auto* const empty = full + MOST_STAGES;
    auto* const received = empty + MOST_STAGES;  // the others' rows

    const int rank = C > 1 ? cluster_rank() : 0;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32;
    const long long m0 = static_cast<long long>(blockIdx.x / C) * R;
    if (threadIdx.x == 32) prefetch_input(e.x, m0 + rank * SHARE, e.M, e.K, e.kind, SHARE);
    if (threadIdx.x == 0) {
        for (int s = 0; s < e.stages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], 2);
        }
        mbarrier_init(received, 1);
        mbarrier_init_fence();
        if (C > 1) mbarrier_expect_bytes(received, (C - 1) * SHARE * (panels * ROW + 4));
    }
    if (C > 1) cluster_sync();
    else __syncthreads();

    // One thread loads the weights of this block's outputs, one panel after the other.
    int load_n = rank * SLICE, load_panel = 0, load_stage = 0;
    unsigned load_phase = 1;
    auto load_next = [&] {
        mbarrier_wait(&empty[load_stage], load_phase);
        mbarrier_expect_bytes(&full[load_stage], STAGE);
        tma_load_pairs(ring + load_stage * STAGE, &map, &full[load_stage], load_panel * ROW, load_n / 16);
        if (++load_stage == e.stages) load_stage = 0, load_phase ^= 1;
        if (++load_panel == panels) load_panel = 0, load_n += C * SLICE;
    };
    if (threadIdx.x == 0)
        for (int i = 0; i < e.stages && load_n < e.N; ++i) load_next();

    quantize_input<R>(act, scales, e.x, m0 + rank * SHARE, e.M, e.K, e.kind, e.scale_x, rank * SHARE, SHARE);
    fence_proxy_async();
    __syncthreads();
    if (C > 1) send_input<R, C>(act, scales, panels, rank, received);

    if (warpgroup == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            while (load_n < e.N) load_next();
        __syncwarp();
    } else {
        take_registers<232>();
        const int mine = warpgroup - 1, warp = threadIdx.x / 32 % 4;
        int stage = 0;
        unsigned phase = 0;
        auto release = [&](int s) {
            if (threadIdx.x % WARPGROUP == 0) mbarrier_arrive(&empty[s]);
        };
        if (C > 1) mbarrier_wait(received, 0);
        O* const y = static_cast<O*>(e.y) + m0 * e.N;
        const int rows = static_cast<int>(min(static_cast<long long>(R), e.M - m0));
#pragma unroll 1
        for (int slice = rank * SLICE; slice < e.N; slice += C * SLICE) {
            // acc[i][4 j + c + 2 h]: output first + 64 i + h, row 8 j + 2 * (lane % 4) + c of the cluster's
            const int first = slice + mine * MI * 64 + 16 * warp + lane / 4 * 2;
            const Outputs<MI> outputs(e.scale_w, e.bias, e.step_w, first, e.N);
            int acc[MI][R / 2];
            multiply_rows<R, MI, STAGE>(acc, act, ring, full, e.K, mine * MI, e.stages, stage, phase, release);
#pragma unroll
            for (int j = 0; j < R / 8; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int m = 8 * j + lane % 4 * 2 + c;
                    const float scale = scales[m];
#pragma unroll
                    for (int i = 0; i < MI; ++i) {
                        float v[2];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const float scaled = __fmul_rn(static_cast<float>(acc[i][4 * j + c + 2 * h]), scale);
                            v[h] = __fadd_rn(__fmul_rn(scaled, outputs.scale[i][h]), outputs.bias[i][h]);
                            if (e.relu) v[h] = relu_of(v[h]);
                        }
                        const int n = first + 64 * i;
                        if (m < rows && n < e.N)
                            *reinterpret_cast<typename Pair<O>::type*>(y + static_cast<long long>(m) * e.N + n) =
                                pair_from<O>(v[0], v[1]);
                    }
                }
            }
        }
    }
    if (C > 1) cluster_sync();  // no block leaves while another may still read its rows
}
