// Row-wise MXFP4 to column-wise FP8 and, from the same read, to row-wise FP8.
//
// Macros: HIDDEN, SPANS, WITH_ROWS (1: rows too), SCALES_ALIGNED (1: rows of scale bytes begin at multiples of
// 8), MIN_BLOCKS (per multiprocessor, limits registers), GIVEN (1: wanted_scales says which scale each row gets, at
// least 2^-6 times that of its largest block; out_scales is null, and tiles from row *end on, if there is an
// end, are left alone).
#include "columns.cuh"

namespace fp4comm {
namespace {

constexpr int64_t kHidden = HIDDEN;
constexpr int kColumnsPerThread = 16;
constexpr int kColumnsPerWarp = kColumnsPerThread * kLanesPerRow;
constexpr int kColumns = kColumnsPerWarp * kColumnThreads / kWarp;  // of a block
static_assert(kColumns == 2 * StagedRows::kRowBytes, "a block stages its columns");
constexpr int kBlocks = kColumns / kBlockSize;
constexpr int kGroups = kColumns / kGroupSize;
constexpr int kSpanColumns = kColumns / kSpans;
constexpr int kSpanBlocks = kSpanColumns / kBlockSize;
constexpr int kSpanGroups = kSpanColumns / kGroupSize;
constexpr int kBlocksPerGroup = kGroupSize / kBlockSize;
constexpr int64_t kNumGroups = ceil_div(kHidden, kGroupSize);

// How far the shift of a block can lie below the largest one, before lower ones change nothing.
constexpr int kMaxDelta = kMaxE2M1Shift - kMinE2M1Shift;
constexpr int kNaNEntry = kMaxDelta + 1;

// Scale bytes are kept one higher, in a byte: 0 is NaN, which has no say in a shared scale, and the largest wins.
struct Shared {
    StagedRows codes;
    alignas(16) uint64_t addresses[kRowTile];           // of the rows
    alignas(16) uint8_t raised[kBlocks][kRowTile];      // scale bytes + 1
    alignas(16) uint8_t row_shared[kGroups][kRowTile];  // shared scale bytes of the row's groups
    uint2 tables[kNaNEntry + 1];                        // E4M3 codes of the magnitudes, by delta
};

__device__ inline uint32_t raise_bytes(uint32_t bytes) {
    return ((bytes & 0x7f7f7f7fu) + 0x01010101u) ^ (bytes & 0x80808080u);
}

// Raised bytes as if `given` were 127: only the distance counts.
__device__ inline uint32_t move_raised(uint32_t raised, int given) {
    uint32_t moved = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const int byte = int(raised >> 8 * b & 0xffu);
        const int at = byte + int(kE8M0One) - given;
        moved |= byte == 0 ? 0u : uint32_t(at < 1 ? 1 : at > 254 ? 254 : at) << 8 * b;
    }
    return moved;
}

// SharedScale::byte() of the largest raised byte.
__device__ inline uint32_t shared_byte(uint32_t raised, bool nonzero) {
    if (raised <= 1) return nonzero ? 1 : kE8M0One;
    return raised > 8 ? raised - 7 : 1;
}

// Four threads per delta, two codes each. All products are exact in FP16.
__device__ inline void fill_tables(uint2* tables) {
    const int delta = int(threadIdx.x) / 4;
    const int pair = int(threadIdx.x) % 4;
    if (delta > kNaNEntry) return;
    const uint32_t magnitudes = pair == 0   ? 0x38000000u
                                : pair == 1 ? 0x3e003c00u
                                : pair == 2 ? 0x42004000u
                                            : 0x46004400u;
    const uint32_t power = uint32_t(kMaxE2M1Shift - delta + 15) << 10;
    const uint32_t codes =
        delta == kNaNEntry ? kE4M3NaN * 0x0101u : e4m3x2_from_f16x2(mul_f16x2(magnitudes, pair_of(power, power)));
    store(reinterpret_cast<uint8_t*>(tables) + 8 * delta + 2 * pair, uint16_t(codes));
}

// Scale bytes of this thread's row in its span, from block `first_block` on; NaN where there are no columns.
__device__ inline uint2 load_scales(const uint8_t* scales, int64_t first_block) {
    const uint8_t* const from = scales + first_block;
    const int64_t exist = kHidden / kBlockSize - first_block;
    if (SCALES_ALIGNED && exist >= kSpanBlocks) return load<uint2>(from);
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int b = 0; b < kSpanBlocks; ++b) words[b / 4] |= uint32_t(b < exist ? from[b] : kE8M0NaN) << (b % 4 * 8);
    return make_uint2(words[0], words[1]);
}

// Whether a group of a row has a number other than zero in a block that is not NaN.
FP4COMM_RARE bool row_group_nonzero(const uint8_t* packed, uint32_t raised) {
    for (int b = 0; b < kBlocksPerGroup; ++b) {
        if ((raised >> (8 * b) & 0xff) != 0 && mxfp4_block_nonzero(packed + b * kBlockSize / 2)) return true;
    }
    return false;
}

// The row that a thread first looks after, in one of the spans.
struct Owned {
    int row;
    int span;

    __device__ Owned() : row(int(threadIdx.x) % kRowTile), span(int(threadIdx.x) / kRowTile) {}
};

// Shared scales of an owned row's groups: to shared memory for those who convert it, and to the result. `column`: the
// first of the span.
__device__ inline void share_row_scales(const Owned& owned, uint2 raised, int64_t column, float* row_scales,
                                        Shared& shared) {
    const uint8_t* const codes = reinterpret_cast<const uint8_t*>(shared.addresses[owned.row]) + column / 2;
#pragma unroll
    for (int g = 0; g < kSpanGroups; ++g) {
        const uint32_t word = g == 0 ? raised.x : raised.y;
        const uint32_t pairs = max_u16x2(word & 0x00ff00ffu, word >> 8 & 0x00ff00ffu);
        const uint32_t largest = max_u16x2(pairs, pairs >> 16) & 0xffffu;
        const bool exists = column + g * kGroupSize < kHidden;
        const bool nonzero = exists && largest == 1 && row_group_nonzero(codes + g * (kGroupSize / 2), word);
        const uint32_t byte = shared_byte(largest, nonzero);
        shared.row_shared[owned.span * kSpanGroups + g][owned.row] = uint8_t(byte);
        if (row_scales && exists) row_scales[g] = pow2(byte);
    }
}

__device__ inline void share_scales(const Owned& owned, uint2 raised, Shared& shared) {
#pragma unroll
    for (int b = 0; b < kSpanBlocks; ++b) {
        const uint32_t word = b < 4 ? raised.x : raised.y;
        shared.raised[owned.span * kSpanBlocks + b][owned.row] = uint8_t(word >> (b % 4 * 8));
    }
}

__device__ inline uint32_t byte_of(const uint32_t* words, int i) {
    return words[i / 4] >> (i % 4 * 8) & 0xffu;
}

// Over the threads with the same columns.
__device__ inline uint32_t max_over_rows(uint32_t value) {
    for (int step = 1; step < Place::kRowGroups; step *= 2) {
        const uint32_t other = __shfl_xor_sync(kAllLanes, value, step);
        value = value > other ? value : other;
    }
    return value;
}

// Whether this thread's rows have a number other than zero in the 32 columns of a block, NaN blocks apart. `byte`: of
// the block in the staged rows.
FP4COMM_RARE uint32_t rows_nonzero(const StagedRows& codes, Place place, uint4 raised_bytes, int byte) {
    const uint32_t raised[4] = {raised_bytes.x, raised_bytes.y, raised_bytes.z, raised_bytes.w};
    uint32_t nonzero = 0;
    for (int i = 0; i < kRowsPerThread; ++i) {
        const uint4 words = codes.get<uint4>(place.row(i), byte);
        const uint32_t any = (words.x | words.y | words.z | words.w) & 0x77777777u;
        nonzero |= byte_of(raised, i) != 0 ? any : 0;
    }
    return nonzero;
}

// Shared scale byte of a block of 32 columns over the rows of the tile.
__device__ inline uint32_t tile_byte(const StagedRows& codes, const Place& place, const uint32_t* raised, int byte) {
    uint32_t pairs = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        pairs = max_u16x2(pairs, max_u16x2(raised[w] & 0x00ff00ffu, raised[w] >> 8 & 0x00ff00ffu));
    }
    const uint32_t largest = max_over_rows(max_u16x2(pairs, pairs >> 16) & 0xffffu);
    uint32_t nonzero = 0;
    if (__any_sync(kAllLanes, largest <= 1)) {
        nonzero =
            max_over_rows(rows_nonzero(codes, place, make_uint4(raised[0], raised[1], raised[2], raised[3]), byte));
    }
    return shared_byte(largest, nonzero != 0);
}

// What turns the codes of a row's block into E4M3.
struct Decoder {
    uint2 table;
    uint32_t sign_mask;  // NaN has no sign

    __device__ Decoder(const uint2* tables, uint32_t raised, uint32_t shared) {
        const int delta = int(shared + (kMaxE2M1Shift + 1) - raised);
        table = tables[raised == 0 ? kNaNEntry : delta < kMaxDelta ? delta : kMaxDelta];
        sign_mask = raised == 0 ? 0 : 0x80808080u;
    }

    // Eight codes; the same work for signs and selectors is shared by the decoders of a word.
    __device__ uint2 operator()(uint32_t codes) const {
        const uint32_t magnitudes = codes & 0x77777777u;
        const uint32_t even_signs = codes << 4;
        const uint32_t signs0 = __byte_perm(even_signs, codes, 0x5140);
        const uint32_t signs1 = __byte_perm(even_signs, codes, 0x7362);
        return make_uint2(__byte_perm(table.x, table.y, magnitudes) | (signs0 & sign_mask),
                          __byte_perm(table.x, table.y, magnitudes >> 16) | (signs1 & sign_mask));
    }
};

// This thread's rows of a shared array of bytes.
__device__ inline void load_bytes(const uint8_t* bytes, const Place& place, uint32_t* words) {
    const uint4 packed = load<uint4>(bytes + place.row(0));
    words[0] = packed.x;
    words[1] = packed.y;
    words[2] = packed.z;
    words[3] = packed.w;
}

// Converts 16 columns of this thread's rows, eight at a time. `byte`: of them in the staged rows.
__device__ inline void write_columns(const Shared& shared, const Place& place, const uint32_t* raised, uint32_t scale,
                                     int byte, ColumnWriter columns) {
#pragma unroll 1  // half the registers
    for (int h = 0; h < 2; ++h) {
        uint32_t turned[8 * 4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            uint2 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = 4 * q + i;
                const Decoder decode(shared.tables, byte_of(raised, r), scale);
                words[i] = decode(shared.codes.get<uint32_t>(place.row(r), byte + 4 * h));
            }
            transpose4(words[0].x, words[1].x, words[2].x, words[3].x, turned + q, 4);
            transpose4(words[0].y, words[1].y, words[2].y, words[3].y, turned + 16 + q, 4);
        }
        columns.write<8>(turned, 8 * h);
    }
}

// Converts the columns of the block row by row, 16 columns to a thread.
__device__ inline void write_rows(const Shared& shared, const ColumnTile& tile, int64_t window, uint8_t* out) {
    constexpr int kThreadsPerRow = kColumns / kColumnsPerThread;
    const int column = int(threadIdx.x) % kThreadsPerRow * kColumnsPerThread;
    const int block = column / kBlockSize;
    uint8_t* const to = out + tile.first * kHidden + window + column;
    const int num_rows = tile.rows_left() < kRowTile ? int(tile.rows_left()) : kRowTile;
    if (window + column >= kHidden) return;
#pragma unroll 8
    for (int row = int(threadIdx.x) / kThreadsPerRow; row < num_rows; row += kColumnThreads / kThreadsPerRow) {
        const uint32_t shared_scale = shared.row_shared[block / kBlocksPerGroup][row];
        const Decoder decode(shared.tables, shared.raised[block][row], shared_scale);
        const uint2 codes = shared.codes.get<uint2>(row, column / 2);
        const uint2 low = decode(codes.x);
        const uint2 high = decode(codes.y);
        store(to + row * kHidden, make_uint4(low.x, low.y, high.x, high.y));
    }
}

}  // namespace

// Grid: tiles x ceil(HIDDEN / kColumns), columns first: blocks that run together then read whole rows and write long
// pieces of columns.
extern "C" __global__ void __launch_bounds__(kColumnThreads, MIN_BLOCKS)
    mxfp4_to_fp8_columns(const uint8_t* data, int64_t data_stride, const uint8_t* scales, int64_t scales_stride,
                         const int64_t* src_row, const int64_t* groups, int64_t num_groups, int64_t num_rows,
                         uint8_t* out, float* out_scales, uint8_t* row_out, float* row_scales,
                         const float* wanted_scales, const int32_t* end) {
    constexpr unsigned kWindows = unsigned(ceil_div(kHidden, kColumns));
    __shared__ Shared shared;
    const ColumnTile tile = find_tile(blockIdx.x / kWindows, groups, num_groups, num_rows, kRowTile, end);
    if (GIVEN && tile.rows_left() <= 0) return;
    const int64_t window = blockIdx.x % kWindows * int64_t(kColumns);
    const Owned owned;
    const int64_t row = source_row(tile, src_row, owned.row);
    if (owned.span == 0) shared.addresses[owned.row] = row_address(data, row, data_stride);
    __syncthreads();
    shared.codes.start(shared.addresses, window / 2, kHidden / 2);
    const int64_t span_column = window + owned.span * kSpanColumns;
    const uint2 bytes = load_scales(row < 0 ? zero_row : scales + row * scales_stride, span_column / kBlockSize);
    fill_tables(shared.tables);
    uint2 raised = make_uint2(raise_bytes(bytes.x), raise_bytes(bytes.y));
#if GIVEN
    const bool is_there = owned.row < tile.rows_left();
    const int given = is_there ? int(float_bits(wanted_scales[tile.first + owned.row]) >> 23) : int(kE8M0One);
    raised = make_uint2(move_raised(raised.x, given), move_raised(raised.y, given));
#endif
    share_scales(owned, raised, shared);
    if (WITH_ROWS) {
        float* const to = row_scales + (tile.first + owned.row) * kNumGroups + span_column / kGroupSize;
        share_row_scales(owned, raised, span_column, owned.row < tile.rows_left() ? to : nullptr, shared);
    }
    wait_for_copies();
    __syncthreads();
    if (WITH_ROWS) write_rows(shared, tile, window, row_out);
    const Place place;
    const int in_window = int(threadIdx.x) / kWarp * kColumnsPerWarp + place.lane * kColumnsPerThread;
    const int64_t column = window + in_window;
    const int block = in_window / kBlockSize;
    uint32_t row_words[4];
    load_bytes(shared.raised[block], place, row_words);
#if GIVEN
    const uint32_t byte = kE8M0One;
#else
    const uint32_t byte = tile_byte(shared.codes, place, row_words, block * kBlockSize / 2);
    const float scale = pow2(byte);
    if (column < kHidden) {
        store(out_scales + tile.index * kHidden + column + 2 * place.row_group,
              make_uint2(float_bits(scale), float_bits(scale)));
    }
#endif
    write_columns(shared, place, row_words, byte, in_window / 2, ColumnWriter(out, kHidden, column, tile, place));
}

}  // namespace fp4comm
