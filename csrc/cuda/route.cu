// Which rows are sent: one per token and rank that has one of its experts, ordered by rank, then token. Two launches:
// counts per chunk of tokens, then the rows, every block adding up the chunks before its own. Integers only, no order
// of arrival: always the same result.
//
// Macros: NUM_RANKS, NUM_TOPK, INDEX_BYTES (4 or 8: an entry of topk_idx), SHARED_EXPERTS (1: counts per expert fit
// into shared memory).
#include "device.cuh"

namespace fp4comm {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRanks = NUM_RANKS;
constexpr int kEntriesInFlight = 4;

// Tokens handled at once, 32 to a word: marks[rank * kWords + token / 32] has a bit per token that goes to the rank.
constexpr int kWords = kRanks <= 256 ? 8 : 2;
constexpr int kBatch = kWords * 32;
constexpr int kNumMarks = kRanks * kWords;

#if INDEX_BYTES == 8
using Index = int64_t;
#else
using Index = int32_t;
#endif

struct Experts {
    int64_t num;
    uint32_t per_rank;

    __device__ bool has(int64_t expert) const { return expert >= 0 && expert < num; }
};

struct NoVisit {
    __device__ void operator()(int64_t) const {}
};

// Marks the tokens of a batch; `visit` sees every expert chosen. Returns how many entries of this thread are outside
// [-1, num experts).
template <typename Visit>
__device__ inline int mark_batch(const Index* entries, int num_entries, const Experts& experts, uint32_t* marks,
                                 Visit visit) {
    int bad = 0;
    for (int first = int(threadIdx.x); first < num_entries; first += kThreads * kEntriesInFlight) {
        int64_t expert[kEntriesInFlight];
#pragma unroll
        for (int j = 0; j < kEntriesInFlight; ++j) {
            const int i = first + j * kThreads;
            expert[j] = i < num_entries ? int64_t(entries[i]) : -1;
        }
#pragma unroll
        for (int j = 0; j < kEntriesInFlight; ++j) {
            bad += expert[j] != -1 && !experts.has(expert[j]);
            if (!experts.has(expert[j])) continue;
            const int token = (first + j * kThreads) / (NUM_TOPK > 0 ? NUM_TOPK : 1);
            const uint32_t rank = uint32_t(expert[j]) / experts.per_rank;
            atomicOr(&marks[rank * kWords + uint32_t(token / 32)], 1u << (token % 32));
            visit(expert[j]);
        }
    }
    return bad;
}

template <typename T>
__device__ inline void fill(T* values, int64_t num, int64_t stride, T value) {
    for (int64_t i = threadIdx.x; i < num; i += kThreads) values[i * stride] = value;
}

struct Chunk {
    int64_t begin;
    int64_t end;

    __device__ Chunk(int64_t size, int64_t num_tokens) {
        begin = blockIdx.x * size;
        end = begin + size;
        if (begin > num_tokens) begin = num_tokens;
        if (end > num_tokens) end = num_tokens;
    }
    __device__ int batch(int64_t first) const { return end - first < kBatch ? int(end - first) : kBatch; }
};

// Counts of this block's chunk in a table of one row per rank, one of bad entries and one per expert; chunks are
// columns.
class ChunkCounts {
  public:
    __device__ explicit ChunkCounts(int32_t* table) : table_(table + blockIdx.x) {}
    __device__ int32_t& rank(int64_t r) const { return table_[r * gridDim.x]; }
    __device__ int32_t& bad() const { return rank(kRanks); }
    __device__ int32_t& expert(int64_t e) const { return rank(kRanks + 1 + e); }

  private:
    int32_t* table_;
};

// Sums of a row of that table.
struct RowSums {
    int32_t before;  // over the chunks before this block's
    int32_t total;
};

__device__ inline RowSums sum_row(const int32_t* table, int64_t row) {
    const int lane = int(threadIdx.x) % kWarp;
    RowSums sums{0, 0};
    for (int c = lane; c < int(gridDim.x); c += kWarp) {
        const int32_t count = table[row * gridDim.x + c];
        sums.total += count;
        sums.before += c < int(blockIdx.x) ? count : 0;
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
        sums.total += __shfl_xor_sync(kAllLanes, sums.total, step);
        sums.before += __shfl_xor_sync(kAllLanes, sums.before, step);
    }
    return sums;
}

// One warp turns rows per rank into each rank's first row. `stride` < 0: rank after rank, else that far apart.
__device__ inline void first_rows(const int32_t* totals, int64_t stride, int64_t* next) {
    const int lane = int(threadIdx.x);
    int64_t carry = 0;
    for (int r0 = 0; r0 < kRanks; r0 += kWarp) {
        const int r = r0 + lane;
        const int64_t count = r < kRanks ? totals[r] : 0;
        int64_t sum = count;
        for (int step = 1; step < kWarp; step *= 2) {
            const int64_t below = __shfl_up_sync(kAllLanes, sum, unsigned(step));
            sum += lane >= step ? below : 0;
        }
        if (r < kRanks) next[r] += stride < 0 ? carry + sum - count : r * stride;
        carry += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
}

// rows[rank * kWords + word] = row of the first marked token of each word; moves `next` past the batch.
__device__ inline void rows_of_words(const uint32_t* marks, int64_t* next, int64_t* rows) {
    for (int r = int(threadIdx.x); r < kRanks; r += kThreads) {
        int64_t row = next[r];
        for (int w = 0; w < kWords; ++w) {
            rows[r * kWords + w] = row;
            row += __popc(marks[r * kWords + w]);
        }
        next[r] = row;
    }
}

__device__ inline void write_rows(const uint32_t* marks, const int64_t* rows, int num_tokens, int64_t* token_rows) {
    for (int i = int(threadIdx.x); i < num_tokens * kRanks; i += kThreads) {
        const int token = i / kRanks;
        const int word = i % kRanks * kWords + token / 32;
        const uint32_t bit = 1u << (token % 32);
        token_rows[i] = marks[word] & bit ? rows[word] + __popc(marks[word] & (bit - 1)) : -1;
    }
}

// Row of `counts` per rank: bad entries, rows, choices per local expert.
__device__ inline void write_rank_counts(const int32_t* totals, int32_t bad, int64_t experts_per_rank, int64_t* counts,
                                         int32_t* status) {
    for (int r = int(threadIdx.x); r < kRanks; r += kThreads) {
        counts[r * (2 + experts_per_rank)] = bad;
        counts[r * (2 + experts_per_rank) + 1] = totals[r];
    }
    if (threadIdx.x == 0 && bad > 0 && status) *static_cast<volatile int32_t*>(status) = 1;
}

__device__ inline void write_expert_counts(const int32_t* table, const Experts& experts, int64_t* counts) {
    const int64_t num_warps = int64_t(gridDim.x) * kWarps;
    const int64_t warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    for (int64_t e = warp; e < experts.num; e += num_warps) {
        const int32_t total = sum_row(table, kRanks + 1 + e).total;
        const int64_t rank = e / experts.per_rank;
        if (threadIdx.x % kWarp == 0) counts[e + 2 * (rank + 1)] = total;
    }
}

}  // namespace

// Dynamic shared memory: kNumMarks + kRanks words, and one per expert if SHARED_EXPERTS.
extern "C" __global__ void __launch_bounds__(kThreads)
    route_count(const Index* topk_idx, int64_t num_tokens, int64_t num_experts, int64_t experts_per_rank,
                int64_t chunk_size, int32_t* table) {
    extern __shared__ uint32_t shared[];
    __shared__ int32_t bad;
    uint32_t* const marks = shared;
    uint32_t* const rank_counts = shared + kNumMarks;
    const Experts experts{num_experts, uint32_t(experts_per_rank)};
    const Chunk chunk(chunk_size, num_tokens);
    const ChunkCounts counts(table);
    fill<uint32_t>(shared, kNumMarks + kRanks, 1, 0);
    if (threadIdx.x == 0) bad = 0;
#if SHARED_EXPERTS
    int32_t* const expert_counts = reinterpret_cast<int32_t*>(rank_counts + kRanks);
    const int64_t expert_stride = 1;
#else
    int32_t* const expert_counts = &counts.expert(0);
    const int64_t expert_stride = gridDim.x;
#endif
    fill<int32_t>(expert_counts, num_experts, expert_stride, 0);
    __syncthreads();
    int my_bad = 0;
    for (int64_t first = chunk.begin; first < chunk.end; first += kBatch) {
        my_bad += mark_batch(topk_idx + first * NUM_TOPK, chunk.batch(first) * NUM_TOPK, experts, marks,
                             [=](int64_t e) { atomicAdd(&expert_counts[e * expert_stride], 1); });
        __syncthreads();
        for (int r = int(threadIdx.x); r < kRanks; r += kThreads) {
            for (int w = 0; w < kWords; ++w) {
                rank_counts[r] += uint32_t(__popc(marks[r * kWords + w]));
                marks[r * kWords + w] = 0;
            }
        }
        __syncthreads();
    }
    if (my_bad) atomicAdd(&bad, my_bad);
    __syncthreads();
    for (int r = int(threadIdx.x); r < kRanks; r += kThreads) counts.rank(r) = int32_t(rank_counts[r]);
    if (threadIdx.x == 0) counts.bad() = bad;
#if SHARED_EXPERTS
    for (int64_t e = threadIdx.x; e < num_experts; e += kThreads) counts.expert(e) = expert_counts[e];
#endif
}

// Grid and chunks as in route_count. Dynamic shared memory: kRanks + kNumMarks words of 64 bits, and as many of 32.
extern "C" __global__ void __launch_bounds__(kThreads)
    route_place(const Index* topk_idx, int64_t num_tokens, int64_t num_experts, int64_t experts_per_rank,
                int64_t chunk_size, int64_t rows_stride, const int32_t* table, int64_t* token_rows, int64_t* counts,
                int32_t* status) {
    extern __shared__ int64_t shared_rows[];
    __shared__ int32_t bad;
    int64_t* const next = shared_rows;  // row of the next token of each rank
    int64_t* const rows = next + kRanks;
    uint32_t* const marks = reinterpret_cast<uint32_t*>(rows + kNumMarks);
    int32_t* const totals = reinterpret_cast<int32_t*>(marks + kNumMarks);
    const Experts experts{num_experts, uint32_t(experts_per_rank)};
    const Chunk chunk(chunk_size, num_tokens);
    fill<uint32_t>(marks, kNumMarks, 1, 0);
    for (int r = int(threadIdx.x) / kWarp; r <= kRanks; r += kWarps) {
        const RowSums sums = sum_row(table, r);
        if (threadIdx.x % kWarp != 0) continue;
        if (r < kRanks) {
            next[r] = sums.before;
            totals[r] = sums.total;
        } else {
            bad = sums.total;
        }
    }
    __syncthreads();
    if (threadIdx.x < kWarp) first_rows(totals, rows_stride, next);
    if (blockIdx.x == 0) write_rank_counts(totals, bad, experts_per_rank, counts, status);
    __syncthreads();
    for (int64_t first = chunk.begin; first < chunk.end; first += kBatch) {
        const int num = chunk.batch(first);
        mark_batch(topk_idx + first * NUM_TOPK, num * NUM_TOPK, experts, marks, NoVisit());
        __syncthreads();
        rows_of_words(marks, next, rows);
        __syncthreads();
        write_rows(marks, rows, num, token_rows + first * kRanks);
        __syncthreads();
        fill<uint32_t>(marks, kNumMarks, 1, 0);
        __syncthreads();
    }
    write_expert_counts(table, experts, counts);
}

}  // namespace fp4comm
