// dst[dst_row[i]] = convert(src[src_row[i]]), as in csrc/cpu/codec.h. Null maps are the identity.
#include "rows.cuh"

using namespace fp4comm;

extern "C" __global__ void __launch_bounds__(kThreads)
    convert_rows(uint8_t* src_data, int64_t src_stride, uint8_t* src_scales, int64_t src_scales_stride,
                 uint8_t* dst_data, int64_t dst_stride, uint8_t* dst_scales, int64_t dst_scales_stride,
                 int64_t num_rows, const int64_t* src_row, const int64_t* dst_row, int64_t seed, int64_t stream) {
    const Rows src = {kSrc, src_data, src_stride, src_scales, src_scales_stride};
    const Rows dst = {kDst, dst_data, dst_stride, dst_scales, dst_scales_stride};
    const int64_t i = item_of_warp() / ROW_PARTS;
    const int part = int(item_of_warp() % ROW_PARTS);
    if (i >= num_rows) return;
    const int64_t row = src_row ? src_row[i] : i;
    const Row to = dst.row(dst_row ? dst_row[i] : i);
    if (row < 0) return zero_part<RowConverter>(to, part);

    using C = RowConverter;
    constexpr int kSteps = Parts<C>::kUnroll;
    const Encoding encoding = {uint64_t(seed), uint32_t(stream)};
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
}
