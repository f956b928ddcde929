// What the GPUs of one NVLink domain tell each other, through memory that all of them have mapped. A rank signals by
// writing the number of its signals so far to every rank; signals of all ranks have the same numbers, since every rank
// makes the same calls in the same order. One block each, but for put_slots.
//
// Macros: NUM_RANKS; NUM_SLOTS, pieces of memory that rows arrive in; MAIL_NUMBERS, the most numbers of a message;
// NUM_COUNTERS, of arrivals in a slot.
#include "arrivals.cuh"

using namespace fp4comm;

namespace {

constexpr int kRanks = NUM_RANKS;

// What a rank shows the others, in its own memory: the signals of every rank, and two generations of messages, of which
// nobody writes the next but one before all have read this one.
struct Board {
    int64_t signals[kRanks];
    int64_t mail[2][kRanks][MAIL_NUMBERS];
    uint32_t counters[NUM_SLOTS][NUM_COUNTERS];
};

// All of it is on the device, so that a CUDA graph can be replayed.
struct State : PeerState {
    int64_t reusable_at[NUM_SLOTS];  // when all ranks have signalled so often, they have read what was in theirs
};

struct Group {
    const int64_t* boards;  // addresses
    int64_t rank;
    State* state;
    PeerFailure* failure;
    int64_t timeout;  // nanoseconds

    __device__ Board* board(int64_t of_rank) const { return reinterpret_cast<Board*>(boards[of_rank]); }

    // Everything that this block and earlier kernels have written is there before the signal. Returns its number.
    __device__ int64_t signal() const {
        __shared__ int64_t count;
        if (state->counted_slot > 0) {  // others may count there again after this
            uint32_t* counters = board(rank)->counters[state->counted_slot - 1];
            for (int i = int(threadIdx.x); i < NUM_COUNTERS; i += int(blockDim.x)) counters[i] = 0;
        }
        if (threadIdx.x == 0) count = ++state->num_signals;
        __syncthreads();
        if (threadIdx.x == 0) state->counted_slot = 0;
        // After a failure the rows of this rank are not what others wait for.
        if (threadIdx.x < kRanks && state->has_failed == 0) store_release(&board(threadIdx.x)->signals[rank], count);
        return count;
    }

    // Until every rank has signalled `awaited` times. What ranks wrote before can be read then; if one is late, it
    // is reported, and nobody waits any more.
    __device__ void wait(int64_t awaited) const {
        bool is_late = false;
        if (threadIdx.x < kRanks && state->has_failed == 0) {
            const int64_t start = nanoseconds();
            const int64_t* signals = &board(rank)->signals[threadIdx.x];
            int64_t seen = load_acquire(signals);
            while (seen < awaited && nanoseconds() - start < timeout) {
                pause();
                seen = load_acquire(signals);
            }
            is_late = seen < awaited;
            if (is_late) failure->signals[threadIdx.x] = seen;
        }
        if (__syncthreads_or(is_late) && threadIdx.x == 0) {
            failure->awaited = awaited;
            store_release(&failure->is_there, 1);
            state->has_failed = 1;
        }
    }
};

// A matrix of numbers, a row per rank.
struct Numbers {
    const int64_t* data;
    int64_t row_stride;
    int64_t stride;
    int64_t width;
};

}  // namespace

// Later kernels can write to the slots of that number: what was in them has been read by all ranks. is_counted: the
// rows will be waited for as they arrive, and not by `meet`.
extern "C" __global__ void open_slot(const int64_t* boards, int64_t rank, int64_t* state, int64_t* failure,
                                     int64_t timeout, int64_t slot, int64_t is_counted) {
    const Group group = {boards, rank, reinterpret_cast<State*>(state), reinterpret_cast<PeerFailure*>(failure),
                         timeout};
    const int64_t count = group.signal();
    group.wait(group.state->reusable_at[slot]);
    if (threadIdx.x == 0 && is_counted) {
        group.state->reusable_at[slot] = count + 1;  // whoever signals after this has read
        group.state->counted_slot = slot + 1;
    }
}

// Later kernels can read what all ranks have written to the slots of that number.
extern "C" __global__ void meet(const int64_t* boards, int64_t rank, int64_t* state, int64_t* failure, int64_t timeout,
                                int64_t slot) {
    const Group group = {boards, rank, reinterpret_cast<State*>(state), reinterpret_cast<PeerFailure*>(failure),
                         timeout};
    const int64_t count = group.signal();
    if (threadIdx.x == 0) group.state->reusable_at[slot] = count + 1;  // whoever signals after this has read
    group.wait(count);
}

// All rows that are counted are there.
extern "C" __global__ void await_rows(const Arrivals* arrivals) {
    for (int64_t row = int64_t(threadIdx.x) * kArrivalRows; row < arrivals->num_rows;
         row += blockDim.x * kArrivalRows) {
        arrivals->wait_for(row);
    }
}

// Row r of the concatenation of `first`, `second` and `third` goes to rank r; row r of `out`, in host memory, came from
// it.
extern "C" __global__ void exchange_numbers(const int64_t* boards, int64_t rank, int64_t* state, int64_t* failure,
                                            int64_t timeout, const int64_t* first, int64_t first_row_stride,
                                            int64_t first_stride, int64_t first_width, const int64_t* second,
                                            int64_t second_row_stride, int64_t second_stride, int64_t second_width,
                                            const int64_t* third, int64_t third_row_stride, int64_t third_stride,
                                            int64_t third_width, int64_t* out) {
    const Group group = {boards, rank, reinterpret_cast<State*>(state), reinterpret_cast<PeerFailure*>(failure),
                         timeout};
    const Numbers parts[3] = {{first, first_row_stride, first_stride, first_width},
                              {second, second_row_stride, second_stride, second_width},
                              {third, third_row_stride, third_stride, third_width}};
    const int64_t generation = group.state->num_messages % 2;
    int64_t start = 0;
    for (const Numbers& part : parts) {
        for (int64_t i = threadIdx.x; i < kRanks * part.width; i += blockDim.x) {
            const int64_t row = i / part.width;
            const int64_t column = i % part.width;
            group.board(row)->mail[generation][rank][start + column] =
                part.data[row * part.row_stride + column * part.stride];
        }
        start += part.width;
    }
    group.wait(group.signal());
    for (int64_t i = threadIdx.x; i < kRanks * start; i += blockDim.x) {
        out[i] = group.board(rank)->mail[generation][i / start][i % start];
    }
    fence_system();
    if (threadIdx.x == 0) group.state->num_messages += 1;
}

// values[i, k] goes to place k of the weights of row i, as in Destination of rows.cuh.
extern "C" __global__ void put_slots(const float* values, int64_t num_rows, int64_t num_slots, const int64_t* table,
                                     int64_t row_bytes, int64_t weight_offset) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= num_rows * num_slots || *reinterpret_cast<const int64_t*>(table[4 * kRanks]) != 0) return;
    const int64_t row = i / num_slots;
    int rank = 0;
    for (int r = 1; r < kRanks; ++r) rank = table[kRanks + r] <= row ? r : rank;
    uint8_t* to = reinterpret_cast<uint8_t*>(table[rank]) + row * row_bytes + weight_offset;
    store<float>(to + i % num_slots * 4, values[i]);
}
