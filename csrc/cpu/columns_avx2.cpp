// AVX2 tiles of column-wise FP8: rows are rescaled while they lie along the registers, then transposed.
#if defined(__x86_64__)
#include <algorithm>

#include "avx2.h"
#include "columns_x86.h"

namespace fp4comm::avx2 {
namespace {

constexpr int kStrip = 16;  // rows transposed at a time

// In each 128-bit lane rows[i] byte j becomes rows[j] byte i: four perfect shuffles of the 8 index bits.
FP4COMM_AVX2 inline void transpose16x16(__m256i rows[kStrip]) {
    for (int round = 0; round < 4; ++round) {
        __m256i next[kStrip];
        for (int i = 0; i < kStrip / 2; ++i) {
            next[2 * i] = _mm256_unpacklo_epi8(rows[i], rows[i + kStrip / 2]);
            next[2 * i + 1] = _mm256_unpackhi_epi8(rows[i], rows[i + kStrip / 2]);
        }
        for (int i = 0; i < kStrip; ++i) rows[i] = next[i];
    }
}

// 16 rows of 32 columns to the columns from `out` on.
FP4COMM_AVX2 inline void store_transposed(__m256i rows[kStrip], uint8_t* out, int64_t stride) {
    transpose16x16(rows);
    for (int c = 0; c < kStrip; ++c) {
        store128(out + c * stride, _mm256_castsi256_si128(rows[c]));
        store128(out + (c + kStrip) * stride, high128(rows[c]));
    }
}

// E4M3 codes times 2^-shift. Where the result is normal that is code - 8 * shift; the table has the rest.
FP4COMM_AVX2 inline __m256i e4m3_shift32(__m256i codes, int shift, const Tables& t) {
    const __m256i nan = _mm256_set1_epi8(kE4M3NaN);
    const Tables::Shifted& table = t.e4m3_shifted[shift];
    const __m256i magnitude = _mm256_and_si256(codes, nan);
    const __m256i distance = _mm256_subs_epu8(magnitude, _mm256_set1_epi8(int8_t(table.base)));
    __m256i shifted = _mm256_subs_epu8(magnitude, _mm256_set1_epi8(int8_t(8 * shift)));
    for (int first = 0; first < 48; first += 16) {
        shifted = _mm256_max_epu8(shifted, lookup16(broadcast128(table.codes + first), distance, first));
    }
    const __m256i kept = _mm256_blendv_epi8(shifted, magnitude, _mm256_cmpeq_epi8(magnitude, nan));
    return _mm256_or_si256(kept, _mm256_andnot_si256(nan, codes));
}

// Where the rows' blocks find their tables, under the shared scale byte, which is returned.
FP4COMM_AVX2 inline uint8_t tile_shift_indices(const TileRows& tile, int64_t block, uint8_t* index) {
    const __m256i one = _mm256_set1_epi8(1);
    alignas(32) uint8_t bytes[kRowTile];
    for (int r = 0; r < kRowTile; ++r) bytes[r] = tile.row[r].scales[block];
    __m256i largest = _mm256_setzero_si256();  // of byte + 1, where NaN wraps to 0
    for (int r = 0; r < kRowTile; r += 32) largest = _mm256_max_epu8(largest, _mm256_add_epi8(load256(bytes + r), one));
    SharedScale scale;
    scale.max_byte = std::max(max_u8(largest), 1u) - 1;
    for (int r = 0; r < tile.count && scale.max_byte == 0 && !scale.nonzero; ++r) {
        scale.add(bytes[r], mxfp4_block_nonzero(tile.row[r].data + block * (kBlockSize / 2)));
    }
    const __m256i shared = _mm256_set1_epi8(int8_t(scale.byte()));
    for (int r = 0; r < kRowTile; r += 32) store256(index + r, e2m1_shift_indices(load256(bytes + r), shared));
    return uint8_t(scale.byte());
}

}  // namespace

FP4COMM_AVX2 void mxfp4_tile_to_fp8(const TileRows& tile, Columns columns, uint8_t* out, int64_t stride,
                                    uint8_t* shared) {
    const Tables& t = tables();
    const int64_t first_block = columns.begin / kBlockSize;
    for (int64_t b = 0; b < columns.count / kBlockSize; ++b) {
        const int64_t block = first_block + b;
        alignas(32) uint8_t index[kRowTile];
        shared[b] = tile_shift_indices(tile, block, index);
        for (int first = 0; first < tile.count; first += kStrip) {
            __m256i rows[kStrip];
            for (int i = 0; i < kStrip; ++i) {
                const __m128i nibbles = load128(tile.row[first + i].data + block * (kBlockSize / 2));
                const __m256i table = broadcast128(t.e4m3_of_e2m1[index[first + i]]);
                rows[i] = _mm256_shuffle_epi8(table, unpack_nibbles(nibbles));
            }
            store_transposed(rows, out + b * kBlockSize * stride + first, stride);
        }
    }
}

FP4COMM_AVX2 uint8_t fp8_tile_to_fp8(const TileRows& tile, const uint8_t* exponents, Columns columns, uint8_t* out,
                                     int64_t stride) {
    const Tables& t = tables();
    const int byte = fp8_tile_byte(tile, exponents, columns);
    int shift[kRowTile] = {};
    bool any = false;  // decided for the tile: shifts that vary from row to row are badly predicted branches
    for (int r = 0; r < tile.count; ++r) {
        // Rows above that hold only zeros and NaN, which no shift changes.
        shift[r] = std::clamp(byte - int(exponents[r]), 0, Tables::kNumE4M3Shifts - 1);
        any = any || shift[r] > 0;
    }
    for (int64_t c = 0; c < columns.count; c += kBlockSize) {
        for (int first = 0; first < tile.count; first += kStrip) {
            __m256i rows[kStrip];
            for (int i = 0; i < kStrip; ++i) {
                rows[i] = load256(tile.row[first + i].data + columns.begin + c);
                if (any) rows[i] = e4m3_shift32(rows[i], shift[first + i], t);
            }
            store_transposed(rows, out + c * stride + first, stride);
        }
    }
    return uint8_t(byte);
}

}  // namespace fp4comm::avx2
#endif
