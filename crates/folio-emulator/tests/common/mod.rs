//! What tests of kernels share: a device, buffers on it, and numbers that look random.

use folio_cuda::kernels::MODULES;
use folio_cuda::{DevicePtr, Driver};
use folio_emulator::Order;

/// A device with the named modules.
pub fn device(order: Order, modules: &[&str]) -> Box<dyn Driver> {
    let mut device = folio_emulator::device(order);
    for name in modules {
        let module = MODULES.iter().find(|module| module.name == *name);
        device.load(module.unwrap_or_else(|| panic!("there is no module {name}"))).unwrap();
    }
    device
}

/// Little-endian bytes of numbers, on the device.
pub fn up<T: Copy, const N: usize>(
    device: &mut dyn Driver,
    values: &[T],
    bytes: fn(T) -> [u8; N],
) -> DevicePtr {
    let bytes: Vec<u8> = values.iter().flat_map(|value| bytes(*value)).collect();
    let at = device.allocate(bytes.len() as u64).unwrap();
    device.upload(at, &bytes).unwrap();
    at
}

pub fn down_f32(device: &mut dyn Driver, at: DevicePtr, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; 4 * count];
    device.download(at, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Numbers in -1..1 that look random and are the same every time.
pub fn value(i: usize) -> f32 {
    ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0
}
