//! Products of uneven groups of rows, as experts have them: against padding every group to the largest, and against one
//! dense product of as many FLOPs.
//!
//! Run with `cargo bench -p meshwork-cpu --bench grouped [-- WORD..]`. The rows of 8 groups are such that the largest
//! has `load` times the mean. Columns are GFLOP/s of the rows that there are, medians of the three in turn, and the two
//! ratios: grouped over padded, and grouped over dense. Without `--bench` (as under `cargo test`), everything runs once
//! on small matrices.

use meshwork_core::{Buffer, pool};
use meshwork_cpu::Cpu;
use meshwork_tensor::Device;
use meshwork_tensor::kernel::{Gemm, GroupedGemm, GroupedGrad};
use meshwork_tensor::tape::Terms;
use std::time::{Duration, Instant};

const GROUPS: usize = 8;

/// Rows in all, hidden size.
const SIZES: [(usize, usize); 3] = [(4096, 256), (4096, 384), (4096, 512)];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let full = args.iter().any(|arg| arg == "--bench");
    let asked =
        |name: &str| args.iter().filter(|arg| !arg.starts_with('-')).all(|arg| name.split(' ').any(|word| word == arg));
    println!("GFLOP/s, medians; {} threads share {GROUPS} groups", pool::threads());
    println!("{:24} {:>9} {:>9} {:>9} {:>9} {:>9}", "", "padded", "grouped", "dense", "/ padded", "/ dense");
    for (rows, hidden) in SIZES {
        for load in [1.0, 2.0, 4.0] {
            for pass in ["y", "dx", "dw"] {
                let name = format!("{hidden} load={load} {pass}");
                if asked(&name) {
                    let (rows, hidden) = if full { (rows, hidden) } else { (64, 8) };
                    let [padded, grouped, dense] = rates(pass, &uneven(rows, load), hidden, full);
                    let (over, under) = (grouped / padded, grouped / dense);
                    println!("{name:24} {padded:9.0} {grouped:9.0} {dense:9.0} {over:9.2} {under:9.2}");
                }
            }
        }
    }
}

/// Rows of each group: the first has `load` times the mean, the others share the rest evenly.
fn uneven(rows: usize, load: f64) -> Vec<usize> {
    let first = (load * rows as f64 / GROUPS as f64).round() as usize;
    let rest = rows - first;
    let others = (0..GROUPS - 1).map(|i| rest / (GROUPS - 1) + usize::from(i < rest % (GROUPS - 1)));
    std::iter::once(first).chain(others).collect()
}

fn numbers(len: usize) -> Buffer {
    let number = |i: usize| (((i * 2_654_435_761) >> 12) & 0xffff) as f32 / 65_536.0 - 0.5;
    Buffer::from_vec((0..len).map(number).collect::<Vec<f32>>())
}

/// Padded, grouped, dense, for `[rows, hidden]` and experts `[4 hidden, hidden]`.
fn rates(pass: &str, rows: &[usize], hidden: usize, full: bool) -> [f64; 3] {
    let cpu = Cpu::default();
    let (n, k) = (4 * hidden, hidden);
    let (total, largest) = (rows.iter().sum::<usize>(), rows.iter().copied().max().unwrap_or(0));
    let padded = vec![largest; rows.len()];
    let (x, dy, w) = (numbers(GROUPS * largest * k), numbers(GROUPS * largest * n), numbers(GROUPS * n * k));
    let mut dw = numbers(GROUPS * n * k);
    let grouped = |rows: &[usize], dw: &mut Buffer| {
        let spec = GroupedGemm { rows, n, k, terms: Terms::WHOLE };
        let device = cpu.grouped_matmul().expect("the CPU has them");
        match pass {
            "y" => drop(device.grouped_linear(spec, &x, &w).expect("a product")),
            "dx" => drop(device.grouped_input_grad(spec, &dy, &w).expect("a product")),
            _ => {
                let ends = rows.iter().scan(0, |end, rows| {
                    *end += rows;
                    let all = *end - rows..*end;
                    Some(vec![all])
                });
                let to = GroupedGrad { buffer: dw, start: 0, accumulate: false };
                device.grouped_weight_grad(spec, &ends.collect::<Vec<_>>(), &dy, &x, to).expect("a product");
            }
        }
    };
    let dense = |dw: &mut Buffer| {
        let (spec, a, b) = match pass {
            "y" => (Gemm::linear(total, n, k), &x, &w),
            "dx" => (Gemm::linear_input_grad(total, n, k), &dy, &w),
            _ => (Gemm::linear_weight_grad(total, n, k), &dy, &x),
        };
        let (device, size) = (cpu.matmul().expect("the CPU has them"), spec.m * spec.n);
        if pass == "dw" {
            return device.gemm(spec, a, b, dw, 0).expect("a product");
        }
        let mut c = cpu.alloc(meshwork_core::DType::F32, size).expect("memory");
        device.gemm(spec, a, b, &mut c, 0).expect("a product");
    };
    let (budget, begun) = (if full { Duration::from_millis(900) } else { Duration::ZERO }, Instant::now());
    let mut times: [Vec<Duration>; 3] = Default::default();
    let mut timed = |times: &mut Vec<Duration>, work: &mut dyn FnMut(&mut Buffer)| {
        let start = Instant::now();
        work(&mut dw);
        times.push(start.elapsed());
    };
    // In turn, so that all three meet the same machine. The first turn warms up.
    let mut turns = 0;
    while turns < 2 || begun.elapsed() < budget {
        timed(&mut times[0], &mut |dw| grouped(&padded, dw));
        timed(&mut times[1], &mut |dw| grouped(rows, dw));
        timed(&mut times[2], &mut |dw| dense(dw));
        turns += 1;
        if turns == 1 {
            times.iter_mut().for_each(Vec::clear);
        }
    }
    let flops = 2.0 * (total * n * k) as f64;
    times.map(|mut times| {
        times.sort();
        flops / times[times.len() / 2].as_nanos().max(1) as f64
    })
}
