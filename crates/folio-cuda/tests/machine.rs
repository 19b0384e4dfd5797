//! The limits of a device are measured, whatever device it is.

use std::sync::{Arc, Mutex};

use folio_cuda::driver::DevicePtr;
use folio_cuda::kernels::MODULES;
use folio_cuda::machine::{Effort, measure};
use folio_emulator::{Order, device};

/// One test at a time: a device's free memory is everybody's.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn every_rate_is_a_number_above_zero() {
    if !folio_emulator::available() {
        return;
    }
    let _alone = ALONE.lock();
    let mut driver = device(Order::default());
    for module in MODULES.iter().filter(|module| module.name == "rates") {
        driver.load(module).unwrap_or_else(|error| panic!("{error}"));
    }
    let before = driver.free_bytes().unwrap();
    let effort = Effort { bytes: 1 << 16, host_bytes: 1 << 12, turns: 2 };
    let rates = measure(&mut *driver, effort).unwrap_or_else(|error| panic!("{error}"));
    let all = [
        rates.read_bytes_per_s,
        rates.copy_bytes_per_s,
        rates.matrix_flop_per_s,
        rates.upload_bytes_per_s,
        rates.download_bytes_per_s,
    ];
    assert!(all.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{rates:?}");
    assert_eq!(driver.free_bytes().unwrap(), before, "memory is given back");
}

#[test]
fn what_was_copied_to_the_host_comes_back_as_it_was_whichever_memory_had_it() {
    if !folio_emulator::available() {
        return;
    }
    let _alone = ALONE.lock();
    let mut driver = device(Order::default());
    let copies = driver.copies().unwrap_or_else(|error| panic!("{error}"));
    let length = 4096;
    let at = driver.allocate(2 * length as u64).unwrap_or_else(|error| panic!("{error}"));
    let other = DevicePtr(at.0 + length as u64);
    let told: Vec<u8> = (0..length).map(|i| (i * 7 % 251) as u8).collect();
    let mut buffer = copies.clone().host_buffer(length).unwrap_or_else(|error| panic!("{error}"));
    assert!(buffer.bytes() == vec![0; length], "zeroed");
    copies.upload(at, &told).unwrap_or_else(|error| panic!("{error}"));
    let bytes = Arc::get_mut(&mut buffer).expect("nobody else has it").bytes_mut();
    copies.download(at, bytes).unwrap_or_else(|error| panic!("{error}"));
    copies.upload(other, buffer.bytes()).unwrap_or_else(|error| panic!("{error}"));
    let mut again = vec![0; length];
    copies.download(other, &mut again).unwrap_or_else(|error| panic!("{error}"));
    assert!(buffer.bytes() == told && again == told);
    driver.free(at).unwrap_or_else(|error| panic!("{error}"));
    drop((driver, copies));
    assert!(buffer.bytes() == told, "it is kept when the device is not");
}
