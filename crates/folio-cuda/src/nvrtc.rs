//! NVIDIA's run-time compiler, bound by hand: CUDA C++ in, a cubin for one architecture out.
//!
//! Owns: its eight functions. Must never: need a GPU, a driver or a header. Works with NVRTC
//! 12.x and 13.x; a missing library or function is an error with a sentence, never a panic.
//!
//! Source: NVRTC documentation, "Basic Usage"; the signatures of `nvrtc.h`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::libraries;

/// Names the library file, before anything is searched.
pub const LIBRARY_VARIABLE: &str = "FOLIO_NVRTC";

const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Floats are contracted where kernels say so and nowhere else; see the prelude.
const OPTIONS: [&str; 3] = ["--std=c++17", "--fmad=false", "--device-as-default-execution-space"];

#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    #[error(
        "NVIDIA's run-time compiler (libnvrtc, CUDA 12 or 13) was not found: install the CUDA toolkit, or \
         `pip install nvidia-cuda-nvrtc-cu12`, or set {LIBRARY_VARIABLE} to the library's file; looked for {tried}"
    )]
    Absent { tried: String },
    #[error("{path} is no usable libnvrtc: {reason}")]
    Unusable { path: String, reason: String },
    #[error("{0}")]
    Compile(String),
}

type Program = *mut c_void;
type Status = c_int;

/// The library, loaded.
pub struct Nvrtc {
    version: (i32, i32),
    path: PathBuf,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    /// Keeps the functions where they are.
    _library: Library,
}

impl Nvrtc {
    /// The file that [`LIBRARY_VARIABLE`] names, else what [`libraries`] finds.
    pub fn find() -> Result<Self, NvrtcError> {
        if let Some(path) = std::env::var_os(LIBRARY_VARIABLE) {
            return Self::open(Path::new(&path));
        }
        libraries::find(&NAMES, Self::open).unwrap_or_else(|tried| Err(NvrtcError::Absent { tried }))
    }

    pub fn open(path: &Path) -> Result<Self, NvrtcError> {
        let unusable = |reason: String| NvrtcError::Unusable { path: path.display().to_string(), reason };
        // SAFETY: loading NVIDIA's compiler runs its initializers, which have no conditions.
        let library = unsafe { Library::new(path) }.map_err(|error| unusable(error.to_string()))?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type is that of `nvrtc.h` for this name, the same in 12.x and 13.x.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                    .map_err(|error| unusable(error.to_string()))?
            };
        }
        let version_of: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status = symbol!("nvrtcVersion");
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are places for an int.
        let status = unsafe { version_of(&mut major, &mut minor) };
        if status != 0 || major < 12 {
            return Err(unusable(format!("it is version {major}.{minor}, 12.0 or later is needed")));
        }
        Ok(Self {
            version: (major, minor),
            path: path.to_owned(),
            create: symbol!("nvrtcCreateProgram"),
            compile: symbol!("nvrtcCompileProgram"),
            cubin_size: symbol!("nvrtcGetCUBINSize"),
            cubin: symbol!("nvrtcGetCUBIN"),
            log_size: symbol!("nvrtcGetProgramLogSize"),
            log: symbol!("nvrtcGetProgramLog"),
            destroy: symbol!("nvrtcDestroyProgram"),
            _library: library,
        })
    }

    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A cubin of `source` for compute capability `arch` / 10. `name` is for messages.
    pub fn compile(&self, name: &str, source: &str, arch: u32) -> Result<Vec<u8>, NvrtcError> {
        let nul = |_| NvrtcError::Compile(format!("{name} has a NUL byte"));
        let (source, file) = (CString::new(source).map_err(nul)?, CString::new(name).map_err(nul)?);
        let target = format!("--gpu-architecture=sm_{arch}");
        let options = OPTIONS.into_iter().chain([target.as_str()]);
        let options: Vec<CString> = options.map(CString::new).collect::<Result<_, _>>().map_err(nul)?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        // SAFETY: strings end in NUL and outlive the call; there are no headers.
        let status = unsafe {
            (self.create)(&mut program, source.as_ptr(), file.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        };
        if status != 0 {
            return Err(NvrtcError::Compile(format!("NVRTC makes no program of {name}: error {status}")));
        }
        // SAFETY: the program was made, the options end in NUL and outlive the call.
        let status = unsafe { (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let result = match status {
            0 => self.read(program, self.cubin_size, self.cubin).ok_or_else(|| "no cubin came back".into()),
            _ => {
                let log = self.read(program, self.log_size, self.log).unwrap_or_default();
                let text = CStr::from_bytes_until_nul(&log).map(|text| text.to_string_lossy().into_owned());
                let ((major, minor), text) = (self.version, text.unwrap_or_default());
                Err(format!("NVRTC {major}.{minor}, {name} for sm_{arch}: error {status}: {text}"))
            }
        };
        // SAFETY: made above, destroyed once.
        unsafe { (self.destroy)(&mut program) };
        result.map_err(NvrtcError::Compile)
    }

    fn read(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        bytes: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Option<Vec<u8>> {
        let mut length = 0usize;
        // SAFETY: the program exists; `length` is a place for its answer.
        if unsafe { size(program, &mut length) } != 0 || length == 0 {
            return None;
        }
        let mut buffer = vec![0u8; length];
        // SAFETY: the buffer has the length that the library asked for.
        let status = unsafe { bytes(program, buffer.as_mut_ptr().cast()) };
        (status == 0).then_some(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnvrtc.so.12");
        std::fs::write(&path, b"not a library").unwrap();
        let error = Nvrtc::open(&path).err().expect("refused").to_string();
        assert!(error.contains("libnvrtc.so.12 is no usable libnvrtc"), "{error}");
    }
}
