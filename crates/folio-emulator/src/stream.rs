//! What waits in a stream, and running it.
//!
//! Owns: the late effect of everything asynchronous. Invariant: an operation reads and writes when it is performed, not when it was
//! asked for; so whoever changes host memory too early or reads it too early sees it.

use folio_cuda::driver::{EventId, HostId};
use folio_cuda::gemm::Multiply;
use folio_cuda::{Arg, DevicePtr, DriverError, Launch};

use super::{Emulator, Result};
use crate::gemm::{self, Conduct};
use crate::library::Failure;

/// A launch with arguments of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedLaunch {
    kernel: String,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    args: Box<[Arg]>,
}

impl OwnedLaunch {
    pub fn new(launch: &Launch<'_>) -> Self {
        let Launch { kernel, grid, threads, shared, args } = *launch;
        Self { kernel: kernel.to_owned(), grid, threads, shared, args: args.into() }
    }

    fn borrowed(&self) -> Launch<'_> {
        let Self { kernel, grid, threads, shared, args } = self;
        Launch { kernel, grid: *grid, threads: *threads, shared: *shared, args }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Only a place in the order.
    Event(EventId),
    Launch(OwnedLaunch),
    Multiply(Multiply, Conduct),
    Copy {
        from: DevicePtr,
        to: DevicePtr,
        bytes: u64,
    },
    Zero {
        at: DevicePtr,
        bytes: u64,
    },
    Upload {
        to: DevicePtr,
        id: HostId,
        offset: u64,
        bytes: u64,
    },
    Download {
        from: DevicePtr,
        id: HostId,
        offset: u64,
        bytes: u64,
    },
}

impl Emulator {
    pub(crate) fn perform(&mut self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Event(_) => Ok(()),
            Operation::Launch(launch) => self.run(&launch.borrowed()),
            Operation::Multiply(work, conduct) => gemm::multiply(&mut self.memory(), work, *conduct),
            Operation::Copy { from, to, bytes } => self.memory().copy(*from, *to, *bytes),
            Operation::Zero { at, bytes } => {
                self.memory().bytes("zero", *at, *bytes)?.fill(0);
                Ok(())
            }
            Operation::Upload { to, id, offset, bytes } => {
                let mut memory = self.memory.lock();
                let to = memory.bytes("upload_async", *to, *bytes)?;
                to.copy_from_slice(part(&mut self.host, *id, *offset, *bytes)?);
                Ok(())
            }
            Operation::Download { from, id, offset, bytes } => {
                let mut memory = self.memory.lock();
                let from = memory.bytes("download_async", *from, *bytes)?;
                part(&mut self.host, *id, *offset, *bytes)?.copy_from_slice(from);
                Ok(())
            }
        }
    }

    fn run(&self, launch: &Launch<'_>) -> Result<()> {
        let kernel =
            self.kernels.get(launch.kernel).ok_or_else(|| DriverError::NoKernel(launch.kernel.to_owned()))?;
        kernel.run(launch, self.order.number()).map_err(|failure| {
            let why = match failure {
                Failure::Said(text) => text,
                Failure::Fault { signal, at, address } => {
                    format!("{at}: signal {signal} at {}", self.memory().place(address))
                }
            };
            let reason = format!("kernel {} of {}: {why}", launch.kernel, kernel.module);
            DriverError::Call { call: "launch", reason }
        })
    }
}

/// Bytes of host memory.
fn part(host: &mut [Vec<u8>], id: HostId, offset: u64, bytes: u64) -> Result<&mut [u8]> {
    let range = offset as usize..(offset + bytes) as usize;
    host.get_mut(id.0 as usize).and_then(|host| host.get_mut(range)).ok_or_else(|| DriverError::Call {
        call: "copy with host memory",
        reason: format!("{bytes} bytes at {offset} are not inside of memory {}", id.0),
    })
}
