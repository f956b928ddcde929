// Python module fp4comm._cpu. Pointers are integers, sizes int64, strides bytes; the GIL is released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "codec.h"
#include "float_environment.h"
#include "route.h"
#include "row_ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fp4comm {
namespace {

using Address = uintptr_t;

template <typename T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

template <typename E>
E checked_enum(int value, int count, const char* what) {
    if (value < 0 || value >= count) {
        throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + "; accepted: 0.." +
                                    std::to_string(count - 1));
    }
    return static_cast<E>(value);
}

Kind checked_kind(int kind) {
    return checked_enum<Kind>(kind, kNumKinds, "kind");
}

using Guard = nb::call_guard<nb::gil_scoped_release, DefaultFloatEnvironment>;

void bind_types(nb::module_& m) {
    nb::class_<Rows>(m, "Rows", "Rows of one kind at fixed strides in bytes; scales_ptr 0 where the kind has none.")
        .def(
            "__init__",
            [](Rows* self, int kind, Address data, int64_t data_stride, Address scales, int64_t scales_stride) {
                new (self) Rows{checked_kind(kind), pointer<uint8_t>(data), data_stride, pointer<uint8_t>(scales),
                                scales_stride};
            },
            "kind"_a, "data_ptr"_a, "data_stride_bytes"_a, "scales_ptr"_a, "scales_stride_bytes"_a)
        .def_prop_ro("kind", [](const Rows& rows) { return int(rows.kind); })
        .def_prop_ro("data_ptr", [](const Rows& rows) { return reinterpret_cast<Address>(rows.data); })
        .def_ro("data_stride_bytes", &Rows::data_stride)
        .def_prop_ro("scales_ptr", [](const Rows& rows) { return reinterpret_cast<Address>(rows.scales); })
        .def_ro("scales_stride_bytes", &Rows::scales_stride);

    nb::class_<Options>(m, "Options", "How MXFP4 is encoded, and decoded where `hadamard` is set.")
        .def(
            "__init__",
            [](Options* self, int scale_mode, int rounding, bool hadamard, uint64_t seed, uint32_t stream) {
                new (self) Options{checked_enum<ScaleMode>(scale_mode, 3, "scale_mode"),
                                   checked_enum<Rounding>(rounding, 2, "rounding"), hadamard, seed, stream};
            },
            "scale_mode"_a = int(ScaleMode::kEven), "rounding"_a = int(Rounding::kNearest), "hadamard"_a = false,
            "seed"_a = 0, "stream"_a = 0)
        .def_prop_ro("scale_mode", [](const Options& options) { return int(options.scale_mode); })
        .def_prop_ro("rounding", [](const Options& options) { return int(options.rounding); })
        .def_ro("hadamard", &Options::hadamard)
        .def_ro("seed", &Options::seed)
        .def_ro("stream", &Options::stream);

    nb::class_<RowLayout>(m, "RowLayout", "Offsets and sizes, in bytes, in a row of a message.")
        .def_ro("data_bytes", &RowLayout::data_bytes)
        .def_ro("scale_offset", &RowLayout::scale_offset)
        .def_ro("scale_bytes", &RowLayout::scale_bytes)
        .def_ro("weight_offset", &RowLayout::weight_offset)
        .def_ro("expert_offset", &RowLayout::expert_offset)
        .def_ro("row_bytes", &RowLayout::row_bytes);

    m.def(
        "row_layout",
        [](int kind, int64_t hidden, int64_t num_topk) {
            return RowLayout::make(checked_kind(kind), hidden, num_topk);
        },
        "kind"_a, "hidden"_a, "num_topk"_a);
}

void bind_codec(nb::module_& m) {
    m.def(
        "convert_rows",
        [](const Rows& src, const Rows& dst, int64_t num_rows, int64_t hidden, Address src_row, Address dst_row,
           const Options& options) {
            convert_rows(src, dst, num_rows, hidden, pointer<int64_t>(src_row), pointer<int64_t>(dst_row), options);
        },
        "src"_a, "dst"_a, "num_rows"_a, "hidden"_a, "src_row_ptr"_a, "dst_row_ptr"_a, "options"_a, Guard());
    m.def(
        "sum_rows",
        [](const Rows& src, const Rows& dst, int64_t num_rows, int64_t num_terms, int64_t hidden, Address src_row,
           Address weights, Address dst_row, const Options& options) {
            sum_rows(src, dst, num_rows, num_terms, hidden, pointer<int64_t>(src_row), pointer<float>(weights),
                     pointer<int64_t>(dst_row), options);
        },
        "src"_a, "dst"_a, "num_rows"_a, "num_terms"_a, "hidden"_a, "src_row_ptr"_a, "weights_ptr"_a, "dst_row_ptr"_a,
        "options"_a, Guard());
    m.def(
        "dot_rows",
        [](const Rows& a, const Rows& b, int64_t num, int64_t hidden, Address a_row, Address b_row, Address out,
           const Options& options) {
            dot_rows(a, b, num, hidden, pointer<int64_t>(a_row), pointer<int64_t>(b_row), pointer<float>(out), options);
        },
        "a"_a, "b"_a, "num"_a, "hidden"_a, "a_row_ptr"_a, "b_row_ptr"_a, "out_ptr"_a, "options"_a = Options(), Guard());
    m.def(
        "fp8_columns",
        [](const Rows& src, int64_t hidden, Address src_row, Address group_sizes, int64_t num_groups, Address data,
           Address scales) {
            return fp8_columns(src, hidden, pointer<int64_t>(src_row), pointer<int64_t>(group_sizes), num_groups,
                               pointer<uint8_t>(data), pointer<float>(scales));
        },
        "src"_a, "hidden"_a, "src_row_ptr"_a, "group_sizes_ptr"_a, "num_groups"_a, "data_ptr"_a, "scales_ptr"_a,
        Guard());
    m.def(
        "mxfp4_columns",
        [](const Rows& src, int64_t hidden, Address src_row, Address group_sizes, int64_t num_groups, Address packed,
           Address scales, const Options& options) {
            mxfp4_columns(src, hidden, pointer<int64_t>(src_row), pointer<int64_t>(group_sizes), num_groups,
                          pointer<uint8_t>(packed), pointer<uint8_t>(scales), options);
        },
        "src"_a, "hidden"_a, "src_row_ptr"_a, "group_sizes_ptr"_a, "num_groups"_a, "packed_ptr"_a, "scales_ptr"_a,
        "options"_a, Guard());
}

void bind_route(nb::module_& m) {
    m.def(
        "route",
        [](Address topk_idx, bool idx_is_64, int64_t num_tokens, int64_t num_topk, int64_t num_experts,
           int64_t num_ranks, Address token_rows, Address pair_src, Address pair_dst, Address counts) {
            return route({pointer<void>(topk_idx), idx_is_64, num_topk, num_experts, num_ranks}, num_tokens,
                         pointer<int64_t>(token_rows), pointer<int64_t>(pair_src), pointer<int64_t>(pair_dst),
                         pointer<int64_t>(counts));
        },
        "topk_idx_ptr"_a, "idx_is_64"_a, "num_tokens"_a, "num_topk"_a, "num_experts"_a, "num_ranks"_a,
        "token_rows_ptr"_a, "pair_src_ptr"_a, "pair_dst_ptr"_a, "counts_ptr"_a, Guard());
    m.def(
        "write_meta",
        [](Address buffer, const RowLayout& layout, Address topk_idx, bool idx_is_64, Address weights, Address pair_src,
           Address pair_dst, int64_t num_pairs, int64_t num_topk, int64_t num_experts, int64_t num_ranks,
           Address counts) {
            write_meta(pointer<uint8_t>(buffer), layout,
                       {pointer<void>(topk_idx), idx_is_64, num_topk, num_experts, num_ranks}, pointer<float>(weights),
                       pointer<int64_t>(pair_src), pointer<int64_t>(pair_dst), num_pairs, pointer<int64_t>(counts));
        },
        "buf_ptr"_a, "layout"_a, "topk_idx_ptr"_a, "idx_is_64"_a, "weights_ptr"_a, "pair_src_ptr"_a, "pair_dst_ptr"_a,
        "num_pairs"_a, "num_topk"_a, "num_experts"_a, "num_ranks"_a, "counts_ptr"_a, Guard());
    m.def(
        "read_meta",
        [](Address buffer, const RowLayout& layout, int64_t num_rows, int64_t num_topk, Address idx, Address weights,
           Address counts, int64_t num_local_experts) {
            return read_meta(pointer<uint8_t>(buffer), layout, num_rows, num_topk, pointer<int32_t>(idx),
                             pointer<float>(weights), pointer<int64_t>(counts), num_local_experts);
        },
        "buf_ptr"_a, "layout"_a, "num_rows"_a, "num_topk"_a, "idx_ptr"_a, "weights_ptr"_a, "counts_ptr"_a,
        "num_local_experts"_a, Guard());
    m.def(
        "expert_layout",
        [](Address idx, int64_t num_rows, int64_t num_topk, int64_t num_local_experts, int64_t alignment,
           int64_t capacity_rows, Address counts, Address row, Address slot_pos, Address group_sizes) {
            return expert_layout(pointer<int32_t>(idx), num_rows, num_topk, num_local_experts, alignment, capacity_rows,
                                 pointer<int64_t>(counts), pointer<int64_t>(row), pointer<int64_t>(slot_pos),
                                 pointer<int64_t>(group_sizes));
        },
        "idx_ptr"_a, "num_rows"_a, "num_topk"_a, "num_local_experts"_a, "alignment"_a, "capacity_rows"_a,
        "counts_ptr"_a, "row_ptr"_a, "slot_pos_ptr"_a, "group_sizes_ptr"_a, Guard());
}

}  // namespace
}  // namespace fp4comm

NB_MODULE(_cpu, m) {
    m.doc() = "Conversions, sums and routing on the CPU.";
    // Options that are default arguments live until the interpreter ends, which is no leak.
    nb::set_leak_warnings(false);
    fp4comm::bind_types(m);
    fp4comm::bind_codec(m);
    fp4comm::bind_route(m);
    m.def("isa", [] { return std::string(fp4comm::row_ops().name); }, "Instruction set in use.");
    m.def("set_isa", &fp4comm::use_row_ops, "name"_a, "Uses another instruction set that this processor has.");
    m.def("supported_isas", &fp4comm::supported_row_ops, "Instruction sets of this processor, slowest first.");
}
