// dst[dst_row[i]] = encode(sum over k of weights[i, k] * src[src_row[i, k]]), as in csrc/cpu/codec.h: float32, in the
// order of k, from +0. Rows without terms are left out in the memory of peers. Macros beside those of rows_convert.cuh:
// NUM_TERMS; WEIGHTED, 0: a plain sum.
#include "rows.cuh"

using namespace fp4comm;

namespace {

constexpr int kLane = 8;
constexpr int kTermsAtOnce = NUM_TERMS < 8 ? NUM_TERMS : 8;
constexpr int kBatches = (NUM_TERMS + kTermsAtOnce - 1) / kTermsAtOnce;
using C = Access<kSrc, kDst, kLane>;

// Terms [first, first + kTermsAtOnce) of a row.
struct Terms {
    ConstRow row[kTermsAtOnce];
    float weight[kTermsAtOnce];
    uint32_t present;
    // Weights that multiply any scale up to 2 without leaving the normal numbers.
    uint32_t moderate;

    __device__ Terms(const Rows& src, const int64_t* src_row, const float* weights, int64_t first) {
        const int lane = lane_of_warp();
        const bool mine = lane < kTermsAtOnce && first % NUM_TERMS + lane < NUM_TERMS;
        const int64_t index = mine ? src_row[first + lane] : -1;
        const float own = WEIGHTED && mine ? weights[first + lane] : 1.0f;
        const uint32_t exponent = magnitude_bits(own) >> 23;
        present = __ballot_sync(kAllLanes, index >= 0);
        moderate = __ballot_sync(kAllLanes, magnitude_bits(own) == 0 || exponent - 2 <= 127 - 2);
#pragma unroll
        for (int k = 0; k < kTermsAtOnce; ++k) {
            row[k] = src.const_row(__shfl_sync(kAllLanes, index, k));
            weight[k] = WEIGHTED ? __shfl_sync(kAllLanes, own, k) : 1.0f;
        }
    }
};

struct Sums {
    float lane[kLane];
};

__device__ inline void add_by_floats(const C::In& in, const Encoding& encoding, uint32_t col, float weight, Sums* acc) {
    float x[kLane];
    decode<kSrc, M::kRotated, kLane>(in, encoding, col, x);
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
        acc->lane[j] = add_rn(acc->lane[j], WEIGHTED ? mul_rn(weight, x[j]) : x[j]);
    }
}

FP4COMM_RARE Sums add_rare(C::In in, float weight, Sums acc) {
    add_by_floats(in, Encoding{}, 0, weight, &acc);
    return acc;
}

// As decode_mxfp4, with the weight in the factor.
__device__ inline void add_tiny(const C::In& in, float weight, Sums* acc) {
    const float scale = pow2(in.scale + 126);
    const float factor = WEIGHTED ? mul_rn(weight, scale) : scale;
#pragma unroll
    for (int j = 0; j < kLane; ++j) {
        const float tiny = e2m1_tiny(in.data.word[0], j);
        float* sum = &acc->lane[j];
        *sum = WEIGHTED ? add_rn(*sum, mul_rn(factor, tiny)) : add_exact_product(*sum, tiny, factor);
    }
}

// fn(k, step) for the terms that are there.
template <int kSteps, typename Fn>
__device__ inline void for_each_term(uint32_t present, Fn fn) {
#pragma unroll
    for (int k = 0; k < kTermsAtOnce; ++k) {
        if ((present >> k & 1) == 0) continue;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) fn(k, step);
    }
}

template <int kSteps>
__device__ inline void add_terms(const Terms& terms, const Encoding& encoding, uint32_t first, Sums* acc) {
    C::In in[kTermsAtOnce][kSteps] = {};
#pragma unroll
    for (int k = 0; k < kTermsAtOnce; ++k) {
        if ((terms.present >> k & 1) != 0) load_chunk<C, kSteps>(terms.row[k], first, in[k]);
    }
    if constexpr (kSrc != Kind::kMXFP4 || M::kRotated) {
        for_each_term<kSteps>(terms.present, [&](int k, int step) {
            add_by_floats(in[k][step], encoding, column<C>(first, step), terms.weight[k], &acc[step]);
        });
        return;
    }
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kTermsAtOnce; ++k) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) largest = max(largest, in[k][step].scale);
    }
    if ((terms.present & ~terms.moderate) == 0 && largest <= 128) {
        for_each_term<kSteps>(terms.present,
                              [&](int k, int step) { add_tiny(in[k][step], terms.weight[k], &acc[step]); });
    } else {
        for_each_term<kSteps>(terms.present,
                              [&](int k, int step) { acc[step] = add_rare(in[k][step], terms.weight[k], acc[step]); });
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    sum_rows(uint8_t* src_data, int64_t src_stride, uint8_t* src_scales, int64_t src_scales_stride, uint8_t* dst_data,
             int64_t dst_stride, uint8_t* dst_scales, int64_t dst_scales_stride, int64_t num_rows,
             const int64_t* src_row, const float* weights, const int64_t* dst_row, int64_t seed, int64_t stream,
             const int64_t* peers, int64_t num_turns) {
    const Rows src = {kSrc, src_data, src_stride, src_scales, src_scales_stride};
    const Destination dst = {{kDst, dst_data, dst_stride, dst_scales, dst_scales_stride}, peers};
    const Encoding encoding = {uint64_t(seed), uint32_t(stream)};
    if (dst.is_lost()) return;
    constexpr int kSteps = Parts<C>::kUnroll;
    for_each_item(num_turns * ROW_PARTS, [&](int64_t item) {
        const int64_t i = dst.row_in_turn(item / ROW_PARTS, num_rows);
        if (PEERS && i < 0) return;
        Terms terms(src, src_row, weights, i * NUM_TERMS);
        if (PEERS && kBatches == 1 && terms.present == 0) return;
        const Row to = dst.row(dst_row ? dst_row[i] : i);
        for_each_chunk<C>(int(item % ROW_PARTS), [&](uint32_t first) {
            Sums acc[kSteps] = {};
#pragma unroll 1
            for (int batch = 0; batch < kBatches; ++batch) {
                if (kBatches > 1) terms = Terms(src, src_row, weights, i * NUM_TERMS + batch * kTermsAtOnce);
                add_terms<kSteps>(terms, encoding, first, acc);
            }
            C::Out out[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                out[step] = encode<kDst, M, true, kLane>(acc[step].lane, encoding, i, column<C>(first, step));
            }
            store_chunk<C, kSteps>(to, first, out);
        });
    });
}
