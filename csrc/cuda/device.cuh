// What the kernels use of the device: vector loads and stores and the instructions that C++ has no name for. Each of
// these also has a portable form, for older devices and for hosts that run kernels in tests.
#pragma once

#include "fp4comm/e4m3.h"
#include "fp4comm/half.h"
#include "fp4comm/macros.h"

#if defined(__CUDA_ARCH__)
#define FP4COMM_SM __CUDA_ARCH__
#else
#define FP4COMM_SM 0
#endif

namespace fp4comm {

// For what is rare: keeps its registers and instructions out of the loop that calls it.
#if FP4COMM_SM
#define FP4COMM_RARE __device__ __noinline__
#else
#define FP4COMM_RARE __device__ inline
#endif

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

template <typename T>
__device__ inline T load(const void* address) {
    return *static_cast<const T*>(address);
}

// Memory that the kernel does not write; read once, so that it leaves the caches to what is read again.
template <typename T>
__device__ inline T load_streaming(const void* address) {
#if FP4COMM_SM
    return __ldcs(static_cast<const T*>(address));
#else
    return *static_cast<const T*>(address);
#endif
}

template <typename T>
__device__ inline void store(void* address, T value) {
    *static_cast<T*>(address) = value;
}

// Starts to copy 16 bytes to shared memory, past the registers; both addresses are multiples of 16.
__device__ inline void copy_async16(void* shared, const void* global) {
#if FP4COMM_SM >= 800
    const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
    store(shared, load<uint4>(global));
#endif
}

// Waits for the copies of this thread. Others see them after a barrier.
__device__ inline void wait_for_copies() {
#if FP4COMM_SM >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ---- memory that other devices and the host see ----

// What this thread has written, and what it has seen others write, is there before the value.
__device__ inline void store_release(int64_t* address, int64_t value) {
#if FP4COMM_SM
    asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#else
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
#endif
}

__device__ inline int64_t load_acquire(const int64_t* address) {
#if FP4COMM_SM
    int64_t value;
    asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
#else
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#endif
}

__device__ inline uint32_t load_acquire(const uint32_t* address) {
#if FP4COMM_SM
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
#else
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#endif
}

// After a fence.
__device__ inline void add_one(uint32_t* address) {
#if FP4COMM_SM
    asm volatile("red.relaxed.sys.global.add.u32 [%0], 1;" ::"l"(address) : "memory");
#else
    __atomic_fetch_add(address, 1u, __ATOMIC_SEQ_CST);
#endif
}

__device__ inline void fence_system() {
#if FP4COMM_SM
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// Of one clock, which starts anywhere.
__device__ inline int64_t nanoseconds() {
#if FP4COMM_SM
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#else
    return fp4comm_emulator::nanoseconds();
#endif
}

// Between two looks at a flag.
__device__ inline void pause() {
#if FP4COMM_SM
    __nanosleep(20);
#else
    fp4comm_emulator::yield();
#endif
}

// ---- kernels of a stream that run at the same time ----

// The next kernel, if it was launched so that it may, starts once all blocks of this one have come here.
__device__ inline void let_next_kernel_start() {
#if FP4COMM_SM >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before this one has ended.
__device__ inline void wait_for_kernel_before() {
#if FP4COMM_SM >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- arithmetic ----

// 2^x to within 2 units in the last place; 0 below 2^-126.
__device__ inline float exp2_approx(float x) {
#if FP4COMM_SM
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return __builtin_exp2f(x);
#endif
}

// 1 / x to within 1 unit in the last place.
__device__ inline float reciprocal_approx(float x) {
#if FP4COMM_SM
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return 1.0f / x;
#endif
}

// Pairs of 16-bit numbers in a word, the first in the low half.
__device__ inline uint32_t pair_of(uint32_t low, uint32_t high) {
    return low | high << 16;
}

__device__ inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if FP4COMM_SM >= 900
    uint32_t result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    const uint32_t high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return pair_of(low, high);
#endif
}

__device__ inline uint32_t min_u16x2(uint32_t a, uint32_t b) {
#if FP4COMM_SM >= 900
    uint32_t result;
    asm("min.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    const uint32_t low = (a & 0xffffu) < (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    const uint32_t high = a >> 16 < b >> 16 ? a >> 16 : b >> 16;
    return pair_of(low, high);
#endif
}

// Products of FP16 pairs, rounded to nearest even, subnormals kept.
__device__ inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
#if FP4COMM_SM
    uint32_t result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    return pair_of(f16_nearest(mul_rn(f16_value(uint16_t(a)), f16_value(uint16_t(b)))),
                   f16_nearest(mul_rn(f16_value(uint16_t(a >> 16)), f16_value(uint16_t(b >> 16)))));
#endif
}

// c + a * b, where the product is a float: one rounding.
__device__ inline float add_exact_product(float c, float a, float b) {
#if FP4COMM_SM
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
#else
    return add_rn(c, mul_rn(a, b));
#endif
}

// FP16 pair nearest to two floats; a NaN gives some NaN.
__device__ inline uint32_t f16x2_from_floats(float low, float high) {
#if FP4COMM_SM
    uint32_t result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    return pair_of(f16_nearest(low), f16_nearest(high));
#endif
}

// BF16 pair nearest to two floats; a NaN gives some NaN.
__device__ inline uint32_t bf16x2_from_floats(float low, float high) {
#if FP4COMM_SM
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    return pair_of(bf16_nearest(low), bf16_nearest(high));
#endif
}

// Products of BF16 pairs, rounded to nearest even, subnormals kept; a NaN gives some NaN.
__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#if FP4COMM_SM >= 900
    uint32_t result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    return bf16x2_from_floats(mul_rn(bf16_value(uint16_t(a)), bf16_value(uint16_t(b))),
                              mul_rn(bf16_value(uint16_t(a >> 16)), bf16_value(uint16_t(b >> 16))));
#endif
}

// An FP16 number, from the low or the high half of a pair; a NaN gives some NaN.
__device__ inline float float_from_f16(uint32_t bits) {
#if FP4COMM_SM
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(uint16_t(bits)));
    return result;
#else
    return f16_value(uint16_t(bits));
#endif
}

// Two E4M3 codes nearest to two floats without NaN, saturating at 448.
__device__ inline uint32_t e4m3x2_from_floats(float low, float high) {
#if FP4COMM_SM >= 890
    uint16_t result;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
    return result;
#else
    return uint32_t(e4m3_nearest(low)) | uint32_t(e4m3_nearest(high)) << 8;
#endif
}

// FP16 pair of two E4M3 codes (low 16 bits of `codes`); exact, NaN gives a NaN.
__device__ inline uint32_t f16x2_from_e4m3x2(uint32_t codes) {
#if FP4COMM_SM >= 890
    uint32_t result;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(uint16_t(codes)));
    return result;
#else
    return pair_of(f16_nearest(e4m3_value(codes & 0xffu)), f16_nearest(e4m3_value(codes >> 8 & 0xffu)));
#endif
}

// Two E4M3 codes nearest to an FP16 pair without NaN, saturating at 448.
__device__ inline uint32_t e4m3x2_from_f16x2(uint32_t pair) {
#if FP4COMM_SM >= 890
    uint16_t result;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(result) : "r"(pair));
    return result;
#else
    return uint32_t(e4m3_nearest(f16_value(uint16_t(pair)))) | uint32_t(e4m3_nearest(f16_value(uint16_t(pair >> 16))))
                                                                   << 8;
#endif
}

}  // namespace fp4comm
