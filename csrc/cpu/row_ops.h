// The loops over rows that exist once per instruction set. All give the same bits; the scalar ones define them.
#pragma once

#include <string>
#include <vector>

#include "fp4comm/block.h"
#include "fp4comm/wire.h"
#include "memory.h"

namespace fp4comm {

// Columns [begin, begin + count) of a row; begin is a multiple of 128, count of 32.
struct Columns {
    int64_t begin;
    int64_t count;
};

struct RowOps;

// Row number that seeds stochastic rounding, with the options of the call and the loops in use.
struct EncodeContext {
    const Options& options;
    int64_t row;
    const RowOps& ops;
};

// The two ways to keep the scale of an FP8 group.
template <Kind kKind>
inline float load_fp8_scale(const uint8_t* scales, int64_t group) {
    return kKind == Kind::kFP8 ? load<float>(scales, group) : e8m0_value(scales[group]);
}

template <Kind kKind>
inline void store_fp8_scale(uint8_t* scales, int64_t group, uint32_t byte) {
    if (kKind == Kind::kFP8) {
        store<float>(scales, group, e8m0_value(byte));
    } else {
        scales[group] = uint8_t(byte);
    }
}

using DecodeFn = void (*)(ConstRow src, Columns columns, const Options& options, float* out);
using EncodeFn = void (*)(const float* x, Columns columns, const EncodeContext& context, Row dst);
using ConvertFn = void (*)(ConstRow src, int64_t hidden, const EncodeContext& context, Row dst);
// acc += weight * src, product and sum rounded each; a null weight leaves the product out.
using AccumulateFn = void (*)(ConstRow src, Columns columns, const Options& options, const float* weight, float* acc);

constexpr int kDotLanes = 32;

// `count` rows, followed by rows of zeros up to 128.
struct TileRows {
    ConstRow row[kRowTile];
    int count;
};

// Scale byte of the tile: the largest of the rows with a number other than zero and NaN in these columns, else 127.
int fp8_tile_byte(const TileRows& tile, const uint8_t* exponents, Columns columns);

struct RowOps {
    const char* name;
    DecodeFn decode[kNumKinds];
    EncodeFn encode[kNumKinds];
    ConvertFn convert[kNumKinds][kNumKinds];  // null: decode, then (unless to F32) encode
    AccumulateFn accumulate[kNumKinds];       // null: decode, then add
    // Element j of the operands goes to lane j % 32, product and sum rounded each.
    void (*dot)(const float* a, const float* b, int64_t count, float* lanes);
    // At most 128 MXFP4 columns of a tile to FP8, column c to out + c * stride, where there is room for rows up to the
    // next multiple of 16; shared[c / 32] is the scale byte of column c.
    void (*mxfp4_tile_to_fp8)(const TileRows& tile, Columns columns, uint8_t* out, int64_t stride, uint8_t* shared);
    // The same for FP8 rows; exponents[r] is the scale byte of row r. Returns the scale byte.
    uint8_t (*fp8_tile_to_fp8)(const TileRows& tile, const uint8_t* exponents, Columns columns, uint8_t* out,
                               int64_t stride);

    // Inner loops of the SIMD encoders: nearest rounding, whole groups of 128, at most 64 of them. Bit g of the result
    // is set where group g holds something rare (NaN, Inf, numbers near the end of the range) and was left undone.
    //
    // `x` are BF16 numbers, or floats cut to their upper halves with the lowest bit set if a bit was lost.
    uint64_t (*bf16_to_mxfp4)(const uint16_t* x, int num_groups, ScaleMode mode, uint8_t* packed, uint8_t* scales);
    // `group_bytes`: exponents of the groups' power-of-two scales; 0 for any other scale.
    uint64_t (*e4m3_to_mxfp4)(const uint8_t* codes, const uint8_t* group_bytes, int num_groups, ScaleMode mode,
                              uint8_t* packed, uint8_t* scales);
};

const RowOps& scalar_row_ops();
#if defined(__x86_64__)
const RowOps& avx2_row_ops();
const RowOps& avx512_row_ops();
#endif

const RowOps& row_ops();  // those in use
void use_row_ops(const std::string& name);
std::vector<std::string> supported_row_ops();  // slowest first

}  // namespace fp4comm
