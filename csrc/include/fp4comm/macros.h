// Host/device markers and bit casts. Everything in this folder is plain C++17 that gcc, clang, nvcc and NVRTC compile.
#pragma once

#if defined(__CUDACC_RTC__)
namespace fp4comm {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
}  // namespace fp4comm
#else
#include <cstdint>
#include <cstring>
#endif

#if defined(__CUDACC__)
#define FP4COMM_HD __host__ __device__
#else
#define FP4COMM_HD
#endif

namespace fp4comm {

constexpr int kBlockSize = 32;   // elements that share one E8M0 scale in MXFP4
constexpr int kGroupSize = 128;  // elements that share one scale in FP8
constexpr int kRowTile = 128;    // rows that share one scale in column-wise FP8

constexpr uint32_t kMagnitudeMask = 0x7fffffffu;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNaNBits = 0x7fc00000u;

FP4COMM_HD inline uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

FP4COMM_HD inline float float_from_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

// One rounding each, subnormals kept. The device compiler contracts to fused multiply-adds by default, and may be told
// to flush subnormals (CuPy does); PTX says what is meant.
FP4COMM_HD inline float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a * b;
#endif
}

FP4COMM_HD inline float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a + b;
#endif
}

// Not add_rn(a, -b): a negation, too, flushes.
FP4COMM_HD inline float sub_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a - b;
#endif
}

FP4COMM_HD inline uint32_t magnitude_bits(float x) {
    return float_bits(x) & kMagnitudeMask;
}

// NaN payloads differ between processors; results carry one NaN only.
FP4COMM_HD inline float canonical(float x) {
    return magnitude_bits(x) > kInfinityBits ? float_from_bits(kNaNBits) : x;
}

FP4COMM_HD constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

}  // namespace fp4comm
