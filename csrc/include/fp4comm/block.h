// MXFP4 blocks and FP8 groups: how a scale follows from the elements, and the elements from the scale.
#pragma once

#include "e2m1.h"
#include "e4m3.h"
#include "e8m0.h"
#include "hadamard.h"
#include "macros.h"
#include "philox.h"

namespace fp4comm {

enum class Rounding : int32_t { kNearest = 0, kStochastic = 1 };

struct Options {
    ScaleMode scale_mode = ScaleMode::kEven;
    Rounding rounding = Rounding::kNearest;  // MXFP4 output from floats only
    bool hadamard = false;                   // MXFP4 <-> floats only
    uint64_t seed = 0;
    uint32_t stream = 0;
};

// Largest magnitude as bits; as integers NaN > Inf > finite.
FP4COMM_HD inline uint32_t max_magnitude(const float* x, int count) {
    uint32_t amax = 0;
    for (int j = 0; j < count; ++j) {
        const uint32_t magnitude = magnitude_bits(x[j]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

// x = scale * element, with the scale given as 2^(254 - byte), its inverse; the product only rounds far below 0.25.
FP4COMM_HD inline uint32_t e2m1_encode(float x, float inverse_scale) {
    return e2m1_sign(x) | e2m1_nearest(float_from_bits(magnitude_bits(mul_rn(x, inverse_scale))));
}

FP4COMM_HD inline uint32_t e2m1_encode(float x, float inverse_scale, uint32_t random16) {
    return e2m1_sign(x) | e2m1_stochastic(float_from_bits(magnitude_bits(mul_rn(x, inverse_scale))), random16);
}

// Quantizes the 32 numbers of row `row`, columns `col`...; writes 16 bytes and returns the scale byte.
FP4COMM_HD inline uint8_t encode_mxfp4_block(const float* x, const Options& options, int64_t row, int64_t col,
                                             uint8_t* packed) {
    float rotated[kBlockSize];
    if (options.hadamard) {
        for (int j = 0; j < kBlockSize; ++j) rotated[j] = x[j];
        hadamard_forward(rotated, hadamard_signs(options.seed, col));
        x = rotated;
    }
    const uint32_t amax = max_magnitude(x, kBlockSize);
    if (amax >= kInfinityBits) {
        for (int j = 0; j < kBlockSize / 2; ++j) packed[j] = 0;
        return uint8_t(kE8M0NaN);
    }
    const uint32_t scale = e8m0_from_amax(amax, options.scale_mode);
    const float inverse = pow2(254 - scale);
    if (options.rounding == Rounding::kNearest) {
        for (int j = 0; j < kBlockSize; j += 2) {
            packed[j / 2] = uint8_t(e2m1_encode(x[j], inverse) | e2m1_encode(x[j + 1], inverse) << 4);
        }
        return uint8_t(scale);
    }
    for (int j = 0; j < kBlockSize; j += 8) {
        const Philox4 bits = rounding_bits(options.seed, options.stream, row, col + j);
        for (int i = 0; i < 8; i += 2) {
            packed[(j + i) / 2] = uint8_t(e2m1_encode(x[j + i], inverse, random16(bits, i)) |
                                          e2m1_encode(x[j + i + 1], inverse, random16(bits, i + 1)) << 4);
        }
    }
    return uint8_t(scale);
}

// `scale` is the value of the block's byte. Overflow gives Inf, a NaN scale gives NaN, the sign of zero is kept.
FP4COMM_HD inline float mxfp4_value(uint32_t code, float scale) {
    return canonical(mul_rn(e2m1_value(code), scale));
}

FP4COMM_HD inline uint32_t e2m1_unpack(const uint8_t* packed, int64_t j) {
    return packed[j / 2] >> (j % 2 * 4) & 15u;
}

FP4COMM_HD inline void decode_mxfp4_block(const uint8_t* packed, uint32_t scale_byte, const Options& options,
                                          int64_t col, float* x) {
    const float scale = e8m0_value(scale_byte);
    for (int j = 0; j < kBlockSize; ++j) x[j] = mxfp4_value(e2m1_unpack(packed, j), scale);
    if (options.hadamard) {
        hadamard_inverse(x, hadamard_signs(options.seed, col));
        for (int j = 0; j < kBlockSize; ++j) x[j] = canonical(x[j]);
    }
}

FP4COMM_HD inline float fp8_value(uint32_t code, float scale) {
    return canonical(mul_rn(e4m3_value(code), scale));
}

// Exponent byte of the smallest power of two with amax / scale <= 448; `amax` is finite.
FP4COMM_HD inline uint32_t fp8_scale_from_amax(uint32_t amax) {
    if (amax == 0) return kE8M0One;
    const uint32_t exponent = (amax + 0x1fffffu) >> 23;
    return exponent > 9 ? exponent - 8 : 1;
}

// Quantizes a group of `count` numbers and returns the exponent byte of its scale.
FP4COMM_HD inline uint8_t encode_fp8_group(const float* x, int count, uint8_t* codes) {
    const uint32_t amax = max_magnitude(x, count);
    if (amax >= kInfinityBits) {
        for (int j = 0; j < count; ++j) codes[j] = uint8_t(kE4M3NaN);
        return uint8_t(kE8M0One);
    }
    const uint32_t scale = fp8_scale_from_amax(amax);
    const float inverse = pow2(254 - scale);
    for (int j = 0; j < count; ++j) codes[j] = e4m3_nearest(mul_rn(x[j], inverse));
    return uint8_t(scale);
}

// The FP8 scale that several MXFP4 blocks share. Anchoring the largest block's code 6 at 384 keeps every block exact
// that lies at most 14 binades below it. NaN blocks have no say, zero blocks (byte 0) none by their byte.
struct SharedScale {
    uint32_t max_byte = 0;
    bool nonzero = false;

    FP4COMM_HD void add(uint32_t byte, bool block_nonzero) {
        if (byte == kE8M0NaN) return;
        max_byte = byte > max_byte ? byte : max_byte;
        nonzero = nonzero || block_nonzero;
    }

    FP4COMM_HD uint32_t byte() const {
        if (max_byte == 0 && !nonzero) return kE8M0One;
        return max_byte > 7 ? max_byte - 6 : 1;
    }
};

FP4COMM_HD inline bool mxfp4_block_nonzero(const uint8_t* packed) {
    uint32_t any = 0;
    for (int j = 0; j < kBlockSize / 2; ++j) any |= packed[j];
    return (any & 0x77u) != 0;
}

// Element of an MXFP4 block in FP8 under the shared scale byte.
FP4COMM_HD inline uint8_t mxfp4_to_e4m3(uint32_t code, uint32_t block_byte, uint32_t shared_byte) {
    return block_byte == kE8M0NaN ? uint8_t(kE4M3NaN) : e4m3_from_e2m1(code, int(block_byte) - int(shared_byte));
}

}  // namespace fp4comm
