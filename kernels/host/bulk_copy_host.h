// The twins of ../cuda/bulk_copy.cuh: copies of boxes and the barriers that count their bytes, on the host.
// `cuda_host.h` includes this.
//
// A copy completes when a thread waits for its phase. Until then its places must not be accessed; afterwards a thread
// may read them once it has waited for the phase, or for a barrier of the block after such a wait.
#pragma once
#include <map>

namespace host {

// A map of an operand, in the 128 bytes of a hardware map.
struct OperandMap {
    uint64_t written;  // detects a map that was never written
    uint64_t from, samples, rows, heads, features, row, sample;
};
constexpr uint64_t WRITTEN = 0x70616d206c6c6177;
constexpr int BOX = 64;  // rows and features of a copy

// A box in flight.
struct Box {
    Shared<uint16_t>* tiles;
    int to;
    uint32_t phase;
    std::vector<uint16_t> values;
};

struct ByteBarrier : Phases {
    long long expected = 0, come = 0;
    bool arrived = false;
    std::deque<Box> boxes;

    // Ends the phase if all expected bytes have arrived.
    void settle() {
        if (!arrived || come != expected) return;
        completed++, expected = come = 0, arrived = false;
    }
};

// The barrier at a place of tiles, in this block; null before it is initialised.
inline std::map<std::pair<const void*, int>, ByteBarrier>& byte_barriers() {
    static std::map<std::pair<const void*, int>, ByteBarrier> all;
    return all;
}

inline ByteBarrier& byte_barrier(Shared<uint16_t>& tiles, int at) {
    static_cast<void>(static_cast<uint16_t>(tiles[at]));  // a read, to detect a race with the barrier's initialisation
    auto found = byte_barriers().find({&tiles, at});
    if (found == byte_barriers().end() || found->second.block != block_epoch) fail("no mbarrier begins at this place");
    return found->second;
}

inline void wait_for_phase(const char* file, int line, Shared<uint16_t>& tiles, int at, int parity) {
    if (skips(file, line)) return;
    ByteBarrier& barrier = byte_barrier(tiles, at);
    current->waits_for = &barrier, current->parity = unsigned(parity);
    if (!barrier.over(unsigned(parity))) leave(State::at_phase);
    while (!barrier.boxes.empty() && barrier.boxes.front().phase < barrier.completed) {
        Box& box = barrier.boxes.front();
        for (int i = 0; i < BOX * BOX; i++) box.tiles->come(box.to + i, box.values[i], &barrier, box.phase);
        barrier.boxes.pop_front();
    }
    if (barrier.seen.size() < live) barrier.seen.resize(live);
    barrier.seen[current->index] = barrier.completed;
}

}  // namespace host

inline void write_map(unsigned long long* map, const uint16_t* from, long long samples, long long rows, long long heads, int features, long long row,
                      long long sample) {
    if (reinterpret_cast<uintptr_t>(map) % 64) host::fail("a map at a place that is no multiple of 64 bytes");
    if (reinterpret_cast<uintptr_t>(from) % 16 || features % 8 || row % 8 || sample % 8) host::fail("a map of what does not lie at multiples of 16 bytes");
    host::OperandMap of{host::WRITTEN, reinterpret_cast<uint64_t>(from), uint64_t(samples), uint64_t(rows), uint64_t(heads), uint64_t(features), uint64_t(row), uint64_t(sample)};
    memset(map, 0, 128);
    memcpy(map, &of, sizeof of);
}

inline void map_is_written(const unsigned long long* map) {
    if (*map != host::WRITTEN) host::fail("a map that nobody wrote");
}

inline void barrier_begin(Tiles tiles, int at) {
    if (at % 4) host::fail("an mbarrier at a place that is no multiple of 8 bytes");
    for (int i = 0; i < 4; i++) tiles[at + i] = uint16_t(0);
    host::ByteBarrier barrier;
    barrier.block = host::block_epoch;
    host::byte_barriers()[{&tiles, at}] = barrier;
}

inline void expect_bytes(Tiles tiles, int at, int bytes) {
    host::ByteBarrier& barrier = host::byte_barrier(tiles, at);
    if (barrier.arrived) host::fail("a thread expects bytes twice in a phase of an mbarrier");
    barrier.expected += bytes, barrier.arrived = true;
    barrier.settle();
}

#define wait_for_bytes(tiles, at, parity) host::wait_for_phase(__FILE__, __LINE__, tiles, at, parity)

inline void copy_box(Tiles tiles, int to, const unsigned long long* map, int feature, int head, int row, int sample, int at) {
    using namespace host;
    map_is_written(map);
    if (to % 512) fail("a copy in the swizzle of 128 bytes to a place that is no multiple of 1024 bytes");
    OperandMap of;
    memcpy(&of, map, sizeof of);
    ByteBarrier& barrier = byte_barrier(tiles, at);
    Box box{&tiles, to, barrier.completed, std::vector<uint16_t>(BOX * BOX)};
    auto from = reinterpret_cast<const uint16_t*>(of.from);
    auto inside = [](long long at, uint64_t count) { return at >= 0 && uint64_t(at) < count; };
    for (int r = 0; r < BOX; r++) {
        for (int e = 0; e < BOX; e++) {
            int place = r * BOX + ((e / 8 ^ (r & 7)) * 8 + e % 8);
            tiles[to + place].array.begin(to + place);
            if (!inside(sample, of.samples) || !inside(row + r, of.rows) || !inside(head, of.heads) || !inside(feature + e, of.features)) continue;
            box.values[place] = from[sample * of.sample + (row + r) * of.row + head * of.features + feature + e];
        }
    }
    barrier.boxes.push_back(std::move(box));
    barrier.come += 2 * BOX * BOX;
    if (barrier.come > barrier.expected) {
        fail("an mbarrier expects " + std::to_string(barrier.expected) + " bytes, and " + std::to_string(barrier.come) + " come");
    }
    barrier.settle();
}
