// Of rows with a scale each, the largest scale of each expert: what all its rows are brought to before sums over them.
// A block per expert. Macros: THREADS.
#include "row_maximum.cuh"

using namespace fp4comm;

// ends: where the rows of each expert end. Rows after the last are left alone.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_scales(const float* scales, const int32_t* ends, float* of_experts, float* of_rows) {
    const int expert = int(blockIdx.x);
    const int64_t begin = expert == 0 ? 0 : ends[expert - 1];
    const int64_t end = ends[expert];
    uint32_t largest = zero_scale(Kind::kFP8Row) << 23;  // positive floats are in the order of their bits
    for (int64_t row = begin + threadIdx.x; row < end; row += THREADS) largest = max(largest, float_bits(scales[row]));
    largest = max_over_block<THREADS>(largest);
    if (threadIdx.x == 0) of_experts[expert] = float_from_bits(largest);
    for (int64_t row = begin + threadIdx.x; row < end; row += THREADS) of_rows[row] = float_from_bits(largest);
}
