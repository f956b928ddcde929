// Loads and stores without alignment or aliasing assumptions.
#pragma once

#include <cstdint>
#include <cstring>

namespace fp4comm {

template <typename T>
inline T load(const void* base, int64_t index = 0) {
    T value;
    std::memcpy(&value, static_cast<const char*>(base) + index * int64_t(sizeof(T)), sizeof(T));
    return value;
}

template <typename T>
inline void store(void* base, int64_t index, T value) {
    std::memcpy(static_cast<char*>(base) + index * int64_t(sizeof(T)), &value, sizeof(T));
}

}  // namespace fp4comm
