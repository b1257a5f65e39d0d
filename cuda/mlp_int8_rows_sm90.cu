// A whole int8 network for many rows in one launch: for each layer  q, s = quantize(x),
// x = act(((float)(q · wᵀ) · s) · scale_w + bias), with a ReLU after each layer but the last. The arithmetic, bit for
// bit, is that of quantize_rows and gemm_int8.
//
//   x (M, K) float, half or bfloat16; each w (N, K) int8, all row-major; y (M, N) float, N <= 64 of the last layer.
//
// The idea: what lies between two layers never leaves the chip. A cluster of C blocks owns R rows of the batch, and the
// products are turned around: outputs are the 64 rows of a wgmma and the batch is its N, so that R may be anything and
// the batch divides evenly. A block multiplies SLICE outputs of a hidden layer for all R rows, and its sums stay in
// registers until the largest value of each batch row is known, over the cluster; then they are quantized from there.
//
//   weights      stream through a ring of stages, loaded by one thread, and start before x is quantized.
//   activations  int8, lie in shared memory in panels of R rows of 128 bytes, as wgmma reads them. Each block quantizes
//                its share of x, or its slice of a hidden layer, and sends it to the others with the bulk copy engine.
//                One buffer serves all layers: it is written again when all blocks of the cluster have multiplied.
//   pairs        of outputs 2 a and 2 a + 1 fall to one thread (the tensor map interleaves the rows of w), so that
//                stmatrix, which moves 16 bits, writes the transposed activations.
#include "common/rows_sm90.cuh"

constexpr int LAYERS = 4;
constexpr int HEAD = 64;  // rows of a last layer's weights that are loaded
struct Maps { TensorMap w[LAYERS]; };

struct Layer {
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // static scale of the input, or null
    int N, K, step_w, unused;
};

struct Network {
    Layer layer[LAYERS];
    const void* x;
    float* y;
    int M, layers;
    int kind;    // of x: 0 float, 1 half, 2 bfloat16
    int panels;  // of the activations' buffer
    int stages;
    int unused;
};

// --- the kernel -------------------------------------------------------------------------------------------------------

// R rows a cluster, MI wgmma tiles of 64 outputs a warpgroup, C blocks a cluster; the last layer's products take HEAD_R
// rows at once, at least a block's share.
template <int R, int MI, int C, int HEAD_R>
__global__ void __launch_bounds__(THREADS, 1)
mlp_int8_rows_sm90(const __grid_constant__ Maps maps, const __grid_constant__ Network net) {
    constexpr int SLICE = 2 * MI * 64, SHARE = R / C, PANEL = R * ROW, STAGE = SLICE * ROW;
    static_assert(R % C == 0 && SHARE % 8 == 0, "blocks share out whole groups of swizzled rows");
    static_assert(R % 16 == 0 && HEAD_R >= SHARE && HEAD_R <= R, "products take 16 rows, the last one a block's share");
    static_assert(MI * R / 2 <= 160, "the sums must fit a thread's registers");
    extern __shared__ __align__(1024) char shared[];
    char* const act = shared;
    char* const ring = act + net.panels * PANEL;
    float* const scales = reinterpret_cast<float*>(ring + net.stages * STAGE);  // of the rows, NaN for a spoilt one
    unsigned* const maxima = reinterpret_cast<unsigned*>(scales + R);
    float2* const dividers = reinterpret_cast<float2*>(maxima + R);  // factor and reciprocal, as in Divider
    auto* const full = reinterpret_cast<unsigned long long*>(dividers + R);
    auto* const empty = full + MOST_STAGES;
    auto* const received = empty + MOST_STAGES;  // the others' activations
    auto* const raised = received + 1;           // the others' maxima

    const int rank = C > 1 ? cluster_rank() : 0, last = net.layers - 1;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32;
    const long long m0 = static_cast<long long>(blockIdx.x / C) * R;
    if (threadIdx.x == 32) prefetch_input(net.x, m0 + rank * SHARE, net.M, net.layer[0].K, net.kind, SHARE);
    if (threadIdx.x == 0) {
        for (int s = 0; s < net.stages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], 2);
        }
        mbarrier_init(received, 1);
        mbarrier_init(raised, max(1, C - 1));
        mbarrier_init_fence();
        if (C > 1) mbarrier_expect_bytes(received, (C - 1) * SHARE * (panels_of(net.layer[0].K) * ROW + 4));
    }
    for (int r = threadIdx.x; r < R; r += THREADS) maxima[r] = 0;
    if (C > 1) cluster_sync();
    else __syncthreads();

    // One thread loads the weights of all layers, one panel after the other.
    int load_layer = 0, load_panel = 0, load_stage = 0;
    unsigned load_phase = 1;
    auto load_next = [&] {
        mbarrier_wait(&empty[load_stage], load_phase);
        char* const to = ring + load_stage * STAGE;
        if (load_layer < last) {
            mbarrier_expect_bytes(&full[load_stage], STAGE);
            tma_load_pairs(to, &maps.w[load_layer], &full[load_stage], load_panel * ROW, rank * (SLICE / 16));
        } else {
            mbarrier_expect_bytes(&full[load_stage], HEAD * ROW);
            tma_load(to, &maps.w[load_layer], &full[load_stage], load_panel * ROW, 0);
        }
        if (++load_stage == net.stages) load_stage = 0, load_phase ^= 1;
        if (++load_panel == panels_of(net.layer[load_layer].K)) load_panel = 0, ++load_layer;
    };
    if (threadIdx.x == 0)
        for (int i = 0; i < net.stages && load_layer <= last; ++i) load_next();

    quantize_input<R>(act, scales, net.x, m0 + rank * SHARE, net.M, net.layer[0].K, net.kind, net.layer[0].scale_x,
                      rank * SHARE, SHARE);
    fence_proxy_async();
    __syncthreads();
    if (C > 1) send_input<R, C>(act, scales, panels_of(net.layer[0].K), rank, received);

    if (warpgroup == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            while (load_layer <= last) load_next();
        __syncwarp();
    } else {
        take_registers<232>();
        const int mine = warpgroup - 1, thread = threadIdx.x - WARPGROUP, warp = thread / 32 % 4;
        int stage = 0;
        unsigned phase = 0;
        auto next_stage = [&] {
            if (++stage == net.stages) stage = 0, phase ^= 1;
        };
        auto release = [&](int s) {
            if (thread % WARPGROUP == 0) mbarrier_arrive(&empty[s]);
        };

#pragma unroll 1
        for (int l = 0; l < last; ++l) {
            const Layer& layer = net.layer[l];
            // acc[i][4 j + c + 2 h]: output first + 64 i + h, row 8 j + 2 * (lane % 4) + c of the cluster's
            const int first = rank * SLICE + mine * MI * 64 + 16 * warp + lane / 4 * 2;
            const Outputs<MI> outputs(layer.scale_w, layer.bias, layer.step_w, first, layer.N);
            if (C > 1) mbarrier_wait(received, l & 1);

            int acc[MI][R / 2];
            multiply_rows<R, MI, STAGE>(acc, act, ring, full, layer.K, mine * MI, net.stages, stage, phase, release);

            scale_sums<R, MI>(acc, scales, outputs, maxima);
            raise_maxima<R, C>(maxima, raised, rank, l & 1);
            if (C > 1 && thread == 0) mbarrier_expect_bytes(received, (C - 1) * PANEL * MI);
            rescale<R>(scales, dividers, maxima, net.layer[l + 1].scale_x);
            quantize_values<R, MI>(acc, scales, dividers, act, rank * SLICE + mine * MI * 64);
            if (C > 1 && thread < C - 1) bulk_send(act + rank * MI * PANEL, MI * PANEL, received, (rank + 1 + thread) % C);
        }

        if (C > 1) mbarrier_wait(received, last & 1);
        if (mine == 0) {  // the last layer: a block's share of the rows, all outputs
            const Layer& layer = net.layer[last];
            const int from = min(rank * SHARE, R - HEAD_R);
            float scale_w[2], bias[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int n = min(16 * warp + lane / 4 + 8 * h, layer.N - 1);
                scale_w[h] = layer.scale_w[n * layer.step_w];
                bias[h] = layer.bias ? layer.bias[n] : -0.0f;
            }
            int acc[HEAD_R / 2];
            const int panels = panels_of(layer.K);
            for (int panel = 0; panel < panels; ++panel) {
                mbarrier_wait(&full[stage], phase);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < 4; ++kk)
                    wgmma_s8<HEAD_R>(acc, wgmma_descriptor(ring + stage * STAGE + kk * 32, 16),
                                     wgmma_descriptor(act + panel * PANEL + from * ROW + kk * 32, 16), panel + kk > 0);
                wgmma_commit();
                wgmma_wait<0>();
                release(stage);
                release(stage);  // for the other warpgroup, which has nothing to do here
                next_stage();
            }
#pragma unroll
            for (int e = 0; e < HEAD_R / 2; ++e) {
                const int n = 16 * warp + lane / 4 + e % 4 / 2 * 8, r = from + e / 4 * 8 + lane % 4 * 2 + e % 2;
                if (n >= layer.N || r < rank * SHARE || r >= (rank + 1) * SHARE || m0 + r >= net.M) continue;
                const float scaled = __fmul_rn(__fmul_rn(static_cast<float>(acc[e]), scales[r]), scale_w[e % 4 / 2]);
                net.y[(m0 + r) * layer.N + n] = __fadd_rn(scaled, bias[e % 4 / 2]);
            }
        }
    }
    if (C > 1) cluster_sync();  // no block leaves while another may still reach its memory
}
