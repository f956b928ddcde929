// Plain loops over the definitions in fp4comm/*.h.
#include <algorithm>

#include "fp4comm/half.h"
#include "memory.h"
#include "row_ops.h"

namespace fp4comm {
namespace {

// ---- floats ----

template <typename T, float (*kValue)(T)>
void decode_float(ConstRow src, Columns columns, const Options&, float* out) {
    for (int64_t j = 0; j < columns.count; ++j) out[j] = kValue(load<T>(src.data, columns.begin + j));
}

template <typename T, T (*kRound)(float)>
void encode_float(const float* x, Columns columns, const EncodeContext&, Row dst) {
    for (int64_t j = 0; j < columns.count; ++j) store<T>(dst.data, columns.begin + j, kRound(x[j]));
}

float identity(float x) {
    return x;
}

// ---- FP8 ----

template <typename Fn>
void for_each_group(Columns columns, Fn fn) {
    for (int64_t j = 0; j < columns.count; j += kGroupSize) {
        fn(j, (columns.begin + j) / kGroupSize, int(std::min<int64_t>(kGroupSize, columns.count - j)));
    }
}

template <Kind kKind>
void decode_fp8(ConstRow src, Columns columns, const Options&, float* out) {
    for_each_group(columns, [&](int64_t j, int64_t group, int width) {
        const float scale = load_fp8_scale<kKind>(src.scales, group);
        for (int i = 0; i < width; ++i) out[j + i] = fp8_value(src.data[columns.begin + j + i], scale);
    });
}

template <Kind kKind>
void encode_fp8(const float* x, Columns columns, const EncodeContext&, Row dst) {
    for_each_group(columns, [&](int64_t j, int64_t group, int width) {
        store_fp8_scale<kKind>(dst.scales, group, encode_fp8_group(x + j, width, dst.data + columns.begin + j));
    });
}

void fp8_to_fp8_e8m0(ConstRow src, int64_t hidden, const EncodeContext& context, Row dst) {
    for_each_group({0, hidden}, [&](int64_t j, int64_t group, int width) {
        const uint32_t bits = load<uint32_t>(src.scales, group);
        if (is_normal_pow2(bits)) {
            std::copy_n(src.data + j, width, dst.data + j);
            dst.scales[group] = uint8_t(bits >> 23);
            return;
        }
        float x[kGroupSize];
        decode_fp8<Kind::kFP8>(src, {j, width}, context.options, x);
        encode_fp8<Kind::kFP8E8M0>(x, {j, width}, context, dst);
    });
}

void fp8_e8m0_to_fp8(ConstRow src, int64_t hidden, const EncodeContext&, Row dst) {
    std::copy_n(src.data, hidden, dst.data);
    for (int64_t g = 0; g < ceil_div(hidden, kGroupSize); ++g) {
        store<float>(dst.scales, g, e8m0_value(src.scales[g]));
    }
}

// ---- MXFP4 ----

void decode_mxfp4(ConstRow src, Columns columns, const Options& options, float* out) {
    for (int64_t j = 0; j < columns.count; j += kBlockSize) {
        const int64_t col = columns.begin + j;
        decode_mxfp4_block(src.data + col / 2, src.scales[col / kBlockSize], options, col, out + j);
    }
}

void encode_mxfp4(const float* x, Columns columns, const EncodeContext& context, Row dst) {
    for (int64_t j = 0; j < columns.count; j += kBlockSize) {
        const int64_t col = columns.begin + j;
        dst.scales[col / kBlockSize] = encode_mxfp4_block(x + j, context.options, context.row, col, dst.data + col / 2);
    }
}

template <Kind kOut>
void mxfp4_to_fp8(ConstRow src, int64_t hidden, const EncodeContext&, Row dst) {
    for_each_group({0, hidden}, [&](int64_t j, int64_t group, int width) {
        const uint8_t* packed = src.data + j / 2;
        const uint8_t* bytes = src.scales + j / kBlockSize;
        SharedScale shared;
        for (int i = 0; i < width / kBlockSize; ++i) {
            shared.add(bytes[i], mxfp4_block_nonzero(packed + i * kBlockSize / 2));
        }
        const uint32_t scale = shared.byte();
        for (int i = 0; i < width; ++i) {
            dst.data[j + i] = mxfp4_to_e4m3(e2m1_unpack(packed, i), bytes[i / kBlockSize], scale);
        }
        store_fp8_scale<kOut>(dst.scales, group, scale);
    });
}

// ---- sums and tiles ----

void dot(const float* a, const float* b, int64_t count, float* lanes) {
    for (int64_t j = 0; j < count; ++j) lanes[j % kDotLanes] += a[j] * b[j];
}

void mxfp4_tile_to_fp8(const TileRows& tile, Columns columns, uint8_t* out, int64_t stride, uint8_t* shared) {
    for (int64_t c = 0; c < columns.count; c += kBlockSize) {
        const int64_t block = (columns.begin + c) / kBlockSize;
        SharedScale scale;
        for (int r = 0; r < tile.count; ++r) {
            const ConstRow row = tile.row[r];
            scale.add(row.scales[block], mxfp4_block_nonzero(row.data + block * kBlockSize / 2));
        }
        for (int r = 0; r < tile.count; ++r) {
            const ConstRow row = tile.row[r];
            for (int i = 0; i < kBlockSize; ++i) {
                out[(c + i) * stride + r] =
                    mxfp4_to_e4m3(e2m1_unpack(row.data, block * kBlockSize + i), row.scales[block], scale.byte());
            }
        }
        shared[c / kBlockSize] = uint8_t(scale.byte());
    }
}

uint8_t fp8_tile_to_fp8(const TileRows& tile, const uint8_t* exponents, Columns columns, uint8_t* out, int64_t stride) {
    const int byte = fp8_tile_byte(tile, exponents, columns);
    for (int r = 0; r < tile.count; ++r) {
        // Rows above that hold only zeros and NaN, which no shift changes.
        const int shift = std::min(int(exponents[r]) - byte, 0);
        for (int64_t c = 0; c < columns.count; ++c) {
            out[c * stride + r] = e4m3_shift(tile.row[r].data[columns.begin + c], shift);
        }
    }
    return uint8_t(byte);
}

template <Kind kOut>
void copy_row(ConstRow src, int64_t hidden, const EncodeContext&, Row dst) {
    std::copy_n(src.data, data_bytes(kOut, hidden), dst.data);
    std::copy_n(src.scales, scale_bytes(kOut, hidden), dst.scales);
}

RowOps make_scalar_row_ops() {
    RowOps ops{};
    ops.name = "scalar";
    const DecodeFn decode[] = {decode_float<float, identity>,     decode_float<uint16_t, bf16_value>,
                               decode_float<uint16_t, f16_value>, decode_fp8<Kind::kFP8>,
                               decode_fp8<Kind::kFP8E8M0>,        decode_mxfp4};
    const EncodeFn encode[] = {encode_float<float, canonical>,      encode_float<uint16_t, bf16_nearest>,
                               encode_float<uint16_t, f16_nearest>, encode_fp8<Kind::kFP8>,
                               encode_fp8<Kind::kFP8E8M0>,          encode_mxfp4};
    const ConvertFn copy[] = {copy_row<Kind::kF32>, copy_row<Kind::kBF16>,    copy_row<Kind::kF16>,
                              copy_row<Kind::kFP8>, copy_row<Kind::kFP8E8M0>, copy_row<Kind::kMXFP4>};
    for (int kind = 0; kind < kNumKinds; ++kind) {
        ops.decode[kind] = decode[kind];
        ops.encode[kind] = encode[kind];
        ops.convert[kind][kind] = copy[kind];
    }
    const auto convert = [&](Kind in, Kind out) -> ConvertFn& { return ops.convert[int(in)][int(out)]; };
    convert(Kind::kFP8, Kind::kFP8E8M0) = fp8_to_fp8_e8m0;
    convert(Kind::kFP8E8M0, Kind::kFP8) = fp8_e8m0_to_fp8;
    convert(Kind::kMXFP4, Kind::kFP8) = mxfp4_to_fp8<Kind::kFP8>;
    convert(Kind::kMXFP4, Kind::kFP8E8M0) = mxfp4_to_fp8<Kind::kFP8E8M0>;
    ops.dot = dot;
    ops.mxfp4_tile_to_fp8 = mxfp4_tile_to_fp8;
    ops.fp8_tile_to_fp8 = fp8_tile_to_fp8;
    return ops;
}

}  // namespace

int fp8_tile_byte(const TileRows& tile, const uint8_t* exponents, Columns columns) {
    const auto counts = [](uint8_t code) { return uint8_t((code & kE4M3Magnitude) - 1) < kE4M3Max; };
    int largest = 0;
    for (int r = 0; r < tile.count; ++r) {
        if (exponents[r] <= largest) continue;
        const uint8_t* first = tile.row[r].data + columns.begin;
        if (std::any_of(first, first + columns.count, counts)) largest = exponents[r];
    }
    return largest == 0 ? int(kE8M0One) : largest;
}

const RowOps& scalar_row_ops() {
    static const RowOps ops = make_scalar_row_ops();
    return ops;
}

}  // namespace fp4comm
