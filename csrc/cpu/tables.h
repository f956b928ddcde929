// Lookup tables for byte shuffles, computed from the definitions in fp4comm/*.h.
#pragma once

#include <cstdint>

#include "fp4comm/block.h"

namespace fp4comm {

struct Tables {
    // E2M1 code times 2^shift as E4M3 code, by shift - kMinE2M1Shift (0 for what lies below); the last one is that of a
    // NaN block. The shift is the block's scale byte minus that of the FP8 scale.
    static constexpr int kNumE2M1Shifts = kMaxE2M1Shift - kMinE2M1Shift + 1;
    alignas(16) uint8_t e4m3_of_e2m1[kNumE2M1Shifts + 1][16];

    // E2M1 code under a scale byte as the low and high byte of a BF16.
    struct BF16Bytes {
        alignas(32) uint8_t low[16];
        uint8_t high[16];
    };
    BF16Bytes bf16_of_mxfp4[256];

    // E2M1 code of the E4M3 number j codes above a quarter of the scale, where those are normal numbers.
    alignas(64) uint8_t e2m1_above_quarter[64];

    // E4M3 magnitude times 2^-shift: codes[code - base] where `base` <= code < base + 48. Below that it is 0, above it
    // code - 8 * shift.
    struct Shifted {
        alignas(64) uint8_t codes[64];
        uint8_t base;
    };
    static constexpr int kNumE4M3Shifts = -kMinE4M3Shift + 1;
    Shifted e4m3_shifted[kNumE4M3Shifts];
};

const Tables& tables();

// hadamard_signs of the blocks from column `col` on, at least up to column `end`; valid until the thread asks again.
const uint32_t* hadamard_signs_from(uint64_t seed, int64_t col, int64_t end);

}  // namespace fp4comm
