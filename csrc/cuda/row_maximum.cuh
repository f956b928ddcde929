// What the threads of a block that share a row agree on.
#pragma once

#include "lanes.cuh"

namespace fp4comm {

// For all threads of the block; of up to 32 warps. To be called once in a kernel for each `kCall`.
template <int kThreads, int kCall = 0>
__device__ inline uint32_t max_over_block(uint32_t value) {
    constexpr int kWarps = kThreads / kWarp;
    value = max_over_lanes<kWarp>(value);
    if constexpr (kWarps > 1) {
        __shared__ uint32_t of_warps[kWarps];
        if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < kWarps; ++w) value = max(value, of_warps[w]);
    }
    return value;
}

}  // namespace fp4comm
