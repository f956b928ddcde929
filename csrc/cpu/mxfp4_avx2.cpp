// AVX2 inner loops that quantize groups of 128 to MXFP4. The maxima and scales of the four blocks of a group are
// worked out side by side, one block to each 64 bits.
#if defined(__x86_64__)
#include "avx2.h"
#include "mxfp4_x86.h"

namespace fp4comm::avx2 {
namespace {

// The 64-bit words of such a register belong to blocks 0, 2, 1 and 3.
template <int kBlock>
FP4COMM_AVX2 inline __m256i broadcast_block(__m256i words) {
    constexpr int kWord = kBlock == 1 ? 2 : kBlock == 2 ? 1 : kBlock;
    return _mm256_permute4x64_epi64(words, kWord * 0x55);
}

struct Max16 {
    FP4COMM_AVX2 static __m256i of(__m256i a, __m256i b) { return _mm256_max_epu16(a, b); }
};
struct Max8 {
    FP4COMM_AVX2 static __m256i of(__m256i a, __m256i b) { return _mm256_max_epu8(a, b); }
};

// Maxima of four registers, each in 64 bits of the result (partial ones but for the lowest 16 bits).
template <class Max>
FP4COMM_AVX2 inline __m256i max_of_each(__m256i m0, __m256i m1, __m256i m2, __m256i m3) {
    const __m256i m01 = Max::of(_mm256_permute2x128_si256(m0, m1, 0x20), _mm256_permute2x128_si256(m0, m1, 0x31));
    const __m256i m23 = Max::of(_mm256_permute2x128_si256(m2, m3, 0x20), _mm256_permute2x128_si256(m2, m3, 0x31));
    __m256i m = Max::of(_mm256_unpacklo_epi64(m01, m23), _mm256_unpackhi_epi64(m01, m23));
    m = Max::of(m, _mm256_srli_epi64(m, 32));
    return Max::of(m, _mm256_srli_epi64(m, 16));
}

// The lowest byte of each 64 bits, block by block.
FP4COMM_AVX2 inline void store_scales(uint8_t* scales, __m256i qwords) {
    const __m256i low_bytes = _mm256_and_si256(qwords, _mm256_set1_epi64x(0xff));
    const __m128i even_odd = _mm_or_si128(_mm256_castsi256_si128(low_bytes), _mm_slli_epi64(high128(low_bytes), 8));
    const __m128i four =
        _mm_shuffle_epi8(even_odd, _mm_setr_epi8(0, 1, 8, 9, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    store<int32_t>(scales, 0, _mm_cvtsi128_si32(four));
}

// 64 codes: bytes of one block in `a` and of the next in `b`, each as left by packing two registers of 16 bits.
FP4COMM_AVX2 inline void store_packed(uint8_t* packed, __m256i a, __m256i b, __m256i order) {
    const __m256i weights = _mm256_set1_epi16(0x1001);
    const __m256i bytes = _mm256_packus_epi16(_mm256_maddubs_epi16(a, weights), _mm256_maddubs_epi16(b, weights));
    store256(packed, _mm256_permutevar8x32_epi32(bytes, order));
}

// E2M1 codes, sign included. `quarter`: bits of a quarter of the scale; above it the distance in bits is linear in each
// binade of 128 steps, with 1.0 at 256. From there on a shift by 6, rounded to even, gives code + 2; below two
// comparisons do.
FP4COMM_AVX2 inline __m256i e2m1_nearest16(__m256i bits, __m256i quarter) {
    const __m256i distance = _mm256_subs_epu16(_mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)), quarter);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(distance, 6), _mm256_set1_epi16(1));
    const __m256i half = _mm256_add_epi16(distance, _mm256_set1_epi16(31 - (2 << 6)));
    const __m256i normal = _mm256_min_epi16(_mm256_srai_epi16(_mm256_add_epi16(half, odd), 6), _mm256_set1_epi16(7));
    const __m256i above_quarter = _mm256_cmpgt_epi16(distance, _mm256_setzero_si256());
    const __m256i from_three_quarters = _mm256_cmpgt_epi16(distance, _mm256_set1_epi16(191));
    const __m256i small = _mm256_abs_epi16(_mm256_add_epi16(above_quarter, from_three_quarters));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(bits, 12), _mm256_set1_epi16(kE2M1Sign));
    return _mm256_or_si256(_mm256_max_epi16(normal, small), sign);
}

FP4COMM_AVX2 inline __m256i block_max16(const uint16_t* x) {
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    return _mm256_max_epu16(_mm256_and_si256(load256(x), mask), _mm256_and_si256(load256(x + 16), mask));
}

FP4COMM_AVX2 inline __m256i block_codes16(const uint16_t* x, __m256i quarter) {
    return _mm256_packus_epi16(e2m1_nearest16(load256(x), quarter), e2m1_nearest16(load256(x + 16), quarter));
}

}  // namespace

FP4COMM_AVX2 uint64_t bf16_to_mxfp4(const uint16_t* x, int num_groups, ScaleMode mode, uint8_t* packed,
                                    uint8_t* scales) {
    const __m256i increment = _mm256_set1_epi16(int16_t(scale_mode_increment(mode) >> 16));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i lowest16 = broadcast128_of(_mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9));
    uint64_t left = 0;
    for (int g = 0; g < num_groups; ++g, x += kGroupSize, packed += kGroupSize / 2, scales += 4) {
        const __m256i amax = _mm256_shuffle_epi8(
            max_of_each<Max16>(block_max16(x), block_max16(x + 32), block_max16(x + 64), block_max16(x + 96)),
            lowest16);
        const __m256i rounded =
            _mm256_and_si256(_mm256_add_epi16(amax, increment), _mm256_set1_epi16(int16_t(kInfinityBits >> 16)));
        const __m256i tiny = _mm256_and_si256(_mm256_cmpgt_epi16(_mm256_set1_epi16((kMinScaleByte + 2) << 7), rounded),
                                              _mm256_cmpgt_epi16(amax, _mm256_setzero_si256()));
        const __m256i huge = _mm256_cmpgt_epi16(amax, _mm256_set1_epi16(0x7f7f));
        if (_mm256_movemask_epi8(_mm256_or_si256(tiny, huge))) {
            left |= uint64_t(1) << g;
            continue;
        }
        const __m256i quarters = _mm256_subs_epu16(rounded, _mm256_set1_epi16(4 << 7));
        store_scales(scales, _mm256_subs_epu16(_mm256_srli_epi16(rounded, 7), _mm256_set1_epi16(2)));
        store_packed(packed, block_codes16(x, broadcast_block<0>(quarters)),
                     block_codes16(x + 32, broadcast_block<1>(quarters)), order);
        store_packed(packed + 32, block_codes16(x + 64, broadcast_block<2>(quarters)),
                     block_codes16(x + 96, broadcast_block<3>(quarters)), order);
    }
    return left;
}

namespace {

struct E2M1OfE4M3 {
    // Codes less 1, from half of the scale on; the step at a quarter is a comparison.
    __m256i first_16, last_16;

    FP4COMM_AVX2 E2M1OfE4M3() {
        const uint8_t* from_half = tables().e2m1_above_quarter + 8;
        first_16 = _mm256_sub_epi8(broadcast128(from_half), _mm256_set1_epi8(1));
        last_16 = _mm256_sub_epi8(broadcast128(from_half + 16), _mm256_set1_epi8(1));
    }

    // E2M1 codes, sign included, of the block of E4M3 codes.
    FP4COMM_AVX2 __m256i operator()(__m256i codes, __m256i quarter) const {
        const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(kE4M3Magnitude));
        const __m256i distance = _mm256_subs_epu8(magnitude, _mm256_add_epi8(quarter, _mm256_set1_epi8(8)));
        const __m256i less_one = _mm256_or_si256(lookup16(first_16, distance, 0), lookup16(last_16, distance, 16));
        const __m256i code = _mm256_sub_epi8(less_one, _mm256_cmpgt_epi8(magnitude, quarter));
        return _mm256_or_si256(code, e2m1_sign_of_e4m3(codes));
    }
};

}  // namespace

FP4COMM_AVX2 uint64_t e4m3_to_mxfp4(const uint8_t* codes, const uint8_t* group_bytes, int num_groups, ScaleMode mode,
                                    uint8_t* packed, uint8_t* scales) {
    const __m256i increment = _mm256_set1_epi8(int8_t(e4m3_increment(mode)));
    const __m256i mask = _mm256_set1_epi8(kE4M3Magnitude);
    const __m256i lowest8 = broadcast128_of(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8));
    const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    const E2M1OfE4M3 e2m1;
    uint64_t left = 0;
    for (int g = 0; g < num_groups; ++g, codes += kGroupSize, packed += kGroupSize / 2, scales += 4) {
        const __m256i v0 = load256(codes);
        const __m256i v1 = load256(codes + 32);
        const __m256i v2 = load256(codes + 64);
        const __m256i v3 = load256(codes + 96);
        __m256i amax = max_of_each<Max8>(_mm256_and_si256(v0, mask), _mm256_and_si256(v1, mask),
                                         _mm256_and_si256(v2, mask), _mm256_and_si256(v3, mask));
        amax = _mm256_shuffle_epi8(_mm256_max_epu8(amax, _mm256_srli_epi64(amax, 8)), lowest8);
        const __m256i rounded = _mm256_and_si256(_mm256_add_epi8(amax, increment), _mm256_set1_epi8(int8_t(0xf8)));
        const __m256i zero = _mm256_cmpeq_epi8(amax, _mm256_setzero_si256());
        const __m256i normal = _mm256_cmpeq_epi8(_mm256_max_epu8(rounded, _mm256_set1_epi8(kMinRoundedAmax)), rounded);
        const __m256i usual = _mm256_andnot_si256(_mm256_cmpeq_epi8(amax, mask), _mm256_or_si256(normal, zero));
        const int group_byte = group_bytes[g];
        if (group_byte < kMinGroupByte || group_byte > kMaxGroupByte || _mm256_movemask_epi8(usual) != -1) {
            left |= uint64_t(1) << g;
            continue;
        }
        const __m256i exponents = _mm256_and_si256(_mm256_srli_epi16(rounded, 3), _mm256_set1_epi8(0x1f));
        const __m256i bytes = _mm256_add_epi8(exponents, _mm256_set1_epi8(int8_t(group_byte - 9)));
        store_scales(scales, _mm256_andnot_si256(zero, bytes));
        const __m256i quarters = _mm256_subs_epu8(rounded, _mm256_set1_epi8(32));
        store_packed(packed, e2m1(v0, broadcast_block<0>(quarters)), e2m1(v1, broadcast_block<1>(quarters)), order);
        store_packed(packed + 32, e2m1(v2, broadcast_block<2>(quarters)), e2m1(v3, broadcast_block<3>(quarters)),
                     order);
    }
    return left;
}

}  // namespace fp4comm::avx2
#endif
