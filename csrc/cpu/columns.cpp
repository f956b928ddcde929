// Column-wise outputs: tiles of rows are gathered, rescaled to one exponent and written transposed.
#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "codec.h"
#include "memory.h"
#include "row_ops.h"

namespace fp4comm {
namespace {

// Tiles of one group above each other that are made before any of them is written: results then grow by 256 bytes of a
// column at a time instead of 128, which spares page walks and openings of DRAM pages.
constexpr int kTilesPerBand = 2;
constexpr int kBandRows = kTilesPerBand * kRowTile;

// Results of this size have left the caches before anyone reads them; writing past the caches spares reading their
// lines first.
constexpr int64_t kStreamingBytes = 16 << 20;

// 128 columns of a band; columns lie a cache line further apart than they need, so as not to share cache sets.
struct BandBuffer {
    alignas(64) uint8_t codes[kGroupSize][kBandRows + 64];
};

// Copies `num_bytes`, whole cache lines past the caches; others see them after stream_end.
void stream_copy(const uint8_t* src, int64_t num_bytes, uint8_t* dst) {
#if defined(__x86_64__)
    const int64_t head = std::min(int64_t(-reinterpret_cast<uintptr_t>(dst) % 64), num_bytes);
    const int64_t lines_end = head + (num_bytes - head) / 64 * 64;
    std::copy_n(src, head, dst);
    for (int64_t j = head; j < lines_end; j += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(dst + j),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + j)));
    }
    std::copy(src + lines_end, src + num_bytes, dst + lines_end);
#else
    std::copy_n(src, num_bytes, dst);
#endif
}

void stream_end() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

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
int64_t fp8_columns_of_tile(Kind kind, const TileRows& tile, Columns columns, uint8_t* out, int64_t stride,
                            float* scales) {
    const RowOps& ops = row_ops();
    uint8_t bytes[kGroupSize / kBlockSize];
    if (kind == Kind::kMXFP4) {
        ops.mxfp4_tile_to_fp8(tile, columns, out, stride, bytes);
        for (int64_t c = 0; c < columns.count; ++c) scales[c] = e8m0_value(bytes[c / kBlockSize]);
        return 0;
    }
    uint8_t exponents[kRowTile];
    const int64_t bad = fp8_tile_exponents(tile, kind, columns.begin / kGroupSize, exponents);
    std::fill_n(scales, columns.count, e8m0_value(ops.fp8_tile_to_fp8(tile, exponents, columns, out, stride)));
    return bad;
}

// The rows [first, first + num_rows) of `src`, at most kBandRows, to columns of `stride` bytes.
int64_t fp8_columns_of_band(const ColumnSource& src, int64_t first, int64_t num_rows, uint8_t* out, int64_t stride,
                            float* scales, bool streaming, BandBuffer& buffer) {
    TileRows tiles[kTilesPerBand];
    const int num_tiles = int(ceil_div(num_rows, kRowTile));
    for (int t = 0; t < num_tiles; ++t) tiles[t] = src.tile(first + t * kRowTile, num_rows - t * kRowTile);
    int64_t bad = 0;
    for (int64_t col = 0; col < src.hidden; col += kGroupSize) {
        const Columns columns{col, std::min<int64_t>(kGroupSize, src.hidden - col)};
        for (int t = 0; t < num_tiles; ++t) {
            bad += fp8_columns_of_tile(src.rows.kind, tiles[t], columns, buffer.codes[0] + t * kRowTile,
                                       sizeof buffer.codes[0], scales + t * src.hidden + col);
        }
        for (int64_t c = 0; c < columns.count; ++c) {
            uint8_t* to = out + (col + c) * stride;
            if (streaming) {
                stream_copy(buffer.codes[c], num_rows, to);
            } else {
                std::copy_n(buffer.codes[c], num_rows, to);
            }
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
    const auto buffer = std::make_unique<BandBuffer>();
    int64_t bad = 0;
    int64_t first = 0;
    for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t size = group_sizes[g];
        for (int64_t r = 0; r < size; r += kBandRows) {
            bad += fp8_columns_of_band(source, first + r, std::min<int64_t>(kBandRows, size - r), data + r, size,
                                       scales + r / kRowTile * hidden, streaming, *buffer);
        }
        data += size * hidden;
        scales += ceil_div(size, kRowTile) * hidden;
        first += size;
    }
    if (streaming) stream_end();
    return bad;
}

namespace {

// Numbers of a tile in fp32, columns along the memory, and what becomes of them.
struct Transposed {
    alignas(64) float x[kGroupSize][kBlockSize];  // [column][row]
    alignas(64) uint8_t packed[kGroupSize][kBlockSize / 2];
    uint8_t scales[kGroupSize];

    // `lowered`: how much is taken off the scale bytes of the rows.
    void read(const TileRows& tile, Columns columns, uint8_t lowered) {
        alignas(64) float row[kGroupSize];
        for (int r = 0; r < kBlockSize; ++r) {
            uint8_t bytes[kGroupSize / kBlockSize];
            for (int64_t b = 0; b < columns.count / kBlockSize; ++b) {
                const uint8_t byte = tile.row[r].scales[columns.begin / kBlockSize + b];
                bytes[b] = byte == kE8M0NaN ? byte : uint8_t(std::max(byte, lowered) - lowered);
            }
            const ConstRow lower{tile.row[r].data + columns.begin / 2, bytes};
            row_ops().decode[int(Kind::kMXFP4)](lower, {0, columns.count}, Options(), row);
            for (int64_t c = 0; c < columns.count; ++c) x[c][r] = row[c];
        }
    }

    void encode(int64_t num_columns, ScaleMode mode) {
        Options options;
        options.scale_mode = mode;
        row_ops().encode[int(Kind::kMXFP4)](x[0], {0, num_columns * kBlockSize}, {options, 0, row_ops()},
                                            {packed[0], scales});
    }
};

// At most 128 columns of up to 32 rows. `num_blocks`: blocks of a column of the result, one after the other.
void mxfp4_columns_of_tile(const TileRows& tile, Columns columns, ScaleMode mode, uint8_t* packed, uint8_t* scales,
                           int64_t num_blocks) {
    // 6 * 2^(byte - 127) overflows from byte 253 on, though its MXFP4 exists. Such columns are worked out again two
    // binades lower, where only numbers get lost that vanish beside those.
    constexpr uint8_t kLowered = 2;
    Transposed exact;
    exact.read(tile, columns, 0);
    exact.encode(columns.count, mode);
    const bool overflow =
        std::any_of(exact.scales, exact.scales + columns.count, [](uint8_t s) { return s == kE8M0NaN; });
    Transposed lower;
    if (overflow) {
        lower.read(tile, columns, kLowered);
        lower.encode(columns.count, mode);
    }
    for (int64_t c = 0; c < columns.count; ++c) {
        const bool use_lower = exact.scales[c] == kE8M0NaN && lower.scales[c] != kE8M0NaN;
        scales[c * num_blocks] = use_lower ? uint8_t(lower.scales[c] + kLowered) : exact.scales[c];
        std::copy_n(use_lower ? lower.packed[c] : exact.packed[c], kBlockSize / 2,
                    packed + c * num_blocks * (kBlockSize / 2));
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
            for (int64_t col = 0; col < hidden; col += kGroupSize) {
                const Columns columns{col, std::min<int64_t>(kGroupSize, hidden - col)};
                const int64_t at = col * num_blocks + b;
                mxfp4_columns_of_tile(tile, columns, options.scale_mode, packed + at * (kBlockSize / 2), scales + at,
                                      num_blocks);
            }
        }
        packed += hidden * num_blocks * (kBlockSize / 2);
        scales += hidden * num_blocks;
        first += size;
    }
}

}  // namespace fp4comm
