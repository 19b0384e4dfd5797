//! Runs the CUDA kernels of `folio-cuda` on the host: the device of tests.
//!
//! The sources that a device gets are compiled by the host's C++ compiler and run thread by thread, with `host/prelude.hpp` in the
//! place of the device's prelude. Right is what it is for, and wrong it makes visible: memory begins as NaN and ends at a page that
//! faults, threads run in an order of choice, barriers that not all reach are errors, and nothing asynchronous happens
//! before somebody waits for it.
//!
//! **Architecture Invariant:** nothing but tests depends on it, and it knows no kernel.
//!
//! Cost: about 10 ns to start a thread or to let it wait, 1 us for a matrix instruction of a warp.

mod gemm;
mod library;
mod memory;
mod stream;

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Arc, LazyLock, MutexGuard};

use folio_cuda::cuda::CudaDriver;
use folio_cuda::driver::{EventId, GraphId, HostId};
use folio_cuda::gemm::Gemm;
use folio_cuda::kernels::Module;
use folio_cuda::{Copies, DeviceInfo, DevicePtr, Driver, DriverError, Launch};

pub use gemm::Conduct;
use library::Kernel;
use memory::{Memory, SharedMemory};
use stream::{Operation, OwnedLaunch};

type Result<T> = std::result::Result<T, DriverError>;

/// In which order the threads of a warp, the warps of a block and the blocks of a launch are run. Right kernels give the same bits in
/// every one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Ascending,
    Descending,
    Shuffled {
        seed: u64,
    },
}

impl Order {
    /// One of each kind, for tests that compare.
    pub const SEVERAL: [Order; 3] = [Order::Ascending, Order::Descending, Order::Shuffled { seed: 7 }];

    fn number(self) -> u64 {
        match self {
            Order::Ascending => 0,
            Order::Descending => 1,
            Order::Shuffled { seed } => seed.max(2),
        }
    }
}

/// What a test of kernels runs on: the GPU of this machine, where there is one that can be used; else an emulator. `FOLIO_TEST_DEVICE`
/// insists on `cuda` or `emulator`. What is compiled for a GPU is kept among the temporary files: every test opens the device anew.
pub fn device(order: Order) -> Box<dyn Driver> {
    let wanted = std::env::var("FOLIO_TEST_DEVICE").unwrap_or_default();
    if wanted != "emulator" {
        match CudaDriver::open(0, Some(std::env::temp_dir().join("folio-test-kernels"))) {
            Ok(driver) => return Box::new(driver),
            Err(error) if wanted == "cuda" => panic!("FOLIO_TEST_DEVICE=cuda: {error}"),
            Err(_) => {}
        }
    }
    Box::new(Emulator::new(order))
}

/// As [`device`], with a library of products: cuBLASLt on a GPU.
pub fn device_with_library(order: Order) -> Box<dyn Driver> {
    let wanted = std::env::var("FOLIO_TEST_DEVICE").unwrap_or_default();
    if wanted != "emulator" {
        let cubins = Some(std::env::temp_dir().join("folio-test-kernels"));
        match CudaDriver::open(0, cubins).and_then(CudaDriver::with_cublaslt) {
            Ok(driver) => return Box::new(driver),
            Err(error) if wanted == "cuda" => panic!("FOLIO_TEST_DEVICE=cuda: {error}"),
            Err(_) => {}
        }
    }
    Box::new(Emulator::new(order).with_library(&[Conduct::Right]))
}

/// Whether [`device`] has something to give; prints a warning, once and past the capture of tests, where it has not and they are skipped.
pub fn available() -> bool {
    static FOUND: LazyLock<bool> = LazyLock::new(|| {
        let wanted = std::env::var("FOLIO_TEST_DEVICE").unwrap_or_default();
        let gpu = || wanted != "emulator" && CudaDriver::open(0, None).is_ok();
        let found = wanted == "cuda" || library::has_compiler() || gpu();
        if !found {
            let why = "SKIPPED: tests of CUDA kernels need a GPU or a C++ compiler (c++, or what CXX names)";
            // Without a place to say it, tests go on.
            let _ = writeln!(std::io::stderr(), "{why}");
        }
        found
    });
    *FOUND
}

/// A device made of the host, with a stream that runs when it is waited for.
pub struct Emulator {
    info: DeviceInfo,
    order: Order,
    kernels: HashMap<&'static str, Kernel>,
    memory: SharedMemory,
    host: Vec<Vec<u8>>,
    /// What was asked for and has not run.
    queue: Vec<Operation>,
    /// What a capture has recorded; `None` outside of one.
    capture: Option<Vec<Operation>>,
    graphs: Vec<Vec<Operation>>,
    events: u32,
    /// How the library's algorithms conduct themselves; `None`: no library was opened.
    library: Option<Vec<Conduct>>,
}

impl Default for Emulator {
    fn default() -> Self {
        Self::new(Order::default())
    }
}

impl Emulator {
    /// Of the oldest architecture that kernels are compiled for, with a gigabyte of memory and as much shared memory as the newer ones have, so that
    /// the largest tiles are tried.
    pub fn new(order: Order) -> Self {
        Self {
            info: DeviceInfo {
                name: "emulator".to_owned(),
                arch: 80,
                multiprocessors: 4,
                memory_bytes: 1 << 30,
                shared_bytes: 227 << 10,
            },
            order,
            kernels: HashMap::new(),
            memory: SharedMemory::default(),
            host: Vec::new(),
            queue: Vec::new(),
            capture: None,
            graphs: Vec::new(),
            events: 0,
            library: None,
        }
    }

    /// A device that says it has so much memory.
    pub fn with_memory(mut self, bytes: u64) -> Self {
        self.info.memory_bytes = bytes;
        self
    }

    /// A device that says it has so many multiprocessors.
    pub fn with_multiprocessors(mut self, count: u32) -> Self {
        self.info.multiprocessors = count;
        self
    }

    /// A device that says its blocks have at most so much shared memory.
    pub fn with_shared_memory(mut self, bytes: u32) -> Self {
        self.info.shared_bytes = bytes;
        self
    }

    /// The order of threads from the next launch on.
    pub fn set_order(&mut self, order: Order) {
        self.order = order;
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock()
    }

    /// Puts work at the end of the stream, or of the capture.
    fn add(&mut self, operation: Operation) -> Result<()> {
        self.capture.as_mut().unwrap_or(&mut self.queue).push(operation);
        Ok(())
    }

    /// Runs the first `count` operations of the stream, and drops what is behind one that fails.
    fn perform_until(&mut self, count: usize) -> Result<()> {
        let mut queue = std::mem::take(&mut self.queue);
        let result = queue.drain(..count).try_for_each(|operation| self.perform(&operation));
        if result.is_ok() {
            self.queue = queue;
        }
        result
    }

    fn refuse_capture(&self, call: &'static str) -> Result<()> {
        match self.capture {
            Some(_) => Err(DriverError::Call { call, reason: "the stream is being captured".to_owned() }),
            None => Ok(()),
        }
    }

    fn check_launch(&self, launch: &Launch<'_>) -> Result<()> {
        let kernel =
            self.kernels.get(launch.kernel).ok_or_else(|| DriverError::NoKernel(launch.kernel.to_owned()))?;
        let wrong = |reason| {
            let reason = format!("kernel {} of {}: {reason}", launch.kernel, kernel.module);
            Err(DriverError::Call { call: "launch", reason })
        };
        if launch.grid.contains(&0) || launch.grid[1].max(launch.grid[2]) > 65_535 {
            return wrong(format!(
                "a grid of {:?}: 1 or more of each, and at most 65535 along y and z",
                launch.grid
            ));
        }
        if !launch.threads.is_multiple_of(32) || !(32..=1024).contains(&launch.threads) {
            return wrong(format!("{} threads: a multiple of 32 up to 1024 is needed", launch.threads));
        }
        if launch.shared > self.info.shared_bytes {
            return wrong(format!("{} bytes of shared memory of {}", launch.shared, self.info.shared_bytes));
        }
        kernel.accepts(launch.args).or_else(wrong)
    }
}

impl Driver for Emulator {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(self.info.memory_bytes.saturating_sub(self.memory().used))
    }

    fn load(&mut self, module: &Module) -> Result<()> {
        let loaded = |name: &&str| self.kernels.get(name).is_some_and(|kernel| kernel.module == module.name);
        if !module.kernels.is_empty() && module.kernels.iter().all(loaded) {
            return Ok(());
        }
        let kernels = library::open(module)?;
        for (name, kernel) in module.kernels.iter().zip(kernels.iter()) {
            let former = self.kernels.insert(name, kernel.clone());
            if let Some(former) = former.filter(|former| former.module != module.name) {
                let reason = format!("kernel {name} is in {} and in {}", former.module, module.name);
                return Err(DriverError::Call { call: "load", reason });
            }
        }
        Ok(())
    }

    fn allocate(&mut self, bytes: u64) -> Result<DevicePtr> {
        self.refuse_capture("allocate")?;
        let free_bytes = self.free_bytes()?;
        if bytes > free_bytes {
            return Err(DriverError::OutOfMemory { needed_bytes: bytes, free_bytes });
        }
        self.memory().allocate(bytes)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<()> {
        self.synchronize()?;
        self.memory().free(ptr)
    }

    fn zero(&mut self, at: DevicePtr, bytes: u64) -> Result<()> {
        self.add(Operation::Zero { at, bytes })
    }

    fn upload(&mut self, to: DevicePtr, from: &[u8]) -> Result<()> {
        self.refuse_capture("upload")?;
        self.synchronize()?;
        self.memory().bytes("upload", to, from.len() as u64)?.copy_from_slice(from);
        Ok(())
    }

    fn download(&mut self, from: DevicePtr, to: &mut [u8]) -> Result<()> {
        self.refuse_capture("download")?;
        self.synchronize()?;
        to.copy_from_slice(self.memory().bytes("download", from, to.len() as u64)?);
        Ok(())
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: u64) -> Result<()> {
        if from.0 < to.0 + bytes && to.0 < from.0 + bytes {
            let reason = format!("{bytes} bytes at {:#x} and {:#x} overlap", from.0, to.0);
            return Err(DriverError::Call { call: "copy", reason });
        }
        self.add(Operation::Copy { from, to, bytes })
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        self.check_launch(launch)?;
        self.add(Operation::Launch(OwnedLaunch::new(launch)))
    }

    fn gemm(&mut self) -> Option<&mut dyn Gemm> {
        self.library.is_some().then_some(self as &mut dyn Gemm)
    }

    fn allocate_host(&mut self, bytes: u64) -> Result<HostId> {
        self.host.push(vec![0; bytes as usize]);
        Ok(HostId(self.host.len() as u32 - 1))
    }

    fn free_host(&mut self, id: HostId) -> Result<()> {
        self.synchronize()?;
        self.host[id.0 as usize] = Vec::new();
        Ok(())
    }

    fn host(&mut self, id: HostId) -> &mut [u8] {
        &mut self.host[id.0 as usize]
    }

    fn host_bytes(&self, id: HostId) -> &[u8] {
        &self.host[id.0 as usize]
    }

    fn upload_async(&mut self, to: DevicePtr, id: HostId, offset: u64, bytes: u64) -> Result<()> {
        self.add(Operation::Upload { to, id, offset, bytes })
    }

    fn download_async(&mut self, from: DevicePtr, id: HostId, offset: u64, bytes: u64) -> Result<()> {
        self.add(Operation::Download { from, id, offset, bytes })
    }

    fn copies(&mut self) -> Result<Arc<dyn Copies>> {
        Ok(Arc::new(self.memory.clone()))
    }

    fn synchronize(&mut self) -> Result<()> {
        self.refuse_capture("synchronize")?;
        self.perform_until(self.queue.len())
    }

    fn event(&mut self) -> Result<EventId> {
        self.events += 1;
        Ok(EventId(self.events - 1))
    }

    fn record(&mut self, event: EventId) -> Result<()> {
        self.refuse_capture("record")?;
        self.queue.retain(|operation| *operation != Operation::Event(event));
        self.add(Operation::Event(event))
    }

    fn wait(&mut self, event: EventId) -> Result<()> {
        self.refuse_capture("wait")?;
        if event.0 >= self.events {
            return Err(DriverError::Call { call: "wait", reason: format!("there is no event {}", event.0) });
        }
        let at = self.queue.iter().position(|operation| *operation == Operation::Event(event));
        self.perform_until(at.map_or(0, |at| at + 1))
    }

    fn begin_capture(&mut self) -> Result<()> {
        self.refuse_capture("begin_capture")?;
        self.capture = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&mut self) -> Result<GraphId> {
        let recorded = self.capture.take().ok_or_else(|| DriverError::Call {
            call: "end_capture",
            reason: "no capture was begun".to_owned(),
        })?;
        self.graphs.push(recorded);
        Ok(GraphId(self.graphs.len() as u32 - 1))
    }

    fn replay(&mut self, graph: GraphId) -> Result<()> {
        self.refuse_capture("replay")?;
        let operations = self.graphs.get(graph.0 as usize).ok_or_else(|| DriverError::Call {
            call: "replay",
            reason: format!("there is no graph {}", graph.0),
        })?;
        self.queue.extend(operations.iter().cloned());
        Ok(())
    }
}
