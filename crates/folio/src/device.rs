//! Which device computes: the processors of this machine, or a GPU.
//!
//! Owns: `--device`, and what differs between the two before an engine runs. Must never: decide how anything is computed.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, bail};
use clap::ValueEnum;
use folio_cpu::{CpuBackend, CpuOptions};
use folio_cuda::CudaBackend;
use folio_cuda::DriverError;
use folio_cuda::cuda::CudaDriver;
use folio_model::backend::Backend;

use crate::memory::{self, FreeMemory};
use crate::units;

/// `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU that can be used, else the processors.
    #[default]
    Auto,
    Cpu,
    /// A GPU by its number, counted from 0.
    Cuda(u32),
}

impl DeviceChoice {
    /// Whether there seems to be a GPU.
    pub fn has_gpu() -> bool {
        CudaDriver::is_present()
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, number) = text.split_once(':').map_or((text, None), |(kind, number)| (kind, Some(number)));
        match (kind, number.map(str::parse)) {
            ("auto", None) => Ok(Self::Auto),
            ("cpu", None) => Ok(Self::Cpu),
            ("cuda", None) => Ok(Self::Cuda(0)),
            ("cuda", Some(Ok(number))) => Ok(Self::Cuda(number)),
            _ => Err(format!("`{text}` is no device: auto, cpu, cuda or cuda:N with N from 0")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// `--gemm-backend`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GemmBackend {
    /// Folio's own kernels
    #[default]
    Own,
    /// NVIDIA's cuBLASLt, where it gives a row the same bits in every batch
    Cublaslt,
}

/// A backend on the device that was chosen.
pub enum Device {
    Cpu(Box<CpuBackend>),
    Cuda(Box<CudaBackend>),
}

impl Device {
    /// Opens the device. With `auto`, a GPU that cannot be used is a line in the log, and the processors compute. A library that was
    /// asked for and is not there is an error.
    pub fn open(choice: DeviceChoice, threads: Option<u32>, gemm: GemmBackend) -> Result<Self> {
        let number = match choice {
            DeviceChoice::Cpu => return Self::cpu(threads),
            // Most machines have no GPU; that is nothing to speak of.
            DeviceChoice::Auto if !DeviceChoice::has_gpu() => return Self::cpu(threads),
            DeviceChoice::Auto => 0,
            DeviceChoice::Cuda(number) => number,
        };
        let opened = CudaDriver::open(number, cubin_folder()).and_then(|driver| match gemm {
            GemmBackend::Own => Ok(driver),
            GemmBackend::Cublaslt => driver.with_cublaslt(),
        });
        match (opened.and_then(|driver| CudaBackend::new(Box::new(driver))), choice) {
            (Ok(backend), _) => Ok(Self::Cuda(Box::new(backend))),
            (Err(DriverError::Library(error)), _) => bail!("--gemm-backend cublaslt: {error}"),
            (Err(error), DeviceChoice::Auto) => {
                tracing::warn!("computing on the processors: {error}");
                Self::cpu(threads)
            }
            (Err(error), _) => bail!("--device {choice}: {error}"),
        }
    }

    fn cpu(threads: Option<u32>) -> Result<Self> {
        let options = CpuOptions { threads: threads.map(|n| n as usize), isa: None };
        Ok(Self::Cpu(Box::new(CpuBackend::new(options)?)))
    }

    /// Threads that compute; none on a GPU.
    pub fn threads(&self) -> usize {
        match self {
            Self::Cpu(backend) => backend.threads(),
            Self::Cuda(_) => 0,
        }
    }

    /// "2 threads", "NVIDIA H200, 140 GiB".
    pub fn described(&self) -> String {
        match self {
            Self::Cpu(backend) => format!("{} threads", backend.threads()),
            Self::Cuda(backend) => {
                let device = backend.device();
                format!("{}, {}", device.name, units::bytes(device.memory_bytes))
            }
        }
    }

    /// Memory that the KV cache can be made of.
    pub fn free_memory(&self) -> Option<FreeMemory> {
        match self {
            // What is mapped counts as cache that could be dropped, but it will be read at every step.
            Self::Cpu(backend) => memory::free().map(|free| free.without(backend.mapped_bytes())),
            Self::Cuda(backend) => {
                let source = format!(
                    "free on the device beside {} of weights and {} of buffers",
                    units::bytes(backend.weight_bytes()),
                    units::bytes(backend.buffer_bytes())
                );
                backend.free_bytes().ok().map(|bytes| FreeMemory::new(bytes, source))
            }
        }
    }

    pub fn serves_adapters(&self) -> bool {
        match self {
            Self::Cpu(backend) => backend.serves_adapters(),
            Self::Cuda(backend) => backend.serves_adapters(),
        }
    }

    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Cuda(_))
    }

    /// The CPU's backend, where it is what computes.
    pub fn as_cpu(&mut self) -> Option<&mut CpuBackend> {
        match self {
            Self::Cpu(backend) => Some(backend),
            Self::Cuda(_) => None,
        }
    }

    pub fn into_backend(self) -> Box<dyn Backend> {
        match self {
            Self::Cpu(backend) => backend,
            Self::Cuda(backend) => backend,
        }
    }
}

impl Deref for Device {
    type Target = dyn Backend;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Cpu(backend) => &**backend,
            Self::Cuda(backend) => &**backend,
        }
    }
}

impl DerefMut for Device {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Cpu(backend) => &mut **backend,
            Self::Cuda(backend) => &mut **backend,
        }
    }
}

/// Where compiled kernels are kept: `folio/kernels` in XDG_CACHE_HOME or ~/.cache.
fn cubin_folder() -> Option<PathBuf> {
    crate::packed_cache::user_cache().map(|folder| folder.join("folio/kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_users_write_them() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:3", DeviceChoice::Cuda(3)),
        ] {
            assert_eq!(text.parse(), Ok(choice));
        }
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "auto:1", "CUDA"] {
            let error = wrong.parse::<DeviceChoice>().expect_err(wrong);
            assert!(error.contains("auto, cpu, cuda or cuda:N"), "{error}");
        }
    }

    #[test]
    fn without_a_gpu_auto_computes_on_the_processors_and_cuda_says_why_not() {
        if CudaDriver::open(0, None).is_ok() {
            eprintln!("SKIPPED: this machine has a GPU");
            return;
        }
        assert!(
            Device::open(DeviceChoice::Auto, Some(1), GemmBackend::Own).expect("a device").as_cpu().is_some()
        );
        let error = Device::open(DeviceChoice::Cuda(0), None, GemmBackend::Cublaslt)
            .err()
            .expect("refused")
            .to_string();
        assert!(error.starts_with("--device cuda:0: no CUDA device can be used: "), "{error}");
    }
}
