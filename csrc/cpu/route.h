// Where tokens go: rows per destination rank, routing metadata inside rows, rows per local expert.
#pragma once

#include "fp4comm/wire.h"

namespace fp4comm {

// topk_idx [num_tokens, num_topk], int32 or int64, -1 = no expert. Rank r has the experts [r * L, (r + 1) * L).
struct TopkIdx {
    const void* data;
    bool is_64;
    int64_t num_topk;
    int64_t num_experts;
    int64_t num_ranks;

    int64_t expert(int64_t token, int64_t k) const {
        const int64_t i = token * num_topk + k;
        return is_64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
    int64_t experts_per_rank() const { return num_experts / num_ranks; }
};

// One row per (token, rank with one of its experts), ordered by rank, then token. token_rows [T, R] = position or -1;
// the pairs (token, position) are listed by token, then rank. Returns the number of pairs.
int64_t route(const TopkIdx& topk, int64_t num_tokens, int64_t* token_rows, int64_t* pair_src, int64_t* pair_dst,
              int64_t* counts);

// Fills weights and local experts of the rows of a send buffer; null weights are 1.0.
void write_meta(uint8_t* buffer, const RowLayout& layout, const TopkIdx& topk, const float* weights,
                const int64_t* pair_src, const int64_t* pair_dst, int64_t num_pairs, const int64_t* counts);

// Reads them from received rows and counts the rows per local expert. Returns the number of entries out of range;
// these become -1.
int64_t read_meta(const uint8_t* buffer, const RowLayout& layout, int64_t num_rows, int64_t num_topk, int32_t* idx,
                  float* weights, int64_t* counts, int64_t num_local_experts);

// Expert-contiguous order: by local expert, received row, slot; groups padded to `alignment`. row[m] is the received
// row or -1, slot_pos[n, k] the position m or -1. Returns the sum of the padded sizes; if that is more than
// capacity_rows, row and slot_pos are not written.
int64_t expert_layout(const int32_t* idx, int64_t num_rows, int64_t num_topk, int64_t num_local_experts,
                      int64_t alignment, int64_t capacity_rows, const int64_t* counts, int64_t* row, int64_t* slot_pos,
                      int64_t* group_sizes);

}  // namespace fp4comm
