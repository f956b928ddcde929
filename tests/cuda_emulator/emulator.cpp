// The part of the emulator that does not depend on the kernel: fibres, their scheduler, and what ends a launch.
#include "emulator.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <string>
#include <utility>

FP4COMM_EXPORT uint3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim{1, 1, 1}, gridDim{1, 1, 1};

namespace fp4comm_emulator {

int current_thread = -1;

namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kDynamicBytes = 256 << 10;
constexpr int kSharedPattern = 0xc5;

const char* name_of(Op op) {
    static const char* const names[] = {
        "nothing",    "a pause",   "__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count",
        "__syncwarp", "a shuffle", "a vote",        "__match_any_sync", "a warp reduction"};
    return names[int(op)];
}

struct Machine {
    Fibre fibres[kMaxThreads];
    uint8_t* stacks = nullptr;
    uint8_t* dynamic = nullptr;  // ends at a page without access rights
    size_t dynamic_bytes = 0;
    int num_threads = 0;
    void* scheduler = nullptr;
    uint64_t epoch = 0;  // blocks so far
    uint32_t random = 12345;
    std::string error;
    void* kernel = nullptr;
    const uint64_t* args = nullptr;
    int num_args = 0;
};

Machine machine;

// --- switching

#if defined(__x86_64__)
// Callee-saved registers go to the stack that is left and come from the one that is entered.
asm(R"(
    .text
    .type fp4comm_switch_stacks, @function
fp4comm_switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fp4comm_switch_stacks, .-fp4comm_switch_stacks
)");
extern "C" void fp4comm_switch_stacks(void** left, void* entered);

void switch_stacks(void** left, void* entered) {
    fp4comm_switch_stacks(left, entered);
}

// A stack from which a switch returns into `entry`.
void* fresh_stack(uint8_t* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes) - 2;
    *top = reinterpret_cast<void*>(entry);
    memset(top - 6, 0, 6 * sizeof(void*));
    return top - 6;
}
#else
ucontext_t contexts[kMaxThreads + 1];

void switch_stacks(void** left, void* entered) {
    static ucontext_t scheduler;
    ucontext_t* here = left == &machine.scheduler ? &scheduler : static_cast<ucontext_t*>(*left);
    *left = here;
    swapcontext(here, static_cast<ucontext_t*>(entered));
}

void* fresh_stack(uint8_t* stack, void (*entry)()) {
    ucontext_t* context = &contexts[(stack - machine.stacks) / kStackBytes];
    getcontext(context);
    context->uc_stack.ss_sp = stack + kPage;
    context->uc_stack.ss_size = kStackBytes - kPage;
    makecontext(context, entry, 0);
    return context;
}
#endif

void leave() {
    switch_stacks(&current_fibre().stack_pointer, machine.scheduler);
}

// --- the scheduler

uint32_t next_random() {
    machine.random = machine.random * 1664525u + 1013904223u;
    return machine.random >> 16;
}

// Visits 0..count-1 in an order of a few that chance picks: as they are or backwards, from any start.
template <typename Visit>
void in_some_order(int count, Visit visit) {
    const int start = int(next_random() % uint32_t(count));
    const int step = next_random() & 1 ? 1 : count - 1;
    for (int i = 0, at = start; i < count; ++i, at = (at + step) % count) visit(at);
}

std::string describe(int thread) {
    const Fibre& fibre = machine.fibres[thread];
    std::string text = "thread " + std::to_string(thread);
    if (fibre.done) return text + " has ended";
    text += std::string(" waits at ") + name_of(fibre.op) + " of line " + std::to_string(fibre.line);
    char mask[16];
    snprintf(mask, sizeof mask, "%08x", fibre.mask);
    return fibre.at_warp_op() ? text + " with mask 0x" + mask : text;
}

bool error_of_two(int one, int other, const char* what) {
    machine.error = "block " + std::to_string(blockIdx.x) + ": " + what + ": " + describe(one) + ", " + describe(other);
    return false;
}

int first_thread(int warp) {
    return warp * kLanes;
}

uint32_t lanes_of(int warp, bool (*condition)(const Fibre&)) {
    uint32_t mask = 0;
    for (int lane = 0; lane < kLanes && first_thread(warp) + lane < machine.num_threads; ++lane) {
        if (condition(machine.fibres[first_thread(warp) + lane])) mask |= 1u << lane;
    }
    return mask;
}

uint64_t result_of(Fibre* lanes, int lane, uint32_t members) {
    const Fibre& fibre = lanes[lane];
    uint64_t result = fibre.value;
    bool first = true;
    if (fibre.op == Op::kShuffle) return lanes[fibre.source].value;
    if (fibre.op == Op::kSyncWarp) return 0;
    if (fibre.op != Op::kReduce) result = 0;
    for (int other = 0; other < kLanes; ++other) {
        if (!(members >> other & 1)) continue;
        const uint64_t value = lanes[other].value;
        if (fibre.op == Op::kBallot) result |= uint64_t(value != 0) << other;
        if (fibre.op == Op::kMatch) result |= uint64_t(value == fibre.value) << other;
        if (fibre.op == Op::kReduce) result = first ? value : fibre.fold(result, value);
        first = false;
    }
    return result;
}

// Lets those lanes go on that wait for each other. False if their calls do not fit together.
bool release_lanes(int warp, int leader, bool* released) {
    Fibre* lanes = machine.fibres + first_thread(warp);
    const uint32_t live = lanes_of(warp, [](const Fibre& fibre) { return !fibre.done; });
    const uint32_t members = lanes[leader].mask & live;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!(members >> lane & 1)) continue;
        if (!lanes[lane].at_warp_op()) return true;  // not there yet
        if (lanes[lane].op != lanes[leader].op || lanes[lane].mask != lanes[leader].mask ||
            lanes[lane].line != lanes[leader].line) {
            return error_of_two(first_thread(warp) + leader, first_thread(warp) + lane, "a divergent warp");
        }
        if (lanes[lane].op == Op::kShuffle && !(members >> lanes[lane].source & 1)) {
            return error_of_two(first_thread(warp) + lane, first_thread(warp) + lanes[lane].source,
                                "a shuffle from a lane that takes no part");
        }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        if (members >> lane & 1) lanes[lane].result = result_of(lanes, lane, members);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        if (members >> lane & 1) lanes[lane].op = Op::kNone;
    }
    *released = true;
    return true;
}

// Runs a warp until all its lanes have ended or wait for something outside of it.
bool run_warp(int warp) {
    const int count = std::min(kLanes, machine.num_threads - first_thread(warp));
    for (bool released = true; released;) {
        in_some_order(count, [warp](int lane) {
            const int thread = first_thread(warp) + lane;
            while (machine.error.empty() && machine.fibres[thread].ready()) {
                current_thread = thread;
                threadIdx.x = unsigned(thread);
                switch_stacks(&machine.scheduler, machine.fibres[thread].stack_pointer);
                current_thread = -1;
            }
        });
        released = false;
        for (int lane = 0; lane < count && machine.error.empty(); ++lane) {
            if (machine.fibres[first_thread(warp) + lane].at_warp_op() && !release_lanes(warp, lane, &released)) break;
        }
        if (!machine.error.empty()) return false;
    }
    return true;
}

// All warps have stopped: lets those threads go on that pause, once other processes had their turn. False if there are
// none.
bool resume_paused() {
    bool any = false;
    for (int thread = 0; thread < machine.num_threads; ++thread) {
        Fibre& fibre = machine.fibres[thread];
        if (fibre.op != Op::kPause) continue;
        fibre.op = Op::kNone;
        any = true;
    }
    if (any) sched_yield();
    return any;
}

// All warps have stopped: lets the threads at the barrier go on. False at the end of the block and after an error.
bool release_barrier() {
    int waiting = -1;
    int stuck = -1;
    uint64_t any = 0, all = 1, count = 0;
    for (int thread = 0; thread < machine.num_threads; ++thread) {
        const Fibre& fibre = machine.fibres[thread];
        if (fibre.done) continue;
        if (!fibre.at_barrier()) stuck = thread;
        if (fibre.at_barrier() && waiting >= 0 &&
            (fibre.op != machine.fibres[waiting].op || fibre.line != machine.fibres[waiting].line)) {
            return error_of_two(waiting, thread, "different barriers");
        }
        if (fibre.at_barrier()) waiting = thread;
        any |= fibre.value != 0;
        all &= fibre.value != 0;
        count += fibre.value != 0;
    }
    if (stuck >= 0) {
        const int warp = stuck / kLanes;
        for (int thread = first_thread(warp); thread < std::min(first_thread(warp + 1), machine.num_threads);
             ++thread) {
            const Fibre& other = machine.fibres[thread];
            const bool named = machine.fibres[stuck].mask >> (thread % kLanes) & 1;
            if (named && !other.at_warp_op()) return error_of_two(stuck, thread, "a divergent warp");
        }
        return error_of_two(stuck, stuck, "a deadlock");
    }
    for (int thread = 0; thread < machine.num_threads; ++thread) {
        Fibre& fibre = machine.fibres[thread];
        fibre.result = fibre.op == Op::kBarrierOr ? any : fibre.op == Op::kBarrierAnd ? all : count;
        fibre.op = Op::kNone;
    }
    return waiting >= 0;
}

template <size_t... I>
void call(void* kernel, const uint64_t* args, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(std::enable_if_t<(I < 64), uint64_t>...)>(kernel)(args[I]...);
}

template <size_t N = 0>
void call(void* kernel, const uint64_t* args, int num_args) {
    if constexpr (N <= 40) {
        if (num_args == int(N)) return call(kernel, args, std::make_index_sequence<N>());
        call<N + 1>(kernel, args, num_args);
    }
}

void fibre_main() {
    call(machine.kernel, machine.args, machine.num_args);
    current_fibre().done = true;
    leave();
}

// The stacks grow down to a page without access rights; so does a walk past the end of dynamic shared memory.
void make_memory() {
    if (machine.stacks) return;
    const auto map = [](size_t size) {
        void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        return static_cast<uint8_t*>(memory);
    };
    machine.stacks = map(kMaxThreads * kStackBytes);
    for (int thread = 0; thread < kMaxThreads; ++thread) {
        mprotect(machine.stacks + thread * kStackBytes, kPage, PROT_NONE);
    }
    uint8_t* dynamic = map(kDynamicBytes + kPage);
    mprotect(dynamic + kDynamicBytes, kPage, PROT_NONE);
    machine.dynamic = dynamic + kDynamicBytes;
}

void run_block(int num_threads) {
    ++machine.epoch;
    machine.num_threads = num_threads;
    if (machine.dynamic_bytes) {
        memset(machine.dynamic - machine.dynamic_bytes, kSharedPattern, machine.dynamic_bytes);
    }
    for (int thread = 0; thread < num_threads; ++thread) {
        machine.fibres[thread] = Fibre();
        machine.fibres[thread].stack_pointer = fresh_stack(machine.stacks + thread * kStackBytes, fibre_main);
    }
    const int num_warps = (num_threads + kLanes - 1) / kLanes;
    do {
        in_some_order(num_warps, [](int warp) {
            if (machine.error.empty()) run_warp(warp);
        });
    } while (machine.error.empty() && (resume_paused() || release_barrier()));
}

// The mode of the processor, for the time of a launch.
#if defined(__x86_64__)
class FlushSubnormals {
  public:
    FlushSubnormals() {
        asm volatile("stmxcsr %0" : "=m"(before_));
        asm volatile("ldmxcsr %0" : : "m"(kFlushSubnormals));
    }
    ~FlushSubnormals() { asm volatile("ldmxcsr %0" : : "m"(before_)); }

  private:
    uint32_t before_;
};
#else
struct FlushSubnormals {
    FlushSubnormals() {}
};
#endif

struct SourceLocation {
    const char* file;
    uint32_t line, column;
};

void fail_at(void* data, const std::string& what) {
    const SourceLocation* at = static_cast<SourceLocation*>(data);
    fail((what + " in " + (at->file ? at->file : "?") + ":" + std::to_string(at->line)).c_str());
}

}  // namespace

Fibre& current_fibre() {
    return machine.fibres[current_thread];
}

uint64_t wait(Op op, int line) {
    Fibre& fibre = current_fibre();
    fibre.op = op;
    fibre.line = line;
    leave();
    return fibre.result;
}

void fail(const char* what) {
    if (current_thread < 0) {
        fprintf(stderr, "emulator: %s\n", what);
        abort();
    }
    machine.error = "thread " + std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x) + ": " + what;
    leave();
}

void* dynamic_shared() {
    return machine.dynamic - machine.dynamic_bytes;
}

void fresh(void* memory, size_t size, uint64_t* epoch) {
    if (*epoch == machine.epoch) return;
    *epoch = machine.epoch;
    memset(memory, kSharedPattern, size);
}

}  // namespace fp4comm_emulator

// Runs all blocks, one after the other; returns an error message or null. `backwards`: the last block first.
extern "C" FP4COMM_EXPORT const char* fp4comm_emulator_run(void* kernel, int64_t grid, int64_t block,
                                                           const uint64_t* args, int64_t num_args, int64_t shared,
                                                           int64_t backwards) {
    using namespace fp4comm_emulator;
    make_memory();
    machine.kernel = kernel;
    machine.args = args;
    machine.num_args = int(num_args);
    machine.dynamic_bytes = size_t(shared + 15) / 16 * 16;
    machine.error.clear();
    blockDim.x = unsigned(block);
    gridDim.x = unsigned(grid);
    [[maybe_unused]] const FlushSubnormals flush;
    for (int64_t i = 0; i < grid && machine.error.empty(); ++i) {
        blockIdx.x = unsigned(backwards ? grid - 1 - i : i);
        run_block(int(block));
    }
    return machine.error.empty() ? nullptr : machine.error.c_str();
}

// What the compiler's checks in kernels call.
extern "C" {

FP4COMM_EXPORT void __ubsan_handle_type_mismatch_v1(void* data, uintptr_t address) {
    char text[64];
    snprintf(text, sizeof text, "misaligned or null address 0x%llx", static_cast<unsigned long long>(address));
    fp4comm_emulator::fail_at(data, text);
}

FP4COMM_EXPORT void __ubsan_handle_out_of_bounds(void* data, uintptr_t index) {
    fp4comm_emulator::fail_at(data, "index " + std::to_string(int64_t(index)) + " outside of an array");
}

FP4COMM_EXPORT void __ubsan_handle_shift_out_of_bounds(void* data, uintptr_t, uintptr_t shift) {
    fp4comm_emulator::fail_at(data, "shift by " + std::to_string(int64_t(shift)));
}

FP4COMM_EXPORT void __ubsan_handle_divrem_overflow(void* data, uintptr_t, uintptr_t) {
    fp4comm_emulator::fail_at(data, "division by zero");
}
}
