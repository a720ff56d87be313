//! A driver that does nothing: a program that runs on it shows whether the device has all that it needs, before
//! anything is computed.

use crate::driver::{
    Address, Argument, Driver, DriverError, Event, Graph, Priority, Properties, Reach, Remote, Result, Stream, Work,
};
use meshwork_kernels::Source;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A device without memory or work. All reads from it return zeros.
#[derive(Debug)]
pub struct Idle {
    name: &'static str,
    properties: Properties,
    next: AtomicU64,
    streams: AtomicUsize,
    used: Mutex<Vec<&'static Source>>,
}

impl Idle {
    /// An idle driver with the name of another driver, for error messages.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        let architecture = "none".to_owned();
        let (device, memory, shared) = ("no device".to_owned(), u64::MAX, u32::MAX);
        let properties = Properties { name: device, ordinal: 0, memory, shared, granule: 1, architecture };
        Self { name, properties, next: AtomicU64::new(1 << 20), streams: AtomicUsize::new(0), used: Mutex::default() }
    }
}

impl Idle {
    /// The files of the kernels that were launched, each once.
    pub fn used(&self) -> Vec<&'static Source> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Driver for Idle {
    fn name(&self) -> &str {
        self.name
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn stream_with(&self, _: Priority) -> Result<Stream> {
        Ok(Stream(self.streams.fetch_add(1, Ordering::Relaxed)))
    }

    fn alloc(&self, bytes: usize) -> Result<Address> {
        Ok(Address(self.next.fetch_add(bytes.next_multiple_of(256) as u64, Ordering::Relaxed)))
    }

    fn free_all(&self, _: &[Address]) -> Result<()> {
        Ok(())
    }

    fn alloc_host(&self, bytes: usize) -> Result<Address> {
        self.alloc(bytes)
    }

    fn free_host(&self, _: Address) -> Result<()> {
        Ok(())
    }

    fn queue(&self, _: Stream, work: Work) -> Result<()> {
        if let Work::Launch { kernel, .. } = &work {
            let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
            if !used.contains(&kernel.0.source) {
                used.push(kernel.0.source);
            }
        }
        work.check()
    }

    fn record(&self, _: Stream) -> Result<Event> {
        Ok(Event(0))
    }

    fn wait(&self, _: Stream, _: Event) -> Result<()> {
        Ok(())
    }

    fn reach(&self, _: &dyn Driver) -> Result<Reach> {
        Ok(Reach::Direct)
    }

    fn wait_for(&self, _: Stream, _: &dyn Driver, _: Event) -> Result<()> {
        Ok(())
    }

    fn copy_between(&self, _: Stream, _: Remote<'_>, _: Remote<'_>, _: usize) -> Result<()> {
        Ok(())
    }

    fn finish(&self, _: Event) -> Result<()> {
        Ok(())
    }

    fn write(&self, _: Stream, _: Address, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn read_all(&self, _: Stream, places: &mut [(Address, &mut [u8])]) -> Result<()> {
        places.iter_mut().for_each(|(_, into)| into.fill(0));
        Ok(())
    }

    fn capture(&self, _: Stream, _: &[Work]) -> Result<Option<Graph>> {
        Ok(None)
    }

    fn replay(&self, _: Stream, graph: Graph, _: &[(usize, &[Argument])]) -> Result<()> {
        Err(DriverError::Unknown { call: "replay", what: format!("{graph:?}") })
    }
}
