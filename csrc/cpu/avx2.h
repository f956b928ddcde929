// Building blocks of the AVX2 loops. A block is 32 elements: 32 bytes, two registers of 16 bits or four of floats.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include "memory.h"
#include "row_ops.h"
#include "tables.h"

#define FP4COMM_AVX2 __attribute__((target("avx2,f16c")))

namespace fp4comm::avx2 {

struct Block16 {
    __m256i low, high;  // elements 0..15 and 16..31
};

struct BlockF32 {
    __m256 part[4];
};

FP4COMM_AVX2 inline __m256i load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
FP4COMM_AVX2 inline void store256(void* p, __m256i v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), v);
}
FP4COMM_AVX2 inline void store128(void* p, __m128i v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), v);
}
FP4COMM_AVX2 inline __m128i load128(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
FP4COMM_AVX2 inline __m256i broadcast128_of(__m128i v) {
    return _mm256_broadcastsi128_si256(v);
}
FP4COMM_AVX2 inline __m256i broadcast128(const void* p) {
    return broadcast128_of(load128(p));
}
FP4COMM_AVX2 inline __m128i high128(__m256i v) {
    return _mm256_extracti128_si256(v, 1);
}
FP4COMM_AVX2 inline __m256i ints(__m256 v) {
    return _mm256_castps_si256(v);
}
FP4COMM_AVX2 inline __m256 floats(__m256i v) {
    return _mm256_castsi256_ps(v);
}

FP4COMM_AVX2 inline uint32_t max_u16(__m256i v) {
    const __m128i largest = _mm_max_epu16(_mm256_castsi256_si128(v), high128(v));
    const __m128i complement = _mm_minpos_epu16(_mm_xor_si128(largest, _mm_set1_epi16(-1)));
    return 0xffffu - (uint32_t(_mm_cvtsi128_si32(complement)) & 0xffffu);
}

FP4COMM_AVX2 inline uint32_t max_u8(__m256i v) {
    return max_u16(_mm256_max_epu8(v, _mm256_slli_epi16(v, 8))) >> 8;  // the high byte of a pair decides
}

FP4COMM_AVX2 inline uint32_t max_u32(__m256i v) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), high128(v));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return uint32_t(_mm_cvtsi128_si32(m));
}

FP4COMM_AVX2 inline __m256 canonical(__m256 v) {
    const __m256 nan = floats(_mm256_set1_epi32(int(kNaNBits)));
    return _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

// 16 packed bytes -> 32 codes, one per byte.
FP4COMM_AVX2 inline __m256i unpack_nibbles(__m128i packed) {
    const __m256i wide = _mm256_cvtepu8_epi16(packed);
    return _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(0x0f));
}

// 32 codes, one per byte -> 16 packed bytes.
FP4COMM_AVX2 inline __m128i pack_nibbles(__m256i codes) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
    return _mm_packus_epi16(_mm256_castsi256_si128(pairs), high128(pairs));
}

// 4 x 8 x 32 bits below 256 -> 32 bytes in order.
FP4COMM_AVX2 inline __m256i pack_u32(const __m256i v[4]) {
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(v[0], v[1]), _mm256_packus_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The signs of 32 numbers of 32 bits in bit 7 of 32 bytes in order, which signed saturation keeps.
FP4COMM_AVX2 inline __m256i pack_signs(const BlockF32& v) {
    const __m256i low = _mm256_packs_epi32(ints(v.part[0]), ints(v.part[1]));
    const __m256i high = _mm256_packs_epi32(ints(v.part[2]), ints(v.part[3]));
    const __m256i bytes =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return _mm256_and_si256(bytes, _mm256_set1_epi8(int8_t(0x80)));
}

FP4COMM_AVX2 inline __m256i magnitude(__m256 v) {
    return _mm256_and_si256(ints(v), _mm256_set1_epi32(int(kMagnitudeMask)));
}

FP4COMM_AVX2 inline __m256i e2m1_sign_of_e4m3(__m256i codes) {
    return _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(kE2M1Sign));
}

// table[j - first] for first <= j < first + 16, else 0: bit 7 of an index gives 0, and saturation sets it above.
FP4COMM_AVX2 inline __m256i lookup16(__m256i table, __m256i j, int first) {
    const __m256i index = first == 0 ? j : _mm256_sub_epi8(j, _mm256_set1_epi8(int8_t(first)));
    return _mm256_shuffle_epi8(table, _mm256_adds_epu8(index, _mm256_set1_epi8(0x70)));
}

// Indices into Tables::e4m3_of_e2m1 of blocks under the FP8 scale bytes `shared`.
FP4COMM_AVX2 inline __m256i e2m1_shift_indices(__m256i bytes, __m256i shared) {
    const __m256i lowest = _mm256_set1_epi8(-kMinE2M1Shift);
    const __m256i index =
        _mm256_add_epi8(_mm256_subs_epu8(bytes, _mm256_subs_epu8(shared, lowest)), _mm256_subs_epu8(lowest, shared));
    return _mm256_blendv_epi8(index, _mm256_set1_epi8(Tables::kNumE2M1Shifts),
                              _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(int8_t(kE8M0NaN))));
}

// One stage within a register: `other` holds each element's partner; the second of a pair is subtracted.
FP4COMM_AVX2 inline __m256 butterfly_within(__m256 x, __m256 other, int second_lanes) {
    const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i second = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(second_lanes), lane_bit), lane_bit);
    return _mm256_add_ps(other, _mm256_xor_ps(x, floats(_mm256_slli_epi32(second, 31))));
}

FP4COMM_AVX2 inline void butterfly(__m256& a, __m256& b) {
    const __m256 sum = _mm256_add_ps(a, b);
    b = _mm256_sub_ps(a, b);
    a = sum;
}

FP4COMM_AVX2 inline void hadamard_butterfly(BlockF32& x, float factor) {
    for (__m256& v : x.part) {
        v = butterfly_within(v, _mm256_permute_ps(v, 0xb1), 0xaa);
        v = butterfly_within(v, _mm256_permute_ps(v, 0x4e), 0xcc);
        v = butterfly_within(v, _mm256_permute2f128_ps(v, v, 1), 0xf0);
    }
    butterfly(x.part[0], x.part[1]);
    butterfly(x.part[2], x.part[3]);
    butterfly(x.part[0], x.part[2]);
    butterfly(x.part[1], x.part[3]);
    for (__m256& v : x.part) v = _mm256_mul_ps(v, _mm256_set1_ps(factor));
}

FP4COMM_AVX2 inline void flip_signs(BlockF32& x, uint32_t signs) {
    const __m256i to_top = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    for (int i = 0; i < 4; ++i) {
        const __m256i bits = _mm256_sllv_epi32(_mm256_set1_epi32(int(signs >> (8 * i))), to_top);
        x.part[i] = _mm256_xor_ps(x.part[i], floats(_mm256_and_si256(bits, _mm256_set1_epi32(int(0x80000000u)))));
    }
}

}  // namespace fp4comm::avx2
#endif
