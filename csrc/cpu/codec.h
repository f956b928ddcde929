// Conversions and sums of whole sets of rows. Row maps are int64 arrays; null is the identity, -1 a row of zeros.
#pragma once

#include "fp4comm/block.h"
#include "fp4comm/wire.h"

namespace fp4comm {

// dst[dst_row[i]] = convert(src[src_row[i]]).
void convert_rows(const Rows& src, const Rows& dst, int64_t num_rows, int64_t hidden, const int64_t* src_row,
                  const int64_t* dst_row, const Options& options);

// dst[dst_row[i]] = encode(sum over k of weights[i, k] * src[src_row[i, k]]), in the order of k, starting from +0.
void sum_rows(const Rows& src, const Rows& dst, int64_t num_rows, int64_t num_terms, int64_t hidden,
              const int64_t* src_row, const float* weights, const int64_t* dst_row, const Options& options);

// out[i] = a[a_row[i]] . b[b_row[i]] in float32: lane j sums the columns j, j + 32, ...; then the upper half of the
// lanes is added to the lower half until one is left.
void dot_rows(const Rows& a, const Rows& b, int64_t num, int64_t hidden, const int64_t* a_row, const int64_t* b_row,
              float* out, const Options& options);

// Row-wise MXFP4 or FP8 to column-wise FP8, group by group: data [hidden, m_i] one after the other, scales
// [sum ceil(m_i / 128), hidden]. Returns how many FP8 scales were not positive normal powers of two; the result is
// right if there were none.
int64_t fp8_columns(const Rows& src, int64_t hidden, const int64_t* src_row, const int64_t* group_sizes,
                    int64_t num_groups, uint8_t* data, float* scales);

// Row-wise MXFP4 to column-wise MXFP4: per group packed [hidden, 16 * nb_i] and scales [hidden, nb_i],
// nb_i = ceil(m_i / 32).
void mxfp4_columns(const Rows& src, int64_t hidden, const int64_t* src_row, const int64_t* group_sizes,
                   int64_t num_groups, uint8_t* packed, uint8_t* scales, const Options& options);

// The row of `hidden` zeros of a kind.
void zero_row(Row dst, Kind kind, int64_t hidden);

}  // namespace fp4comm
