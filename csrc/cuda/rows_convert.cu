// dst[dst_row[i]] = convert(src[src_row[i]]), as in csrc/cpu/codec.h. Null maps are the identity. Rows of -1 become
// zeros in our own memory, and are left out in that of peers. AWAIT: src_row is null. num_turns: num_rows, or with
// PEERS or AWAIT as many as give each rank its turns.
#include "rows.cuh"

using namespace fp4comm;

extern "C" __global__ void ROW_BOUNDS convert_rows(uint8_t* src_data, int64_t src_stride, uint8_t* src_scales,
                                                   int64_t src_scales_stride, uint8_t* dst_data, int64_t dst_stride,
                                                   uint8_t* dst_scales, int64_t dst_scales_stride, int64_t num_rows,
                                                   const int64_t* src_row, const int64_t* dst_row, int64_t seed,
                                                   int64_t stream, const int64_t* peers, const Arrivals* arrivals,
                                                   int64_t num_turns) {
    using C = RowConverter;
    constexpr int kSteps = Parts<C>::kUnroll;
    const Rows src = {kSrc, src_data, src_stride, src_scales, src_scales_stride};
    const Destination dst = {{kDst, dst_data, dst_stride, dst_scales, dst_scales_stride}, peers};
    const Encoding encoding = {uint64_t(seed), uint32_t(stream)};
    if (dst.is_lost()) return;
    for_each_item(num_turns * ROW_PARTS, [&](int64_t item) {
#if AWAIT
        const int64_t i = arrivals->row_in_turn(item / ROW_PARTS);
#else
        const int64_t i = dst.row_in_turn(item / ROW_PARTS, num_rows);
#endif
        if ((PEERS || AWAIT) && i < 0) return;
        const int part = int(item % ROW_PARTS);
        const int64_t row = src_row ? src_row[i] : i;
        if (PEERS && row < 0) return;
        await_row(arrivals, row);
        const Row to = dst.row(dst_row ? dst_row[i] : i);
        if (row < 0) return zero_part<C>(to, part);
        for_each_chunk<C>(part, [&](uint32_t first) {
            C::In in[kSteps];
            C::Out out[kSteps];
            load_chunk<C, kSteps>(src.const_row(row), first, in);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                out[step] = C::convert(in[step], encoding, row, column<C>(first, step));
            }
            store_chunk<C, kSteps>(to, first, out);
        });
    });
    end_kernel();
}
