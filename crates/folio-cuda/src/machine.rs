//! What a device can do: the limits that everything else is measured against.
//!
//! Owns: the measurements. Must never: know a model. Each is the best of several runs of some milliseconds: a limit is what can be
//! reached, not what was reached on average.

use std::time::Instant;

use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};

type Result<T> = std::result::Result<T, DriverError>;

/// Floating-point operations of one matrix instruction of a warp: 16 x 8 x 16 multiply-adds.
const FLOP: f64 = 2.0 * 16.0 * 8.0 * 16.0;
const CHAINS: f64 = 8.0;
const RUNS: u32 = 5;

/// Rates of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Reading device memory.
    pub read_bytes_per_s: f64,
    /// Copying in device memory: bytes read plus bytes written.
    pub copy_bytes_per_s: f64,
    /// `mma.sync` of bf16 with sums in f32, operands in registers.
    pub matrix_flop_per_s: f64,
    /// From pinned host memory to the device, and back.
    pub upload_bytes_per_s: f64,
    pub download_bytes_per_s: f64,
}

/// How much work a measurement does.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Of device memory; a multiple of 512.
    pub bytes: u64,
    pub host_bytes: u64,
    /// Turns of the matrix kernel.
    pub turns: u32,
}

impl Default for Effort {
    /// Some ten milliseconds a run on a large GPU.
    fn default() -> Self {
        Self { bytes: 2 << 30, host_bytes: 256 << 20, turns: 20_000 }
    }
}

/// Measures. The kernels were loaded.
pub fn measure(driver: &mut dyn Driver, effort: Effort) -> Result<Rates> {
    let bytes = effort.bytes.min(driver.free_bytes()? / 4) / 512 * 512;
    let at = driver.allocate(bytes)?;
    let blocks = 8 * driver.info().multiprocessors;
    let fill = [Arg::Ptr(at), Arg::U32((bytes / 4) as u32)];
    driver.launch(&Launch {
        kernel: "fill_noise",
        grid: [blocks, 1, 1],
        threads: 256,
        shared: 0,
        args: &fill,
    })?;
    let rates = with_memory(driver, at, bytes, effort);
    driver.free(at)?;
    rates
}

fn with_memory(driver: &mut dyn Driver, at: DevicePtr, bytes: u64, effort: Effort) -> Result<Rates> {
    let blocks = 8 * driver.info().multiprocessors;
    let last = at.offset(bytes - 4);
    let read = [Arg::Ptr(at), Arg::U32((bytes / 16) as u32), Arg::Ptr(last)];
    let read = Launch { kernel: "read_rate", grid: [blocks, 1, 1], threads: 512, shared: 0, args: &read };
    let matrix = [Arg::Ptr(at), Arg::U32(effort.turns)];
    let matrix =
        Launch { kernel: "matrix_rate", grid: [blocks, 1, 1], threads: 256, shared: 0, args: &matrix };
    let flop = f64::from(blocks) * (256.0 / 32.0) * f64::from(effort.turns) * CHAINS * FLOP;
    let half = bytes / 2;
    let host_bytes = effort.host_bytes.min(bytes);
    let host = driver.allocate_host(host_bytes)?;
    let rates = Rates {
        read_bytes_per_s: bytes as f64 / fastest(driver, |driver| driver.launch(&read))?,
        copy_bytes_per_s: bytes as f64 / fastest(driver, |driver| driver.copy(at, at.offset(half), half))?,
        matrix_flop_per_s: flop / fastest(driver, |driver| driver.launch(&matrix))?,
        upload_bytes_per_s: host_bytes as f64
            / fastest(driver, |driver| driver.upload_async(at, host, 0, host_bytes))?,
        download_bytes_per_s: host_bytes as f64
            / fastest(driver, |driver| driver.download_async(at, host, 0, host_bytes))?,
    };
    driver.free_host(host)?;
    Ok(rates)
}

/// Seconds of the fastest of some runs, after one that does not count.
fn fastest(driver: &mut dyn Driver, mut run: impl FnMut(&mut dyn Driver) -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for number in 0..=RUNS {
        driver.synchronize()?;
        let start = Instant::now();
        run(driver)?;
        driver.synchronize()?;
        if number > 0 {
            least = least.min(start.elapsed().as_secs_f64());
        }
    }
    Ok(least)
}
