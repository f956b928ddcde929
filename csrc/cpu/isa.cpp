// Which instruction set the row loops use.
#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "row_ops.h"

namespace fp4comm {
namespace {

std::vector<const RowOps*> supported() {
    std::vector<const RowOps*> all{&scalar_row_ops()};
#if defined(__x86_64__)
    // Each builds on the one before. The operating system's part, saving the registers, is in what these report.
    // Every processor with AVX2 has F16C, which older compilers cannot ask for.
    if (!__builtin_cpu_supports("avx2")) return all;
    all.push_back(&avx2_row_ops());
    const bool vbmi = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vbmi");
    if (vbmi) all.push_back(&avx512_row_ops());
#endif
    return all;
}

std::atomic<const RowOps*>& current() {
    static std::atomic<const RowOps*> ops{supported().back()};
    return ops;
}

}  // namespace

const RowOps& row_ops() {
    return *current().load(std::memory_order_relaxed);
}

void use_row_ops(const std::string& name) {
    for (const RowOps* ops : supported()) {
        if (name == ops->name) return current().store(ops);
    }
    throw std::invalid_argument("isa is '" + name + "', which this processor or build does not have");
}

std::vector<std::string> supported_row_ops() {
    std::vector<std::string> names;
    for (const RowOps* ops : supported()) names.emplace_back(ops->name);
    return names;
}

}  // namespace fp4comm
