//! cuBLASLt, bound by hand.
//!
//! Owns: every call into libcublasLt. Must never: choose by time, or need a version: 12.x and 13.x are opened alike, and a missing
//! library or function is an error with a sentence.
//!
//! The library is column-major: a row-major `[n, k]` is its `k x n`. So `D (n x rows) = A^T (n x k) . B (k x rows)` with A the weights
//! and B the rows of the batch, the one form that it has for e4m3 as well.
//!
//! Source: NVIDIA's `cublasLt.h` 13.10, whose numbers and sizes a test tries on the library itself where there is one.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use cudarc::driver::sys;
use libloading::Library;

use super::{Result, check};
use crate::driver::DriverError;
use crate::gemm::{ALIGNMENT, Algorithm, Gemm, Multiply, Operands, Shape, WORKSPACE_BYTES};
use crate::libraries;

/// Names the library file, before anything is searched.
pub const LIBRARY_VARIABLE: &str = "FOLIO_CUBLASLT";

const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Most algorithms that are asked for.
const CANDIDATES: usize = 32;

type Handle = *mut c_void;
type Status = c_int;

/// `cudaDataType`
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
const R_8F_E4M3: c_int = 28;
/// `CUBLAS_COMPUTE_32F`
const COMPUTE_32F: c_int = 68;

/// Attributes by their numbers; each is set with a value of exactly the type that the header says.
mod attribute {
    use std::ffi::c_int;

    /// i32, 1: transposed.
    pub const DESC_TRANSA: c_int = 3;
    /// i8, 0: sums of products of e4m3 are promoted to f32 on their way.
    pub const DESC_FAST_ACCUM: c_int = 25;
    /// u32, 4: bits of a row do not depend on the number of rows where addresses and strides are multiples of 16 bytes. From 13.10
    /// (CUDA 13.4) on, experimental.
    pub const DESC_BATCH_INVARIANCE: c_int = 41;
    /// u64
    pub const LAYOUT_COLS: c_int = 3;
    /// i64
    pub const LAYOUT_LD: c_int = 4;
    /// u64
    pub const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
    /// u32, 0: none is used.
    pub const PREF_REDUCTION_SCHEME_MASK: c_int = 3;
    /// u32 each, of A, B, C and D.
    pub const PREF_MIN_ALIGNMENT: [c_int; 4] = [5, 6, 7, 8];
    /// i32
    pub const ALGO_SPLITK_NUM: c_int = 2;
    /// u32
    pub const ALGO_REDUCTION_SCHEME: c_int = 3;
}

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy)]
struct Found {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

const NOTHING_FOUND: Found =
    Found { algorithm: [0; 8], workspace_bytes: 0, state: -1, waves: 0.0, reserved: [0; 4] };

type Destroy = unsafe extern "C" fn(Handle) -> Status;
type SetAttribute = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status;

/// Its functions, none of which was called.
struct Functions {
    version: unsafe extern "C" fn() -> usize,
    status: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(*mut Handle) -> Status,
    destroy: Destroy,
    desc_create: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status,
    desc_destroy: Destroy,
    desc_set: SetAttribute,
    layout_create: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status,
    layout_destroy: Destroy,
    layout_set: SetAttribute,
    pref_create: unsafe extern "C" fn(*mut Handle) -> Status,
    pref_destroy: Destroy,
    pref_set: SetAttribute,
    heuristic: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Found,
        *mut c_int,
    ) -> Status,
    algo_check: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        *const [u64; 8],
        *mut Found,
    ) -> Status,
    algo_get: unsafe extern "C" fn(*const [u64; 8], c_int, *mut c_void, usize, *mut usize) -> Status,
    matmul: unsafe extern "C" fn(
        Handle,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *const c_void,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *mut c_void,
        Handle,
        *const [u64; 8],
        *mut c_void,
        usize,
        sys::CUstream,
    ) -> Status,
    path: PathBuf,
    /// Keeps the functions where they are.
    _library: Library,
}

impl Functions {
    /// The file that [`LIBRARY_VARIABLE`] names, else what [`libraries`] finds.
    fn find() -> Result<Self> {
        if let Some(path) = std::env::var_os(LIBRARY_VARIABLE) {
            return Self::open(Path::new(&path));
        }
        libraries::find(&NAMES, Self::open).unwrap_or_else(|tried| {
            Err(DriverError::Library(format!(
                "cuBLASLt (libcublasLt, CUDA 12 or 13) was not found: install the CUDA toolkit, or `pip install \
                 nvidia-cublas-cu12`, or set {LIBRARY_VARIABLE} to the library's file; looked for {tried}"
            )))
        })
    }

    fn open(path: &Path) -> Result<Self> {
        let unusable = |reason: String| {
            DriverError::Library(format!("{} is no usable libcublasLt: {reason}", path.display()))
        };
        // SAFETY: loading NVIDIA's library runs its initializers, which have no conditions.
        let library = unsafe { Library::new(path) }.map_err(|error| unusable(error.to_string()))?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type is that of `cublasLt.h` for this name, the same in 12.x and 13.x; enumerations are ints.
                *unsafe { library.get(concat!("cublasLt", $name, "\0").as_bytes()) }
                    .map_err(|error| unusable(error.to_string()))?
            };
        }
        let functions = Self {
            version: symbol!("GetVersion"),
            status: symbol!("GetStatusString"),
            create: symbol!("Create"),
            destroy: symbol!("Destroy"),
            desc_create: symbol!("MatmulDescCreate"),
            desc_destroy: symbol!("MatmulDescDestroy"),
            desc_set: symbol!("MatmulDescSetAttribute"),
            layout_create: symbol!("MatrixLayoutCreate"),
            layout_destroy: symbol!("MatrixLayoutDestroy"),
            layout_set: symbol!("MatrixLayoutSetAttribute"),
            pref_create: symbol!("MatmulPreferenceCreate"),
            pref_destroy: symbol!("MatmulPreferenceDestroy"),
            pref_set: symbol!("MatmulPreferenceSetAttribute"),
            heuristic: symbol!("MatmulAlgoGetHeuristic"),
            algo_check: symbol!("MatmulAlgoCheck"),
            algo_get: symbol!("MatmulAlgoConfigGetAttribute"),
            matmul: symbol!("Matmul"),
            path: path.to_owned(),
            _library: library,
        };
        match functions.version() {
            (12.., _) => Ok(functions),
            (major, minor) => {
                Err(unusable(format!("it is version {major}.{minor}, 12.0 or later is needed")))
            }
        }
    }

    fn version(&self) -> (usize, usize) {
        // SAFETY: no conditions.
        let version = unsafe { (self.version)() };
        (version / 10_000, version / 100 % 100)
    }

    fn ok(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: no conditions; what comes back is null or a string that lives for ever.
        let text = unsafe { (self.status)(status) };
        let reason = match text.is_null() {
            true => format!("status {status}"),
            // SAFETY: as above, and it ends in NUL.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(DriverError::Call { call, reason })
    }

    /// Sets an attribute of what `object` is.
    fn set<T: Copy>(&self, with: SetAttribute, object: Handle, attribute: c_int, value: T) -> Result<()> {
        // SAFETY: `object` is alive and of the kind that `with` takes; the value is read in the call, and its size is checked by it.
        let status = unsafe { with(object, attribute, std::ptr::from_ref(&value).cast(), size_of::<T>()) };
        self.ok("setting an attribute of cuBLASLt", status)
    }

    fn descriptor(&self) -> Result<Handle> {
        let mut desc = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        self.ok("cublasLtMatmulDescCreate", unsafe { (self.desc_create)(&mut desc, COMPUTE_32F, R_32F) })?;
        let made = self.set(self.desc_set, desc, attribute::DESC_TRANSA, 1i32);
        let made = made.and_then(|()| self.set(self.desc_set, desc, attribute::DESC_FAST_ACCUM, 0i8));
        // Older libraries have no such promise; whether it holds is tried in any case.
        let _ = self.set(self.desc_set, desc, attribute::DESC_BATCH_INVARIANCE, 4u32);
        made.map(|()| desc).inspect_err(|_| {
            // SAFETY: made above, destroyed once.
            unsafe { (self.desc_destroy)(desc) };
        })
    }

    fn layout(&self, kind: c_int, rows: u32, cols: u32, stride: u32) -> Result<Handle> {
        let mut layout = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        let status = unsafe {
            (self.layout_create)(&mut layout, kind, u64::from(rows), u64::from(cols), i64::from(stride))
        };
        self.ok("cublasLtMatrixLayoutCreate", status).map(|()| layout)
    }

    fn preference(&self) -> Result<Handle> {
        let mut pref = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        self.ok("cublasLtMatmulPreferenceCreate", unsafe { (self.pref_create)(&mut pref) })?;
        let set = || -> Result<()> {
            self.set(self.pref_set, pref, attribute::PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES)?;
            self.set(self.pref_set, pref, attribute::PREF_REDUCTION_SCHEME_MASK, 0u32)?;
            let mut operands = attribute::PREF_MIN_ALIGNMENT.into_iter();
            operands.try_for_each(|of| self.set(self.pref_set, pref, of, ALIGNMENT as u32))
        };
        set().map(|()| pref).inspect_err(|_| {
            // SAFETY: made above, destroyed once.
            unsafe { (self.pref_destroy)(pref) };
        })
    }

    /// One of an algorithm's settings.
    fn setting(&self, algorithm: &[u64; 8], attribute: c_int) -> Option<u32> {
        let (mut value, mut written) = (0u32, 0);
        // SAFETY: both settings that are asked for have four bytes.
        let status = unsafe {
            (self.algo_get)(algorithm, attribute, std::ptr::from_mut(&mut value).cast(), 4, &mut written)
        };
        (status == 0 && written == 4).then_some(value)
    }

    /// Whether it says that it adds partial sums. One that says nothing of it is not trusted.
    fn splits(&self, algorithm: &[u64; 8]) -> bool {
        let parts = self.setting(algorithm, attribute::ALGO_SPLITK_NUM);
        let scheme = self.setting(algorithm, attribute::ALGO_REDUCTION_SCHEME);
        !matches!((parts, scheme), (Some(0 | 1), Some(0)))
    }
}

/// Descriptions of one shape's product. The numbers of rows and their strides are set before each use.
#[derive(Clone, Copy)]
struct Plan {
    desc: Handle,
    weights: Handle,
    x: Handle,
    out: Handle,
}

/// The library on one stream.
pub struct Lt {
    functions: Functions,
    handle: Handle,
    context: sys::CUcontext,
    stream: sys::CUstream,
    preference: Handle,
    plans: HashMap<Shape, Plan>,
}

impl Lt {
    /// The context is current, and outlives what is made here.
    pub fn open(context: sys::CUcontext, stream: sys::CUstream) -> Result<Self> {
        let functions = Functions::find()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        let created = functions.ok("cublasLtCreate", unsafe { (functions.create)(&mut handle) });
        created.map_err(|error| {
            DriverError::Library(format!("{} does not start: {error}", functions.path.display()))
        })?;
        let preference = functions.preference().inspect_err(|_| {
            // SAFETY: made above, destroyed once.
            unsafe { (functions.destroy)(handle) };
        })?;
        Ok(Self { functions, handle, context, stream, preference, plans: HashMap::new() })
    }

    fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as the driver that owns this.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// The descriptions of a product of so many rows.
    fn plan(&mut self, shape: Shape, rows: u32, x_stride: u32, out_stride: u32) -> Result<Plan> {
        let functions = &self.functions;
        let plan = match self.plans.get(&shape) {
            Some(plan) => *plan,
            None => {
                let Shape { n, k, operands } = shape;
                let kind = match operands {
                    Operands::Bf16 => R_16BF,
                    Operands::Fp8 => R_8F_E4M3,
                };
                // A failure here leaves what was made before it; there is one per shape at most.
                let plan = Plan {
                    desc: functions.descriptor()?,
                    weights: functions.layout(kind, k, n, k)?,
                    x: functions.layout(kind, k, 1, k)?,
                    out: functions.layout(R_32F, n, 1, n)?,
                };
                self.plans.insert(shape, plan);
                plan
            }
        };
        for (layout, stride) in [(plan.x, x_stride), (plan.out, out_stride)] {
            functions.set(functions.layout_set, layout, attribute::LAYOUT_COLS, u64::from(rows))?;
            functions.set(functions.layout_set, layout, attribute::LAYOUT_LD, i64::from(stride))?;
        }
        Ok(plan)
    }
}

impl Gemm for Lt {
    fn name(&self) -> String {
        let (major, minor) = self.functions.version();
        format!("cuBLASLt {major}.{minor}")
    }

    fn candidates(&mut self, shape: Shape, rows: u32) -> Result<Vec<Algorithm>> {
        self.enter()?;
        let (handle, preference) = (self.handle, self.preference);
        let Plan { desc, weights, x, out } = self.plan(shape, rows, shape.k, shape.n)?;
        let mut found = [NOTHING_FOUND; CANDIDATES];
        let mut count = 0;
        // SAFETY: handles that were made here and live; room for as many answers as are asked for.
        let status = unsafe {
            (self.functions.heuristic)(
                handle,
                desc,
                weights,
                x,
                out,
                out,
                preference,
                CANDIDATES as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        self.functions.ok("cublasLtMatmulAlgoGetHeuristic", status)?;
        let found = found.iter().take(usize::try_from(count).unwrap_or(0)).filter(|found| found.state == 0);
        let whole = found.filter(|found| !self.functions.splits(&found.algorithm));
        Ok(whole.map(|found| Algorithm(found.algorithm)).collect())
    }

    fn takes(&mut self, shape: Shape, algorithm: &Algorithm, rows: u32) -> bool {
        let handle = self.handle;
        if self.enter().is_err() {
            return false;
        }
        let Ok(Plan { desc, weights, x, out }) = self.plan(shape, rows, shape.k, shape.n) else {
            return false;
        };
        let mut found = NOTHING_FOUND;
        // SAFETY: handles that were made here and live, an algorithm that the library gave, a place for the answer.
        let status = unsafe {
            (self.functions.algo_check)(handle, desc, weights, x, out, out, &algorithm.0, &mut found)
        };
        status == 0 && found.workspace_bytes as u64 <= WORKSPACE_BYTES
    }

    fn multiply(&mut self, work: &Multiply) -> Result<()> {
        self.enter()?;
        let (handle, stream) = (self.handle, self.stream);
        let Plan { desc, weights, x, out } =
            self.plan(work.shape, work.rows, work.x_stride, work.out_stride)?;
        let (one, zero) = (1.0f32, 0.0f32);
        let at = |ptr: crate::DevicePtr| ptr.0 as usize as *mut c_void;
        // SAFETY: handles that were made here and live; addresses of device memory of the shapes that the layouts describe, which the
        // caller keeps until the stream has passed this; the scalars are read in the call.
        let status = unsafe {
            (self.functions.matmul)(
                handle,
                desc,
                std::ptr::from_ref(&one).cast(),
                at(work.weights),
                weights,
                at(work.x),
                x,
                std::ptr::from_ref(&zero).cast(),
                at(work.out),
                out,
                at(work.out),
                out,
                &work.algorithm.0,
                at(work.workspace),
                WORKSPACE_BYTES as usize,
                stream,
            )
        };
        self.functions.ok("cublasLtMatmul", status)
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        let functions = &self.functions;
        // SAFETY: everything was made by these functions and is destroyed once; nothing is asked of the library after this.
        unsafe {
            for (_, plan) in self.plans.drain() {
                (functions.desc_destroy)(plan.desc);
                for layout in [plan.weights, plan.x, plan.out] {
                    (functions.layout_destroy)(layout);
                }
            }
            (functions.pref_destroy)(self.preference);
            (functions.destroy)(self.handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library itself refuses an attribute it does not have, and one of another size: a driver or a GPU is not needed for that.
    #[test]
    fn attributes_have_the_numbers_and_sizes_that_the_library_wants() {
        let Ok(functions) = Functions::find() else {
            eprintln!("SKIPPED: no libcublasLt is found; {LIBRARY_VARIABLE} names one");
            return;
        };
        let desc = functions.descriptor().unwrap();
        assert!(
            functions.set(functions.desc_set, desc, attribute::DESC_TRANSA, 1i64).is_err(),
            "sizes count"
        );
        assert!(functions.set(functions.desc_set, desc, 999, 1i32).is_err(), "numbers count");
        let promised = functions.set(functions.desc_set, desc, attribute::DESC_BATCH_INVARIANCE, 4u32);
        assert_eq!(promised.is_ok(), functions.version() >= (13, 10), "{:?}", functions.version());
        let layout = functions.layout(R_8F_E4M3, 64, 32, 64).unwrap();
        functions.set(functions.layout_set, layout, attribute::LAYOUT_COLS, 7u64).unwrap();
        functions.set(functions.layout_set, layout, attribute::LAYOUT_LD, 96i64).unwrap();
        let pref = functions.preference().unwrap();
        // An algorithm of zeros splits nothing and reduces nothing.
        assert_eq!(functions.setting(&[0; 8], attribute::ALGO_SPLITK_NUM), Some(0));
        assert_eq!(functions.setting(&[0; 8], attribute::ALGO_REDUCTION_SCHEME), Some(0));
        assert!(!functions.splits(&[0; 8]) && functions.setting(&[0; 8], 999).is_none());
        // SAFETY: made above, destroyed once.
        unsafe {
            (functions.desc_destroy)(desc);
            (functions.layout_destroy)(layout);
            (functions.pref_destroy)(pref);
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcublasLt.so.12");
        std::fs::write(&path, b"not a library").unwrap();
        let error = Functions::open(&path).err().expect("refused").to_string();
        assert!(error.contains("libcublasLt.so.12 is no usable libcublasLt"), "{error}");
    }
}
