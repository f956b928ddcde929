// Rows in the order of the experts from received rows: row n of src is read once and written to the rows
// slot_rows[n, k] of dst that are not -1; rows of dst whose source_rows is -1 become rows of zeros, but for those from
// row *end on, if there is an end. Macros beside those of rows_convert.cuh, where AWAIT makes num_src_rows turns:
// NUM_TARGETS, the slots of a row; WEIGHTED, 1: each row is multiplied by its weight.
#include "rows.cuh"

using namespace fp4comm;

namespace {

#if WEIGHTED

using RowWriter = WeightedConverter;

__device__ void expand_row(const Rows& src, const Destination& dst, int64_t row, int part,
                           const Targets<NUM_TARGETS>& targets, const float* weights, const Encoding& encoding) {
    using C = WeightedConverter;
    constexpr int kSteps = Parts<C>::kUnroll;
    for_each_chunk<C>(part, [&](uint32_t first) {
        C::In in[kSteps];
        load_chunk<C, kSteps>(src.const_row(row), first, in);
        targets.for_each([&](int64_t target, int) {
            C::Out out[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                out[step] = C::convert(in[step], weights[target], encoding, target, column<C>(first, step));
            }
            store_chunk<C, kSteps>(dst.row(target), first, out);
        });
    });
}

#else

using RowWriter = RowConverter;

__device__ void expand_row(const Rows& src, const Destination& dst, int64_t row, int part,
                           const Targets<NUM_TARGETS>& targets, const float*, const Encoding& encoding) {
    spread_row(src, dst, row, part, targets, encoding);
}

#endif

// Of 32 rows of dst from row `first` on.
__device__ void zero_rows(const Destination& dst, int64_t first, const int64_t* source_rows, int64_t num_rows) {
    const int64_t mine = first + lane_of_warp();
    uint32_t left = __ballot_sync(kAllLanes, mine < num_rows && source_rows[mine < num_rows ? mine : 0] < 0);
    for (; left != 0; left &= left - 1) {
        const Row row = dst.row(first + __ffs(int(left)) - 1);
        for (int part = 0; part < ROW_PARTS; ++part) zero_part<RowWriter>(row, part);
    }
}

}  // namespace

extern "C" __global__ void ROW_BOUNDS expand_rows(uint8_t* src_data, int64_t src_stride, uint8_t* src_scales,
                                                  int64_t src_scales_stride, uint8_t* dst_data, int64_t dst_stride,
                                                  uint8_t* dst_scales, int64_t dst_scales_stride, int64_t num_src_rows,
                                                  const int64_t* slot_rows, int64_t seed, int64_t stream,
                                                  int64_t num_dst_rows, const int64_t* source_rows,
                                                  const float* weights, const Arrivals* arrivals, const int32_t* end) {
    const Rows src = {kSrc, src_data, src_stride, src_scales, src_scales_stride};
    const Destination dst = {{kDst, dst_data, dst_stride, dst_scales, dst_scales_stride}, nullptr};
    const int64_t num_row_items = num_src_rows * ROW_PARTS;
    for_each_item(num_row_items + (num_dst_rows + kWarp - 1) / kWarp, [&](int64_t item) {
        if (item >= num_row_items) {
            const int64_t num_wanted = end ? int64_t(*end) : num_dst_rows;
            return zero_rows(dst, (item - num_row_items) * kWarp, source_rows, num_wanted);
        }
#if AWAIT
        const int64_t row = arrivals->row_in_turn(item / ROW_PARTS);
        if (row < 0) return;
#else
        const int64_t row = item / ROW_PARTS;
#endif
        const Targets<NUM_TARGETS> targets(slot_rows + row * NUM_TARGETS);
        if (targets.none()) return;
        await_row(arrivals, row);
        expand_row(src, dst, row, int(item % ROW_PARTS), targets, weights, {uint64_t(seed), uint32_t(stream)});
    });
    end_kernel();
}
