// Tiles of rows that become columns: which rows a block takes, where they lie, and how bytes are turned and written.
//
// Macros: HIDDEN, SPANS (1 or 2).
#pragma once

#include "device.cuh"
#include "fp4comm/block.h"
#include "fp4comm/wire.h"

namespace fp4comm {

// A block takes kRowTile rows of one group, in SPANS spans of columns side by side; each of its threads first looks
// after one row of a span. A thread then turns kRowsPerThread rows.
constexpr int kSpans = SPANS;
constexpr int kColumnThreads = kRowTile * kSpans;
constexpr int kRowsPerThread = 16;
constexpr int kLanesPerRow = 4;

// Rows of one group that lie above each other.
struct ColumnTile {
    int64_t index;     // of all tiles
    int64_t first;     // row of its first row among those of all groups
    int64_t in_group;  // and within its group
    int64_t group_first;
    int64_t group_size;
    int64_t num_filled;  // of these rows; fewer where only the device knows them

    __device__ int64_t rows_left() const { return num_filled - in_group; }
};

// `groups`: first row of every group and their sum, then first tile of every group and their sum; all lanes of a warp
// look together. One group needs no table; `end` says where it ends, if there is an end.
__device__ inline ColumnTile find_tile(int64_t index, const int64_t* groups, int64_t num_groups, int64_t num_rows,
                                       int rows_per_tile, const int32_t* end = nullptr) {
    if (num_groups == 1) {
        return {index, index * rows_per_tile, index * rows_per_tile, 0, num_rows, end ? *end : num_rows};
    }
    const int64_t* const first_tiles = groups + num_groups + 1;
    int64_t group = -1;
    for (int64_t g0 = 0; g0 < num_groups; g0 += kWarp) {
        const int64_t g = g0 + threadIdx.x % kWarp;
        group += __popc(__ballot_sync(kAllLanes, g < num_groups && first_tiles[g] <= index));
    }
    const int64_t first = groups[group];
    const int64_t in_group = (index - first_tiles[group]) * rows_per_tile;
    const int64_t group_size = groups[group + 1] - first;
    return {index, first + in_group, in_group, first, group_size, group_size};
}

// The row of the source behind row `r` of a tile; -1 = zeros.
__device__ inline int64_t source_row(const ColumnTile& tile, const int64_t* src_row, int r) {
    if (r >= tile.rows_left()) return -1;
    return src_row ? src_row[tile.first + r] : tile.first + r;
}

// This thread's rows of a tile and the lane that it is among those of a row. Eight neighbours have the same columns:
// together they write the 128 bytes of a column.
struct Place {
    int row_group;
    int lane;

    static constexpr int kRowGroups = kRowTile / kRowsPerThread;

    __device__ Place() {
        row_group = int(threadIdx.x) % kRowGroups;
        lane = int(threadIdx.x) % kWarp / kRowGroups;
    }
    __device__ int row(int i) const { return row_group * kRowsPerThread + i; }
};

// What stands for the rows that are not there: loads need no conditions then.
alignas(16) __device__ uint8_t zero_row[HIDDEN];

__device__ inline uint64_t row_address(const uint8_t* data, int64_t row, int64_t stride) {
    return reinterpret_cast<uint64_t>(row < 0 ? zero_row : data + row * stride);
}

// Some bytes of each row of a tile. Rows are read in whole lines and lie in shared memory so that neither the threads
// of a row nor those of a column meet in its banks: the chunks of 16 bytes are permuted by row group.
class StagedRows {
  public:
    static constexpr int kRowBytes = 128 * kSpans;

    // Starts to read the bytes from `first` on; what lies beyond `row_bytes` is left out.
    __device__ void start(const uint64_t* addresses, int64_t first, int64_t row_bytes) {
#pragma unroll
        for (int k = 0; k < kRowTile * kChunks / kColumnThreads; ++k) {
            const int i = k * kColumnThreads + int(threadIdx.x);
            const int row = i / kChunks;
            const int byte = i % kChunks * kChunk;
            const uint8_t* const from = reinterpret_cast<const uint8_t*>(addresses[row]) + first + byte;
            if (first + byte < row_bytes) copy_async16(bytes_ + place(row, byte), from);
        }
    }

    // A T at byte `byte` of a row.
    template <typename T>
    __device__ T get(int row, int byte) const {
        return load<T>(bytes_ + place(row, byte));
    }

  private:
    static constexpr int kChunk = 16;
    static constexpr int kChunks = kRowBytes / kChunk;

    static __device__ int place(int row, int byte) {
        const int chunk = byte / kChunk ^ row / kRowsPerThread;
        return row * kRowBytes + chunk * kChunk + byte % kChunk;
    }

    alignas(128) uint8_t bytes_[kRowTile * kRowBytes];
};

// Bytes [row][column] of 4 x 4 to [column][row].
__device__ inline void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t* columns, int stride) {
    const uint32_t ab01 = __byte_perm(a, b, 0x5140);
    const uint32_t cd01 = __byte_perm(c, d, 0x5140);
    const uint32_t ab23 = __byte_perm(a, b, 0x7362);
    const uint32_t cd23 = __byte_perm(c, d, 0x7362);
    columns[0] = __byte_perm(ab01, cd01, 0x5410);
    columns[stride] = __byte_perm(ab01, cd01, 0x7632);
    columns[2 * stride] = __byte_perm(ab23, cd23, 0x5410);
    columns[3 * stride] = __byte_perm(ab23, cd23, 0x7632);
}

// The first `count` of 16 bytes; `by_words`, where `to` is a multiple of 4, rounds it up: at most to the column's end.
FP4COMM_RARE void write_ragged(uint8_t* to, bool by_words, uint4 bytes, int count) {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if (by_words) {
            if (4 * w < count) store(to + 4 * w, words[w]);
            continue;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (4 * w + j < count) to[4 * w + j] = uint8_t(words[w] >> (8 * j));
        }
    }
}

// The first `count` of 16 bytes at a multiple of 16.
__device__ inline void store_first(uint8_t* to, uint64_t low, uint64_t high, unsigned count) {
    if (count & 8u) store(to, low);
    uint64_t rest = count & 8u ? high : low;
    unsigned at = count & 8u;
    if (count & 4u) {
        store(to + at, uint32_t(rest));
        rest >>= 32;
        at += 4;
    }
    if (count & 2u) {
        store(to + at, uint16_t(rest));
        rest >>= 16;
        at += 2;
    }
    if (count & 1u) to[at] = uint8_t(rest);
}

// All but the first `skip` of 16 bytes at a multiple of 16.
__device__ inline void store_last(uint8_t* to, uint64_t low, uint64_t high, unsigned skip) {
    if (skip == 0)
        return store(to, make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)));
    unsigned at = skip;
    uint64_t rest = (at < 8 ? low : high) >> 8 * (at % 8);
    if (at & 1u) {
        to[at++] = uint8_t(rest);
        rest = at == 8 ? high : rest >> 8;
    }
    if (at & 2u) {
        store(to + at, uint16_t(rest));
        at += 2;
        rest = at == 8 ? high : rest >> 16;
    }
    if (at & 4u) {
        store(to + at, uint32_t(rest));
        at += 4;
        rest = at == 8 ? high : rest >> 32;
    }
    if (at == 8) store(to + 8, high);
}

// The 16 bytes of each of the eight lanes that share a tile's part of a column, which begins anywhere: every lane but
// the first writes 16 bytes at a multiple of 16, some of its own and some of the lane before. The first writes the
// beginning and, as it gets the bytes of the last one, the end. All lanes of the warp call together.
FP4COMM_RARE void write_shifted(uint8_t* to, uint4 own, bool exists) {
    const unsigned skip = unsigned(reinterpret_cast<uint64_t>(to) % 16);
    const int lane = int(threadIdx.x) % kWarp;
    const int before = (lane & ~7) | ((lane + 7) & 7);
    uint32_t words[8] = {__shfl_sync(kAllLanes, own.x, before),
                         __shfl_sync(kAllLanes, own.y, before),
                         __shfl_sync(kAllLanes, own.z, before),
                         __shfl_sync(kAllLanes, own.w, before),
                         own.x,
                         own.y,
                         own.z,
                         own.w};
#pragma unroll
    for (int i = 7; i >= 1; --i) words[i] = skip & 4u ? words[i - 1] : words[i];
#pragma unroll
    for (int i = 7; i >= 3; --i) words[i] = skip & 8u ? words[i - 2] : words[i];
    uint32_t chunk[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk[i] = __funnelshift_l(words[3 + i], words[4 + i], 8 * (skip % 4));
    if (!exists) return;
    uint8_t* const start = to - skip;
    if (lane % 8 != 0) return store(start, make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]));
    const uint64_t low = uint64_t(chunk[1]) << 32 | chunk[0];
    const uint64_t high = uint64_t(chunk[3]) << 32 | chunk[2];
    store_last(start, low, high, skip);
    store_first(start + kRowTile, low, high, skip);
}

// The 16 bytes that this thread has of column after column, `stride` bytes apart; `rows` of them exist. All lanes of a
// warp write together, also those whose columns do not exist.
class ColumnWriter {
  public:
    __device__ ColumnWriter(uint8_t* out, int64_t hidden, int64_t column, const ColumnTile& tile, const Place& place)
        : to_(out + tile.group_first * hidden + column * tile.group_size + tile.in_group + place.row(0)),
          stride_(tile.group_size) {
        const int64_t left = tile.rows_left() - place.row(0);
        rows_ = left < 0 || column >= hidden ? 0 : left < kRowsPerThread ? int(left) : kRowsPerThread;
        whole_ = stride_ % 16 == 0;
        full_ = tile.rows_left() >= kRowTile;
    }

    // Four words for each of `kCount` columns from the `first` on.
    template <int kCount>
    __device__ void write(const uint32_t* words, int first = 0) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
            const uint4 bytes = make_uint4(words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]);
            uint8_t* const to = to_ + (first + c) * stride_;
            if (whole_) {
                if (rows_ != 0) store(to, bytes);
            } else if (full_) {
                write_shifted(to, bytes, rows_ != 0);
            } else {
                write_ragged(to, stride_ % 4 == 0, bytes, rows_);
            }
        }
    }

  private:
    uint8_t* to_;
    int64_t stride_;
    int rows_;
    bool whole_;
    bool full_;  // the tile has all its rows
};

}  // namespace fp4comm
