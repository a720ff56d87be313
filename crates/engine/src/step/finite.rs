//! Checks that the weights are finite. An update can make a weight infinite although loss and norm were finite, for
//! example with a learning rate that is too large. The next step would notice by its loss, so steps do not check.
//! Saves, exports and the end of a run do, and so does any pass whose loss is not finite, to name the parameter.

use super::prelude::*;

/// Elements that one call checks.
const PIECE: usize = 1 << 18;

impl Trainer {
    /// Refuses weights that are not finite: one pass over the weights that this rank holds. Call it before weights are
    /// saved or handed on. Every rank gets the same error.
    ///
    /// Collective over the world.
    ///
    /// # Errors
    /// The first parameter of the model with such an element; steps that are under way.
    pub fn require_finite(&self) -> Result<()> {
        let _entered = self.enter("require_finite");
        self.require_complete()?;
        if !self.device.has_values() {
            return Ok(());
        }
        let weights = self.store.weights.borrow();
        let params = weights.params();
        let wrong = if self.are_finite(params)? { None } else { self.first_not_finite(params)? };
        let name = wrong.map(|id| &params.declarations().spec(id).name);
        let place = name.and_then(|name| self.cut.parameters.iter().position(|spec| spec.name == *name));
        let mut first = [place.unwrap_or(self.cut.parameters.len()) as f64];
        self.rank.world().all_reduce_slice(&mut first, ReduceOp::Min)?;
        match self.cut.parameters.get(first[0] as usize) {
            None => Ok(()),
            Some(spec) => Err(TrainError::Weight { step: self.steps_begun, name: spec.name.clone() }),
        }
    }

    /// The error of a pass whose numbers are not finite: names the weights, if they are the reason.
    pub(super) fn blame(&self, error: TrainError) -> TrainError {
        if let Err(weight @ TrainError::Weight { .. }) = self.require_finite() { weight } else { error }
    }

    /// Whether the squares of this rank's weights have a finite sum. In f64, squares of finite f32 numbers do.
    fn are_finite(&self, params: &Params) -> Result<bool> {
        let mut sum = self.device.zeros(DType::F64, 1)?;
        let mut add = |values: &Buffer| -> Result<()> {
            for start in (0..values.count()).step_by(PIECE) {
                let piece = values.slice(start..values.count().min(start + PIECE))?;
                let piece = match piece.dtype() {
                    DType::F32 => piece,
                    _ => self.device.pointwise()?.cast(&piece, DType::F32)?,
                };
                self.device.optim()?.sum_of_squares(std::slice::from_ref(&piece), &mut sum, 0)?;
            }
            Ok(())
        };
        params.flats().iter().filter(|flat| flat.dtype() != DType::U8).try_for_each(&mut add)?;
        params.declarations().ids().try_for_each(|id| params.restored(id)?.iter().try_for_each(&mut add))?;
        Ok(self.device.download(&sum)?.as_slice::<f64>()?.iter().all(|sum| sum.is_finite()))
    }

    /// The first parameter here, in the order of the declarations, with an element that is not finite.
    fn first_not_finite(&self, params: &Params) -> Result<Option<ParamId>> {
        for id in params.declarations().ids() {
            if !params.read(id)?.iter().all(|value| value.is_finite()) {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }
}
