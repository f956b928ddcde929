// Tiles of column-wise FP8, declared here because their loops have files of their own.
#pragma once

#include "row_ops.h"

namespace fp4comm::avx2 {

void mxfp4_tile_to_fp8(const TileRows& tile, Columns columns, uint8_t* out, int64_t stride, uint8_t* shared);
uint8_t fp8_tile_to_fp8(const TileRows& tile, const uint8_t* exponents, Columns columns, uint8_t* out, int64_t stride);

}  // namespace fp4comm::avx2
