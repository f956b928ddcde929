// AVX2: what happens to a block of floats on its way out.
#pragma once

#if defined(__x86_64__)
#include <type_traits>

#include "avx2.h"
#include "fp4comm/half.h"

namespace fp4comm::avx2 {

// ---- sinks for elements j .. j + 31 ----

struct StoreF32 {
    float* out;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) {
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + j + 8 * i, v.part[i]);
    }
};

struct StoreCanonicalF32 {
    float* out;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) {
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + j + 8 * i, canonical(v.part[i]));
    }
};

struct StoreBF16 {
    uint16_t* out;

    FP4COMM_AVX2 static __m256i nearest8(__m256 v) {
        const __m256i bits = ints(canonical(v));
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
        return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    }

    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) {
        for (int i = 0; i < 4; i += 2) {
            const __m256i both = _mm256_packus_epi32(nearest8(v.part[i]), nearest8(v.part[i + 1]));
            store256(out + j + 8 * i, _mm256_permute4x64_epi64(both, 0xd8));
        }
    }
};

struct StoreF16 {
    uint16_t* out;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) {
        for (int i = 0; i < 4; ++i) {
            store128(out + j + 8 * i, _mm256_cvtps_ph(canonical(v.part[i]), _MM_FROUND_TO_NEAREST_INT));
        }
    }
};

struct AddTo {
    float* acc;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) {
        for (int i = 0; i < 4; ++i) {
            float* at = acc + j + 8 * i;
            _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), v.part[i]));
        }
    }
};

struct AddScaledTo {
    float* acc;
    float weight;
    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) {
        const __m256 w = _mm256_set1_ps(weight);
        for (int i = 0; i < 4; ++i) {
            float* at = acc + j + 8 * i;
            _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), _mm256_mul_ps(w, v.part[i])));
        }
    }
};

struct MaxMagnitude {
    __m256i amax;
    FP4COMM_AVX2 void operator()(int64_t, const BlockF32& v) {
        for (const __m256& part : v.part) amax = _mm256_max_epu32(amax, magnitude(part));
    }
};

// Nearest E4M3 codes of finite numbers under a scale. Adding 2^20 times the binade of |y| (at least 2^-6) leaves
// |y| / 2^(e-3), rounded, in the low bits of the sum; every binade has eight codes.
struct StoreE4M3 {
    uint8_t* out;
    float inverse_scale;

    FP4COMM_AVX2 static __m256i nearest8(__m256 y) {
        const __m256i first = binade(magnitude(y), 121);
        const __m256i magic = _mm256_add_epi32(first, _mm256_set1_epi32(20 << 23));
        const __m256i sum = ints(_mm256_add_ps(floats(magnitude(y)), floats(magic)));
        const __m256i first_code = _mm256_sub_epi32(_mm256_srli_epi32(first, 20), _mm256_set1_epi32(121 << 3));
        return _mm256_add_epi32(_mm256_sub_epi32(sum, magic), first_code);
    }

    FP4COMM_AVX2 void operator()(int64_t j, const BlockF32& v) {
        __m256i codes[4];
        for (int i = 0; i < 4; ++i) codes[i] = nearest8(_mm256_mul_ps(v.part[i], _mm256_set1_ps(inverse_scale)));
        store256(out + j, _mm256_or_si256(pack_u32(codes), pack_signs(v)));
    }
};

// ---- MXFP4 ----

// The upper halves of 32 floats, with the lowest bit set where any bit was cut off: comparisons with numbers of at
// most six mantissa bits come out as for the float, and so do the scale rules.
FP4COMM_AVX2 inline __m256i upper_half_sticky(__m256 v) {
    const __m256i cut = _mm256_min_epu16(ints(v), _mm256_set1_epi32(1));
    return _mm256_or_si256(_mm256_srli_epi32(ints(v), 16), cut);
}

FP4COMM_AVX2 inline Block16 sticky16(const BlockF32& v) {
    const __m256i low = _mm256_packus_epi32(upper_half_sticky(v.part[0]), upper_half_sticky(v.part[1]));
    const __m256i high = _mm256_packus_epi32(upper_half_sticky(v.part[2]), upper_half_sticky(v.part[3]));
    return {_mm256_permute4x64_epi64(low, 0xd8), _mm256_permute4x64_epi64(high, 0xd8)};
}

template <class Source>
FP4COMM_AVX2 inline Block16 source16(ConstRow row, int64_t col, const Options& options) {
    if constexpr (std::is_same_v<Source, BF16Source>) {
        return load16(row.data, col);
    } else {
        return sticky16(Source::block(row, col, options));
    }
}

// E2M1 codes, sign included. `quarter`: bits of scale / 4; above it the distance in bits is linear in each binade of
// 128 steps, with 1.0 at 256. There a shift by 6, rounded to even, gives code + 2; below 1.0 two comparisons do.
FP4COMM_AVX2 inline __m256i e2m1_nearest16(__m256i bits, __m256i quarter) {
    const __m256i distance = _mm256_subs_epu16(_mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)), quarter);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(distance, 6), _mm256_set1_epi16(1));
    const __m256i half = _mm256_add_epi16(_mm256_set1_epi16(31), odd);
    const __m256i rounded = _mm256_srli_epi16(_mm256_add_epi16(distance, half), 6);
    const __m256i normal = _mm256_min_epi16(_mm256_sub_epi16(rounded, _mm256_set1_epi16(2)), _mm256_set1_epi16(7));
    const __m256i above_quarter = _mm256_cmpgt_epi16(distance, _mm256_setzero_si256());
    const __m256i from_three_quarters = _mm256_cmpgt_epi16(distance, _mm256_set1_epi16(191));
    const __m256i small = _mm256_abs_epi16(_mm256_add_epi16(above_quarter, from_three_quarters));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(bits, 12), _mm256_set1_epi16(kE2M1Sign));
    return _mm256_or_si256(_mm256_max_epi16(normal, small), sign);
}

// Returns the scale byte; -1, with nothing written, where a quarter of the scale is no normal number.
FP4COMM_AVX2 inline int encode_nearest(Block16 v, ScaleMode mode, uint8_t* packed) {
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    const __m256i largest = _mm256_max_epu16(_mm256_and_si256(v.low, mask), _mm256_and_si256(v.high, mask));
    const uint32_t amax = max_u16(_mm_max_epu16(_mm256_castsi256_si128(largest), high128(largest)));
    if (amax >= kInfinityBits >> 16) {
        store128(packed, _mm_setzero_si128());
        return int(kE8M0NaN);
    }
    const uint32_t byte = e8m0_from_amax(amax << 16, mode);
    if (byte < 3 && amax != 0) return -1;
    const __m256i quarter = _mm256_set1_epi16(int16_t(amax == 0 ? 0 : (byte - 2) << 7));
    const __m256i low = e2m1_nearest16(v.low, quarter);
    const __m256i high = e2m1_nearest16(v.high, quarter);
    store128(packed, pack_nibbles(_mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8)));
    return int(byte);
}

FP4COMM_AVX2 inline uint8_t encode_scalar(const BlockF32& v, const EncodeContext& context, int64_t col,
                                          uint8_t* packed) {
    float x[kBlockSize];
    StoreF32{x}(0, v);
    Options options = context.options;
    options.hadamard = false;
    return encode_mxfp4_block(x, options, context.row, col, packed);
}

// The 16 random bits of columns col .. col + 31, eight to a register of 16 bits. Four generators side by side, each
// word in the low half of 64 bits; what the multiplications leave in the upper halves is never read.
struct RandomBits {
    __m128i part[4];
};

FP4COMM_AVX2 inline RandomBits rounding_bits32(const Options& options, int64_t row, int64_t col) {
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
    return {{_mm256_castsi256_si128(even), _mm256_castsi256_si128(odd), high128(even), high128(odd)}};
}

// Like e2m1_stochastic: steps of 0.5, 1 and 2 in the binades from 0 (to 2), 2 and 4; each begins two codes later.
FP4COMM_AVX2 inline __m256i e2m1_stochastic8(__m256 y, __m128i random) {
    const __m256 a = _mm256_min_ps(floats(magnitude(y)), _mm256_set1_ps(6.0f));
    const __m256i first = binade(ints(a), 127);
    const __m256 steps_2_16 = floats(_mm256_sub_epi32(_mm256_set1_epi32((127 + 17 + 127) << 23), first));
    const __m256i fixed = _mm256_cvttps_epi32(_mm256_mul_ps(a, steps_2_16));
    const __m256i multiple = _mm256_srli_epi32(_mm256_add_epi32(fixed, _mm256_cvtepu16_epi32(random)), 16);
    return _mm256_add_epi32(multiple, _mm256_sub_epi32(_mm256_srli_epi32(first, 22), _mm256_set1_epi32(254)));
}

FP4COMM_AVX2 inline uint8_t encode_stochastic(const BlockF32& v, const EncodeContext& context, int64_t col,
                                              uint8_t* packed) {
    MaxMagnitude largest{_mm256_setzero_si256()};
    largest(0, v);
    const uint32_t amax = max_u32(largest.amax);
    if (amax >= kInfinityBits) {
        store128(packed, _mm_setzero_si128());
        return uint8_t(kE8M0NaN);
    }
    const uint32_t byte = e8m0_from_amax(amax, context.options.scale_mode);
    const __m256 inverse = _mm256_set1_ps(pow2(254 - byte));
    const RandomBits random = rounding_bits32(context.options, context.row, col);
    __m256i codes[4];
    for (int i = 0; i < 4; ++i) codes[i] = e2m1_stochastic8(_mm256_mul_ps(v.part[i], inverse), random.part[i]);
    store128(packed, pack_nibbles(_mm256_or_si256(pack_u32(codes), e2m1_sign_of_e4m3(pack_signs(v)))));
    return uint8_t(byte);
}

// Encodes the block at column `src_col` of src as that of column `col` of the result.
template <class Source>
FP4COMM_AVX2 inline uint8_t encode_block(ConstRow src, int64_t src_col, const EncodeContext& context, int64_t col,
                                         uint8_t* packed) {
    const Options& options = context.options;
    const bool nearest = options.rounding == Rounding::kNearest;
    if (nearest && !options.hadamard) {
        const int byte = encode_nearest(source16<Source>(src, src_col, options), options.scale_mode, packed);
        if (byte >= 0) return uint8_t(byte);
    }
    BlockF32 v = Source::block(src, src_col, options);
    if (options.hadamard) {
        flip_signs(v, hadamard_signs(options.seed, col));
        hadamard_butterfly(v, 0.25f);
    }
    if (!nearest) return encode_stochastic(v, context, col, packed);
    const int byte = encode_nearest(sticky16(v), options.scale_mode, packed);
    return byte >= 0 ? uint8_t(byte) : encode_scalar(v, context, col, packed);
}

}  // namespace fp4comm::avx2
#endif
