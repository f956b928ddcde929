// Rows that arrive from other ranks while a kernel is at work: they are counted as they do, in chunks of kArrivalRows.
#pragma once

#include "device.cuh"

namespace fp4comm {

constexpr int kArrivalRows = 64;

// What a rank keeps for itself, on its device; see peer.cu.
struct PeerState {
    int64_t num_signals;
    int64_t num_messages;
    int64_t has_failed;
    int64_t counted_slot;  // plus 1: whose counters are to be zeroed before the next signal; 0: none
};

// Host memory, for what went wrong; `signals` of the ranks that were late, else -1.
struct PeerFailure {
    int64_t is_there;
    int64_t awaited;
    int64_t signals[1];  // in fact one of each rank
};

// What to know of the rows of a slot.
struct Arrivals {
    const uint32_t* counters;
    int64_t num_rows;
    int64_t timeout;  // nanoseconds
    PeerFailure* failure;
    PeerState* state;
    const int64_t* signals;
    int64_t num_ranks;
    int64_t starts[1];  // in fact one of each rank, and the end

    // In turn a row of each rank; -1: that rank has no more.
    __device__ int64_t row_in_turn(int64_t turn) const {
        const int64_t rank = turn % num_ranks;
        const int64_t row = starts[rank] + turn / num_ranks;
        return row < starts[rank + 1] ? row : -1;
    }

    // Until the row, and its chunk, is there. For the other lanes of the warp, too, after __syncwarp().
    __device__ void wait_for(int64_t row) const {
        const int64_t chunk = row / kArrivalRows;
        const int64_t left = num_rows - chunk * kArrivalRows;
        const uint32_t expected = uint32_t(left < kArrivalRows ? left : kArrivalRows);
        if (load_acquire(counters + chunk) >= expected) return;
        const int64_t start = nanoseconds();
        while (load_acquire(counters + chunk) < expected) {
            if (load_acquire(&state->has_failed) != 0) return;
            if (nanoseconds() - start > timeout) return report(row);
            pause();
        }
    }

    // The rank that the row is from is late, and whoever has not begun this exchange.
    __device__ void report(int64_t row) const {
        failure->awaited = state->num_signals;
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
            const int64_t seen = load_acquire(signals + rank);
            const bool is_source = starts[rank] <= row && row < starts[rank + 1];
            if (is_source || seen < state->num_signals) failure->signals[rank] = seen;
        }
        store_release(&failure->is_there, 1);
        store_release(&state->has_failed, 1);
    }
};

}  // namespace fp4comm
