//! How fast checkpoints are saved and loaded, beside one plain sequential writer and reader of the same bytes on the
//! same disk.
//!
//! `cargo bench -p meshwork-checkpoint --bench bandwidth [-- --dir DIR]`: weights and two optimizer states of GPT-2
//! with 124 M parameters, 1.5 GB, in a folder in the system's place for temporary files, or in DIR. Each round
//! measures, in turn:
//!
//! - `plain`: one file, written in blocks of a MiB and synced; then read in such blocks, into memory that is used
//!   again;
//! - `N ranks`: a save by N writers from the end of the snapshot until it is committed, checksums included; then all
//!   tensors are read, each rank its share, into memory that is used again, and verified.
//!
//! Reads are timed with the files out of the page cache (`cold`, on Linux), and in it (`warm`). The last lines are
//! medians over the rounds, and medians of the ratios to `plain` of the same round.
//!
//! Without `--bench` (as under `cargo test`), it runs one round of a model of a few kilobytes.

use meshwork_checkpoint::{Checkpoint, Dtype, Held, Lock, SavePlan, Slice, Tensor, TensorKind, Writer, threads};
use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

const BLOCK: usize = 1 << 20;
const RANKS: [usize; 3] = [1, 2, 4];

/// The names of the columns, and the GB/s of one round in each.
const WHAT: [&str; 3] = ["write", "read cold", "read warm"];
type Rates = [f64; 3];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let full = args.iter().any(|arg| arg == "--bench");
    let dir = args.iter().position(|arg| arg == "--dir").and_then(|at| args.get(at + 1)).map(PathBuf::from);
    let folder = dir.map_or_else(tempfile::tempdir, tempfile::tempdir_in)?;
    let (tensors, rounds) = if full { (gpt2(12, 768, 50_257, 1024), 5) } else { (gpt2(1, 8, 17, 4), 1) };
    let bytes: u64 = tensors.iter().filter_map(Tensor::size).map(|(_, bytes)| bytes).sum();
    println!("{} MB in {} tensors, in {}", bytes / 1_000_000, tensors.len(), folder.path().display());
    let mut all: Vec<Vec<Rates>> = vec![Vec::new(); 1 + RANKS.len()];
    for round in 1..=rounds {
        for (side, rates) in all.iter_mut().enumerate() {
            let measured = match side {
                0 => plain(folder.path(), bytes)?,
                _ => checkpoint(folder.path(), &tensors, RANKS[side - 1], bytes)?,
            };
            println!("round {round}  {}", row(side, measured, ""));
            rates.push(measured);
        }
    }
    for (side, rates) in all.iter().enumerate() {
        println!("median   {}", row(side, median(rates), " GB/s"));
    }
    for side in 1..all.len() {
        let ratios: Vec<_> =
            all[side].iter().zip(&all[0]).map(|(of, plain)| [0, 1, 2].map(|at| of[at] / plain[at])).collect();
        println!("of plain {}", row(side, median(&ratios), ""));
    }
    Ok(())
}

fn row(side: usize, rates: Rates, unit: &str) -> String {
    let name = if side == 0 { "plain".to_owned() } else { format!("{} ranks", RANKS[side - 1]) };
    let columns: Vec<_> = WHAT.iter().zip(rates).map(|(what, rate)| format!("{what} {rate:6.2}{unit}")).collect();
    format!("{name:8} {}", columns.join("   "))
}

fn median(of: &[Rates]) -> Rates {
    [0, 1, 2].map(|at| {
        let mut sorted: Vec<f64> = of.iter().map(|rates| rates[at]).collect();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    })
}

/// The state of a GPT-2 that AdamW trains.
fn gpt2(layers: u64, hidden: u64, vocab: u64, seq: u64) -> Vec<Tensor> {
    let layer = [
        ("ln_1.weight", vec![hidden]),
        ("ln_1.bias", vec![hidden]),
        ("attn.c_attn.weight", vec![hidden, 3 * hidden]),
        ("attn.c_attn.bias", vec![3 * hidden]),
        ("attn.c_proj.weight", vec![hidden, hidden]),
        ("attn.c_proj.bias", vec![hidden]),
        ("ln_2.weight", vec![hidden]),
        ("ln_2.bias", vec![hidden]),
        ("mlp.up.weight", vec![hidden, 4 * hidden]),
        ("mlp.up.bias", vec![4 * hidden]),
        ("mlp.down.weight", vec![4 * hidden, hidden]),
        ("mlp.down.bias", vec![hidden]),
    ];
    let ends = [("wte.weight", vec![vocab, hidden]), ("wpe.weight", vec![seq, hidden]), ("ln_f.weight", vec![hidden])];
    let of_layer = |number: u64| layer.clone().map(|(name, dims)| (format!("h.{number}.{name}"), dims));
    let all = ends.map(|(name, dims)| (name.to_owned(), dims)).into_iter().chain((0..layers).flat_map(of_layer));
    let states = [
        ("", TensorKind::Weight),
        (":exp_avg", TensorKind::OptimizerState),
        (":exp_avg_sq", TensorKind::OptimizerState),
    ];
    all.flat_map(|(name, dims)| {
        states.map(|(state, kind)| Tensor {
            name: format!("{name}{state}"),
            kind,
            dtype: Dtype::F32,
            dims: dims.clone(),
        })
    })
    .collect()
}

/// Bytes that no file system makes smaller.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..bytes.div_ceil(8)).flat_map(|_| next()).take(bytes).collect()
}

fn rate(bytes: u64, begun: Instant) -> f64 {
    bytes as f64 / begun.elapsed().as_secs_f64() / 1e9
}

fn plain(folder: &Path, bytes: u64) -> Result<Rates, Box<dyn Error>> {
    let (path, mut block) = (folder.join("plain"), noise(BLOCK));
    let lengths = || (0..bytes).step_by(BLOCK).map(|at| (bytes - at).min(BLOCK as u64) as usize);
    let begun = Instant::now();
    let mut file = File::create(&path)?;
    for length in lengths() {
        file.write_all(&block[..length])?;
    }
    file.sync_all()?;
    let written = rate(bytes, begun);
    let mut read = || -> Result<f64, Box<dyn Error>> {
        let begun = Instant::now();
        let mut file = File::open(&path)?;
        for length in lengths() {
            file.read_exact(&mut block[..length])?;
        }
        Ok(rate(bytes, begun))
    };
    forget(&path)?;
    let rates = [written, read()?, read()?];
    fs::remove_file(&path)?;
    Ok(rates)
}

fn checkpoint(folder: &Path, tensors: &[Tensor], ranks: usize, bytes: u64) -> Result<Rates, Box<dyn Error>> {
    let dir = folder.join("checkpoints");
    // As in data parallelism: every rank holds everything, and writes a share.
    let held: Vec<Held> = (0..tensors.len())
        .map(|tensor| Held { tensor, slice: Slice::whole(&tensors[tensor].dims), ranks: (0..ranks).collect() })
        .collect();
    let plan = Arc::new(SavePlan::new(ranks, tensors.to_vec(), &held)?);
    let mut lock = Some(Lock::take(&dir)?);
    let mut writers: Vec<_> = threads(ranks)
        .into_iter()
        .enumerate()
        .map(|(rank, end)| match lock.take() {
            Some(lock) => Writer::lead(lock, 1, plan.clone(), end),
            None => Writer::follow(&dir, rank, plan.clone(), end),
        })
        .collect();
    let largest = tensors.iter().filter_map(Tensor::size).map(|(_, bytes)| bytes).max().unwrap_or(0);
    let values = noise(largest as usize);
    let mut snapshots = Vec::new();
    for writer in &mut writers {
        let (mut snapshot, _) = writer.snapshot();
        for (tensor, Held { slice, .. }) in tensors.iter().zip(&held) {
            let bytes = tensor.size().map_or(0, |(_, bytes)| bytes as usize);
            snapshot.put(&tensor.name, slice, &tensor.dims, &values[..bytes])?;
        }
        snapshots.push(snapshot);
    }
    let begun = Instant::now();
    for (writer, snapshot) in writers.iter_mut().zip(snapshots) {
        writer.save(1, serde_json::json!({}), snapshot);
    }
    for writer in &mut writers {
        writer.wait().transpose()?;
    }
    let written = rate(bytes, begun);
    drop(writers);
    let path = dir.join("step-00000001");
    for entry in fs::read_dir(&path)? {
        forget(&entry?.path())?;
    }
    let read = || -> Result<f64, Box<dyn Error>> {
        let begun = Instant::now();
        let of_rank = |rank: usize| -> Result<(), String> {
            let checkpoint = Checkpoint::open(&path).map_err(|error| error.to_string())?;
            let mut memory = vec![1; largest as usize];
            for tensor in tensors.iter().skip(rank).step_by(ranks) {
                let into = &mut memory[..tensor.size().map_or(0, |(_, bytes)| bytes as usize)];
                let read = checkpoint.read_into(&tensor.name, &Slice::whole(&tensor.dims), &tensor.dims, into);
                read.map_err(|error| error.to_string())?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || of_rank(rank))).collect();
            ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a reader panicked".to_owned())?)
        })?;
        Ok(rate(bytes, begun))
    };
    let rates = [written, read()?, read()?];
    fs::remove_dir_all(&dir)?;
    Ok(rates)
}

/// Drops a file that is on disk from the page cache.
fn forget(path: &Path) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::fs::fadvise(&File::open(path)?, 0, None, rustix::fs::Advice::DontNeed)?;
    #[cfg(not(target_os = "linux"))]
    let _ = path;
    Ok(())
}
