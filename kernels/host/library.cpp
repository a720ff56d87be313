// All kernels as a shared library for the host: tests compile it, with `kernels.inc` generated from the crate's table.
#include "cuda_host.h"

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include "sources.inc"

namespace {

// Calls a kernel with arguments as cuLaunchKernel takes them: the address of each.
template <class... A> struct Call {
    template <size_t... I>
    static std::function<void()> bind(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
        std::tuple<A...> values{*static_cast<A*>(args[I])...};
        return [=] { std::apply(kernel, values); };
    }
    static std::function<void()> of(void (*kernel)(A...), void** args) {
        return bind(kernel, args, std::index_sequence_for<A...>());
    }
};

template <class... A> std::function<void()> bind(void (*kernel)(A...), void** args) { return Call<A...>::of(kernel, args); }

}  // namespace

// The table's types are those of the source, to the letter: `const` is part of them.
#define ENTRY(name, ...) \
    static_assert(std::is_same_v<decltype(&name), void (*)(__VA_ARGS__)>, #name ": the table has other arguments");
#include "kernels.inc"
#undef ENTRY

// Runs a kernel in the order of threads that follows from the seed. Null, or why it failed.
extern "C" const char* meshwork_launch(const char* name, void** args, const unsigned* grid, const unsigned* block, unsigned shared,
                                       uint64_t seed) {
#define ENTRY(entry, ...) \
    if (!strcmp(name, #entry)) \
        return host::launch(bind(&entry, args), {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, seed);
#include "kernels.inc"
#undef ENTRY
    return "no kernel of that name";
}

// Makes the barrier on this line of a file none; line 0 for none of them.
extern "C" void meshwork_skip(const char* file, int line) { host::skipped_file = file, host::skipped_line = line; }
