// Rows as a warp sees them: in a step a lane owns N adjacent columns, the next lane the next N. The lanes of a block or
// group agree on its scale by shuffles, so all lanes of the warp take part, those beyond the end of the row with zeros.
#pragma once

#include "device.cuh"
#include "e2m1.cuh"
#include "fp4comm/block.h"
#include "fp4comm/half.h"
#include "fp4comm/wire.h"

namespace fp4comm {

// What the numbers depend on beside the elements.
struct Encoding {
    uint64_t seed;
    uint32_t stream;
    uint32_t row_byte = 0;  // kFP8Row: exponent of the row's scale
};

constexpr int bits_of(Kind kind) {
    return kind == Kind::kF32 ? 32 : kind == Kind::kBF16 || kind == Kind::kF16 ? 16 : kind == Kind::kMXFP4 ? 4 : 8;
}

constexpr bool is_fp8(Kind kind) {
    return kind == Kind::kFP8 || kind == Kind::kFP8E8M0;
}

// Elements that share a scale; 0 for floats.
constexpr int scale_width(Kind kind) {
    return is_fp8(kind) ? kGroupSize : kind == Kind::kMXFP4 ? kBlockSize : 0;
}

template <int kWords>
struct Words {
    uint32_t word[kWords];
};

// What a lane holds of a row: the bytes of its N elements, and the scale of its block or group. The scale is a byte
// (kinds with E8M0 scales, and whatever is encoded), or the bits of a float (FP8 as read).
template <Kind kKind, int N>
struct Piece {
    static constexpr int kWords = bits_of(kKind) * N / 32;
    Words<kWords> data;
    uint32_t scale;
};

template <int kWords>
__device__ inline Words<kWords> load_words(const uint8_t* address) {
    Words<kWords> words;
    if constexpr (kWords == 1) {
        words.word[0] = load<uint32_t>(address);
    } else if constexpr (kWords == 2) {
        const uint2 pair = load<uint2>(address);
        words.word[0] = pair.x;
        words.word[1] = pair.y;
    } else {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const uint4 four = load<uint4>(address + i * 4);
            words.word[i] = four.x;
            words.word[i + 1] = four.y;
            words.word[i + 2] = four.z;
            words.word[i + 3] = four.w;
        }
    }
    return words;
}

template <int kWords>
__device__ inline void store_words(uint8_t* address, const Words<kWords>& words) {
    if constexpr (kWords == 1) {
        store<uint32_t>(address, words.word[0]);
    } else if constexpr (kWords == 2) {
        store<uint2>(address, make_uint2(words.word[0], words.word[1]));
    } else {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            store<uint4>(address + i * 4,
                         make_uint4(words.word[i], words.word[i + 1], words.word[i + 2], words.word[i + 3]));
        }
    }
}

constexpr uint32_t bytes_per_scale(Kind kind) {
    return kind == Kind::kFP8 ? 4 : 1;
}

// A row from column `col` on, a multiple of 2 below 2^27.
template <Kind kKind, typename T>
__device__ inline RowOf<T> advance(RowOf<T> row, uint32_t col) {
    constexpr uint32_t kWidth = scale_width(kKind) > 0 ? scale_width(kKind) : 1;
    const uint32_t scale = scale_width(kKind) > 0 ? col / kWidth * bytes_per_scale(kKind) : 0;
    return {row.data + col * uint32_t(bits_of(kKind)) / 8, row.scales + scale};
}

// The columns at the start of `row`; zeros if `inside` is false, beyond its end.
template <Kind kKind, int N>
__device__ inline Piece<kKind, N> load_piece(ConstRow row, bool inside) {
    Piece<kKind, N> piece = {};
    if (!inside) return piece;
    piece.data = load_words<Piece<kKind, N>::kWords>(row.data);
    if constexpr (scale_width(kKind) > 0) {
        piece.scale = bytes_per_scale(kKind) == 4 ? load<uint32_t>(row.scales) : *row.scales;
    }
    return piece;
}

// The scale byte of the row of zeros; the least one in GEMMs, where the largest scale of several rows is wanted.
constexpr uint32_t zero_scale(Kind kind) {
    return is_fp8(kind) ? kE8M0One : kind == Kind::kFP8Row ? 1 : 0;
}

// ---- numbers that lanes share ----

// Over groups of `kLanes` adjacent lanes.
template <int kLanes>
__device__ inline uint32_t max_over_lanes(uint32_t value) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        value = max(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

template <int N>
__device__ inline void rotate_block(float* x, float factor) {
#pragma unroll
    for (int h = 1; h < N; h *= 2) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i & h) continue;
            const float a = x[i];
            const float b = x[i + h];
            x[i] = add_rn(a, b);
            x[i + h] = sub_rn(a, b);
        }
    }
#pragma unroll
    for (int h = N; h < kBlockSize; h *= 2) {
        const bool upper = (int(threadIdx.x) & (h / N)) != 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float other = __shfl_xor_sync(kAllLanes, x[i], h / N);
            x[i] = upper ? sub_rn(other, x[i]) : add_rn(x[i], other);
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = mul_rn(x[i], factor);
}

template <int N>
__device__ inline void flip_signs_from(float* x, uint64_t seed, uint32_t col) {
    const uint32_t signs = hadamard_signs(seed, col / kBlockSize * kBlockSize) >> col % kBlockSize;
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = float_from_bits(float_bits(x[j]) ^ (signs >> j & 1) << 31);
}

// ---- decoding: all NaN are kept as some NaN ----

template <int N>
__device__ inline void decode_fp8(const uint32_t* codes, float scale, float* x) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        const uint32_t pair = f16x2_from_e4m3x2(codes[j / 4] >> j % 4 * 8);
        x[j] = mul_rn(float_from_f16(pair), scale);
        x[j + 1] = mul_rn(float_from_f16(pair >> 16), scale);
    }
}

template <int N>
__device__ inline void decode_mxfp4(const uint32_t* codes, uint32_t byte, float* x) {
    // 2^126 times the scale fits a float for the lower half of the bytes only.
    const bool low = byte <= 128;
    const float first = pow2(low ? byte + 126 : 253);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = mul_rn(e2m1_tiny(codes[j / 8], j % 8), first);
    if (low) return;
    const float second = e8m0_value(byte);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = mul_rn(x[j], second);
}

template <Kind kKind, bool kHadamard, int N>
__device__ inline void decode(const Piece<kKind, N>& piece, const Encoding& encoding, uint32_t col, float* x) {
    const uint32_t* words = piece.data.word;
    if constexpr (kKind == Kind::kF32) {
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = float_from_bits(words[j]);
    } else if constexpr (kKind == Kind::kBF16) {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            x[j] = float_from_bits(words[j / 2] << 16);
            x[j + 1] = float_from_bits(words[j / 2] & 0xffff0000u);
        }
    } else if constexpr (kKind == Kind::kF16) {
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = float_from_f16(words[j / 2] >> j % 2 * 16);
    } else if constexpr (is_fp8(kKind)) {
        decode_fp8<N>(words, kKind == Kind::kFP8 ? float_from_bits(piece.scale) : e8m0_value(piece.scale), x);
    } else {
        decode_mxfp4<N>(words, piece.scale, x);
        if constexpr (kHadamard) {
            rotate_block<N>(x, 0.125f);
            flip_signs_from<N>(x, encoding.seed, col);
        }
    }
}

// ---- encoding ----

template <int N>
__device__ inline uint32_t lane_amax(const float* x) {
    uint32_t amax = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) amax = max(amax, magnitude_bits(x[j]));
    return amax;
}

// Replaces every NaN of the pairs by `nan`; `infinity` is the bits of Inf.
template <int kWords>
__device__ inline void fix_nans(uint32_t* pairs, uint32_t infinity, uint32_t nan) {
    const uint32_t above = (0x7fffu - infinity) * 0x10001u;  // carries into bit 15 from Inf + 1 on
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) any |= (pairs[i] & 0x7fff7fffu) + above;
    if ((any & 0x80008000u) == 0) return;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        const uint32_t low = pairs[i] & 0xffffu;
        const uint32_t high = pairs[i] >> 16;
        pairs[i] = pair_of((low & 0x7fffu) > infinity ? nan : low, (high & 0x7fffu) > infinity ? nan : high);
    }
}

// Codes under the scale byte `byte`; NaN for all if `bad`.
template <int N>
__device__ inline void encode_fp8_at(const float* x, uint32_t byte, bool bad, uint32_t* words) {
    const float inverse = pow2(254 - byte);
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        const uint32_t low = e4m3x2_from_floats(mul_rn(x[j], inverse), mul_rn(x[j + 1], inverse));
        const uint32_t high = e4m3x2_from_floats(mul_rn(x[j + 2], inverse), mul_rn(x[j + 3], inverse));
        words[j / 4] = bad ? 0x7f7f7f7fu : pair_of(low, high);
    }
}

// The scale byte of a row with that largest magnitude; a bad row is as a row of zeros.
__device__ inline uint32_t row_byte_from_amax(uint32_t amax) {
    return amax == 0 || amax >= kInfinityBits ? zero_scale(Kind::kFP8Row) : fp8_scale_from_amax(amax);
}

template <Kind kKind, int N>
__device__ inline Piece<kKind, N> encode_fp8(const float* x) {
    Piece<kKind, N> piece;
    const uint32_t amax = max_over_lanes<kGroupSize / N>(lane_amax<N>(x));
    const bool bad = amax >= kInfinityBits;
    piece.scale = bad ? kE8M0One : fp8_scale_from_amax(amax);
    encode_fp8_at<N>(x, piece.scale, bad, piece.data.word);
    return piece;
}

template <int N>
__device__ inline void round_stochastic(const float* x, const Encoding& encoding, int64_t row, uint32_t col,
                                        uint32_t* words) {
#pragma unroll
    for (int j = 0; j < N; j += 8) {
        const Philox4 bits = rounding_bits(encoding.seed, encoding.stream, row, col + j);
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float magnitude = float_from_bits(magnitude_bits(x[j + i]));
            codes |= (e2m1_sign(x[j + i]) | e2m1_stochastic(magnitude, random16(bits, i))) << 4 * i;
        }
        words[j / 8] = codes;
    }
}

// How MXFP4 is encoded.
template <ScaleMode kMode, bool kStochastic, bool kHadamard>
struct Mode {
    static constexpr ScaleMode kScaleMode = kMode;
    static constexpr bool kRandom = kStochastic;
    static constexpr bool kRotated = kHadamard;
    static constexpr bool kSaturate = kMode == ScaleMode::kFloor;  // else the scaled maximum rounds to 6 at most
};

// Changes x.
template <typename M, int N>
__device__ inline Piece<Kind::kMXFP4, N> encode_mxfp4(float* x, const Encoding& encoding, int64_t row, uint32_t col) {
    Piece<Kind::kMXFP4, N> piece;
    if constexpr (M::kRotated) {
        flip_signs_from<N>(x, encoding.seed, col);
        rotate_block<N>(x, 0.25f);
    }
    const uint32_t amax = max_over_lanes<kBlockSize / N>(lane_amax<N>(x));
    const bool bad = amax >= kInfinityBits;
    const uint32_t byte = bad ? 0 : e8m0_from_amax(amax, M::kScaleMode);
    const float inverse = pow2(254 - byte);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = bad ? 0.0f : mul_rn(x[j], inverse);
    if constexpr (M::kRandom) {
        round_stochastic<N>(x, encoding, row, col, piece.data.word);
    } else {
#pragma unroll
        for (int j = 0; j < N; j += 8) piece.data.word[j / 8] = e2m1x8_from_floats<M::kSaturate>(x + j);
    }
    piece.scale = bad ? kE8M0NaN : byte;
    return piece;
}

// The lane's columns `col`... of row `row`; changes x. `kCanonical`: float32 NaN become the canonical one.
template <Kind kKind, typename M, bool kCanonical, int N>
__device__ inline Piece<kKind, N> encode(float* x, const Encoding& encoding, int64_t row, uint32_t col) {
    if constexpr (kKind == Kind::kMXFP4) {
        return encode_mxfp4<M, N>(x, encoding, row, col);
    } else if constexpr (is_fp8(kKind)) {
        return encode_fp8<kKind, N>(x);
    } else {
        Piece<kKind, N> piece;
        piece.scale = 0;
        uint32_t* words = piece.data.word;
        if constexpr (kKind == Kind::kF32) {
#pragma unroll
            for (int j = 0; j < N; ++j) words[j] = float_bits(kCanonical ? canonical(x[j]) : x[j]);
        } else {
            constexpr bool kBF16 = kKind == Kind::kBF16;
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                words[j / 2] = kBF16 ? bf16x2_from_floats(x[j], x[j + 1]) : f16x2_from_floats(x[j], x[j + 1]);
            }
            fix_nans<N / 2>(words, kBF16 ? 0x7f80u : 0x7c00u, kBF16 ? kBF16NaN : kF16NaN);
        }
        return piece;
    }
}

}  // namespace fp4comm
