//! Whether a GPU can be used at all, and what it is.
//!
//! Owns: turning everything that can be wrong (no library, an old one, no device) into one sentence. cudarc panics where a function is
//! missing, so each that `cuda` calls is looked up here first.

use std::ffi::{CStr, c_int};

use cudarc::driver::sys;

use super::{Result, check};
use crate::driver::{DeviceInfo, DriverError};

/// Every function of libcuda that this crate calls.
const FUNCTIONS: [&str; 38] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
];

/// Least version of CUDA that the driver must support, as libcuda writes it: 12.0.
const LEAST_VERSION: c_int = 12_000;

/// Whether libcuda is found.
pub fn is_present() -> bool {
    // SAFETY: opening libcuda runs its initializers, which have no conditions.
    unsafe { sys::is_culib_present() }
}

/// How many devices the machine has; at least one.
pub fn devices() -> Result<u32> {
    let unavailable = |reason: String| Err(DriverError::Unavailable(reason));
    if !is_present() {
        return unavailable("this machine has no NVIDIA driver (no libcuda.so.1)".to_owned());
    }
    // SAFETY: as above; it was just found.
    let library = unsafe { sys::culib() };
    let missing = |name: &&&'static str| {
        // SAFETY: the symbol is looked up and not called.
        unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err()
    };
    if let Some(name) = FUNCTIONS.iter().find(missing) {
        return unavailable(format!("the NVIDIA driver is too old: it has no {name}; CUDA 12.0 is needed"));
    }
    // SAFETY: no conditions.
    if let Err(error) = check("cuInit", unsafe { sys::cuInit(0) }) {
        return unavailable(format!("the NVIDIA driver does not start: {error}"));
    }
    let mut version = 0;
    // SAFETY: a place for an int.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    if version < LEAST_VERSION {
        return unavailable(format!(
            "the NVIDIA driver supports CUDA {}.{}, 12.0 or later is needed",
            version / 1000,
            version % 1000 / 10
        ));
    }
    let mut count = 0;
    // SAFETY: a place for an int.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => unavailable("the NVIDIA driver finds no GPU".to_owned()),
    }
}

pub fn info(device: sys::CUdevice) -> Result<DeviceInfo> {
    use sys::CUdevice_attribute_enum as Attribute;
    let attribute = |which: Attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: a place for an int, a device that `cuDeviceGet` gave.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok(value.max(0) as u32)
    };
    let mut name = [0; 256];
    let mut memory = 0;
    // SAFETY: room for 256 bytes, of which the driver writes a string that ends in NUL.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, device) })?;
    // SAFETY: a place for a size.
    check("cuDeviceTotalMem_v2", unsafe { sys::cuDeviceTotalMem_v2(&mut memory, device) })?;
    // SAFETY: the last byte is zero whatever the driver wrote.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(DeviceInfo {
        name,
        arch: 10 * major + minor,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: memory as u64,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so() {
        if is_present() {
            eprintln!("SKIPPED: this machine has libcuda");
            return;
        }
        let error = devices().expect_err("no driver").to_string();
        assert_eq!(error, "no CUDA device can be used: this machine has no NVIDIA driver (no libcuda.so.1)");
    }
}
