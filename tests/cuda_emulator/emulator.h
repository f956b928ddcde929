// Runs CUDA kernels on the host, for tests: the threads of a block are fibres that take turns at barriers, shuffles and
// pauses. Blocks run one after the other, so that one can wait for other processes, but not for another block.
//
// Stricter than a device: what is undefined there is an error here (a shuffle or barrier that not all its threads
// reach, a shuffle from an absent lane, misaligned accesses, indices outside of arrays), shared memory holds a pattern
// before it is written, and warps and lanes take turns in an order that changes, so that missing barriers show.
// Like the device it flushes subnormals, except in mul_rn, add_rn and sub_rn, since that is how kernels are compiled.
// (Negation flushes only on the device.)
//
// This file comes before a kernel's source; emulator.cpp is a library of its own.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <type_traits>

#define FP4COMM_EXPORT __attribute__((visibility("default")))

#pragma GCC visibility push(default)  // what the two share

struct uint3 {
    unsigned x, y, z;
};

extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace fp4comm_emulator {

constexpr int kLanes = 32;

// What threads wait for.
enum class Op {
    kNone,
    kPause,
    kBarrier,
    kBarrierOr,
    kBarrierAnd,
    kBarrierCount,
    kSyncWarp,
    kShuffle,
    kBallot,
    kMatch,
    kReduce
};

using Fold = uint64_t (*)(uint64_t, uint64_t);

// One thread; while it waits, what it brought to the others, and then what it gets.
struct Fibre {
    void* stack_pointer = nullptr;
    bool done = false;
    Op op = Op::kNone;
    int line = 0;
    uint32_t mask = 0;
    uint64_t value = 0;
    int source = 0;  // lane of a shuffle
    Fold fold = nullptr;
    uint64_t result = 0;

    bool ready() const { return !done && op == Op::kNone; }
    bool at_barrier() const { return op >= Op::kBarrier && op <= Op::kBarrierCount; }
    bool at_warp_op() const { return op >= Op::kSyncWarp; }
};

extern int current_thread;  // of the block
Fibre& current_fibre();

// The thread waits with what is in its fibre, and returns with its result.
uint64_t wait(Op op, int line);

// Ends the launch; a thread that calls it never continues.
void fail(const char* what);

void* dynamic_shared();

// Called where shared memory is declared: the first thread of a block that comes by fills it with a pattern.
void fresh(void* memory, size_t size, uint64_t* epoch);

}  // namespace fp4comm_emulator

#pragma GCC visibility pop

namespace fp4comm_emulator {

// --- subnormals are flushed, but not by mul_rn, add_rn and sub_rn

#if defined(__x86_64__)
constexpr uint32_t kKeepSubnormals = 0x1f80;
constexpr uint32_t kFlushSubnormals = 0x9fc0;

inline float mul_rn(float a, float b) {
    asm("ldmxcsr %2\n\tmulss %1, %0\n\tldmxcsr %3" : "+x"(a) : "x"(b), "m"(kKeepSubnormals), "m"(kFlushSubnormals));
    return a;
}

inline float add_rn(float a, float b) {
    asm("ldmxcsr %2\n\taddss %1, %0\n\tldmxcsr %3" : "+x"(a) : "x"(b), "m"(kKeepSubnormals), "m"(kFlushSubnormals));
    return a;
}

inline float sub_rn(float a, float b) {
    asm("ldmxcsr %2\n\tsubss %1, %0\n\tldmxcsr %3" : "+x"(a) : "x"(b), "m"(kKeepSubnormals), "m"(kFlushSubnormals));
    return a;
}
#else
inline float mul_rn(float a, float b) {
    return a * b;
}
inline float add_rn(float a, float b) {
    return a + b;
}
inline float sub_rn(float a, float b) {
    return a - b;
}
#endif

}  // namespace fp4comm_emulator

#include "intrinsics.h"
