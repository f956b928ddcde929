// AVX2: one group (128 columns or what is left of a row) of each kind of rows, read block by block.
//
//   regular()  whether the readers below hold for this group; the scalar loops take the others
//   is_bf16()  whether all its numbers are BF16 numbers that bf16(col) gives
//   floats(col)
#pragma once

#if defined(__x86_64__)
#include "avx2.h"

namespace fp4comm::avx2 {

FP4COMM_AVX2 inline BlockF32 widen_bf16(Block16 v) {
    return {{floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v.low)), 16)),
             floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(high128(v.low)), 16)),
             floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v.high)), 16)),
             floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(high128(v.high)), 16))}};
}

FP4COMM_AVX2 inline BlockF32 widen_f16(Block16 v) {
    return {{_mm256_cvtph_ps(_mm256_castsi256_si128(v.low)), _mm256_cvtph_ps(high128(v.low)),
             _mm256_cvtph_ps(_mm256_castsi256_si128(v.high)), _mm256_cvtph_ps(high128(v.high))}};
}

FP4COMM_AVX2 inline Block16 load16(const uint8_t* data, int64_t col) {
    return {load256(data + 2 * col), load256(data + 2 * col + 32)};
}

struct F32Source {
    static constexpr Kind kKind = Kind::kF32;
    static constexpr bool kMaybeBF16 = false;
    const float* x;

    F32Source(ConstRow row, Columns, const Options&) : x(reinterpret_cast<const float*>(row.data)) {}
    bool regular() const { return true; }
    FP4COMM_AVX2 BlockF32 floats(int64_t col) const {
        const float* at = x + col;
        return {{_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8), _mm256_loadu_ps(at + 16), _mm256_loadu_ps(at + 24)}};
    }
};

struct BF16Source {
    static constexpr Kind kKind = Kind::kBF16;
    static constexpr bool kMaybeBF16 = true;
    const uint8_t* data;

    BF16Source(ConstRow row, Columns, const Options&) : data(row.data) {}
    bool regular() const { return true; }
    bool is_bf16() const { return true; }
    FP4COMM_AVX2 Block16 bf16(int64_t col) const { return load16(data, col); }
    FP4COMM_AVX2 BlockF32 floats(int64_t col) const { return widen_bf16(bf16(col)); }
};

struct F16Source {
    static constexpr Kind kKind = Kind::kF16;
    static constexpr bool kMaybeBF16 = false;
    const uint8_t* data;

    F16Source(ConstRow row, Columns, const Options&) : data(row.data) {}
    bool regular() const { return true; }
    FP4COMM_AVX2 BlockF32 floats(int64_t col) const {
        BlockF32 v = widen_f16(load16(data, col));
        for (__m256& part : v.part) part = canonical(part);
        return v;
    }
};

struct MXFP4Source {
    static constexpr Kind kKind = Kind::kMXFP4;
    static constexpr bool kMaybeBF16 = true;
    ConstRow row;
    int64_t begin;
    const uint32_t* signs;  // of the Hadamard transform, if there is one

    MXFP4Source(ConstRow r, Columns group, const Options& options)
        : row(r),
          begin(group.begin),
          signs(options.hadamard ? hadamard_signs_from(options.seed, begin, begin + group.count) : nullptr) {}
    bool regular() const { return true; }
    bool is_bf16() const { return !signs; }

    FP4COMM_AVX2 Block16 bf16(int64_t col) const {
        const Tables::BF16Bytes& table = tables().bf16_of_mxfp4[row.scales[col / kBlockSize]];
        // Quarters 0, 2, 1, 3, so that interleaving within the lanes gives the elements in order.
        const __m256i codes = unpack_nibbles(_mm_shuffle_epi32(load128(row.data + col / 2), 0xd8));
        const __m256i low = _mm256_shuffle_epi8(broadcast128(table.low), codes);
        const __m256i high = _mm256_shuffle_epi8(broadcast128(table.high), codes);
        return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    }

    FP4COMM_AVX2 BlockF32 floats(int64_t col) const {
        BlockF32 v = widen_bf16(bf16(col));
        if (signs) {
            hadamard_butterfly(v, 0.125f);
            flip_signs(v, signs[(col - begin) / kBlockSize]);
            for (__m256& part : v.part) part = canonical(part);
        }
        return v;
    }
};

template <Kind kScaleKind>
struct FP8Source {
    static constexpr Kind kKind = kScaleKind;
    static constexpr bool kMaybeBF16 = true;
    const uint8_t* codes;
    float scale;
    bool is_regular;

    FP4COMM_AVX2 FP8Source(ConstRow row, Columns group, const Options&)
        : codes(row.data), scale(load_fp8_scale<kKind>(row.scales, group.begin / kGroupSize)) {
        const __m256i nan = _mm256_set1_epi8(kE4M3NaN);
        __m256i any = _mm256_setzero_si256();
        for (int64_t col = group.begin; col < group.begin + group.count; col += kBlockSize) {
            any = _mm256_or_si256(any, _mm256_cmpeq_epi8(_mm256_and_si256(load256(codes + col), nan), nan));
        }
        is_regular = magnitude_bits(scale) < kInfinityBits && _mm256_testz_si256(any, any);
    }

    bool regular() const { return is_regular; }

    // A power of two under which 2^-9 is a normal number and 448 is finite.
    bool is_bf16() const {
        const uint32_t bits = float_bits(scale);
        return is_normal_pow2(bits) && bits >= 10u << 23 && bits <= 246u << 23;
    }

    // The bits of an E4M3 number, exponent and mantissa, are those of the BF16 but for the bias; zero and the seven
    // subnormals first get the bits that they would have, continuing below exponent 0.
    FP4COMM_AVX2 Block16 bf16(int64_t col) const {
        const __m256i subnormal =
            broadcast128_of(_mm_setr_epi8(0, -16, -8, -4, 0, 2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15));
        const __m256i v = _mm256_permute4x64_epi64(load256(codes + col), 0xd8);
        const __m256i magnitude = _mm256_and_si256(v, _mm256_set1_epi8(kE4M3Magnitude));
        const __m256i zero = _mm256_setzero_si256();
        const __m256i sign = _mm256_xor_si256(v, magnitude);
        const __m256i is_zero = _mm256_cmpeq_epi8(magnitude, zero);
        const __m256i bits = _mm256_blendv_epi8(magnitude, _mm256_shuffle_epi8(subnormal, magnitude),
                                                _mm256_cmpgt_epi8(_mm256_set1_epi8(8), magnitude));
        const __m256i bias = _mm256_set1_epi16(int16_t((int(float_bits(scale) >> 23) - 7) << 7));
        const __m256i low = _mm256_add_epi16(_mm256_srai_epi16(_mm256_unpacklo_epi8(zero, bits), 4), bias);
        const __m256i high = _mm256_add_epi16(_mm256_srai_epi16(_mm256_unpackhi_epi8(zero, bits), 4), bias);
        return {_mm256_or_si256(_mm256_andnot_si256(_mm256_unpacklo_epi8(is_zero, is_zero), low),
                                _mm256_unpacklo_epi8(zero, sign)),
                _mm256_or_si256(_mm256_andnot_si256(_mm256_unpackhi_epi8(is_zero, is_zero), high),
                                _mm256_unpackhi_epi8(zero, sign))};
    }

    // Moved to the exponent and mantissa of an FP16, the bits of an E4M3 number are that number times 2^-8.
    FP4COMM_AVX2 BlockF32 floats(int64_t col) const {
        const __m256i v = _mm256_permute4x64_epi64(load256(codes + col), 0xd8);
        const __m256i zero = _mm256_setzero_si256();
        const __m256i keep = _mm256_set1_epi16(int16_t(0xbfff));
        BlockF32 x = widen_f16({_mm256_and_si256(_mm256_srai_epi16(_mm256_unpacklo_epi8(zero, v), 1), keep),
                                _mm256_and_si256(_mm256_srai_epi16(_mm256_unpackhi_epi8(zero, v), 1), keep)});
        const __m256 unit = _mm256_set1_ps(256.0f);
        const __m256 factor = _mm256_set1_ps(scale);
        for (__m256& part : x.part) part = _mm256_mul_ps(_mm256_mul_ps(part, unit), factor);
        return x;
    }
};

}  // namespace fp4comm::avx2
#endif
