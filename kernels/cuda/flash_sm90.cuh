// Shared by the forms of flash attention for sm_90a: the maps of their operands, the ring of tiles, sizes.
#pragma once
#include "bulk_copy.cuh"
#include "flash.cuh"

#define GROUP_ROWS 64  // rows of a block's own tile for each of its 2 groups of four warps

// The maps of q, k, v and dout, which flash_maps.cu writes.
struct FlashMaps {
    const u64 *q, *k, *v, *dout;
};

DEVICE FlashMaps flash_maps_at(const u64* maps) { return {maps, maps + MAP_WORDS, maps + 2 * MAP_WORDS, maps + 3 * MAP_WORDS}; }

// Which of the operands' heads a block reads, and of which sample.
struct TileOf {
    int head, sample;
};

// STAGES pairs of tiles of ROWS rows, copied by two maps to place `pairs` on, each with a barrier, followed by one
// barrier for the block's own tiles. Pair n overwrites pair n - STAGES.
template <int ROWS, int DIM, int STAGES> struct Ring {
    static constexpr int SECOND = ROWS * DIM, PAIR = 2 * SECOND, BARRIERS = (STAGES + 1) * BARRIER_SIZE;
    int pairs, barriers;
    const u64 *first, *second;

    DEVICE int place(int n) const { return pairs + n % STAGES * PAIR; }
    DEVICE int barrier(int n) const { return barriers + n % STAGES * BARRIER_SIZE; }
    DEVICE int parity(int n) const { return n / STAGES & 1; }
    DEVICE int own_barrier() const { return barriers + STAGES * BARRIER_SIZE; }

    // Initialises all barriers and starts to copy the block's own tiles, from place 0 on. Called by one thread, before
    // any pair.
    template <int OWN> DEVICE void begin(Tiles tiles, const u64* const (&own)[OWN], TileOf of, int row) const {
        map_is_written(first), map_is_written(second);
        for (int i = 0; i <= STAGES; i++) barrier_begin(tiles, barriers + i * BARRIER_SIZE);
        expect_bytes(tiles, own_barrier(), OWN * bytes_of_tile<FLASH_ROWS, DIM>());
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            map_is_written(own[i]);
            copy_tile<FLASH_ROWS, DIM>(tiles, i * FLASH_ROWS * DIM, own[i], of.head, row, of.sample, own_barrier());
        }
    }

    // Starts to copy pair n. Called by one thread.
    DEVICE void copy(Tiles tiles, int n, TileOf of, int row) const {
        expect_bytes(tiles, barrier(n), 2 * bytes_of_tile<ROWS, DIM>());
        copy_tile<ROWS, DIM>(tiles, place(n), first, of.head, row, of.sample, barrier(n));
        copy_tile<ROWS, DIM>(tiles, place(n) + SECOND, second, of.head, row, of.sample, barrier(n));
    }
};
