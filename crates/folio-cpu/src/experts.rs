//! A mixture of experts: which rows each expert speaks for, its two products for those rows, and the sum of what a row's experts
//! say.
//!
//! Owns: the choice of experts, the order of rows by expert, and the memory for what lies between. Must never: let a row see
//! which other rows chose the same expert.
//!
//! Rows of one expert are gathered, so its weights are read once a step; a product of some rows has the bits of a product of
//! each (`linear`), and a row adds up its experts in the order of its own logits. So its bits are its own.
//!
//! Workers share the choosing by rows, and then wait. From what was chosen each finds the order by itself: that is a pass over
//! the choices, which is quicker than waiting again. The products of all experts are one piece of work, handed out in rows of
//! their matrices, expert after expert. Cost: three waits, and one more for each product that has too many rows for workers to pack
//! them for themselves.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use folio_model::program::{ExpertGroups, ExpertsSpec, Op, Program, Routing};

use crate::ahead::Ahead;
use crate::error::CpuError;
use crate::groups::{Groups, Source};
use crate::linear::{BLOCK_ROWS, Linear, TILE_ROWS, Then};
use crate::memory::{Floats, Rows};
use crate::packed::PackedMatrix;
use crate::pool::{Claims, Split, Worker};
use crate::simd::{Isa, LANES, Simd, Task, dispatch, exp};
use crate::step::Step;

/// Where packed activations of an expert start, in bytes.
const ALIGNED: usize = 64;
/// Values of a row that are added up at a time.
const TOGETHER: usize = 64;

/// Memory for the mixtures of a program, sized once.
pub(crate) struct ExpertBuffers {
    /// Per row: the weights of its experts, then their numbers as bits.
    routes: Floats,
    /// One per worker, who alone locks it.
    orders: Vec<Mutex<Order>>,
    /// Gated values of every row and expert of it.
    inner: Floats,
    /// What comes of them.
    outs: Floats,
}

/// Rows of a step by expert.
#[derive(Default)]
struct Order {
    /// Of each expert, the first of its places; then the number of places.
    starts: Vec<usize>,
    /// The row of each place, ascending within an expert.
    rows: Vec<u32>,
    /// The place of each row and choice.
    places: Vec<usize>,
    /// Experts that somebody chose.
    active: Vec<usize>,
    /// Per expert: places that are filled, then where its packed activations are.
    at: Vec<usize>,
}

impl ExpertBuffers {
    /// For steps of at most `max_rows` rows.
    pub(crate) fn new(program: &Program, max_rows: usize, workers: usize) -> Result<Self, CpuError> {
        let most = |values: fn(&ExpertsSpec) -> usize| program.experts.iter().map(values).max().unwrap_or(0);
        let (chosen, count) = (most(|spec| spec.chosen), most(|spec| spec.count));
        let width = program.body.iter().filter_map(|op| match op {
            Op::Experts { out, .. } => Some(program.buffers[out.0 as usize]),
            _ => None,
        });
        let width = width.max().unwrap_or(0);
        let values = |width: usize| max_rows * chosen * width.next_multiple_of(LANES);
        let order = || Order {
            starts: Vec::with_capacity(count + 1),
            rows: Vec::with_capacity(max_rows * chosen),
            places: Vec::with_capacity(max_rows * chosen),
            active: Vec::with_capacity(count),
            at: Vec::with_capacity(count),
        };
        Ok(Self {
            routes: Floats::dense(max_rows, 2 * chosen)?,
            orders: (0..workers).map(|_| Mutex::new(order())).collect(),
            inner: Floats::dense(1, values(most(|spec| spec.inner)))?,
            outs: Floats::dense(1, values(width))?,
        })
    }
}

/// Most bytes that the packed activations of a product take, when `max_rows` rows choose experts of `spec`.
pub(crate) fn packed_bytes(weight: &PackedMatrix, isa: Isa, max_rows: usize, spec: &ExpertsSpec) -> usize {
    let of_a_row = |rows: usize| Groups::new(weight, isa, rows).bytes().div_ceil(rows);
    let most = (1..=max_rows).map(of_a_row).max().unwrap_or(0);
    max_rows * spec.chosen * most + spec.count * ALIGNED
}

/// What [`Op::Experts`](folio_model::program::Op::Experts) works on.
#[derive(Clone, Copy)]
pub(crate) struct Mixture<'a> {
    pub(crate) spec: &'a ExpertsSpec,
    pub(crate) x: Rows,
    pub(crate) logits: Rows,
    pub(crate) out: Rows,
    pub(crate) add: bool,
}

/// One product of all experts.
struct Products<'a> {
    weight: &'a PackedMatrix,
    bias: Option<&'a [f32]>,
    then: Then,
    /// Outputs of an expert.
    outputs: usize,
    x: Rows,
    /// `x` has the rows of the step, and not those of the places.
    gathered: bool,
    out: Rows,
}

impl Step<'_> {
    /// Every worker calls this, with two claims that start over.
    pub(crate) fn experts(&self, worker: &Worker<'_>, mixture: Mixture<'_>, claims: &[Claims]) {
        let Mixture { spec, x, logits, out, .. } = mixture;
        let memory = &self.buffers.experts;
        let routes = memory.routes.part(0, 2 * spec.chosen, 2 * spec.chosen);
        for row in worker.share(self.rows(), 1) {
            let [bias, scales] = [spec.choice_bias, spec.scales].map(|id| id.map(|id| self.vector(id)));
            dispatch(self.isa, Route { spec, bias, scales, logits: logits.row(row), route: routes.row(row) });
        }
        worker.barrier();
        let mut order = memory.orders[worker.index()].lock().unwrap_or_else(PoisonError::into_inner);
        order.fill(spec, routes, self.rows());
        let view = |memory: &Floats, width: usize| memory.part(0, width, width.next_multiple_of(LANES));
        let (inner, outs) = (view(&memory.inner, spec.inner), view(&memory.outs, out.width));
        let gate_up = Products {
            weight: self.matrix(spec.gate_up),
            bias: spec.gate_up_bias.map(|id| self.vector(id)),
            then: Then::Gate(spec.activation),
            outputs: spec.inner,
            x,
            gathered: false,
            out: inner,
        };
        let down = Products {
            weight: self.matrix(spec.down),
            bias: spec.down_bias.map(|id| self.vector(id)),
            then: Then::Store,
            outputs: out.width,
            x: inner,
            gathered: true,
            out: outs,
        };
        for (products, claims) in [gate_up, down].iter().zip(claims) {
            self.products(worker, products, &mut order, claims);
            worker.barrier();
        }
        for row in worker.share(self.rows(), 1) {
            // SAFETY: the products are done since the barrier; the row of `out` is this worker's.
            unsafe { sum(mixture, row, routes.row(row), outs, &order.places) };
        }
    }

    fn products(&self, worker: &Worker<'_>, products: &Products<'_>, order: &mut Order, claims: &Claims) {
        let &Products { weight, bias, then, outputs, x, gathered, out } = products;
        let Order { starts, rows, active, at, .. } = order;
        let scratch = self.buffers.scratch[worker.index()].view();
        let packed = self.buffers.packed.ptr();
        let of = |expert: usize| {
            let places = starts[expert]..starts[expert + 1];
            let groups = Groups::new(weight, self.isa, places.len());
            let source = match gathered {
                true => Source { rows: x.from(places.start), picked: None, norm: None },
                false => Source { rows: x, picked: Some(&rows[places]), norm: None },
            };
            (groups, source)
        };
        let alone = active.iter().all(|expert| {
            let (groups, source) = of(*expert);
            groups.packed_already(&source) || groups.packed_alone(scratch.width * 4)
        });
        if !alone {
            let mut next = 0;
            for &expert in &*active {
                let (groups, source) = of(expert);
                // SAFETY: the buffer is sized for all experts of most rows (`packed_bytes`); every worker is here, between two
                // barriers, with a share of its own.
                unsafe { groups.pack(self.isa, worker.split(), &source, packed.wrapping_add(next)) };
                at[expert] = next;
                next += groups.bytes().next_multiple_of(ALIGNED);
            }
            worker.barrier();
        }
        let prepare = |expert: usize| {
            let (groups, source) = of(expert);
            let x = if !alone {
                packed.wrapping_add(at[expert]).cast_const()
            } else if groups.packed_already(&source) {
                source.row(0).cast()
            } else {
                let to = scratch.row(0).cast();
                // SAFETY: it fits the scratch, which is this worker's and which a product of one group leaves alone.
                unsafe { groups.pack(self.isa, Split::WHOLE, &source, to) };
                to.cast_const()
            };
            Linear {
                isa: self.isa,
                ahead: Ahead::here(),
                weight,
                bias,
                x,
                groups,
                out: out.from(starts[expert]),
                then,
                deltas: None,
            }
        };
        // Whole tiles of each expert, so that claims are cut where tiles are.
        let padded = outputs.next_multiple_of(TILE_ROWS);
        let mut current = None;
        while let Some(claim) =
            claims.next_shrinking(active.len() * padded, TILE_ROWS..BLOCK_ROWS, worker.count())
        {
            for (number, range) in pieces(claim, padded) {
                let expert = active[number];
                let (_, linear) = match current {
                    Some((of, linear)) if of == expert => (of, linear),
                    _ => (expert, prepare(expert)),
                };
                current = Some((expert, linear));
                let first = expert * outputs;
                let range = first + range.start..first + range.end.min(outputs);
                // SAFETY: packed with the same `isa`; widths were checked with the program, and places are below the most rows
                // times their experts; the scratch is this worker's; the claim gives it these outputs.
                unsafe { linear.outputs(range, first, scratch.row(0)) };
            }
        }
    }
}

/// A range cut at multiples of `size`: number of the multiple, and range inside it.
pub(crate) fn pieces(range: Range<usize>, size: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    (range.start / size..range.end.div_ceil(size)).map(move |number| {
        let first = number * size;
        (number, range.start.max(first) - first..range.end.min(first + size) - first)
    })
}

/// Chooses the experts of a row.
struct Route<'a> {
    spec: &'a ExpertsSpec,
    /// [`ExpertsSpec::choice_bias`].
    bias: Option<&'a [f32]>,
    /// [`ExpertsSpec::scales`].
    scales: Option<&'a [f32]>,
    /// Become scores.
    logits: *mut f32,
    /// Weights, then numbers as bits.
    route: *mut f32,
}

impl Task for Route<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let &ExpertsSpec { count, chosen, routing, .. } = self.spec;
        // SAFETY: who makes the task promises `count` logits and `2 * chosen` values of a route, all its own.
        let (scores, route) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.logits, count),
                std::slice::from_raw_parts_mut(self.route, 2 * chosen),
            )
        };
        match routing {
            Routing::Sigmoid | Routing::SigmoidAmongChosen => sigmoids::<S>(scores),
            Routing::SharesAmongChosen => {
                let sum = exps_in_place::<S>(scores, largest(scores));
                scores.iter_mut().for_each(|score| *score /= sum);
            }
            Routing::AmongChosen | Routing::AmongAll => {}
        }
        let (values, numbers) = route.split_at_mut(chosen);
        self.choose(scores, values, numbers);
        for (value, number) in values.iter_mut().zip(&*numbers) {
            *value = scores[number.to_bits() as usize];
        }
        let sum = match routing {
            Routing::AmongAll => {
                let max = largest(scores);
                let sum = exps::<S>(scores, max, &mut []);
                exps_in_place::<S>(values, max);
                sum
            }
            Routing::AmongChosen => exps_in_place::<S>(values, largest(values)),
            Routing::Sigmoid => 1.0,
            Routing::SigmoidAmongChosen => {
                values.iter().fold(0.0, |sum, value| sum + value) + self.spec.sum_eps
            }
            Routing::SharesAmongChosen => values.iter().fold(0.0, |sum, value| sum + value),
        };
        values.iter_mut().for_each(|value| *value = *value / sum * self.spec.scale);
        if let Some(scales) = self.scales {
            for (value, number) in values.iter_mut().zip(numbers) {
                *value *= scales[number.to_bits() as usize];
            }
        }
    }
}

impl Route<'_> {
    /// Fills `numbers` with the experts of the largest scores, and `values` with those, the bias added.
    #[inline(always)]
    fn choose(&self, scores: &[f32], values: &mut [f32], numbers: &mut [f32]) {
        let chosen = values.len();
        let score = |number: usize| match self.bias {
            Some(bias) => scores[number] + bias[number],
            None => scores[number],
        };
        let kept = self.spec.groups.map(|groups| {
            let each = scores.len() / groups.count;
            (each, kept_groups(groups, each, score))
        });
        // The best so far, in order; of equal ones the first stays before the second.
        let mut held = 0;
        for number in 0..scores.len() {
            if kept.is_some_and(|(each, kept)| kept >> (number / each) & 1 == 0) {
                continue;
            }
            let (score, mut place) = (score(number), held);
            while place > 0 && score > values[place - 1] {
                place -= 1;
            }
            if place == chosen {
                continue;
            }
            held = chosen.min(held + 1);
            values.copy_within(place..held - 1, place + 1);
            numbers.copy_within(place..held - 1, place + 1);
            values[place] = score;
            numbers[place] = f32::from_bits(number as u32);
        }
    }
}

/// A bit for each group that is kept: those before which fewer than `kept` come.
#[inline(always)]
fn kept_groups(groups: ExpertGroups, each: usize, score: impl Fn(usize) -> f32) -> u64 {
    let mut of_groups = [0.0; ExpertGroups::MOST];
    let of_groups = &mut of_groups[..groups.count];
    for (group, of_group) in of_groups.iter_mut().enumerate() {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for number in group * each..(group + 1) * each {
            let score = score(number);
            if score > first {
                (first, second) = (score, first);
            } else if score > second {
                second = score;
            }
        }
        *of_group = if groups.by_two { first + second } else { first };
    }
    let mut bits = 0;
    for (group, own) in of_groups.iter().enumerate() {
        let ahead = |(other, score): (usize, &f32)| score > own || (score == own && other < group);
        let before = of_groups.iter().enumerate().filter(|other| ahead(*other)).count();
        bits |= u64::from(before < groups.kept) << group;
    }
    bits
}

/// Not a number, if the first is none.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    x[1..].iter().fold(x[0], |max, x| if *x > max { *x } else { max })
}

/// `x = 1 / (1 + e^-x)`
#[inline(always)]
fn sigmoids<S: Simd>(x: &mut [f32]) {
    let one = S::splat(1.0);
    for x in x.chunks_mut(LANES) {
        // SAFETY: the chunk has as many values as it is long.
        unsafe {
            let v = S::sub(S::splat(0.0), S::load_part(x.as_ptr(), x.len()));
            S::store_part(x.as_mut_ptr(), x.len(), S::div(one, S::add(one, exp::<S>(v))));
        }
    }
}

/// `x = e^(x - max)`, and their sum, each added after the one before.
#[inline(always)]
fn exps_in_place<S: Simd>(x: &mut [f32], max: f32) -> f32 {
    let mut largest = [0.0; LANES];
    let mut sum = 0.0;
    for values in x.chunks_mut(LANES) {
        let part = &mut largest[..values.len()];
        part.copy_from_slice(values);
        sum += exps::<S>(part, max, values);
    }
    sum
}

/// The sum of `e^(x - max)`, each added after the one before; and the first of them to `out`.
#[inline(always)]
fn exps<S: Simd>(x: &[f32], max: f32, out: &mut [f32]) -> f32 {
    let (mut sum, mut lanes) = (0.0, [0.0; LANES]);
    for (i, x) in x.chunks(LANES).enumerate() {
        // SAFETY: the chunk has as many values as it is long, the lanes are a vector's.
        unsafe {
            let v = S::sub(S::load_part(x.as_ptr(), x.len()), S::splat(max));
            S::store(lanes.as_mut_ptr(), exp::<S>(v));
        }
        lanes[..x.len()].iter().for_each(|value| sum += value);
        if let Some(out) = out.get_mut(i * LANES..) {
            let count = out.len().min(x.len());
            out[..count].copy_from_slice(&lanes[..count]);
        }
    }
    sum
}

impl Order {
    /// From the routes of `rows` rows. Allocates nothing: there is room.
    fn fill(&mut self, spec: &ExpertsSpec, routes: Rows, rows: usize) {
        let &ExpertsSpec { count, chosen, .. } = spec;
        let expert = |choice: usize| {
            // SAFETY: every route was written before a barrier, and nobody writes one until the next step of the program.
            unsafe { (*routes.row(choice / chosen).add(chosen + choice % chosen)).to_bits() as usize }
        };
        let choices = rows * chosen;
        self.starts.clear();
        self.starts.resize(count + 1, 0);
        for choice in 0..choices {
            self.starts[expert(choice) + 1] += 1;
        }
        self.active.clear();
        self.active.extend((0..count).filter(|expert| self.starts[expert + 1] > 0));
        for expert in 0..count {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.at.clear();
        self.at.extend_from_slice(&self.starts[..count]);
        self.rows.resize(choices, 0);
        self.places.resize(choices, 0);
        for choice in 0..choices {
            let next = &mut self.at[expert(choice)];
            self.rows[*next] = (choice / chosen) as u32;
            self.places[choice] = *next;
            *next += 1;
        }
    }
}

/// Adds up what the experts of a row say, in their order.
///
/// # Safety
/// The route and its places in `outs` are not written by others, and `row` of the output is the caller's.
unsafe fn sum(mixture: Mixture<'_>, row: usize, route: *const f32, outs: Rows, places: &[usize]) {
    let chosen = mixture.spec.chosen;
    let width = mixture.out.width;
    // SAFETY: the contract of this function.
    let (weights, out) = unsafe {
        (
            std::slice::from_raw_parts(route, chosen),
            std::slice::from_raw_parts_mut(mixture.out.row(row), width),
        )
    };
    let places = &places[row * chosen..(row + 1) * chosen];
    for (i, out) in out.chunks_mut(TOGETHER).enumerate() {
        let mut sums = [0.0; TOGETHER];
        for (weight, &place) in weights.iter().zip(places) {
            // SAFETY: the contract of this function; the place's row is as wide.
            let values = unsafe {
                std::slice::from_raw_parts(outs.row(place).add(i * TOGETHER).cast_const(), out.len())
            };
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = if mixture.add { *out + sum } else { sum };
        }
    }
}

#[cfg(test)]
mod tests {
    use folio_model::program::{Activation, MatrixId};

    use super::*;

    fn spec(count: usize, chosen: usize, routing: Routing) -> ExpertsSpec {
        ExpertsSpec {
            count,
            chosen,
            routing,
            choice_bias: None,
            groups: None,
            sum_eps: 0.0,
            scale: 1.0,
            scales: None,
            inner: 1,
            activation: Activation::Silu,
            gate_up: MatrixId(0),
            gate_up_bias: None,
            down: MatrixId(0),
            down_bias: None,
        }
    }

    /// Where a test has any.
    const SCALES: [f32; 4] = [0.5, 3.0, 1.0, -2.0];

    /// Numbers and weights.
    fn route(isa: Isa, spec: &ExpertsSpec, logits: &[f32]) -> (Vec<usize>, Vec<f32>) {
        biased(isa, spec, logits, None)
    }

    fn biased(isa: Isa, spec: &ExpertsSpec, logits: &[f32], bias: Option<&[f32]>) -> (Vec<usize>, Vec<f32>) {
        let (mut logits, mut route) = (logits.to_vec(), vec![f32::NAN; 2 * spec.chosen]);
        let scales = spec.scales.map(|_| &SCALES[..]);
        dispatch(isa, Route { spec, bias, scales, logits: logits.as_mut_ptr(), route: route.as_mut_ptr() });
        let numbers = route[spec.chosen..].iter().map(|number| number.to_bits() as usize).collect();
        (numbers, route[..spec.chosen].to_vec())
    }

    #[test]
    fn the_largest_are_chosen_and_of_equal_ones_the_first() {
        let logits = [1.0, 3.0, 1.0, 3.0, -2.0];
        for (chosen, wanted) in [(1, &[1][..]), (2, &[1, 3]), (3, &[1, 3, 0]), (5, &[1, 3, 0, 2, 4])] {
            assert_eq!(route(Isa::Scalar, &spec(5, chosen, Routing::AmongChosen), &logits).0, wanted);
        }
    }

    #[test]
    fn weights_are_right_and_the_same_everywhere() {
        for (count, chosen) in [(6, 2), (32, 4), (128, 8), (70, 20)] {
            let logits: Vec<f32> = (0..count).map(|i| ((i * 7919 + 13) % 101) as f32 / 20.0).collect();
            for routing in [Routing::AmongChosen, Routing::AmongAll] {
                let spec = spec(count, chosen, routing);
                let (numbers, weights) = route(Isa::Scalar, &spec, &logits);
                let mut sorted: Vec<usize> = (0..count).collect();
                sorted.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
                assert_eq!(numbers, sorted[..chosen]);
                let exp = |i: &usize| f64::from(logits[*i]).exp();
                let among = if routing == Routing::AmongAll { &sorted[..] } else { &sorted[..chosen] };
                let total: f64 = among.iter().map(exp).sum();
                for (number, weight) in numbers.iter().zip(&weights) {
                    assert!((f64::from(*weight) - exp(number) / total).abs() < 1e-6, "{routing:?}");
                }
                for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                    let bits = |weights: &[f32]| weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&route(isa, &spec, &logits).1), bits(&weights), "{isa:?}");
                }
            }
        }
    }

    #[test]
    fn sigmoids_and_biases_choose_and_only_sigmoids_weigh() {
        let logits = [0.5f32, -1.0, 2.0, 0.25];
        let bias = [0.0, 1.0, -1.0, 0.0];
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        for (routing, divided) in [(Routing::Sigmoid, false), (Routing::SigmoidAmongChosen, true)] {
            let spec = ExpertsSpec { scale: 2.5, ..spec(4, 2, routing) };
            // 0.62, 0.27 + 1, 0.88 - 1, 0.56
            let (numbers, weights) = biased(Isa::Scalar, &spec, &logits, Some(&bias));
            assert_eq!(numbers, [1, 0]);
            let scores = [sigmoid(-1.0), sigmoid(0.5)];
            let by = 2.5 / if divided { scores[0] + scores[1] } else { 1.0 };
            assert!(weights.iter().zip(scores).all(|(w, s)| (w - s * by).abs() < 1e-6), "{weights:?}");
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                assert_eq!(biased(isa, &spec, &logits, Some(&bias)), (numbers.clone(), weights.clone()));
            }
        }
    }

    #[test]
    fn shares_and_biases_choose_and_only_shares_weigh() {
        let logits = [0.5f32, -1.0, 2.0, 0.25];
        let bias = [0.0, 1.0, -1.0, 0.25];
        let spec = spec(4, 2, Routing::SharesAmongChosen);
        // Shares 0.15, 0.03, 0.69, 0.12.
        let (numbers, weights) = biased(Isa::Scalar, &spec, &logits, Some(&bias));
        assert_eq!(numbers, [1, 3]);
        let [a, b] = [(-1.0f32).exp(), 0.25f32.exp()];
        assert!((weights[0] - a / (a + b)).abs() < 1e-6 && (weights[1] - b / (a + b)).abs() < 1e-6);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            assert_eq!(biased(isa, &spec, &logits, Some(&bias)), (numbers.clone(), weights.clone()));
        }
    }

    #[test]
    fn what_is_added_to_the_sum_of_sigmoids_lowers_weights() {
        let spec = ExpertsSpec { sum_eps: 1.0, ..spec(2, 2, Routing::SigmoidAmongChosen) };
        let (_, weights) = route(Isa::Scalar, &spec, &[0.0, 0.0]);
        assert_eq!(weights, [0.25, 0.25]);
    }

    #[test]
    fn weights_are_multiplied_by_what_their_expert_has() {
        use folio_model::program::VectorId;
        let plain = spec(4, 2, Routing::AmongChosen);
        let scaled = ExpertsSpec { scales: Some(VectorId(0)), ..plain.clone() };
        let logits = [0.0, 2.0, -1.0, 1.0];
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let (numbers, weights) = route(isa, &plain, &logits);
            assert_eq!(numbers, [1, 3]);
            assert_eq!(route(isa, &scaled, &logits), (numbers, vec![3.0 * weights[0], -2.0 * weights[1]]));
        }
    }

    /// The best expert of a group that is dropped is not chosen, nor is one of it sooner than those of a kept group below zero.
    #[test]
    fn experts_of_dropped_groups_are_never_chosen() {
        let groups = |by_two| Some(ExpertGroups { count: 3, kept: 1, by_two });
        let logits = [9.0f32, -9.0, 3.0, 3.5, 1.0, 1.0];
        let spec = |by_two| ExpertsSpec { groups: groups(by_two), ..spec(6, 2, Routing::AmongAll) };
        assert_eq!(route(Isa::Scalar, &spec(false), &logits).0, [0, 1]);
        assert_eq!(route(Isa::Scalar, &spec(true), &logits).0, [3, 2]);
        // Groups and experts that are equal: the first.
        assert_eq!(route(Isa::Scalar, &spec(true), &[1.0; 6]).0, [0, 1]);
        let sigmoid = ExpertsSpec { routing: Routing::Sigmoid, ..spec(true) };
        let bias = [-5.0, -5.0, -3.0, -4.0, -9.0, -1.0];
        assert_eq!(biased(Isa::Scalar, &sigmoid, &[0.0; 6], Some(&bias)).0, [2, 3]);
    }

    #[test]
    fn every_choice_has_a_place_among_those_of_its_expert() {
        let spec = spec(4, 2, Routing::AmongChosen);
        let chosen = [[2, 0], [0, 3], [2, 3]];
        let routes = Floats::dense(3, 4).expect("memory");
        for (row, chosen) in chosen.iter().enumerate() {
            for (slot, expert) in chosen.iter().enumerate() {
                // SAFETY: inside the row.
                unsafe { *routes.view().row(row).add(2 + slot) = f32::from_bits(*expert) };
            }
        }
        let mut order = Order::default();
        order.fill(&spec, routes.view(), 3);
        assert_eq!(order.starts, [0, 2, 2, 4, 6]);
        assert_eq!(order.active, [0, 2, 3]);
        assert_eq!(order.rows, [0, 1, 0, 2, 1, 2]);
        assert_eq!(order.places, [2, 0, 1, 4, 3, 5]);
        order.fill(&spec, routes.view(), 1);
        assert_eq!(
            (&order.active[..], &order.rows[..], &order.places[..]),
            (&[0, 2][..], &[0, 0][..], &[1, 0][..])
        );
    }

    #[test]
    fn ranges_are_cut_at_multiples() {
        let cut: Vec<_> = pieces(3..21, 8).collect();
        assert_eq!(cut, [(0, 3..8), (1, 0..8), (2, 0..5)]);
        assert_eq!(pieces(8..16, 8).collect::<Vec<_>>(), [(1, 0..8)]);
    }
}
