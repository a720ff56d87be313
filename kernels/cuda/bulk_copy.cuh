// Copies of tiles by TMA, the instructions of sm_90: one thread starts a copy of thousands of bytes, which costs the
// other threads no registers and no addresses, and a barrier in shared memory (mbarrier) counts the bytes that have
// arrived.
//
// Each function has a device form and a host twin in ../host/bulk_copy_host.h, which detects reads without a wait,
// wrong byte counts, and tiles that are refilled while they are read. No header of the CUDA toolkit is needed.
//
// Maps      describe an operand in memory to the copies (PTX ISA, "Tensor-map"): MAP_WORDS words at a multiple of 64
//           bytes. A kernel writes them by write_map, launched before the kernels that use them, so that a launch needs
//           no call of the driver and no argument of a special kind
//           (docs/decisions/0046-kernels-write-their-tensor-maps.md). Of an operand [samples, rows, heads, features]:
//           heads are contiguous, rows and samples as far apart as the caller says. Its address and these distances are
//           multiples of 16 bytes.
// Tiles     panels of warp_group.cuh, BOX_ROWS rows per copy, in the swizzle of 128 bytes, which the hardware writes;
//           zeros beyond the features and the rows.
// Barriers  BARRIER_SIZE places of a tile each, used in phases: the thread that starts copies first announces their
//           bytes by expect_bytes, then starts them; wait_for_bytes waits for the end of a phase of that parity, 0 for
//           the first. Threads that have waited may read. A barrier of the block separates the last read of a tile from
//           the next copy to it.
#pragma once
#include "warp_group.cuh"

#define MAP_WORDS 16
#define BOX_ROWS 64
#define BARRIER_SIZE 4

#ifndef TENSOR_CORE_TWINS

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Before CUDA 12.5 the instruction took distances in units of 16 bytes.
#if __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 5
#define DISTANCE(bytes) static_cast<u64>(bytes) >> 4
#else
#define DISTANCE(bytes) static_cast<u64>(bytes)
#endif
#define REPLACE(field, constraint, value) \
    asm volatile("tensormap.replace.tile." field " %1;" ::"l"(__cvta_generic_to_global(map)), constraint(value) : "memory")
#define REPLACE_BY(field, constant) \
    asm volatile("tensormap.replace.tile." field ".global.b1024.b32 [%0], " constant ";" ::"l"(__cvta_generic_to_global(map)) : "memory")

// Writes the map of an operand whose rows are `row` elements apart, and whose samples `sample`.
DEVICE void write_map(u64* map, const u16* from, i64 samples, i64 rows, i64 heads, int features, i64 row, i64 sample) {
    for (int i = 0; i < MAP_WORDS; i++) map[i] = 0;
    REPLACE("global_address.global.b1024.b64 [%0],", "l", from);
    REPLACE_BY("rank", "3");  // less one
    REPLACE("box_dim.global.b1024.b32 [%0], 0,", "r", PANEL);
    REPLACE("box_dim.global.b1024.b32 [%0], 1,", "r", 1);
    REPLACE("box_dim.global.b1024.b32 [%0], 2,", "r", BOX_ROWS);
    REPLACE("box_dim.global.b1024.b32 [%0], 3,", "r", 1);
    REPLACE("global_dim.global.b1024.b32 [%0], 0,", "r", features);
    REPLACE("global_dim.global.b1024.b32 [%0], 1,", "r", static_cast<int>(heads));
    REPLACE("global_dim.global.b1024.b32 [%0], 2,", "r", static_cast<int>(rows));
    REPLACE("global_dim.global.b1024.b32 [%0], 3,", "r", static_cast<int>(samples));
    REPLACE("global_stride.global.b1024.b64 [%0], 0,", "l", DISTANCE(2 * features));
    REPLACE("global_stride.global.b1024.b64 [%0], 1,", "l", DISTANCE(2 * row));
    REPLACE("global_stride.global.b1024.b64 [%0], 2,", "l", DISTANCE(2 * sample));
    REPLACE("element_stride.global.b1024.b32 [%0], 0,", "r", 1);
    REPLACE("element_stride.global.b1024.b32 [%0], 1,", "r", 1);
    REPLACE("element_stride.global.b1024.b32 [%0], 2,", "r", 1);
    REPLACE("element_stride.global.b1024.b32 [%0], 3,", "r", 1);
    REPLACE_BY("elemtype", "10");  // bf16
    REPLACE_BY("interleave_layout", "0");
    REPLACE_BY("swizzle_mode", "3");  // 128 bytes
    REPLACE_BY("fill_mode", "0");     // zeros
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
}

// Call this before the first copy by a map that an earlier kernel wrote.
DEVICE void map_is_written(const u64* map) { asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory"); }

// Initialises a barrier that expects bytes from one thread. A barrier of the block makes it visible to the other
// threads.
DEVICE void barrier_begin(Tiles tiles, int barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(tiles + barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void expect_bytes(Tiles tiles, int barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(tiles + barrier)), "r"(bytes) : "memory");
}

DEVICE void wait_for_bytes(Tiles tiles, int barrier, int parity) {
    u32 over = 0;
    while (!over) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(over)
                     : "r"(shared_address(tiles + barrier)), "r"(parity)
                     : "memory");
    }
}

// Starts to copy BOX_ROWS rows from `row` on, PANEL features of a head from `feature` on, to place `to` of tiles.
DEVICE void copy_box(Tiles tiles, int to, const u64* map, int feature, int head, int row, int sample, int barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            shared_address(tiles + to)),
        "l"(map), "r"(feature), "r"(head), "r"(row), "r"(sample), "r"(shared_address(tiles + barrier))
        : "memory");
}

#else

// Other targets compile these kernels but never launch them.
DEVICE void write_map(u64*, const u16*, i64, i64, i64, int, i64, i64) { asm volatile("trap;"); }
DEVICE void map_is_written(const u64*) {}
DEVICE void barrier_begin(Tiles, int) {}
DEVICE void expect_bytes(Tiles, int, int) {}
DEVICE void wait_for_bytes(Tiles, int, int) {}
DEVICE void copy_box(Tiles, int, const u64*, int, int, int, int, int) {}

#endif
#endif

// Bytes of a tile.
template <int ROWS, int WIDTH> DEVICE constexpr int bytes_of_tile() { return 2 * ROWS * WIDTH; }

// Starts to copy ROWS rows of a head into consecutive panels of ROWS rows.
template <int ROWS, int WIDTH> DEVICE void copy_tile(Tiles tiles, int tile, const u64* map, int head, int row, int sample, int barrier) {
#pragma unroll
    for (int panel = 0; panel < WIDTH / PANEL; panel++) {
#pragma unroll
        for (int r = 0; r < ROWS; r += BOX_ROWS) {
            copy_box(tiles, tile + (panel * ROWS + r) * PANEL, map, panel * PANEL, head, row + r, sample, barrier);
        }
    }
}
