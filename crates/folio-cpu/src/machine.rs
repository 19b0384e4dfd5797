//! What this machine can do: bytes read and multiply-adds per second, measured through the same pool as the model.
//!
//! Decoding cannot be faster than reading every weight byte once per step; prefill cannot be faster than its
//! multiply-adds. A rate of the engine means something only as a fraction of these.
//!
//! Cost: a gibibyte of memory and about a second for [`Machine::measure`], and as much again for every further number of
//! threads of [`Machine::measure_each`].

use std::ops::Range;
use std::time::Instant;

use crate::backend::CpuBackend;
use crate::error::CpuError;
use crate::memory::HugeBuffer;
use crate::pool::{Claims, ThreadPool};
use crate::simd::{Isa, LANES, Simd, Task, dispatch, dot};

/// Bytes streamed by one measurement.
const BUFFER_BYTES: usize = 1 << 30;
/// Bytes of one claim: small, so that a stolen processor does not hide the others.
const PIECE_BYTES: usize = 1 << 20;
/// The best of this many passes: a limit is what the machine does when nothing else runs.
const PASSES: usize = 8;
/// How far ahead the passes of reading ask for memory, in turn: which is best differs by a third between machines.
const AHEAD_BYTES: [usize; 4] = [256, 1024, 4096, 8192];
/// What one pass reads at least, if that is not more than so many times the same.
const BYTES_PER_PASS: usize = 64 << 20;
const MOST_TIMES: usize = 1000;

/// Measured limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    pub threads: usize,
    pub isa: Isa,
    pub read_bytes_per_s: f64,
    /// A fused multiply-add counts as two.
    pub f32_flop_per_s: f64,
    /// Products of bytes added up in 32 bits: what a quantized weight and an activation need at least. A multiply-add counts
    /// as two.
    pub int8_op_per_s: f64,
}

impl Machine {
    /// Measures with the threads and the instruction set that a [`CpuBackend`] would take.
    pub fn measure(threads: Option<usize>, isa: Option<Isa>) -> Result<Self, CpuError> {
        let threads = threads.unwrap_or_else(CpuBackend::detect_threads);
        Ok(Self::measure_each(&[threads], isa)?.swap_remove(0))
    }

    /// One measurement for each number of threads. All read the same memory, so that they can be compared where memory is not
    /// everywhere equally fast.
    pub fn measure_each(threads: &[usize], isa: Option<Isa>) -> Result<Vec<Self>, CpuError> {
        let isa = match isa {
            Some(isa) => isa.checked()?,
            None => Isa::from_env()?,
        };
        let buffer = buffer(&mut ThreadPool::new(threads.iter().copied().max().unwrap_or(1))?)?;
        let measure = |&threads: &usize| {
            let mut pool = ThreadPool::new(threads)?;
            Ok(Self {
                threads,
                isa,
                read_bytes_per_s: read_rate(&mut pool, isa, &[&buffer])?,
                f32_flop_per_s: multiply_rate(&mut pool, isa)?,
                int8_op_per_s: int8_rate(&mut pool, isa)?,
            })
        };
        threads.iter().map(measure).collect()
    }
}

/// More than any cache holds. Its pages exist: untouched ones would all map to one page of zeros.
fn buffer(pool: &mut ThreadPool) -> Result<HugeBuffer, CpuError> {
    let buffer = HugeBuffer::zeroed(BUFFER_BYTES)?;
    let claims = Claims::default();
    pool.run(&|_| {
        while let Some(piece) = claims.next(BUFFER_BYTES, PIECE_BYTES) {
            // SAFETY: the piece is inside the buffer and this worker's.
            unsafe { std::ptr::write_bytes(buffer.ptr().add(piece.start), 1, piece.len()) };
        }
    })?;
    Ok(buffer)
}

/// Bytes per second of reading these buffers, one after another: the limit of decoding where memory is not everywhere
/// equally fast, as on a virtual machine whose memory lies on two nodes of its host. The ends of buffers that are not whole
/// turns of the reader are left out. Zero if nothing is left.
pub(crate) fn read_rate(pool: &mut ThreadPool, isa: Isa, buffers: &[&HugeBuffer]) -> Result<f64, CpuError> {
    let pieces: Vec<(usize, Range<usize>)> = buffers
        .iter()
        .enumerate()
        .flat_map(|(at, buffer)| pieces(buffer.len()).map(move |p| (at, p)))
        .collect();
    let bytes: usize = pieces.iter().map(|(_, piece)| piece.len()).sum();
    if bytes == 0 {
        return Ok(0.0);
    }
    // Small weights are read several times, so that starting the workers does not count.
    let times = BYTES_PER_PASS.div_ceil(bytes).min(MOST_TIMES);
    let mut best = 0f64;
    for pass in 0..PASSES {
        let ahead = AHEAD_BYTES[pass % AHEAD_BYTES.len()];
        let claims = Claims::default();
        let start = Instant::now();
        pool.run(&|_| {
            while let Some(claim) = claims.next(times * pieces.len(), 1) {
                let (buffer, piece) = &pieces[claim.start % pieces.len()];
                let from = buffers[*buffer].ptr().wrapping_add(piece.start).cast();
                std::hint::black_box(dispatch(isa, Read { from, values: piece.len() / 4, ahead }));
            }
        })?;
        best = best.max((times * bytes) as f64 / start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Pieces of a buffer of `bytes`, each whole turns of [`Read`].
fn pieces(bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let end = bytes / TURN_BYTES * TURN_BYTES;
    (0..end).step_by(PIECE_BYTES).map(move |start| start..end.min(start + PIECE_BYTES))
}

/// Adds up `values` f32, whole [`TURN_BYTES`], as that many streams side by side: what the product
/// of one token does with its panels.
struct Read {
    from: *const f32,
    values: usize,
    /// Bytes.
    ahead: usize,
}

const STREAMS: usize = 4;
/// Bytes of one turn of [`Read`]'s loop.
const TURN_BYTES: usize = STREAMS * 2 * LANES * size_of::<f32>();

impl Task for Read {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        let stream = self.values / STREAMS;
        let mut sums = [[S::splat(0.0); 2]; STREAMS];
        for i in (0..stream).step_by(2 * LANES) {
            for (j, sums) in sums.iter_mut().enumerate() {
                let at = self.from.wrapping_add(j * stream + i);
                for line in 0..TURN_BYTES / STREAMS / 64 {
                    S::prefetch(at.cast::<u8>().wrapping_add(self.ahead + 64 * line));
                }
                for (half, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: `read_rate` passes a piece inside a buffer, whole turns long.
                    *sum = S::add(*sum, unsafe { S::load(at.wrapping_add(half * LANES)) });
                }
            }
        }
        let mut total = S::splat(0.0);
        for [a, b] in sums {
            total = S::add(total, S::add(a, b));
        }
        S::sum(total)
    }
}

/// Floating point operations per second of all workers on independent chains in registers.
fn multiply_rate(pool: &mut ThreadPool, isa: Isa) -> Result<f64, CpuError> {
    let rounds = if isa == Isa::Scalar { 20_000 } else { 4_000_000 };
    let mut best = 0f64;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.run(&|_| {
            std::hint::black_box(dispatch(isa, Multiply { rounds: std::hint::black_box(rounds) }));
        })?;
        let flop = 2.0 * (rounds * CHAINS * LANES * pool.count()) as f64;
        best = best.max(flop / start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Chains that hide the latency of a multiply-add and fit the registers of every set.
const CHAINS: usize = 6;

struct Multiply {
    rounds: usize,
}

impl Task for Multiply {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self) -> f32 {
        let mut chains: [S::V; CHAINS] = std::array::from_fn(|i| S::splat(i as f32));
        let (a, b) = (S::splat(std::hint::black_box(0.999)), S::splat(std::hint::black_box(0.001)));
        for _ in 0..self.rounds {
            for chain in &mut chains {
                *chain = S::fma(*chain, a, b);
            }
        }
        S::sum(chains.into_iter().reduce(S::add).unwrap_or(a))
    }
}

/// Integer operations per second of all workers on independent chains in registers.
fn int8_rate(pool: &mut ThreadPool, isa: Isa) -> Result<f64, CpuError> {
    let rounds = if isa == Isa::Scalar { 100_000 } else { 2_000_000 };
    let mut best = 0f64;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.run(&|_| {
            std::hint::black_box(dot::dispatch(isa, Chains { rounds: std::hint::black_box(rounds) }));
        })?;
        let products = rounds * dot::CHAINS * dot::dispatch(isa, Products) * pool.count();
        best = best.max(2.0 * products as f64 / start.elapsed().as_secs_f64());
    }
    Ok(best)
}

struct Chains {
    rounds: usize,
}

impl dot::DotTask for Chains {
    type Output = i32;

    #[inline(always)]
    fn run<D: dot::Dot>(self) -> i32 {
        // SAFETY: `dispatch` chose the set, which the machine has.
        unsafe { D::chains(self.rounds) }
    }
}

struct Products;

impl dot::DotTask for Products {
    type Output = usize;

    #[inline(always)]
    fn run<D: dot::Dot>(self) -> usize {
        D::PRODUCTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_read_to_its_last_whole_turn() {
        assert_eq!(pieces(TURN_BYTES - 1).count(), 0);
        assert_eq!(pieces(TURN_BYTES + 4).collect::<Vec<_>>(), std::slice::from_ref(&(0..TURN_BYTES)));
        let long = pieces(2 * PIECE_BYTES + 3 * TURN_BYTES + 1).collect::<Vec<_>>();
        assert_eq!(long.iter().map(|piece| piece.len()).sum::<usize>(), 2 * PIECE_BYTES + 3 * TURN_BYTES);
        assert!(long.windows(2).all(|w| w[0].end == w[1].start));
    }

    #[test]
    fn small_weights_have_a_read_rate_and_no_weights_have_none() {
        let mut pool = ThreadPool::new(2).expect("pool");
        let isa = Isa::from_env().expect("an instruction set");
        let buffers = [100, 4096, 3 * TURN_BYTES].map(|bytes| HugeBuffer::zeroed(bytes).expect("memory"));
        let [empty, some, more] = &buffers;
        assert_eq!(read_rate(&mut pool, isa, &[empty]).expect("a rate"), 0.0);
        let rate = read_rate(&mut pool, isa, &[empty, some, more]).expect("a rate");
        assert!(rate.is_finite() && rate > 0.0);
    }

    #[test]
    fn a_multiply_rate_is_measured_for_every_instruction_set() {
        let mut pool = ThreadPool::new(2).expect("pool");
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let rate = multiply_rate(&mut pool, isa).expect("a rate");
            assert!(rate.is_finite() && rate > 0.0, "{isa:?}");
            let rate = int8_rate(&mut pool, isa).expect("a rate");
            assert!(rate.is_finite() && rate > 0.0, "{isa:?} int8");
        }
    }
}
