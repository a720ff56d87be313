//! Adam with states of 8 bits.
//!
//! ```text
//! m, v of the step before, dequantised              x = code[i]·largest |x| of its block
//! m = m + (1 - β₁)·(g - m),  v = β₂·v + (1 - β₂)·g²    in f32, g = scale·grad
//! w = w·(1 - lr·decay) - lr·m̂ / (√v̂ + ε)              by these, as AdamW
//! i = argmin |code[i] - x / largest |x| of its block|   of m and of v
//! ```
//! Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): the dynamic tree code, with a sign for m and
//! an extra bit of fraction for v. Blocks are consecutive elements of a whole matrix, on whichever ranks they lie: an
//! all-reduce takes the largest value of each block, which rounds nothing. So the numbers do not depend on the mesh.

use crate::adamw::power;
use crate::{AdamW, Over, ParamShape, Pass, PassTotals, Result, Run, SetPart, State, WholeOptimizer};
use std::sync::OnceLock;

/// Adam with decoupled weight decay and states of 8 bits (Dettmers et al.), for matrices of hidden layers; what the
/// paper keeps in 32 bits, embeddings, is [AdamW](crate::Rule::with_adam8bit)'s. States: the codes `exp_avg` and
/// `exp_avg_sq`, and for each block the largest value of each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam8bit {
    /// The hyper-parameters, as AdamW's.
    pub adamw: AdamW,
    /// Elements of a block, at least 1; 2048 in the paper.
    pub block: usize,
}

impl Default for Adam8bit {
    fn default() -> Self {
        Self { adamw: AdamW::default(), block: 2048 }
    }
}

/// 256 numbers in ascending order, of which 0 and 1 are two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Code {
    /// The numbers.
    pub values: [f32; 256],
    /// Between a number and the next: [`values`](Self::values) rounded from f64 need not have them in the middle.
    pub middles: [f32; 255],
    /// The code of 0.
    pub zero: u8,
}

impl Code {
    /// The dynamic tree code: in each of seven decades below 1 the middles of equal steps, twice as many in each decade
    /// as in the one below.
    fn new(signed: bool) -> Self {
        let mut values = vec![0.0, 1.0];
        for decade in 0..7 {
            let steps = 1 << if signed { decade } else { decade + 1 };
            let scale = 10f64.powi(decade - 6);
            for step in 0..steps {
                let middle = scale * (0.1 + 0.9 * (f64::from(step) + 0.5) / f64::from(steps));
                values.push(middle);
                values.extend(signed.then_some(-middle));
            }
        }
        values.sort_by(f64::total_cmp);
        let zero = values.partition_point(|&value| value < 0.0) as u8;
        let rounded = |at: usize| values[at] as f32;
        let middle = |at: usize| ((values[at] + values[at + 1]) / 2.0) as f32;
        Self { values: std::array::from_fn(rounded), middles: std::array::from_fn(middle), zero }
    }

    /// For numbers of either sign.
    fn signed() -> &'static Self {
        static CODE: OnceLock<Code> = OnceLock::new();
        CODE.get_or_init(|| Self::new(true))
    }

    /// For numbers of at least 0.
    fn unsigned() -> &'static Self {
        static CODE: OnceLock<Code> = OnceLock::new();
        CODE.get_or_init(|| Self::new(false))
    }

    /// The nearest number to `x / largest`.
    fn nearest(&self, x: f32, largest: f32) -> u8 {
        match largest > 0.0 {
            true => {
                let x = x / largest;
                self.middles.partition_point(|&middle| middle < x) as u8
            }
            false => self.zero,
        }
    }

    fn value(&self, code: u8, largest: f32) -> f32 {
        self.values[usize::from(code)] * largest
    }
}

impl Adam8bit {
    /// The codes of means and of squares, for the kernel of a device.
    #[must_use]
    pub fn codes_of_moments() -> [&'static Code; 2] {
        [Code::signed(), Code::unsigned()]
    }

    /// The new moments of an element, from its codes and the largest values of its block before.
    fn moments(&self, g: f32, codes: [u8; 2], largest: [f32; 2]) -> [f32; 2] {
        let AdamW { beta1, beta2, .. } = self.adamw;
        let m = Code::signed().value(codes[0], largest[0]);
        let v = Code::unsigned().value(codes[1], largest[1]);
        [m + (1.0 - beta1) as f32 * (g - m), beta2 as f32 * v + (1.0 - beta2) as f32 * (g * g)]
    }

    fn codes<'r, 'a>(&self, codes: &'r mut [&'a mut [u8]]) -> Result<&'r mut [&'a mut [u8]; 2]> {
        let given = codes.len();
        codes.try_into().map_err(|_| Run::wrong(self.name(), "states of codes", given, 2))
    }
}

impl WholeOptimizer for Adam8bit {
    fn name(&self) -> &str {
        "adam8bit"
    }

    fn states(&self, _shape: &ParamShape) -> Vec<State> {
        let blocks = Over::Blocks(self.block);
        vec![
            State::of_codes("exp_avg"),
            State::of_codes("exp_avg_sq"),
            State::of_sets("exp_avg_largest", blocks),
            State::of_sets("exp_avg_sq_largest", blocks),
        ]
    }

    fn passes(&self, _shape: &ParamShape) -> Vec<Pass> {
        vec![Pass::Largest(vec![Over::Blocks(self.block); 2])]
    }

    fn measure(&self, _pass: usize, _weights: &[f32], run: &mut Run<'_, '_>, out: &mut [&mut [f32]]) -> Result<()> {
        let [mean, square] = self.codes(run.codes)?;
        let [of_mean, of_square] = Run::out(self.name(), out)?;
        for SetPart { range, set, .. } in Over::Blocks(self.block).sets(&run.shape, run.first, run.grads.len()) {
            let largest = [run.sets[0][set], run.sets[1][set]];
            for at in range {
                let (g, codes) = (run.update.grad_scale * run.grads[at], [mean[at], square[at]]);
                [of_mean[at], of_square[at]] = self.moments(g, codes, largest);
            }
        }
        Ok(())
    }

    /// The new largest values become the state, and the old ones stay until the update in the places of the totals.
    fn finish_pass(&self, PassTotals { totals, sets, .. }: PassTotals<'_, '_>) -> Result<()> {
        for (set, totals) in sets.iter_mut().zip(totals) {
            for (set, total) in set.iter_mut().zip(totals.iter_mut()) {
                (*set, *total) = (*total as f32, f64::from(*set));
            }
        }
        Ok(())
    }

    fn update(&self, weights: &mut [f32], run: &mut Run<'_, '_>) -> Result<()> {
        let AdamW { beta1, beta2, eps, weight_decay } = self.adamw;
        let update = run.update;
        let keep = update.keep(weight_decay);
        let lr_hat = (update.lr / (1.0 - power(beta1, update.step))) as f32;
        let root_hat = (1.0 - power(beta2, update.step)).sqrt() as f32;
        let [mean, square] = self.codes(run.codes)?;
        for SetPart { range, set, .. } in Over::Blocks(self.block).sets(&run.shape, run.first, weights.len()) {
            let before = [run.totals[0][set] as f32, run.totals[1][set] as f32];
            let now = [run.sets[0][set], run.sets[1][set]];
            for at in range {
                let w = &mut weights[at];
                let [m, v] = self.moments(update.grad_scale * run.grads[at], [mean[at], square[at]], before);
                *w = *w * keep - lr_hat * (m / (v.sqrt() / root_hat + eps as f32));
                mean[at] = Code::signed().nearest(m, now[0]);
                square[at] = Code::unsigned().nearest(v, now[1]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Code;

    /// The first and last numbers as the authors' code has them, and what lies between.
    #[test]
    fn the_codes_are_the_dynamic_trees() {
        let (signed, unsigned) = (Code::signed(), Code::unsigned());
        for code in [signed, unsigned] {
            assert!(code.values.array_windows().all(|[a, b]| a < b) && code.values[255] == 1.0);
            assert_eq!(code.values[usize::from(code.zero)], 0.0);
        }
        assert_eq!(
            [signed.values[0], signed.values[126], signed.values[127], signed.values[128]],
            [-0.99296875, -5.5e-7, 0.0, 5.5e-7]
        );
        assert_eq!([unsigned.values[1], unsigned.values[2], unsigned.values[254]], [3.25e-7, 7.75e-7, 0.9964844]);
        assert_eq!((signed.zero, unsigned.zero), (127, 0));
    }

    #[test]
    fn a_number_gets_the_nearest_code_of_its_block() {
        for code in [Code::signed(), Code::unsigned()] {
            let lowest = if code.zero == 0 { 0 } else { -1000 };
            for x in (lowest..=1000).map(|x| x as f32 / 500.0) {
                let off = |value: f32| (f64::from(value) - f64::from(x / 2.0)).abs();
                let nearest = code.values.iter().map(|&value| off(value)).fold(f64::INFINITY, f64::min);
                let got = off(code.values[usize::from(code.nearest(x, 2.0))]);
                assert!(got <= nearest + 1e-7, "{x}: {got} {nearest}");
            }
            assert_eq!(code.value(code.nearest(0.0, 0.0), 0.0), 0.0, "a block of zeros");
        }
    }
}
