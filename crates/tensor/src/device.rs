//! Devices: the memory of tensors, and the kernels that compute on it.
//!
//! A device offers small traits of kernels ([`crate::kernel`]); a missing one is an error that names it. The device
//! [`meta`](crate::meta) tracks only shapes, so that a step run on it gives FLOPs, bytes and collectives without data;
//! devices that compute are crates of their own. Each kernel trait is implemented in one file per device.

use crate::accounts::{Accounts, CategoryScope};
use crate::error::{Error, Result};
use crate::kernel::*;
use crate::launches::Launches;
use crate::memory::{Category, MemoryUse};
use crate::pinned::Pinned;
use meshwork_core::{Buffer, DType};
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};

/// The kernel traits, each with the name by which a device offers it.
macro_rules! families {
    ($each:ident) => {
        $each! {
            /// Matrix products.
            matmul: Matmul, "matmul";
            /// Sums, biases, activations, dropout.
            pointwise: Pointwise, "pointwise";
            /// Functions of one and of two numbers.
            elementwise: Elementwise, "elementwise";
            /// Sums over a dim, softmax, squared errors.
            reduction: Reduction, "reduction";
            /// Elements chosen along a dim by integers.
            indexing: Indexing, "indexing";
            /// Layer norm.
            norm: Norm, "norm";
            /// Norms over channels: batch and group norm.
            channel_norm: ChannelNorm, "channel norm";
            /// Windows over images: convolution and pooling.
            window: Window, "window";
            /// Causal attention.
            attention: Attention, "attention";
            /// Table lookups.
            embedding: Embedding, "embedding";
            /// Softmax cross entropy.
            loss: Loss, "loss";
            /// Products of groups of rows, each with its own matrix.
            grouped_matmul: Grouped, "grouped";
            /// Rows moved by integers.
            permutation: Permutation, "permutation";
            /// Routers of a mixture of experts.
            routing: Routing, "routing";
            /// Moving blocks of memory.
            layout: Layout, "layout";
            /// Flat vectors of weights, gradients and optimizer states.
            optim: Optim, "optim";
            /// Update rules that read whole matrices.
            whole_optim: WholeOptim, "optim";
            /// Lossy compression.
            compression: Compression, "compression";
        }
    };
}

/// Methods of [`Device`].
macro_rules! accessors {
    ($($(#[$on:meta])* $family:ident: $Trait:ident, $text:literal;)*) => {$(
        $(#[$on])*
        fn $family(&self) -> Result<&dyn $Trait> {
            self.kernels().$family.ok_or_else(|| self.missing($text))
        }
    )*};
}

/// [`Kernels`].
macro_rules! kernels_of_a_device {
    ($($(#[$on:meta])* $family:ident: $Trait:ident, $text:literal;)*) => {
        /// The kernels that a device has.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Kernels<'a> {$(
            $(#[$on])*
            pub $family: Option<&'a dyn $Trait>,
        )*}

        impl<'a> Kernels<'a> {
            /// The kernels of a device that has all.
            pub fn all<D: $($Trait +)*>(device: &'a D) -> Self {
                Self { $($family: Some(device)),* }
            }

            /// The kernels of a device around an inner one that has these.
            pub fn through<D: $($Trait +)*>(self, device: &D) -> Kernels<'_> {
                Kernels { $($family: self.$family.map(|_| device as _)),* }
            }
        }
    };
}

families!(kernels_of_a_device);

/// Allocates memory and offers kernels. There is one device value per rank, so that its [`Meter`] counts that rank's
/// work. Counts, here and in the kernels, may be 0.
pub trait Device: Send + Sync + Debug {
    /// `cpu`, `meta`, ...
    fn name(&self) -> &str;

    /// Memory for `count` elements whose values are unspecified.
    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer>;

    /// Memory for `count` elements, all zero.
    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer>;

    /// Copies host memory to this device.
    fn upload(&self, host: &Buffer) -> Result<Buffer>;

    /// Copies host memory to the elements of `dst` from `at` on, of the same dtype.
    ///
    /// # Errors
    /// When the dtypes differ, when `host` does not fit in, or when `dst` is shared.
    fn upload_into(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()> {
        let copy = self.upload(host)?;
        self.layout()?.copy_into(&copy, 0..copy.count(), dst, at)
    }

    /// Copies memory of this device to the host. A [slice](Buffer::slice) of a buffer copies only that part.
    fn download(&self, buffer: &Buffer) -> Result<Buffer>;

    /// The copy that [`download`](Self::download) gives, of what `buffer` holds now, to be waited for later. What is
    /// queued meanwhile runs beside it, where a device can do both.
    fn download_later(&self, buffer: &Buffer) -> Result<Download> {
        let copy = self.download(buffer)?;
        Ok(Download::new(move || Ok(copy)))
    }

    /// Makes memory ready for values that come later: their copy does not wait for what is queued meanwhile, where a
    /// device can do both.
    ///
    /// # Errors
    /// As [`upload_into`](Self::upload_into).
    fn upload_later(&self, mut into: Buffer) -> Result<Upload> {
        Ok(Upload::new(move |device, values| {
            device.upload_into(values, &mut into, 0)?;
            Ok(into)
        }))
    }

    /// Whether tensors have values here. A device with shapes only (`meta`) returns false: its memory need not be
    /// initialised, and downloads are zeros.
    fn has_values(&self) -> bool {
        true
    }

    /// Without values: whether the choices that depend on them are assumed to bring this rank all that they can, such
    /// as the tokens of all ranks to its experts. Otherwise loads are assumed to be even.
    fn takes_all(&self) -> bool {
        false
    }

    /// Waits until all work that was queued on this device is done, so that a clock can be read. A device whose kernels
    /// are done when they return has nothing to wait for.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Host memory of the device's own, to which what is offloaded goes. By default there is none.
    fn pinned(&self) -> Option<&dyn Pinned> {
        None
    }

    /// The counts of this device's work and memory.
    fn meter(&self) -> &Meter;

    /// How this rank's work was queued so far, on a device that queues repeated work as one; `None` on others.
    fn launches(&self) -> Option<Launches> {
        None
    }

    /// The precision in which it computes products and attention of f32.
    fn precision(&self) -> Precision {
        Precision::F32
    }

    /// The type in which a matmul operand is stored: a value of type `dtype` that only matrix products read. It differs
    /// from `dtype` if products round the value anyway, so that their results are the same. Its gradient is of type
    /// `dtype`.
    fn operand_dtype(&self, dtype: DType) -> DType {
        self.precision().operand_dtype(dtype)
    }

    /// The kernels that this device has. By default it has none; one that has all gives [`Kernels::all`].
    fn kernels(&self) -> Kernels<'_> {
        Kernels::default()
    }

    families!(accessors);

    /// The error for a kernel trait that this device lacks. The tape adds the name of its operation.
    fn missing(&self, kernels: &'static str) -> Error {
        Error::MissingKernel { op: kernels, device: self.name().to_owned(), kernels }
    }
}

/// Kinds of work that a [`Meter`] counts separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Matrix products: 2·m·n·k.
    Matmul,
    /// Attention: 4·d for each (query, key) pair that the causal mask keeps; 10·d backward, probabilities recomputed.
    Attention,
}

impl Work {
    const COUNT: usize = 2;
}

/// Copies between the host and a device: their number, and their total bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Number of copies.
    pub calls: u64,
    /// Bytes of all copies.
    pub bytes: u64,
}

/// Counts the floating point operations of a device's matrix work, the bytes that its live buffers hold, and the copies
/// from and to the host. Work bound by memory (norms, activations, sums) is not counted, because it is not part of
/// model FLOPs.
#[derive(Debug, Default)]
pub struct Meter {
    flops: [AtomicU64; Work::COUNT],
    accounts: Accounts,
    uploads: Counter,
    downloads: Counter,
}

/// [`Transfers`] so far.
#[derive(Debug, Default)]
struct Counter {
    calls: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    fn add(&self, bytes: usize) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn read(&self) -> Transfers {
        Transfers { calls: self.calls.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

impl Meter {
    /// Adds floating point operations.
    pub fn add_flops(&self, work: Work, flops: u64) {
        self.flops[work as usize].fetch_add(flops, Ordering::Relaxed);
    }

    /// Floating point operations of one kind of work so far.
    pub fn flops(&self, work: Work) -> u64 {
        self.flops[work as usize].load(Ordering::Relaxed)
    }

    /// All floating point operations so far.
    pub fn total_flops(&self) -> u64 {
        self.flops.iter().map(|flops| flops.load(Ordering::Relaxed)).sum()
    }

    /// Leaves the floating point operations of `run` out of the count, for a check beside the work.
    pub fn uncounted<T>(&self, run: impl FnOnce() -> T) -> T {
        let before = self.flops.each_ref().map(|flops| flops.load(Ordering::Relaxed));
        let done = run();
        self.flops.iter().zip(before).for_each(|(flops, before)| flops.store(before, Ordering::Relaxed));
        done
    }

    /// Makes new buffers belong to `category` while the result lives. Without one they are [`Category::Other`].
    pub fn enter(&self, category: Category) -> CategoryScope<'_> {
        self.accounts.enter(category)
    }

    /// Sets the most bytes that buffers may have at once; `None`: no limit.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.accounts.set_limit(bytes);
    }

    /// Counts a new buffer of `bytes` bytes. Returns the category to [end](Self::shrink) it with.
    ///
    /// # Errors
    /// A buffer beyond the limit.
    pub fn grow(&self, bytes: usize) -> Result<Category> {
        self.accounts.grow(bytes as u64)
    }

    /// Counts the end of a buffer of `bytes` bytes.
    pub fn shrink(&self, bytes: usize, category: Category) {
        self.accounts.shrink(bytes as u64, category);
    }

    /// The uses of the buffers alive now.
    pub fn live(&self) -> MemoryUse {
        self.accounts.live()
    }

    /// The uses of the buffers when they had the most bytes.
    pub fn peak(&self) -> MemoryUse {
        self.accounts.peak()
    }

    /// Counts a copy of `bytes` bytes from the host.
    pub fn add_upload(&self, bytes: usize) {
        self.uploads.add(bytes);
    }

    /// Counts a copy of `bytes` bytes to the host.
    pub fn add_download(&self, bytes: usize) {
        self.downloads.add(bytes);
    }

    /// Copies from the host so far.
    pub fn uploads(&self) -> Transfers {
        self.uploads.read()
    }

    /// Copies to the host so far.
    pub fn downloads(&self) -> Transfers {
        self.downloads.read()
    }

    /// Bytes of the buffers alive now.
    pub fn live_bytes(&self) -> u64 {
        self.live().total()
    }

    /// The most bytes that were ever alive at once.
    pub fn peak_bytes(&self) -> u64 {
        self.peak().total()
    }
}

/// A copy on its way to the host ([`Device::download_later`]). The memory that it is of is neither written nor dropped
/// before it is waited for.
pub struct Download(Box<dyn FnOnce() -> Result<Buffer> + Send>);

/// Memory that is ready for values from the host ([`Device::upload_later`]).
pub struct Upload(Box<CopyToDevice>);

/// Copies values to memory of a device, and gives the memory back.
type CopyToDevice = dyn FnOnce(&dyn Device, &Buffer) -> Result<Buffer>;

impl Download {
    /// A copy that `wait` waits for.
    pub fn new(wait: impl FnOnce() -> Result<Buffer> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Waits for the copy. Any thread may do that.
    pub fn wait(self) -> Result<Buffer> {
        self.0()
    }
}

impl Upload {
    /// Memory to which `copy` copies, given its device and the values.
    pub fn new(copy: impl FnOnce(&dyn Device, &Buffer) -> Result<Buffer> + 'static) -> Self {
        Self(Box::new(copy))
    }

    /// Copies values to the memory, and gives it back: what is queued from now on has them.
    ///
    /// # Errors
    /// Values of another type or number, and errors of the device.
    pub fn copy(self, device: &dyn Device, values: &Buffer) -> Result<Buffer> {
        self.0(device, values)
    }
}

impl Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Download")
    }
}

impl Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Upload")
    }
}
