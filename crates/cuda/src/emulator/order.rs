//! The order in which the emulator runs queued work.

/// The order of work that is not ordered by streams and events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Each piece of work runs when it is queued, which hides missing waits.
    AsQueued,
    /// The next stream, and the amount of work before a wait, are chosen at random from this seed.
    Seeded(u64),
}

/// The random choices of an order.
#[derive(Debug)]
pub(super) struct Draws {
    state: u64,
    /// A stream that, once chosen, continues as long as it can: streams far ahead or far behind reveal more errors than
    /// fair turns.
    favourite: Option<usize>,
}

impl Draws {
    pub(super) fn new(order: Order) -> Option<Self> {
        match order {
            Order::AsQueued => None,
            Order::Seeded(seed) => Some(Self { state: seed, favourite: None }),
        }
    }

    /// A random number below `limit`, which must not be 0 (SplitMix64; Steele, Lea and Flood 2014).
    fn below(&mut self, limit: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }

    /// The amount of work that runs now without a wait: mostly none.
    pub(super) fn ahead(&mut self) -> usize {
        if self.below(16) == 0 { 1 + self.below(32) } else { 0 }
    }

    /// Chooses one of the streams that can continue. The list must not be empty.
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
