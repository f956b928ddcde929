// Rows among warps. A row is cut into ROW_PARTS parts, each the work of one warp: an item. A warp goes through its part
// in chunks of kUnroll steps, all of whose loads are issued before the first is used. Where the parts don't divide
// evenly (Parts::kExact) the last chunk may go into the next part, and two warps write the same bytes.
#pragma once

#include "arrivals.cuh"
#include "rows_convert.cuh"

namespace fp4comm {

#ifndef THREADS
#define THREADS 256
#endif
#ifndef LOOP
#define LOOP 0
#endif
#ifndef PEERS
#define PEERS 0
#endif
#ifndef SIGNAL
#define SIGNAL 0
#endif
#ifndef AWAIT
#define AWAIT 0
#endif

constexpr int kThreads = THREADS;
#if SIGNAL || AWAIT  // room for two blocks of each of the two kernels that run at the same time
#define ROW_BOUNDS __launch_bounds__(kThreads, 4)
#else
#define ROW_BOUNDS __launch_bounds__(kThreads)
#endif
constexpr int kMaxUnroll = UNROLL;

// fn(item) for the items of this warp, a few or none. LOOP: the grid is smaller than the work.
template <typename Fn>
__device__ inline void for_each_item(int64_t num_items, Fn fn) {
    int64_t item = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
#if LOOP
#pragma unroll 1
    for (; item < num_items; item += int64_t(gridDim.x) * (kThreads / kWarp)) fn(item);
#else
    if (item < num_items) fn(item);
#endif
}

// Rows to be written: a piece of memory of our own, or one on each of PEERS ranks. The latter are numbered through, and
// `table` has four numbers of each rank: the address of row 0 there, if it had one; the first of its rows; the address
// of its counters of arrivals; what has to be added to a row for its number there. Then comes the address of has_failed
// of PeerState: nothing is written after a failure. SIGNAL: rows are counted.
struct Destination {
    Rows rows;  // PEERS: addresses relative to the table's
    const int64_t* table;

    __device__ Row row(int64_t row, int rank) const {
        Row to = rows.row(row);
#if PEERS
        to.data += table[rank];
        to.scales += table[rank];
#endif
        return to;
    }

    __device__ bool is_lost() const {
        return PEERS && *reinterpret_cast<const volatile int64_t*>(table[4 * PEERS]) != 0;
    }

    // In turn a row of each rank, so that none of the ways is idle for long; -1: that rank has no more.
    __device__ int64_t row_in_turn(int64_t turn, int64_t num_rows) const {
#if PEERS
        const int rank = int(turn % PEERS);
        const int64_t row = table[PEERS + rank] + turn / PEERS;
        return row < (rank + 1 < PEERS ? table[PEERS + rank + 1] : num_rows) ? row : -1;
#else
        return turn;
#endif
    }

    __device__ int rank_of(int64_t row) const {
        int rank = 0;
#pragma unroll 1
        for (int r = 1; r < PEERS; ++r) rank = table[PEERS + r] <= row ? r : rank;
        return rank;
    }

    __device__ Row row(int64_t row) const { return this->row(row, rank_of(row)); }

    // The warp has written the row. After `end_rows`.
    __device__ void count(int64_t row, int rank) const {
        uint32_t* counters = reinterpret_cast<uint32_t*>(table[2 * PEERS + rank]);
        add_one(counters + (row + table[3 * PEERS + rank]) / kArrivalRows);
    }
};

// What the lanes of the warp have written is there before what lane 0 counts next.
__device__ inline void end_rows() {
    __syncwarp();
    if (lane_of_warp() == 0) fence_system();
}

// SIGNAL, AWAIT: kernels that run at the same time. The last block, which starts last, keeps later kernels back until
// both have ended.
__device__ inline void begin_kernel() {
#if SIGNAL
    let_next_kernel_start();
#endif
}

__device__ inline void end_kernel() {
#if AWAIT
    if (blockIdx.x == gridDim.x - 1) wait_for_kernel_before();
#endif
}

// AWAIT: lane 0 waits for a row, and so does the warp.
__device__ inline void await_row(const Arrivals* arrivals, int64_t row) {
#if AWAIT
    if (lane_of_warp() == 0) arrivals->wait_for(row);
    __syncwarp();
#endif
}

// How the steps of C, of 32 * C::kLane columns, are divided.
template <typename C>
struct Parts {
    static constexpr int kStepCols = kWarp * C::kLane;
    static constexpr int kNumSteps = (int(kHidden) + kStepCols - 1) / kStepCols;
    static constexpr int kSteps = (kNumSteps + ROW_PARTS - 1) / ROW_PARTS;
    static constexpr int kNumChunks = (kSteps + kMaxUnroll - 1) / kMaxUnroll;
    static constexpr int kUnroll = (kSteps + kNumChunks - 1) / kNumChunks;
    // No chunk goes beyond the end of its part, nor of the row.
    static constexpr bool kExact = int(kHidden) % kStepCols == 0 && kNumSteps % ROW_PARTS == 0 && kSteps % kUnroll == 0;
};

// fn(first column of the chunk) for the chunks of a part.
template <typename C, typename Fn>
__device__ inline void for_each_chunk(int part, Fn fn) {
    using P = Parts<C>;
    const uint32_t begin = uint32_t(part * P::kSteps * P::kStepCols);
    const uint32_t end = min(begin + P::kSteps * P::kStepCols, kHidden);
#pragma unroll 1
    for (uint32_t first = begin; first < end; first += P::kUnroll * P::kStepCols) fn(first);
}

// A lane's first column in step `step` of a chunk.
template <typename C>
__device__ inline uint32_t column(uint32_t first, int step) {
    return first + uint32_t(step * Parts<C>::kStepCols + lane_of_warp() * C::kLane);
}

template <typename C>
__device__ inline bool inside(uint32_t first, int step) {
    return Parts<C>::kExact || column<C>(first, step) < kHidden;
}

template <typename C, int kSteps>
__device__ inline void load_chunk(ConstRow row, uint32_t first, typename C::In* in) {
    const ConstRow at = advance<kSrc>(row, column<C>(first, 0));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        in[step] = C::load(at, step, column<C>(first, step), inside<C>(first, step));
    }
}

template <typename C, int kSteps>
__device__ inline void store_chunk(Row row, uint32_t first, const typename C::Out* out) {
    const Row at = advance<kDst>(row, column<C>(first, 0));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) C::store(at, step, inside<C>(first, step), out[step]);
    C::template store_scales<kSteps, Parts<C>::kExact>(row, first, out);
}

template <typename C>
__device__ inline void zero_part(Row row, int part) {
    constexpr int kSteps = Parts<C>::kUnroll;
    typename C::Out out[kSteps];
    for_each_chunk<C>(part, [&](uint32_t first) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) out[step] = C::zero();
        store_chunk<C, kSteps>(row, first, out);
    });
}

using RowConverter = Converter<kSrc, kDst, kPlain>;

// The rows that a row goes to: those of `list` that are not -1. Lane i keeps entry i.
template <int kCount>
struct Targets {
    const int64_t* list;
    int64_t mine;

    explicit __device__ Targets(const int64_t* entries) : list(entries), mine(entry(0)) {}

    __device__ int64_t entry(int batch) const {
        const int i = batch + lane_of_warp();
        return i < kCount ? list[i] : -1;
    }

    __device__ bool none() const { return kCount <= kWarp && __ballot_sync(kAllLanes, mine >= 0) == 0; }

    // fn(row, index in the list)
    template <typename Fn>
    __device__ void for_each(Fn fn) const {
#pragma unroll 1
        for (int batch = 0; batch < kCount; batch += kWarp) {
            const int64_t row = batch == 0 ? mine : entry(batch);
            for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1) {
                const int i = __ffs(int(left)) - 1;
                fn(__shfl_sync(kAllLanes, row, i), batch + i);
            }
        }
    }
};

// Converts row `row` once and writes it to all targets.
template <int kCount>
__device__ inline void spread_row(const Rows& src, const Destination& dst, int64_t row, int part,
                                  const Targets<kCount>& targets, const Encoding& encoding) {
    using C = RowConverter;
    constexpr int kSteps = Parts<C>::kUnroll;
    const Encoding own = encoding_of_row(encoding, src.const_row(row));
    for_each_chunk<C>(part, [&](uint32_t first) {
        typename C::In in[kSteps];
        typename C::Out out[kSteps];
        load_chunk<C, kSteps>(src.const_row(row), first, in);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            out[step] = C::convert(in[step], own, row, column<C>(first, step));
        }
        targets.for_each([&](int64_t target, int rank) { store_chunk<C, kSteps>(dst.row(target, rank), first, out); });
    });
}

}  // namespace fp4comm
