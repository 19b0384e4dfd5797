//! The oracle: sums in plain loops.

use super::{Block, CHAINS, COLUMNS, Codes, Dot, Sink, VECTORS, lifted};
use crate::simd::{LANES, Scalar as Floats};

#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Dot for Scalar {
    type F = Floats;
    const TOKENS: usize = 4;
    const PRODUCTS: usize = 1;

    #[inline]
    unsafe fn chains(rounds: usize) -> i32 {
        let x = std::hint::black_box(3i8);
        let mut sums: [i32; CHAINS] = std::array::from_fn(|i| i as i32);
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = sum.wrapping_add(i32::from(x) * i32::from(*sum as i8));
            }
        }
        sums.into_iter().fold(0, i32::wrapping_add)
    }

    #[inline]
    unsafe fn block<C: Codes, const P: usize, const M: usize, const HALVES: bool>(
        codes: [*const u8; P],
        x: &Block,
        sink: &mut impl Sink<[f32; LANES]>,
    ) {
        for (panel, codes) in codes.into_iter().enumerate() {
            let mut values = [[0i32; COLUMNS]; LANES];
            for j in 0..VECTORS {
                for (row, values) in values.iter_mut().enumerate() {
                    for i in 0..4 {
                        // SAFETY: the caller promises the block.
                        let lifted = unsafe { lifted::<C>(codes, j, 4 * row + i) };
                        values[4 * j + i] = i32::from(lifted) - i32::from(C::LIFT);
                    }
                }
            }
            let parts = if HALVES { 2 } else { 1 };
            for token in 0..M {
                for part in 0..parts {
                    let columns = part * COLUMNS / parts..(part + 1) * COLUMNS / parts;
                    let sum = values.each_ref().map(|row| {
                        let product = |column: usize| {
                            // SAFETY: the caller promises 32 values of each token.
                            let x = unsafe { *x.bytes.add(token * COLUMNS + column) } as i8;
                            row[column] * i32::from(x)
                        };
                        columns.clone().map(product).sum::<i32>() as f32
                    });
                    sink.take(panel, token, part, sum);
                }
            }
        }
    }
}
