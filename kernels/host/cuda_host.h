// CUDA C++ on the host: the subset that the kernels of ../cuda use, for g++ on x86-64, with checks.
//
// Every thread of a block is a fiber with its own stack. A fiber runs until it waits (for its block at __syncthreads,
// or for its warp at a shuffle) or ends; the next one then runs. A seed determines their order and the order of the
// blocks: a kernel whose results depend on the seed has a race. A launch fails, with a message that names the thread,
// if
//
// - two threads touch a word of shared memory, at least one writes it, and no barrier of the block separates them. This
//   is detected in any order of execution, because each word records its readers and writers since the last barrier;
// - a thread reads a word of shared memory that no thread of its block has written, or accesses one beyond the array;
// - threads wait at a barrier or shuffle that other threads of their block or warp never reach, or for bytes that never
//   arrive.
//
// Not modelled: memory shared by concurrent blocks (blocks run one after the other), order between the threads of a
// warp without a barrier of the block, atomics, and time. Instructions that only PTX has are in float16_host.h,
// tensor_core_host.h and bulk_copy_host.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <sys/mman.h>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#error "fibers switch stacks by instructions of x86-64"
#endif

namespace host {

struct Dim3 {
    unsigned x, y, z;
};

enum class State { runnable, at_block, at_warp, at_phase, done };

// A barrier that counts its phases: how many have completed, and how many had completed when each thread last waited.
struct Phases {
    uint64_t block = 0;
    uint32_t completed = 0;
    std::vector<uint32_t> seen;

    bool over(unsigned parity) const { return (completed & 1) != parity; }
};

struct Fiber {
    void* stack_pointer;
    char* stack;
    Dim3 thread;
    unsigned index;
    State state;
    uint64_t slot[2];   // its values in the last two shuffles
    unsigned shuffles;  // shuffles passed
    char given[2][32];  // its operands of the last two warp-wide instructions
    unsigned gathers;   // warp-wide instructions passed
    const Phases* waits_for;  // in state at_phase: waits until a phase of this parity completes
    unsigned parity;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
#endif
};

constexpr size_t STACK = 256 << 10;
constexpr unsigned WARP = 32;

inline Fiber* current;
inline std::vector<Fiber> fibers;
inline unsigned live;  // fibers of this block
inline Dim3 block_index, block_dim, grid_dim;
inline uint64_t epoch;        // barriers so far, over all blocks: unique for each interval between barriers
inline uint64_t block_epoch;  // the first epoch of this block
inline size_t given_bytes;    // dynamic shared memory of the launch
inline std::string message;   // why the launch failed
inline bool abandoned;        // whether any launch has failed, with fibers that never ended
inline std::function<void()> body;
inline void* scheduler;  // its stack pointer
#if defined(__SANITIZE_ADDRESS__)
inline const void* scheduler_bottom;
inline size_t scheduler_size;
#endif

// Of library.cpp: saves the registers that a call keeps and the stack pointer, and goes on at another stack.
extern "C" void meshwork_switch(void** save, void* load);

// Switches to the scheduler, and returns when it resumes this fiber; never after `State::done` or a failure.
inline void leave(State state) {
    Fiber* self = current;
    self->state = state;
#if defined(__SANITIZE_ADDRESS__)
    void** keep = state == State::done ? nullptr : &self->fake_stack;
    __sanitizer_start_switch_fiber(keep, scheduler_bottom, scheduler_size);
#endif
    meshwork_switch(&self->stack_pointer, scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
#endif
}

[[noreturn]] inline void fail(const std::string& what) {
    message = what + " (thread " + std::to_string(current->thread.x) + " of block " + std::to_string(block_index.x) + ", " +
              std::to_string(block_index.y) + ")";
    leave(State::done);
    abort();  // never resumed
}

[[noreturn]] inline void entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
    body();
    leave(State::done);
    abort();
}

inline void resume(Fiber& fiber) {
    current = &fiber;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack, STACK);
#endif
    meshwork_switch(&scheduler, fiber.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

inline void start(Fiber& fiber, unsigned index) {
    if (!fiber.stack) {
        void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        fiber.stack = static_cast<char*>(memory);
    }
#if defined(__SANITIZE_ADDRESS__)
    // The previous fiber on this stack left its outermost frames poisoned, or all frames if its launch failed.
    size_t left = abandoned ? STACK : STACK / 64;
    __asan_unpoison_memory_region(fiber.stack + STACK - left, left);
    fiber.fake_stack = nullptr;
#endif
    auto top = reinterpret_cast<void**>(fiber.stack + STACK);
    *--top = nullptr;  // return address of entry: keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.stack_pointer = top;
    fiber.index = index;
    fiber.thread = {index % block_dim.x, index / block_dim.x % block_dim.y, index / (block_dim.x * block_dim.y)};
    fiber.state = State::runnable;
    fiber.shuffles = fiber.gathers = 0;
}

// A permutation of 0 .. count: for seed 0 the order itself, for seed 1 the reverse, else a random one.
inline std::vector<unsigned> order(unsigned count, uint64_t& seed) {
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; i++) order[i] = seed == 1 ? count - 1 - i : i;
    for (unsigned i = count; seed > 1 && i > 1; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[i - 1], order[(seed >> 33) % i]);
        seed |= 2;
    }
    return order;
}

// Resumes waiting threads whose partners all wait too. False if there are none: all are done, or some wait forever.
inline bool release() {
    bool any = false;
    for (unsigned first = 0; first < live; first += WARP) {
        unsigned end = std::min(first + WARP, live), waiting = 0;
        for (unsigned i = first; i < end; i++) waiting += fibers[i].state == State::at_warp;
        if (waiting != end - first) continue;
        for (unsigned i = first; i < end; i++) fibers[i].state = State::runnable;
        any = true;
    }
    for (unsigned i = 0; i < live; i++) {
        if (fibers[i].state != State::at_phase || !fibers[i].waits_for->over(fibers[i].parity)) continue;
        fibers[i].state = State::runnable;
        any = true;
    }
    if (any) return true;
    unsigned waiting = 0, done = 0;
    for (unsigned i = 0; i < live; i++) {
        waiting += fibers[i].state == State::at_block;
        done += fibers[i].state == State::done;
    }
    if (done == live) return false;
    if (waiting != live) {
        for (unsigned i = 0; i < live; i++) {
            if (fibers[i].state == State::done) continue;
            current = &fibers[i];
            const char* where = fibers[i].state == State::at_block   ? "at __syncthreads, which others do not reach"
                                : fibers[i].state == State::at_phase ? "at an mbarrier, for bytes that do not come"
                                                                     : "at a shuffle, which others do not reach";
            message = std::string("a thread waits for ever ") + where + " (thread " +
                      std::to_string(current->thread.x) + " of block " + std::to_string(block_index.x) + ")";
            return false;
        }
    }
    for (unsigned i = 0; i < live; i++) fibers[i].state = State::runnable;
    epoch++;
    return true;
}

inline void run_block(uint64_t& seed) {
    block_epoch = ++epoch;
    for (unsigned i = 0; i < live; i++) start(fibers[i], i);
    do {
        for (unsigned i : order(live, seed)) {
            if (fibers[i].state == State::runnable) resume(fibers[i]);
            if (!message.empty()) return;
        }
    } while (release());
    epoch++;
}

// Runs a kernel. Returns null, or why it failed: valid until the next launch on this thread.
inline const char* launch(std::function<void()> kernel, Dim3 grid, Dim3 block, size_t shared_bytes, uint64_t seed) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    body = std::move(kernel), grid_dim = grid, block_dim = block, live = block.x * block.y * block.z;
    message.clear();
    given_bytes = shared_bytes;
    if (fibers.size() < live) fibers.resize(live);
    uint64_t block_seed = seed;
    for (unsigned flat : order(grid.x * grid.y * grid.z, block_seed)) {
        block_index = {flat % grid.x, flat / grid.x % grid.y, flat / (grid.x * grid.y)};
        run_block(seed);
        if (message.empty()) continue;
        abandoned = true;
        static thread_local std::string kept;
        kept = message;
        return kept.c_str();
    }
    return nullptr;
}

// A barrier of the source that threads skip, for tests of the checks: the end of a file name, and a line.
inline std::string skipped_file;
inline int skipped_line;

inline bool skips(const char* file, int line) {
    size_t end = strlen(file), count = skipped_file.size();
    return line == skipped_line && end >= count && skipped_file == file + (end - count);
}

inline void barrier(const char* file, int line) {
    if (!skips(file, line)) leave(State::at_block);
}

template <class T> T exchange(T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    unsigned parity = current->shuffles++ & 1;
    memcpy(&current->slot[parity], &value, sizeof(T));
    leave(State::at_warp);
    unsigned source = current->index / WARP * WARP + from;
    if (source >= live) fail("a shuffle reads lane " + std::to_string(from) + ", which the warp does not have");
    memcpy(&value, &fibers[source].slot[parity], sizeof(T));
    return value;
}

// The bits of all lanes' values.
inline unsigned ballot(bool value) {
    unsigned parity = current->shuffles++ & 1, first = current->index / WARP * WARP, bits = 0;
    current->slot[parity] = value;
    leave(State::at_warp);
    for (unsigned lane = 0; lane < WARP && first + lane < live; lane++) bits |= (fibers[first + lane].slot[parity] & 1u) << lane;
    return bits;
}

// An array in shared memory, whose words record the threads that accessed them since the last barrier.
template <class T> class Shared {
    struct Word {
        T value;
        uint64_t written, read;  // epochs of the last write and read
        unsigned writer, reader;
        bool pending;       // a copy to it has started, and its thread has not waited for it
        const Phases* by;   // the barrier whose phase `phase` delivered it, or null
        uint32_t phase;

        bool has_come() const { return current->index < by->seen.size() && by->seen[current->index] > phase; }
    };
    static constexpr unsigned SEVERAL = ~0u, BULK = ~1u;  // not thread ids: several threads, or a bulk copy with its own barrier
    std::vector<Word> words;
    const char* name;
    bool given;  // dynamic: the launch sets its size

    [[noreturn]] void fault(const char* what, int i, unsigned other) const {
        fail(std::string(what) + " " + name + "[" + std::to_string(i) + "]" +
             (other >= BULK ? std::string() : " with thread " + std::to_string(other)));
    }

  public:
    Shared(const char* name, size_t count, bool given = false) : words(count), name(name), given(given) {}

    T load(int i) {
        Word& word = words[i];
        if (word.written >= block_epoch && word.pending) fault("reads what is still being copied:", i, SEVERAL);
        if (word.written < block_epoch) fault("reads shared memory that nobody wrote:", i, SEVERAL);
        if (word.written == epoch && word.writer == BULK && !word.has_come()) fault("reads a copy without waiting for it:", i, SEVERAL);
        if (word.written == epoch && word.writer != current->index && word.writer != BULK) fault("a race: reads", i, word.writer);
        word.reader = word.read == epoch && word.reader != current->index ? SEVERAL : current->index;
        word.read = epoch;
        return word.value;
    }

    void store(int i, T value) {
        Word& word = words[i];
        if (word.written == epoch && word.writer != current->index) fault("a race: writes", i, word.writer);
        if (word.read == epoch && word.reader != current->index) fault("a race: writes", i, word.reader);
        if (word.written >= block_epoch && word.pending) fault("writes what is still being copied:", i, SEVERAL);
        word.written = epoch, word.writer = current->index, word.value = value, word.pending = false;
    }

    // Starts a store: the word must not be accessed until `end`.
    void begin(int i) { store(i, T()), words[i].pending = true; }

    void end(int i, T value) {
        Word& word = words[i];
        word.written = epoch, word.writer = current->index, word.value = value, word.pending = false;
    }

    // Ends a store whose reader waits for a phase.
    void come(int i, T value, const Phases* by, uint32_t phase) {
        Word& word = words[i];
        word.written = epoch, word.writer = BULK, word.value = value, word.pending = false, word.by = by, word.phase = phase;
    }

    struct Element {
        Shared& array;
        int i;
        operator T() const { return array.load(i); }
        T operator=(T value) const { return array.store(i, value), value; }
        T operator=(const Element& other) const { return *this = static_cast<T>(other); }
        T operator+=(T value) const { return *this = array.load(i) + value; }
    };

    Element operator[](long long i) {
        size_t count = given ? std::min(words.size(), given_bytes / sizeof(T)) : words.size();
        if (i < 0 || static_cast<size_t>(i) >= count) fail(std::string("beyond shared memory: ") + name + "[" + std::to_string(i) + "]");
        return Element{*this, static_cast<int>(i)};
    }
};

}  // namespace host

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (host::current->thread)
#define blockIdx (host::block_index)
#define blockDim (host::block_dim)
#define gridDim (host::grid_dim)
#define SHARED(type, name, count) static host::Shared<type> name(#name, count)
#define GIVEN(type, name, count) static host::Shared<type> name(#name, count, true)

#define __syncthreads() host::barrier(__FILE__, __LINE__)
template <class T> T __shfl_xor_sync(unsigned, T value, int lanes) {
    return host::exchange(value, (host::current->index % host::WARP) ^ lanes);
}
template <class T> T __shfl_sync(unsigned, T value, int lane) { return host::exchange(value, lane); }
inline unsigned __ballot_sync(unsigned, bool value) { return host::ballot(value); }
inline void __syncwarp() { host::ballot(true); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t(a) * b) >> 32); }

#include "float16_host.h"
#include "tensor_core_host.h"

#include "bulk_copy_host.h"
