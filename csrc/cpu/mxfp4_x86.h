// What the SIMD inner loops that quantize to MXFP4 have in common.
#pragma once

#include "row_ops.h"

namespace fp4comm {

// From this scale byte on a quarter of the scale is a normal number.
constexpr int kMinScaleByte = 3;

// What is added to the code of the largest magnitude before it is cut to the exponent: scale_mode_increment in units of
// the three mantissa bits.
inline int e4m3_increment(ScaleMode mode) {
    return mode == ScaleMode::kFloor ? 0 : mode == ScaleMode::kEven ? 2 : 3;
}

// Largest code so rounded from which on a quarter of the block's scale is a normal E4M3 number.
constexpr int kMinRoundedAmax = 5 << 3;

// Group scales under which all products are exact and finite and no block's scale byte is below 0.
constexpr int kMinGroupByte = 4;
constexpr int kMaxGroupByte = 246;

namespace avx2 {
uint64_t bf16_to_mxfp4(const uint16_t* x, int num_groups, ScaleMode mode, uint8_t* packed, uint8_t* scales);
uint64_t e4m3_to_mxfp4(const uint8_t* codes, const uint8_t* group_bytes, int num_groups, ScaleMode mode,
                       uint8_t* packed, uint8_t* scales);
}  // namespace avx2

}  // namespace fp4comm
