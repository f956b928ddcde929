// E4M3 (OCP e4m3fn): bias 7, subnormals in steps of 2^-9, largest 448 (0x7E), NaN 0x7F and 0xFF, no Inf.
#pragma once

#include "e2m1.h"
#include "macros.h"

namespace fp4comm {

constexpr uint32_t kE4M3NaN = 0x7f;
constexpr uint32_t kE4M3Max = 0x7e;
constexpr uint32_t kE4M3Magnitude = 0x7f;

FP4COMM_HD inline bool e4m3_is_nan(uint32_t code) {
    return (code & kE4M3Magnitude) == kE4M3NaN;
}

FP4COMM_HD inline float e4m3_value(uint32_t code) {
    const uint32_t magnitude = code & kE4M3Magnitude;
    if (magnitude == kE4M3NaN) return float_from_bits(kNaNBits);
    const float value =
        magnitude < 8 ? float(int32_t(magnitude)) * 0.001953125f : float_from_bits((magnitude << 20) + (120u << 23));
    return float_from_bits(float_bits(value) | (code & 0x80u) << 24);
}

// Code of a finite x: nearest even, subnormals included, saturating at 448, sign kept also for zero.
FP4COMM_HD inline uint8_t e4m3_nearest(float x) {
    const uint32_t magnitude = magnitude_bits(x);
    const uint32_t sign = float_bits(x) >> 24 & 0x80u;
    if (magnitude < 0x3c800000u) {  // below 2^-6: the units of 2^14 are 2^-9, so the addition rounds
        return uint8_t(sign | (float_bits(add_rn(float_from_bits(magnitude), 16384.0f)) - float_bits(16384.0f)));
    }
    const uint32_t code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    return uint8_t(sign | (code > kE4M3Max ? kE4M3Max : code));
}

// E2M1 code times 2^shift. Six times 2^-13 is below half of the smallest E4M3 number: lower shifts change nothing.
constexpr int kMinE2M1Shift = -13;
constexpr int kMaxE2M1Shift = 6;

FP4COMM_HD inline uint8_t e4m3_from_e2m1(uint32_t code, int shift) {
    const int clamped = shift < kMinE2M1Shift ? kMinE2M1Shift : shift;
    return e4m3_nearest(mul_rn(e2m1_value(code), float_from_bits(uint32_t(clamped + 127) << 23)));
}

// E4M3 code times 2^shift, shift <= 0, NaN kept. 448 times 2^-19 is below half of the smallest E4M3 number.
constexpr int kMinE4M3Shift = -19;

FP4COMM_HD inline uint8_t e4m3_shift(uint32_t code, int shift) {
    if (e4m3_is_nan(code)) return uint8_t(code);
    const int clamped = shift < kMinE4M3Shift ? kMinE4M3Shift : shift;
    return e4m3_nearest(mul_rn(e4m3_value(code), float_from_bits(uint32_t(clamped + 127) << 23)));
}

}  // namespace fp4comm
