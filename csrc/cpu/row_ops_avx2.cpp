// AVX2 row loops.
#if defined(__x86_64__)
#include <algorithm>

#include "avx2_sinks.h"
#include "avx2_sources.h"
#include "columns_x86.h"
#include "mxfp4_x86.h"

namespace fp4comm {
namespace avx2 {
namespace {

constexpr int64_t kChunk = 2048;  // columns that wait as 16 bits each, 4 KB

ConstRow row_of(const void* x) {
    return {static_cast<const uint8_t*>(x), nullptr};
}

// Hands the blocks of `columns` to sink(j, block), j counting from the first column.
template <class Source, class Sink>
FP4COMM_AVX2 inline void stream(ConstRow src, Columns columns, const Options& options, const Sink& sink) {
    for (int64_t j = 0; j < columns.count; j += kGroupSize) {
        const Columns group{columns.begin + j, std::min<int64_t>(kGroupSize, columns.count - j)};
        const Source source(src, group, options);
        if (!source.regular()) {
            alignas(32) float x[kGroupSize];
            scalar_row_ops().decode[int(Source::kKind)](src, group, options, x);
            const F32Source decoded(row_of(x), group, options);
            for (int64_t i = 0; i < group.count; i += kBlockSize) sink(j + i, decoded.floats(i));
            continue;
        }
        if constexpr (Source::kMaybeBF16) {
            if (source.is_bf16()) {
                for (int64_t i = 0; i < group.count; i += kBlockSize) {
                    if constexpr (Sink::kTakesBF16) {
                        sink(j + i, source.bf16(group.begin + i));
                    } else {
                        sink(j + i, widen_bf16(source.bf16(group.begin + i)));
                    }
                }
                continue;
            }
        }
        for (int64_t i = 0; i < group.count; i += kBlockSize) sink(j + i, source.floats(group.begin + i));
    }
}

template <class Source>
FP4COMM_AVX2 void decode(ConstRow src, Columns columns, const Options& options, float* out) {
    stream<Source>(src, columns, options, StoreF32{out});
}

template <class Source>
FP4COMM_AVX2 void accumulate(ConstRow src, Columns columns, const Options& options, const float* weight, float* acc) {
    if (weight) {
        stream<Source>(src, columns, options, AddScaledTo{acc, _mm256_set1_ps(*weight)});
    } else {
        stream<Source>(src, columns, options, AddTo{acc});
    }
}

// ---- encoders. They read `columns` of src and write as many columns of dst from `begin` on. ----

// The definition itself, for groups with something rare in them: bit g of `groups` is set.
void redo(uint64_t groups, Kind in, Kind out, ConstRow src, Columns columns, const EncodeContext& context,
          int64_t begin, Row dst) {
    const RowOps& scalar = scalar_row_ops();
    for (; groups != 0; groups &= groups - 1) {
        const int64_t j = __builtin_ctzll(groups) * kGroupSize;
        const int64_t width = std::min<int64_t>(kGroupSize, columns.count - j);
        float x[kGroupSize];
        scalar.decode[int(in)](src, {columns.begin + j, width}, context.options, x);
        scalar.encode[int(out)](x, {begin + j, width}, context, dst);
    }
}

// run(x, first group, number of groups, packed, scales) over `count` columns; a short last group is filled with zeros.
template <typename T, class Run>
uint64_t run_groups(const T* x, int64_t count, uint8_t* packed, uint8_t* scales, Run run) {
    const int num_whole = int(count / kGroupSize);
    const int64_t rest = count % kGroupSize;
    uint64_t left = num_whole > 0 ? run(x, 0, num_whole, packed, scales) : 0;
    if (rest > 0) {
        alignas(32) T padded[kGroupSize] = {};
        uint8_t padded_packed[kGroupSize / 2];
        uint8_t padded_scales[kGroupSize / kBlockSize];
        std::copy_n(x + num_whole * kGroupSize, rest, padded);
        left |= run(padded, num_whole, 1, padded_packed, padded_scales) << num_whole;
        std::copy_n(padded_packed, rest / 2, packed + num_whole * kGroupSize / 2);
        std::copy_n(padded_scales, rest / kBlockSize, scales + num_whole * kGroupSize / kBlockSize);
    }
    return left;
}

template <class Source>
FP4COMM_AVX2 void write_mxfp4(ConstRow src, Columns columns, const EncodeContext& context, int64_t begin, Row dst) {
    const Options& options = context.options;
    const uint32_t* signs =
        options.hadamard ? hadamard_signs_from(options.seed, begin, begin + columns.count) : nullptr;
    if (options.rounding == Rounding::kStochastic) {
        return stream<Source>(src, columns, options, StoreStochastic{context, begin, dst, signs});
    }
    alignas(32) uint16_t buffer[kChunk];
    for (int64_t j = 0; j < columns.count; j += kChunk) {
        const Columns chunk{columns.begin + j, std::min(kChunk, columns.count - j)};
        const int64_t col = begin + j;
        const uint16_t* x = buffer;
        if (signs) {
            stream<Source>(src, chunk, options, StoreRotatedSticky{buffer, signs + j / kBlockSize});
        } else if (Source::kKind == Kind::kBF16) {
            x = reinterpret_cast<const uint16_t*>(src.data) + chunk.begin;
        } else {
            stream<Source>(src, chunk, options, StoreSticky{buffer});
        }
        const auto run = [&](const uint16_t* from, int, int num_groups, uint8_t* packed, uint8_t* scales) {
            return context.ops.bf16_to_mxfp4(from, num_groups, options.scale_mode, packed, scales);
        };
        const uint64_t left = run_groups(x, chunk.count, dst.data + col / 2, dst.scales + col / kBlockSize, run);
        redo(left, Source::kKind, Kind::kMXFP4, src, chunk, context, col, dst);
    }
}

// Nearest E4M3 codes of a group given as for StoreSticky. Returns the scale byte; -1, with nothing written, where
// floats that are not normal become more than zero, or the scale's inverse / 256 is not normal.
FP4COMM_AVX2 inline int encode_e4m3(const uint16_t* x, int count, uint8_t* codes) {
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    __m256i largest = _mm256_setzero_si256();
    for (int j = 0; j < count; j += 16) {
        largest = _mm256_max_epu16(largest, _mm256_and_si256(load256(x + j), mask));
    }
    const uint32_t amax = max_u16(largest) << 16;
    if (amax >= kInfinityBits) {
        std::fill_n(codes, count, uint8_t(kE4M3NaN));
        return int(kE8M0One);
    }
    const uint32_t byte = fp8_scale_from_amax(amax);
    if (byte < 11 || byte > 245) return -1;
    // An FP16 2^-8 times the number has its E4M3 exponent, down to the subnormals. Rounding up to FP16 keeps what lies
    // beside a tie beside it: of eight bits at most those are lost that make the difference to the tie at half of the
    // smallest code. The rest is rounding a 15-bit integer to 8 bits.
    const __m256 factor = _mm256_set1_ps(pow2(254 - byte - 8));
    const __m256i zero = _mm256_setzero_si256();
    const auto nearest16 = [&](__m256i v) FP4COMM_AVX2 {
        const __m256i magnitude = _mm256_and_si256(v, mask);
        const __m256 low = _mm256_mul_ps(floats(_mm256_unpacklo_epi16(zero, magnitude)), factor);
        const __m256 high = _mm256_mul_ps(floats(_mm256_unpackhi_epi16(zero, magnitude)), factor);
        const __m256i f16 = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(low, _MM_FROUND_TO_POS_INF)),
                                                    _mm256_cvtps_ph(high, _MM_FROUND_TO_POS_INF), 1);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(f16, 7), _mm256_set1_epi16(1));
        return _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(f16, _mm256_set1_epi16(63)), odd), 7);
    };
    for (int j = 0; j < count; j += 32) {
        const __m256i a = load256(x + j);
        const __m256i b = load256(x + j + 16);
        // Each 128-bit half holds two quarters of a and two of b.
        const __m256i magnitude = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(nearest16(a), nearest16(b)),
                                                              _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        const __m256i sign = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8);
        store256(codes + j, _mm256_or_si256(magnitude, _mm256_and_si256(sign, _mm256_set1_epi8(int8_t(0x80)))));
    }
    return int(byte);
}

template <class Source, Kind kOut>
FP4COMM_AVX2 void write_fp8(ConstRow src, Columns columns, const EncodeContext& context, int64_t begin, Row dst) {
    alignas(32) uint16_t x[kGroupSize];
    for (int64_t j = 0; j < columns.count; j += kGroupSize) {
        const Columns group{columns.begin + j, std::min<int64_t>(kGroupSize, columns.count - j)};
        stream<Source>(src, group, context.options, StoreSticky{x});
        const int byte = encode_e4m3(x, int(group.count), dst.data + begin + j);
        if (byte < 0) {
            redo(1, Source::kKind, kOut, src, group, context, begin + j, dst);
        } else {
            store_fp8_scale<kOut>(dst.scales, (begin + j) / kGroupSize, uint32_t(byte));
        }
    }
}

template <class Source, Kind kOut>
FP4COMM_AVX2 void write(ConstRow src, Columns columns, const EncodeContext& context, int64_t begin, Row dst) {
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
        write_fp8<Source, kOut>(src, columns, context, begin, dst);
    }
}

template <Kind kOut>
void encode(const float* x, Columns columns, const EncodeContext& context, Row dst) {
    write<F32Source, kOut>(row_of(x), {0, columns.count}, context, columns.begin, dst);
}

template <class Source, Kind kOut>
void convert(ConstRow src, int64_t hidden, const EncodeContext& context, Row dst) {
    write<Source, kOut>(src, {0, hidden}, context, 0, dst);
}

// ---- between FP8 and MXFP4 without floats ----

template <Kind kIn>
void fp8_to_mxfp4(ConstRow src, int64_t hidden, const EncodeContext& context, Row dst) {
    const Options& options = context.options;
    if (options.rounding == Rounding::kStochastic || options.hadamard) {
        return write_mxfp4<FP8Source<kIn>>(src, {0, hidden}, context, 0, dst);
    }
    constexpr int64_t kMaxColumns = 64 * kGroupSize;
    for (int64_t col = 0; col < hidden; col += kMaxColumns) {
        const Columns chunk{col, std::min(kMaxColumns, hidden - col)};
        uint8_t bytes[64];
        for (int64_t g = 0; g < ceil_div(chunk.count, kGroupSize); ++g) {
            const uint32_t bits = float_bits(load_fp8_scale<kIn>(src.scales, col / kGroupSize + g));
            bytes[g] = is_normal_pow2(bits) ? uint8_t(bits >> 23) : 0;
        }
        const auto run = [&](const uint8_t* from, int first, int num_groups, uint8_t* packed, uint8_t* scales) {
            return context.ops.e4m3_to_mxfp4(from, bytes + first, num_groups, options.scale_mode, packed, scales);
        };
        uint64_t left = run_groups(src.data + col, chunk.count, dst.data + col / 2, dst.scales + col / kBlockSize, run);
        while (left != 0) {  // neighbours together: with scales of another kind that is all of them
            const int first = __builtin_ctzll(left);
            const uint64_t others = ~(left >> first);
            const int num_groups = others == 0 ? 64 : __builtin_ctzll(others);
            const int64_t begin = col + first * kGroupSize;
            const Columns groups{begin, std::min<int64_t>(num_groups * kGroupSize, hidden - begin)};
            write_mxfp4<FP8Source<kIn>>(src, groups, context, begin, dst);
            left = first + num_groups < 64 ? left >> (first + num_groups) << (first + num_groups) : 0;
        }
    }
}

// Groups whose blocks all have byte 0 (or are NaN) have scale 1 if they hold nothing but zeros.
void mark_zero_groups(const uint8_t* packed, const uint8_t* bytes, int num_blocks, uint8_t* shared) {
    for (int first = 0; first < num_blocks; first += 4) {
        SharedScale scale;
        for (int i = first; i < std::min(first + 4, num_blocks); ++i) {
            scale.add(bytes[i], mxfp4_block_nonzero(packed + i * (kBlockSize / 2)));
        }
        shared[first] = uint8_t(scale.byte());
    }
}

// Eight groups at a time; their four scale bytes share 32 bits.
template <Kind kOut>
FP4COMM_AVX2 void mxfp4_to_fp8(ConstRow src, int64_t hidden, const EncodeContext&, Row dst) {
    const Tables& t = tables();
    const __m256i one = _mm256_set1_epi8(1);
    const __m256i first_of_4 = broadcast128_of(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    const int64_t num_blocks = hidden / kBlockSize;
    for (int64_t b = 0; b < num_blocks; b += 32) {
        const int count = int(std::min<int64_t>(32, num_blocks - b));
        alignas(32) uint8_t bytes[32] = {};
        alignas(32) uint8_t shared[32];
        alignas(32) uint8_t index[32];
        std::copy_n(src.scales + b, count, bytes);
        __m256i largest = _mm256_add_epi8(load256(bytes), one);  // NaN wraps to 0
        largest = _mm256_max_epu8(largest, _mm256_srli_epi32(largest, 16));
        largest = _mm256_max_epu8(largest, _mm256_srli_epi32(largest, 8));
        largest = _mm256_shuffle_epi8(largest, first_of_4);
        const __m256i scale = _mm256_max_epu8(_mm256_subs_epu8(largest, _mm256_set1_epi8(7)), one);
        store256(shared, scale);
        store256(index, e2m1_shift_indices(load256(bytes), scale));
        const uint8_t* packed = src.data + b * (kBlockSize / 2);
        uint8_t* codes = dst.data + b * kBlockSize;
        for (int i = 0; i < count; ++i) {
            const __m256i table = broadcast128(t.e4m3_of_e2m1[index[i]]);
            store256(codes + 32 * i, _mm256_shuffle_epi8(table, unpack_nibbles(load128(packed + 16 * i))));
        }
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(largest, one), one))) {
            mark_zero_groups(packed, bytes, count, shared);
        }
        for (int i = 0; i < count; i += 4) store_fp8_scale<kOut>(dst.scales, (b + i) / 4, shared[i]);
    }
}

FP4COMM_AVX2 void dot(const float* a, const float* b, int64_t count, float* lanes) {
    __m256 sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = _mm256_loadu_ps(lanes + 8 * i);
    for (int64_t j = 0; j < count; j += kDotLanes) {
        for (int i = 0; i < 4; ++i) {
            const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(a + j + 8 * i), _mm256_loadu_ps(b + j + 8 * i));
            sum[i] = _mm256_add_ps(sum[i], product);
        }
    }
    for (int i = 0; i < 4; ++i) _mm256_storeu_ps(lanes + 8 * i, sum[i]);
}

// Copies and direct rules that the table has already stay.
template <class Source>
void set_source(RowOps& ops) {
    const int kind = int(Source::kKind);
    ops.decode[kind] = decode<Source>;
    ops.accumulate[kind] = accumulate<Source>;
    const ConvertFn to[] = {nullptr,
                            convert<Source, Kind::kBF16>,
                            convert<Source, Kind::kF16>,
                            convert<Source, Kind::kFP8>,
                            convert<Source, Kind::kFP8E8M0>,
                            convert<Source, Kind::kMXFP4>};
    for (int out = 0; out < kNumKinds; ++out) {
        if (!ops.convert[kind][out]) ops.convert[kind][out] = to[out];
    }
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
    ops.dot = dot;
    ops.mxfp4_tile_to_fp8 = mxfp4_tile_to_fp8;
    ops.fp8_tile_to_fp8 = fp8_tile_to_fp8;
    ops.bf16_to_mxfp4 = bf16_to_mxfp4;
    ops.e4m3_to_mxfp4 = e4m3_to_mxfp4;
    return ops;
}

}  // namespace
}  // namespace avx2

const RowOps& avx2_row_ops() {
    static const RowOps ops = avx2::make_row_ops();
    return ops;
}

}  // namespace fp4comm
#endif
