// What the GPUs of one NVLink domain tell each other, through memory that all of them have mapped. A rank signals by
// writing the number of its signals so far to every rank; signals of all ranks have the same numbers, since every rank
// makes the same calls in the same order. One block each, but for put_slots.
//
// Macros: NUM_RANKS; NUM_SLOTS, pieces of memory that rows arrive in; MAIL_NUMBERS, the most numbers of a message.
#include "device.cuh"

using namespace fp4comm;

namespace {

constexpr int kRanks = NUM_RANKS;

// What a rank shows the others, in its own memory: the signals of every rank, and two generations of messages, of which
// nobody writes the next but one before all have read this one.
struct Board {
    int64_t signals[kRanks];
    int64_t mail[2][kRanks][MAIL_NUMBERS];
};

// What a rank keeps for itself. All of it is on the device, so that a CUDA graph can be replayed.
struct State {
    int64_t num_signals;
    int64_t num_messages;
    int64_t has_failed;
    int64_t reusable_at[NUM_SLOTS];  // when all ranks have signalled so often, they have read what was in theirs
};

// Host memory, for what went wrong.
struct Failure {
    int64_t is_there;
    int64_t awaited;
    int64_t signals[kRanks];  // of the ranks that were late, else -1
};

struct Group {
    const int64_t* boards;  // addresses
    int64_t rank;
    State* state;
    Failure* failure;
    int64_t timeout;  // nanoseconds

    __device__ Board* board(int64_t of_rank) const { return reinterpret_cast<Board*>(boards[of_rank]); }

    // Everything that this block and earlier kernels have written is there before the signal. Returns its number.
    __device__ int64_t signal() const {
        __shared__ int64_t count;
        fence_system();
        if (threadIdx.x == 0) count = ++state->num_signals;
        __syncthreads();
        if (threadIdx.x < kRanks) store_release(&board(threadIdx.x)->signals[rank], count);
        return count;
    }

    // Until every rank has signalled `awaited` times. What ranks wrote before can be read then; if one is late, it
    // is reported, and nobody waits any more.
    __device__ void wait(int64_t awaited) const {
        if (threadIdx.x < kRanks) {
            const int64_t start = nanoseconds();
            const int64_t* signals = &board(rank)->signals[threadIdx.x];
            int64_t seen = load_acquire(signals);
            while (seen < awaited && state->has_failed == 0 && nanoseconds() - start < timeout) {
                pause();
                seen = load_acquire(signals);
            }
            if (seen < awaited && state->has_failed == 0) {
                failure->signals[threadIdx.x] = seen;
                failure->awaited = awaited;
                store_release(&failure->is_there, 1);
            }
        }
        __syncthreads();
        if (threadIdx.x == 0 && load_acquire(&failure->is_there) != 0) state->has_failed = 1;
        __syncthreads();
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

// slot < 0: waits until all ranks are here; what they wrote before can be read then. Else until all ranks have read
// what was last in their slots of that number, so that they can be written.
extern "C" __global__ void meet(const int64_t* boards, int64_t rank, int64_t* state, int64_t* failure, int64_t timeout,
                                int64_t slot) {
    const Group group = {boards, rank, reinterpret_cast<State*>(state), reinterpret_cast<Failure*>(failure), timeout};
    const int64_t count = group.signal();
    if (slot < 0) return group.wait(count);
    group.wait(group.state->reusable_at[slot]);
    // The rows follow, then the signal count + 1; whoever signals after that has read them.
    if (threadIdx.x == 0) group.state->reusable_at[slot] = count + 2;
}

// Row r of the concatenation of `first`, `second` and `third` goes to rank r; row r of `out`, in host memory, came from
// it.
extern "C" __global__ void exchange_numbers(const int64_t* boards, int64_t rank, int64_t* state, int64_t* failure,
                                            int64_t timeout, const int64_t* first, int64_t first_row_stride,
                                            int64_t first_stride, int64_t first_width, const int64_t* second,
                                            int64_t second_row_stride, int64_t second_stride, int64_t second_width,
                                            const int64_t* third, int64_t third_row_stride, int64_t third_stride,
                                            int64_t third_width, int64_t* out) {
    const Group group = {boards, rank, reinterpret_cast<State*>(state), reinterpret_cast<Failure*>(failure), timeout};
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
    if (i >= num_rows * num_slots) return;
    const int64_t row = i / num_slots;
    int rank = 0;
    for (int r = 1; r < kRanks; ++r) rank = table[kRanks + r] <= row ? r : rank;
    uint8_t* to = reinterpret_cast<uint8_t*>(table[rank]) + row * row_bytes + weight_offset;
    store<float>(to + i % num_slots * 4, values[i]);
}
