// What the sparse kernels share: the end of an output, groups of stored entries, and slabs of x in shared memory.
#pragma once
#include "numeric.cuh"
#include "shared.cuh"

constexpr int WARP = 32;
constexpr int GROUP = 4;  // stored entries that are read at once

template <typename T>
__device__ __forceinline__ void finish(T* y, float sum, const T* bias, long long n, int relu) {
    if (bias) sum += to_float(bias[n]);
    *y = from_float<T>(relu ? relu_of(sum) : sum);
}

// --- four neighbouring values or column indices, read with one instruction ------------------------------------------

template <typename A> struct Four;
template <> struct Four<float> { using type = float4; };
template <> struct Four<int> { using type = int4; };
template <> struct Four<unsigned short> { using type = ushort4; };
template <> struct Four<__half> { using type = ushort4; };
template <> struct Four<__nv_bfloat16> { using type = ushort4; };

template <typename A> __device__ __forceinline__ typename Four<A>::type four(const A* from) {
    return *reinterpret_cast<const typename Four<A>::type*>(from);
}

template <typename T> __device__ __forceinline__ void unpack(float (&to)[GROUP], const ushort4& v) {
    const T parts[GROUP] = {*reinterpret_cast<const T*>(&v.x), *reinterpret_cast<const T*>(&v.y),
                            *reinterpret_cast<const T*>(&v.z), *reinterpret_cast<const T*>(&v.w)};
    for (int j = 0; j < GROUP; ++j) to[j] = to_float(parts[j]);
}
template <typename T> __device__ __forceinline__ void unpack(float (&to)[GROUP], const float4& v) {
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// --- slabs: some columns k of x for the block's batch rows m, turned: [k][m] ----------------------------------------
//
// A line holds the batch rows of one column, in chunks of 16 bytes. Chunk c of column k is moved to place
// c XOR (k / VECTOR % 8): so a warp that reads one line, and one that turns 8 vectors along k into 8 x VECTOR lines,
// both touch every bank once.

template <typename T> constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));  // elements in a vector of 16 bytes
template <typename T> constexpr int WORD = 4 / static_cast<int>(sizeof(T));     // elements in a bank's 4 bytes

template <typename T> __device__ __forceinline__ unsigned turn(int k) { return (k * (16 / VECTOR<T>)) & 0x70; }

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

// The WORDS words of shared memory at `from`; where not `wanted`, nothing is read and `to` stays. Volatile: no load
// passes a wait.
template <int WORDS> __device__ __forceinline__ void load_words(unsigned (&to)[WORDS], unsigned from, bool wanted) {
#define QSPARSE_IF_WANTED(CONDITION) "{\n.reg .pred p;\nsetp.ne.u32 p, " CONDITION ", 0;\n@p ld.shared"
    if constexpr (WORDS == 4)
        asm volatile(QSPARSE_IF_WANTED("%5") ".v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                     : "r"(from), "r"(static_cast<int>(wanted)));
    else if constexpr (WORDS == 2)
        asm volatile(QSPARSE_IF_WANTED("%3") ".v2.u32 {%0, %1}, [%2];\n}"
                     : "+r"(to[0]), "+r"(to[1])
                     : "r"(from), "r"(static_cast<int>(wanted)));
    else
        asm volatile(QSPARSE_IF_WANTED("%2") ".u32 %0, [%1];\n}"
                     : "+r"(to[0])
                     : "r"(from), "r"(static_cast<int>(wanted)));
#undef QSPARSE_IF_WANTED
}

// sum += a * b if `wanted`, whatever a * b is.
__device__ __forceinline__ void add_if(bool wanted, float& sum, float a, float b) {
    if (wanted) sum = fmaf(a, b, sum);
}

// The part of a line that a lane holds, as it is stored.
template <typename T, int V> struct Piece {
    using L = Lane<T, V>;
    static constexpr int WORDS = L::BYTES / 4, PARTS = V / L::NEXT_TO;
    unsigned words[PARTS][WORDS];

    __device__ __forceinline__ void load(unsigned from, bool wanted) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int word = 0; word < WORDS; ++word) words[part][word] = 0;  // defined, or registers run out
            load_words(words[part], from + part * WARP * L::BYTES, wanted);
        }
    }
    __device__ __forceinline__ void add_to(float (&sums)[V], float factor, bool wanted) const {
#pragma unroll
        for (int q = 0; q < V / WORD<T>; ++q) {
            const unsigned word = words[q / WORDS][q % WORDS];
            if constexpr (WORD<T> == 1) {
                add_if(wanted, sums[q], factor, __uint_as_float(word));
            } else {
                const typename Pair<T>::type pair = *reinterpret_cast<const typename Pair<T>::type*>(&word);
                add_if(wanted, sums[2 * q], factor, to_float(pair.x));
                add_if(wanted, sums[2 * q + 1], factor, to_float(pair.y));
            }
        }
    }
};

// A matrix (M, K) whose element (m, k) lies at data[m * m_step + k * k_step]; one step is 1. `wide` says that every
// 16 bytes along that direction may be read at once.
template <typename T> struct Matrix {
    const T* data;
    long long m_step, k_step, M, K;
    bool wide;

    __device__ __forceinline__ T at(long long m, long long k) const { return data[m * m_step + k * k_step]; }

    // VECTOR elements from (m, k) along the contiguous direction; zeros beyond the matrix.
    __device__ __forceinline__ uint4 vector(long long m, long long k) const {
        const T* from = data + m * m_step + k * k_step;
        const bool along_k = k_step == 1;
        const long long left = (m >= M || k >= K) ? 0 : along_k ? K - k : M - m;
        uint4 v = {0, 0, 0, 0};
        if (wide && left >= VECTOR<T>) {
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "l"(from));
        } else {
            T* parts = reinterpret_cast<T*>(&v);
#pragma unroll
            for (int i = 0; i < VECTOR<T>; ++i)
                if (i < left) parts[i] = from[i];
        }
        return v;
    }
};

// Warp `warp` of WARPS fills its share of a slab: columns k0 to k0 + width of x, batch rows m0 to m0 + BATCH.
template <typename T, int V, int WARPS>
__device__ __forceinline__ void fill_slab(char* slab, const Matrix<T>& x, long long m0, long long k0, int width,
                                          int warp, int lane) {
    using L = Lane<T, V>;
    constexpr int LOADS = WORD<T> == 1 ? 8 : 4;  // in flight a lane: what registers there are
    if (x.k_step == 1) {
        // A lane turns WORD rows x VECTOR columns; a warp 8 vectors along k, 4 words along m.
        constexpr int STEPS = L::BATCH / (4 * WORD<T>) / WARPS;
        static_assert(STEPS > 0, "every producer has a share");
        constexpr int AT_ONCE = STEPS < LOADS / WORD<T> ? STEPS : LOADS / WORD<T>;
        for (int k = lane % 8 * VECTOR<T>; k < width; k += 8 * VECTOR<T>) {
            char* const lines = slab + k * L::LINE;
#pragma unroll 1
            for (int step = 0; step < STEPS; step += AT_ONCE) {
                const int m = ((warp * STEPS + step) * 4 + lane / 8) * WORD<T>;
                uint4 v[AT_ONCE][WORD<T>];
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u)
#pragma unroll
                    for (int p = 0; p < WORD<T>; ++p) v[u][p] = x.vector(m0 + m + u * 4 * WORD<T> + p, k0 + k);
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u) {
                    const unsigned place = (m + u * 4 * WORD<T>) * static_cast<unsigned>(sizeof(T)) ^ turn<T>(k);
#pragma unroll
                    for (int i = 0; i < VECTOR<T>; ++i) {
                        unsigned word;
                        if constexpr (WORD<T> == 1) {
                            word = reinterpret_cast<const unsigned*>(&v[u][0])[i];
                        } else {
                            const unsigned low = reinterpret_cast<const unsigned*>(&v[u][0])[i / 2];
                            const unsigned high = reinterpret_cast<const unsigned*>(&v[u][WORD<T> - 1])[i / 2];
                            word = __byte_perm(low, high, i % 2 ? 0x7632 : 0x5410);
                        }
                        *reinterpret_cast<unsigned*>(lines + i * L::LINE + place) = word;
                    }
                }
            }
        }
    } else {
        constexpr int CHUNKS = L::LINE / 16;
        const int all = width * CHUNKS;
        for (int u0 = warp * WARP + lane; u0 < all; u0 += LOADS * WARPS * WARP) {
            uint4 v[LOADS];
#pragma unroll
            for (int u = 0; u < LOADS; ++u) {
                const int at = u0 + u * WARPS * WARP;
                if (at < all) v[u] = x.vector(m0 + at % CHUNKS * VECTOR<T>, k0 + at / CHUNKS);
            }
#pragma unroll
            for (int u = 0; u < LOADS; ++u) {
                const int at = u0 + u * WARPS * WARP;
                if (at < all)
                    *reinterpret_cast<uint4*>(slab + at / CHUNKS * L::LINE +
                                              (at % CHUNKS * 16 ^ turn<T>(at / CHUNKS))) = v[u];
            }
        }
    }
}

// --- mbarriers, as far as Ampere has them: a slab is full, or all consumers have left it ------------------------------

__device__ __forceinline__ void pipe_init(unsigned long long* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// The whole warp is done with what it read or wrote: one lane says so.
__device__ __forceinline__ void pipe_arrive(unsigned long long* barrier, int lane) {
    __syncwarp();
    if (lane == 0)
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
