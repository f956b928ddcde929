// Row-wise MXFP4 to column-wise MXFP4: blocks of 32 rows are quantized again along the columns.
//
// All numbers are an E2M1 number times a power of two, of which the largest in a column is 1, 1.5 or 0 times such a
// power. There all scale modes agree, and no number has to be built: exponents are compared as integers and codes
// shifted as FP16. As in the definition, scales do not overflow where 6 * 2^(byte - 127) does.
//
// Macros: HIDDEN, SPANS (1).
#include "columns.cuh"
#include "e2m1.cuh"

namespace fp4comm {
namespace {

constexpr int64_t kHidden = HIDDEN;
constexpr int kThreads = 128;
constexpr int kColumnsPerThread = 4;
constexpr int kColumns = kColumnsPerThread * kThreads;

struct Shared {
    ulonglong2 rows[kBlockSize];  // addresses of codes and scales
};

// Four columns of 32 rows.
struct Codes {
    uint32_t bytes[kBlockSize];       // per column: upper byte of the FP16 number code * 2^-14
    uint32_t scales[kBlockSize / 2];  // bytes of two rows, 16 bits each
};

// Keys of four codes as two pairs, whose order is that of the magnitudes: twice the exponent plus the mantissa bit, and
// kSome for all but zero. `doubled`: 2 * scale byte + 1, twice.
constexpr uint32_t kSome = 0x4000;

__device__ inline void update_largest(uint32_t magnitudes, uint32_t doubled, uint32_t* largest) {
    const uint32_t low = __byte_perm(0x03020000u, 0x07060504u, magnitudes);
    const uint32_t high = __byte_perm(0x40404000u, 0x40404040u, magnitudes);
    largest[0] = max_u16x2(largest[0], __byte_perm(low, high, 0x5140) + doubled);
    largest[1] = max_u16x2(largest[1], __byte_perm(low, high, 0x7362) + doubled);
}

// Scale of a column from its largest key: 4, the code 6 or less, goes to the exponent two above it.
__device__ inline uint32_t scale_of(uint32_t key) {
    const int exponent = (int(key - kSome - 1) >> 1) - 1;
    return key >= kSome && exponent > 2 ? uint32_t(exponent - 2) : 0;
}

// Reads the rows; returns whether one of them is NaN here.
__device__ inline bool read_rows(const Shared& shared, int64_t column, Codes& rows, uint32_t* largest) {
    uint32_t codes[kBlockSize];
    uint32_t bytes[kBlockSize];
#pragma unroll
    for (int r = 0; r < kBlockSize; ++r) {
        const ulonglong2 row = shared.rows[r];
        codes[r] = load_streaming<uint16_t>(reinterpret_cast<const uint8_t*>(row.x) + column / 2);
        bytes[r] = reinterpret_cast<const uint8_t*>(row.y)[column / kBlockSize];
    }
    uint32_t largest_byte = 0;
#pragma unroll
    for (int r = 0; r < kBlockSize; ++r) {
        const uint32_t magnitudes = codes[r] & 0x7777u;
        update_largest(magnitudes, (2 * bytes[r] + 1) * 0x10001u, largest);
        const uint32_t signs = __byte_perm(codes[r] << 4, codes[r], 0x5140);
        rows.bytes[r] = __byte_perm(0x06040200u, 0x0e0c0a08u, magnitudes) | (signs & 0x80808080u);
        largest_byte = bytes[r] > largest_byte ? bytes[r] : largest_byte;
    }
#pragma unroll
    for (int r = 0; r < kBlockSize; r += 2) rows.scales[r / 2] = pair_of(bytes[r], bytes[r + 1]);
    return largest_byte == kE8M0NaN;
}

// 2^(scale byte of the row - `scale`) for two rows as FP16, from 2^-6, where every code becomes 0, to 2^3: beyond it
// only zeros can be, as 0.5 * 2^4 is more than the 6 that the largest of a column becomes at most.
__device__ inline uint32_t powers_of(uint32_t scales, uint32_t scale) {
    constexpr uint32_t kLift = 256;  // keeps differences positive
    const uint32_t exponents = scales + (kLift + 15 - scale) * 0x10001u;
    const uint32_t lowest = (kLift + 9) * 0x10001u;
    const uint32_t highest = (kLift + 18) * 0x10001u;
    return (min_u16x2(max_u16x2(exponents, lowest), highest) << 10) - (kLift * 0x10001u << 10);
}

// Codes of column `c` under its scale.
__device__ inline uint4 encode_column(const Codes& rows, int c, uint32_t scale) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = 8 * w + 2 * i;
            const uint32_t both = __byte_perm(rows.bytes[r], rows.bytes[r + 1], c < 2 ? 0x5140 : 0x7362);
            const uint32_t numbers = __byte_perm(both, 0, c % 2 == 0 ? 0x1404 : 0x3424);
            pairs[i] = mul_f16x2(numbers, powers_of(rows.scales[r / 2], scale));
        }
        words[w] = e2m1x8_from_f16<false>(pairs);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ inline void find_rows(const ColumnTile& tile, const int64_t* src_row, const uint8_t* data,
                                 int64_t data_stride, const uint8_t* scales, int64_t scales_stride, Shared& shared) {
    if (threadIdx.x < kBlockSize) {
        const int64_t row = source_row(tile, src_row, int(threadIdx.x));
        shared.rows[threadIdx.x].x = row_address(data, row, data_stride);
        shared.rows[threadIdx.x].y = row_address(scales, row, scales_stride);
    }
    __syncthreads();
}

}  // namespace

// Grid: tiles of 32 rows x ceil(HIDDEN / kColumns), columns first. A group's result is [HIDDEN][its tiles].
extern "C" __global__ void __launch_bounds__(kThreads)
    mxfp4_to_mxfp4_columns(const uint8_t* data, int64_t data_stride, const uint8_t* scales, int64_t scales_stride,
                           const int64_t* src_row, const int64_t* groups, int64_t num_groups, int64_t num_rows,
                           uint8_t* packed, uint8_t* out_scales) {
    constexpr unsigned kWindows = unsigned(ceil_div(kHidden, kColumns));
    __shared__ Shared shared;
    const ColumnTile tile = find_tile(blockIdx.x / kWindows, groups, num_groups, num_rows, kBlockSize);
    find_rows(tile, src_row, data, data_stride, scales, scales_stride, shared);
    const int64_t column = blockIdx.x % kWindows * int64_t(kColumns) + threadIdx.x * kColumnsPerThread;
    if (column >= kHidden) return;
    Codes rows;
    uint32_t largest[2] = {0, 0};
    const bool nan = read_rows(shared, column, rows, largest);
    const int64_t in_column = tile.in_group / kBlockSize;
    const int64_t num_blocks = ceil_div(tile.group_size, kBlockSize);
    const int64_t first = (tile.index - in_column) * kHidden + column * num_blocks + in_column;
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
        const uint32_t scale = scale_of(largest[c / 2] >> (c % 2 * 16) & 0xffffu);
        const uint4 codes = encode_column(rows, c, scale);
        const int64_t at = first + c * num_blocks;
        store(packed + at * (kBlockSize / 2), nan ? make_uint4(0, 0, 0, 0) : codes);
        out_scales[at] = uint8_t(nan ? kE8M0NaN : scale);
    }
}

}  // namespace fp4comm
