#include "codec.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "row_ops.h"

namespace fp4comm {
namespace {

constexpr int64_t kChunk = 1024;  // columns decoded at a time, so that they stay in the first-level cache
// Sums go through whole rows of most models: hopping between terms more often restarts the prefetcher (8 BF16 terms of
// 7168: 12.5 to 14.5 ms for 1024 rows, against 17 to 20 ms with kChunk).
constexpr int64_t kSumChunk = 8192;

int64_t mapped(const int64_t* map, int64_t i) {
    return map ? map[i] : i;
}

template <typename Fn>
void for_each_chunk(int64_t hidden, int64_t chunk, Fn fn) {
    for (int64_t j = 0; j < hidden; j += chunk) fn(Columns{j, std::min(chunk, hidden - j)});
}

void convert_through_float(const RowOps& ops, Kind in, Kind out, ConstRow src, int64_t hidden,
                           const EncodeContext& context, Row dst) {
    if (out == Kind::kF32) {
        return ops.decode[int(in)](src, {0, hidden}, context.options, reinterpret_cast<float*>(dst.data));
    }
    alignas(64) float x[kChunk];
    for_each_chunk(hidden, kChunk, [&](Columns columns) {
        ops.decode[int(in)](src, columns, context.options, x);
        ops.encode[int(out)](x, columns, context, dst);
    });
}

void accumulate(const RowOps& ops, Kind kind, ConstRow src, Columns columns, const Options& options,
                const float* weight, float* acc) {
    if (ops.accumulate[int(kind)]) return ops.accumulate[int(kind)](src, columns, options, weight, acc);
    alignas(64) float x[kSumChunk];
    ops.decode[int(kind)](src, columns, options, x);
    for (int64_t j = 0; j < columns.count; ++j) acc[j] += weight ? *weight * x[j] : x[j];
}

}  // namespace

void zero_row(Row dst, Kind kind, int64_t hidden) {
    std::memset(dst.data, 0, size_t(data_bytes(kind, hidden)));
    const int64_t num_scales = ceil_div(hidden, kGroupSize);
    if (kind == Kind::kFP8) {
        for (int64_t g = 0; g < num_scales; ++g) store<float>(dst.scales, g, 1.0f);
    } else if (kind == Kind::kFP8E8M0) {
        std::memset(dst.scales, int(kE8M0One), size_t(num_scales));
    } else if (kind == Kind::kMXFP4) {
        std::memset(dst.scales, 0, size_t(hidden / kBlockSize));
    }
}

void convert_rows(const Rows& src, const Rows& dst, int64_t num_rows, int64_t hidden, const int64_t* src_row,
                  const int64_t* dst_row, const Options& options) {
    const RowOps& ops = row_ops();
    const ConvertFn convert = ops.convert[int(src.kind)][int(dst.kind)];
    int64_t previous = -1;
    Row previous_dst{};
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t row = mapped(src_row, i);
        const Row to = dst.row(mapped(dst_row, i));
        const EncodeContext context{options, row, ops};
        if (row < 0) {
            zero_row(to, dst.kind, hidden);
        } else if (row == previous) {
            std::copy_n(previous_dst.data, data_bytes(dst.kind, hidden), to.data);
            std::copy_n(previous_dst.scales, scale_bytes(dst.kind, hidden), to.scales);
        } else if (convert) {
            convert(src.const_row(row), hidden, context, to);
        } else {
            convert_through_float(ops, src.kind, dst.kind, src.const_row(row), hidden, context, to);
        }
        previous = row;
        previous_dst = to;
    }
}

void sum_rows(const Rows& src, const Rows& dst, int64_t num_rows, int64_t num_terms, int64_t hidden,
              const int64_t* src_row, const float* weights, const int64_t* dst_row, const Options& options) {
    const RowOps& ops = row_ops();
    alignas(64) float acc[kSumChunk];
    for (int64_t i = 0; i < num_rows; ++i) {
        const Row to = dst.row(mapped(dst_row, i));
        for_each_chunk(hidden, kSumChunk, [&](Columns columns) {
            std::fill_n(acc, columns.count, 0.0f);
            for (int64_t t = i * num_terms; t < (i + 1) * num_terms; ++t) {
                if (src_row[t] < 0) continue;
                accumulate(ops, src.kind, src.const_row(src_row[t]), columns, options, weights ? weights + t : nullptr,
                           acc);
            }
            ops.encode[int(dst.kind)](acc, columns, {options, i, ops}, to);
        });
    }
}

void dot_rows(const Rows& a, const Rows& b, int64_t num, int64_t hidden, const int64_t* a_row, const int64_t* b_row,
              float* out, const Options& options) {
    const RowOps& ops = row_ops();
    alignas(64) float x[kChunk];
    alignas(64) float y[kChunk];
    for (int64_t i = 0; i < num; ++i) {
        const int64_t row_a = mapped(a_row, i);
        const int64_t row_b = mapped(b_row, i);
        alignas(64) float lanes[kDotLanes] = {};
        if (row_a >= 0 && row_b >= 0) {
            for_each_chunk(hidden, kChunk, [&](Columns columns) {
                ops.decode[int(a.kind)](a.const_row(row_a), columns, options, x);
                ops.decode[int(b.kind)](b.const_row(row_b), columns, options, y);
                ops.dot(x, y, columns.count, lanes);
            });
        }
        for (int half = kDotLanes / 2; half > 0; half /= 2) {
            for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
        }
        out[i] = canonical(lanes[0]);
    }
}

}  // namespace fp4comm
