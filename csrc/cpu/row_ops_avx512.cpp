// AVX-512 VBMI: the AVX2 loops with inner loops of 64 bytes for the quantization to MXFP4. A group has four blocks, so
// what belongs to a block as a whole (largest magnitude, scale) has one of the four 128-bit lanes.
#if defined(__x86_64__)
#include <immintrin.h>

#include "mxfp4_x86.h"
#include "tables.h"

#ifndef FP4COMM_AVX512
#define FP4COMM_AVX512 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))
#endif

namespace fp4comm {
namespace avx512 {
namespace {

FP4COMM_AVX512 inline __m512i load512(const void* p) {
    return _mm512_loadu_si512(p);
}

struct Max16 {
    FP4COMM_AVX512 static __m512i of(__m512i a, __m512i b) { return _mm512_max_epu16(a, b); }
};
struct Max8 {
    FP4COMM_AVX512 static __m512i of(__m512i a, __m512i b) { return _mm512_max_epu8(a, b); }
};

// The maximum of each lane in its lowest 16 bits (for bytes: of those at even and at odd places).
template <class Max>
FP4COMM_AVX512 inline __m512i max_of_lane(__m512i m) {
    m = Max::of(m, _mm512_shuffle_epi32(m, _MM_PERM_ENUM(0x4e)));
    m = Max::of(m, _mm512_srli_epi64(m, 32));
    return Max::of(m, _mm512_srli_epi64(m, 16));
}

// Byte 0 of the four lanes.
FP4COMM_AVX512 inline void store_scales(uint8_t* scales, __m512i lanes) {
    const __m512i first_bytes =
        _mm512_castsi128_si512(_mm_setr_epi8(0, 16, 32, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    store<int32_t>(scales, 0, _mm_cvtsi128_si32(_mm512_castsi512_si128(_mm512_permutexvar_epi8(first_bytes, lanes))));
}

// The same arithmetic as the AVX2 function of this name.
FP4COMM_AVX512 inline __m512i e2m1_nearest16(__m512i bits, __m512i quarter) {
    const __m512i one = _mm512_set1_epi16(1);
    const __m512i distance = _mm512_subs_epu16(_mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)), quarter);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(distance, 6), one);
    const __m512i half = _mm512_add_epi16(distance, _mm512_set1_epi16(31 - (2 << 6)));
    const __m512i normal = _mm512_min_epi16(_mm512_srai_epi16(_mm512_add_epi16(half, odd), 6), _mm512_set1_epi16(7));
    const __mmask32 above_quarter = _mm512_cmpgt_epi16_mask(distance, _mm512_setzero_si512());
    const __mmask32 from_three_quarters = _mm512_cmpgt_epi16_mask(distance, _mm512_set1_epi16(191));
    const __m512i up_to_one = _mm512_maskz_mov_epi16(above_quarter, one);
    const __m512i small = _mm512_mask_mov_epi16(up_to_one, from_three_quarters, _mm512_set1_epi16(2));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(bits, 12), _mm512_set1_epi16(kE2M1Sign));
    return _mm512_or_si512(_mm512_max_epi16(normal, small), sign);
}

template <int kBlock>
FP4COMM_AVX512 inline void store_block16(uint8_t* packed, __m512i bits, __m512i quarters) {
    const __m512i quarter = _mm512_shuffle_i64x2(quarters, quarters, kBlock * 0x55);
    const __m512i pairs = _mm512_madd_epi16(e2m1_nearest16(bits, quarter), _mm512_set1_epi32(0x00100001));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + 16 * kBlock), _mm512_cvtepi32_epi8(pairs));
}

FP4COMM_AVX512 uint64_t bf16_to_mxfp4(const uint16_t* x, int num_groups, ScaleMode mode, uint8_t* packed,
                                      uint8_t* scales) {
    const __m512i increment = _mm512_set1_epi16(int16_t(scale_mode_increment(mode) >> 16));
    const __m512i mask = _mm512_set1_epi16(0x7fff);
    const __m512i infinity = _mm512_set1_epi16(int16_t(kInfinityBits >> 16));
    const __m512i lowest16 = _mm512_set1_epi16(0x0100);
    uint64_t left = 0;
    for (int g = 0; g < num_groups; ++g, x += kGroupSize, packed += kGroupSize / 2, scales += 4) {
        const __m512i v0 = load512(x);
        const __m512i v1 = load512(x + 32);
        const __m512i v2 = load512(x + 64);
        const __m512i v3 = load512(x + 96);
        const __m512i m0 = _mm512_and_si512(v0, mask);
        const __m512i m1 = _mm512_and_si512(v1, mask);
        const __m512i m2 = _mm512_and_si512(v2, mask);
        const __m512i m3 = _mm512_and_si512(v3, mask);
        const __m512i m01 = Max16::of(_mm512_shuffle_i64x2(m0, m1, 0x44), _mm512_shuffle_i64x2(m0, m1, 0xee));
        const __m512i m23 = Max16::of(_mm512_shuffle_i64x2(m2, m3, 0x44), _mm512_shuffle_i64x2(m2, m3, 0xee));
        const __m512i lanes = Max16::of(_mm512_shuffle_i64x2(m01, m23, 0x88), _mm512_shuffle_i64x2(m01, m23, 0xdd));
        const __m512i amax = _mm512_shuffle_epi8(max_of_lane<Max16>(lanes), lowest16);
        const __m512i rounded = _mm512_and_si512(_mm512_add_epi16(amax, increment), infinity);
        const __mmask32 tiny = _mm512_cmplt_epu16_mask(rounded, _mm512_set1_epi16((kMinScaleByte + 2) << 7)) &
                               _mm512_test_epi16_mask(amax, amax);
        const __mmask32 huge = _mm512_cmpge_epu16_mask(amax, infinity);
        if ((tiny | huge) != 0) {
            left |= uint64_t(1) << g;
            continue;
        }
        store_scales(scales, _mm512_subs_epu16(_mm512_srli_epi16(rounded, 7), _mm512_set1_epi16(2)));
        const __m512i quarters = _mm512_subs_epu16(rounded, _mm512_set1_epi16(4 << 7));
        store_block16<0>(packed, v0, quarters);
        store_block16<1>(packed, v1, quarters);
        store_block16<2>(packed, v2, quarters);
        store_block16<3>(packed, v3, quarters);
    }
    return left;
}

// Two blocks of E4M3 codes, each with its quarter in 32 bytes.
FP4COMM_AVX512 inline void store_blocks8(uint8_t* packed, __m512i codes, __m512i magnitude, __m512i quarter,
                                         __m512i table) {
    const __m512i e2m1 = _mm512_permutexvar_epi8(_mm512_subs_epu8(magnitude, quarter), table);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(kE2M1Sign));
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_or_si512(e2m1, sign), _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed), _mm512_cvtepi16_epi8(pairs));
}

FP4COMM_AVX512 uint64_t e4m3_to_mxfp4(const uint8_t* codes, const uint8_t* group_bytes, int num_groups, ScaleMode mode,
                                      uint8_t* packed, uint8_t* scales) {
    const __m512i increment = _mm512_set1_epi8(int8_t(e4m3_increment(mode)));
    const __m512i mask = _mm512_set1_epi8(kE4M3Magnitude);
    const __m512i table = load512(tables().e2m1_above_quarter);
    uint64_t left = 0;
    for (int g = 0; g < num_groups; ++g, codes += kGroupSize, packed += kGroupSize / 2, scales += 4) {
        const __m512i v0 = load512(codes);
        const __m512i v1 = load512(codes + 64);
        const __m512i m0 = _mm512_and_si512(v0, mask);
        const __m512i m1 = _mm512_and_si512(v1, mask);
        const __m512i lanes = Max8::of(_mm512_shuffle_i64x2(m0, m1, 0x88), _mm512_shuffle_i64x2(m0, m1, 0xdd));
        const __m512i pairs = max_of_lane<Max8>(lanes);
        const __m512i amax = _mm512_shuffle_epi8(Max8::of(pairs, _mm512_srli_epi16(pairs, 8)), _mm512_setzero_si512());
        const __m512i rounded = _mm512_and_si512(_mm512_add_epi8(amax, increment), _mm512_set1_epi8(int8_t(0xf8)));
        const __mmask64 nonzero = _mm512_test_epi8_mask(amax, amax);
        const __mmask64 tiny = _mm512_cmplt_epu8_mask(rounded, _mm512_set1_epi8(kMinRoundedAmax)) & nonzero;
        const __mmask64 nan = _mm512_cmpeq_epi8_mask(amax, mask);
        const int group_byte = group_bytes[g];
        if (group_byte < kMinGroupByte || group_byte > kMaxGroupByte || (tiny | nan) != 0) {
            left |= uint64_t(1) << g;
            continue;
        }
        const __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(rounded, 3), _mm512_set1_epi8(0x1f));
        store_scales(scales, _mm512_maskz_add_epi8(nonzero, exponents, _mm512_set1_epi8(int8_t(group_byte - 9))));
        const __m512i quarters = _mm512_subs_epu8(rounded, _mm512_set1_epi8(32));
        store_blocks8(packed, v0, m0, _mm512_shuffle_i64x2(quarters, quarters, 0x50), table);
        store_blocks8(packed + 32, v1, m1, _mm512_shuffle_i64x2(quarters, quarters, 0xfa), table);
    }
    return left;
}

}  // namespace
}  // namespace avx512

const RowOps& avx512_row_ops() {
    static const RowOps ops = [] {
        RowOps with_avx512 = avx2_row_ops();
        with_avx512.name = "avx512vbmi";
        with_avx512.bf16_to_mxfp4 = avx512::bf16_to_mxfp4;
        with_avx512.e4m3_to_mxfp4 = avx512::e4m3_to_mxfp4;
        return with_avx512;
    }();
    return ops;
}

}  // namespace fp4comm
#endif
