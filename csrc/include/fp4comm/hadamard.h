// Random Hadamard transform of a block of 32: random signs, then the Walsh-Hadamard butterfly in a fixed order.
#pragma once

#include "macros.h"

namespace fp4comm {

FP4COMM_HD inline void hadamard_butterfly(float* x, float factor) {
    for (int h = 1; h < kBlockSize; h *= 2) {
        for (int i = 0; i < kBlockSize; ++i) {
            if (i & h) continue;
            const float a = x[i];
            const float b = x[i + h];
            x[i] = add_rn(a, b);
            x[i + h] = sub_rn(a, b);
        }
    }
    for (int i = 0; i < kBlockSize; ++i) x[i] = mul_rn(x[i], factor);
}

FP4COMM_HD inline void flip_signs(float* x, uint32_t signs) {
    for (int j = 0; j < kBlockSize; ++j) x[j] = float_from_bits(float_bits(x[j]) ^ (signs >> j & 1) << 31);
}

// 0.25 * 0.125 * 32 = 1: the two undo each other; 0.25 instead of 32^-0.5 keeps both factors exact.
FP4COMM_HD inline void hadamard_forward(float* x, uint32_t signs) {
    flip_signs(x, signs);
    hadamard_butterfly(x, 0.25f);
}

FP4COMM_HD inline void hadamard_inverse(float* x, uint32_t signs) {
    hadamard_butterfly(x, 0.125f);
    flip_signs(x, signs);
}

}  // namespace fp4comm
