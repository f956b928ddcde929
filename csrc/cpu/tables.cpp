#include "tables.h"

#include <algorithm>

#include "fp4comm/half.h"

namespace fp4comm {
namespace {

void fill_mxfp4_values(Tables& t) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
        for (uint32_t code = 0; code < 16; ++code) {
            const float value = mxfp4_value(code, e8m0_value(byte));
            const uint16_t bf16 = bf16_nearest(value);
            const uint16_t f16 = f16_nearest(value);
            t.bf16_of_mxfp4[byte].low[code] = uint8_t(bf16);
            t.bf16_of_mxfp4[byte].high[code] = uint8_t(bf16 >> 8);
            t.f16_of_mxfp4[byte].low[code] = uint8_t(f16);
            t.f16_of_mxfp4[byte].high[code] = uint8_t(f16 >> 8);
        }
    }
}

void fill_e4m3_of_e2m1(Tables& t) {
    for (int index = 0; index < Tables::kNumE2M1Shifts; ++index) {
        for (uint32_t code = 0; code < 16; ++code) {
            t.e4m3_of_e2m1[index][code] = e4m3_from_e2m1(code, index + kMinE2M1Shift);
        }
    }
    std::fill_n(t.e4m3_of_e2m1[Tables::kNumE2M1Shifts], 16, uint8_t(kE4M3NaN));
}

void fill_block_rules(Tables& t) {
    uint8_t base[Tables::kNumRuleExponents];
    for (int w = 0; w < Tables::kNumRuleExponents; ++w) {
        const float inverse = pow2(uint32_t(127 - (w + Tables::kMinRuleExponent)));
        const auto code = [&](uint32_t q) { return uint8_t(e2m1_nearest(e4m3_value(q) * inverse)); };
        base[w] = 0;
        while (code(base[w] + 1u) == 0) ++base[w];
        for (uint32_t j = 0; j < 64; ++j) t.e2m1_of_e4m3[w].codes[j] = code(std::min(base[w] + j, kE4M3Max));
    }
    for (int mode = 0; mode < kNumModes; ++mode) {
        for (uint32_t amax = 1; amax <= kE4M3Max; ++amax) {
            const uint32_t byte = e8m0_from_amax(float_bits(e4m3_value(amax)), ScaleMode(mode));
            const int exponent = int(byte) - int(kE8M0One);
            const int window = exponent - Tables::kMinRuleExponent;
            t.block_rule[mode][amax] = {int16_t(exponent), base[window], uint8_t(window)};
        }
        t.block_rule[mode][0] = {0, 0, 0};
    }
}

void fill_e4m3_shifts(Tables& t) {
    for (int shift = 0; shift < Tables::kNumE4M3Shifts; ++shift) {
        // From the base on, 40 codes cover what becomes subnormal: below them all is zero.
        t.e4m3_shift_base[shift] = uint8_t(std::max(8 * shift - 40, 0));
        for (uint32_t j = 0; j < 64; ++j) {
            const uint32_t code = std::min(t.e4m3_shift_base[shift] + j, kE4M3Max);
            t.e4m3_shifted[shift].codes[j] = e4m3_shift(code, -shift);
        }
    }
}

}  // namespace

const Tables& tables() {
    static const Tables all = [] {
        Tables t{};
        fill_mxfp4_values(t);
        fill_e4m3_of_e2m1(t);
        fill_block_rules(t);
        fill_e4m3_shifts(t);
        return t;
    }();
    return all;
}

}  // namespace fp4comm
