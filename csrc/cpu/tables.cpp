#include "tables.h"

#include <algorithm>
#include <vector>

#include "fp4comm/half.h"

namespace fp4comm {
namespace {

void fill_bf16_of_mxfp4(Tables& t) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
        for (uint32_t code = 0; code < 16; ++code) {
            const uint16_t bf16 = bf16_nearest(mxfp4_value(code, e8m0_value(byte)));
            t.bf16_of_mxfp4[byte].low[code] = uint8_t(bf16);
            t.bf16_of_mxfp4[byte].high[code] = uint8_t(bf16 >> 8);
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

void fill_e2m1_above_quarter(Tables& t) {
    constexpr uint32_t kQuarter = 5 << 3;  // the code of 0.25
    for (uint32_t j = 0; j < 64; ++j) {
        t.e2m1_above_quarter[j] = uint8_t(e2m1_nearest(e4m3_value(std::min(kQuarter + j, kE4M3Max))));
    }
}

void fill_e4m3_shifts(Tables& t) {
    for (int shift = 0; shift < Tables::kNumE4M3Shifts; ++shift) {
        Tables::Shifted& shifted = t.e4m3_shifted[shift];
        // Five binades become subnormal without vanishing.
        shifted.base = uint8_t(std::max(8 * shift - 40, 0));
        for (uint32_t j = 0; j < 64; ++j) {
            shifted.codes[j] = e4m3_shift(std::min(shifted.base + j, kE4M3Max), -shift);
        }
    }
}

}  // namespace

const uint32_t* hadamard_signs_from(uint64_t seed, int64_t col, int64_t end) {
    thread_local uint64_t kept_seed = 0;
    thread_local std::vector<uint32_t> signs;
    if (seed != kept_seed) signs.clear();
    kept_seed = seed;
    while (int64_t(signs.size()) * kBlockSize < end) {
        signs.push_back(hadamard_signs(seed, int64_t(signs.size()) * kBlockSize));
    }
    return signs.data() + col / kBlockSize;
}

const Tables& tables() {
    static const Tables all = [] {
        Tables t{};
        fill_bf16_of_mxfp4(t);
        fill_e4m3_of_e2m1(t);
        fill_e2m1_above_quarter(t);
        fill_e4m3_shifts(t);
        return t;
    }();
    return all;
}

}  // namespace fp4comm
