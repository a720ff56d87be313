// Host twins of ../cuda/tensor_core.cuh: the effects of its instructions on the elements of a warp's lanes.
// `cuda_host.h` includes this.
#pragma once
#include <deque>

#define TENSOR_CORE_TWINS

namespace host {

// A chunk that a thread copies asynchronously: destination, contents, and the number of groups that had ended before.
struct Copy {
    Shared<uint16_t>* tiles;
    int at;
    uint16_t values[8];
    unsigned group;
};

// The pending copies of a thread of a block.
struct Copies {
    uint64_t block;
    std::deque<Copy> begun;
    unsigned groups;
};

inline Copies& copies_of_thread() {
    static std::vector<Copies> all;
    if (all.size() <= current->index) all.resize(current->index + 1);
    Copies& mine = all[current->index];
    if (mine.block != block_epoch) mine = {block_epoch, {}, 0};
    return mine;
}

// Exchanges `mine` with the other lanes of the warp, and returns the values of all lanes.
template <class T> struct Lanes {
    const unsigned parity = current->gathers++ & 1;
    const unsigned first = current->index / WARP * WARP;

    explicit Lanes(const T& mine) {
        static_assert(sizeof(T) <= sizeof current->given[0]);
        if (first + WARP > live) fail("an instruction of a whole warp, in a warp with fewer threads");
        memcpy(current->given[parity], &mine, sizeof(T));
        leave(State::at_warp);
    }
    T operator[](unsigned lane) const {
        T value;
        memcpy(&value, fibers[first + lane].given[parity], sizeof(T));
        return value;
    }
};

inline float of_bf16(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
}

struct Halves {
    uint16_t half[8];
};

}  // namespace host

#define TILES(name, count) static host::Shared<uint16_t> name(#name, count, true)
using Tiles = host::Shared<uint16_t>&;

namespace host {

// Element i of a word of an operand. Tensor cores ignore the bits that TF32 lacks, and PTX asks for a rounded number.
template <class Operand> float element(uint32_t word, unsigned i) {
    if constexpr (sizeof(typename Operand::Element) == 2) return Operand::wide(uint16_t(word >> 16 * i));
    if (word & 0x1fff) fail("an operand of TF32 that is not rounded");
    return of_bits(word);
}

}  // namespace host

template <class Operand> inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    constexpr unsigned EACH = 4 / sizeof(typename Operand::Element);  // elements of a word
    struct Words {
        uint32_t a[4], b[2];
    } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    host::Lanes<Words> lanes(mine);
    unsigned lane = host::current->index % host::WARP, g = lane / 4, t = lane % 4;
    Words of_rows[4], of_columns[2][4];
    for (unsigned i = 0; i < 4; i++) {
        of_rows[i] = lanes[4 * g + i];
        for (unsigned column = 0; column < 2; column++) of_columns[column][i] = lanes[4 * (2 * t + column) + i];
    }
    for (unsigned at = 0; at < 4; at++) {
        unsigned lower = at / 2, column = at % 2;
        for (unsigned k = 0; k < 8 * EACH; k++) {
            unsigned part = k / EACH % 4, high = k / EACH / 4;  // the lane of four that has it, and its word
            float x = host::element<Operand>(of_rows[part].a[2 * high + lower], k % EACH);
            d[at] += x * host::element<Operand>(of_columns[column][part].b[high], k % EACH);
        }
    }
}

// Shares the matrix row that this lane addresses with the other lanes.
inline host::Lanes<host::Halves> matrix_rows(Tiles tiles, int at) {
    if (at % 8) host::fail("ldmatrix at a place that is no multiple of 16 bytes");
    host::Halves row;
    for (int i = 0; i < 8; i++) row.half[i] = tiles[at + i];
    return host::Lanes<host::Halves>(row);
}

inline void load_matrices(uint32_t (&words)[4], Tiles tiles, int at) {
    auto rows = matrix_rows(tiles, at);
    unsigned lane = host::current->index % host::WARP, g = lane / 4, t = lane % 4;
    for (unsigned m = 0; m < 4; m++) memcpy(&words[m], rows[8 * m + g].half + 2 * t, 4);
}

inline void load_matrices_transposed(uint32_t (&words)[4], Tiles tiles, int at) {
    auto rows = matrix_rows(tiles, at);
    unsigned lane = host::current->index % host::WARP, g = lane / 4, t = lane % 4;
    for (unsigned m = 0; m < 4; m++) {
        words[m] = rows[8 * m + 2 * t].half[g] | uint32_t(rows[8 * m + 2 * t + 1].half[g]) << 16;
    }
}

inline int here(int x) { return x; }

inline void load_matrices(uint32_t (&words)[4], Tiles tiles, int at, int column, int offset) {
    load_matrices(words, tiles, (at ^ column) + offset);
}

inline void load_matrices_transposed(uint32_t (&words)[4], Tiles tiles, int at, int column, int offset) {
    load_matrices_transposed(words, tiles, (at ^ column) + offset);
}

// The chunk must not be accessed until its thread has waited for it, nor by other threads until a barrier after that.
inline void copy_begin(Tiles tiles, int at, const void* from, bool inside) {
    if (at % 8 || reinterpret_cast<uintptr_t>(from) % 16) host::fail("cp.async with an address that is no multiple of 16 bytes");
    host::Copies& mine = host::copies_of_thread();
    host::Copy copy{&tiles, at, {}, mine.groups};
    if (inside) memcpy(copy.values, from, sizeof copy.values);
    for (int i = 0; i < 8; i++) tiles[at + i].array.begin(at + i);
    mine.begun.push_back(copy);
}

inline void copy_commit() { host::copies_of_thread().groups++; }

template <int PENDING> void copy_wait() {
    host::Copies& mine = host::copies_of_thread();
    while (!mine.begun.empty() && mine.begun.front().group + PENDING < mine.groups) {
        host::Copy& copy = mine.begun.front();
        for (int i = 0; i < 8; i++) copy.tiles->end(copy.at + i, copy.values[i]);
        mine.begun.pop_front();
    }
}

inline float exp2_fast(float x) { return exp2f(x); }

inline void write_word(Tiles tiles, int at, uint32_t word) {
    if (at % 2) host::fail("a word at an odd place");
    tiles[at] = uint16_t(word), tiles[at + 1] = uint16_t(word >> 16);
}

inline uint32_t read_word(Tiles tiles, int at) {
    if (at % 2) host::fail("a word at an odd place");
    return uint32_t(tiles[at]) | uint32_t(tiles[at + 1]) << 16;
}

template <class Chunk> Chunk chunk_of(Tiles tiles, int at) {
    if (at % 8) host::fail("16 bytes at a place that is no multiple of them");
    Chunk chunk;
    for (int i = 0; i < 4; i++) chunk.word[i] = uint32_t(tiles[at + 2 * i]) | uint32_t(tiles[at + 2 * i + 1]) << 16;
    return chunk;
}
#define read_chunk(tiles, at) chunk_of<Chunk>(tiles, at)

template <class Chunk> void write_chunk(Tiles tiles, int at, const Chunk& chunk) {
    if (at % 8) host::fail("16 bytes at a place that is no multiple of them");
    for (int i = 0; i < 4; i++) tiles[at + 2 * i] = uint16_t(chunk.word[i]), tiles[at + 2 * i + 1] = uint16_t(chunk.word[i] >> 16);
}

// Products of four warps: ../cuda/warp_group.cuh. They are computed at the wait.

namespace host {

// An element of an operand in shared memory. `summed`: whether the sum runs over columns of the panel, else over rows.
inline float operand(Tiles tiles, uint64_t descriptor, unsigned row, unsigned column, bool summed) {
    auto bytes = [&](int bit) { return unsigned(descriptor >> bit & 0x3fff) << 4; };
    if (descriptor >> 62 != 1) fail("a descriptor without the swizzle of 128 bytes");
    unsigned from = bytes(0), panels = bytes(16), groups = bytes(32);
    if (summed && column >= 64) fail("a product over more columns than a panel has");
    unsigned at = from + column / 64 * panels + column % 64 * 2 + row / 8 * groups + row % 8 * 128;
    at ^= (at >> 7 & 7) << 4;
    return of_bf16(tiles[at / 2]);
}

// A started product: rows of this lane's warp.
struct WarpGroupProduct {
    Shared<uint16_t>* tiles;
    float (*d)[4];
    unsigned columns;
    const uint32_t* a_words;  // A in registers, or null
    uint32_t a_copy[4];
    uint64_t a, b;
    bool add;
    unsigned group;

    void run() const {
        unsigned lane = current->index % WARP, g = lane / 4, t = lane % 4, warp_row = current->index / WARP % 4 * 16;
        if (a_words && memcmp(a_words, a_copy, sizeof a_copy)) fail("an operand in registers was written before the product was waited for");
        float left[2][16];
        for (unsigned lower = 0; lower < 2; lower++) {
            for (unsigned k = 0; k < 16 && !a_words; k++) left[lower][k] = operand(*tiles, a, warp_row + g + 8 * lower, k, true);
        }
        if (a_words) {
            struct Words {
                uint16_t a[4][2];
            } mine;
            memcpy(&mine, a_copy, sizeof mine);
            Lanes<Words> lanes(mine);
            for (unsigned k = 0; k < 16; k++) {
                for (unsigned lower = 0; lower < 2; lower++) left[lower][k] = of_bf16(lanes[4 * g + k % 8 / 2].a[k / 8 * 2 + lower][k % 2]);
            }
        }
        for (unsigned column = 0; column < columns; column++) {
            if (column % 8 / 2 != t) continue;
            float right[16];
            for (unsigned k = 0; k < 16; k++) right[k] = a_words ? operand(*tiles, b, k, column, false) : operand(*tiles, b, column, k, true);
            for (unsigned lower = 0; lower < 2; lower++) {
                float& to = d[column / 8][2 * lower + column % 2];
                if (!add) to = 0.0f;
                for (unsigned k = 0; k < 16; k++) to += left[lower][k] * right[k];
            }
        }
    }
};

struct WarpGroupProducts {
    uint64_t block;
    std::deque<WarpGroupProduct> begun;
    unsigned groups;
    bool fenced;
};

inline WarpGroupProducts& products_of_thread() {
    static std::vector<WarpGroupProducts> all;
    if (all.size() <= current->index) all.resize(current->index + 1);
    WarpGroupProducts& mine = all[current->index];
    if (mine.block != block_epoch) mine = {block_epoch, {}, 0, false};
    return mine;
}

inline void begin_product(WarpGroupProduct product) {
    WarpGroupProducts& mine = products_of_thread();
    if (!mine.fenced) fail("a product of four warps before warp_group_begin");
    product.group = mine.groups;
    mine.begun.push_back(product);
}

}  // namespace host

inline uint64_t descriptor_address(Tiles, int at) { return uint64_t(2 * at) >> 4; }
inline void warp_group_begin() { host::products_of_thread().fenced = true; }
inline void warp_group_commit() { host::products_of_thread().groups++, host::products_of_thread().fenced = false; }

template <int PENDING> void warp_group_wait() {
    host::WarpGroupProducts& mine = host::products_of_thread();
    while (!mine.begun.empty() && mine.begun.front().group + PENDING < mine.groups) {
        host::WarpGroupProduct product = mine.begun.front();
        mine.begun.pop_front();
        product.run();
    }
}

template <int N> void warp_group_product(float (&d)[N][4], Tiles tiles, uint64_t a, uint64_t b, bool add) {
    host::begin_product({&tiles, d, 8 * N, nullptr, {}, a, b, add, 0});
}

template <int N> void warp_group_product_of(float (&d)[N][4], Tiles tiles, const uint32_t (&a)[4], uint64_t b, bool add) {
    host::WarpGroupProduct product{&tiles, d, 8 * N, a, {}, 0, b, add, 0};
    memcpy(product.a_copy, a, sizeof product.a_copy);
    host::begin_product(product);
}
