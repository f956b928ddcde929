// Row-wise FP8 with power-of-two scales to column-wise FP8: rows are brought to the exponent of their tile, or each to
// one that is given.
//
// Macros: HIDDEN, SPANS, SRC_KIND (3: float32 scales, 4: E8M0, 6: a float32 scale per row), MIN_BLOCKS (per
// multiprocessor, limits registers), GIVEN (1: wanted_scales says to which scale each row is brought; out_scales is
// null, and tiles from row *end on, if there is an end, are left alone).
#include "columns.cuh"
#include "e4m3_shift.cuh"

namespace fp4comm {
namespace {

constexpr int64_t kHidden = HIDDEN;
constexpr Kind kKind = Kind(SRC_KIND);
constexpr int kColumnsPerThread = 8;
constexpr int kColumnsPerWarp = kColumnsPerThread * kLanesPerRow;
constexpr int kColumns = kColumnsPerWarp * kColumnThreads / kWarp;
static_assert(kColumns == kSpans * kGroupSize, "the columns of a span share their scales");
constexpr int kSpanWarps = kRowTile / kWarp;

struct Shared {
    StagedRows codes;
    alignas(16) uint64_t addresses[kRowTile];  // of the rows
    alignas(16) uint8_t exponents[kSpans][kRowTile];
    int32_t warp_largest[kColumnThreads / kWarp];
};

__device__ inline uint32_t scale_bits(const uint8_t* scales, int64_t group) {
    if (kKind == Kind::kFP8Row) return load<uint32_t>(scales);
    if (group >= ceil_div(kHidden, kGroupSize)) return kE8M0One << 23;
    return kKind == Kind::kFP8 ? load<uint32_t>(scales + 4 * group) : uint32_t(scales[group]) << 23;
}

__device__ inline int exponent_of(const uint4& exponents, int i) {
    const uint32_t word = i < 4 ? exponents.x : i < 8 ? exponents.y : i < 12 ? exponents.z : exponents.w;
    return int(word >> (i % 4 * 8) & 0xffu);
}

// Scale byte of the tile: the largest of the rows with a number other than zero and NaN in these columns, else 127.
__device__ inline int tile_byte(const uint4& exponents, const uint2* codes, int32_t* warp_largest) {
    int largest = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        const int exponent = (numbers_in(codes[i].x) | numbers_in(codes[i].y)) != 0 ? exponent_of(exponents, i) : 0;
        largest = exponent > largest ? exponent : largest;
    }
    for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_xor_sync(kAllLanes, largest, step);
        largest = other > largest ? other : largest;
    }
    const int warp = int(threadIdx.x) / kWarp;
    warp_largest[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kSpanWarps; ++w) {
        const int other = warp_largest[warp / kSpanWarps * kSpanWarps + w];
        largest = other > largest ? other : largest;
    }
    return largest == 0 ? int(kE8M0One) : largest;
}

// Brings this thread's rows to the exponent of the tile.
__device__ inline void scale_rows(const uint4& exponents, int byte, uint2* codes) {
    uint32_t nan = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) nan |= nans_in(codes[i].x) | nans_in(codes[i].y);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        // Rows above the tile hold only zeros and NaN, which no shift changes.
        const int shift = exponent_of(exponents, i) - byte;
        const uint32_t powers = powers_of(shift > 0 ? 0 : shift < kMinE4M3Shift ? kMinE4M3Shift : shift);
        if (nan) {
            codes[i] = make_uint2(scale_codes_with_nan(codes[i].x, powers), scale_codes_with_nan(codes[i].y, powers));
        } else {
            codes[i] = make_uint2(scale_codes(codes[i].x, powers), scale_codes(codes[i].y, powers));
        }
    }
}

__device__ inline void turn(const uint2* codes, ColumnWriter columns) {
    uint32_t turned[kColumnsPerThread * 4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const uint2* const rows = codes + 4 * q;
        transpose4(rows[0].x, rows[1].x, rows[2].x, rows[3].x, turned + q, 4);
        transpose4(rows[0].y, rows[1].y, rows[2].y, rows[3].y, turned + 16 + q, 4);
    }
    columns.write<kColumnsPerThread>(turned);
}

}  // namespace

// Grid: tiles x ceil(HIDDEN / kColumns), columns first: blocks that run together then read whole rows and write long
// pieces of columns. `bad`, if any, counts scales that are not positive normal powers of two.
extern "C" __global__ void __launch_bounds__(kColumnThreads, MIN_BLOCKS)
    fp8_to_fp8_columns(const uint8_t* data, int64_t data_stride, const uint8_t* scales, int64_t scales_stride,
                       const int64_t* src_row, const int64_t* groups, int64_t num_groups, int64_t num_rows,
                       uint8_t* out, float* out_scales, int32_t* bad, const float* wanted_scales, const int32_t* end) {
    constexpr unsigned kWindows = unsigned(ceil_div(kHidden, kColumns));
    __shared__ Shared shared;
    const ColumnTile tile = find_tile(blockIdx.x / kWindows, groups, num_groups, num_rows, kRowTile, end);
    if (GIVEN && tile.rows_left() <= 0) return;
    const int64_t window = blockIdx.x % kWindows * int64_t(kColumns);
    const int thread = int(threadIdx.x);
    const int span = thread / kRowTile;
    const int owned_row = thread % kRowTile;
    const int64_t row = source_row(tile, src_row, owned_row);
    if (span == 0) shared.addresses[owned_row] = row_address(data, row, data_stride);
    __syncthreads();
    shared.codes.start(shared.addresses, window, kHidden);
    const uint32_t bits =
        row < 0 ? kE8M0One << 23 : scale_bits(scales + row * scales_stride, window / kGroupSize + span);
#if GIVEN
    // As if all were brought to the exponent 127: only the distance counts.
    const uint32_t given = owned_row < tile.rows_left() ? float_bits(wanted_scales[tile.first + owned_row]) : bits;
    const int moved = int(kE8M0One) + int(bits >> 23) - int(given >> 23);
    shared.exponents[span][owned_row] = uint8_t(moved < 0 ? 0 : moved > int(kE8M0One) ? int(kE8M0One) : moved);
#else
    shared.exponents[span][owned_row] = uint8_t(bits >> 23);
#endif
    if (bad && !is_normal_pow2(bits)) atomicAdd(bad, 1);
    wait_for_copies();
    __syncthreads();
    const Place place;
    const int in_window = thread / kWarp * kColumnsPerWarp + place.lane * kColumnsPerThread;
    const int64_t column = window + in_window;
    const bool exists = column < kHidden;
    uint2 codes[kRowsPerThread] = {};
    if (exists) {
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) codes[i] = shared.codes.get<uint2>(place.row(i), in_window);
    }
    const uint4 exponents = load<uint4>(shared.exponents[span] + place.row(0));
#if GIVEN
    const int byte = int(kE8M0One);
#else
    const int byte = tile_byte(exponents, codes, shared.warp_largest);
    const int64_t scale_column = window + thread;
    if (scale_column < kHidden) out_scales[tile.index * kHidden + scale_column] = e8m0_value(uint32_t(byte));
#endif
    scale_rows(exponents, byte, codes);
    turn(codes, ColumnWriter(out, kHidden, column, tile, place));
}

}  // namespace fp4comm
