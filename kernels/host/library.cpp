// What a shared library of kernels for the host offers to tests; part.cpp has the kernels.
#include "entry_host.h"

asm(R"(
.text
.p2align 4
.globl meshwork_switch
.hidden meshwork_switch
.type meshwork_switch, @function
meshwork_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size meshwork_switch, . - meshwork_switch
)");

// Runs a kernel with threads in the order of the seed. Returns null, or the reason of the failure.
extern "C" const char* meshwork_launch(const char* name, void** args, const unsigned* grid, const unsigned* block, unsigned shared,
                                       uint64_t seed) {
    for (const host::Entry& entry : host::entries()) {
        if (strcmp(name, entry.name)) continue;
        auto run = [&] { entry.call(entry.kernel, args); };
        return host::launch(run, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, seed);
    }
    return "no kernel of that name";
}

// Disables the barrier on this line of a file; line 0 enables all barriers.
extern "C" void meshwork_skip(const char* file, int line) { host::skipped_file = file, host::skipped_line = line; }
