// AVX2: what happens to the blocks of a row on their way out. A sink takes elements j .. j + 31 as floats; one with
// kTakesBF16 also as BF16 bits where they are exactly that.
#pragma once

#if defined(__x86_64__)
#include "avx2.h"

namespace fp4comm::avx2 {

struct StoreF32 {
    static constexpr bool kTakesBF16 = false;
    float* out;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) const {
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + j + 8 * i, v.part[i]);
    }
};

struct StoreCanonicalF32 {
    static constexpr bool kTakesBF16 = false;
    float* out;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) const {
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + j + 8 * i, canonical(v.part[i]));
    }
};

struct StoreBF16 {
    static constexpr bool kTakesBF16 = true;
    uint16_t* out;

    FP4COMM_AVX2 static __m256i nearest8(__m256 v) {
        const __m256i bits = ints(canonical(v));
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
        return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    }

    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) const {
        for (int i = 0; i < 4; i += 2) {
            const __m256i both = _mm256_packus_epi32(nearest8(v.part[i]), nearest8(v.part[i + 1]));
            store256(out + j + 8 * i, _mm256_permute4x64_epi64(both, 0xd8));
        }
    }

    FP4COMM_AVX2 void operator()(int64_t j, const Block16& v) const {
        store256(out + j, v.low);
        store256(out + j + 16, v.high);
    }
};

struct StoreF16 {
    static constexpr bool kTakesBF16 = false;
    uint16_t* out;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) const {
        for (int i = 0; i < 4; ++i) {
            store128(out + j + 8 * i, _mm256_cvtps_ph(canonical(v.part[i]), _MM_FROUND_TO_NEAREST_INT));
        }
    }
};

struct AddTo {
    static constexpr bool kTakesBF16 = false;
    float* acc;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) const {
        for (int i = 0; i < 4; ++i) {
            float* at = acc + j + 8 * i;
            _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), v.part[i]));
        }
    }
};

struct AddScaledTo {
    static constexpr bool kTakesBF16 = false;
    float* acc;
    __m256 weight;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) const {
        for (int i = 0; i < 4; ++i) {
            float* at = acc + j + 8 * i;
            _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), _mm256_mul_ps(weight, v.part[i])));
        }
    }
};

// The upper halves of the floats, with the lowest bit set where a bit was cut off. Comparisons with numbers of at most
// six mantissa bits, and so the rules for scales and the rounding to four bits or fewer, come out as for the float.
struct StoreSticky {
    static constexpr bool kTakesBF16 = true;
    uint16_t* out;

    FP4COMM_AVX2 static __m256i upper_half(__m256 v) {
        const __m256i cut = _mm256_min_epu16(ints(v), _mm256_set1_epi32(1));
        return _mm256_or_si256(_mm256_srli_epi32(ints(v), 16), cut);
    }

    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) const {
        for (int i = 0; i < 4; i += 2) {
            const __m256i both = _mm256_packus_epi32(upper_half(v.part[i]), upper_half(v.part[i + 1]));
            store256(out + j + 8 * i, _mm256_permute4x64_epi64(both, 0xd8));
        }
    }

    FP4COMM_AVX2 void operator()(int64_t j, const Block16& v) const { StoreBF16{out}(j, v); }
};

// The random Hadamard transform first; `signs` of the blocks from j = 0 on.
FP4COMM_AVX2 inline void rotate(BlockF32& v, uint32_t signs) {
    flip_signs(v, signs);
    hadamard_butterfly(v, 0.25f);
}

struct StoreRotatedSticky {
    static constexpr bool kTakesBF16 = false;
    uint16_t* out;
    const uint32_t* signs;
    FP4COMM_AVX2 void operator()(int64_t j, BlockF32 v) const {
        rotate(v, signs[j / kBlockSize]);
        StoreSticky{out}(j, v);
    }
};

// ---- stochastic rounding ----

// The 16 random bits of columns col .. col + 31, eight to a register. Four generators run side by side, each word in
// the low half of 64 bits; what the multiplications leave in the upper halves is never read.
struct RandomBits {
    __m128i part[4];

    FP4COMM_AVX2 RandomBits(const Options& options, int64_t row, int64_t col) {
        const int64_t first = col / 8;
        __m256i c0 = _mm256_setr_epi64x(first, first + 1, first + 2, first + 3);
        __m256i c1 = _mm256_set1_epi64x(int64_t(uint32_t(uint64_t(row))));
        __m256i c2 = _mm256_set1_epi64x(int64_t(uint64_t(row) >> 32));
        __m256i c3 = _mm256_set1_epi64x(int64_t(options.stream));
        uint32_t k0 = uint32_t(options.seed);
        uint32_t k1 = uint32_t(options.seed >> 32);
        for (int round = 0; round < 10; ++round) {
            const __m256i p0 = _mm256_mul_epu32(c0, _mm256_set1_epi64x(0xD2511F53));
            const __m256i p1 = _mm256_mul_epu32(c2, _mm256_set1_epi64x(0xCD9E8D57));
            c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), _mm256_set1_epi64x(int64_t(k0)));
            c1 = p1;
            c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), _mm256_set1_epi64x(int64_t(k1)));
            c3 = p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        const __m256i first_four = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xaa);
        const __m256i last_four = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xaa);
        const __m256i even = _mm256_unpacklo_epi64(first_four, last_four);  // generators 0 and 2
        const __m256i odd = _mm256_unpackhi_epi64(first_four, last_four);
        part[0] = _mm256_castsi256_si128(even);
        part[1] = _mm256_castsi256_si128(odd);
        part[2] = high128(even);
        part[3] = high128(odd);
    }
};

struct StoreStochastic {
    static constexpr bool kTakesBF16 = false;
    const EncodeContext& context;
    int64_t begin;
    Row dst;
    const uint32_t* signs;  // of the Hadamard transform, if there is one

    // Like e2m1_stochastic: steps of 0.5, 1 and 2 in the binades from 0 (to 2), 2 and 4; each begins two codes later.
    FP4COMM_AVX2 static __m256i codes8(__m256 y, __m128i random) {
        const __m256 a = _mm256_min_ps(floats(magnitude(y)), _mm256_set1_ps(6.0f));
        const __m256i binade = _mm256_and_si256(_mm256_max_epu32(ints(a), _mm256_set1_epi32(127 << 23)),
                                                _mm256_set1_epi32(int(kInfinityBits)));
        const __m256 steps_2_16 = floats(_mm256_sub_epi32(_mm256_set1_epi32((127 + 17 + 127) << 23), binade));
        const __m256i fixed = _mm256_cvttps_epi32(_mm256_mul_ps(a, steps_2_16));
        const __m256i multiple = _mm256_srli_epi32(_mm256_add_epi32(fixed, _mm256_cvtepu16_epi32(random)), 16);
        return _mm256_add_epi32(multiple, _mm256_sub_epi32(_mm256_srli_epi32(binade, 22), _mm256_set1_epi32(254)));
    }

    FP4COMM_AVX2 void operator()(int64_t j, BlockF32 v) const {
        const Options& options = context.options;
        const int64_t col = begin + j;
        uint8_t* packed = dst.data + col / 2;
        uint8_t& scale = dst.scales[col / kBlockSize];
        if (signs) rotate(v, signs[j / kBlockSize]);
        const uint32_t amax = max_u32(_mm256_max_epu32(_mm256_max_epu32(magnitude(v.part[0]), magnitude(v.part[1])),
                                                       _mm256_max_epu32(magnitude(v.part[2]), magnitude(v.part[3]))));
        if (amax >= kInfinityBits) {
            store128(packed, _mm_setzero_si128());
            scale = uint8_t(kE8M0NaN);
            return;
        }
        scale = uint8_t(e8m0_from_amax(amax, options.scale_mode));
        const __m256 inverse = _mm256_set1_ps(pow2(254u - scale));
        const RandomBits random(options, context.row, col);
        __m256i codes[4];
        for (int i = 0; i < 4; ++i) codes[i] = codes8(_mm256_mul_ps(v.part[i], inverse), random.part[i]);
        store128(packed, pack_nibbles(_mm256_or_si256(pack_u32(codes), e2m1_sign_of_e4m3(pack_signs(v)))));
    }
};

}  // namespace fp4comm::avx2
#endif
