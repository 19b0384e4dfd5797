//! The emulator itself: right kernels give what they should in every order of threads, and wrong ones are found out.

use folio_cuda::driver::HostId;
use folio_cuda::kernels::Module;
use folio_cuda::{Arg, DevicePtr, Driver, DriverError, Launch};
use folio_emulator::{Emulator, Order, available};

const KERNELS: Module = Module {
    name: "emulator_test",
    source: include_str!("emulator.cu"),
    kernels: &[
        "reverse",
        "reverse_unsafe",
        "half_barrier",
        "two_barriers",
        "half_shuffle",
        "warps",
        "product",
        "product_f16",
        "staged",
        "staged_too_early",
        "fill",
        "past_the_end",
        "own_shared",
        "convert",
        "counts",
        "unaligned_copy",
    ],
};

fn device(order: Order) -> Emulator {
    let mut device = Emulator::new(order);
    device.load(&KERNELS).unwrap();
    device
}

fn launch(device: &mut Emulator, kernel: &str, grid: u32, threads: u32, shared: u32, args: &[Arg]) {
    device.launch(&Launch { kernel, grid: [grid, 1, 1], threads, shared, args }).unwrap();
}

fn up<T: Copy>(device: &mut Emulator, values: &[T]) -> DevicePtr {
    // SAFETY: numbers, read as their bytes.
    let bytes =
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), std::mem::size_of_val(values)) };
    let at = device.allocate(bytes.len() as u64).unwrap();
    device.upload(at, bytes).unwrap();
    at
}

fn down(device: &mut Emulator, at: DevicePtr, count: usize) -> Result<Vec<u32>, DriverError> {
    let mut bytes = vec![0; 4 * count];
    device.download(at, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
}

fn floats(words: Vec<u32>) -> Vec<f32> {
    words.into_iter().map(f32::from_bits).collect()
}

/// What a kernel over one buffer of `count` words leaves there.
fn of(order: Order, kernel: &str, threads: u32, count: usize) -> Result<Vec<u32>, String> {
    let mut device = device(order);
    let at = up(&mut device, &vec![0u32; count]);
    launch(&mut device, kernel, 1, threads, 4096, &[Arg::Ptr(at)]);
    down(&mut device, at, count).map_err(|error| error.to_string())
}

#[test]
fn barriers_separate_what_is_written_from_what_is_read() {
    if !available() {
        return;
    }
    for order in Order::SEVERAL {
        assert_eq!(
            of(order, "reverse", 256, 256).unwrap(),
            (0..256).rev().collect::<Vec<u32>>(),
            "{order:?}"
        );
    }
}

#[test]
fn a_missing_barrier_shows() {
    if !available() {
        return;
    }
    let right: Vec<u32> = (0..256).rev().collect();
    let found = Order::SEVERAL.map(|order| of(order, "reverse_unsafe", 256, 256).unwrap());
    assert!(found.iter().all(|found| *found != right));
    assert_ne!(found[0], found[1]);
}

#[test]
fn waits_that_not_all_share_are_errors_that_say_where() {
    if !available() {
        return;
    }
    for (kernel, words) in [
        ("half_barrier", ["kernel half_barrier", "has ended", "waits at the barrier of line"]),
        ("two_barriers", ["kernel two_barriers", "thread 1 waits", "waits at the barrier of line"]),
        ("half_shuffle", ["kernel half_shuffle", "waits in shuffle_xor of line", "has ended"]),
    ] {
        let error = of(Order::Ascending, kernel, 64, 64).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn lanes_exchange() {
    if !available() {
        return;
    }
    for order in Order::SEVERAL {
        let found = of(order, "warps", 64, 4 * 64).unwrap();
        for thread in 0..64 {
            let (warp, lane) = (thread & 32, thread & 31);
            let sum: f32 = (0..32).map(|lane| (warp + lane) as f32).sum();
            let votes =
                (0..32u32).filter(|lane| (warp + lane).is_multiple_of(3)).map(|lane| 1 << lane).sum::<u32>();
            let want = [sum.to_bits(), warp + (lane + 5) % 32, votes, (warp + (lane ^ 1)) * 2];
            assert_eq!(found[4 * thread as usize..][..4], want, "{order:?} {thread}");
        }
    }
}

/// A tile of `A . B + D`, with values that f32 sums exactly.
#[test]
fn matrix_instructions_are_matrix_products() {
    if !available() {
        return;
    }
    let a: Vec<f32> = (0..256).map(|i| ((i * 37 % 61) as f32 - 30.0) / 4.0).collect();
    let b: Vec<f32> = (0..128).map(|i| ((i * 29 % 53) as f32 - 26.0) / 8.0).collect();
    let d: Vec<f32> = (0..128).map(|i| i as f32 - 64.0).collect();
    let want: Vec<f32> = (0..128)
        .map(|at| d[at] + (0..16).map(|k| a[at / 8 * 16 + k] * b[k * 8 + at % 8]).sum::<f32>())
        .collect();
    for (order, kernel) in
        Order::SEVERAL.into_iter().flat_map(|order| [(order, "product"), (order, "product_f16")])
    {
        let mut device = device(order);
        let [a, b, d] = [&a, &b, &d].map(|values| up(&mut device, values));
        launch(&mut device, kernel, 1, 32, 0, &[Arg::Ptr(a), Arg::Ptr(b), Arg::Ptr(d)]);
        assert_eq!(floats(down(&mut device, d, 128).unwrap()), want, "{order:?} {kernel}");
    }
}

#[test]
fn asynchronous_copies_are_there_after_the_wait_and_not_before() {
    if !available() {
        return;
    }
    for order in Order::SEVERAL {
        let mut device = device(order);
        let from: Vec<u32> = (0..512).collect();
        let (from, to) = (up(&mut device, &from), up(&mut device, &[0u32; 512]));
        launch(&mut device, "staged", 1, 64, 2048, &[Arg::Ptr(from), Arg::Ptr(to)]);
        assert_eq!(down(&mut device, to, 512).unwrap(), (0..512).collect::<Vec<u32>>());
        launch(&mut device, "staged_too_early", 1, 64, 2048, &[Arg::Ptr(from), Arg::Ptr(to)]);
        let found = down(&mut device, to, 512).unwrap();
        assert_eq!(found[..256], (0..256).collect::<Vec<u32>>());
        assert!(found[256..].iter().all(|word| *word == u32::MAX));
        launch(&mut device, "unaligned_copy", 1, 32, 2048, &[Arg::Ptr(from)]);
        let error = device.synchronize().unwrap_err().to_string();
        assert!(error.contains("not multiples of 16"), "{error}");
    }
}

#[test]
fn what_is_past_the_end_of_an_allocation_cannot_be_touched() {
    if !available() {
        return;
    }
    let mut device = device(Order::Ascending);
    let at = device.allocate(4 * 1000).unwrap();
    launch(&mut device, "fill", 4, 256, 0, &[Arg::Ptr(at), Arg::U32(1000), Arg::F32(2.0)]);
    assert_eq!(floats(down(&mut device, at, 1000).unwrap()), [2.0; 1000]);
    launch(&mut device, "past_the_end", 1, 32, 0, &[Arg::Ptr(at), Arg::U32(1000)]);
    let error = device.synchronize().unwrap_err().to_string();
    for word in ["kernel past_the_end", "thread 0", "0 bytes behind an allocation of 4000"] {
        assert!(error.contains(word), "{error}");
    }
    // The device goes on, and so does the same thread.
    launch(&mut device, "fill", 4, 256, 0, &[Arg::Ptr(at), Arg::U32(1000), Arg::F32(3.0)]);
    assert_eq!(floats(down(&mut device, at, 1000).unwrap()), [3.0; 1000]);
    let mut bytes = vec![0; 4001];
    assert!(device.download(at, &mut bytes).unwrap_err().to_string().contains("4001 bytes"));
    device.free(at).unwrap();
    launch(&mut device, "fill", 1, 32, 0, &[Arg::Ptr(at), Arg::U32(1), Arg::F32(3.0)]);
    assert!(device.synchronize().unwrap_err().to_string().contains("no allocation"));
}

/// Blocks have shared memory of their own, filled with NaN where it is dynamic; so have tests that run at the same time.
#[test]
fn shared_memory_belongs_to_a_block() {
    if !available() {
        return;
    }
    let threads: Vec<_> = (0..2)
        .map(|_| {
            std::thread::spawn(|| {
                for _ in 0..20 {
                    let mut device = device(Order::Shuffled { seed: 3 });
                    let at = up(&mut device, &[0u32; 128]);
                    launch(&mut device, "own_shared", 64, 64, 256, &[Arg::Ptr(at)]);
                    let found = down(&mut device, at, 128).unwrap();
                    let want: Vec<u32> = (0..64).flat_map(|block| [64 * block + 2016, u32::MAX]).collect();
                    assert_eq!(found, want);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn conversions_are_those_of_the_host() {
    if !available() {
        return;
    }
    let mut values: Vec<u32> =
        (0..=u16::MAX).map(|high| (u32::from(high) << 16) | (u32::from(high) * 40_503 % 65_536)).collect();
    values.extend((0..=u16::MAX).map(|high| u32::from(high) << 16 | 0x8000));
    values.extend((0..=u16::MAX).map(|high| u32::from(high) << 16 | 0x7fff));
    values.extend((0..2048u32).map(|i| 0x3880_0000 - 1024 + i).chain((0..2048).map(|i| 0x477f_e000 + 8 * i)));
    let mut device = device(Order::Ascending);
    let count = values.len();
    let (from, to) = (up(&mut device, &values), device.allocate(4 * 4 * count as u64).unwrap());
    launch(
        &mut device,
        "convert",
        count.div_ceil(256) as u32,
        256,
        0,
        &[Arg::Ptr(from), Arg::Ptr(to), Arg::U32(count as u32)],
    );
    let found = down(&mut device, to, 4 * count).unwrap();
    for (bits, found) in values.iter().zip(found.chunks(4)) {
        let value = f32::from_bits(*bits);
        let bf16 = half::bf16::from_f32(value);
        assert_eq!(found[0] as u16, bf16.to_bits(), "{bits:#x}");
        let f16 = half::f16::from_f32(value);
        match value.is_nan() {
            true => assert!(half::f16::from_bits(found[1] as u16).is_nan()),
            false => assert_eq!(found[1] as u16, f16.to_bits(), "{bits:#x}"),
        }
        let back = half::f16::from_bits((bits >> 16) as u16).to_f32();
        assert!(f32::from_bits(found[2]) == back || (back.is_nan() && f32::from_bits(found[2]).is_nan()));
        let code = (bits >> 16) as u8;
        let mut block = 1.0f32.to_le_bytes().to_vec();
        block.extend([code; 32]);
        let mut decoded = [0.0; 32];
        folio_model::quant::BlockFormat::Fp8x32.decode(&block, &mut decoded);
        assert!(
            f32::from_bits(found[3]) == decoded[0]
                || (decoded[0].is_nan() && f32::from_bits(found[3]).is_nan())
        );
    }
}

#[test]
fn graphs_run_what_was_recorded_again() {
    if !available() {
        return;
    }
    let mut device = device(Order::Ascending);
    let host: HostId = device.allocate_host(16).unwrap();
    let [a, b] = [0; 2].map(|_| device.allocate(16).unwrap());
    device.begin_capture().unwrap();
    assert!(device.allocate(4).is_err());
    device.upload_async(a, host, 0, 16).unwrap();
    launch(&mut device, "counts", 2, 32, 0, &[Arg::Ptr(a)]);
    device.copy(a, b, 16).unwrap();
    assert!(device.synchronize().is_err());
    let graph = device.end_capture().unwrap();
    for start in [0u8, 7] {
        device.host(host)[0] = start;
        device.replay(graph).unwrap();
        // 64 threads added one.
        assert_eq!(down(&mut device, b, 1).unwrap(), [u32::from(start) + 64]);
    }
    device.download_async(b, host, 4, 4).unwrap();
    assert_eq!(device.host(host)[4], 0, "nothing comes before it is waited for");
    device.synchronize().unwrap();
    assert_eq!(device.host(host)[4], 71);
}

#[test]
fn waiting_for_an_event_runs_what_is_before_it_and_no_more() {
    let mut device = Emulator::new(Order::Ascending);
    let at = up(&mut device, &[1u32, 2]);
    let host = device.allocate_host(8).unwrap();
    let read = |device: &Emulator| device.host_bytes(host).to_vec();
    let (early, late) = (device.event().unwrap(), device.event().unwrap());
    device.wait(late).unwrap();
    device.download_async(at, host, 0, 4).unwrap();
    device.record(early).unwrap();
    device.download_async(at.offset(4), host, 4, 4).unwrap();
    device.record(late).unwrap();
    assert_eq!(read(&device), [0; 8], "nothing ran");
    device.wait(early).unwrap();
    assert_eq!(read(&device), [1, 0, 0, 0, 0, 0, 0, 0]);
    device.wait(early).unwrap();
    assert_eq!(read(&device), [1, 0, 0, 0, 0, 0, 0, 0]);
    // Recorded again, it is where the work ends now.
    device.record(early).unwrap();
    device.wait(early).unwrap();
    assert_eq!(read(&device), [1, 0, 0, 0, 2, 0, 0, 0]);
    device.begin_capture().unwrap();
    assert!(device.record(early).is_err() && device.wait(early).is_err(), "not while a graph is captured");
}

#[test]
fn wrong_launches_are_refused_by_name() {
    if !available() {
        return;
    }
    let mut device = device(Order::Ascending);
    let at = device.allocate(16).unwrap();
    assert!(
        floats(down(&mut device, at, 4).unwrap()).iter().all(|value| value.is_nan()),
        "fresh memory is NaN"
    );
    let args = &[Arg::Ptr(at)][..];
    let cases = [
        ("nothing", [1; 3], 32, 0, args, "there is no kernel nothing"),
        ("counts", [0, 1, 1], 32, 0, args, "grid"),
        ("counts", [1, 65_536, 1], 32, 0, args, "grid"),
        ("counts", [1; 3], 48, 0, args, "multiple of 32"),
        ("counts", [1; 3], 32, 1 << 20, args, "shared memory"),
        ("counts", [1; 3], 32, 0, &[Arg::U32(1)][..], "its parameters are p, the arguments u"),
        ("fill", [1; 3], 32, 0, args, "its parameters are puf, the arguments p"),
    ];
    for (kernel, grid, threads, shared, args, why) in cases {
        let error = device.launch(&Launch { kernel, grid, threads, shared, args }).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let broken = Module { name: "broken", source: "void f() { nonsense }", kernels: &[] };
    let Err(DriverError::Compile { module, log }) = device.load(&broken) else { panic!("it compiles") };
    assert!(module == "broken" && log.contains("broken.cu:1"), "{log}");
    let full = device.allocate(2 << 30).unwrap_err();
    assert!(matches!(full, DriverError::OutOfMemory { needed_bytes: 0x8000_0000, .. }));
}
