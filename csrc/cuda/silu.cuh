// The logistic function and its complement, of float32, by additions, multiplications and a division that round once
// each: the same bits wherever they run, and off by less than 1e-6 of the value.
#pragma once

#include "device.cuh"
#include "fp4comm/e8m0.h"

namespace fp4comm {

struct Logistic {
    float value;       // 1 / (1 + exp(-x))
    float complement;  // 1 - value, without cancellation
};

// exp(-a), 0 <= a <= 86: 2^-m exp(-r) with the integer m nearest to a / ln 2. A NaN gives a NaN.
__device__ inline float exp_of_minus(float a) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the unit is 1, so the addition rounds
    const float shifted = add_rn(mul_rn(a, 1.44269502f), kMagic);
    const float m = sub_rn(shifted, kMagic);
    // ln 2 in two parts, of which the product with the first is exact
    const float r = sub_rn(sub_rn(a, mul_rn(m, 0.693359375f)), mul_rn(m, -2.12194440e-4f));
    float y = add_rn(mul_rn(r, -0.00829022564f), 0.0418983959f);
    y = add_rn(mul_rn(y, r), -0.166676402f);
    y = add_rn(mul_rn(y, r), 0.499991447f);
    y = add_rn(mul_rn(y, r), -0.999999702f);
    y = add_rn(mul_rn(y, r), 1.0f);
    return mul_rn(y, pow2(127u - (float_bits(shifted) - float_bits(kMagic))));
}

__device__ inline Logistic logistic(float x) {
    const float magnitude = float_from_bits(magnitude_bits(x));
    const float e = exp_of_minus(magnitude > 86.0f ? 86.0f : magnitude);
    const float large = 1.0f / add_rn(1.0f, e);  // neither can be subnormal
    const float small = mul_rn(e, large);
    return x >= 0.0f ? Logistic{large, small} : Logistic{small, large};
}

}  // namespace fp4comm
