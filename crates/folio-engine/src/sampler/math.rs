//! exp and ln that are the same bits on every machine: plain multiplications and additions in a fixed order, no libm
//! (whose last bit depends on the CPU it finds) and no fused operations.

/// e^x for x <= 88; 0 below -87. Relative error below 2e-7. Cephes' expf; written so that it vectorizes.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer, which is then found in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = (p * r) * r + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    if x > -87.0 { y * f32::from_bits(exponent) } else { 0.0 }
}

/// ln x for finite x > 0, below 1 ulp. fdlibm's `e_log.c` (Sun Microsystems, 1993).
pub fn ln(x: f64) -> f64 {
    const LN2_HI: f64 = 6.931_471_803_691_238e-1;
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    const L: [f64; 7] = [
        6.666_666_666_666_735e-1,
        3.999_999_999_940_942e-1,
        2.857_142_874_366_239e-1,
        2.222_219_843_214_978_4e-1,
        1.818_357_216_161_805e-1,
        1.531_383_769_920_937_3e-1,
        1.479_819_860_511_658_6e-1,
    ];
    debug_assert!(x > 0.0 && x.is_finite());
    // Subnormals do not occur here (the smallest argument is 2^-33); scaling them keeps the function total.
    let (x, bias) = if x < f64::MIN_POSITIVE { (x * 18_014_398_509_481_984.0, -54) } else { (x, 0) };
    let bits = x.to_bits();
    let mut k = (bits >> 52) as i32 - 1023 + bias;
    let mut m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1;
    }
    let f = m - 1.0;
    let k = f64::from(k);
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let t1 = w * (L[1] + w * (L[3] + w * L[5]));
    let t2 = z * (L[0] + w * (L[2] + w * (L[4] + w * L[6])));
    let r = t2 + t1;
    let half = 0.5 * f * f;
    k * LN2_HI - ((half - (s * (half + r) + k * LN2_LO)) - f)
}

/// Largest value of `x`, or `None` if one of them is not a number.
pub fn max(x: &[f32]) -> Option<f32> {
    const LANES: usize = 8;
    let mut best = [f32::NEG_INFINITY; LANES];
    let mut bad = [false; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            let value = chunk[lane];
            best[lane] = if value > best[lane] { value } else { best[lane] };
            bad[lane] |= value.is_nan();
        }
    }
    for (lane, value) in rest.iter().enumerate() {
        best[lane] = if *value > best[lane] { *value } else { best[lane] };
        bad[lane] |= value.is_nan();
    }
    let best = best.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
    (!bad.contains(&true)).then_some(best)
}

/// What a mass of 1 is: masses are whole numbers of 2^-42, so that their sums are the same in every order. Rows of up to 2^21
/// tokens cannot overflow.
pub const MASS_ONE: f64 = 4_398_046_511_104.0;

/// e^x for x <= 0, as a mass.
#[inline(always)]
pub fn mass(x: f32) -> u64 {
    whole(exp(x))
}

/// The nearest whole number of 2^-42, of a number from 0 to 1.
#[inline(always)]
pub fn whole(x: f32) -> u64 {
    /// 2^52: adding it rounds to an integer, which is then found in the low bits.
    const ROUND: f64 = 4_503_599_627_370_496.0;
    (f64::from(x) * MASS_ONE + ROUND).to_bits() - ROUND.to_bits()
}

/// Sum of the masses of `(x - max) * scale`.
pub fn sum_mass(x: &[f32], max: f32, scale: f32) -> u64 {
    const LANES: usize = 8;
    let mut sums = [0u64; LANES];
    let groups = x.chunks_exact(LANES);
    let rest = groups.remainder();
    for group in groups {
        for lane in 0..LANES {
            sums[lane] += mass((group[lane] - max) * scale);
        }
    }
    let rest: u64 = rest.iter().map(|x| mass((x - max) * scale)).sum();
    rest + sums.into_iter().sum::<u64>()
}

/// What `part` of `total` is, at least the least mass there is.
pub fn share(part: f32, total: u64) -> u64 {
    ((f64::from(part) * total as f64) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut x = -90.0f32;
        while x < 20.0 {
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            if x > -87.0 {
                assert!((got - want).abs() <= 3e-7 * want, "exp({x}) = {got}, want {want}");
            } else {
                assert_eq!(got, 0.0, "exp({x})");
            }
            x += 0.003_7;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn ln_is_within_an_ulp() {
        let mut x = 2f64.powi(-34);
        while x < 1e9 {
            let (got, want) = (ln(x), x.ln());
            assert!(
                (got - want).abs() <= 2.0 * f64::EPSILON * want.abs().max(1e-300),
                "ln({x:e}) = {got}, want {want}"
            );
            x *= 1.001_3;
        }
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn max_sees_what_is_not_a_number_anywhere() {
        for length in [1usize, 7, 8, 9, 31] {
            for at in 0..length {
                let mut row: Vec<f32> = (0..length).map(|i| i as f32).collect();
                assert_eq!(max(&row), Some((length - 1) as f32));
                row[at] = f32::NAN;
                assert_eq!(max(&row), None, "length {length}, NaN at {at}");
            }
        }
    }

    #[test]
    fn masses_are_those_of_the_plain_sum_in_any_order() {
        let mut row: Vec<f32> = (0..3001).map(|i| ((i * 7919) % 1000) as f32 / 100.0).collect();
        row[77] = f32::NEG_INFINITY;
        let want: f64 = row.iter().map(|x| ((f64::from(*x) - 10.0) * 0.5).exp()).sum();
        let got = sum_mass(&row, 10.0, 0.5);
        assert!((got as f64 / MASS_ONE - want).abs() < 1e-6 * want);
        row.reverse();
        row.rotate_left(100);
        assert_eq!(sum_mass(&row, 10.0, 0.5), got);
        assert_eq!((mass(0.0), mass(-100.0)), (MASS_ONE as u64, 0));
        assert_eq!((share(0.5, 7), share(0.01, 7)), (3, 1));
    }
}
