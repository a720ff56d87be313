//! Adafactor: the squared gradients of a matrix, by their means over rows and columns alone.
//!
//! ```text
//! g = scale·grad                          β = 1 - t^-0.8                      for each matrix
//! R_i = β·R_i + (1 - β)·(mean_j g_ij² + ε₁)
//! C_j = β·C_j + (1 - β)·(mean_i g_ij² + ε₁)
//! u_ij = g_ij / √(R_i·C_j / mean R)       of a vector: g / √V,  V = β·V + (1 - β)·(g² + ε₁)
//! w = w·(1 - lr·decay) - α·u / max(1, RMS(u)/d)
//! α = max(ε₂, RMS(w))·min(lr, 1/√t)       with relative steps, else α = lr
//! ```
//! Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018), algorithms 4 and 5, with
//! means for sums, the decay as in PyTorch's `Adafactor`, and no momentum. RMS is taken over a whole matrix or vector:
//! queries, keys and values have one each, and so has each expert.

use crate::{Over, ParamShape, Pass, PassTotals, Result, Run, SetPart, State, Update, WholeOptimizer};
use meshwork_core::simd::wide;

/// Adafactor (Shazeer and Stern). States: `row_var` and `col_var` of a matrix, `variance` of a vector.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// Whether the step is relative to the size of the matrix or vector and falls as 1/√t, with the learning rate as
    /// its ceiling. Otherwise the learning rate is the step.
    pub relative_step: bool,
    /// The mean of earlier squared gradients decays by 1 - t^-decay_rate, above 0.
    pub decay_rate: f64,
    /// Added to squared gradients.
    pub eps: f64,
    /// The least size of a matrix or vector, for relative steps.
    pub eps_scale: f64,
    /// The root mean square of a step above which it is scaled down, above 0.
    pub clip_threshold: f64,
    /// Weight decay: a step subtracts this share of the weight, times the learning rate.
    pub weight_decay: f64,
}

impl Default for Adafactor {
    fn default() -> Self {
        Self {
            relative_step: true,
            decay_rate: 0.8,
            eps: 1e-30,
            eps_scale: 1e-3,
            clip_threshold: 1.0,
            weight_decay: 0.0,
        }
    }
}

impl Adafactor {
    /// 1 - β.
    #[must_use]
    pub fn new_share(&self, update: &Update) -> f64 {
        (update.step as f64).powf(-self.decay_rate)
    }

    /// The size of a step that is not clipped: of relative steps the largest share of the root mean square of the
    /// weights.
    #[must_use]
    pub fn largest_step(&self, update: &Update) -> f64 {
        if self.relative_step { update.lr.min(1.0 / (update.step as f64).sqrt()) } else { update.lr }
    }

    /// Writes the steps of the run before they are clipped.
    fn steps(&self, run: &Run<'_, '_>, steps: &mut [f32]) {
        let (scale, grads) = (run.update.grad_scale, run.grads);
        if !run.shape.is_matrix() {
            for ((u, &grad), &v) in steps.iter_mut().zip(grads).zip(run.states[0].iter()) {
                *u = scale * grad / v.sqrt();
            }
            return;
        }
        // Row by row: of each the factor is one number, of the columns a vector.
        let ParamShape { rows, columns, .. } = run.shape;
        for SetPart { range, set: row, .. } in Over::Rows.sets(&run.shape, run.first, steps.len()) {
            let column = (run.first + range.start) % columns;
            let of_row = scale * run.totals[0][row] as f32;
            let of_columns = &run.totals[1][row / rows * columns + column..][..range.len()];
            let (u, grads) = (&mut steps[range.clone()], &grads[range]);
            wide!({
                for ((u, &grad), &of_column) in u.iter_mut().zip(grads).zip(of_columns) {
                    *u = of_row * grad * of_column as f32;
                }
            });
        }
    }
}

impl WholeOptimizer for Adafactor {
    fn name(&self) -> &str {
        "adafactor"
    }

    fn states(&self, shape: &ParamShape) -> Vec<State> {
        match shape.is_matrix() {
            true => vec![State::of_sets("row_var", Over::Rows), State::of_sets("col_var", Over::Columns)],
            false => vec![State::of_elements("variance")],
        }
    }

    fn passes(&self, shape: &ParamShape) -> Vec<Pass> {
        let last = Pass::Squares(vec![Over::Matrix, Over::Matrix]); // of u and of w
        match shape.is_matrix() {
            true => vec![Pass::Squares(vec![Over::Rows, Over::Columns]), last], // of g, by rows and by columns
            false => vec![last],
        }
    }

    fn measure(&self, pass: usize, weights: &[f32], run: &mut Run<'_, '_>, out: &mut [&mut [f32]]) -> Result<()> {
        let (update, grads) = (run.update, run.grads);
        let [first, second] = Run::out(self.name(), out)?;
        if run.shape.is_matrix() && pass == 0 {
            first.iter_mut().zip(grads).for_each(|(g, &grad)| *g = update.grad_scale * grad);
            second.copy_from_slice(first);
            return Ok(());
        }
        if !run.shape.is_matrix() {
            let [variance] = run.states(self.name(), weights.len())?;
            let (share, eps) = (self.new_share(&update) as f32, self.eps as f32);
            for (v, &grad) in variance.iter_mut().zip(grads) {
                let g = update.grad_scale * grad;
                *v += share * (g * g + eps - *v);
            }
        }
        self.steps(run, first);
        second.copy_from_slice(weights);
        Ok(())
    }

    /// After the first pass over a matrix the factors of rows and columns take the places of their sums; after the last
    /// pass the step size takes the place of the squares.
    fn finish_pass(&self, PassTotals { pass, update, shape, totals, sets, .. }: PassTotals<'_, '_>) -> Result<()> {
        let [first, second] = totals else { return Err(Run::wrong(self.name(), "measures", totals.len(), 2)) };
        if shape.is_matrix() && pass == 0 {
            let [rows, columns] = sets else { return Err(Run::wrong(self.name(), "states of sets", sets.len(), 2)) };
            let share = self.new_share(update);
            let means = |vars: &mut [f32], totals: &mut [f64], terms: usize| {
                for (var, total) in vars.iter_mut().zip(totals) {
                    let mean = *total / terms as f64 + self.eps;
                    *var = (f64::from(*var) + share * (mean - f64::from(*var))) as f32;
                    *total = f64::from(*var);
                }
            };
            means(rows, first, shape.columns);
            means(columns, second, shape.rows);
            for rows in first.chunks_mut(shape.rows) {
                let mean = rows.iter().sum::<f64>() / shape.rows as f64;
                rows.iter_mut().for_each(|row| *row = (mean / *row).sqrt());
            }
            second.iter_mut().for_each(|column| *column = 1.0 / column.sqrt());
            return Ok(());
        }
        let rms = |squares: f64| (squares / shape.each() as f64).sqrt();
        for (of_steps, of_weights) in first.iter_mut().zip(second.iter()) {
            let size = match self.relative_step {
                true => rms(*of_weights).max(self.eps_scale) * self.largest_step(update),
                false => self.largest_step(update),
            };
            *of_steps = size / (rms(*of_steps) / self.clip_threshold).max(1.0);
        }
        Ok(())
    }

    fn update(&self, weights: &mut [f32], run: &mut Run<'_, '_>) -> Result<()> {
        let mut steps = vec![0.0; weights.len()];
        self.steps(run, &mut steps);
        let sizes = run.totals[if run.shape.is_matrix() { 2 } else { 0 }];
        let keep = run.update.keep(self.weight_decay);
        for SetPart { range, set, .. } in Over::Matrix.sets(&run.shape, run.first, weights.len()) {
            let size = sizes[set] as f32;
            weights[range.clone()].iter_mut().zip(&steps[range]).for_each(|(w, u)| *w = *w * keep - size * u);
        }
        Ok(())
    }
}
