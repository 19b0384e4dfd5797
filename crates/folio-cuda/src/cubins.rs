//! Compiled kernels kept on disk, so that only the first start with a version of Folio, a compiler and a kind of GPU compiles.
//!
//! Owns: names and checks of the files. Must never: fail a start, or hand out bytes that were not verified. A file is called by the
//! digest of everything that decides its bytes and holds its own checksum before them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

use crate::driver::DriverError;
use crate::kernels::{Module, PRELUDE};
use crate::nvrtc::{Nvrtc, NvrtcError};

const EXTENSION: &str = "cubin";
const CHECKSUM: usize = 32;

/// Finds cubins in a folder or compiles them. The compiler is looked for when the first one has to be made.
pub struct Cubins {
    /// `None` keeps nothing.
    folder: Option<PathBuf>,
    arch: u32,
    compiler: Option<Nvrtc>,
    /// Compiled by [`Cubins::prepare`], by name.
    prepared: HashMap<String, Vec<u8>>,
    /// How many came from the folder, and how many were compiled.
    found: usize,
    compiled: usize,
}

impl Cubins {
    pub fn new(folder: Option<PathBuf>, arch: u32) -> Self {
        Self { folder, arch, compiler: None, prepared: HashMap::new(), found: 0, compiled: 0 }
    }

    /// (found in the folder, compiled)
    pub fn counts(&self) -> (usize, usize) {
        (self.found, self.compiled)
    }

    /// Compiles those that are not in the folder, several at once.
    pub fn prepare(&mut self, modules: &[Module]) -> Result<(), DriverError> {
        let Some(first) = modules.first() else { return Ok(()) };
        let version = self.compiler().map_err(|error| failed(first, error.to_string()))?.version();
        let arch = self.arch;
        let sources = modules.iter().map(|module| {
            let source = source(module);
            (module, name(&source, arch, version), source)
        });
        let absent = |name: &String| self.folder.as_ref().is_none_or(|folder| !folder.join(name).exists());
        let mut missing: Vec<_> = sources.filter(|(_, name, _)| absent(name)).collect();
        let Some(compiler) = self.compiler.as_ref().filter(|_| !missing.is_empty()) else { return Ok(()) };
        tracing::info!("compiling {} modules of kernels for sm_{arch}, once", missing.len());
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(missing.len());
        let work = Mutex::new(&mut missing);
        let next = || work.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let compile = || {
            let mut made = Vec::new();
            while let Some((module, name, source)) = next() {
                let cubin = compiler.compile(&format!("{}.cu", module.name), &source, arch);
                made.push((name, cubin.map_err(|error| failed(module, error.to_string()))));
            }
            made
        };
        let made = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(compile)).collect();
            let joined = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            joined.flatten().collect::<Vec<_>>()
        });
        for (name, cubin) in made {
            self.prepared.insert(name, cubin?);
        }
        Ok(())
    }

    pub fn get(&mut self, module: &Module) -> Result<Vec<u8>, DriverError> {
        let source = source(module);
        let compiler = self.compiler().map_err(|error| failed(module, error.to_string()))?;
        let version = compiler.version();
        let name = name(&source, self.arch, version);
        if let Some(path) = self.folder.as_ref().map(|folder| folder.join(&name))
            && let Some(cubin) = read(&path)
        {
            self.found += 1;
            return Ok(cubin);
        }
        let cubin = match self.prepared.remove(&name) {
            Some(cubin) => cubin,
            None => {
                let arch = self.arch;
                let compiler = self.compiler().map_err(|error| failed(module, error.to_string()))?;
                let cubin = compiler.compile(&format!("{}.cu", module.name), &source, arch);
                cubin.map_err(|error| failed(module, error.to_string()))?
            }
        };
        self.compiled += 1;
        if let Some(folder) = &self.folder
            && let Err(error) = write(folder, &name, &cubin)
        {
            tracing::warn!("compiled kernels are not kept in {}: {error}", folder.display());
        }
        Ok(cubin)
    }

    fn compiler(&mut self) -> Result<&Nvrtc, NvrtcError> {
        if self.compiler.is_none() {
            self.compiler = Some(Nvrtc::find()?);
        }
        self.compiler.as_ref().ok_or(NvrtcError::Absent { tried: String::new() })
    }
}

fn failed(module: &Module, log: String) -> DriverError {
    DriverError::Compile { module: module.name.to_owned(), log }
}

fn source(module: &Module) -> String {
    format!("{PRELUDE}\n{}", module.source)
}

fn name(source: &str, arch: u32, version: (i32, i32)) -> String {
    let mut digest = Sha256::new();
    digest.update(format!("sm_{arch} nvrtc {}.{} ", version.0, version.1));
    digest.update(source);
    let digest = digest.finalize();
    let digits: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{digits}.{EXTENSION}")
}

/// The cubin of a file, if it is whole. A damaged one is removed.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    match bytes.split_at_checked(CHECKSUM) {
        Some((checksum, cubin)) if Sha256::digest(cubin).as_slice() == checksum => Some(cubin.to_vec()),
        _ => {
            tracing::warn!("{} is damaged and made again", path.display());
            let _ = std::fs::remove_file(path);
            None
        }
    }
}

/// Written beside its name and renamed, so that no reader sees half of it.
fn write(folder: &Path, name: &str, cubin: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let beside = folder.join(format!("{name}.{}.tmp", std::process::id()));
    let bytes = [Sha256::digest(cubin).as_slice(), cubin].concat();
    std::fs::write(&beside, bytes)?;
    std::fs::rename(&beside, folder.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "a.cubin", b"code").unwrap();
        let path = folder.path().join("a.cubin");
        assert_eq!(read(&path).as_deref(), Some(&b"code"[..]));
        let mut bytes = std::fs::read(&path).unwrap();
        for damage in 0..bytes.len() {
            bytes[damage] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(read(&path), None, "byte {damage}");
            assert!(!path.exists());
            bytes[damage] ^= 1;
        }
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(read(&path), None);
    }

    #[test]
    fn a_name_is_the_digest_of_source_architecture_and_compiler() {
        let names = [
            name("a", 90, (12, 8)),
            name("b", 90, (12, 8)),
            name("a", 80, (12, 8)),
            name("a", 90, (12, 9)),
            name("a", 90, (13, 8)),
        ];
        let different: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(different.len(), names.len());
        assert_eq!(names[0], name("a", 90, (12, 8)));
    }
}
