// What arrived: weights and local experts out of the received rows, counts per expert, and the expert layout (by
// expert, then received row, then slot; groups padded). Two launches: counts per chunk of rows, then positions, every
// block adding up the chunks before its own. Integers only, no order of arrival: always the same result.
//
// Macros: NUM_TOPK, SHARED_EXPERTS (1: counters per expert fit into shared memory), PLACE_WARPS (warps of a block that
// assign positions, a power of two), EXPERT_BITS (bits that a local expert needs).
#include "device.cuh"

namespace fp4comm {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEntriesInFlight = 4;
constexpr int64_t kNumTopk = NUM_TOPK;
constexpr int32_t kCorrupt = 2;  // status

__device__ inline void report(int32_t* status, bool corrupt) {
    if (corrupt && status) *static_cast<volatile int32_t*>(status) = kCorrupt;
}

struct Range {
    int64_t begin;
    int64_t end;

    // Part `i` of [begin, end) in parts of `size`.
    __device__ Range part(int64_t i, int64_t size) const {
        const int64_t first = begin + i * size < end ? begin + i * size : end;
        return {first, first + size < end ? first + size : end};
    }
};

// ---- received rows ----

struct ReceivedRows {
    const uint8_t* data;
    int64_t row_bytes;
    int64_t weight_offset;
    int64_t expert_offset;

    __device__ int32_t expert(int64_t row, int64_t slot) const {
        return load<int16_t>(data + row * row_bytes + expert_offset + slot * 2);
    }
    __device__ uint32_t weight_bits(int64_t row, int64_t slot) const {
        return load<uint32_t>(data + row * row_bytes + weight_offset + slot * 4);
    }
};

// The entries of a chunk. Returns whether this thread met an expert out of range.
__device__ inline bool read_entries(const ReceivedRows& received, Range entries, int32_t num_experts, int32_t* idx,
                                    uint32_t* weights, int32_t* histogram) {
    bool corrupt = false;
    for (int64_t first = entries.begin + threadIdx.x; first < entries.end; first += kThreads * kEntriesInFlight) {
        int32_t expert[kEntriesInFlight];
        uint32_t weight[kEntriesInFlight];
#pragma unroll
        for (int j = 0; j < kEntriesInFlight; ++j) {
            const int64_t i = first + j * kThreads;
            const int64_t row = i / (kNumTopk > 0 ? kNumTopk : 1);
            const bool exists = i < entries.end;
            expert[j] = exists ? received.expert(row, i - row * kNumTopk) : -1;
            weight[j] = exists ? received.weight_bits(row, i - row * kNumTopk) : 0;
        }
#pragma unroll
        for (int j = 0; j < kEntriesInFlight; ++j) {
            const int64_t i = first + j * kThreads;
            if (i >= entries.end) continue;
            const bool here = expert[j] >= 0 && expert[j] < num_experts;
            corrupt = corrupt || (!here && expert[j] != -1);
            idx[i] = here ? expert[j] : -1;
            weights[i] = weight[j];
            if (here) atomicAdd(&histogram[expert[j]], 1);
        }
    }
    return corrupt;
}

__device__ inline void clear_expert_rows(int64_t num_rows, int64_t* rows, uint32_t* row_weights) {
    const int64_t num_threads = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < num_rows; i += num_threads) {
        rows[i] = -1;
        row_weights[i] = 0;
    }
}

// source_rows[n] = n where row n has an expert here, else -1: no message has filled it.
__device__ inline void mark_unused(const ReceivedRows& received, Range rows, int32_t num_experts,
                                   int64_t* source_rows) {
    for (int64_t row = rows.begin + threadIdx.x; row < rows.end; row += kThreads) {
        bool used = false;
        for (int64_t slot = 0; slot < kNumTopk; ++slot) {
            const int32_t expert = received.expert(row, slot);
            used = used || (expert >= 0 && expert < num_experts);
        }
        source_rows[row] = used ? row : -1;
    }
}

// ---- sums over chunks ----

// As many experts as there are threads, or fewer.
struct Tile {
    int first;
    int count;
};

// totals[i], before[i]: sums of the histograms of all chunks, and of those before `chunk`, for expert tile.first + i.
// `width`: experts of a full tile.
__device__ inline void sum_tile(const int32_t* histograms, int num_chunks, int chunk, int num_experts, Tile tile,
                                int width, int32_t* totals, int32_t* before) {
    totals[threadIdx.x] = 0;
    before[threadIdx.x] = 0;
    __syncthreads();
    const int parts = kThreads / width;
    const int part = int(threadIdx.x) / width;
    const int i = int(threadIdx.x) - part * width;
    if (part < parts && i < tile.count) {
        int32_t total = 0;
        int32_t lower = 0;
#pragma unroll 8
        for (int c = part; c < num_chunks; c += parts) {
            const int32_t count = histograms[int64_t(c) * num_experts + tile.first + i];
            total += count;
            lower += c < chunk ? count : 0;
        }
        atomicAdd(&totals[i], total);
        atomicAdd(&before[i], lower);
    }
    __syncthreads();
}

// Sum of the values of the threads up to this one; `total` gets the sum of all.
__device__ inline int32_t inclusive_sum(int32_t value, int32_t* warp_sums, int32_t* total) {
    const int lane = int(threadIdx.x) % kWarp;
    const int warp = int(threadIdx.x) / kWarp;
    for (int step = 1; step < kWarp; step *= 2) {
        const int32_t below = __shfl_up_sync(kAllLanes, value, unsigned(step));
        value += lane >= step ? below : 0;
    }
    if (lane == kWarp - 1) warp_sums[warp] = value;
    __syncthreads();
    *total = 0;
    int32_t lower = 0;
    for (int w = 0; w < kWarps; ++w) {
        lower += w < warp ? warp_sums[w] : 0;
        *total += warp_sums[w];
    }
    __syncthreads();
    return value + lower;
}

// ---- positions ----

// Lanes with the same expert; 0 for lanes without one.
__device__ inline uint32_t lanes_with(int32_t expert) {
    uint32_t lanes = __ballot_sync(kAllLanes, expert >= 0);
    for (int bit = 0; bit < EXPERT_BITS; ++bit) {
        const bool set = (expert >> bit & 1) != 0;
        const uint32_t others = __ballot_sync(kAllLanes, set);
        lanes &= set ? others : ~others;
    }
    return expert >= 0 ? lanes : 0;
}

struct ExpertRows {
    int64_t num_rows;
    int64_t* rows;
    int64_t* slot_rows;
    uint32_t* row_weights;
};

// One warp gives the entries of its range their positions, in order; next[expert] is the next position of each.
// Returns whether a position was out of range.
__device__ inline bool place_entries(const int32_t* idx, const uint32_t* weights, Range entries, int32_t* next,
                                     const ExpertRows& out) {
    const int lane = int(threadIdx.x) % kWarp;
    bool corrupt = false;
    int32_t following = entries.begin + lane < entries.end ? idx[entries.begin + lane] : -1;
    for (int64_t first = entries.begin; first < entries.end; first += kWarp) {
        const int64_t i = first + lane;
        const int32_t expert = following;
        following = i + kWarp < entries.end ? idx[i + kWarp] : -1;
        const uint32_t weight = expert >= 0 ? weights[i] : 0;
        const uint32_t lanes = lanes_with(expert);
        const int rank = __popc(lanes & ((1u << lane) - 1));
        const int64_t position = expert >= 0 ? int64_t(next[expert]) + rank : -1;
        __syncwarp();
        if (expert >= 0 && rank == 0) next[expert] += __popc(lanes);
        __syncwarp();
        const bool fits = position < out.num_rows;
        if (i < entries.end) out.slot_rows[i] = fits ? position : -1;
        corrupt = corrupt || !fits;
        if (expert < 0 || !fits) continue;
        out.rows[position] = i / (kNumTopk > 0 ? kNumTopk : 1);
        out.row_weights[position] = weight;
    }
    return corrupt;
}

// The entries of a chunk that each placing warp takes: whole rounds of a warp.
__device__ inline Range range_of_warp(Range chunk, int64_t chunk_entries) {
    const int64_t size = ceil_div(chunk_entries, PLACE_WARPS * kWarp) * kWarp;
    return chunk.part(threadIdx.x / kWarp, size);
}

// next[warp][expert]: from the first position of the block's entries and the counts of its warps to the first position
// of each warp's.
__device__ inline void first_of_warps(int32_t position, int expert, int num_experts, int32_t* next) {
    for (int w = 0; w < PLACE_WARPS; ++w) {
        int32_t& entry = next[int64_t(w) * num_experts + expert];
        const int32_t count = PLACE_WARPS > 1 ? entry : 0;
        entry = position;
        position += count;
    }
}

}  // namespace

// Dynamic shared memory: one word per expert if SHARED_EXPERTS. `num_expert_rows` rows are set to none. `source_rows`
// may be null.
extern "C" __global__ void __launch_bounds__(kThreads)
    read_rows(const uint8_t* data, int64_t row_bytes, int64_t weight_offset, int64_t expert_offset, int64_t num_entries,
              int64_t chunk_entries, int64_t num_experts, int32_t* idx, uint32_t* weights, int32_t* histograms,
              int64_t num_expert_rows, int64_t* rows, uint32_t* row_weights, int64_t* source_rows, int32_t* status) {
    int32_t* const result = histograms + blockIdx.x * num_experts;
#if SHARED_EXPERTS
    extern __shared__ int32_t shared_histogram[];
    int32_t* const histogram = shared_histogram;
#else
    int32_t* const histogram = result;
#endif
    for (int64_t e = threadIdx.x; e < num_experts; e += kThreads) histogram[e] = 0;
    __syncthreads();
    const ReceivedRows received{data, row_bytes, weight_offset, expert_offset};
    const Range chunk = Range{0, num_entries}.part(blockIdx.x, chunk_entries);
    report(status, read_entries(received, chunk, int32_t(num_experts), idx, weights, histogram));
    clear_expert_rows(num_expert_rows, rows, row_weights);
    if (source_rows) {
        const int64_t num_slots = kNumTopk > 0 ? kNumTopk : 1;
        mark_unused(received, {chunk.begin / num_slots, chunk.end / num_slots}, int32_t(num_experts), source_rows);
    }
#if SHARED_EXPERTS
    __syncthreads();
    for (int64_t e = threadIdx.x; e < num_experts; e += kThreads) result[e] = histogram[e];
#endif
}

// One block per tile of `width` experts.
extern "C" __global__ void __launch_bounds__(kThreads)
    count_experts(const int32_t* histograms, int64_t num_chunks, int64_t num_experts, int64_t width, int64_t* counts) {
    __shared__ int32_t totals[kThreads];
    __shared__ int32_t before[kThreads];
    const int64_t first = blockIdx.x * width;
    const Tile tile{int(first), int(num_experts - first < width ? num_experts - first : width)};
    sum_tile(histograms, int(num_chunks), 0, int(num_experts), tile, int(width), totals, before);
    if (int(threadIdx.x) < tile.count) counts[first + threadIdx.x] = totals[threadIdx.x];
}

// Grid and chunks as in read_rows. Dynamic shared memory: PLACE_WARPS words per expert if SHARED_EXPERTS; else
// `counters` has one per block and expert.
extern "C" __global__ void __launch_bounds__(kThreads)
    place_rows(const int32_t* idx, const uint32_t* weights, int64_t num_entries, int64_t chunk_entries,
               int64_t num_experts, int64_t width, int64_t alignment, const int32_t* histograms,
               int64_t num_expert_rows, int64_t* rows, int64_t* slot_rows, uint32_t* row_weights, int32_t* ends,
               int64_t* counts, int32_t* counters, int32_t* status) {
    __shared__ int32_t totals[kThreads];
    __shared__ int32_t before[kThreads];
    __shared__ int32_t warp_sums[kWarps];
#if SHARED_EXPERTS
    extern __shared__ int32_t shared_counters[];
    int32_t* const next = shared_counters;
#else
    int32_t* const next = counters + blockIdx.x * num_experts;
#endif
    const int warp = int(threadIdx.x) / kWarp;
    const Range chunk = Range{0, num_entries}.part(blockIdx.x, chunk_entries);
    const Range mine = range_of_warp(chunk, chunk_entries);
    int32_t* const my_next = next + warp * num_experts;
    if (PLACE_WARPS > 1) {
        for (int64_t e = threadIdx.x; e < PLACE_WARPS * num_experts; e += kThreads) next[e] = 0;
        __syncthreads();
        for (int64_t i = mine.begin + threadIdx.x % kWarp; warp < PLACE_WARPS && i < mine.end; i += kWarp) {
            if (idx[i] >= 0) atomicAdd(&my_next[idx[i]], 1);
        }
    }
    int32_t carry = 0;
    for (int64_t first = 0; first < num_experts; first += width) {
        const Tile tile{int(first), int(num_experts - first < width ? num_experts - first : width)};
        sum_tile(histograms, int(gridDim.x), int(blockIdx.x), int(num_experts), tile, int(width), totals, before);
        const bool mine_too = int(threadIdx.x) < tile.count;
        const int32_t total = mine_too ? totals[threadIdx.x] : 0;
        const int32_t padded = (total + int32_t(alignment) - 1) / int32_t(alignment) * int32_t(alignment);
        int32_t tile_rows;
        const int32_t end = carry + inclusive_sum(padded, warp_sums, &tile_rows);
        carry += tile_rows;
        if (!mine_too) continue;
        const int expert = tile.first + int(threadIdx.x);
        first_of_warps(end - padded + before[threadIdx.x], expert, int(num_experts), next);
        if (blockIdx.x != 0) continue;
        counts[expert] = total;
        ends[expert] = end < num_expert_rows ? end : int32_t(num_expert_rows);
    }
    __syncthreads();
    if (warp >= PLACE_WARPS) return;
    report(status,
           place_entries(idx, weights, mine, my_next, ExpertRows{num_expert_rows, rows, slot_rows, row_weights}));
}

}  // namespace fp4comm
