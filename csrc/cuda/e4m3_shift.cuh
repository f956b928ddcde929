// E4M3 codes four at a time, moved to a larger scale.
#pragma once

#include "device.cuh"

namespace fp4comm {

// Nonzero if one of four codes is neither zero nor NaN.
__device__ inline uint32_t numbers_in(uint32_t codes) {
    return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x7e7e7e7eu;
}

// Bit 7 of every code that is NaN.
__device__ inline uint32_t nans_in(uint32_t codes) {
    return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// Four codes, none of them NaN, times a power of two not above 1, given as a pair of FP16. Products that FP16 has to
// round are far below half of the smallest E4M3 number.
__device__ inline uint32_t scale_codes(uint32_t codes, uint32_t powers) {
    const uint32_t low = e4m3x2_from_f16x2(mul_f16x2(f16x2_from_e4m3x2(codes & 0xffffu), powers));
    const uint32_t high = e4m3x2_from_f16x2(mul_f16x2(f16x2_from_e4m3x2(codes >> 16), powers));
    return __byte_perm(low, high, 0x5410);
}

// The same, where NaN stays as it is.
FP4COMM_RARE uint32_t scale_codes_with_nan(uint32_t codes, uint32_t powers) {
    const uint32_t nan = nans_in(codes);
    const uint32_t kept = (nan >> 7) * 0xffu;
    return (scale_codes(codes & ~kept, powers) & ~kept) | (codes & kept);
}

// 2^shift as a pair of FP16, -19 <= shift <= 0; below 2^-14 these are subnormals in steps of 2^-24.
__device__ inline uint32_t powers_of(int shift) {
    const uint32_t power = shift >= -14 ? uint32_t(shift + 15) << 10 : 1u << (shift + 24);
    return pair_of(power, power);
}

}  // namespace fp4comm
