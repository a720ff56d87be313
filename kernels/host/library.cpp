// All kernels as a shared library for the host, compiled by tests. `kernels.inc` is generated from the crate's table.
#include "cuda_host.h"

#include <type_traits>
#include <utility>

#include "sources.inc"

namespace {

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

}  // namespace

// The types in the table must equal the types in the source exactly, including `const`.
#define ENTRY(name, ...) \
    static_assert(std::is_same_v<decltype(&name), void (*)(__VA_ARGS__)>, #name ": the table has other arguments");
#include "kernels.inc"
#undef ENTRY

// Runs a kernel with threads in the order of the seed. Returns null, or the reason of the failure.
extern "C" const char* meshwork_launch(const char* name, void** args, const unsigned* grid, const unsigned* block, unsigned shared,
                                       uint64_t seed) {
#define ENTRY(kernel, ...) {#kernel, &kernel},
    static const Entry entries[] = {
#include "kernels.inc"
    };
#undef ENTRY
    for (const Entry& entry : entries) {
        if (strcmp(name, entry.name)) continue;
        auto run = [&] { entry.call(entry.kernel, args); };
        return host::launch(run, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, seed);
    }
    return "no kernel of that name";
}

// Disables the barrier on this line of a file; line 0 enables all barriers.
extern "C" void meshwork_skip(const char* file, int line) { host::skipped_file = file, host::skipped_line = line; }
