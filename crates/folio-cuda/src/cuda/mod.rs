//! The driver of a real GPU.
//!
//! Owns: every call into libcuda. Must never: know a model. The library is opened when a device is asked for; without one, or with one
//! that is too old, [`CudaDriver::open`] says so in a sentence and the rest of the program goes on.
//!
//! One context (the device's primary one), one stream. Every call first makes the context current, because the thread that loads a model
//! is not the one that runs it.

pub mod lt;
mod probe;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;
use folio_model::backend::HostBuffer;

use crate::cubins::Cubins;
use crate::driver::{
    Arg, Copies, DeviceInfo, DevicePtr, Driver, DriverError, EventId, GraphId, HostId, Launch,
};
use crate::gemm::Gemm;
use crate::kernels::Module;

type Result<T> = std::result::Result<T, DriverError>;

/// Shared memory that a kernel may have without opting in.
const SHARED_WITHOUT_ASKING: u32 = 48 * 1024;
/// Most arguments of a kernel.
const MAX_ARGS: usize = 32;

/// See the module's description.
pub struct CudaDriver {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    info: DeviceInfo,
    cubins: Cubins,
    modules: Vec<sys::CUmodule>,
    kernels: HashMap<String, Kernel>,
    host: Vec<(*mut u8, usize)>,
    graphs: Vec<sys::CUgraphExec>,
    events: Vec<sys::CUevent>,
    library: Option<lt::Lt>,
}

struct Kernel {
    function: sys::CUfunction,
    /// Dynamic shared memory it may have now.
    shared: u32,
}

// SAFETY: the handles belong to the context, not to a thread, and each call makes the context current first. Host memory is this value's
// own.
unsafe impl Send for CudaDriver {}

/// An error of libcuda as ours.
fn check(call: &'static str, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: a place for a pointer to a static string.
    unsafe { sys::cuGetErrorString(status, &mut text) };
    let reason = match text.is_null() {
        true => format!("{status:?}"),
        // SAFETY: libcuda's strings end in NUL and live for ever.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    };
    Err(DriverError::Call { call, reason })
}

/// `call!(cuFunction(arguments))`: the call, checked and named.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: arguments are handles that this module made and places for answers of the type that `cuda.h` says.
        check(stringify!($name), unsafe { sys::$name($($argument),*) })
    };
}

impl CudaDriver {
    /// Whether this machine has NVIDIA's driver at all.
    pub fn is_present() -> bool {
        probe::is_present()
    }

    /// Device `ordinal` of this machine. Compiled kernels are kept in `cache`.
    pub fn open(ordinal: u32, cache: Option<PathBuf>) -> Result<Self> {
        let count = probe::devices()?;
        if ordinal >= count {
            return Err(DriverError::Unavailable(format!(
                "device {ordinal} was asked for, this machine has {count}, counted from 0"
            )));
        }
        let mut device = 0;
        call!(cuDeviceGet(&mut device, ordinal as c_int))?;
        let info = probe::info(device)?;
        if info.arch < 80 {
            return Err(DriverError::Unavailable(format!(
                "{} has compute capability {}.{}; 8.0 (Ampere) or later is needed",
                info.name,
                info.arch / 10,
                info.arch % 10
            )));
        }
        let mut context = std::ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut context, device))?;
        call!(cuCtxSetCurrent(context))?;
        let mut stream = std::ptr::null_mut();
        call!(cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        Ok(Self {
            device,
            context,
            stream,
            cubins: Cubins::new(cache, info.arch),
            info,
            modules: Vec::new(),
            kernels: HashMap::new(),
            host: Vec::new(),
            graphs: Vec::new(),
            events: Vec::new(),
            library: None,
        })
    }

    /// With cuBLASLt for products. Says where it was looked for if it is not found.
    pub fn with_cublaslt(mut self) -> Result<Self> {
        self.enter()?;
        self.library = Some(lt::Lt::open(self.context, self.stream)?);
        Ok(self)
    }

    /// (kernels' modules found compiled, compiled now)
    pub fn cubin_counts(&self) -> (usize, usize) {
        self.cubins.counts()
    }

    fn enter(&self) -> Result<()> {
        call!(cuCtxSetCurrent(self.context))
    }

    /// Host memory from `offset` on, at least `bytes` of it.
    fn host_at(&self, id: HostId, offset: u64, bytes: u64) -> Result<*mut c_void> {
        let (start, length) = self.host[id.0 as usize];
        if offset.checked_add(bytes).is_none_or(|end| end > length as u64) {
            let reason = format!("{bytes} bytes at {offset} of {length} bytes of host memory");
            return Err(DriverError::Call { call: "a copy", reason });
        }
        Ok(start.wrapping_add(offset as usize).cast())
    }
}

/// Streams of their own in the device's context, which they keep alive.
struct SideStreams {
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// To the host, and from it: the link carries both at once.
    streams: [sys::CUstream; 2],
}

// SAFETY: the handles belong to the context, not to a thread; each call makes that current first, and libcuda takes calls to one stream
// from several threads.
unsafe impl Send for SideStreams {}
// SAFETY: as above.
unsafe impl Sync for SideStreams {}

impl SideStreams {
    fn open(device: sys::CUdevice) -> Result<Self> {
        let mut context = std::ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut context, device))?;
        call!(cuCtxSetCurrent(context))?;
        let mut streams = [std::ptr::null_mut(); 2];
        for stream in &mut streams {
            call!(cuStreamCreate(stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        }
        Ok(Self { device, context, streams })
    }
}

impl Copies for SideStreams {
    fn host_buffer(self: Arc<Self>, bytes: usize) -> Result<Arc<dyn HostBuffer>> {
        call!(cuCtxSetCurrent(self.context))?;
        let mut at = std::ptr::null_mut();
        call!(cuMemHostAlloc(&mut at, bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE))?;
        let at: *mut u8 = at.cast();
        // SAFETY: so many bytes were allocated.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Arc::new(LockedBuffer { at, length: bytes, of: self }))
    }

    fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<()> {
        call!(cuCtxSetCurrent(self.context))?;
        call!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0, to.len(), self.streams[0]))?;
        call!(cuStreamSynchronize(self.streams[0]))
    }

    fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<()> {
        call!(cuCtxSetCurrent(self.context))?;
        call!(cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast(), from.len(), self.streams[1]))?;
        call!(cuStreamSynchronize(self.streams[1]))
    }
}

/// Page-locked memory of the host.
struct LockedBuffer {
    at: *mut u8,
    length: usize,
    of: Arc<SideStreams>,
}

// SAFETY: memory that belongs to whoever has this, as with a vector.
unsafe impl Send for LockedBuffer {}
// SAFETY: as above.
unsafe impl Sync for LockedBuffer {}

impl HostBuffer for LockedBuffer {
    fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes were allocated and written, and nobody else has them.
        unsafe { std::slice::from_raw_parts(self.at, self.length) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.length) }
    }
}

impl Drop for LockedBuffer {
    fn drop(&mut self) {
        // What cannot be given back now goes with the process.
        let _ = call!(cuCtxSetCurrent(self.of.context));
        let _ = call!(cuMemFreeHost(self.at.cast()));
    }
}

impl Drop for SideStreams {
    fn drop(&mut self) {
        // What cannot be given back now goes with the process.
        let _ = call!(cuCtxSetCurrent(self.context));
        for stream in self.streams {
            let _ = call!(cuStreamDestroy_v2(stream));
        }
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

impl Driver for CudaDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok(free as u64)
    }

    fn prepare(&mut self, modules: &[Module]) -> Result<()> {
        self.cubins.prepare(modules)
    }

    fn load(&mut self, module: &Module) -> Result<()> {
        if module.kernels.iter().all(|name| self.kernels.contains_key(*name)) {
            return Ok(());
        }
        self.enter()?;
        let cubin = self.cubins.get(module)?;
        let mut handle = std::ptr::null_mut();
        call!(cuModuleLoadData(&mut handle, cubin.as_ptr().cast()))?;
        self.modules.push(handle);
        for name in module.kernels {
            let text = CString::new(*name).map_err(|_| DriverError::NoKernel((*name).to_owned()))?;
            let mut function = std::ptr::null_mut();
            call!(cuModuleGetFunction(&mut function, handle, text.as_ptr()))
                .map_err(|_| DriverError::NoKernel(format!("{name} in {}", module.name)))?;
            self.kernels.insert((*name).to_owned(), Kernel { function, shared: SHARED_WITHOUT_ASKING });
        }
        Ok(())
    }

    fn allocate(&mut self, bytes: u64) -> Result<DevicePtr> {
        self.enter()?;
        let mut at = 0;
        // SAFETY: `at` is a place for an address.
        match unsafe { sys::cuMemAlloc_v2(&mut at, bytes.max(1) as usize) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free_bytes = self.free_bytes()?;
                Err(DriverError::OutOfMemory { needed_bytes: bytes, free_bytes })
            }
            status => check("cuMemAlloc_v2", status).map(|()| DevicePtr(at)),
        }
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<()> {
        self.synchronize()?;
        call!(cuMemFree_v2(ptr.0))
    }

    fn zero(&mut self, at: DevicePtr, bytes: u64) -> Result<()> {
        self.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        call!(cuMemsetD8Async(at.0, 0, bytes as usize, self.stream))
    }

    fn upload(&mut self, to: DevicePtr, from: &[u8]) -> Result<()> {
        self.enter()?;
        if from.is_empty() {
            return Ok(());
        }
        call!(cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast(), from.len(), self.stream))?;
        self.synchronize()
    }

    fn download(&mut self, from: DevicePtr, to: &mut [u8]) -> Result<()> {
        self.enter()?;
        if !to.is_empty() {
            call!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0, to.len(), self.stream))?;
        }
        self.synchronize()
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: u64) -> Result<()> {
        self.enter()?;
        call!(cuMemcpyDtoDAsync_v2(to.0, from.0, bytes as usize, self.stream))
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        self.enter()?;
        let kernel = self.kernels.get_mut(launch.kernel);
        let kernel = kernel.ok_or_else(|| DriverError::NoKernel(launch.kernel.to_owned()))?;
        if launch.shared > kernel.shared {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            call!(cuFuncSetAttribute(kernel.function, attribute, launch.shared as c_int))?;
            kernel.shared = launch.shared;
        }
        // Each value at the start of eight bytes: the device is little endian, as its hosts are.
        let mut values = [0u64; MAX_ARGS];
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        if launch.args.len() > MAX_ARGS {
            let reason = format!("{} has {} arguments", launch.kernel, launch.args.len());
            return Err(DriverError::Call { call: "cuLaunchKernel", reason });
        }
        for ((value, pointer), arg) in values.iter_mut().zip(&mut pointers).zip(launch.args) {
            *value = match *arg {
                Arg::Ptr(DevicePtr(address)) => address,
                Arg::U32(number) => u64::from(number),
                Arg::F32(number) => u64::from(number.to_bits()),
            };
            *pointer = std::ptr::from_mut(value).cast();
        }
        let [x, y, z] = launch.grid;
        let result = call!(cuLaunchKernel(
            kernel.function,
            x,
            y,
            z,
            launch.threads,
            1,
            1,
            launch.shared,
            self.stream,
            pointers.as_mut_ptr(),
            std::ptr::null_mut(),
        ));
        result.map_err(|error| match error {
            DriverError::Call { call, reason } => {
                DriverError::Call { call, reason: format!("{} {:?}: {reason}", launch.kernel, launch.grid) }
            }
            other => other,
        })
    }

    fn gemm(&mut self) -> Option<&mut dyn Gemm> {
        self.library.as_mut().map(|library| library as &mut dyn Gemm)
    }

    fn allocate_host(&mut self, bytes: u64) -> Result<HostId> {
        self.enter()?;
        let mut at = std::ptr::null_mut();
        call!(cuMemHostAlloc(&mut at, bytes.max(1) as usize, sys::CU_MEMHOSTALLOC_PORTABLE))?;
        // SAFETY: fresh memory of that length, ours alone.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes as usize) };
        self.host.push((at.cast(), bytes.max(1) as usize));
        Ok(HostId(self.host.len() as u32 - 1))
    }

    fn free_host(&mut self, id: HostId) -> Result<()> {
        self.synchronize()?;
        let (start, _) = std::mem::replace(&mut self.host[id.0 as usize], (NonNull::dangling().as_ptr(), 0));
        call!(cuMemFreeHost(start.cast()))
    }

    fn host(&mut self, id: HostId) -> &mut [u8] {
        let (start, length) = self.host[id.0 as usize];
        // SAFETY: allocated in `allocate_host`, freed with `self`; the borrow of `self` keeps other borrows away. What the device
        // may still write there is the caller's to wait for, as the trait says.
        unsafe { std::slice::from_raw_parts_mut(start, length) }
    }

    fn host_bytes(&self, id: HostId) -> &[u8] {
        let (start, length) = self.host[id.0 as usize];
        // SAFETY: as in `host`, shared.
        unsafe { std::slice::from_raw_parts(start, length) }
    }

    fn upload_async(&mut self, to: DevicePtr, id: HostId, offset: u64, bytes: u64) -> Result<()> {
        self.enter()?;
        let from = self.host_at(id, offset, bytes)?;
        call!(cuMemcpyHtoDAsync_v2(to.0, from, bytes as usize, self.stream))
    }

    fn download_async(&mut self, from: DevicePtr, id: HostId, offset: u64, bytes: u64) -> Result<()> {
        self.enter()?;
        let to = self.host_at(id, offset, bytes)?;
        call!(cuMemcpyDtoHAsync_v2(to, from.0, bytes as usize, self.stream))
    }

    fn copies(&mut self) -> Result<Arc<dyn Copies>> {
        Ok(Arc::new(SideStreams::open(self.device)?))
    }

    fn synchronize(&mut self) -> Result<()> {
        self.enter()?;
        call!(cuStreamSynchronize(self.stream))
    }

    fn event(&mut self) -> Result<EventId> {
        self.enter()?;
        let mut event = std::ptr::null_mut();
        call!(cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32))?;
        self.events.push(event);
        Ok(EventId(self.events.len() as u32 - 1))
    }

    fn record(&mut self, event: EventId) -> Result<()> {
        self.enter()?;
        call!(cuEventRecord(self.events[event.0 as usize], self.stream))
    }

    fn wait(&mut self, event: EventId) -> Result<()> {
        self.enter()?;
        call!(cuEventSynchronize(self.events[event.0 as usize]))
    }

    fn begin_capture(&mut self) -> Result<()> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        call!(cuStreamBeginCapture_v2(self.stream, mode))
    }

    fn end_capture(&mut self) -> Result<GraphId> {
        self.enter()?;
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        call!(cuStreamEndCapture(self.stream, &mut graph))?;
        let made = call!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        call!(cuGraphDestroy(graph))?;
        made?;
        self.graphs.push(executable);
        Ok(GraphId(self.graphs.len() as u32 - 1))
    }

    fn replay(&mut self, graph: GraphId) -> Result<()> {
        self.enter()?;
        call!(cuGraphLaunch(self.graphs[graph.0 as usize], self.stream))
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        // What cannot be given back now goes with the process.
        let _ = self.synchronize();
        self.library = None;
        for graph in self.graphs.drain(..) {
            let _ = call!(cuGraphExecDestroy(graph));
        }
        for event in self.events.drain(..) {
            let _ = call!(cuEventDestroy_v2(event));
        }
        for module in self.modules.drain(..) {
            let _ = call!(cuModuleUnload(module));
        }
        for (start, _) in self.host.drain(..).filter(|(_, length)| *length > 0) {
            let _ = call!(cuMemFreeHost(start.cast()));
        }
        let _ = call!(cuStreamDestroy_v2(self.stream));
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}
