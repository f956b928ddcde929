// SwiGLU with the routing weight, fused with the conversion of what it gives, forward and backward:
//
//     act = silu(gate) * up * weight
//
// A block per row, which is read once and kept in registers; a lane owns eight adjacent columns of each step. Rows
// from *end on, if there is an end, are left alone. Macros: FFN (width of act, a multiple of 128), THREADS, SRC_KIND
// (of gate and up, and of the gradient of act), DST_KIND (of act and of the gradients of gate and up), WITH_ACT
// (whether backward makes act again).
#include "row_maximum.cuh"

using namespace fp4comm;

namespace {

constexpr uint32_t kFfn = FFN;
constexpr Kind kSrc = Kind(SRC_KIND);
constexpr Kind kDst = Kind(DST_KIND);
constexpr int kThreads = THREADS;
constexpr int kLane = 8;
constexpr uint32_t kStepCols = kThreads * kLane;
constexpr int kSteps = (FFN + int(kStepCols) - 1) / int(kStepCols);
constexpr int kLanesPerGroup = kGroupSize / kLane;

static_assert(FFN % kGroupSize == 0, "groups of up must not begin within one of gate");

using In = Piece<kSrc, kLane>;
using Nearest = Mode<ScaleMode::kEven, false, false>;

__device__ inline uint32_t column_of(int step) {
    return step * kStepCols + threadIdx.x * kLane;
}

__device__ inline In load_at(ConstRow row, uint32_t col, bool inside) {
    return load_piece<kSrc, kLane>(advance<kSrc>(row, col), inside);
}

__device__ inline void read(const In& piece, float* x) {
    decode<kSrc, false, kLane>(piece, Encoding{}, 0, x);
}

// The logistic function and 1 minus that, without cancellation, by the device's own exponential and reciprocal.
struct Logistic {
    float value;
    float complement;
};

__device__ inline Logistic logistic(float x) {
    const float e = exp2_approx(mul_rn(-1.44269504f, float_from_bits(magnitude_bits(x))));
    const float large = reciprocal_approx(add_rn(1.0f, e));
    const float small = mul_rn(e, large);
    return x >= 0.0f ? Logistic{large, small} : Logistic{small, large};
}

// Writes numbers of this lane as kDst. The scale of a row must be known; all lanes of the warp take part.
__device__ inline void write_at(Row row, uint32_t col, bool inside, float* x, uint32_t row_amax) {
    const Row at = advance<kDst>(row, col);
    if constexpr (kDst == Kind::kFP8Row) {
        Words<2> words;
        encode_fp8_at<kLane>(x, row_byte_from_amax(row_amax), row_amax >= kInfinityBits, words.word);
        if (inside) store_words<2>(at.data, words);
    } else {
        const Piece<kDst, kLane> piece = encode<kDst, Nearest, true, kLane>(x, Encoding{}, 0, col);
        if (!inside) return;
        store_words<Piece<kDst, kLane>::kWords>(at.data, piece.data);
        if constexpr (kDst == Kind::kFP8) {
            if (threadIdx.x % kLanesPerGroup == 0) store<float>(at.scales, pow2(piece.scale));
        }
    }
}

// The largest magnitude of a row, where its scale depends on that; and writes the scale.
template <int kCall>
__device__ inline uint32_t row_amax_of(uint32_t lane_amax, Row row) {
    if constexpr (kDst == Kind::kFP8Row) {
        const uint32_t amax = max_over_block<kThreads, kCall>(lane_amax);
        if (threadIdx.x == 0) store<float>(row.scales, pow2(row_byte_from_amax(amax)));
        return amax;
    } else {
        return 0;
    }
}

__device__ inline float sum_over_block(float value) {
    constexpr int kWarps = kThreads / kWarp;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        value = add_rn(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    __shared__ float of_warps[kWarps];
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = of_warps[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) value = add_rn(value, of_warps[w]);
    return value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    swiglu_forward(uint8_t* gate_up, int64_t gate_up_stride, const float* weights, uint8_t* act, int64_t act_stride,
                   uint8_t* act_scales, int64_t act_scales_stride, const int32_t* end) {
    const int64_t i = blockIdx.x;
    if (end && i >= *end) return;
    const ConstRow in = Rows{kSrc, gate_up, gate_up_stride, nullptr, 0}.const_row(i);
    const Row out = Rows{kDst, act, act_stride, act_scales, act_scales_stride}.row(i);
    const float weight = weights[i];
    In gates[kSteps];
    In ups[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint32_t col = column_of(step);
        gates[step] = load_at(in, col, col < kFfn);
        ups[step] = load_at(in, kFfn + col, col < kFfn);
    }
    float x[kSteps][kLane];
    uint32_t amax = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        float up[kLane];
        read(gates[step], x[step]);
        read(ups[step], up);
#pragma unroll
        for (int j = 0; j < kLane; ++j) {
            const float silu = mul_rn(x[step][j], logistic(x[step][j]).value);
            x[step][j] = mul_rn(mul_rn(silu, up[j]), weight);
        }
        amax = max(amax, lane_amax<kLane>(x[step]));
    }
    amax = row_amax_of<0>(amax, out);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint32_t col = column_of(step);
        write_at(out, col, col < kFfn, x[step], amax);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    swiglu_backward(uint8_t* gate_up, int64_t gate_up_stride, const float* weights, uint8_t* grad_act,
                    int64_t grad_act_stride, uint8_t* grad, int64_t grad_stride, uint8_t* grad_scales,
                    int64_t grad_scales_stride, float* grad_weights, uint8_t* act, int64_t act_stride,
                    uint8_t* act_scales, int64_t act_scales_stride, const int32_t* end) {
    const int64_t i = blockIdx.x;
    if (end && i >= *end) return;
    const ConstRow in = Rows{kSrc, gate_up, gate_up_stride, nullptr, 0}.const_row(i);
    const ConstRow above = Rows{kSrc, grad_act, grad_act_stride, nullptr, 0}.const_row(i);
    const Row out = Rows{kDst, grad, grad_stride, grad_scales, grad_scales_stride}.row(i);
    const Row again = Rows{kDst, act, act_stride, act_scales, act_scales_stride}.row(i);
    const float weight = weights[i];
    In gates[kSteps];
    In ups[kSteps];
    In grads[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint32_t col = column_of(step);
        gates[step] = load_at(in, col, col < kFfn);
        ups[step] = load_at(in, kFfn + col, col < kFfn);
        grads[step] = load_at(above, col, col < kFfn);
    }
    float gate[kSteps][kLane];
    float up[kSteps][kLane];
    float made[kSteps][kLane];
    float sum = 0.0f;
    uint32_t amax = 0;
    uint32_t made_amax = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        float d[kLane];
        read(gates[step], gate[step]);
        read(ups[step], up[step]);
        read(grads[step], d);
#pragma unroll
        for (int j = 0; j < kLane; ++j) {
            float& g = gate[step][j];
            float& u = up[step][j];
            const Logistic sigmoid = logistic(g);
            const float silu = mul_rn(g, sigmoid.value);
            const float gated = mul_rn(silu, u);
            sum = add_rn(sum, mul_rn(d[j], gated));
            made[step][j] = mul_rn(gated, weight);
            const float weighted = mul_rn(d[j], weight);
            const float slope = mul_rn(add_rn(mul_rn(g, sigmoid.complement), 1.0f), sigmoid.value);
            g = mul_rn(mul_rn(weighted, u), slope);
            u = mul_rn(weighted, silu);
        }
        amax = max(amax, max(lane_amax<kLane>(gate[step]), lane_amax<kLane>(up[step])));
        made_amax = max(made_amax, lane_amax<kLane>(made[step]));
    }
    const float total = sum_over_block(sum);
    if (threadIdx.x == 0) grad_weights[i] = canonical(total);
    amax = row_amax_of<0>(amax, out);
    if constexpr (WITH_ACT != 0) made_amax = row_amax_of<1>(made_amax, again);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint32_t col = column_of(step);
        write_at(out, col, col < kFfn, gate[step], amax);
        write_at(out, kFfn + col, col < kFfn, up[step], amax);
        if constexpr (WITH_ACT != 0) write_at(again, col, col < kFfn, made[step], made_amax);
    }
}
