// Column-wise outputs: tiles of rows are gathered, rescaled to one exponent and written transposed.
#include <algorithm>
#include <numeric>
#include <vector>

#include "codec.h"
#include "memory.h"
#include "row_ops.h"

namespace fp4comm {
namespace {

// Tiles of one group above each other that are done column by column before the next columns: results then grow by 512
// bytes at a time instead of 128, which saves most of the page walks that strided writes cost.
constexpr int64_t kTilesPerBand = 4;

// Results of this size have left the caches before anyone reads them; writing past the caches then spares reading the
// lines first, which takes a third of the time.
constexpr int64_t kStreamingBytes = 16 << 20;

// What stands for the rows that are not there.
class ZeroRow {
  public:
    ZeroRow(Kind kind, int64_t hidden)
        : bytes_(size_t(data_bytes(kind, hidden) + scale_bytes(kind, hidden))),
          row_{bytes_.data(), bytes_.data() + data_bytes(kind, hidden)} {
        zero_row(row_, kind, hidden);
    }
    ConstRow row() const { return {row_.data, row_.scales}; }

  private:
    std::vector<uint8_t> bytes_;
    Row row_;
};

struct ColumnSource {
    const Rows& rows;
    const int64_t* row_map;
    int64_t hidden;
    ZeroRow zero;

    ColumnSource(const Rows& src, const int64_t* map, int64_t width)
        : rows(src), row_map(map), hidden(width), zero(src.kind, width) {}

    TileRows tile(int64_t first, int64_t count) const {
        TileRows tile;
        tile.count = int(std::min<int64_t>(count, kRowTile));
        for (int r = 0; r < kRowTile; ++r) {
            const int64_t row = r >= tile.count ? -1 : row_map ? row_map[first + r] : first + r;
            tile.row[r] = row < 0 ? zero.row() : rows.const_row(row);
        }
        return tile;
    }
};

// Scale bytes of one FP8 group in all rows of a tile; returns how many are not positive normal powers of two.
int64_t fp8_tile_exponents(const TileRows& tile, Kind kind, int64_t group, uint8_t* exponents) {
    int64_t bad = 0;
    for (int r = 0; r < tile.count; ++r) {
        const uint8_t* scales = tile.row[r].scales;
        const uint32_t bits = kind == Kind::kFP8 ? load<uint32_t>(scales, group) : uint32_t(scales[group]) << 23;
        exponents[r] = uint8_t(bits >> 23);
        bad += !is_normal_pow2(bits);
    }
    return bad;
}

// At most 128 columns of a tile. Returns the number of bad scales.
int64_t fp8_columns_of_tile(Kind kind, const TileRows& tile, Columns columns, const TileTarget& target, float* scales) {
    const RowOps& ops = row_ops();
    uint8_t bytes[kGroupSize / kBlockSize];
    if (kind == Kind::kMXFP4) {
        ops.mxfp4_tile_to_fp8(tile, columns, target, bytes);
        for (int64_t c = 0; c < columns.count; ++c) scales[c] = e8m0_value(bytes[c / kBlockSize]);
        return 0;
    }
    uint8_t exponents[kRowTile];
    const int64_t bad = fp8_tile_exponents(tile, kind, columns.begin / kGroupSize, exponents);
    std::fill_n(scales, columns.count, e8m0_value(ops.fp8_tile_to_fp8(tile, exponents, columns, target)));
    return bad;
}

// The band that begins with row `first_row` of a group of `size` rows, which begins with row `group`.
int64_t fp8_columns_of_band(const ColumnSource& src, int64_t group, int64_t size, int64_t first_row,
                            const TileTarget& target, float* scales) {
    TileRows tiles[kTilesPerBand];
    int num_tiles = 0;
    for (int64_t r = first_row; r < size && num_tiles < kTilesPerBand; r += kRowTile) {
        tiles[num_tiles++] = src.tile(group + r, size - r);
    }
    int64_t bad = 0;
    for (int64_t col = 0; col < src.hidden; col += kGroupSize) {
        const Columns columns{col, std::min<int64_t>(kGroupSize, src.hidden - col)};
        for (int t = 0; t < num_tiles; ++t) {
            const TileTarget at{target.out + col * size + t * kRowTile, size, target.streaming};
            bad += fp8_columns_of_tile(src.rows.kind, tiles[t], columns, at, scales + t * src.hidden + col);
        }
    }
    return bad;
}

}  // namespace

int64_t fp8_columns(const Rows& src, int64_t hidden, const int64_t* src_row, const int64_t* group_sizes,
                    int64_t num_groups, uint8_t* data, float* scales) {
    const ColumnSource source(src, src_row, hidden);
    const int64_t num_rows = std::accumulate(group_sizes, group_sizes + num_groups, int64_t(0));
    const bool streaming = num_rows * hidden >= kStreamingBytes;
    int64_t bad = 0;
    int64_t group = 0;
    for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t size = group_sizes[g];
        for (int64_t r = 0; r < size; r += kTilesPerBand * kRowTile) {
            const TileTarget target{data + r, size, streaming};
            bad += fp8_columns_of_band(source, group, size, r, target, scales + r / kRowTile * hidden);
        }
        data += size * hidden;
        scales += ceil_div(size, kRowTile) * hidden;
        group += size;
    }
    return bad;
}

namespace {

// Encodes 32 numbers code * 2^(byte - 127) of one column. fp32 overflows above byte 252, so the exponents are taken
// relative to the largest one that counts, `top`, and added again in the scale.
uint8_t encode_column_block(const uint8_t* codes, const uint8_t* bytes, int count, ScaleMode mode, uint8_t* packed) {
    std::fill_n(packed, kBlockSize / 2, uint8_t(0));
    int top = -1;
    for (int r = 0; r < count; ++r) {
        if (bytes[r] == kE8M0NaN) return uint8_t(kE8M0NaN);
        if (codes[r] & 7) top = std::max(top, int(bytes[r]));
    }
    const auto relative = [&](int r) {
        // Below 2^-100 of the largest number everything rounds to zero.
        return mul_rn(e2m1_value(codes[r]), pow2(uint32_t(std::max(int(bytes[r]) - top, -100) + 127)));
    };
    int scale = 0;
    float inverse = 1.0f;
    if (top >= 0) {
        uint32_t amax = 0;
        for (int r = 0; r < count; ++r) {
            if (codes[r] & 7) amax = std::max(amax, magnitude_bits(relative(r)));
        }
        const int exponent = int((amax + scale_mode_increment(mode)) >> 23) - 2 - 127;
        scale = std::max(exponent + top, 0);
        inverse = pow2(uint32_t(127 + top - scale));
    }
    for (int r = 0; r < count; ++r) {
        const uint32_t code = codes[r] & 7 ? e2m1_encode(relative(r), inverse) : codes[r];
        packed[r / 2] = uint8_t(packed[r / 2] | code << (r % 2 * 4));
    }
    return uint8_t(scale);
}

// One block column (32 columns) of up to 32 rows.
void mxfp4_columns_of_tile(const TileRows& tile, int64_t block, ScaleMode mode, uint8_t* packed, uint8_t* scales,
                           int64_t num_blocks) {
    uint8_t bytes[kBlockSize];
    uint8_t codes[kBlockSize][kBlockSize];  // [column][row]
    for (int r = 0; r < tile.count; ++r) {
        const ConstRow row = tile.row[r];
        bytes[r] = row.scales[block];
        for (int c = 0; c < kBlockSize; ++c) codes[c][r] = uint8_t(e2m1_unpack(row.data, block * kBlockSize + c));
    }
    for (int c = 0; c < kBlockSize; ++c) {
        scales[c * num_blocks] =
            encode_column_block(codes[c], bytes, tile.count, mode, packed + c * num_blocks * (kBlockSize / 2));
    }
}

}  // namespace

void mxfp4_columns(const Rows& src, int64_t hidden, const int64_t* src_row, const int64_t* group_sizes,
                   int64_t num_groups, uint8_t* packed, uint8_t* scales, const Options& options) {
    const ColumnSource source(src, src_row, hidden);
    int64_t first = 0;
    for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t size = group_sizes[g];
        const int64_t num_blocks = ceil_div(size, kBlockSize);
        for (int64_t b = 0; b < num_blocks; ++b) {
            const int64_t r = b * kBlockSize;
            const TileRows tile = source.tile(first + r, std::min<int64_t>(kBlockSize, size - r));
            for (int64_t block = 0; block < hidden / kBlockSize; ++block) {
                const int64_t at = block * kBlockSize * num_blocks + b;
                mxfp4_columns_of_tile(tile, block, options.scale_mode, packed + at * (kBlockSize / 2), scales + at,
                                      num_blocks);
            }
        }
        packed += hidden * num_blocks * (kBlockSize / 2);
        scales += hidden * num_blocks;
        first += size;
    }
}

}  // namespace fp4comm
