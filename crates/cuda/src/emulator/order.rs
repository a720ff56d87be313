//! The order in which the emulator runs queued work.

/// The order of work that no stream and no event orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Each piece of work runs when it is queued: no missing wait shows.
    AsQueued,
    /// The stream that goes on, and how far before anybody waits, are drawn from this seed.
    Seeded(u64),
}

/// Draws from an order.
#[derive(Debug)]
pub(super) struct Draws {
    state: u64,
    /// The stream that goes on while it can, once one is drawn: streams that get far ahead or stay far behind show more
    /// than fair turns.
    favourite: Option<usize>,
}

impl Draws {
    pub(super) fn new(order: Order) -> Option<Self> {
        match order {
            Order::AsQueued => None,
            Order::Seeded(seed) => Some(Self { state: seed, favourite: None }),
        }
    }

    /// A number below `limit`, which is not 0 (SplitMix64; Steele, Lea and Flood 2014).
    fn below(&mut self, limit: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }

    /// How much runs now, though nobody waits for it: mostly nothing.
    pub(super) fn ahead(&mut self) -> usize {
        match self.below(16) {
            0 => 1 + self.below(32),
            _ => 0,
        }
    }

    /// Draws one of the streams that can go on. The list must not be empty.
    pub(super) fn choose(&mut self, ready: &[usize]) -> usize {
        match self.favourite.filter(|favourite| ready.contains(favourite)) {
            Some(favourite) if self.below(8) > 0 => favourite,
            _ => {
                let chosen = ready[self.below(ready.len())];
                self.favourite = Some(chosen);
                chosen
            }
        }
    }
}
