//! Faults that kernels find in integers. The host gets them when it next waits.

use super::prelude::*;

meshwork_core::named! {
    /// The operation that checks.
    #[derive(Clone, Copy, Debug)]
    pub(super) enum Checked {
        Embedding = "embedding",
        CrossEntropy = "cross_entropy",
        Sort = "sort",
        Documents = "attention",
        Gather = "gather",
        IndexSelect = "index_select",
        TakeAlongDim = "take_along_dim",
        Message = "unpack",
        GroupSums = "group_sums",
    }
    name: "The operation.", ALL: "All, by their numbers."
}

impl Checked {
    /// The CPU's error, from the first wrong place, the number there, and the limit.
    fn error(self, [_, at, found, limit]: Found) -> Error {
        let op = self.name();
        let problem = match self {
            Self::Embedding | Self::CrossEntropy => {
                return Error::Id { op, id: found as i32, at: at as usize, vocab: limit as usize };
            }
            Self::Sort => "the choices of some ids are not as many as was counted".to_owned(),
            Self::Message => {
                "a message is not one of the scheme and shape that it was read as, or its indices are damaged"
                    .to_owned()
            }
            Self::Gather | Self::IndexSelect | Self::TakeAlongDim | Self::GroupSums => {
                format!("index {found} at place {at}: indices are from 0 to {}", limit - 1)
            }
            Self::Documents => format!(
                "token {} of sample {} is at position {found} of its document: 0 begins a document, each other position is one more \
                 than the one before, and all are below {limit}",
                at % limit.max(1),
                at / limit.max(1)
            ),
        };
        Error::Shape { op, problem, shapes: Vec::new() }
    }
}

/// 1 if there is a fault, its first place, the number there, and the limit: `kernels/cuda/checked.cuh`.
type Found = [i64; 4];

/// Bytes for the faults of all operations.
pub(super) const BYTES: usize = Checked::ALL.len() * size_of::<Found>();

/// The error of the first check that found something.
pub(super) fn fault(found: &[u8; BYTES]) -> Option<Error> {
    let number = |at: usize| i64::from_le_bytes(std::array::from_fn(|byte| found[8 * at + byte]));
    Checked::ALL.into_iter().enumerate().find_map(|(at, checked)| {
        let found: Found = std::array::from_fn(|part| number(4 * at + part));
        (found[0] != 0).then(|| checked.error(found))
    })
}

impl CudaDevice {
    /// Where a kernel writes its fault.
    pub(super) fn fault_of(&self, checked: Checked) -> Address {
        self.found.at().offset(checked as usize * size_of::<Found>())
    }

    /// Queues a check, by one block of threads, that ids are below `limit`, and not negative unless `masked`.
    pub(super) fn check_ids(&self, checked: Checked, ids: &Buffer, limit: usize, masked: bool) -> Result<()> {
        let (found, count) = (self.fault_of(checked), ids.count());
        launch!(self, checked.name(), "check_ids", [usize::from(count > 0), 1]; ids, limit, masked, found, count)
    }
}
