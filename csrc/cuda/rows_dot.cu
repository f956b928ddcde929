// out[i] = a[a_row[i]] . b[b_row[i]], as in csrc/cpu/codec.h: 32 sums, of the columns j, j + 32, ..., then the upper
// half added to the lower half until one is left. Four lanes hold the sums of one pair of rows, eight each, so a warp
// has eight pairs. Macros: HIDDEN, A_KIND, B_KIND, HADAMARD.
#include "lanes.cuh"

using namespace fp4comm;

namespace {

constexpr uint32_t kHidden = HIDDEN;
constexpr Kind kA = Kind(A_KIND);
constexpr Kind kB = Kind(B_KIND);
constexpr int kThreads = 256;
constexpr int kLane = 8;
constexpr int kLanesPerPair = kBlockSize / kLane;
constexpr int kUnroll = 4;

__device__ inline void add_products(const Piece<kA, kLane>& a, const Piece<kB, kLane>& b, const Encoding& encoding,
                                    uint32_t col, float* sums) {
    float x[kLane];
    float y[kLane];
    decode<kA, HADAMARD != 0, kLane>(a, encoding, col, x);
    decode<kB, HADAMARD != 0, kLane>(b, encoding, col, y);
#pragma unroll
    for (int j = 0; j < kLane; ++j) sums[j] = add_rn(sums[j], mul_rn(x[j], y[j]));
}

// Of the sums in four lanes.
__device__ inline float total(float* sums) {
#pragma unroll
    for (int distance = kLanesPerPair / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int j = 0; j < kLane; ++j) sums[j] = add_rn(sums[j], __shfl_xor_sync(kAllLanes, sums[j], distance));
    }
#pragma unroll
    for (int half = kLane / 2; half > 0; half /= 2) {
#pragma unroll
        for (int j = 0; j < half; ++j) sums[j] = add_rn(sums[j], sums[j + half]);
    }
    return canonical(sums[0]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    dot_rows(uint8_t* a_data, int64_t a_stride, uint8_t* a_scales, int64_t a_scales_stride, uint8_t* b_data,
             int64_t b_stride, uint8_t* b_scales, int64_t b_scales_stride, int64_t num, const int64_t* a_row,
             const int64_t* b_row, float* out, int64_t seed) {
    const Rows a = {kA, a_data, a_stride, a_scales, a_scales_stride};
    const Rows b = {kB, b_data, b_stride, b_scales, b_scales_stride};
    const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanesPerPair;
    const int64_t row_a = i >= num ? -1 : a_row ? a_row[i] : i;
    const int64_t row_b = i >= num ? -1 : b_row ? b_row[i] : i;
    const bool present = row_a >= 0 && row_b >= 0;
    const uint32_t hidden = present ? kHidden : 0;  // of a pair that is not there only zeros are loaded
    const ConstRow from_a = a.const_row(present ? row_a : 0);
    const ConstRow from_b = b.const_row(present ? row_b : 0);
    const Encoding encoding = {uint64_t(seed), 0};
    const uint32_t first = threadIdx.x % kLanesPerPair * kLane;
    float sums[kLane] = {};
#pragma unroll 1
    for (uint32_t col = first; col < kHidden; col += kUnroll * kBlockSize) {
        Piece<kA, kLane> in_a[kUnroll];
        Piece<kB, kLane> in_b[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const uint32_t at = col + u * kBlockSize;
            in_a[u] = load_piece<kA, kLane>(advance<kA>(from_a, at), at < hidden);
            in_b[u] = load_piece<kB, kLane>(advance<kB>(from_b, at), at < hidden);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (col - first + u * kBlockSize >= kHidden) break;
            add_products(in_a[u], in_b[u], encoding, col + u * kBlockSize, sums);
        }
    }
    const float dot = total(sums);
    if (i < num && first == 0) out[i] = dot;
}
