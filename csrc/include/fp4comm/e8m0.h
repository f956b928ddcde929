// E8M0 scale bytes: byte b means 2^(b-127), 255 means NaN.
#pragma once

#include "macros.h"

namespace fp4comm {

enum class ScaleMode : int32_t { kFloor = 0, kEven = 1, kRceil = 2 };

constexpr uint32_t kE8M0NaN = 255;
constexpr uint32_t kE8M0One = 127;

// 2^(biased - 127) for 1 <= biased <= 254, where float is normal.
FP4COMM_HD inline float pow2(uint32_t biased) {
    return float_from_bits(biased << 23);
}

FP4COMM_HD inline float e8m0_value(uint32_t byte) {
    if (byte == 0) return float_from_bits(0x00400000u);
    return byte == kE8M0NaN ? float_from_bits(kNaNBits) : pow2(byte);
}

// What is added to the bits of amax before they are cut to the exponent.
FP4COMM_HD constexpr uint32_t scale_mode_increment(ScaleMode mode) {
    return mode == ScaleMode::kFloor ? 0 : mode == ScaleMode::kEven ? 0x200000u : 0x3fffffu;
}

// Scale of an MXFP4 block whose largest magnitude has the (finite) bits `amax`; 0..253.
FP4COMM_HD inline uint32_t e8m0_from_amax(uint32_t amax, ScaleMode mode) {
    const uint32_t exponent = (amax + scale_mode_increment(mode)) >> 23;
    return exponent > 2 ? exponent - 2 : 0;
}

// True where the fp32 scale with these bits is 2^(byte-127), 1 <= byte <= 254.
FP4COMM_HD inline bool is_normal_pow2(uint32_t scale_bits) {
    return (scale_bits & 0x7fffffu) == 0 && scale_bits - 1 < kInfinityBits - 1;
}

}  // namespace fp4comm
