// Products of four warps by wgmma, instructions that only sm_90a has: 64 rows at a time, with both operands or only the
// right one from shared memory.
//
// Each function has a device form and a host twin in ../host/tensor_core_host.h, which decodes descriptors as in the
// PTX ISA ("Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions") and computes at the wait. No header
// of the CUDA toolkit is needed.
//
// Places    accumulators: warp w of the four has rows 16 w .. 16 w + 16, in each the places of C in tensor_core.cuh; A in registers likewise.
// Panels    operands in shared memory: panels of 64 columns, rows of 128 bytes, chunks at place<64> of tensor_core.cuh,
//           which is the 128-byte swizzle of the hardware if the panel begins at a multiple of 1024 bytes. Rows are 128
//           bytes apart, groups of 8 rows 1024.
// Order     warp_group_begin() before the first product that reads registers written by other instructions; commit and
//           wait before any thread reads the accumulators or overwrites operands. Tiles are filled by bulk_copy.cuh:
//           writes by other instructions would need a fence (fence.proxy.async) before products read them.
#pragma once
#include "tensor_core.cuh"

#define PANEL 64  // columns of a panel

#ifndef TENSOR_CORE_TWINS

// The low bits of an address in shared memory, as in descriptors.
DEVICE u64 descriptor_address(Tiles tiles, int at) { return (shared_address(tiles + at) & 0x3ffffu) >> 4; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

DEVICE void warp_group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warp_group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all groups of products but the last PENDING.
template <int PENDING> DEVICE void warp_group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// d [64, 64] = a bᵀ, or d += a bᵀ with `add`, of 16 columns of a [64, ..] and b [64, ..].
DEVICE void warp_group_product(float (&d)[8][4], Tiles, u64 a, u64 b, bool add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d [64, 64] = a b, or d += a b with `add`, of a [64, 16] in registers and 16 rows of b [.., 64].
DEVICE void warp_group_product_of(float (&d)[8][4], Tiles, const u32 (&a)[4], u64 b, bool add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// d [64, 128] = a bᵀ, or d += a bᵀ with `add`, of 16 columns of a [64, ..] and b [128, ..].
DEVICE void warp_group_product(float (&d)[16][4], Tiles, u64 a, u64 b, bool add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;"
        " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),
          "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]),
          "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]),
          "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d [64, 128] = a b, or d += a b with `add`, of a [64, 16] in registers and 16 rows of b [.., 128].
DEVICE void warp_group_product_of(float (&d)[16][4], Tiles, const u32 (&a)[4], u64 b, bool add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;"
        " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),
          "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]),
          "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]),
          "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#else

// Other targets compile these kernels but never launch them.
DEVICE void warp_group_begin() { asm volatile("trap;"); }
DEVICE void warp_group_commit() {}
template <int PENDING> DEVICE void warp_group_wait() {}
template <int N> DEVICE void warp_group_product(float (&)[N][4], Tiles, u64, u64, bool) {}
template <int N> DEVICE void warp_group_product_of(float (&)[N][4], Tiles, const u32 (&)[4], u64, bool) {}

#endif
#endif

// The descriptor of an operand in shared memory for products: `at` is the start of its first row, plus 16 for each step
// over columns in a panel; `next_panel` is the distance between panels in elements, needed only for an operand whose
// rows are summed over (transposed, in tensor_core.cuh).
DEVICE u64 descriptor(Tiles tiles, int at, int next_panel) {
    u64 swizzle = 1ull << 62, group_of_rows = static_cast<u64>(8 * 2 * PANEL / 16) << 32;
    return descriptor_address(tiles, at) | static_cast<u64>(2 * next_panel / 16) << 16 | group_of_rows | swizzle;
}

// The address in a descriptor of column `column` of row `row` of a tile of ROWS rows in panels.
template <int ROWS> DEVICE int panel_place(int tile, int row, int column) {
    return tile + (column / PANEL * ROWS + row) * PANEL + column % PANEL;
}

// d [64, 8 N] = A Bᵀ, over DIM columns, of rows row .. row + 64 of tile a, which has A_ROWS, and the 8 N rows of tile
// b.
template <int DIM, int A_ROWS, int N> DEVICE void multiply_groups(float (&d)[N][4], Tiles tiles, int a, int row, int b) {
#pragma unroll
    for (int e = 0; e < DIM; e += 16) {
        u64 left = descriptor(tiles, panel_place<A_ROWS>(a, row, e), 0), right = descriptor(tiles, panel_place<8 * N>(b, 0, e), 0);
        warp_group_product(d, tiles, left, right, e > 0);
    }
}

// d [64, 8 M] += A B of 16 K columns of A in registers, and the 16 K rows of tile b.
template <int K, int M> DEVICE void add_groups(float (&d)[M][4], Tiles tiles, const u32 (&a)[K][4], int b) {
#pragma unroll
    for (int k = 0; k < K; k++) warp_group_product_of(d, tiles, a[k], descriptor(tiles, panel_place<16 * K>(b, 16 * k, 0), 16 * K * PANEL), true);
}
