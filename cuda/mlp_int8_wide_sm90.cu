// A network's first int8 layer, from float activations to the int8 input of the second, in one launch: q, s = quantize(x),
// v = relu(((float)(q · wᵀ) · s) · scale_w + bias), y, scales = quantize(v). The arithmetic, bit for bit, is that of
// quantize_rows and gemm_int8.
//
//   x (M, K) float, half or bfloat16, K <= 1,024; w (N, K) int8, N <= C * SLICE; y (M, N) int8; scales (M,) float; all
//   row-major.
//
// The idea: a row's scale is known when all its outputs are, and the blocks of one large cluster hold them all in
// registers: R rows of them, SLICE outputs a block. So the values are never written as floats and read again.
#include "common/rows_sm90.cuh"

struct First {
    const void* x;
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // a static scale of x, or null
    const float* scale_y;  // a static scale of y, or null
    float* scales;
    int M, N, K, step_w;
    int kind;  // of x: 0 float, 1 half, 2 bfloat16
    int stages;
};

template <int R, int MI, int C>
__global__ void __launch_bounds__(THREADS, 1)
mlp_int8_wide_sm90(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap y_map,
                   const __grid_constant__ First e) {
    constexpr int SLICE = 2 * MI * 64, SHARE = SHARE_OF<R, C>, PANEL = R * ROW, STAGE = SLICE * ROW;
    static_assert(R % 16 == 0 && R % SHARE == 0 && C > 1, "blocks share out whole groups of swizzled rows");
    static_assert(MI * R / 2 <= 160, "the sums must fit a thread's registers");
    extern __shared__ __align__(1024) char shared[];
    const int panels = panels_of(e.K), rank = cluster_rank();
    char* const act = shared;
    char* const ring = act + max(panels, MI) * PANEL;
    float* const scales = reinterpret_cast<float*>(ring + e.stages * STAGE);  // of the rows, NaN for a spoilt one
    unsigned* const maxima = reinterpret_cast<unsigned*>(scales + R);
    float2* const dividers = reinterpret_cast<float2*>(maxima + R);  // factor and reciprocal, as in Divider
    auto* const full = reinterpret_cast<unsigned long long*>(dividers + R);
    auto* const empty = full + MOST_STAGES;
    auto* const received = empty + MOST_STAGES;  // the others' rows
    auto* const raised = received + 1;           // the others' maxima

    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32;
    const long long m0 = static_cast<long long>(blockIdx.x / C) * R;
    const int count = max(0, min(SHARE, R - rank * SHARE));
    if (threadIdx.x == 32) prefetch_input(e.x, m0 + rank * SHARE, e.M, e.K, e.kind, count);
    if (threadIdx.x == 0) {
        for (int s = 0; s < e.stages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], 2);
        }
        mbarrier_init(received, 1);
        mbarrier_init(raised, max(1, C - 1));
        mbarrier_init_fence();
        mbarrier_expect_bytes(received, (R - count) * (panels * ROW + 4));
    }
    for (int r = threadIdx.x; r < R; r += THREADS) maxima[r] = 0;
    cluster_sync();

    int load_panel = 0, load_stage = 0;
    unsigned load_phase = 1;
    auto load_next = [&] {
        mbarrier_wait(&empty[load_stage], load_phase);
        mbarrier_expect_bytes(&full[load_stage], STAGE);
        tma_load_pairs(ring + load_stage * STAGE, &w_map, &full[load_stage], load_panel * ROW, rank * (SLICE / 16));
        if (++load_stage == e.stages) load_stage = 0, load_phase ^= 1;
        ++load_panel;
    };
    if (threadIdx.x == 0)
        while (load_panel < min(e.stages, panels)) load_next();

    quantize_input<R>(act, scales, e.x, m0 + rank * SHARE, e.M, e.K, e.kind, e.scale_x, rank * SHARE, count);
    fence_proxy_async();
    __syncthreads();
    send_input<R, C>(act, scales, panels, rank, received);

    if (warpgroup == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            while (load_panel < panels) load_next();
        __syncwarp();
    } else {
        take_registers<232>();
        const int mine = warpgroup - 1, thread = threadIdx.x - WARPGROUP, warp = thread / 32 % 4;
        int stage = 0;
        unsigned phase = 0;
        auto release = [&](int s) {
            if (thread % WARPGROUP == 0) mbarrier_arrive(&empty[s]);
        };
        const int first = rank * SLICE + mine * MI * 64 + 16 * warp + lane / 4 * 2;
        const Outputs<MI> outputs(e.scale_w, e.bias, e.step_w, first, e.N);
        mbarrier_wait(received, 0);
        int acc[MI][R / 2];
        multiply_rows<R, MI, STAGE>(acc, act, ring, full, e.K, mine * MI, e.stages, stage, phase, release);
        scale_sums<R, MI>(acc, scales, outputs, maxima);
        raise_maxima<R, C>(maxima, raised, rank, 0);
        rescale<R>(scales, dividers, maxima, e.scale_y);
        quantize_values<R, MI>(acc, scales, dividers, act, mine * MI * 64);
        if (thread < MI && rank * SLICE + thread * ROW < e.N) {
            tma_store(&y_map, act + thread * PANEL, rank * SLICE + thread * ROW, static_cast<int>(m0));
            tma_store_commit();
        }
        for (int r = thread; rank == 0 && r < R; r += CONSUMERS)
            if (m0 + r < e.M) e.scales[m0 + r] = scales[r];
        tma_store_wait_read<0>();
    }
    cluster_sync();  // no block leaves while another may still read its rows
}
