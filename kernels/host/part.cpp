// Kernels of some files, a part of the library for the host. `sources.inc` and `kernels.inc` are generated from the
// crate's table.
#include "entry_host.h"

#include "sources.inc"

// The types in the table must equal the types in the source exactly, including `const`.
#define ENTRY(name, ...) \
    static_assert(std::is_same_v<decltype(&name), void (*)(__VA_ARGS__)>, #name ": the table has other arguments");
#include "kernels.inc"
#undef ENTRY

[[maybe_unused]] static const bool added = [] {
#define ENTRY(kernel, ...) host::entries().emplace_back(#kernel, &kernel);
#include "kernels.inc"
#undef ENTRY
    return true;
}();
