//! The register tile of quantized products: `P` panels times `M` tokens over some records.
//!
//! The chain of an output is in `quant`; here is only how many of them run side by side.

use folio_model::quant::BlockFormat;

use super::activations::ActivationLayout;
use super::{Form, FormTask, with_form};
use crate::ahead::Ahead;
use crate::linear::Output;
use crate::packed::PANEL_MULTIPLE;
use crate::simd::dot::{Block, Codes, Dot, DotTask, Field, LIFTED_BYTES, Lifted, Sink, dispatch};
use crate::simd::{Isa, LANES, Simd, filled, unrolled};

/// Sizes of groups; others are padded to the next. Every size is compiled for every form and set, so that formats that few
/// use have few.
const SLOTS: [usize; 6] = [1, 2, 3, 4, 6, MOST_SLOTS];
const FEW_SLOTS: [usize; 3] = [1, 4, MOST_SLOTS];
/// No set has registers for more sums than of 8 tokens.
pub(crate) const MOST_SLOTS: usize = 8;

/// What weights of a format ask of their activations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// Most tokens of a group.
    pub(crate) tokens: usize,
    /// Whether fields of half blocks are needed.
    pub(crate) halves: bool,
    /// Whether a group may have any of [`SLOTS`].
    common: bool,
    /// Whether [`Lift`] is worth its time where several groups of [`MOST_SLOTS`] tokens are multiplied.
    pub(crate) lifts: bool,
}

impl Needs {
    pub(crate) fn of(isa: Isa, format: BlockFormat) -> Self {
        with_form(format, FindNeeds(isa))
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            tokens: self.tokens.min(other.tokens),
            halves: self.halves || other.halves,
            common: self.common && other.common,
            lifts: self.lifts && other.lifts,
        }
    }

    /// Slots for a group of `tokens` tokens.
    pub(crate) fn slots(&self, tokens: usize) -> usize {
        let all = if self.common { &SLOTS[..] } else { &FEW_SLOTS };
        all.iter().copied().find(|&slots| slots >= tokens).unwrap_or(tokens)
    }
}

struct FindNeeds(Isa);

impl FormTask for FindNeeds {
    type Output = Needs;
    fn run<F: Form>(self) -> Needs {
        struct Set<F>(std::marker::PhantomData<F>);
        impl<F: Form> DotTask for Set<F> {
            type Output = Needs;
            #[inline(always)]
            fn run<D: Dot>(self) -> Needs {
                let lifts = const { lifts::<F, D>() };
                Needs { tokens: limit::<D>(), halves: F::HALVES, common: F::COMMON, lifts }
            }
        }
        dispatch(compiled::<F>(self.0), Set::<F>(std::marker::PhantomData))
    }
}

const fn limit<D: Dot>() -> usize {
    assert!(D::TOKENS <= MOST_SLOTS);
    D::TOKENS
}

/// Whether [`Lift`] is compiled.
const fn lifts<F: Form, D: Dot>() -> bool {
    D::LIFTS && F::C::BITS < 8
}

/// Panels of a tile of [`MOST_SLOTS`] tokens whose weights lie in the cache.
fn most_panels(isa: Isa) -> usize {
    struct Ask;
    impl DotTask for Ask {
        type Output = usize;
        #[inline(always)]
        fn run<D: Dot>(self) -> usize {
            D::PANELS
        }
    }
    dispatch(isa, Ask)
}

/// The set whose tiles are compiled for a form: few machines have AVX-512 without VNNI, and few weights other formats.
fn compiled<F: Form>(isa: Isa) -> Isa {
    if !F::COMMON && isa == Isa::Avx512 { Isa::Avx2 } else { isa }
}

/// Panels side by side over some records and one group of tokens.
pub(crate) struct Part<'a> {
    pub(crate) isa: Isa,
    pub(crate) ahead: Ahead,
    /// First record of the first panel.
    pub(crate) weight: *const u8,
    /// What [`Lift`] made of all codes; null for nothing.
    pub(crate) lifted: *const u8,
    /// What to ask for meanwhile, laid out like the weights; null for nothing, where one token reads one stream.
    pub(crate) next: *const u8,
    pub(crate) panel_bytes: usize,
    pub(crate) panels: usize,
    /// Whether the weights come from memory, once: then one stream at a time, where tokens are many.
    pub(crate) streamed: bool,
    pub(crate) records: usize,
    /// The group's activations at the first of these columns.
    pub(crate) x: *const u8,
    pub(crate) layout: ActivationLayout,
    /// Of the first panel.
    pub(crate) output: Output<'a>,
}

fn one_stream<F: Form>(ahead: Ahead) -> bool {
    !F::C::WIDE || ahead.bytes_in_one
}

/// Whether one token reads the panels of a format one by one: short records. Long ones are read side by side on some machines.
pub(crate) fn reads_one_stream(format: BlockFormat, ahead: Ahead) -> bool {
    struct Ask(Ahead);
    impl FormTask for Ask {
        type Output = bool;
        fn run<F: Form>(self) -> bool {
            one_stream::<F>(self.0)
        }
    }
    with_form(format, Ask(ahead))
}

impl FormTask for &Part<'_> {
    type Output = ();

    /// The caller promises records, activations and output rows as the fields say.
    fn run<F: Form>(self) {
        let slots = self.layout.slots;
        match slots {
            1 if one_stream::<F>(self.ahead) => return self.panels::<F, 1, 1>(),
            1 => return self.panels::<F, 4, 1>(),
            4 => return self.panels::<F, 2, 4>(),
            8 if const { F::C::BITS < 8 } && !self.lifted.is_null() => return self.tiles::<F, 1, 8, true>(),
            8 if !self.streamed && most_panels(self.isa) > 1 => return self.panels::<F, 2, 8>(),
            8 => return self.panels::<F, 1, 8>(),
            _ => (),
        }
        if const { F::COMMON } {
            match slots {
                2 => return self.panels::<F, 2, 2>(),
                3 => return self.panels::<F, 2, 3>(),
                6 => return self.panels::<F, 1, 6>(),
                _ => (),
            }
        }
        unreachable!("no group has {slots} slots")
    }
}

impl<'a> Part<'a> {
    fn panels<F: Form, const P: usize, const M: usize>(&self) {
        self.tiles::<F, P, M, false>();
    }

    /// Tiles of `P` panels; the last may reach past the end, where there is memory but no rows.
    fn tiles<F: Form, const P: usize, const M: usize, const LIFTED: bool>(&self) {
        const { assert!(PANEL_MULTIPLE.is_multiple_of(P)) };
        for done in (0..self.panels).step_by(P) {
            dispatch(
                compiled::<F>(self.isa),
                Tile::<F, P, M, LIFTED> { part: self, done, form: std::marker::PhantomData },
            );
        }
    }
}

/// Codes of some records of panels, lifted once for several groups of [`MOST_SLOTS`] tokens.
pub(crate) struct Lift {
    pub(crate) isa: Isa,
    pub(crate) weight: *const u8,
    pub(crate) panel_bytes: usize,
    pub(crate) panels: usize,
    pub(crate) records: usize,
    /// Room for [`LIFTED_BYTES`] per block of each panel.
    pub(crate) to: *mut u8,
}

impl FormTask for &Lift {
    type Output = ();

    /// The caller promises records and room as the fields say.
    fn run<F: Form>(self) {
        struct OfSet<'a, F>(&'a Lift, std::marker::PhantomData<F>);
        impl<F: Form> DotTask for OfSet<'_, F> {
            type Output = ();
            #[inline(always)]
            fn run<D: Dot>(self) {
                let lift = self.0;
                if const { !lifts::<F, D>() } {
                    unreachable!("nothing to lift");
                }
                let mut to = lift.to;
                for panel in 0..lift.panels {
                    for record in 0..lift.records {
                        let record = lift.weight.wrapping_add(panel * lift.panel_bytes + record * F::BYTES);
                        for block in 0..F::BLOCKS {
                            // SAFETY: who lifts promises the records and the room.
                            unsafe { D::lift::<F::C>(record.wrapping_add(F::codes_at(block)), to) };
                            to = to.wrapping_add(LIFTED_BYTES);
                        }
                    }
                }
            }
        }
        dispatch(compiled::<F>(self.isa), OfSet::<F>(self, std::marker::PhantomData));
    }
}

struct Tile<'a, F, const P: usize, const M: usize, const LIFTED: bool> {
    part: &'a Part<'a>,
    /// Panels before the tile.
    done: usize,
    form: std::marker::PhantomData<F>,
}

impl<F: Form, const P: usize, const M: usize, const LIFTED: bool> DotTask for Tile<'_, F, P, M, LIFTED> {
    type Output = ();

    #[inline(always)]
    fn run<D: Dot>(self) {
        if const {
            M > limit::<D>()
                || (M == MOST_SLOTS && P > D::PANELS)
                || (!F::COMMON && !D::EVERY_FORM)
                || (LIFTED && !lifts::<F, D>())
        } {
            unreachable!("this tile is not compiled");
        }
        let part = self.part;
        let output = part.output.skip(self.done * LANES);
        let mut w = part.weight.wrapping_add(self.done * part.panel_bytes);
        let lifted_panel = part.records * F::BLOCKS * LIFTED_BYTES;
        let mut lifted = part.lifted.wrapping_add(self.done * lifted_panel);
        let mut next = part.next.wrapping_add(self.done * part.panel_bytes);
        let mut x = part.x;
        let x_bytes = part.layout.block_bytes();
        // Only one stream may leave it to the machine, so that no other tile has to ask.
        let asks = !part.next.is_null();
        // SAFETY: who makes a part promises its records, activations and rows.
        unsafe {
            let mut acc = [[D::F::splat(0.0); M]; P];
            for (p, acc) in acc.iter_mut().enumerate() {
                output.resume::<D::F, M>(p, acc);
            }
            for _ in 0..part.records {
                for block in 0..F::BLOCKS {
                    let x_block = part.layout.block(x);
                    let records = filled!([w; P], p => w.wrapping_add(p * part.panel_bytes));
                    let codes = filled!([lifted; P], p => match LIFTED {
                        true => lifted.wrapping_add(p * lifted_panel),
                        false => records[p].wrapping_add(F::codes_at(block)),
                    });
                    block_of::<F, D, P, M, LIFTED>(records, codes, block, &x_block, &mut acc);
                    lifted = lifted.wrapping_add(LIFTED_BYTES);
                    let lines = if P * M > 1 || asks { (F::BYTES / F::BLOCKS).div_ceil(64) } else { 0 };
                    for p in 0..P {
                        let ahead = next.wrapping_add(p * part.panel_bytes + F::BYTES / F::BLOCKS * block);
                        for line in 0..lines {
                            D::F::prefetch(ahead.wrapping_add(64 * line));
                        }
                    }
                    x = x.wrapping_add(x_bytes);
                }
                w = w.wrapping_add(F::BYTES);
                next = next.wrapping_add(F::BYTES);
            }
            for (p, acc) in acc.into_iter().enumerate() {
                output.finish::<D::F, M>(p, acc);
            }
        }
    }
}

/// One block of each panel.
///
/// # Safety
/// All `records` are whole, their `codes` as `LIFTED` says, `x` holds `M` tokens.
#[inline(always)]
unsafe fn block_of<F: Form, D: Dot, const P: usize, const M: usize, const LIFTED: bool>(
    records: [*const u8; P],
    codes: [*const u8; P],
    block: usize,
    x: &Block,
    acc: &mut [[<D::F as Simd>::V; M]; P],
) {
    // SAFETY: the contract of this function.
    unsafe {
        let zero = [D::F::splat(0.0); 2];
        let scales = filled!([zero; P], p => F::scales::<D::F>(records[p], block));
        let mut sink = Scaled::<D::F, P, M> { acc, scales, x_scales: x.field::<M>(Field::Scale) };
        match (F::HALVES, LIFTED) {
            (true, true) => D::block::<Lifted<F::C>, P, M, true>(codes, x, &mut sink),
            (true, false) => D::block::<F::C, P, M, true>(codes, x, &mut sink),
            (false, true) => D::block::<Lifted<F::C>, P, M, false>(codes, x, &mut sink),
            (false, false) => D::block::<F::C, P, M, false>(codes, x, &mut sink),
        }
        if !F::MINIMA {
            return;
        }
        unrolled!(P, p, {
            let [low, high] = F::offsets::<D::F>(records[p], block);
            let acc = &mut acc[p];
            unrolled!(M, t, {
                let sum = |field| D::F::splat(*x.field::<M>(field).add(t));
                if F::HALVES {
                    acc[t] = D::F::fma(low, sum(Field::LowSum), acc[t]);
                    acc[t] = D::F::fma(high, sum(Field::HighSum), acc[t]);
                } else {
                    acc[t] = D::F::fma(low, sum(Field::Sum), acc[t]);
                }
            });
        });
    }
}

/// Step 2 of the chain.
struct Scaled<'a, S: Simd, const P: usize, const M: usize> {
    acc: &'a mut [[S::V; M]; P],
    scales: [[S::V; 2]; P],
    x_scales: *const f32,
}

impl<S: Simd, const P: usize, const M: usize> Sink<S::V> for Scaled<'_, S, P, M> {
    #[inline(always)]
    fn take(&mut self, panel: usize, token: usize, part: usize, sum: S::V) {
        // SAFETY: `block_of` passes the scales of `M` tokens.
        let x_scale = S::splat(unsafe { *self.x_scales.add(token) });
        let acc = &mut self.acc[panel][token];
        *acc = S::fma(sum, S::mul(self.scales[panel][part], x_scale), *acc);
    }
}
