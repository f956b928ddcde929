// SwiGLU with the routing weight, fused with the conversion of what it gives, forward and backward:
//
//     act = silu(gate) * up * weight
//
// A warp per row; a lane owns eight adjacent columns of a step of 256. What is summed over a row is summed in 256
// parts, of the columns j, j + 256, ..., then the upper half added to the lower half until one is left. Macros: FFN
// (width of act, a multiple of 128), SRC_KIND (of gate and up, and of the gradient of act), DST_KIND (of act and of the
// gradients of gate and up), WITH_ACT (whether backward makes act again).
#include "lanes.cuh"
#include "silu.cuh"

using namespace fp4comm;

namespace {

constexpr uint32_t kFfn = FFN;
constexpr Kind kSrc = Kind(SRC_KIND);
constexpr Kind kDst = Kind(DST_KIND);
constexpr int kThreads = 256;
constexpr int kLane = 8;
constexpr uint32_t kStepCols = kWarp * kLane;
constexpr int kUnroll = 2;
constexpr int kLanesPerGroup = kGroupSize / kLane;

static_assert(FFN % kGroupSize == 0, "groups of up must not begin within one of gate");

using In = Piece<kSrc, kLane>;
using Nearest = Mode<ScaleMode::kEven, false, false>;

__device__ inline int lane() {
    return int(threadIdx.x) % kWarp;
}

__device__ inline int64_t row_of_warp() {
    return (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
}

__device__ inline void read(const In& piece, float* x) {
    decode<kSrc, false, kLane>(piece, Encoding{}, 0, x);
}

__device__ inline In load_at(ConstRow row, uint32_t col, bool inside) {
    return load_piece<kSrc, kLane>(advance<kSrc>(row, col), inside);
}

// All lanes of the warp take part.
__device__ inline void write_at(Row row, uint32_t col, bool inside, float* x) {
    const Piece<kDst, kLane> piece = encode<kDst, Nearest, true, kLane>(x, Encoding{}, 0, col);
    if (!inside) return;
    const Row at = advance<kDst>(row, col);
    store_words<Piece<kDst, kLane>::kWords>(at.data, piece.data);
    if constexpr (kDst == Kind::kFP8) {
        if (lane() % kLanesPerGroup == 0) store<float>(at.scales, pow2(piece.scale));
    }
}

__device__ inline float row_total(float* sums) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
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
    swiglu_forward(uint8_t* gate_up, int64_t gate_up_stride, const float* weights, uint8_t* act, int64_t act_stride,
                   uint8_t* act_scales, int64_t act_scales_stride, int64_t num_rows) {
    const int64_t i = row_of_warp();
    if (i >= num_rows) return;
    const Rows from = {kSrc, gate_up, gate_up_stride, nullptr, 0};
    const Rows to = {kDst, act, act_stride, act_scales, act_scales_stride};
    const ConstRow in = from.const_row(i);
    const Row out = to.row(i);
    const float weight = weights[i];
#pragma unroll 1
    for (uint32_t first = lane() * kLane; first < kFfn + lane() * kLane; first += kUnroll * kStepCols) {
        In gates[kUnroll];
        In ups[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const uint32_t col = first + u * kStepCols;
            gates[u] = load_at(in, col, col < kFfn);
            ups[u] = load_at(in, kFfn + col, col < kFfn);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const uint32_t col = first + u * kStepCols;
            float gate[kLane];
            float up[kLane];
            read(gates[u], gate);
            read(ups[u], up);
#pragma unroll
            for (int j = 0; j < kLane; ++j) {
                const float silu = mul_rn(gate[j], logistic(gate[j]).value);
                gate[j] = mul_rn(mul_rn(silu, up[j]), weight);
            }
            write_at(out, col, col < kFfn, gate);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    swiglu_backward(uint8_t* gate_up, int64_t gate_up_stride, const float* weights, uint8_t* grad_act,
                    int64_t grad_act_stride, uint8_t* grad, int64_t grad_stride, uint8_t* grad_scales,
                    int64_t grad_scales_stride, float* grad_weights, uint8_t* act, int64_t act_stride,
                    uint8_t* act_scales, int64_t act_scales_stride, int64_t num_rows) {
    const int64_t i = row_of_warp();
    if (i >= num_rows) return;
    const Rows from = {kSrc, gate_up, gate_up_stride, nullptr, 0};
    const Rows upstream = {kSrc, grad_act, grad_act_stride, nullptr, 0};
    const Rows to = {kDst, grad, grad_stride, grad_scales, grad_scales_stride};
    const Rows again = {kDst, act, act_stride, act_scales, act_scales_stride};
    const ConstRow in = from.const_row(i);
    const ConstRow above = upstream.const_row(i);
    const Row out = to.row(i);
    const float weight = weights[i];
    float sums[kLane] = {};
#pragma unroll 1
    for (uint32_t first = 0; first < kFfn; first += kStepCols) {
        const uint32_t col = first + lane() * kLane;
        const bool inside = col < kFfn;
        const In gates = load_at(in, col, inside);
        const In ups = load_at(in, kFfn + col, inside);
        const In grads = load_at(above, col, inside);
        float gate[kLane];
        float up[kLane];
        float d[kLane];
        float made[kLane];
        read(gates, gate);
        read(ups, up);
        read(grads, d);
#pragma unroll
        for (int j = 0; j < kLane; ++j) {
            const Logistic sigmoid = logistic(gate[j]);
            const float silu = mul_rn(gate[j], sigmoid.value);
            const float gated = mul_rn(silu, up[j]);
            sums[j] = add_rn(sums[j], mul_rn(d[j], gated));
            made[j] = mul_rn(gated, weight);
            const float weighted = mul_rn(d[j], weight);
            const float slope = mul_rn(add_rn(mul_rn(gate[j], sigmoid.complement), 1.0f), sigmoid.value);
            gate[j] = mul_rn(mul_rn(weighted, up[j]), slope);
            up[j] = mul_rn(weighted, silu);
        }
        write_at(out, col, inside, gate);
        write_at(out, kFfn + col, inside, up);
        if constexpr (WITH_ACT != 0) write_at(again.row(i), col, inside, made);
    }
    const float total = row_total(sums);
    if (lane() == 0) grad_weights[i] = total;
}
