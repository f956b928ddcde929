// Conversions of pieces of a row, one struct per pair of kinds, with the same four functions:
//   load           a lane's columns
//   convert        all lanes of the warp together
//   store          codes
//   store_scales   those of kSteps steps at once
// The macros HIDDEN, SRC_KIND, DST_KIND, SCALE_MODE, STOCHASTIC, HADAMARD say what is compiled; SRC_SCALE_WORDS is 1 if
// the four scale bytes of every MXFP4 group of 128 are an aligned word.
#pragma once

#include "e4m3_shift.cuh"
#include "lanes.cuh"

namespace fp4comm {

constexpr uint32_t kHidden = HIDDEN;
constexpr Kind kSrc = Kind(SRC_KIND);
constexpr Kind kDst = Kind(DST_KIND);
using M = Mode<ScaleMode(SCALE_MODE), STOCHASTIC != 0, HADAMARD != 0>;
constexpr bool kPlain = !M::kRandom && !M::kRotated;

__device__ inline int lane_of_warp() {
    return int(threadIdx.x) % kWarp;
}

// A row `step` steps further, which is known to the compiler.
template <Kind kKind, int N, typename T>
__device__ inline RowOf<T> skip_steps(RowOf<T> row, int step) {
    constexpr int kWidth = scale_width(kKind) > 0 ? scale_width(kKind) : kWarp * N;
    return {row.data + step * kWarp * N * bits_of(kKind) / 8,
            row.scales + step * (kWarp * N / kWidth) * int(bytes_per_scale(kKind))};
}

// The scale bytes of kSteps adjacent steps from column `first` on, of which every lane holds those of its columns, go
// out 32 at a time, one from each lane. kExact: none of the steps is beyond the end of the row.
template <Kind kKind, int N, int kSteps, bool kExact>
__device__ inline void store_scale_bytes(uint8_t* scales, uint32_t first, const Piece<kKind, N>* pieces) {
    constexpr int kPerStep = kWarp * N / scale_width(kKind);
    constexpr int kHolders = kWarp / kPerStep;  // lanes with the same scale
    constexpr int kAtOnce = kHolders < 4 ? kHolders : 4;
    constexpr int kNumScales = (int(kHidden) + scale_width(kKind) - 1) / scale_width(kKind);
    const int lane = lane_of_warp();
    const int first_scale = int(first / scale_width(kKind)) + lane;
    uint8_t* to = scales + first_scale * int(bytes_per_scale(kKind));
#pragma unroll
    for (int step = 0; step < kSteps; step += kAtOnce) {
        uint32_t bytes = pieces[step].scale;
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) bytes |= pieces[step + i < kSteps ? step + i : step].scale << 8 * i;
        const uint32_t holder = uint32_t(lane % kPerStep * kHolders);
        const uint32_t byte = __shfl_sync(kAllLanes, bytes, holder) >> lane / kPerStep % 4 * 8 & 0xffu;
        const int count = kAtOnce < kSteps - step ? kAtOnce : kSteps - step;
        if (lane >= count * kPerStep || (!kExact && first_scale + step * kPerStep >= kNumScales)) continue;
        if constexpr (kKind == Kind::kFP8) {
            store<float>(to + step * kPerStep * 4, e8m0_value(byte));
        } else {
            to[step * kPerStep] = uint8_t(byte);
        }
    }
}

// Loads and stores of N columns.
template <Kind kFrom, Kind kTo, int N>
struct Access {
    static constexpr int kLane = N;
    using In = Piece<kFrom, N>;
    using Out = Piece<kTo, N>;

    // `at` is the row from the lane's column in step 0 of a chunk on; `col` is the column in this step.
    static __device__ In load(ConstRow at, int step, uint32_t, bool inside) {
        return load_piece<kFrom, N>(skip_steps<kFrom, N>(at, step), inside);
    }

    static __device__ Out zero() {
        Out out = {};
        out.scale = zero_scale(kTo);
        return out;
    }

    static __device__ void store(Row at, int step, bool inside, const Out& out) {
        if (inside) store_words(skip_steps<kTo, N>(at, step).data, out.data);
    }

    template <int kSteps, bool kExact>
    static __device__ void store_scales(Row row, uint32_t first, const Out* out) {
        if constexpr (scale_width(kTo) > 0) store_scale_bytes<kTo, N, kSteps, kExact>(row.scales, first, out);
    }
};

// Any pair of kinds, by way of floats.
template <Kind kFrom, Kind kTo, int N, bool kCanonical = true>
__device__ inline Piece<kTo, N> convert_by_floats(const Piece<kFrom, N>& in, const Encoding& encoding, int64_t row,
                                                  uint32_t col) {
    float x[N];
    decode<kFrom, M::kRotated, N>(in, encoding, col, x);
    return encode<kTo, M, kCanonical, N>(x, encoding, row, col);
}

template <Kind kFrom, Kind kTo, int N>
FP4COMM_RARE Piece<kTo, N> convert_rare(Piece<kFrom, N> in) {
    return convert_by_floats<kFrom, kTo, N>(in, Encoding{}, 0, 0);
}

template <Kind kFrom, Kind kTo, bool kFast>
struct Converter : Access<kFrom, kTo, 8> {
    static __device__ Piece<kTo, 8> convert(const Piece<kFrom, 8>& in, const Encoding& encoding, int64_t row,
                                            uint32_t col) {
        // A BF16 NaN goes to float32 as it is.
        return convert_by_floats<kFrom, kTo, 8, kFrom != Kind::kBF16>(in, encoding, row, col);
    }
};

// encode(0 + weight * decode(x)): a sum of one term.
struct WeightedConverter : Access<kSrc, kDst, 8> {
    static __device__ Out convert(const In& in, float weight, const Encoding& encoding, int64_t row, uint32_t col) {
        float x[8];
        decode<kSrc, M::kRotated, 8>(in, encoding, col, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = add_rn(0.0f, mul_rn(weight, x[j]));
        return encode<kDst, M, true, 8>(x, encoding, row, col);
    }
};

// ---- same kind ----

template <Kind kKind, bool kFast>
struct Converter<kKind, kKind, kFast> : Access<kKind, kKind, 128 / bits_of(kKind)> {
    using Base = Access<kKind, kKind, 128 / bits_of(kKind)>;
    using typename Base::In;
    using typename Base::Out;

    static __device__ Out zero() {
        Out out = Base::zero();
        if (kKind == Kind::kFP8) out.scale = float_bits(1.0f);
        return out;
    }

    static __device__ Out convert(const In& in, const Encoding&, int64_t, uint32_t) { return in; }

    template <int kSteps, bool kExact>
    static __device__ void store_scales(Row row, uint32_t first, const Out* out) {
        if constexpr (scale_width(kKind) > 0) {
            const uint32_t col = first + lane_of_warp() * Base::kLane;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const uint32_t step_col = col + step * kWarp * Base::kLane;
                const uint32_t index = step_col / scale_width(kKind);
                if ((!kExact && step_col >= kHidden) || step_col % scale_width(kKind) != 0) continue;
                if constexpr (kKind == Kind::kFP8) {
                    fp4comm::store<uint32_t>(row.scales + index * 4, out[step].scale);
                } else {
                    row.scales[index] = uint8_t(out[step].scale);
                }
            }
        }
    }
};

// ---- FP8 to FP8: the codes stay where the scale is a power of two ----

template <bool kFast>
struct Converter<Kind::kFP8E8M0, Kind::kFP8, kFast> : Access<Kind::kFP8E8M0, Kind::kFP8, 16> {
    static __device__ Out convert(const In& in, const Encoding&, int64_t, uint32_t) { return {in.data, in.scale}; }
};

template <bool kFast>
struct Converter<Kind::kFP8, Kind::kFP8E8M0, kFast> : Access<Kind::kFP8, Kind::kFP8E8M0, 16> {
    static __device__ Out convert(const In& in, const Encoding&, int64_t, uint32_t) {
        Out out = {in.data, in.scale >> 23};
        const bool rare = !is_normal_pow2(in.scale);
        if (__any_sync(kAllLanes, rare)) {
            const Out other = convert_rare<Kind::kFP8, Kind::kFP8E8M0, 16>(in);
            if (rare) out = other;
        }
        return out;
    }
};

// ---- FP8 to MXFP4 ----

// By FP16 pairs, where E4M3 codes are exact. Rare: scales that are no power of two, or so far out that scale bytes or
// numbers leave their range; NaN.
template <Kind kFrom>
struct FP8ToMXFP4 : Access<kFrom, Kind::kMXFP4, 16> {
    using In = Piece<kFrom, 16>;
    using Out = Piece<Kind::kMXFP4, 16>;

    static __device__ In load(ConstRow at, int step, uint32_t col, bool inside) {
        In in = Access<kFrom, Kind::kMXFP4, 16>::load(at, step, col, inside);
        if (!inside) in.scale = kFrom == Kind::kFP8 ? float_bits(1.0f) : 127;  // an ordinary one: none would be rare
        return in;
    }

    static __device__ Out convert(const In& in, const Encoding&, int64_t, uint32_t) {
        const uint32_t group = kFrom == Kind::kFP8 ? in.scale >> 23 : in.scale;
        uint32_t pairs[8];
        uint32_t both = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            pairs[i] = f16x2_from_e4m3x2(i % 2 == 0 ? in.data.word[i / 2] : in.data.word[i / 2] >> 16);
            both = max_u16x2(both, pairs[i] & 0x7fff7fffu);
        }
        const uint32_t amax = max_over_lanes<2>(max(both & 0xffffu, both >> 16));
        // The block's scale is 2^(exponent - 17) times the group's; 6 <= exponent <= 24 unless all is zero.
        const uint32_t exponent = (amax + (scale_mode_increment(M::kScaleMode) >> 13)) >> 10;
        const float factor = float_from_bits((130 - exponent) << 23);  // 2^-14 over the scale
        const uint32_t factors = f16x2_from_floats(factor, factor);
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i] = mul_f16x2(pairs[i], factors);
        Out out;
        out.data.word[0] = e2m1x8_from_f16<M::kSaturate>(pairs);
        out.data.word[1] = e2m1x8_from_f16<M::kSaturate>(pairs + 4);
        out.scale = amax == 0 ? 0 : exponent + group - 17;
        const bool odd_scale = kFrom == Kind::kFP8 && (in.scale & 0x7fffffu) != 0;
        const bool rare = amax >= 0x7c00u || odd_scale || group - 12 > 246 - 12;
        if (__any_sync(kAllLanes, rare)) {
            const Out other = convert_rare<kFrom, Kind::kMXFP4, 16>(in);
            if (rare) out = other;
        }
        return out;
    }
};

template <>
struct Converter<Kind::kFP8, Kind::kMXFP4, true> : FP8ToMXFP4<Kind::kFP8> {};
template <>
struct Converter<Kind::kFP8E8M0, Kind::kMXFP4, true> : FP8ToMXFP4<Kind::kFP8E8M0> {};

// ---- BF16 to MXFP4 ----

// Rare: Inf, NaN, scales from 2^113.
template <>
struct Converter<Kind::kBF16, Kind::kMXFP4, true> : Access<Kind::kBF16, Kind::kMXFP4, 8> {
    static __device__ Out convert(const In& in, const Encoding&, int64_t, uint32_t) {
        uint32_t both = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) both = max_u16x2(both, in.data.word[i] & 0x7fff7fffu);
        const uint32_t amax = max_over_lanes<4>(max(both & 0xffffu, both >> 16));
        const uint32_t exponent = (amax + (scale_mode_increment(M::kScaleMode) >> 16)) >> 7;
        Out out;
        out.scale = exponent > 2 ? exponent - 2 : 0;
        const bool rare = out.scale > 239;
        const float factor = pow2(rare ? 1 : 240 - out.scale);  // 2^-14 over the scale
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = float_from_bits(in.data.word[i] << 16);
            const float high = float_from_bits(in.data.word[i] & 0xffff0000u);
            pairs[i] = f16x2_from_floats(mul_rn(low, factor), mul_rn(high, factor));
        }
        out.data.word[0] = e2m1x8_from_f16<M::kSaturate>(pairs);
        if (__any_sync(kAllLanes, rare)) {
            const Out other = convert_rare<Kind::kBF16, Kind::kMXFP4, 8>(in);
            if (rare) out = other;
        }
        return out;
    }
};

// ---- MXFP4 to BF16 ----

template <>
struct Converter<Kind::kMXFP4, Kind::kBF16, true> : Access<Kind::kMXFP4, Kind::kBF16, 8> {
    static __device__ Out convert(const In& in, const Encoding&, int64_t, uint32_t) {
        // Elsewhere numbers are not normal, or NaN.
        if (in.scale - 2 > 252 - 2) return convert_rare<Kind::kMXFP4, Kind::kBF16, 8>(in);
        const uint4 pairs = bf16x8_from_e2m1(in.data.word[0]);
        const uint32_t factors = (in.scale << 7) * 0x10001u;
        return {{mul_bf16x2(pairs.x, factors), mul_bf16x2(pairs.y, factors), mul_bf16x2(pairs.z, factors),
                 mul_bf16x2(pairs.w, factors)},
                0};
    }
};

// ---- MXFP4 to FP8 ----

struct MXFP4Group {
    uint2 codes;
    uint32_t scales;  // of the four blocks of the group; a block beyond the end of the row is one of NaN
};

// Shared scale byte, and the table of this lane's block under it.
struct SharedTable {
    uint32_t shared;
    uint2 table;
};

// What is rare for one group is looked at in all groups of the warp.
FP4COMM_RARE SharedTable shared_table_rare(MXFP4Group in, uint32_t block_byte) {
    const bool codes = ((in.codes.x | in.codes.y) & 0x77777777u) != 0;
    uint32_t nonzero = codes && block_byte != kE8M0NaN;
    nonzero = max_over_lanes<8>(nonzero);
    SharedScale scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) scale.add(in.scales >> 8 * i & 0xffu, nonzero != 0);
    return {scale.byte(), e4m3_table_any(block_byte, scale.byte())};
}

FP4COMM_RARE uint2 table_rare(uint32_t block_byte, uint32_t shared_byte) {
    return e4m3_table_any(block_byte, shared_byte);
}

template <Kind kTo>
struct MXFP4ToFP8 : Access<Kind::kMXFP4, kTo, 16> {
    using In = MXFP4Group;
    using Out = Piece<kTo, 16>;

    static __device__ In load(ConstRow at, int step, uint32_t col, bool inside) {
        if (!inside) return {make_uint2(0, 0), 0x7f7f7f7fu};  // ordinary scales: NaN would be rare
        In in = {make_uint2(0, 0), 0xffffffffu};
        at = skip_steps<Kind::kMXFP4, 16>(at, step);
        in.codes = fp4comm::load<uint2>(at.data);
        const int block = int(col / kBlockSize) % 4;
#if SRC_SCALE_WORDS
        in.scales = fp4comm::load<uint32_t>(at.scales - block);
#else
        const int num_blocks = int(kHidden / kBlockSize - col / kBlockSize) + block;  // of the group and those after it
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < num_blocks) in.scales ^= (at.scales[i - block] ^ 0xffu) << 8 * i;
        }
#endif
        return in;
    }

    static __device__ uint32_t max_byte(uint32_t bytes) {
        const uint32_t both = max_u16x2(bytes & 0x00ff00ffu, bytes >> 8 & 0x00ff00ffu);
        return max(both & 0xffffu, both >> 16);
    }

    static __device__ Out convert(const In& in, const Encoding&, int64_t, uint32_t) {
        const uint32_t block_byte = in.scales >> (lane_of_warp() / 2 % 4 * 8) & 0xffu;
        const uint32_t largest = max_byte(in.scales);
        uint32_t shared = largest > 7 ? largest - 6 : 1;
        uint2 codes = in.codes;
        uint2 table;
        if (__any_sync(kAllLanes, largest - 1 >= kE8M0NaN - 1)) {  // NaN, or nothing but the smallest scale
            const SharedTable both = shared_table_rare(in, block_byte);
            shared = both.shared;
            table = both.table;
            // NaN has no sign.
            if (block_byte == kE8M0NaN) codes = make_uint2(codes.x & 0x77777777u, codes.y & 0x77777777u);
        } else {
            const int shift = int(block_byte) - int(shared);
            table = shift >= kMinNormalShift ? e4m3_table(shift) : table_rare(block_byte, shared);
        }
        const uint2 low = e2m1_look_up(codes.x, table.x, table.y);
        const uint2 high = e2m1_look_up(codes.y, table.x, table.y);
        return {{low.x, low.y, high.x, high.y}, shared};
    }
};

template <bool kFast>
struct Converter<Kind::kMXFP4, Kind::kFP8, kFast> : MXFP4ToFP8<Kind::kFP8> {};
template <bool kFast>
struct Converter<Kind::kMXFP4, Kind::kFP8E8M0, kFast> : MXFP4ToFP8<Kind::kFP8E8M0> {};

// ---- to FP8 with a scale per row: that of its largest block or group ----

// Of groups with the scale 1 only those count that have numbers other than zero and NaN.
FP4COMM_RARE uint32_t largest_scale_of_numbers(ConstRow row) {
    uint32_t largest = 0;
    for (uint32_t col = 4 * lane_of_warp(); col < kHidden; col += kGroupSize) {
        const uint32_t byte = row.scales[col / kGroupSize];
        const bool counts = byte != kE8M0One || numbers_in(load<uint32_t>(row.data + col)) != 0;
        largest = max(largest, counts ? byte : 0u);
    }
    return largest;
}

// The exponent of that scale; all lanes of the warp together.
__device__ inline uint32_t row_byte_of(ConstRow row) {
    constexpr uint32_t kWidth = scale_width(kSrc) > 0 ? scale_width(kSrc) : 1;
    constexpr uint32_t kNumScales = (kHidden + kWidth - 1) / kWidth;
    uint32_t largest = 0;
#pragma unroll 8
    for (uint32_t i = lane_of_warp(); i < kNumScales; i += kWarp) {
        largest = max(largest, row.scales[i] == kE8M0NaN ? 0u : uint32_t(row.scales[i]));
    }
    largest = max_over_lanes<kWarp>(largest);
    if constexpr (kSrc == Kind::kMXFP4) return largest > 7 ? largest - 6 : 1;
    // That is the scale of groups of zeros and of NaN, too.
    if (largest == kE8M0One) largest = max_over_lanes<kWarp>(largest_scale_of_numbers(row));
    return max(largest, 1u);
}

template <Kind kFrom>
struct ToFP8Row : Access<kFrom, Kind::kFP8Row, 16> {
    using Out = Piece<Kind::kFP8Row, 16>;

    template <int kSteps, bool>
    static __device__ void store_scales(Row row, uint32_t first, const Out* out) {
        if (first == 0 && lane_of_warp() == 0) fp4comm::store<float>(row.scales, pow2(out[0].scale));
    }
};

template <bool kFast>
struct Converter<Kind::kMXFP4, Kind::kFP8Row, kFast> : ToFP8Row<Kind::kMXFP4> {
    using In = Piece<Kind::kMXFP4, 16>;

    static __device__ Out convert(const In& in, const Encoding& encoding, int64_t, uint32_t) {
        const int shift = int(in.scale) - int(encoding.row_byte);
        const bool is_normal = shift >= kMinNormalShift && shift <= kMaxE2M1Shift;
        const uint2 table = is_normal ? e4m3_table(shift) : table_rare(in.scale, encoding.row_byte);
        const uint32_t kept = in.scale == kE8M0NaN ? 0x77777777u : 0xffffffffu;  // NaN has no sign
        const uint2 low = e2m1_look_up(in.data.word[0] & kept, table.x, table.y);
        const uint2 high = e2m1_look_up(in.data.word[1] & kept, table.x, table.y);
        return {{low.x, low.y, high.x, high.y}, encoding.row_byte};
    }
};

template <bool kFast>
struct Converter<Kind::kFP8E8M0, Kind::kFP8Row, kFast> : ToFP8Row<Kind::kFP8E8M0> {
    using In = Piece<Kind::kFP8E8M0, 16>;

    static __device__ Out convert(const In& in, const Encoding& encoding, int64_t, uint32_t) {
        Out out = {in.data, encoding.row_byte};
        const int shift = int(in.scale) - int(encoding.row_byte);
        if (shift >= 0) return out;
        const uint32_t powers = powers_of(shift < kMinE4M3Shift ? kMinE4M3Shift : shift);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const uint32_t codes = in.data.word[w];
            out.data.word[w] = nans_in(codes) ? scale_codes_with_nan(codes, powers) : scale_codes(codes, powers);
        }
        return out;
    }
};

__device__ inline Encoding encoding_of_row(Encoding encoding, ConstRow row) {
    if constexpr (kDst == Kind::kFP8Row) encoding.row_byte = row_byte_of(row);
    return encoding;
}

}  // namespace fp4comm
