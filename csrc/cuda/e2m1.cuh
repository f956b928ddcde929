// E2M1 codes eight at a time: a word of eight nibbles, element 0 in the lowest. The numbers are those of
// fp4comm/e2m1.h; these are formulations with fewer instructions.
#pragma once

#include "device.cuh"
#include "fp4comm/block.h"

namespace fp4comm {

// Bytes of a table of eight for each of the eight magnitudes, four per result word, with the sign in their bit 7.
// Magnitudes are what __byte_perm takes as selectors.
__device__ inline uint2 e2m1_look_up(uint32_t codes, uint32_t table_low, uint32_t table_high) {
    const uint32_t magnitudes = codes & 0x77777777u;
    const uint32_t low_signs = codes << 4;
    const uint32_t signs0 = __byte_perm(low_signs, codes, 0x5140);
    const uint32_t signs1 = __byte_perm(low_signs, codes, 0x7362);
    return make_uint2(__byte_perm(table_low, table_high, magnitudes) | (signs0 & 0x80808080u),
                      __byte_perm(table_low, table_high, magnitudes >> 16) | (signs1 & 0x80808080u));
}

// The same without signs.
__device__ inline uint2 e2m1_look_up_magnitude(uint32_t codes, uint32_t table_low, uint32_t table_high) {
    const uint32_t magnitudes = codes & 0x77777777u;
    return make_uint2(__byte_perm(table_low, table_high, magnitudes),
                      __byte_perm(table_low, table_high, magnitudes >> 16));
}

// Table of E4M3 codes of the magnitudes times 2^shift, -5 <= shift <= 6: all of them are normal, so that two codes lie
// 4 apart in the mantissa of a binade of 8.
constexpr int kMinNormalShift = -5;

__device__ inline uint2 e4m3_table(int shift) {
    const uint32_t one = uint32_t(shift + 7) << 3;
    return make_uint2(one * 0x01010100u + 0x03fff800u, one * 0x01010101u + 0x14100c08u);
}

// Any shift, and NaN.
__device__ inline uint2 e4m3_table_any(uint32_t block_byte, uint32_t shared_byte) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (uint32_t code = 0; code < 8; ++code) {
        words[code / 4] |= uint32_t(mxfp4_to_e4m3(code, block_byte, shared_byte)) << code % 4 * 8;
    }
    return make_uint2(words[0], words[1]);
}

// Eight numbers as pairs of BF16, without a scale.
__device__ inline uint4 bf16x8_from_e2m1(uint32_t codes) {
    const uint2 high = e2m1_look_up(codes, 0x3f3f3f00u, 0x40404040u);
    const uint2 low = e2m1_look_up_magnitude(codes, 0xc0800000u, 0xc0804000u);
    return make_uint4(__byte_perm(low.x, high.x, 0x5140), __byte_perm(low.x, high.x, 0x7362),
                      __byte_perm(low.y, high.y, 0x5140), __byte_perm(low.y, high.y, 0x7362));
}

// Element j times 2^-126: the code's bits are those of a float whose exponent has only two.
__device__ inline float e2m1_tiny(uint32_t codes, int j) {
    const uint32_t top = codes << (28 - 4 * j);
    return float_from_bits(uint32_t(int32_t(top) >> 6) & 0x81c00000u);
}

// Four pairs of FP16, eight numbers times 2^-14, to the nearest codes. That factor puts E2M1's 1.0 on the smallest
// normal FP16 number, so that both have their subnormals at the same place and rounding is an integer addition. The
// magnitudes must round to 6 at most, `kSaturate` for those below 8.
template <bool kSaturate>
__device__ inline uint32_t e2m1x8_from_f16(const uint32_t* pairs) {
    uint32_t rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t pair = pairs[i];
        if (kSaturate) {  // 6 is 0x0e00
            pair = (pair & 0x80008000u) | min_u16x2(pair & 0x7fff7fffu, 0x0e000e00u);
        }
        rounded[i] = pair + 0x00ff00ffu + (pair >> 9 & 0x00010001u);
    }
    // The upper byte of a half is now [sign 0 0 0 code2 code1 code0 x].
    const uint32_t first = __byte_perm(rounded[0], rounded[1], 0x7351);
    const uint32_t second = __byte_perm(rounded[2], rounded[3], 0x7351);
    const uint32_t even = __byte_perm(first, second, 0x5410);
    const uint32_t odd = __byte_perm(first, second, 0x7632);
    const uint32_t low = (even >> 1 & 0x07070707u) | (even >> 4 & 0x08080808u);
    const uint32_t high = (odd << 3 & 0x70707070u) | (odd & 0x80808080u);
    return low | high;
}

// Sum of a magnitude below 8 and a power of two whose last bit is the step between codes there; the sum's distance
// from that power is the number of steps. Codes count on from 2 in each of the binades above 2.
__device__ inline uint32_t e2m1_nearest_fast(float x) {
    const uint32_t binade = float_bits(x) & kInfinityBits;
    const uint32_t one = 0x3f800000u;
    const uint32_t magic = (binade > one ? binade : one) + (22u << 23);
    const uint32_t sum = float_bits(add_rn(float_from_bits(magnitude_bits(x)), float_from_bits(magic)));
    return sum - magic + (magic >> 22) - 298u;
}

// Eight numbers, already divided by the scale, to the nearest codes. Magnitudes as for e2m1x8_from_f16.
template <bool kSaturate>
__device__ inline uint32_t e2m1x8_from_floats(const float* x) {
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        uint32_t code = e2m1_nearest_fast(x[j]);
        if (kSaturate && code > 7) code = 7;
        codes += code << 4 * j;
        codes |= float_bits(x[j]) >> (28 - 4 * j) & kE2M1Sign << 4 * j;
    }
    return codes;
}

}  // namespace fp4comm
