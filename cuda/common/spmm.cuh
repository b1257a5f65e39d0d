// What the sparse kernels share: the end of an output, slabs of x in shared memory, and a ring of them.
#pragma once
#include "numeric.cuh"
#include "shared.cuh"

constexpr int WARP = 32;

template <typename T>
__device__ __forceinline__ void finish(T* y, float sum, const T* bias, long long n, int relu) {
    if (bias) sum += to_float(bias[n]);
    *y = from_float<T>(relu ? relu_of(sum) : sum);
}

// The sums of all lanes, sum i in lanes i * 32 / COUNT and on: at each step half of the sums goes to the other half of lanes.
template <int COUNT> __device__ __forceinline__ float add_lanes(float (&sums)[COUNT], int lane) {
    int step = WARP / 2;
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2, step /= 2)
#pragma unroll
        for (int j = 0; j < half; ++j) {
            const float kept = lane & step ? sums[j + half] : sums[j], given = lane & step ? sums[j] : sums[j + half];
            sums[j] = kept + __shfl_xor_sync(~0u, given, step);
        }
    for (; step > 0; step /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], step);
    return sums[0];
}

// --- a plan: which entries of W's rows lie in which slab ---------------------------------------------------------------

// A virtual row: the row n of W, where in `partial` its sums go (-1: to y), and the entries [begin, end) that the slabs
// leave over: all of a row whose columns do not ascend.
struct Part {
    int n, slot, begin, end;
};

// The entries [begin, end) of a virtual row in one slab. A row whose columns do not ascend has none: see `slot`.
struct Segment {
    int begin, end;
};

struct Weights {  // without its values
    const void* cols;
    const int* row_offsets;
    const Segment* segments;
    const Part* parts;
    const int* first;
    long long N, K, stride;
    int nnz, slabs, width;
};

// --- slabs: some columns k of x for the block's batch rows m, turned: [k][m] ----------------------------------------
//
// A line holds the batch rows of one column, in chunks of 16 bytes. Chunk c of column k is moved to place c XOR k % 8, for
// 16-bit types c XOR k / 8 % 8: so a warp that reads one line, and one that turns a patch of x, both touch every bank once.

template <typename T> constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));  // elements in a vector of 16 bytes
template <typename T> constexpr int WORD = 4 / static_cast<int>(sizeof(T));     // elements in a bank's 4 bytes

template <typename T> __device__ __forceinline__ unsigned turn(int k) { return k / (WORD<T> == 1 ? 1 : VECTOR<T>) % 8u * 16; }

// AHEAD entries of a lane, `step` apart; beyond `end` they lie in no column.
template <typename T, int AHEAD> struct EntriesAhead {
    T values[AHEAD];
    unsigned cols[AHEAD];

    template <typename I>
    __device__ __forceinline__ void load(const T* all_values, const I* all_cols, int from, int end, int step) {
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const bool there = from + u * step < end;
            values[u] = there ? all_values[from + u * step] : from_float<T>(0.0f);
            cols[u] = there ? static_cast<unsigned>(all_cols[from + u * step]) : ~0u;
        }
    }
};

// V batch rows a lane: neighbours as far as 16 bytes go, further ones half a line away.
template <typename T, int V> struct Lane {
    static constexpr int BATCH = WARP * V;  // of the warp
    static constexpr int LINE = BATCH * static_cast<int>(sizeof(T));
    static constexpr int NEXT_TO = V < VECTOR<T> ? V : VECTOR<T>;
    static constexpr int BYTES = NEXT_TO * static_cast<int>(sizeof(T));
    static_assert(LINE % 128 == 0, "the swizzle moves chunks within 128 bytes");

    static __device__ __forceinline__ int row(int lane, int j) {
        return j / NEXT_TO * (WARP * NEXT_TO) + lane * NEXT_TO + j % NEXT_TO;
    }
};

// The WORDS words of shared memory at `from`. Volatile: no load passes a wait.
template <int WORDS> __device__ __forceinline__ void load_words(unsigned (&to)[WORDS], unsigned from) {
    if constexpr (WORDS == 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from));
    else if constexpr (WORDS == 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from));
}

// The part of a line that a lane holds, as it is stored.
template <typename T, int V> struct Piece {
    using L = Lane<T, V>;
    static constexpr int WORDS = L::BYTES / 4, PARTS = V / L::NEXT_TO;
    unsigned words[PARTS][WORDS];

    __device__ __forceinline__ void load(unsigned from) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) load_words(words[part], from + part * WARP * L::BYTES);
    }
    // The lane's part of the dot product with 16 bytes that are stored the same way.
    __device__ __forceinline__ float dot(const uint4& other) const {
        static_assert(WORDS == 4 && PARTS == 1, "16 bytes a lane");
        const unsigned* others = reinterpret_cast<const unsigned*>(&other);
        float sum = 0.0f;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            if constexpr (WORD<T> == 1) {
                sum = fmaf(__uint_as_float(words[0][word]), __uint_as_float(others[word]), sum);
            } else {
                using P = typename Pair<T>::type;
                const P a = *reinterpret_cast<const P*>(&words[0][word]), b = *reinterpret_cast<const P*>(&others[word]);
                sum = fmaf(to_float(a.x), to_float(b.x), sum);
                sum = fmaf(to_float(a.y), to_float(b.y), sum);
            }
        }
        return sum;
    }
    __device__ __forceinline__ void add_to(float (&sums)[V], float factor) const {
#pragma unroll
        for (int q = 0; q < V / WORD<T>; ++q) {
            const unsigned word = words[q / WORDS][q % WORDS];
            if constexpr (WORD<T> == 1) {
                sums[q] = fmaf(factor, __uint_as_float(word), sums[q]);
            } else {
                const typename Pair<T>::type pair = *reinterpret_cast<const typename Pair<T>::type*>(&word);
                sums[2 * q] = fmaf(factor, to_float(pair.x), sums[2 * q]);
                sums[2 * q + 1] = fmaf(factor, to_float(pair.y), sums[2 * q + 1]);
            }
        }
    }
};

// --- a warp's way through the entries of its rows in a slab: 32 at a time, a chunk ahead of their use -------------------

// An entry as the consumers need it: its value, and the address of its column's line, turned.
struct Entry {
    float value;
    unsigned line;
};

// Two entries, read by the whole warp at once.
__device__ __forceinline__ void load_entries(Entry (&to)[2], unsigned from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(reinterpret_cast<unsigned&>(to[0].value)), "=r"(to[0].line),
                   "=r"(reinterpret_cast<unsigned&>(to[1].value)), "=r"(to[1].line)
                 : "r"(from));
}

// A matrix (M, K) whose element (m, k) lies at data[m * m_step + k * k_step]; one step is 1. `wide` says that along that
// direction it consists of whole vectors on multiples of 16 bytes.
template <typename T> struct Matrix {
    const T* data;
    long long m_step, k_step, M, K;
    bool wide;

    __device__ __forceinline__ T at(long long m, long long k) const { return data[m * m_step + k * k_step]; }

    // The vector from (m, k) on, of a wide matrix; zeros beyond it.
    __device__ __forceinline__ uint4 vector(long long m, long long k) const {
        uint4 v = {0, 0, 0, 0};
        if (m < M && k < K)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "l"(data + m * m_step + k * k_step));
        return v;
    }
};

// Start copying BYTES (4 or 16) from global to shared memory; zeros arrive, and nothing is read, where not `inside`.
template <int BYTES> __device__ __forceinline__ void start_copy(char* to, const void* from, bool inside) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                     "r"(inside ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
                     "r"(inside ? 4 : 0) : "memory");
}

// Warp `warp` of WARPS fills its share of a slab: columns k0 to k0 + width of x, batch rows m0 to m0 + BATCH. Returns
// whether by copies that still go on.
template <typename T, int V, int WARPS>
__device__ __forceinline__ bool fill_slab(char* slab, const Matrix<T>& x, long long m0, long long k0, int width,
                                          int warp, int lane) {
    using L = Lane<T, V>;
    if (x.m_step == 1 && x.k_step != 1 && x.wide) {
        constexpr int CHUNKS = L::LINE / 16;
        for (int at = warp * WARP + lane; at < width * CHUNKS; at += WARPS * WARP) {
            const int k = at / CHUNKS, chunk = at % CHUNKS;
            const long long m = m0 + chunk * VECTOR<T>;
            start_copy<16>(slab + k * L::LINE + (chunk * 16 ^ turn<T>(k)), x.data + m + (k0 + k) * x.k_step, m < x.M);
        }
        return true;
    }
    if (WORD<T> == 1 && x.k_step == 1) {  // patches of 8 columns x 4 rows, a word a lane
        for (int m = warp * 4 + lane / 8; m < L::BATCH; m += WARPS * 4) {
            const bool inside = m0 + m < x.M;
            const T* from = x.data + (m0 + m) * x.m_step + k0;
            const unsigned place = m * 4 ^ turn<T>(lane % 8);
#pragma unroll 8
            for (int k = lane % 8; k < width; k += 8) start_copy<4>(slab + k * L::LINE + place, from + k, inside);
        }
        return true;
    }
    if (WORD<T> == 2 && x.k_step == 1 && x.wide) {
        // A lane turns 2 rows x 8 columns; a warp's patch is 8 such vectors along k, 4 words along m.
        constexpr int LOADS = 12;                 // in flight a lane
        constexpr int DOWN = L::BATCH / (4 * 2);  // patches along m
        constexpr int AT_ONCE = LOADS / 2;
        const int patches = (width + 8 * VECTOR<T> - 1) / (8 * VECTOR<T>) * DOWN;
        const int k_in_patch = lane % 8 * VECTOR<T>, m_in_patch = lane / 8 * 2;
#pragma unroll 1
        for (int patch0 = warp; patch0 < patches; patch0 += AT_ONCE * WARPS) {
            uint4 v[AT_ONCE][2];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int patch = patch0 + u * WARPS;
                const int k = patch / DOWN * 8 * VECTOR<T> + k_in_patch, m = patch % DOWN * 8 + m_in_patch;
#pragma unroll
                for (int p = 0; p < 2; ++p) v[u][p] = x.vector(m0 + m + p, patch < patches ? k0 + k : x.K);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int patch = patch0 + u * WARPS;
                if (patch >= patches) break;
                const int k = patch / DOWN * 8 * VECTOR<T> + k_in_patch, m = patch % DOWN * 8 + m_in_patch;
                char* const to = slab + k * L::LINE + (m * 2 ^ turn<T>(k));
#pragma unroll
                for (int i = 0; i < VECTOR<T>; ++i) {
                    const unsigned low = reinterpret_cast<const unsigned*>(&v[u][0])[i / 2];
                    const unsigned high = reinterpret_cast<const unsigned*>(&v[u][1])[i / 2];
                    *reinterpret_cast<unsigned*>(to + i * L::LINE) = __byte_perm(low, high, i % 2 ? 0x7632 : 0x5410);
                }
            }
        }
        return false;
    }
    // element by element, neighbours to neighbouring lanes
    const bool along_k = x.k_step == 1;
    const int length = along_k ? width : L::BATCH, all = width * L::BATCH;
    for (int at = warp * WARP + lane; at < all; at += WARPS * WARP) {
        const int k = along_k ? at % length : at / length, m = along_k ? at / length : at % length;
        const unsigned place = m * static_cast<unsigned>(sizeof(T)) ^ turn<T>(k);
        *reinterpret_cast<T*>(slab + k * L::LINE + place) = m0 + m < x.M ? x.at(m0 + m, k0 + k) : from_float<T>(0.0f);
    }
    return false;
}

// --- mbarriers, as far as Ampere has them: a slab is full, or all consumers have left it ------------------------------

__device__ __forceinline__ void pipe_init(unsigned long long* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// This thread is done with what it read or wrote, or will be once its copies have arrived.
__device__ __forceinline__ void pipe_arrive(unsigned long long* barrier, bool copies = false) {
    if (copies)
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
    else
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                     : "memory");
}

// A barrier alternates between two phases; wait until the phase of this parity is over.
__device__ __forceinline__ void pipe_wait(unsigned long long* barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
                 ::"r"(shared_address(barrier)), "r"(parity) : "memory");
#else
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
                 ::"r"(shared_address(barrier)), "r"(parity) : "memory");
#endif
}
