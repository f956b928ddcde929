// E2M1 (FP4): magnitude codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. No Inf, no NaN.
#pragma once

#include "macros.h"

namespace fp4comm {

constexpr uint32_t kE2M1Sign = 8;

FP4COMM_HD inline float e2m1_value(uint32_t code) {
    const uint32_t magnitude = code & 7;
    const uint32_t bits = magnitude < 2 ? magnitude * 0x3f000000u : (magnitude << 22) + (126u << 23);
    return float_from_bits(bits | (code & kE2M1Sign) << 28);
}

// Code of a magnitude: nearest, ties to the even code, saturating at 6.
FP4COMM_HD inline uint32_t e2m1_nearest(float a) {
    return uint32_t(a > 0.25f) + uint32_t(a >= 0.75f) + uint32_t(a > 1.25f) + uint32_t(a >= 1.75f) +
           uint32_t(a > 2.5f) + uint32_t(a >= 3.5f) + uint32_t(a > 5.0f);
}

// Code of a magnitude: up with the probability of its distance to the value below, from 16 random bits.
FP4COMM_HD inline uint32_t e2m1_stochastic(float a, uint32_t random16) {
    if (a > 6.0f) a = 6.0f;
    const bool fine = a < 2.0f;
    const bool middle = a < 4.0f;
    const float steps = a * (fine ? 2.0f : middle ? 1.0f : 0.5f);
    const uint32_t multiple = (uint32_t(steps * 65536.0f) + random16) >> 16;
    return multiple + (fine ? 0 : middle ? 2 : 4);
}

FP4COMM_HD inline uint32_t e2m1_sign(float x) {
    return float_bits(x) >> 28 & kE2M1Sign;
}

}  // namespace fp4comm
