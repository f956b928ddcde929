// Lookup tables for byte shuffles, computed from the definitions in fp4comm/*.h.
#pragma once

#include <cstdint>

#include "fp4comm/block.h"

namespace fp4comm {

struct Tables {
    // E2M1 code times 2^shift as E4M3 code, by shift - kMinE2M1Shift; the last table is that of a NaN block.
    static constexpr int kNumE2M1Shifts = kMaxE2M1Shift - kMinE2M1Shift + 1;
    alignas(16) uint8_t e4m3_of_e2m1[kNumE2M1Shifts + 1][16];

    // E2M1 code under a scale byte as the low and high byte of a BF16 or FP16.
    struct HalfBytes {
        alignas(32) uint8_t low[16];
        uint8_t high[16];
    };
    HalfBytes bf16_of_mxfp4[256];
    HalfBytes f16_of_mxfp4[256];

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

// Index into e4m3_of_e2m1 of a block under the scale byte of its group.
inline int e2m1_shift_index(uint32_t block_byte, uint32_t shared_byte) {
    if (block_byte == kE8M0NaN) return Tables::kNumE2M1Shifts;
    const int index = int(block_byte) - int(shared_byte) - kMinE2M1Shift;
    return index < 0 ? 0 : index;
}

}  // namespace fp4comm
