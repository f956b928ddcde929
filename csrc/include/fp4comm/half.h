// BF16 and FP16 as bits. Rounding is to nearest even; a NaN becomes the canonical one.
#pragma once

#include "macros.h"

namespace fp4comm {

constexpr uint16_t kBF16NaN = 0x7fc0;
constexpr uint16_t kF16NaN = 0x7e00;

FP4COMM_HD inline float bf16_value(uint16_t bits) {
    return float_from_bits(uint32_t(bits) << 16);
}

FP4COMM_HD inline uint16_t bf16_nearest(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & kMagnitudeMask) > kInfinityBits) return kBF16NaN;
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

FP4COMM_HD inline float f16_value(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude > 0x7c00u) return float_from_bits(kNaNBits);
    if (magnitude == 0x7c00u) return float_from_bits(sign | kInfinityBits);
    const float value = magnitude < 0x400u ? float(int32_t(magnitude)) * 5.9604644775390625e-8f  // units of 2^-24
                                           : float_from_bits((magnitude << 13) + (112u << 23));
    return float_from_bits(float_bits(value) | sign);
}

FP4COMM_HD inline uint16_t f16_nearest(float x) {
    const uint32_t magnitude = magnitude_bits(x);
    const uint32_t sign = float_bits(x) >> 16 & 0x8000u;
    if (magnitude > kInfinityBits) return kF16NaN;
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 rounds to Inf
    if (magnitude < 0x38800000u) {                                  // below 2^-14: the units of 0.5 are 2^-24
        return uint16_t(sign | (float_bits(add_rn(float_from_bits(magnitude), 0.5f)) - float_bits(0.5f)));
    }
    return uint16_t(sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13) - (112u << 10)));
}

}  // namespace fp4comm
