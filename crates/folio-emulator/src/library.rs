//! A module of kernels as a shared library of the host.
//!
//! Owns: compiling and opening, once for the same source and flags, whoever asks: the library is kept beside the test binaries and is
//! never closed.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use folio_cuda::kernels::Module;
use folio_cuda::{Arg, DriverError, Launch};

const FIBERS: &str = include_str!("../host/fibers.hpp");
const PRELUDE: &str = include_str!("../host/prelude.hpp");

/// As `emu::Entry`.
#[repr(C)]
struct KernelEntry {
    name: *const c_char,
    signature: *const c_char,
    call: unsafe extern "C" fn(*mut *mut c_void),
}

/// As `emu::Launch`.
#[repr(C)]
struct RawLaunch {
    kernel: *const c_char,
    call: unsafe extern "C" fn(*mut *mut c_void),
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    args: *mut *mut c_void,
    order: u64,
}

type RunLaunch = unsafe extern "C" fn(*const RawLaunch, *mut c_char, usize, *mut *mut c_void) -> c_int;

/// A kernel that can be run.
#[derive(Clone)]
pub struct Kernel {
    name: CString,
    /// `p`, `u` or `f` for every parameter.
    signature: String,
    call: unsafe extern "C" fn(*mut *mut c_void),
    run: RunLaunch,
    pub module: &'static str,
}

/// How a launch ended that did not end well.
pub enum Failure {
    Said(String),
    /// A signal; where the thread was, and the address it touched.
    Fault {
        signal: c_int,
        at: String,
        address: u64,
    },
}

impl Kernel {
    /// Whether these are arguments for it; the error says what it wants.
    pub fn accepts(&self, args: &[Arg]) -> Result<(), String> {
        let given: String = args
            .iter()
            .map(|arg| match arg {
                Arg::Ptr(_) => 'p',
                Arg::U32(_) => 'u',
                Arg::F32(_) => 'f',
            })
            .collect();
        if given == self.signature {
            return Ok(());
        }
        Err(format!(
            "its parameters are {}, the arguments {given} (p: address, u: u32, f: f32)",
            self.signature
        ))
    }

    /// Runs every block. The arguments were accepted.
    pub fn run(&self, launch: &Launch<'_>, order: u64) -> Result<(), Failure> {
        let mut values: Vec<u64> = launch
            .args
            .iter()
            .map(|arg| match *arg {
                Arg::Ptr(at) => at.0,
                Arg::U32(value) => u64::from(value),
                Arg::F32(value) => u64::from(value.to_bits()),
            })
            .collect();
        let mut args: Vec<*mut c_void> = values.iter_mut().map(|value| (value as *mut u64).cast()).collect();
        let raw = RawLaunch {
            kernel: self.name.as_ptr(),
            call: self.call,
            grid: launch.grid,
            threads: launch.threads,
            shared: launch.shared,
            args: args.as_mut_ptr(),
            order,
        };
        let mut text = [0 as c_char; 512];
        let mut address = std::ptr::null_mut();
        // SAFETY: the library is never closed, `raw` has the layout it was compiled with, the arguments are of the kinds the kernel
        // takes, and text and address outlive the call. What the kernel touches is the caller's device memory or faults.
        let code = unsafe { (self.run)(&raw, text.as_mut_ptr(), text.len(), &mut address) };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: snprintf ends what it writes with a zero, and the buffer began with zeros.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
        Err(match code {
            -1 => Failure::Said(text),
            signal => Failure::Fault { signal, at: text, address: address as u64 },
        })
    }
}

type Kernels = Arc<Vec<Kernel>>;

/// Libraries of this process, by digest.
static OPEN: Mutex<Option<HashMap<String, Kernels>>> = Mutex::new(None);

/// Compiles and opens, or finds open.
pub fn open(module: &Module) -> Result<Kernels, DriverError> {
    let source = source(module);
    let compiler = compiler();
    let flags = flags();
    let digest = blake3::hash(format!("{compiler} {flags:?}\n{source}").as_bytes()).to_hex()[..24].to_owned();
    // Held while compiling: whoever wants the same library waits for it.
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let open = open.get_or_insert_default();
    if let Some(kernels) = open.get(&digest) {
        return Ok(kernels.clone());
    }
    let path = folder()?.join(format!("{}-{digest}.so", module.name));
    if !path.exists() {
        compile(module, &compiler, &flags, &source, &path)?;
    }
    let kernels = Arc::new(load(module, &path)?);
    open.insert(digest, kernels.clone());
    Ok(kernels)
}

/// One translation unit: what a device has, the kernels, and the table of their names.
fn source(module: &Module) -> String {
    let entries: String =
        module.kernels.iter().map(|kernel| format!("    EMU_KERNEL({kernel}),\n")).collect();
    format!(
        "{FIBERS}\n{PRELUDE}\n#line 1 \"{name}.cu\"\n{source}\n#line 1 \"{name}.table\"\n\
         extern \"C\" __attribute__((visibility(\"default\"))) const emu::Entry emu_kernels[] = {{\n{entries}    \
         {{nullptr, nullptr, nullptr}}\n}};\n",
        name = module.name,
        source = module.source,
    )
}

/// Whether there is a C++ compiler.
pub fn has_compiler() -> bool {
    Command::new(compiler()).arg("--version").output().is_ok_and(|output| output.status.success())
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned())
}

fn flags() -> Vec<&'static str> {
    let mut flags = vec!["-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-pthread"];
    flags.extend([
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-U_FORTIFY_SOURCE",
        "-w",
    ]);
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        flags.extend(["-mavx2", "-mfma"]);
    }
    flags
}

/// Beside the binaries of the build this test belongs to, else among the temporary files.
fn folder() -> Result<PathBuf, DriverError> {
    let binary = std::env::current_exe().ok();
    let deps = binary.as_deref().and_then(|path| path.ancestors().find(|path| path.ends_with("deps")));
    let folder = match deps.and_then(Path::parent) {
        Some(build) => build.join("emulator"),
        None => std::env::temp_dir().join("folio-emulator"),
    };
    std::fs::create_dir_all(&folder)
        .map_err(|error| unavailable(format!("{} cannot be made: {error}", folder.display())))?;
    Ok(folder)
}

fn unavailable(reason: String) -> DriverError {
    DriverError::Unavailable(format!("the emulator's {reason}"))
}

fn compile(
    module: &Module,
    compiler: &str,
    flags: &[&str],
    source: &str,
    path: &Path,
) -> Result<(), DriverError> {
    // Written under names of this process, then renamed: another process may compile the same.
    let partial = path.with_extension(format!("{}.so", std::process::id()));
    let text = path.with_extension(format!("{}.cpp", std::process::id()));
    let wrote = std::fs::write(&text, source);
    wrote.map_err(|error| unavailable(format!("source {} cannot be written: {error}", text.display())))?;
    let output = Command::new(compiler).args(flags).arg(&text).arg("-o").arg(&partial).output();
    let output =
        output.map_err(|error| unavailable(format!("compiler {compiler} cannot be run: {error}")))?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(DriverError::Compile { module: module.name.to_owned(), log });
    }
    // A source that stays behind harms nobody.
    let _ = std::fs::remove_file(&text);
    std::fs::rename(&partial, path)
        .map_err(|error| unavailable(format!("library {} cannot be kept: {error}", path.display())))
}

fn load(module: &Module, path: &Path) -> Result<Vec<Kernel>, DriverError> {
    let failed = |error: libloading::Error| unavailable(format!("library {}: {error}", path.display()));
    // SAFETY: the library is what this file compiled; its constructors only set up its own tables.
    let library = unsafe { libloading::Library::new(path) }.map_err(failed)?;
    // SAFETY: `emu_launch` is declared so in fibers.hpp.
    let run = *unsafe { library.get::<RunLaunch>(b"emu_launch\0") }.map_err(failed)?;
    // SAFETY: `emu_kernels` is an array of entries; its symbol is the address of the first.
    let first = *unsafe { library.get::<*const KernelEntry>(b"emu_kernels\0") }.map_err(failed)?;
    // Kernels live as long as the process, so the library must, too.
    std::mem::forget(library);
    let text = |at: *const c_char| {
        // SAFETY: names and signatures are literals of the library.
        unsafe { CStr::from_ptr(at) }.to_owned()
    };
    let entry = |index: usize| {
        // SAFETY: the table has one entry for every kernel of the module.
        let entry = unsafe { &*first.add(index) };
        let signature = text(entry.signature).to_string_lossy().into_owned();
        Kernel { name: text(entry.name), signature, call: entry.call, run, module: module.name }
    };
    Ok((0..module.kernels.len()).map(entry).collect())
}
