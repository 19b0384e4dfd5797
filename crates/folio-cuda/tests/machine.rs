//! The limits of a device are measured, whatever device it is.

use folio_cuda::kernels::MODULES;
use folio_cuda::machine::{Effort, measure};
use folio_emulator::{Order, device};

#[test]
fn every_rate_is_a_number_above_zero() {
    if !folio_emulator::available() {
        return;
    }
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
