// Rows of a send buffer from tokens: token t is converted once and written to row token_rows[t, r] for every r where
// that is not -1, with what the receiver must know of its choices. Macros beside those of rows_convert.cuh:
//   NUM_TARGETS  ranks
//   META         1: weights and experts are written, NUM_TOPK of each per row; INDEX_BYTES (4 or 8) of an entry of
//   topk_idx CAPACITY     1: rank r owns rows_stride rows; of those beyond rows_per_rank[r] the weights become 0, the
//   experts -1
#include "rows.cuh"

using namespace fp4comm;

#if META

namespace {

// Where a row keeps its weights and experts, and what a choice means.
struct MetaRows {
    Destination dst;
    int64_t weight_offset;
    int64_t expert_offset;

    __device__ void write(int64_t row, int rank, int k, float weight, int64_t expert) const {
        uint8_t* to = dst.row(row, rank).data;
        store<float>(to + weight_offset + k * 4, weight);
        store<int16_t>(to + expert_offset + k * 2, int16_t(expert));
    }
};

struct Choices {
    const void* topk_idx;
    const float* weights;  // null: 1.0
    int64_t experts_per_rank;

    __device__ int64_t expert(int64_t i) const {
#if INDEX_BYTES == 8
        return static_cast<const int64_t*>(topk_idx)[i];
#else
        return static_cast<const int32_t*>(topk_idx)[i];
#endif
    }
};

// The choices of token `token`, as rank `rank` sees them.
__device__ void write_choices(const Choices& choices, int64_t token, int rank, const MetaRows& meta, int64_t row) {
    for (int k = lane_of_warp(); k < NUM_TOPK; k += kWarp) {
        const int64_t i = token * NUM_TOPK + k;
        const int64_t local = choices.expert(i) - rank * choices.experts_per_rank;
        const bool here = local >= 0 && local < choices.experts_per_rank;
        const float weight = choices.weights ? choices.weights[i] : 1.0f;
        meta.write(row, rank, k, here ? weight : 0.0f, here ? local : -1);
    }
}

#if CAPACITY
// Fixed room for each rank.
struct Capacity {
    const int64_t* rows_per_rank;
    int64_t rows_per_rank_stride;
    int64_t rows_stride;

    // The rows that nothing is sent in, of 32 from row `first` on.
    __device__ void write_unused(int64_t first, const MetaRows& meta) const {
        const int64_t row = first + lane_of_warp();
        const int64_t rank = row / rows_stride;
        if (rank >= NUM_TARGETS || row - rank * rows_stride < rows_per_rank[rank * rows_per_rank_stride]) return;
        for (int k = 0; k < NUM_TOPK; ++k) meta.write(row, int(rank), k, 0.0f, -1);
    }
};
#endif

}  // namespace

#endif

extern "C" __global__ void ROW_BOUNDS pack_tokens(uint8_t* src_data, int64_t src_stride, uint8_t* src_scales,
                                                  int64_t src_scales_stride, uint8_t* dst_data, int64_t dst_stride,
                                                  uint8_t* dst_scales, int64_t dst_scales_stride, int64_t num_tokens,
                                                  const int64_t* token_rows, int64_t seed, int64_t stream,
                                                  const void* topk_idx, const float* weights, int64_t experts_per_rank,
                                                  int64_t weight_offset, int64_t expert_offset,
                                                  const int64_t* rows_per_rank, int64_t rows_per_rank_stride,
                                                  int64_t rows_stride, const int64_t* peers) {
    const Rows src = {kSrc, src_data, src_stride, src_scales, src_scales_stride};
    const Destination dst = {{kDst, dst_data, dst_stride, dst_scales, dst_scales_stride}, peers};
    if (dst.is_lost()) return;
    const int64_t num_token_items = num_tokens * ROW_PARTS;
#if META
    const MetaRows meta = {dst, weight_offset, expert_offset};
    const Choices choices = {topk_idx, weights, experts_per_rank};
#endif
#if META && CAPACITY
    const Capacity capacity = {rows_per_rank, rows_per_rank_stride, rows_stride};
    const int64_t num_items = num_token_items + (rows_stride * NUM_TARGETS + kWarp - 1) / kWarp;
#else
    const int64_t num_items = num_token_items;
#endif
    begin_kernel();
    for_each_item(num_items, [&](int64_t item) {
#if META && CAPACITY
        if (item >= num_token_items) return capacity.write_unused((item - num_token_items) * kWarp, meta);
#endif
        const int64_t token = item / ROW_PARTS;
        const int part = int(item % ROW_PARTS);
        const Targets<NUM_TARGETS> targets(token_rows + token * NUM_TARGETS);
        if (targets.none()) return;
#if META
        if (part == 0) {
            targets.for_each([&](int64_t row, int rank) { write_choices(choices, token, rank, meta, row); });
        }
#endif
        spread_row(src, dst, token, part, targets, {uint64_t(seed), uint32_t(stream)});
#if SIGNAL
        end_rows();
        targets.for_each([&](int64_t row, int rank) {
            if (lane_of_warp() == 0) dst.count(row, rank);
        });
#endif
    });
}
