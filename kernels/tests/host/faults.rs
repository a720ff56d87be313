//! Faults on purpose: each must be found, or the checks of the other tests mean little.

use crate::launch::{Given, try_launch};
use crate::{attention, build, compression, elementwise, experts, loss, optimizer, rows, tables};
use meshwork_kernels::{Arg, Geometry, HEADERS, Kernel, Pass, SOURCES, Source, Type, VARIANTS};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Each kernel writes `count` floats and has one fault but the first.
static FAULTY: Source = Source {
    name: "faulty.cu",
    text: r#"
#include "bulk_copy.cuh"

// Each thread writes what its neighbour wrote.
KERNEL sound(float* out, i64 count) {
    SHARED(float, words, THREADS);
    words[threadIdx.x] = static_cast<float>(threadIdx.x);
    __syncthreads();
    if (threadIdx.x < count) out[threadIdx.x] = words[(threadIdx.x + 1) % THREADS];
}

// The same without the barrier.
KERNEL missing_barrier(float* out, i64 count) {
    SHARED(float, words, THREADS);
    words[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (threadIdx.x < count) out[threadIdx.x] = words[threadIdx.x ^ 1];
}

// Two threads write a word, the same value even.
KERNEL race(float* out, i64 count) {
    SHARED(float, words, THREADS);
    words[threadIdx.x / 2] = 1.0f;
    __syncthreads();
    if (threadIdx.x < count) out[threadIdx.x] = words[threadIdx.x / 2];
}

// A write after reads of others.
KERNEL write_after_read(float* out, i64 count) {
    SHARED(float, words, THREADS);
    if (threadIdx.x == 0) words[0] = 1.0f;
    __syncthreads();
    if (threadIdx.x < count) out[threadIdx.x] = words[0];
    if (threadIdx.x == 255) words[0] = 2.0f;
}

KERNEL unwritten(float* out, i64 count) {
    SHARED(float, words, THREADS);
    if (threadIdx.x > 0) words[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x < count) out[threadIdx.x] = words[threadIdx.x];
}

KERNEL beyond(float* out, i64 count) {
    SHARED(float, words, THREADS);
    words[threadIdx.x + 1] = 1.0f;
    if (threadIdx.x < count) out[threadIdx.x] = 1.0f;
}

// A barrier that half of the threads leave out.
KERNEL divergent(float* out, i64 count) {
    if (threadIdx.x >= THREADS / 2) return;
    __syncthreads();
    if (threadIdx.x < count) out[threadIdx.x] = 1.0f;
}

// A shuffle that one lane leaves out.
KERNEL half_shuffle(float* out, i64 count) {
    float value = 1.0f;
    if (threadIdx.x != 7) value = __shfl_xor_sync(FULL_WARP, value, 1);
    if (threadIdx.x < count) out[threadIdx.x] = value;
}

// Each lane copies a chunk: its own elements, read from its neighbour's.
template <bool WAIT, bool BARRIER> DEVICE void copies(float* out, i64 count) {
    TILES(tiles, THREADS * CHUNK);
    int at = static_cast<int>(threadIdx.x) * CHUNK;
    copy_begin(tiles, at, reinterpret_cast<const u16*>(out) + at % 256, true);
    copy_commit();
    if (WAIT) copy_wait<0>();
    if (BARRIER) __syncthreads();
    u32 words[4];
    load_matrices(words, tiles, at ^ CHUNK);
    if (threadIdx.x < count) out[threadIdx.x] = words[0] == 0 && words[3] == 0 ? 1.0f : 0.0f;
}
KERNEL copied(float* out, i64 count) { copies<true, true>(out, count); }
KERNEL unwaited(float* out, i64 count) { copies<false, true>(out, count); }
KERNEL unshown(float* out, i64 count) { copies<true, false>(out, count); }

// One thread copies two boxes of `out` itself, one behind the other to the same place; all read them.
template <int BYTES, bool WAIT, bool BARRIER> DEVICE void boxes(float* out, i64 count) {
    constexpr int BOX = BOX_ROWS * PANEL;
    TILES(tiles, BOX + BARRIER_SIZE);
    u64 words[2 * MAP_WORDS];
    u64* map = words + (8 - reinterpret_cast<u64>(words) / 8 % 8) % 8;
    write_map(map, reinterpret_cast<const u16*>(out), 1, 8, 1, 64, 64, 512);
    if (threadIdx.x == 0) barrier_begin(tiles, BOX);
    __syncthreads();
    for (int n = 0; n < 2; n++) {
        if (threadIdx.x == 0) {
            expect_bytes(tiles, BOX, BYTES);
            copy_box(tiles, 0, map, 0, 0, 0, 0, BOX);
        }
        if (WAIT) wait_for_bytes(tiles, BOX, n);
        u16 first = static_cast<u16>(read_word(tiles, static_cast<int>(threadIdx.x) * 16));
        if (BARRIER) __syncthreads();
        if (n == 1 && threadIdx.x < count) out[threadIdx.x] = first == 0 ? 1.0f : 0.0f;
    }
}
KERNEL boxed(float* out, i64 count) { boxes<2 * BOX_ROWS * PANEL, true, true>(out, count); }
KERNEL boxed_unwaited(float* out, i64 count) { boxes<2 * BOX_ROWS * PANEL, false, true>(out, count); }
KERNEL boxed_too_early(float* out, i64 count) { boxes<2 * BOX_ROWS * PANEL, true, false>(out, count); }
KERNEL boxed_too_few(float* out, i64 count) { boxes<2 * BOX_ROWS * PANEL - 16, true, true>(out, count); }
KERNEL boxed_too_many(float* out, i64 count) { boxes<2 * BOX_ROWS * PANEL + 16, true, true>(out, count); }

// A number of 12 bits as an operand of TF32, which has 11, and rounded.
template <bool ROUNDED> DEVICE void product(float* out, i64 count) {
    u32 words[4] = {0x3f801000u, 0x3f801000u, 0x3f801000u, 0x3f801000u};
    if (ROUNDED) round_words<Tf32Type>(words);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma<Tf32Type>(sums, words, words[0], words[1]);
    if (threadIdx.x < count) out[threadIdx.x] = sums[0] > 8.0f ? 1.0f : 0.0f;
}
KERNEL operands_rounded(float* out, i64 count) { product<true>(out, count); }
KERNEL operands_not_rounded(float* out, i64 count) { product<false>(out, count); }

// Threads add to the same place in global memory.
KERNEL unordered(float* out, i64 count) {
    if (threadIdx.x < count) out[0] = out[0] * 0.5f + static_cast<float>(threadIdx.x);
}
"#,
};

const fn faulty(name: &'static str) -> Kernel {
    const ARGS: &[Arg] =
        &[Arg { name: "out", pass: Pass::Out, of: Type::F32 }, Arg { name: "count", pass: Pass::Value, of: Type::I64 }];
    let geometry = Geometry::TensorTiles { threads: 256, rows: 256, shared: 16_384 };
    Kernel { name, source: &FAULTY, geometry, args: ARGS }
}

#[test]
fn planted_faults_are_found() {
    let faults = [
        ("sound", ""),
        // A race, or a word that is not written yet: as the order has it.
        ("missing_barrier", " words["),
        ("race", "a race: writes words[0] with thread"),
        ("write_after_read", "a race: "),
        ("unwritten", "reads shared memory that nobody wrote: words[0] (thread 0 of block 0, 0)"),
        ("beyond", "beyond shared memory: words[256]"),
        ("divergent", "a thread waits for ever at __syncthreads, which others do not reach"),
        ("half_shuffle", "a thread waits for ever at a shuffle, which others do not reach"),
        ("copied", ""),
        ("unwaited", "reads what is still being copied: tiles["),
        // A race, or a copy that the other thread has not waited for: as the order has it.
        ("unshown", " tiles["),
        ("boxed", ""),
        // As the order has it: a place that is still copied to, or one that others have read.
        ("boxed_unwaited", " tiles["),
        ("boxed_too_early", " tiles["),
        ("boxed_too_few", "an mbarrier expects 8176 bytes, and 8192 come"),
        ("boxed_too_many", "a thread waits for ever at an mbarrier, for bytes that do not come"),
        ("operands_rounded", ""),
        ("operands_not_rounded", "an operand of TF32 that is not rounded"),
        ("unordered", "results depend on the order of threads"),
    ];
    let kernels = faults.map(|(name, _)| faulty(name));
    let files: Vec<_> = HEADERS.iter().copied().chain([&FAULTY]).map(|file| (file.name, file.text)).collect();
    let Some(library) = build::compile(&files, &kernels) else { return };
    for (kernel, (_, found)) in kernels.iter().zip(faults) {
        let mut out = vec![0.0_f32; 256];
        let given = vec![Given::from(&mut out), Given::from(256_usize)];
        match try_launch(&library, kernel, [1, 256], given) {
            Ok(()) => assert!(found.is_empty(), "{}: not found", kernel.name),
            Err(why) => assert!(!found.is_empty() && why.contains(found), "{}: {why}", kernel.name),
        }
    }
}

/// Whether threads wait here for each other, or for bytes.
fn is_barrier(line: &str) -> bool {
    !line.starts_with("DEVICE") && ["__syncthreads();", "wait_for_bytes("].iter().any(|wait| line.contains(wait))
}

#[test]
fn every_barrier_of_a_kernel_is_needed() {
    every_barrier_is_needed(SOURCES);
}

#[test]
fn every_barrier_of_a_header_is_needed() {
    every_barrier_is_needed(HEADERS);
}

/// Without any one of the barriers in `sources`, some test above fails because of a race or an unwritten word; if
/// not, then with a variant, of which the barrier may be.
fn every_barrier_is_needed(sources: &[&Source]) {
    let Some(library) = build::copy() else { return };
    let mut found = 0;
    for source in sources {
        let tests: &[fn()] = match source.name {
            "rows.cuh" => &[rows::layer_norms_are_those_of_the_cpu, elementwise::softmax_is_that_of_the_cpu],
            "grouped_tensor.cu" => &[experts::products_of_groups_on_tensor_cores_are_near_those_of_the_cpu],
            name if name.starts_with("flash") || name == "tensor_core.cuh" => {
                &[attention::some_attention_on_tensor_cores_is_near_that_of_the_cpu]
            }
            "message.cuh" => &[
                compression::the_largest_are_those_of_the_cpu,
                compression::values_are_those_of_the_cpu,
                compression::vectors_without_zeros_come_back,
            ],
            "norm.cuh" => {
                &[rows::layer_norms_are_those_of_the_cpu, rows::gradients_of_layer_norms_are_those_of_the_cpu]
            }
            // It is between words of global memory, where what is not written yet is NaN in the test.
            "grad_norm.cu" => &[optimizer::squares_are_summed_in_the_order_of_the_cpu],
            "cross_entropy.cu" => &[loss::cross_entropy_is_that_of_the_cpu],
            "bias.cu" => &[rows::sums_of_blocks_are_in_order],
            "embedding.cu" => &[tables::embeddings_are_those_of_the_cpu],
            _ => &[attention::attention_is_that_of_the_cpu],
        };
        let lines = source.text.lines().enumerate().filter(|(_, line)| is_barrier(line));
        for (at, _) in lines.filter(|(_, line)| !line.starts_with("//")) {
            found += 1;
            library.skip_barrier(source.name, at + 1).expect("a line of a source");
            let failures =
                tests.iter().filter_map(|test| build::with(library, || catch_unwind(AssertUnwindSafe(test))).err());
            let told = |panic: Box<dyn std::any::Any + Send>| panic.downcast_ref::<String>().cloned();
            let of_variant = |variant| {
                let run = || tests.iter().find_map(|test| catch_unwind(AssertUnwindSafe(test)).err());
                build::with_variant(variant, Some(at + 1), run).flatten().and_then(told)
            };
            let mut variants = VARIANTS.iter().filter(|of| of.kernel.source.text.ends_with(source.text));
            let why = failures.filter_map(told).next().or_else(|| variants.find_map(of_variant));
            let why = why.unwrap_or_else(|| panic!("{}:{}: nobody misses this barrier", source.name, at + 1));
            assert!(
                ["a race: ", "nobody wrote", "still being copied", "without waiting", "NaN"]
                    .iter()
                    .any(|found| why.contains(found)),
                "{}:{}: {why}",
                source.name,
                at + 1
            );
        }
    }
    assert!(found > 10, "{found} barriers");
}
