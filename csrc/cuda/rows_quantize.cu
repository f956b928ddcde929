// Rows of floats as FP8 with one scale per row, the smallest power of two that avoids saturation. A row with a NaN or
// an Inf becomes NaN. A block per row, which reads it once. Macros: HIDDEN (a multiple of 8), SRC_KIND, THREADS.
#include "lanes.cuh"
#include "row_maximum.cuh"

using namespace fp4comm;

namespace {

constexpr uint32_t kHidden = HIDDEN;
constexpr Kind kSrc = Kind(SRC_KIND);
constexpr int kThreads = THREADS;
constexpr int kLane = 8;
constexpr int kSteps = (HIDDEN + kThreads * kLane - 1) / (kThreads * kLane);

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    quantize_rows(uint8_t* src, int64_t src_stride, uint8_t* codes, int64_t codes_stride, float* scales) {
    const int64_t row = blockIdx.x;
    const uint32_t col = threadIdx.x * kLane;
    const ConstRow in = {src + row * src_stride, nullptr};
    Piece<kSrc, kLane> pieces[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint32_t at = col + step * kThreads * kLane;
        pieces[step] = load_piece<kSrc, kLane>(advance<kSrc>(in, at), at < kHidden);
    }
    uint32_t amax = 0;
    float x[kLane];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        decode<kSrc, false, kLane>(pieces[step], Encoding{}, 0, x);
        amax = max(amax, lane_amax<kLane>(x));
    }
    amax = max_over_block<kThreads>(amax);
    const uint32_t byte = row_byte_from_amax(amax);
    if (threadIdx.x == 0) scales[row] = pow2(byte);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint32_t at = col + step * kThreads * kLane;
        decode<kSrc, false, kLane>(pieces[step], Encoding{}, 0, x);
        Words<2> words;
        encode_fp8_at<kLane>(x, byte, amax >= kInfinityBits, words.word);
        if (at < kHidden) store_words<2>(codes + row * codes_stride + at, words);
    }
}
