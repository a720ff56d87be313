//! Matrix products by cuBLASLt, with its own order of sums.

use crate::driver::{Address, DriverError, Operand, Product, Result, Stream};
use cudarc::cublaslt::result::{
    CublasError, create_handle, create_matmul_desc, create_matmul_pref, create_matrix_layout, destroy_handle,
    destroy_matmul_desc, destroy_matmul_pref, destroy_matrix_layout, get_matmul_algo_heuristic, matmul,
    set_matmul_desc_attribute, set_matmul_pref_attribute,
};
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t as Epilogue, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t, cublasLtReductionScheme_t,
    cublasStatus_t as Status, cudaDataType,
};
use cudarc::driver::result::free_sync;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use meshwork_core::DType;
use meshwork_tensor::Precision;
use std::collections::HashMap;
use std::ffi::c_void;

/// Bytes of workspace for a product.
const WORKSPACE: usize = 32 << 20;

/// Its alignment, and the largest that is stated for matrices.
const ALIGNED: u64 = 256;

/// cuBLASLt on one GPU.
#[derive(Debug)]
pub(super) struct Library {
    handle: cublasLtHandle_t,
    /// One for each stream, because products of two streams may run at the same time.
    workspaces: HashMap<Stream, CUdeviceptr>,
    algorithms: HashMap<Shape, cublasLtMatmulAlgo_t>,
}

/// The key of an algorithm: all properties on which it depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    mnk: [usize; 3],
    transposed: [bool; 2],
    precision: Precision,
    /// Whether C and the bias are of bf16.
    rounded: bool,
    /// Whether a bias is added.
    epilogue: bool,
    /// The alignments of A, B and C.
    alignments: [u32; 3],
}

/// The error of a function of the library. If it could not run its kernels, earlier work may be at fault.
fn failed(call: &'static str) -> impl Fn(CublasError) -> DriverError {
    move |error| match (format!("{:?}", error.0), error.0) {
        (why, Status::CUBLAS_STATUS_EXECUTION_FAILED | Status::CUBLAS_STATUS_INTERNAL_ERROR) => {
            DriverError::Found { at: call.to_owned(), why }
        }
        (why, _) => DriverError::Call { call, why },
    }
}

impl Library {
    /// The library must exist, and the context must be current.
    pub(super) fn new() -> Result<Self> {
        let handle = create_handle().map_err(failed("cublasLtCreate"))?;
        Ok(Self { handle, workspaces: HashMap::new(), algorithms: HashMap::new() })
    }

    /// Queues a product that was [checked](Product::check), whose sums are not empty. The context must be current, and
    /// `queue` the GPU's handle of `stream`.
    pub(super) fn product(&mut self, stream: Stream, queue: CUstream, product: Product) -> Result<()> {
        let Product { mnk: [m, n, k], operands: [a, b], precision, c, rounded, accumulate, bias } = product;
        // The library's matrices are column-major, so our row-major matrices are their transposes: it computes Cᵀ =
        // op(B)ᵀ · op(A)ᵀ, with swapped operands.
        let type_of = |dtype| if dtype == DType::Bf16 { cudaDataType::CUDA_R_16BF } else { cudaDataType::CUDA_R_32F };
        let of = type_of(product.dtype());
        let stored = |operand: Operand, [rows, columns]: [usize; 2]| {
            if operand.transposed { Layout::new(of, columns, rows) } else { Layout::new(of, rows, columns) }
        };
        let (first, second) = (stored(b, [k, n])?, stored(a, [m, k])?);
        let out = Layout::new(type_of(product.result()), m, n)?;
        let description = Description::new(precision, [b.transposed, a.transposed], bias)?;
        // There is none for the bias, which the epilogue reads 16 bytes at a time: see Product::check.
        let alignments = [a.at, b.at, c].map(alignment);
        let (transposed, epilogue) = ([a.transposed, b.transposed], bias.is_some());
        let shape = Shape { mnk: product.mnk, transposed, precision, rounded, epilogue, alignments };
        let algorithm = match self.algorithms.get(&shape) {
            Some(&algorithm) => algorithm,
            None => {
                let preference = Wish::new([alignments[1], alignments[0], alignments[2]], rounded)?;
                // SAFETY: all of these exist until the end of this function.
                let best = unsafe {
                    get_matmul_algo_heuristic(self.handle, description.0, first.0, second.0, out.0, out.0, preference.0)
                };
                let best = best.map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?;
                *self.algorithms.entry(shape).or_insert(best.algo)
            }
        };
        let workspace = self.workspace(stream)?;
        let (alpha, beta) = (1.0_f32, if accumulate { 1.0_f32 } else { 0.0 });
        let at = |address: Address| address.0 as *const c_void;
        // SAFETY: the descriptors match the matrices, whose addresses and sizes the caller guarantees as for a kernel;
        // scales are read during the call, because they are host pointers; the workspace belongs to this stream, with
        // the size given in the preference.
        let queued = unsafe {
            matmul(
                self.handle,
                description.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                at(b.at),
                first.0,
                at(a.at),
                second.0,
                at(c),
                out.0,
                c.0 as *mut c_void,
                out.0,
                &raw const algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                queue.cast(),
            )
        };
        queued.map_err(failed("cublasLtMatmul"))
    }

    fn workspace(&mut self, stream: Stream) -> Result<CUdeviceptr> {
        if let Some(&at) = self.workspaces.get(&stream) {
            return Ok(at);
        }
        let at = super::allocate(WORKSPACE)?;
        Ok(*self.workspaces.entry(stream).or_insert(at))
    }

    /// Frees all resources. The context must be current, and no product in flight.
    pub(super) fn drop_all(&mut self) {
        for (_, at) in self.workspaces.drain() {
            // SAFETY: allocated in `workspace`, and removed from the list.
            _ = unsafe { free_sync(at) };
        }
        let handle = std::mem::replace(&mut self.handle, std::ptr::null_mut());
        if !handle.is_null() {
            // SAFETY: made in `new`, and destroyed once.
            _ = unsafe { destroy_handle(handle) };
        }
    }
}

/// The largest power of two that divides an address, up to `ALIGNED`.
fn alignment(at: Address) -> u32 {
    (1 << at.0.trailing_zeros().min(ALIGNED.trailing_zeros())) as u32
}

/// The library's descriptor of a matrix.
struct Layout(cublasLtMatrixLayout_t);

impl Layout {
    /// The descriptor of a row-major matrix.
    fn new(of: cudaDataType, rows: usize, columns: usize) -> Result<Self> {
        let layout = create_matrix_layout(of, columns as u64, rows as u64, columns as i64);
        layout.map(Self).map_err(failed("cublasLtMatrixLayoutCreate"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and nothing keeps it: a queued product has copied it.
        _ = unsafe { destroy_matrix_layout(self.0) };
    }
}

/// The library's descriptor of a product, with sums in f32.
struct Description(cublasLtMatmulDesc_t);

impl Description {
    /// `bias` has one number for each row of the library's result, which is a column of ours. It has the result's type.
    fn new(precision: Precision, transposed: [bool; 2], bias: Option<Address>) -> Result<Self> {
        let computes = match precision {
            Precision::F32 | Precision::Bf16 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
            Precision::Tf32 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        };
        let description = create_matmul_desc(computes, cudaDataType::CUDA_R_32F);
        let description = Self(description.map_err(failed("cublasLtMatmulDescCreate"))?);
        let attributes = [Attribute::CUBLASLT_MATMUL_DESC_TRANSA, Attribute::CUBLASLT_MATMUL_DESC_TRANSB];
        for (attribute, transposed) in attributes.into_iter().zip(transposed) {
            let operation = i32::from(transposed); // CUBLAS_OP_N and CUBLAS_OP_T
            // SAFETY: the attribute is a number of 32 bits, which is read during the call.
            let set = unsafe { set_matmul_desc_attribute(description.0, attribute, (&raw const operation).cast(), 4) };
            set.map_err(failed("cublasLtMatmulDescSetAttribute"))?;
        }
        if let Some(bias) = bias {
            let epilogue = Epilogue::CUBLASLT_EPILOGUE_BIAS as i32;
            let (kind, place) =
                (Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER);
            // SAFETY: the attribute is a number of 32 bits, which is read during the call.
            let set = unsafe { set_matmul_desc_attribute(description.0, kind, (&raw const epilogue).cast(), 4) };
            set.map_err(failed("cublasLtMatmulDescSetAttribute"))?;
            // SAFETY: the attribute is an address of 64 bits, which is read during the call; the caller guarantees the
            // address.
            let set = unsafe { set_matmul_desc_attribute(description.0, place, (&raw const bias.0).cast(), 8) };
            set.map_err(failed("cublasLtMatmulDescSetAttribute"))?;
        }
        Ok(description)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and nothing keeps it.
        _ = unsafe { destroy_matmul_desc(self.0) };
    }
}

/// The memory that an algorithm may use, and the alignments on which it may rely.
struct Wish(cublasLtMatmulPreference_t);

impl Wish {
    /// Alignments in bytes of the library's first operand, its second, and the result. If the result is `rounded`,
    /// partial sums must not be rounded before they are added.
    fn new([first, second, out]: [u32; 3], rounded: bool) -> Result<Self> {
        let call = "cublasLtMatmulPreferenceSetAttribute";
        let wish = Self(create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?);
        let workspace = WORKSPACE as u64;
        // SAFETY: the attribute is a number of 64 bits, which is read during the call.
        let set = unsafe {
            let attribute = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            set_matmul_pref_attribute(wish.0, attribute, (&raw const workspace).cast(), 8)
        };
        set.map_err(failed(call))?;
        let parts = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let parts = rounded.then_some((Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, parts));
        for (attribute, number) in [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, first),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, second),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out),
        ]
        .into_iter()
        .chain(parts)
        {
            // SAFETY: the attribute is a number of 32 bits, which is read during the call.
            let set = unsafe { set_matmul_pref_attribute(wish.0, attribute, (&raw const number).cast(), 4) };
            set.map_err(failed(call))?;
        }
        Ok(wish)
    }
}

impl Drop for Wish {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and nothing keeps it.
        _ = unsafe { destroy_matmul_pref(self.0) };
    }
}
