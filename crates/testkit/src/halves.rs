//! Operations whose kernels read and write tensors of 16 bits as they are: each once, on one device, so that a test can
//! hold a device's results in 16 bits against its results in f32, rounded, or against the results of another device.

use meshwork_core::{Buffer, DType, bf16, f16};
use meshwork_tensor::kernel::{
    AttentionMasks, AttentionShape, DropoutMask, Gemm, GroupedShape, Rotary, TableGrad, VocabShard,
};
use meshwork_tensor::random::{fill_normal, key};
use meshwork_tensor::tape::RowBlocks;
use meshwork_tensor::{Device, MAX_DIMS, Result};

/// The operands of a call: values that 16 bits hold, stored so or in f32.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Where they lie.
    pub device: &'a dyn Device,
    /// The type that holds them: bf16 or f16.
    pub half: DType,
    /// The type in which they are stored: that, or f32.
    pub stored: DType,
    /// Rows and columns of the matrices.
    pub dims: [usize; 2],
}

impl Operands<'_> {
    /// Values of about 1 that depend on the name, one of them subnormal in bf16, one in f16.
    fn get(&self, name: &str, count: usize) -> Result<Buffer> {
        let mut values = vec![0.0_f32; count];
        fill_normal(key(0, name), 0, &mut values);
        (values[count / 2], values[count / 3]) = (1e-39, 3e-7);
        let (b, f): (Vec<bf16>, Vec<f16>) = values.iter().map(|&x| (bf16::from_f32(x), f16::from_f32(x))).unzip();
        let host = match (self.half, self.stored) {
            (DType::Bf16, DType::Bf16) => Buffer::from_vec(b),
            (DType::Bf16, _) => Buffer::from_vec(b.iter().map(|x| x.to_f32()).collect::<Vec<_>>()),
            (_, DType::F16) => Buffer::from_vec(f),
            _ => Buffer::from_vec(f.iter().map(|x| x.to_f32()).collect::<Vec<_>>()),
        };
        self.device.upload(&host)
    }

    /// Numbers that stay in f32.
    fn full(&self, name: &str, count: usize) -> Result<Buffer> {
        let mut values = vec![0.0_f32; count];
        fill_normal(key(0, name), 0, &mut values);
        self.device.upload(&Buffer::from_vec(values.iter().map(|x| x.abs() + 0.5).collect::<Vec<_>>()))
    }

    fn ids(&self, count: usize, vocab: usize) -> Result<Buffer> {
        self.device
            .upload(&Buffer::from_vec((0..count).map(|i| ((i * i * 7 + i / 3) % vocab) as i32).collect::<Vec<_>>()))
    }
}

/// An operation: its name, and a call that gives its results. Results of the type of the operands are rounded, the
/// others are not.
pub type Call = (&'static str, fn(&Operands<'_>) -> Result<Vec<Buffer>>);

const BLOCKS: RowBlocks = RowBlocks { samples: 1, slices: 1 };

const HEADS: AttentionShape = AttentionShape { batch: 2, seq: 19, heads: 4, head_dim: 8 };

const MASKS: AttentionMasks<'static> = AttentionMasks::CAUSAL;

fn grouped(rotary: Option<Rotary>) -> GroupedShape {
    GroupedShape { group: 2, kv_heads: 3, first_kv_head: 1, rotary, ..GroupedShape::alone(HEADS) }
}

fn attend(of: &Operands<'_>, shape: GroupedShape, masks: AttentionMasks<'_>) -> Result<Vec<Buffer>> {
    let attention = of.device.attention()?;
    let count = HEADS.batch * HEADS.seq * HEADS.heads * HEADS.head_dim;
    let (q, kv, dout) = (of.get("q", count)?, of.get("kv", count / 4 * 6)?, of.get("dout", count)?);
    let (out, lse) = attention.grouped(shape, &q, &kv, masks)?;
    // Backward from an operand, so that both ways of storage read the same.
    let saved = of.get("out", count)?;
    let (dq, dkv) = attention.grouped_grad(shape, &dout, &q, &kv, &saved, &lse, masks)?;
    Ok(vec![out, lse, dq, dkv])
}

/// Every operation of products, biases, activations, norms, attention, embeddings and losses.
pub const CALLS: &[Call] = &[
    ("add", |of| {
        let count = of.dims.iter().product();
        let (mut a, b) = (of.get("a", count)?, of.get("b", count)?);
        let sum = of.device.pointwise()?.add(&a, &b)?;
        let part = of.get("part", count - 1)?;
        of.device.pointwise()?.add_assign(&mut a, 1, &part)?;
        Ok(vec![sum, a])
    }),
    ("bias", |of| {
        let [rows, n] = of.dims;
        let (x, bias, residual) = (of.get("x", rows * n)?, of.get("bias", n)?, of.get("residual", rows * n)?);
        let kernels = of.device.pointwise()?;
        Ok(vec![
            kernels.bias(&x, &bias)?,
            kernels.bias_residual(&x, &bias, &residual)?,
            kernels.bias_grad(&x, n, BLOCKS)?,
        ])
    }),
    ("gelu", |of| {
        let [rows, n] = of.dims;
        let (x, bias, mut dy) = (of.get("x", rows * n)?, of.get("bias", n)?, of.get("dy", rows * n)?);
        let kernels = of.device.pointwise()?;
        let mut results =
            vec![kernels.gelu(&x)?, kernels.bias_gelu(&x, &bias, of.stored)?, kernels.gelu_grad(&dy, &x)?];
        results.push(kernels.bias_gelu_grad(&mut dy, &x, &bias, BLOCKS)?);
        results.push(dy);
        Ok(results)
    }),
    ("swiglu", |of| {
        let count = of.dims.iter().product();
        let (mut x, dy) = (of.get("x", 2 * count)?, of.get("dy", count)?);
        let y = of.device.pointwise()?.swiglu(&x, of.stored)?;
        of.device.pointwise()?.swiglu_grad(&dy, &mut x)?;
        Ok(vec![y, x])
    }),
    ("dropout", |of| {
        let (mut local, mut global, [rows, n]) = ([0; MAX_DIMS], [0; MAX_DIMS], of.dims);
        (local[0], local[1], global[0], global[1]) = (rows, n, rows as u64, n as u64 + 3);
        let mask = DropoutMask { p: 0.25, key: key(1, "dropout"), ndim: 2, local, offset: [0; MAX_DIMS], global };
        Ok(vec![of.device.pointwise()?.dropout(&of.get("x", rows * n)?, &mask)?])
    }),
    ("layer norm", |of| {
        let [rows, n] = of.dims;
        let (x, gamma, beta, dy) =
            (of.get("x", rows * n)?, of.get("gamma", n)?, of.get("beta", n)?, of.get("dy", rows * n)?);
        let kernels = of.device.norm()?;
        let (y, mean, rstd) = kernels.layer_norm(&x, [&gamma, &beta], 1e-5, of.stored)?;
        let mut results = vec![y];
        for sum in [None, Some(of.get("sum", rows * n)?)] {
            let (dx, dgamma, dbeta) = kernels.layer_norm_grad(&dy, &x, &gamma, [&mean, &rstd], BLOCKS, sum)?;
            results.extend([dx, dgamma, dbeta]);
        }
        results.extend([mean, rstd]);
        Ok(results)
    }),
    ("RMS norm", |of| {
        let [rows, n] = of.dims;
        let (x, weight, dy) = (of.get("x", rows * n)?, of.get("weight", n)?, of.get("dy", rows * n)?);
        let kernels = of.device.norm()?;
        let (y, rstd) = kernels.rms_norm(&x, &weight, 1e-5, of.stored)?;
        let mut results = vec![y];
        for sum in [None, Some(of.get("sum", rows * n)?)] {
            let (dx, dweight) = kernels.rms_norm_grad(&dy, &x, &weight, &rstd, BLOCKS, sum)?;
            results.extend([dx, dweight]);
        }
        results.push(rstd);
        Ok(results)
    }),
    ("embedding", |of| {
        let ([ids, width], rows) = (of.dims, 13);
        let (index, table, dout) = (of.ids(ids, rows)?, of.get("table", rows * width)?, of.get("dout", ids * width)?);
        let kernels = of.device.embedding()?;
        let mut results = vec![kernels.lookup(&index, &table, 0..rows, rows, width)?];
        for accumulate in [false, true] {
            let mut buffer = of.full("dtable", rows * width)?;
            let dtable = TableGrad { buffer: &mut buffer, start: 0, rows, width, accumulate, blocks: 1 };
            kernels.lookup_grad(&index, &dout, 0..rows, dtable)?;
            results.push(buffer);
        }
        let mut buffer = of.full("blocks", rows * width)?;
        let dtable = TableGrad { buffer: &mut buffer, start: 0, rows, width, accumulate: false, blocks: ids };
        kernels.lookup_grad(&index, &dout, 0..rows, dtable)?;
        results.push(buffer);
        Ok(results)
    }),
    ("positions", |of| {
        let ([seq, width], batch) = (of.dims, 2);
        let (x, table) = (of.get("x", batch * seq * width)?, of.get("table", (seq + 1) * width)?);
        let mut buffer = of.full("dtable", (seq + 1) * width)?;
        let y = of.device.embedding()?.positions(&x, &table, 1, seq, width)?;
        let dtable = TableGrad { buffer: &mut buffer, start: 0, rows: seq + 1, width, accumulate: true, blocks: 2 };
        of.device.embedding()?.positions_grad(&x, 1, seq, dtable)?;
        Ok(vec![y, buffer])
    }),
    ("cross entropy", |of| {
        let [rows, n] = of.dims;
        let shard = VocabShard { first: 0, valid: n - 1, width: n, skipped: 0, pitch: n, vocab: n - 1 };
        let (mut logits, targets) = (of.get("logits", rows * n)?, of.ids(rows, n - 1)?);
        let kernels = of.device.loss()?;
        let (max, sums) = kernels.row_stats(&logits, &targets, shard)?;
        let correct = kernels.correct(&logits, &targets, n, 1)?;
        let (lse, scale) = (of.full("lse", rows)?, of.device.upload(&Buffer::from_vec(vec![0.5_f64]))?);
        kernels.grad(&mut logits, &targets, &lse, &scale, shard)?;
        Ok(vec![max, sums, correct, logits])
    }),
    ("attention", |of| {
        let count = HEADS.batch * HEADS.seq * HEADS.heads * HEADS.head_dim;
        let (qkv, dout, saved) = (of.get("qkv", 3 * count)?, of.get("dout", count)?, of.get("out", count)?);
        let attention = of.device.attention()?;
        let (out, lse) = attention.causal(HEADS, &qkv, MASKS)?;
        let dqkv = attention.causal_grad(HEADS, &dout, &qkv, &saved, &lse, MASKS)?;
        Ok(vec![out, lse, dqkv])
    }),
    ("grouped attention", |of| attend(of, grouped(None), MASKS)),
    ("rotated attention", |of| attend(of, grouped(Some(Rotary::new(10_000.0))), MASKS)),
    ("attention of runs within a window", |of| {
        attend(of, grouped(None), AttentionMasks { window: Some(6), runs: Some(&[10..19, 0..10]), ..MASKS })
    }),
    // Operands of f32: the device says whether it reads operands of 16 bits as they are.
    ("products", |of| {
        let ([m, n], k) = (of.dims, 70);
        let kernels = of.device.matmul()?;
        let (x, w, bias) = (of.full("x", m * k)?, of.full("w", n * k)?, of.get("bias", n)?);
        let (mut whole, mut sum) = (of.get("c", m * n + 2)?, of.get("sum", m * n)?);
        let spec = Gemm::linear(m, n, k);
        kernels.gemm(spec, &x, &w, &mut whole, 1)?;
        kernels.gemm(spec.accumulating(true), &x, &w, &mut sum, 0)?;
        let mut both = of.get("both", m * n)?;
        kernels.gemm_sum([spec, spec], [&x, &x], [&w, &w], &mut both, 0)?;
        Ok(vec![whole, sum, both, kernels.linear_bias([m, n, k], &x, &w, &bias)?])
    }),
];
