// The names that kernels use of CUDA C++.
#pragma once

#define __global__ FP4COMM_EXPORT
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

constexpr int warpSize = fp4comm_emulator::kLanes;

// --- vectors

#define FP4COMM_VECTOR2(name, element, alignment)   \
    struct alignas(alignment) name {                \
        element x, y;                               \
    };                                              \
    inline name make_##name(element x, element y) { \
        return {x, y};                              \
    }
#define FP4COMM_VECTOR4(name, element, alignment)                         \
    struct alignas(alignment) name {                                      \
        element x, y, z, w;                                               \
    };                                                                    \
    inline name make_##name(element x, element y, element z, element w) { \
        return {x, y, z, w};                                              \
    }
FP4COMM_VECTOR2(uchar2, unsigned char, 2)
FP4COMM_VECTOR2(ushort2, unsigned short, 4)
FP4COMM_VECTOR2(int2, int, 8)
FP4COMM_VECTOR2(uint2, unsigned, 8)
FP4COMM_VECTOR2(float2, float, 8)
FP4COMM_VECTOR2(longlong2, long long, 16)
FP4COMM_VECTOR2(ulonglong2, unsigned long long, 16)
FP4COMM_VECTOR4(uchar4, unsigned char, 4)
FP4COMM_VECTOR4(ushort4, unsigned short, 8)
FP4COMM_VECTOR4(int4, int, 16)
FP4COMM_VECTOR4(uint4, unsigned, 16)
FP4COMM_VECTOR4(float4, float, 16)
#undef FP4COMM_VECTOR2
#undef FP4COMM_VECTOR4

// --- barriers, shuffles, votes: macros, so that the line of the call is known

#define __syncthreads() fp4comm_emulator::barrier(fp4comm_emulator::Op::kBarrier, __LINE__, 0)
#define __syncthreads_or(value) int(fp4comm_emulator::barrier(fp4comm_emulator::Op::kBarrierOr, __LINE__, (value) != 0))
#define __syncthreads_and(value) \
    int(fp4comm_emulator::barrier(fp4comm_emulator::Op::kBarrierAnd, __LINE__, (value) != 0))
#define __syncthreads_count(value) \
    int(fp4comm_emulator::barrier(fp4comm_emulator::Op::kBarrierCount, __LINE__, (value) != 0))
#define __syncwarp(...) fp4comm_emulator::SyncWarp{__LINE__}(__VA_ARGS__)
#define __shfl_sync(...) fp4comm_emulator::shuffle(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) fp4comm_emulator::shuffle_xor(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) fp4comm_emulator::shuffle_up(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) fp4comm_emulator::shuffle_down(__LINE__, __VA_ARGS__)
#define __ballot_sync(mask, value) fp4comm_emulator::ballot(__LINE__, mask, (value) != 0)
#define __any_sync(mask, value) int(fp4comm_emulator::ballot(__LINE__, mask, (value) != 0) != 0)
#define __all_sync(mask, value) int(fp4comm_emulator::ballot(__LINE__, mask, !(value)) == 0)
#define __match_any_sync(mask, value) fp4comm_emulator::match_any(__LINE__, mask, value)
#define __reduce_add_sync(mask, value) fp4comm_emulator::reduce(__LINE__, mask, value, fp4comm_emulator::fold_add)
#define __reduce_or_sync(mask, value) fp4comm_emulator::reduce(__LINE__, mask, value, fp4comm_emulator::fold_or)
#define __reduce_and_sync(mask, value) fp4comm_emulator::reduce(__LINE__, mask, value, fp4comm_emulator::fold_and)
#define __reduce_max_sync(mask, value) fp4comm_emulator::reduce_max(__LINE__, mask, value)
#define __reduce_min_sync(mask, value) fp4comm_emulator::reduce_min(__LINE__, mask, value)

namespace fp4comm_emulator {

inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// To the other threads, and then to other processes, whose kernels a kernel may wait for.
inline void yield() {
    wait(Op::kPause, __LINE__);
}

inline uint64_t barrier(Op op, int line, bool value) {
    current_fibre().value = value;
    return wait(op, line);
}

inline uint64_t warp_op(Op op, int line, uint32_t mask, uint64_t value) {
    Fibre& fibre = current_fibre();
    if (!(mask >> (current_thread % kLanes) & 1)) fail("the mask of a warp operation lacks the thread itself");
    fibre.mask = mask;
    fibre.value = value;
    return wait(op, line);
}

struct SyncWarp {
    int line;
    void operator()(uint32_t mask = 0xffffffffu) const { warp_op(Op::kSyncWarp, line, mask, 0); }
};

inline uint32_t ballot(int line, uint32_t mask, bool value) {
    return uint32_t(warp_op(Op::kBallot, line, mask, value));
}

template <typename T>
uint64_t to_word(T value) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    return word;
}

template <typename T>
T from_word(uint64_t word) {
    T value;
    memcpy(&value, &word, sizeof value);
    return value;
}

template <typename T>
uint32_t match_any(int line, uint32_t mask, T value) {
    return uint32_t(warp_op(Op::kMatch, line, mask, to_word(value)));
}

template <typename T>
T shuffle_from(int line, uint32_t mask, T value, int source) {
    static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA has shuffles of 32 and 64 bit numbers");
    current_fibre().source = source;
    return from_word<T>(warp_op(Op::kShuffle, line, mask, to_word(value)));
}

inline int lane_now() {
    return current_thread % kLanes;
}

template <typename T>
T shuffle(int line, uint32_t mask, T value, int lane, int width = kLanes) {
    return shuffle_from(line, mask, value, lane_now() / width * width + (lane & (width - 1)));
}

template <typename T>
T shuffle_xor(int line, uint32_t mask, T value, int lanes, int width = kLanes) {
    const int source = lane_now() ^ lanes;
    return shuffle_from(line, mask, value, source < (lane_now() / width + 1) * width ? source : lane_now());
}

template <typename T>
T shuffle_up(int line, uint32_t mask, T value, unsigned delta, int width = kLanes) {
    const int source = lane_now() - int(delta);
    return shuffle_from(line, mask, value, source < lane_now() / width * width ? lane_now() : source);
}

template <typename T>
T shuffle_down(int line, uint32_t mask, T value, unsigned delta, int width = kLanes) {
    const int source = lane_now() + int(delta);
    return shuffle_from(line, mask, value, source < (lane_now() / width + 1) * width ? source : lane_now());
}

inline uint64_t fold_add(uint64_t a, uint64_t b) {
    return uint32_t(a + b);
}
inline uint64_t fold_or(uint64_t a, uint64_t b) {
    return a | b;
}
inline uint64_t fold_and(uint64_t a, uint64_t b) {
    return a & b;
}

template <typename T>
T reduce(int line, uint32_t mask, T value, Fold fold) {
    static_assert(sizeof(T) == 4, "CUDA has reductions of 32 bit integers");
    current_fibre().fold = fold;
    return from_word<T>(warp_op(Op::kReduce, line, mask, to_word(value)));
}

template <typename T>
T reduce_max(int line, uint32_t mask, T value) {
    return reduce(line, mask, value, [](uint64_t a, uint64_t b) {
        return to_word(from_word<T>(a) < from_word<T>(b) ? from_word<T>(b) : from_word<T>(a));
    });
}

template <typename T>
T reduce_min(int line, uint32_t mask, T value) {
    return reduce(line, mask, value, [](uint64_t a, uint64_t b) {
        return to_word(from_word<T>(b) < from_word<T>(a) ? from_word<T>(b) : from_word<T>(a));
    });
}

}  // namespace fp4comm_emulator

// --- memory

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline void __trap() {
    fp4comm_emulator::fail("__trap");
}

#define FP4COMM_LOAD(name)     \
    template <typename T>      \
    T name(const T* address) { \
        return *address;       \
    }
#define FP4COMM_STORE(name)          \
    template <typename T>            \
    void name(T* address, T value) { \
        *address = value;            \
    }
FP4COMM_LOAD(__ldg)
FP4COMM_LOAD(__ldca)
FP4COMM_LOAD(__ldcg)
FP4COMM_LOAD(__ldcs)
FP4COMM_LOAD(__ldcv)
FP4COMM_LOAD(__ldlu)
FP4COMM_STORE(__stwb)
FP4COMM_STORE(__stcg)
FP4COMM_STORE(__stcs)
FP4COMM_STORE(__stwt)
#undef FP4COMM_LOAD
#undef FP4COMM_STORE

// One thread runs at a time.
#define FP4COMM_ATOMIC(name, expression)                              \
    template <typename T>                                             \
    T name(T* address, std::common_type_t<T> value) {                 \
        static_assert(sizeof(T) >= 4, "CUDA has no smaller atomics"); \
        const T old = *address;                                       \
        *address = T(expression);                                     \
        return old;                                                   \
    }                                                                 \
    template <typename T>                                             \
    T name##_system(T* address, std::common_type_t<T> value) {        \
        return name(address, value);                                  \
    }
FP4COMM_ATOMIC(atomicAdd, old + value)
FP4COMM_ATOMIC(atomicSub, old - value)
FP4COMM_ATOMIC(atomicOr, old | value)
FP4COMM_ATOMIC(atomicAnd, old& value)
FP4COMM_ATOMIC(atomicXor, old ^ value)
FP4COMM_ATOMIC(atomicMax, old > value ? old : value)
FP4COMM_ATOMIC(atomicMin, old < value ? old : value)
FP4COMM_ATOMIC(atomicExch, value)
FP4COMM_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef FP4COMM_ATOMIC

template <typename T>
T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
    const T old = *address;
    if (old == compare) *address = value;
    return old;
}

// --- arithmetic

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}

template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

// Bytes of (y, x) by the nibbles of s; the high bit of a nibble spreads the sign of the byte.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned selector = s >> (4 * i) & 15;
        const unsigned byte = unsigned(bytes >> (8 * (selector & 7)) & 255);
        result |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return result;
}

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
inline int __clz(int x) {
    return x == 0 ? 32 : __builtin_clz(unsigned(x));
}
inline int __clzll(long long x) {
    return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}

inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= (x >> i & 1u) << (31 - i);
    return result;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
    return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}

inline unsigned __umulhi(unsigned a, unsigned b) {
    return unsigned(uint64_t(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline unsigned __float_as_uint(float x) {
    return fp4comm_emulator::from_word<unsigned>(fp4comm_emulator::to_word(x));
}
inline float __uint_as_float(unsigned x) {
    return fp4comm_emulator::from_word<float>(fp4comm_emulator::to_word(x));
}
inline int __float_as_int(float x) {
    return int(__float_as_uint(x));
}
inline float __int_as_float(int x) {
    return __uint_as_float(unsigned(x));
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
