// Kinds of rows, rows in memory, and the row of a message.
#pragma once

#include "macros.h"

namespace fp4comm {

enum class Kind : int32_t {
    kF32 = 0,
    kBF16 = 1,
    kF16 = 2,
    kFP8 = 3,      // E4M3, one float32 scale per 128
    kFP8E8M0 = 4,  // E4M3, one E8M0 byte per 128
    kMXFP4 = 5,    // E2M1, one E8M0 byte per 32
    kFP8Row = 6,   // E4M3, one float32 scale per row; for GEMMs, in kernels only
};
constexpr int kNumKinds = 6;  // without the last

FP4COMM_HD inline int64_t data_bytes(Kind kind, int64_t hidden) {
    switch (kind) {
        case Kind::kF32:
            return hidden * 4;
        case Kind::kBF16:
        case Kind::kF16:
            return hidden * 2;
        case Kind::kMXFP4:
            return hidden / 2;
        default:
            return hidden;
    }
}

FP4COMM_HD inline int64_t scale_bytes(Kind kind, int64_t hidden) {
    switch (kind) {
        case Kind::kFP8:
            return ceil_div(hidden, kGroupSize) * 4;
        case Kind::kFP8E8M0:
            return ceil_div(hidden, kGroupSize);
        case Kind::kMXFP4:
            return hidden / kBlockSize;
        default:
            return 0;
    }
}

// One row in memory; T is uint8_t or const uint8_t.
template <typename T>
struct RowOf {
    T* data;
    T* scales;
};
using Row = RowOf<uint8_t>;
using ConstRow = RowOf<const uint8_t>;

// Rows of one kind at fixed strides (bytes).
struct Rows {
    Kind kind;
    uint8_t* data;
    int64_t data_stride;
    uint8_t* scales;
    int64_t scales_stride;

    FP4COMM_HD Row row(int64_t i) const { return {data + i * data_stride, scales + i * scales_stride}; }
    FP4COMM_HD ConstRow const_row(int64_t i) const { return {data + i * data_stride, scales + i * scales_stride}; }
};

// A row of a message: [data | scales | float32 weights[num_topk] | int16 local experts[num_topk]], a token's share of
// it.
struct RowLayout {
    int64_t data_bytes;
    int64_t scale_offset;
    int64_t scale_bytes;
    int64_t weight_offset;
    int64_t expert_offset;
    int64_t row_bytes;

    FP4COMM_HD static RowLayout make(Kind kind, int64_t hidden, int64_t num_topk) {
        RowLayout layout;
        layout.data_bytes = fp4comm::data_bytes(kind, hidden);
        layout.scale_offset = layout.data_bytes;
        layout.scale_bytes = fp4comm::scale_bytes(kind, hidden);
        layout.weight_offset = ceil_div(layout.scale_offset + layout.scale_bytes, 4) * 4;
        layout.expert_offset = layout.weight_offset + num_topk * 4;
        const int64_t end =
            num_topk > 0 ? layout.expert_offset + num_topk * 2 : layout.scale_offset + layout.scale_bytes;
        layout.row_bytes = ceil_div(end, 32) * 32;  // a memory sector
        return layout;
    }
};

}  // namespace fp4comm
