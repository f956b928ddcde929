#include "route.h"

#include <algorithm>
#include <vector>

#include "memory.h"

namespace fp4comm {
namespace {

std::vector<int64_t> exclusive_sum(const int64_t* counts, int64_t num) {
    std::vector<int64_t> first(size_t(num), 0);
    for (int64_t i = 1; i < num; ++i) first[size_t(i)] = first[size_t(i - 1)] + counts[i - 1];
    return first;
}

}  // namespace

int64_t route(const TopkIdx& topk, int64_t num_tokens, int64_t* token_rows, int64_t* pair_src, int64_t* pair_dst,
              int64_t* counts) {
    const int64_t num_ranks = topk.num_ranks;
    const int64_t experts_per_rank = topk.experts_per_rank();
    std::fill_n(token_rows, num_tokens * num_ranks, int64_t(-1));
    std::fill_n(counts, num_ranks, int64_t(0));
    for (int64_t t = 0; t < num_tokens; ++t) {
        for (int64_t k = 0; k < topk.num_topk; ++k) {
            const int64_t expert = topk.expert(t, k);
            if (expert < 0) continue;
            const int64_t rank = expert / experts_per_rank;
            int64_t& position = token_rows[t * num_ranks + rank];
            if (position < 0) position = counts[rank]++;
        }
    }
    const std::vector<int64_t> first = exclusive_sum(counts, num_ranks);
    int64_t num_pairs = 0;
    for (int64_t t = 0; t < num_tokens; ++t) {
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
            int64_t& position = token_rows[t * num_ranks + rank];
            if (position < 0) continue;
            position += first[size_t(rank)];
            pair_src[num_pairs] = t;
            pair_dst[num_pairs++] = position;
        }
    }
    return num_pairs;
}

void write_meta(uint8_t* buffer, const RowLayout& layout, const TopkIdx& topk, const float* weights,
                const int64_t* pair_src, const int64_t* pair_dst, int64_t num_pairs, const int64_t* counts) {
    const std::vector<int64_t> first = exclusive_sum(counts, topk.num_ranks);
    const int64_t experts_per_rank = topk.experts_per_rank();
    for (int64_t p = 0; p < num_pairs; ++p) {
        // Ranks that get nothing share their start with the next one, so the last start not above is the rank's.
        const auto next = std::upper_bound(first.begin(), first.end(), pair_dst[p]);
        const int64_t first_expert = (next - first.begin() - 1) * experts_per_rank;
        uint8_t* row = buffer + pair_dst[p] * layout.row_bytes;
        for (int64_t k = 0; k < topk.num_topk; ++k) {
            const int64_t local = topk.expert(pair_src[p], k) - first_expert;
            const bool here = local >= 0 && local < experts_per_rank;
            const float weight = weights ? weights[pair_src[p] * topk.num_topk + k] : 1.0f;
            store<float>(row + layout.weight_offset, k, here ? weight : 0.0f);
            store<int16_t>(row + layout.expert_offset, k, here ? int16_t(local) : int16_t(-1));
        }
    }
}

int64_t read_meta(const uint8_t* buffer, const RowLayout& layout, int64_t num_rows, int64_t num_topk, int32_t* idx,
                  float* weights, int64_t* counts, int64_t num_local_experts) {
    int64_t bad = 0;
    std::fill_n(counts, num_local_experts, int64_t(0));
    for (int64_t n = 0; n < num_rows; ++n) {
        const uint8_t* row = buffer + n * layout.row_bytes;
        for (int64_t k = 0; k < num_topk; ++k) {
            int32_t expert = load<int16_t>(row + layout.expert_offset, k);
            if (expert < -1 || expert >= num_local_experts) {
                ++bad;
                expert = -1;
            }
            if (expert >= 0) ++counts[expert];
            idx[n * num_topk + k] = expert;
            weights[n * num_topk + k] = load<float>(row + layout.weight_offset, k);
        }
    }
    return bad;
}

int64_t expert_layout(const int32_t* idx, int64_t num_rows, int64_t num_topk, int64_t num_local_experts,
                      int64_t alignment, int64_t capacity_rows, const int64_t* counts, int64_t* row, int64_t* slot_pos,
                      int64_t* group_sizes) {
    for (int64_t e = 0; e < num_local_experts; ++e) group_sizes[e] = ceil_div(counts[e], alignment) * alignment;
    std::vector<int64_t> next = exclusive_sum(group_sizes, num_local_experts);
    const int64_t total = num_local_experts ? next.back() + group_sizes[num_local_experts - 1] : 0;
    if (total > capacity_rows) return total;
    std::fill_n(row, capacity_rows, int64_t(-1));
    for (int64_t n = 0; n < num_rows; ++n) {
        for (int64_t k = 0; k < num_topk; ++k) {
            const int32_t expert = idx[n * num_topk + k];
            const int64_t position = expert < 0 ? -1 : next[size_t(expert)]++;
            slot_pos[n * num_topk + k] = position;
            if (position >= 0) row[position] = n;
        }
    }
    return total;
}

}  // namespace fp4comm
