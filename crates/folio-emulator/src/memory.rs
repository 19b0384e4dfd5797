//! Device memory on the host: every allocation by itself, between pages that cannot be touched.
//!
//! Owns: addresses. Invariant: an allocation ends, rounded up to 16 bytes, where a page begins that faults; so it is aligned to 16
//! bytes and not to 256 as on a device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_cuda::{Copies, DevicePtr, DriverError};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

const PAGE: usize = 4096;

struct Allocation {
    mapping: usize,
    mapped: usize,
    bytes: u64,
}

/// What is allocated, by address.
#[derive(Default)]
pub struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    pub used: u64,
}

impl Memory {
    /// Every byte is 0xff, so that floats in it are NaN.
    pub fn allocate(&mut self, bytes: u64) -> Result<DevicePtr, DriverError> {
        let rounded = (bytes.max(1) as usize).next_multiple_of(16);
        let pages = rounded.next_multiple_of(PAGE);
        let mapped = pages + 2 * PAGE;
        let failed = |reason: rustix::io::Errno| DriverError::Call {
            call: "mmap of device memory",
            reason: reason.to_string(),
        };
        // SAFETY: a fresh anonymous mapping wherever the system puts it; nothing else refers to it.
        let mapping = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::empty(), MapFlags::PRIVATE)
        }
        .map_err(failed)?;
        let start = mapping.wrapping_byte_add(PAGE);
        // SAFETY: `pages` bytes inside the mapping just made, which nobody uses yet.
        unsafe { rustix::mm::mprotect(start, pages, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(failed)?;
        // SAFETY: these pages were just made writable.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0xff, pages) };
        let at = (start as usize + pages - rounded) as u64;
        self.allocations.insert(at, Allocation { mapping: mapping as usize, mapped, bytes });
        self.used += bytes;
        Ok(DevicePtr(at))
    }

    pub fn free(&mut self, at: DevicePtr) -> Result<(), DriverError> {
        let allocation = self.allocations.remove(&at.0).ok_or_else(|| DriverError::Call {
            call: "free",
            reason: format!("{:#x} is not the address of an allocation", at.0),
        })?;
        self.used -= allocation.bytes;
        unmap(&allocation);
        Ok(())
    }

    /// The bytes of a range, if it lies in one allocation. Kernels run while nobody borrows the memory.
    pub fn bytes(&mut self, call: &'static str, at: DevicePtr, bytes: u64) -> Result<&mut [u8], DriverError> {
        self.check(call, at, bytes)?;
        // SAFETY: the range is mapped and writable as long as `self` holds the allocation, and `self` is borrowed alone.
        Ok(unsafe { std::slice::from_raw_parts_mut(at.0 as usize as *mut u8, bytes as usize) })
    }

    /// Copies between ranges that do not overlap.
    pub fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: u64) -> Result<(), DriverError> {
        self.check("copy", from, bytes)?;
        // SAFETY: as in `bytes`, and the only other slice is of a range that does not overlap it.
        let from = unsafe { std::slice::from_raw_parts(from.0 as usize as *const u8, bytes as usize) };
        self.bytes("copy", to, bytes)?.copy_from_slice(from);
        Ok(())
    }

    fn check(&self, call: &'static str, at: DevicePtr, bytes: u64) -> Result<(), DriverError> {
        let inside = self.allocations.range(..=at.0).next_back();
        let inside = inside.is_some_and(|(start, allocation)| at.0 - start + bytes <= allocation.bytes);
        match inside || (bytes == 0 && at.0 != 0) {
            true => Ok(()),
            false => {
                Err(DriverError::Call { call, reason: format!("{bytes} bytes at {}", self.place(at.0)) })
            }
        }
    }

    /// An address in words.
    pub fn place(&self, address: u64) -> String {
        match self.allocations.range(..=address).next_back() {
            Some((start, allocation)) if address - start < allocation.bytes => {
                format!(
                    "{:#x}, {} bytes into an allocation of {}",
                    address,
                    address - start,
                    allocation.bytes
                )
            }
            Some((start, allocation)) if address - start < allocation.bytes + (1 << 24) => {
                let behind = address - start - allocation.bytes;
                format!("{address:#x}, {behind} bytes behind an allocation of {}", allocation.bytes)
            }
            _ => format!("{address:#x}, which is in no allocation"),
        }
    }
}

/// The memory, for the stream and for copies beside it.
#[derive(Clone, Default)]
pub struct SharedMemory(Arc<Mutex<Memory>>);

impl SharedMemory {
    pub fn lock(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Copies for SharedMemory {
    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<(), DriverError> {
        to.copy_from_slice(self.lock().bytes("download", from, to.len() as u64)?);
        Ok(())
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), DriverError> {
        self.lock().bytes("upload", to, from.len() as u64)?.copy_from_slice(from);
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.allocations.values().for_each(unmap);
    }
}

fn unmap(allocation: &Allocation) {
    // SAFETY: the whole mapping of an allocation that is no longer listed; slices into it do not outlive the list.
    let unmapped = unsafe { rustix::mm::munmap(allocation.mapping as *mut _, allocation.mapped) };
    debug_assert!(unmapped.is_ok());
}
