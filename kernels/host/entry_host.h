// The kernels of a library for the host, by name.
#pragma once
#include "cuda_host.h"

#include <type_traits>
#include <utility>
#include <vector>

namespace host {

// Calls a kernel with arguments as cuLaunchKernel takes them: the address of each.
template <class... A> struct Call {
    template <size_t... I> static void each(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
        kernel(*static_cast<A*>(args[I])...);
    }
    static void of(void (*kernel)(), void** args) {
        each(reinterpret_cast<void (*)(A...)>(kernel), args, std::index_sequence_for<A...>());
    }
};

// A kernel of any type. Uses plain pointers and one function for each list of types, because a `std::function` per
// kernel would take longer to compile than the kernels.
struct Entry {
    const char* name;
    void (*kernel)();
    void (*call)(void (*)(), void**);
    template <class... A>
    Entry(const char* name, void (*kernel)(A...))
        : name(name), kernel(reinterpret_cast<void (*)()>(kernel)), call(Call<A...>::of) {}
};

// Those of all parts of the library.
inline std::vector<Entry>& entries() {
    static std::vector<Entry> all;
    return all;
}

}  // namespace host
