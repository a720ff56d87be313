//! The cores that processes of a host share: a count of the threads that compute, in memory of all of them.
//!
//! A rank that waits leaves its core to the ranks of its process. With the count it leaves it to those of the other
//! processes as well: in a pipeline over processes a stage that waits lends its core to the other one. The memory has
//! no name that could be left behind: it is a file in memory, which the others open by the number that its owner has
//! for it. A process that is killed leaves what it had counted, and others are helped less for the rest of the run.

use std::sync::atomic::AtomicUsize;

/// What a process tells others of the memory that it offers: numbers that are equal where the same cores are used, its
/// process id, and the number of the file.
pub(crate) type Offer = [i64; 4];

/// What the file is called in the list of open files.
#[cfg(target_os = "linux")]
const NAME: &str = "meshwork cores";

/// The offer of this process, on the host of this number. Without one the last number is negative.
#[cfg(target_os = "linux")]
pub(crate) fn offer(host: u64) -> Offer {
    use std::ffi::CString;
    use std::fs::File;
    use std::os::fd::{FromRawFd, IntoRawFd};
    let name = CString::new(NAME).unwrap_or_default();
    // SAFETY: the name is a text that ends with a zero.
    let file = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    let file = (file >= 0).then(|| {
        // SAFETY: the call has just opened it, and nothing else has it.
        let file = unsafe { File::from_raw_fd(file) };
        let sized = file.set_len(size_of::<AtomicUsize>() as u64);
        sized.map_or(-1, |()| file.into_raw_fd()) // it stays open, for others to find
    });
    [host as i64, which() as i64, i64::from(std::process::id()), i64::from(file.unwrap_or(-1))]
}

/// A hash of the cores that this process may use.
#[cfg(target_os = "linux")]
fn which() -> u64 {
    // SAFETY: the set is plain data, of which the call writes at most its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&set), &mut set);
        set
    };
    // SAFETY: the set is plain data, and was zeroed.
    let words: Vec<u8> =
        (0..libc::CPU_SETSIZE as usize).map(|cpu| u8::from(unsafe { libc::CPU_ISSET(cpu, &set) })).collect();
    meshwork_core::hash::hash(&words)
}

/// The memory of the first of these offers that is for the cores of `own`; `None` where nobody else uses them, or it
/// cannot be opened.
#[cfg(target_os = "linux")]
pub(crate) fn shared(own: &Offer, all: &[Offer]) -> Option<&'static AtomicUsize> {
    use std::fs::{self, File};
    use std::os::fd::AsRawFd;
    let mut alike = all.iter().filter(|offer| offer[..2] == own[..2]);
    let [_, _, process, file] = alike.next()?;
    alike.next()?;
    let path = format!("/proc/{process}/fd/{file}");
    // In a container of its own the number may be another program's.
    fs::read_link(&path).ok().filter(|name| name.to_string_lossy().contains(NAME))?;
    let file = File::options().read(true).write(true).open(&path).ok()?;
    let (bytes, access) = (size_of::<AtomicUsize>(), libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: a new mapping of a file of that many bytes touches no other memory.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    // SAFETY: it is a page that is never unmapped, aligned as one, of a file that nobody makes shorter; all processes
    // use it by atomic operations.
    (at != libc::MAP_FAILED).then(|| unsafe { &*at.cast::<AtomicUsize>() })
}

/// No offer: there is no such memory.
#[cfg(not(target_os = "linux"))]
pub(crate) fn offer(host: u64) -> Offer {
    [host as i64, 0, 0, -1]
}

/// No memory.
#[cfg(not(target_os = "linux"))]
pub(crate) fn shared(_own: &Offer, _all: &[Offer]) -> Option<&'static AtomicUsize> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn processes_that_use_the_same_cores_have_one_count() {
        let [a, b, mut elsewhere] = [7, 7, 8].map(offer);
        let [at_a, at_b] = [&a, &b].map(|own| shared(own, &[elsewhere, a, b]).unwrap());
        at_a.fetch_add(3, Ordering::Relaxed);
        at_b.fetch_sub(1, Ordering::Relaxed);
        assert_eq!((at_a.load(Ordering::Relaxed), at_b.load(Ordering::Relaxed)), (2, 2));
        assert!(shared(&elsewhere, &[elsewhere, a, b]).is_none(), "nobody else is on its host");
        // Of another container, where this is another program's number.
        elsewhere[..2].copy_from_slice(&a[..2]);
        elsewhere[3] = 0;
        assert!(shared(&a, &[elsewhere, a]).is_none());
    }
}
