// From COO to CSR: the offsets of the rows among entries that are sorted by row.

constexpr int WARP = 32, THREADS = 256;

// row_offsets (N + 1,): entry i closes all rows after its predecessor's up to its own; a last thread closes the rest. Where
// many rows are empty, the whole warp closes them.
__global__ void __launch_bounds__(THREADS)
spmm_coo_offsets(const int* __restrict__ rows, int* __restrict__ row_offsets, long long nnz, long long N) {
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const int lane = threadIdx.x % WARP;
    long long first = 0, last = -1;
    if (i <= nnz) {
        first = i == 0 ? 0 : rows[i - 1] + 1ll;
        last = i == nnz ? N : rows[i];
    }
    const bool many = last - first >= WARP;
    if (!many)
        for (long long n = first; n <= last; ++n) row_offsets[n] = static_cast<int>(i);
    for (unsigned left = __ballot_sync(~0u, many); left; left &= left - 1) {
        const int source = __ffs(left) - 1;
        const long long from = __shfl_sync(~0u, first, source), to = __shfl_sync(~0u, last, source);
        for (long long n = from + lane; n <= to; n += WARP) row_offsets[n] = static_cast<int>(i - lane + source);
    }
}
