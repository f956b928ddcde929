// Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011).
#pragma once

#include "macros.h"

namespace fp4comm {

struct Philox4 {
    uint32_t word[4];
};

FP4COMM_HD inline Philox4 philox4x32(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = uint32_t(seed);
    uint32_t k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c0;
        const uint64_t p1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Four words for the eight elements col .. col + 7 of a row; element j takes 16 bits of word j / 2, low half first.
FP4COMM_HD inline Philox4 rounding_bits(uint64_t seed, uint32_t stream, int64_t row, int64_t col) {
    return philox4x32(seed, uint32_t(col / 8), uint32_t(uint64_t(row)), uint32_t(uint64_t(row) >> 32), stream);
}

FP4COMM_HD inline uint32_t random16(const Philox4& bits, int j) {
    return bits.word[j / 2] >> (j % 2 * 16) & 0xffffu;
}

// Sign flips of the random Hadamard transform for the block that starts at `col`: bit j flips element j.
FP4COMM_HD inline uint32_t hadamard_signs(uint64_t seed, int64_t col) {
    return philox4x32(seed, uint32_t(col / kBlockSize), 0, 0, 0xffffffffu).word[0];
}

}  // namespace fp4comm
