//! Tensors that forward saves for backward, on a disk meanwhile. The tensors of a segment are written while the next
//! segment runs forward, and read while the segment behind it runs backward. The tensors of the last segment stay in
//! memory until another segment runs forward, because its backward may come next.

use super::disk::{Disk, Reading, Writing};
use super::space::Region;
use crate::prelude::*;
use meshwork_tensor::Shape;
use meshwork_tensor::tape::{Saved, SavedPolicy, SavedTensor};
use std::fmt;
use std::rc::Weak;

/// Smaller tensors stay: the statistics of norms, token ids.
const LEAST: usize = 1 << 10;

/// Saved memory that may be away.
struct Slot {
    disk: Rc<Disk>,
    dtype: DType,
    count: usize,
    here: RefCell<Option<Tensor>>,
    coming: RefCell<Option<Reading>>,
    /// Where it was written to.
    region: RefCell<Option<Rc<Region>>>,
    /// Whether backward is about to need it.
    wanted: Cell<bool>,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({}, {})", self.dtype, self.count)
    }
}

impl Slot {
    /// Begins to bring it back, unless it is there.
    fn fetch(&self) -> Result<()> {
        if self.here.borrow().is_none() && self.coming.borrow().is_none() {
            let region = self.region.borrow();
            let region = region.as_ref().unwrap_or_else(|| unreachable!("what is away was written"));
            self.coming.replace(Some(self.disk.read(region, 0, self.dtype, self.count)?));
        }
        Ok(())
    }

    fn tensor(&self) -> Result<Tensor> {
        self.fetch()?;
        if let Some(coming) = self.coming.take() {
            let buffer = coming.wait()?;
            let count = buffer.count();
            self.here.replace(Some(Tensor::from_buffer(self.disk.device(), buffer, [count])?));
        }
        let here = self.here.borrow();
        Ok(here.clone().unwrap_or_else(|| unreachable!("it has just come")))
    }

    /// Takes it out of memory if it was written and nothing is about to need it.
    fn leave(&self) {
        if !self.wanted.get() && self.region.borrow().is_some() {
            self.here.take();
        }
    }
}

/// A saved tensor as a tape holds it.
#[derive(Debug)]
struct Handle {
    slot: Rc<Slot>,
    shape: Shape,
}

impl SavedTensor for Handle {
    fn restore(&self) -> Result<Tensor, Error> {
        let tensor = self.slot.tensor().map_err(|error| match error {
            TrainError::Tensor(error) => error,
            other => Error::Saved(Box::new(other)),
        });
        tensor?.reshape(self.shape)
    }
}

/// The saved tensors of a segment that may be on disk.
#[derive(Debug, Default)]
pub struct Shelved(Vec<Weak<Slot>>);

impl Shelved {
    fn slots(&self) -> impl Iterator<Item = Rc<Slot>> {
        // Backward first needs the tensors that were saved last.
        self.0.iter().rev().filter_map(Weak::upgrade)
    }
}

/// The saved tensors of a rank.
#[derive(Debug)]
pub struct Shelf {
    disk: Rc<Disk>,
    /// Not written yet.
    fresh: RefCell<Vec<Weak<Slot>>>,
    /// Being written.
    leaving: RefCell<Vec<(Weak<Slot>, Writing)>>,
}

impl Shelf {
    /// Saved tensors that go to `disk`.
    pub fn new(disk: &Rc<Disk>) -> Self {
        Self { disk: disk.clone(), fresh: RefCell::default(), leaving: RefCell::default() }
    }

    /// Before the forward of a segment: begins to write the tensors of the segment before it, after the write of
    /// earlier ones is over.
    pub fn begin_forward(&self) -> Result<()> {
        self.flush()?;
        self.write_fresh()
    }

    /// Before a walk back over a segment: reads its tensors, and then the tensors of `next`, the segment before it.
    pub fn begin_backward(&self, segment: &Shelved, next: Option<&Shelved>) -> Result<()> {
        let wanted = || segment.slots().chain(next.into_iter().flat_map(Shelved::slots));
        wanted().for_each(|slot| slot.wanted.set(true));
        self.flush()?;
        self.write_fresh()?;
        wanted().try_for_each(|slot| slot.fetch())
    }

    /// After a walk back over a segment: the tensors that it still needs, for gradients of weights, may leave again.
    pub fn end_backward(&self, segment: &Shelved) {
        for slot in segment.slots() {
            slot.wanted.set(false);
            slot.leave();
            if slot.region.borrow().is_none() {
                self.fresh.borrow_mut().push(Rc::downgrade(&slot));
            }
        }
    }

    /// Forgets all writes, after a failure.
    pub fn clear(&self) {
        self.fresh.take();
        self.leaving.take();
    }

    /// Waits for all writes.
    fn flush(&self) -> Result<()> {
        for (slot, writing) in self.leaving.take() {
            writing.wait()?;
            if let Some(slot) = slot.upgrade() {
                slot.leave();
            }
        }
        Ok(())
    }

    /// Begins to write the tensors that nothing is about to need.
    fn write_fresh(&self) -> Result<()> {
        for slot in self.fresh.take() {
            let Some(slot) = slot.upgrade().filter(|slot| !slot.wanted.get()) else { continue };
            let Some(held) = slot.here.borrow().as_ref().map(|tensor| tensor.buffer().clone()) else { continue };
            let region = self.disk.region(held.bytes());
            let writing = self.disk.write(&region, 0, held)?;
            slot.region.replace(Some(region));
            self.leaving.borrow_mut().push((Rc::downgrade(&slot), writing));
        }
        Ok(())
    }
}

/// Saves the tensors of a segment on a shelf.
#[derive(Debug)]
pub struct Shelving {
    shelf: Rc<Shelf>,
    recomputes: bool,
    slots: RefCell<Vec<Weak<Slot>>>,
}

impl Shelving {
    /// A policy for one segment, which recomputes where `policy` does.
    pub fn new(shelf: &Rc<Shelf>, policy: &dyn SavedPolicy) -> Self {
        Self { shelf: shelf.clone(), recomputes: policy.recomputes(), slots: RefCell::default() }
    }

    /// The tensors that were saved.
    pub fn take(&self) -> Shelved {
        Shelved(self.slots.take())
    }
}

impl SavedPolicy for Shelving {
    fn save(&self, _op: &'static str, tensor: Tensor) -> Result<Saved, Error> {
        if tensor.buffer().bytes() < LEAST || tensor.dtype() == DType::I32 {
            return Ok(Saved::Kept(tensor));
        }
        let (shape, count) = (tensor.shape(), tensor.count());
        let same = |a: &Buffer, b: &Buffer| {
            Arc::ptr_eq(a.memory(), b.memory())
                && (a.offset(), a.count(), a.dtype()) == (b.offset(), b.count(), b.dtype())
        };
        let holds =
            |slot: &Rc<Slot>| slot.here.borrow().as_ref().is_some_and(|here| same(here.buffer(), tensor.buffer()));
        let known = self.slots.borrow().iter().filter_map(Weak::upgrade).find(holds);
        let slot = match known {
            Some(slot) => slot,
            None => {
                let (disk, dtype) = (self.shelf.disk.clone(), tensor.dtype());
                let here = RefCell::new(Some(tensor.reshape([count])?));
                let (coming, region, wanted) = Default::default();
                let slot = Rc::new(Slot { disk, dtype, count, here, coming, region, wanted });
                self.slots.borrow_mut().push(Rc::downgrade(&slot));
                self.shelf.fresh.borrow_mut().push(Rc::downgrade(&slot));
                slot
            }
        };
        Ok(Saved::Packed(Box::new(Handle { slot, shape })))
    }

    fn recomputes(&self) -> bool {
        self.recomputes
    }
}
