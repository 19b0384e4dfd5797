//! A library of matrix products, on the host.
//!
//! Owns: products of row-major matrices, ascending along K in f32, and ways to get them wrong, for tests of who has to notice. Like all
//! asynchronous work they happen when somebody waits.

use folio_cuda::gemm::{Algorithm, Gemm, Multiply, Operands, Shape};
use folio_cuda::{DevicePtr, DriverError};

use crate::memory::Memory;
use crate::stream::Operation;
use crate::{Emulator, Result};

/// How an algorithm conducts itself. None says so before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conduct {
    Right,
    /// Sums two halves of K where there are fewer than 16 rows.
    SplitsFew,
    /// Sums the last row of each batch the other way round.
    LastRowDiffers,
    /// More rows it does not take.
    TakesAtMost(u32),
    /// It says that it takes so many rows, and does not.
    FailsAt(u32),
    /// Writes twice what it should.
    Doubles,
    /// Writes nothing.
    WritesNothing,
}

impl Emulator {
    /// A device whose library has these algorithms, in this order.
    pub fn with_library(mut self, conducts: &[Conduct]) -> Self {
        self.library = Some(conducts.to_vec());
        self
    }

    fn conduct(&self, algorithm: &Algorithm) -> Option<Conduct> {
        self.library.as_ref()?.get(algorithm.0[0] as usize).copied()
    }
}

impl Gemm for Emulator {
    fn name(&self) -> String {
        "the emulator's library".to_owned()
    }

    fn candidates(&mut self, _: Shape, _: u32) -> Result<Vec<Algorithm>> {
        let count = self.library.as_ref().map_or(0, Vec::len) as u64;
        Ok((0..count).map(|index| Algorithm([index, 0, 0, 0, 0, 0, 0, 0])).collect())
    }

    fn takes(&mut self, _: Shape, algorithm: &Algorithm, rows: u32) -> bool {
        !matches!(self.conduct(algorithm), Some(Conduct::TakesAtMost(most)) if rows > most)
    }

    fn multiply(&mut self, work: &Multiply) -> Result<()> {
        let wrong = |reason: String| Err(DriverError::Call { call: "a product of the library", reason });
        let Some(conduct) = self.conduct(&work.algorithm) else {
            return wrong(format!("there is no algorithm {:?}", work.algorithm));
        };
        if work.rows == 0
            || conduct == Conduct::FailsAt(work.rows)
            || !self.takes(work.shape, &work.algorithm, work.rows)
        {
            return wrong(format!("{} rows are not supported", work.rows));
        }
        let size = work.shape.operands.size() as u64;
        let strides = [u64::from(work.x_stride) * size, u64::from(work.out_stride) * 4];
        let places = [work.weights.0, work.x.0, work.out.0, u64::from(work.shape.k) * size];
        if strides.iter().chain(&places).any(|number| !number.is_multiple_of(16)) {
            return wrong(format!("{work:?}: addresses and strides are multiples of 16 bytes"));
        }
        self.add(Operation::Multiply(*work, conduct))
    }
}

/// Values of device memory as f32: `count` of them.
fn values(memory: &mut Memory, at: DevicePtr, operands: Operands, count: usize) -> Result<Vec<f32>> {
    let bytes = memory.bytes("a product's operand", at, (count * operands.size()) as u64)?;
    Ok(match operands {
        Operands::Bf16 => {
            let halves = bytes.as_chunks().0.iter();
            halves.map(|half| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16)).collect()
        }
        Operands::Fp8 => bytes.iter().map(|code| e4m3(*code)).collect(),
    })
}

fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction / 512.0,
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// Performs a product.
pub fn multiply(memory: &mut Memory, work: &Multiply, conduct: Conduct) -> Result<()> {
    if conduct == Conduct::WritesNothing {
        return Ok(());
    }
    let (n, k, rows) = (work.shape.n as usize, work.shape.k as usize, work.rows as usize);
    let (x_stride, out_stride) = (work.x_stride as usize, work.out_stride as usize);
    let weights = values(memory, work.weights, work.shape.operands, n * k)?;
    // `[k, n]`, so that the sums of a row are one loop.
    let columns: Vec<f32> =
        (0..k).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| weights[j * k + i]).collect();
    let x = values(memory, work.x, work.shape.operands, (rows - 1) * x_stride + k)?;
    let mut sums = vec![0.0f32; n];
    for row in 0..rows {
        let x = &x[row * x_stride..][..k];
        let add = |sums: &mut [f32], i: usize| {
            sums.iter_mut().zip(&columns[i * n..][..n]).for_each(|(sum, weight)| *sum += x[i] * weight);
        };
        sums.fill(0.0);
        match conduct {
            Conduct::SplitsFew if rows < 16 => {
                (0..k / 2).for_each(|i| add(&mut sums, i));
                let mut second = vec![0.0; n];
                (k / 2..k).for_each(|i| add(&mut second, i));
                sums.iter_mut().zip(second).for_each(|(sum, second)| *sum += second);
            }
            Conduct::LastRowDiffers if row + 1 == rows => (0..k).rev().for_each(|i| add(&mut sums, i)),
            _ => (0..k).for_each(|i| add(&mut sums, i)),
        }
        if conduct == Conduct::Doubles {
            sums.iter_mut().for_each(|sum| *sum *= 2.0);
        }
        let at = work.out.offset((4 * row * out_stride) as u64);
        let out = memory.bytes("a product", at, 4 * n as u64)?;
        for (place, sum) in out.as_chunks_mut().0.iter_mut().zip(&sums) {
            *place = sum.to_le_bytes();
        }
    }
    Ok(())
}
