//! What the backend needs of a device: memory, copies, launches, graphs.
//!
//! Owns: the contract between planning and a device. Must never: know a model or a kernel's meaning. Everything but [`Copies`] is in
//! the order of one stream: an operation sees what those before it wrote.

use std::sync::Arc;

use folio_model::backend::HostBuffer;

use crate::gemm::Gemm;

/// An address in device memory. Zero is no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// `bytes` further on.
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// A kernel's argument, by value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    Ptr(DevicePtr),
    U32(u32),
    F32(f32),
}

/// One launch. Kernels are found by name in the modules that were loaded.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    pub kernel: &'a str,
    /// Blocks along x, y and z; none may be zero.
    pub grid: [u32; 3],
    /// Threads of a block, a multiple of 32 and at most 1,024.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    pub args: &'a [Arg],
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub name: String,
    /// Compute capability times ten: 80, 90, 100.
    pub arch: u32,
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    /// Most bytes of shared memory of a block, where it opts in.
    pub shared_bytes: u32,
}

/// A captured sequence of launches that can be run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GraphId(pub u32);

/// A place in the stream that the host can wait for; named so that it can be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventId(pub u32);

/// Host memory that the device can copy to and from while the host goes on; named so that it can be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostId(pub u32);

#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("no CUDA device can be used: {0}")]
    Unavailable(String),
    #[error("out of device memory: {needed_bytes} bytes are needed, {free_bytes} are free")]
    OutOfMemory { needed_bytes: u64, free_bytes: u64 },
    #[error("kernels of {module} cannot be compiled: {log}")]
    Compile { module: String, log: String },
    /// Of a library beside the driver.
    #[error("{0}")]
    Library(String),
    #[error("there is no kernel {0}")]
    NoKernel(String),
    #[error("{call} failed: {reason}")]
    Call { call: &'static str, reason: String },
}

type Result<T> = std::result::Result<T, DriverError>;

/// Copies between device memory and the host's beside the stream, from any thread. Each is over when it returns. Nothing orders them with the
/// stream: who asks knows that no work under way touches what is copied.
pub trait Copies: Send + Sync {
    /// Zeroed memory of the host that is copied at the link's rate: page-locked, where the driver has such.
    fn host_buffer(self: Arc<Self>, bytes: usize) -> Result<Arc<dyn HostBuffer>> {
        Ok(Arc::new(vec![0; bytes]))
    }

    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<()>;

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<()>;
}

/// A device and one stream of work on it. Errors of earlier work may be reported by any later call.
pub trait Driver: Send {
    fn info(&self) -> &DeviceInfo;

    /// Bytes of device memory that are free now.
    fn free_bytes(&self) -> Result<u64>;

    /// Compiles what [`Driver::load`] will be asked for, all at once, where that is quicker.
    fn prepare(&mut self, _modules: &[crate::kernels::Module]) -> Result<()> {
        Ok(())
    }

    /// Compiles (or finds compiled) the kernels of a module; see [`crate::kernels`]. A module that is loaded stays as it is.
    fn load(&mut self, module: &crate::kernels::Module) -> Result<()>;

    /// At least `bytes` bytes, aligned to 256. Their content is anything.
    fn allocate(&mut self, bytes: u64) -> Result<DevicePtr>;

    /// Waits for the work before it. `ptr` came from [`Driver::allocate`].
    fn free(&mut self, ptr: DevicePtr) -> Result<()>;

    fn zero(&mut self, at: DevicePtr, bytes: u64) -> Result<()>;

    /// Copies from the host; `from` may be changed when this returns.
    fn upload(&mut self, to: DevicePtr, from: &[u8]) -> Result<()>;

    /// Waits for the work before it, then copies to the host.
    fn download(&mut self, from: DevicePtr, to: &mut [u8]) -> Result<()>;

    /// Device to device. The two do not overlap.
    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: u64) -> Result<()>;

    fn launch(&mut self, launch: &Launch<'_>) -> Result<()>;

    /// The library that multiplies matrices on this stream, where one was opened.
    fn gemm(&mut self) -> Option<&mut dyn Gemm> {
        None
    }

    /// Host memory, pinned, zeroed.
    fn allocate_host(&mut self, bytes: u64) -> Result<HostId>;

    /// Waits for the work before it. `id` came from [`Driver::allocate_host`] and is of no use any more.
    fn free_host(&mut self, id: HostId) -> Result<()>;

    /// Bytes of host memory. What the device still writes there is waited for by [`Driver::synchronize`] or
    /// [`Driver::wait`] alone.
    fn host(&mut self, id: HostId) -> &mut [u8];

    /// The same, to read.
    fn host_bytes(&self, id: HostId) -> &[u8];

    /// Copies `bytes` bytes from `offset` of host memory, in stream order: the memory must stay as it is until then.
    fn upload_async(&mut self, to: DevicePtr, id: HostId, offset: u64, bytes: u64) -> Result<()>;

    /// Copies `bytes` bytes to `offset` of host memory, in stream order.
    fn download_async(&mut self, from: DevicePtr, id: HostId, offset: u64, bytes: u64) -> Result<()>;

    /// For copies beside the stream, as long as the driver lives, or longer.
    fn copies(&mut self) -> Result<Arc<dyn Copies>>;

    /// Waits for all work so far.
    fn synchronize(&mut self) -> Result<()>;

    /// An event that was not recorded yet: there is nothing to wait for.
    fn event(&mut self) -> Result<EventId>;

    /// Moves the event to the end of all work so far.
    fn record(&mut self, event: EventId) -> Result<()>;

    /// Waits for the work before the event, and for none behind it.
    fn wait(&mut self, event: EventId) -> Result<()>;

    /// From here to [`Driver::end_capture`] launches and copies are recorded and not run. Nothing may be allocated.
    fn begin_capture(&mut self) -> Result<()>;

    fn end_capture(&mut self) -> Result<GraphId>;

    fn replay(&mut self, graph: GraphId) -> Result<()>;
}

/// Host memory as the floats that a device wrote there. Panics unless it is aligned to them, as a driver's host memory is.
pub fn floats(bytes: &[u8]) -> &[f32] {
    // SAFETY: any four bytes are an f32.
    let (before, floats, _) = unsafe { bytes.align_to::<f32>() };
    assert!(before.is_empty(), "host memory is aligned");
    floats
}
