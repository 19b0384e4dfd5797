//! A library's algorithms tried on the device.
//!
//! Owns: the memory of a trial, which is gone after it, and its operands, which are drawn on the device. Must never: see a weight.

use super::choose::{BASE_ROWS, MOST_BEFORE, TYPICAL_ROWS, Trial, choose};
use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};
use crate::gemm::{Algorithm, Gemm, Multiply, Operands, Shape, WORKSPACE_BYTES};

type Result<T> = std::result::Result<T, DriverError>;

const THREADS: u32 = 256;
/// Of the draws.
const SALT: [u32; 2] = [1, 2];

/// The algorithm for steps of up to `max_rows` rows of a shape, or why there is none. The module `library` is loaded.
pub fn try_out(
    driver: &mut dyn Driver,
    shape: Shape,
    max_rows: u32,
) -> std::result::Result<Algorithm, String> {
    let mut trial = OnDevice::new(driver, shape, max_rows);
    let chosen =
        trial.allocate().map_err(|error| error.to_string()).and_then(|()| choose(&mut trial, max_rows));
    let freed = trial.free().map_err(|error| error.to_string());
    chosen.and_then(|algorithm| freed.map(|()| algorithm))
}

struct OnDevice<'a> {
    driver: &'a mut dyn Driver,
    shape: Shape,
    max_rows: u32,
    /// Rows repeat after so many.
    period: u32,
    /// All that is allocated.
    memory: Vec<DevicePtr>,
    weights: DevicePtr,
    x: DevicePtr,
    out: DevicePtr,
    /// `[period, n]`
    base: DevicePtr,
    count: DevicePtr,
    workspace: DevicePtr,
}

impl<'a> OnDevice<'a> {
    fn new(driver: &'a mut dyn Driver, shape: Shape, max_rows: u32) -> Self {
        let none = DevicePtr::default();
        let (weights, x, out, base, count, workspace) = (none, none, none, none, none, none);
        let period = BASE_ROWS.min(max_rows);
        Self { driver, shape, max_rows, period, memory: Vec::new(), weights, x, out, base, count, workspace }
    }

    fn allocate(&mut self) -> Result<()> {
        let (n, k, size) =
            (u64::from(self.shape.n), u64::from(self.shape.k), self.shape.operands.size() as u64);
        let mut allocate = |bytes: u64| -> Result<DevicePtr> {
            let at = self.driver.allocate(bytes)?;
            self.memory.push(at);
            Ok(at)
        };
        let rows = u64::from(self.max_rows + MOST_BEFORE);
        (self.weights, self.x) = (allocate(n * k * size)?, allocate(rows * k * size)?);
        (self.out, self.base) =
            (allocate(4 * n * u64::from(self.max_rows))?, allocate(4 * n * u64::from(self.period))?);
        (self.count, self.workspace) = (allocate(4)?, allocate(WORKSPACE_BYTES)?);
        Ok(())
    }

    fn free(&mut self) -> Result<()> {
        let mut all = Ok(());
        for at in self.memory.drain(..) {
            all = all.and(self.driver.free(at));
        }
        all
    }

    fn gemm(&mut self) -> Result<&mut dyn Gemm> {
        self.driver.gemm().ok_or_else(|| DriverError::Library("no library was opened".to_owned()))
    }

    /// Draws weights and rows.
    fn fill(&mut self, whole: bool) -> Result<()> {
        let Shape { n, k, operands } = self.shape;
        let kernel = match operands {
            Operands::Bf16 => "try_fill_bf16",
            Operands::Fp8 => "try_fill_fp8",
        };
        let rows = self.max_rows + MOST_BEFORE;
        for (at, rows, period, salt) in [(self.weights, n, n, SALT[0]), (self.x, rows, self.period, SALT[1])]
        {
            let args = [Arg::Ptr(at), Arg::U32(rows), Arg::U32(k), Arg::U32(period), Arg::U32(salt)];
            let args = [&args[..], &[Arg::U32(u32::from(whole))]].concat();
            let blocks = (u64::from(rows) * u64::from(k)).div_ceil(u64::from(THREADS)) as u32;
            self.driver.launch(&Launch {
                kernel,
                grid: [blocks, 1, 1],
                threads: THREADS,
                shared: 0,
                args: &args,
            })?;
        }
        Ok(())
    }

    fn multiply(&mut self, algorithm: &Algorithm, first: u32, rows: u32, out: DevicePtr) -> Result<()> {
        let Shape { n, k, operands } = self.shape;
        let before = u64::from(first) * u64::from(k) * operands.size() as u64;
        let work = Multiply {
            shape: self.shape,
            algorithm: *algorithm,
            rows,
            weights: self.weights,
            x: self.x.offset(before),
            x_stride: k,
            out,
            out_stride: n,
            workspace: self.workspace,
        };
        self.gemm()?.multiply(&work)
    }

    /// Runs a kernel that counts, and whether it counted nothing.
    fn nothing_counted(&mut self, kernel: &str, grid: [u32; 3], args: &[Arg]) -> Result<bool> {
        self.driver.zero(self.count, 4)?;
        let args = [args, &[Arg::Ptr(self.count)]].concat();
        self.driver.launch(&Launch { kernel, grid, threads: THREADS, shared: 0, args: &args })?;
        let mut count = [0; 4];
        self.driver.download(self.count, &mut count)?;
        Ok(count == [0; 4])
    }
}

impl Trial for OnDevice<'_> {
    fn candidates(&mut self) -> Result<Vec<Algorithm>> {
        let (shape, rows) = (self.shape, TYPICAL_ROWS.min(self.max_rows));
        self.gemm()?.candidates(shape, rows)
    }

    fn takes(&mut self, algorithm: &Algorithm, rows: u32) -> bool {
        let shape = self.shape;
        self.gemm().is_ok_and(|gemm| gemm.takes(shape, algorithm, rows))
    }

    fn exact(&mut self, algorithm: &Algorithm, rows: u32) -> Result<bool> {
        self.fill(true)?;
        self.multiply(algorithm, 0, rows, self.out)?;
        let Shape { n, k, operands } = self.shape;
        let kernel = match operands {
            Operands::Bf16 => "try_exact_bf16",
            Operands::Fp8 => "try_exact_fp8",
        };
        let places = [Arg::Ptr(self.x), Arg::Ptr(self.weights), Arg::Ptr(self.out)];
        let args = [&places[..], &[Arg::U32(n), Arg::U32(n), Arg::U32(k)]].concat();
        self.nothing_counted(kernel, [rows, n.div_ceil(THREADS / 32), 1], &args)
    }

    fn begin(&mut self, algorithm: &Algorithm, rows: u32) -> Result<()> {
        self.fill(false)?;
        self.multiply(algorithm, 0, rows, self.base)
    }

    fn same(&mut self, algorithm: &Algorithm, first: u32, rows: u32) -> Result<bool> {
        self.multiply(algorithm, first, rows, self.out)?;
        let n = self.shape.n;
        let places = [Arg::Ptr(self.out), Arg::Ptr(self.base), Arg::U32(n), Arg::U32(n)];
        let args = [&places[..], &[Arg::U32(first), Arg::U32(self.period)]].concat();
        self.nothing_counted("try_same", [rows, n.div_ceil(THREADS), 1], &args)
    }
}
