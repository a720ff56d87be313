//! Communication between the writers of a checkpoint: they report when they are done.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// One rank's endpoint of a channel between the writers of all ranks. Writers run concurrently with training, on their
/// own threads, so this must not be a communicator that training uses.
///
/// [`threads`] connects the threads of one process. An adapter for MPI is one `Allgatherv` on a separate communicator.
pub trait Exchange: Send + 'static {
    /// Gathers the messages of all ranks, in the order of the ranks, on every rank. Waits for all ranks; every rank
    /// must call it equally often.
    ///
    /// # Errors
    /// A rank that is gone.
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Arc<[Vec<u8>]>, ExchangeError>;
}

impl Exchange for Box<dyn Exchange> {
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Arc<[Vec<u8>]>, ExchangeError> {
        (**self).all_gather(message)
    }
}

/// A rank that left the others.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("the writers lost each other: {problem}")]
pub struct ExchangeError {
    /// Which rank, and why.
    pub problem: String,
}

debug_as_display!(ExchangeError);

/// The exchange of a run on one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Exchange for Alone {
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Arc<[Vec<u8>]>, ExchangeError> {
        Ok([message].into())
    }
}

/// The exchange of ranks that are threads of one process.
#[derive(Debug)]
pub struct ThreadExchange {
    rank: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug)]
struct Round {
    number: u64,
    messages: Vec<Option<Vec<u8>>>,
    /// The messages of the previous round. A rank that has not seen them has not sent its message of this round.
    last: Arc<[Vec<u8>]>,
    left: Vec<bool>,
}

/// One endpoint for each of `world` ranks. If a rank drops its endpoint, the other ranks' waits return an error.
pub fn threads(world: usize) -> Vec<ThreadExchange> {
    let round = Round { number: 0, messages: vec![None; world], last: Arc::default(), left: vec![false; world] };
    let shared = Arc::new(Shared { round: Mutex::new(round), changed: Condvar::new() });
    (0..world).map(|rank| ThreadExchange { rank, shared: shared.clone() }).collect()
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exchange for ThreadExchange {
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Arc<[Vec<u8>]>, ExchangeError> {
        let mut round = self.shared.lock();
        let mine = round.number;
        round.messages[self.rank] = Some(message);
        if round.messages.iter().all(Option::is_some) {
            round.last = round.messages.iter_mut().filter_map(Option::take).collect();
            round.number += 1;
            self.shared.changed.notify_all();
        }
        while round.number == mine {
            let gone = |(rank, left): (usize, &bool)| *left && round.messages[rank].is_none();
            if let Some(rank) = round.left.iter().enumerate().position(gone) {
                return Err(ExchangeError { problem: format!("rank {rank} ended") });
            }
            round = self.shared.changed.wait(round).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(round.last.clone())
    }
}

impl Drop for ThreadExchange {
    fn drop(&mut self) {
        self.shared.lock().left[self.rank] = true;
        self.shared.changed.notify_all();
    }
}
