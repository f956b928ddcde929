// AVX2 row loops.
#if defined(__x86_64__)
#include <algorithm>

#include "avx2_encode.h"
#include "columns_x86.h"

namespace fp4comm {
namespace avx2 {

// Hands the blocks of `columns` to sink(j, block), j counting from the first column.
template <class Source, class Sink>
FP4COMM_AVX2 inline void stream(ConstRow src, Columns columns, const Options& options, Sink&& sink) {
    for (int64_t j = 0; j < columns.count; j += kGroupSize) {
        const int64_t col = columns.begin + j;
        const int width = int(std::min<int64_t>(kGroupSize, columns.count - j));
        if (Source::regular(src, col / kGroupSize, width)) {
            for (int i = 0; i < width; i += kBlockSize) sink(j + i, Source::block(src, col + i, options));
        } else {
            alignas(32) float x[kGroupSize];
            scalar_row_ops().decode[int(Source::kKind)](src, {col, width}, options, x);
            const ConstRow row{reinterpret_cast<const uint8_t*>(x), nullptr};
            for (int i = 0; i < width; i += kBlockSize) sink(j + i, F32Source::block(row, i, options));
        }
    }
}

template <class Source>
FP4COMM_AVX2 void decode(ConstRow src, Columns columns, const Options& options, float* out) {
    stream<Source>(src, columns, options, StoreF32{out});
}

template <class Source>
FP4COMM_AVX2 void accumulate(ConstRow src, Columns columns, const Options& options, const float* weight, float* acc) {
    if (weight) {
        stream<Source>(src, columns, options, AddScaledTo{acc, *weight});
    } else {
        stream<Source>(src, columns, options, AddTo{acc});
    }
}

// The writers below read `columns` of src and write as many columns of dst from `begin` on.

template <class Source, Kind kOut>
FP4COMM_AVX2 inline void write_fp8(ConstRow src, Columns columns, const Options& options, int64_t begin, Row dst) {
    for (int64_t j = 0; j < columns.count; j += kGroupSize) {
        const Columns group{columns.begin + j, std::min<int64_t>(kGroupSize, columns.count - j)};
        uint8_t* codes = dst.data + begin + j;
        MaxMagnitude largest{_mm256_setzero_si256()};
        stream<Source>(src, group, options, largest);
        const uint32_t amax = max_u32(largest.amax);
        uint32_t byte = kE8M0One;
        if (amax >= kInfinityBits) {
            std::fill_n(codes, group.count, uint8_t(kE4M3NaN));
        } else {
            byte = fp8_scale_from_amax(amax);
            stream<Source>(src, group, options, StoreE4M3{codes, pow2(254 - byte)});
        }
        store_fp8_scale<kOut>(dst.scales, (begin + j) / kGroupSize, byte);
    }
}

template <class Source>
FP4COMM_AVX2 inline void write_mxfp4(ConstRow src, Columns columns, const EncodeContext& context, int64_t begin,
                                     Row dst) {
    for (int64_t j = 0; j < columns.count; j += kBlockSize) {
        const int64_t col = begin + j;
        dst.scales[col / kBlockSize] = encode_block<Source>(src, columns.begin + j, context, col, dst.data + col / 2);
    }
}

template <class Source, Kind kOut>
FP4COMM_AVX2 inline void write(ConstRow src, Columns columns, const EncodeContext& context, int64_t begin, Row dst) {
    const Options& options = context.options;
    if constexpr (kOut == Kind::kF32) {
        stream<Source>(src, columns, options, StoreCanonicalF32{reinterpret_cast<float*>(dst.data) + begin});
    } else if constexpr (kOut == Kind::kBF16) {
        stream<Source>(src, columns, options, StoreBF16{reinterpret_cast<uint16_t*>(dst.data) + begin});
    } else if constexpr (kOut == Kind::kF16) {
        stream<Source>(src, columns, options, StoreF16{reinterpret_cast<uint16_t*>(dst.data) + begin});
    } else if constexpr (kOut == Kind::kMXFP4) {
        write_mxfp4<Source>(src, columns, context, begin, dst);
    } else {
        write_fp8<Source, kOut>(src, columns, options, begin, dst);
    }
}

template <Kind kOut>
FP4COMM_AVX2 void encode(const float* x, Columns columns, const EncodeContext& context, Row dst) {
    const ConstRow src{reinterpret_cast<const uint8_t*>(x), nullptr};
    write<F32Source, kOut>(src, {0, columns.count}, context, columns.begin, dst);
}

template <class Source, Kind kOut>
FP4COMM_AVX2 void convert(ConstRow src, int64_t hidden, const EncodeContext& context, Row dst) {
    write<Source, kOut>(src, {0, hidden}, context, 0, dst);
}

// ---- between FP8 and MXFP4 without floats ----

constexpr int kNotExact = -1000;

// The byte of a scale whose products with E4M3 codes neither round nor overflow in fp32, else kNotExact.
template <Kind kIn>
inline int exact_scale_byte(ConstRow src, int64_t group) {
    const uint32_t bits = float_bits(load_fp8_scale<kIn>(src.scales, group));
    return is_normal_pow2(bits) && bits >> 23 <= 246 ? int(bits >> 23) : kNotExact;
}

// `group_byte`: exponent of the group's scale, or kNotExact to go through floats.
template <Kind kIn>
FP4COMM_AVX2 inline uint8_t fp8_block_to_mxfp4(ConstRow src, int64_t col, int group_byte, const Tables& t,
                                               const EncodeContext& context, uint8_t* packed) {
    const __m256i codes = load256(src.data + col);
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(kE4M3Magnitude));
    const uint32_t amax = max_u8(magnitude);
    if (amax == kE4M3NaN) {
        store128(packed, _mm_setzero_si128());
        return uint8_t(kE8M0NaN);
    }
    const Tables::BlockRule rule = t.block_rule[int(context.options.scale_mode)][amax];
    const int byte = amax == 0 && group_byte != kNotExact ? 0 : group_byte + rule.exponent;
    if (byte < 0) return encode_block<FP8Source<kIn>>(src, col, context, col, packed);
    const __m256i distance = _mm256_subs_epu8(magnitude, _mm256_set1_epi8(int8_t(rule.base)));
    const __m256i e2m1 = lookup48(t.e2m1_of_e4m3[rule.window], distance);
    store128(packed, pack_nibbles(_mm256_or_si256(e2m1, e2m1_sign_of_e4m3(codes))));
    return uint8_t(byte);
}

template <Kind kIn>
FP4COMM_AVX2 void fp8_to_mxfp4(ConstRow src, int64_t hidden, const EncodeContext& context, Row dst) {
    const Tables& t = tables();
    const bool plain = context.options.rounding == Rounding::kNearest && !context.options.hadamard;
    for (int64_t j = 0; j < hidden; j += kGroupSize) {
        const int group_byte = plain ? exact_scale_byte<kIn>(src, j / kGroupSize) : kNotExact;
        const int64_t end = std::min<int64_t>(j + kGroupSize, hidden);
        for (int64_t col = j; col < end; col += kBlockSize) {
            dst.scales[col / kBlockSize] =
                fp8_block_to_mxfp4<kIn>(src, col, group_byte, t, context, dst.data + col / 2);
        }
    }
}

template <Kind kOut>
FP4COMM_AVX2 void mxfp4_to_fp8(ConstRow src, int64_t hidden, const EncodeContext&, Row dst) {
    const Tables& t = tables();
    for (int64_t j = 0; j < hidden; j += kGroupSize) {
        const int num_blocks = int(std::min<int64_t>(kGroupSize, hidden - j)) / kBlockSize;
        const uint8_t* bytes = src.scales + j / kBlockSize;
        const uint8_t* packed = src.data + j / 2;
        SharedScale shared;
        for (int i = 0; i < num_blocks; ++i) shared.add(bytes[i], false);
        if (shared.max_byte == 0) {
            for (int i = 0; i < num_blocks; ++i) shared.add(bytes[i], mxfp4_block_nonzero(packed + 16 * i));
        }
        const uint32_t scale = shared.byte();
        for (int i = 0; i < num_blocks; ++i) {
            const __m128i nibbles = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + 16 * i));
            const __m256i table = broadcast128(t.e4m3_of_e2m1[e2m1_shift_index(bytes[i], scale)]);
            store256(dst.data + j + 32 * i, _mm256_shuffle_epi8(table, unpack_nibbles(nibbles)));
        }
        store_fp8_scale<kOut>(dst.scales, j / kGroupSize, scale);
    }
}

template <bool kIsBF16>
FP4COMM_AVX2 void mxfp4_to_half(ConstRow src, int64_t hidden, const EncodeContext& context, Row dst) {
    if (context.options.hadamard) {
        return convert<MXFP4Source, kIsBF16 ? Kind::kBF16 : Kind::kF16>(src, hidden, context, dst);
    }
    const auto& table = kIsBF16 ? tables().bf16_of_mxfp4 : tables().f16_of_mxfp4;
    for (int64_t col = 0; col < hidden; col += kBlockSize) {
        const Block16 v = lookup16(table[src.scales[col / kBlockSize]], src.data + col / 2);
        store256(dst.data + 2 * col, v.low);
        store256(dst.data + 2 * col + 32, v.high);
    }
}

FP4COMM_AVX2 void dot(const float* a, const float* b, int64_t count, float* lanes) {
    const Options options;
    const ConstRow row_a{reinterpret_cast<const uint8_t*>(a), nullptr};
    const ConstRow row_b{reinterpret_cast<const uint8_t*>(b), nullptr};
    BlockF32 sum = F32Source::block({reinterpret_cast<const uint8_t*>(lanes), nullptr}, 0, options);
    for (int64_t j = 0; j < count; j += kDotLanes) {
        const BlockF32 x = F32Source::block(row_a, j, options);
        const BlockF32 y = F32Source::block(row_b, j, options);
        for (int i = 0; i < 4; ++i) sum.part[i] = _mm256_add_ps(sum.part[i], _mm256_mul_ps(x.part[i], y.part[i]));
    }
    StoreF32{lanes}(0, sum);
}

template <class Source>
void set_source(RowOps& ops) {
    const int kind = int(Source::kKind);
    ops.decode[kind] = decode<Source>;
    ops.accumulate[kind] = accumulate<Source>;
    ConvertFn(&to)[kNumKinds] = ops.convert[kind];
    const auto set = [&](Kind out, ConvertFn fn) {
        if (!to[int(out)]) to[int(out)] = fn;  // copies and direct rules of the scalar table stay
    };
    set(Kind::kBF16, convert<Source, Kind::kBF16>);
    set(Kind::kF16, convert<Source, Kind::kF16>);
    set(Kind::kFP8, convert<Source, Kind::kFP8>);
    set(Kind::kFP8E8M0, convert<Source, Kind::kFP8E8M0>);
    set(Kind::kMXFP4, convert<Source, Kind::kMXFP4>);
}

RowOps make_row_ops() {
    RowOps ops = scalar_row_ops();
    ops.name = "avx2";
    set_source<F32Source>(ops);
    set_source<BF16Source>(ops);
    set_source<F16Source>(ops);
    set_source<FP8Source<Kind::kFP8>>(ops);
    set_source<FP8Source<Kind::kFP8E8M0>>(ops);
    set_source<MXFP4Source>(ops);
    const EncodeFn encoders[] = {encode<Kind::kF32>, encode<Kind::kBF16>,    encode<Kind::kF16>,
                                 encode<Kind::kFP8>, encode<Kind::kFP8E8M0>, encode<Kind::kMXFP4>};
    std::copy(std::begin(encoders), std::end(encoders), ops.encode);
    const auto convert = [&](Kind in, Kind out) -> ConvertFn& { return ops.convert[int(in)][int(out)]; };
    convert(Kind::kFP8, Kind::kMXFP4) = fp8_to_mxfp4<Kind::kFP8>;
    convert(Kind::kFP8E8M0, Kind::kMXFP4) = fp8_to_mxfp4<Kind::kFP8E8M0>;
    convert(Kind::kMXFP4, Kind::kFP8) = mxfp4_to_fp8<Kind::kFP8>;
    convert(Kind::kMXFP4, Kind::kFP8E8M0) = mxfp4_to_fp8<Kind::kFP8E8M0>;
    convert(Kind::kMXFP4, Kind::kBF16) = mxfp4_to_half<true>;
    convert(Kind::kMXFP4, Kind::kF16) = mxfp4_to_half<false>;
    ops.dot = dot;
    ops.mxfp4_tile_to_fp8 = mxfp4_tile_to_fp8;
    ops.fp8_tile_to_fp8 = fp8_tile_to_fp8;
    return ops;
}

}  // namespace avx2

const RowOps& avx2_row_ops() {
    static const RowOps ops = avx2::make_row_ops();
    return ops;
}

}  // namespace fp4comm
#endif
