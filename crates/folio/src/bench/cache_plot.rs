//! The plot of `folio bench cache`: share of blocks found over capacity (logarithmic), as SVG.
//!
//! Owns: the picture. Must never: compute a hit.

use std::fmt::Write as _;

use folio_sim::retention::Policy;

use super::cache::Row;
use crate::svg::{begin, text};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 460.0;
/// Left, right, top, bottom.
const MARGIN: (f64, f64, f64, f64) = (56.0, 130.0, 20.0, 50.0);
const COLOURS: [&str; Policy::ALL.len()] = ["#c0392b", "#2c3e50", "#7f8c8d", "#8e44ad", "#2980b9", "#27ae60"];
/// Dashes of Folio's curves with other formats of KV.
const DASHES: [&str; 4] = ["7 3", "2 3", "8 3 2 3", "1 5"];
/// Least distance of two names.
const LINE: f64 = 15.0;

struct Curve {
    name: String,
    colour: &'static str,
    dash: Option<&'static str>,
    /// Share found at each row's capacity, %.
    found: Vec<f64>,
}

/// `total`: blocks of all prompts.
pub(super) fn plot(rows: &[Row], total: f64) -> String {
    let mut rows: Vec<&Row> = rows.iter().collect();
    rows.sort_by_key(|row| row.blocks);
    let curves = curves(&rows, total);
    let most = curves.iter().flat_map(|curve| &curve.found).copied().fold(1.0, f64::max);
    let step = [1.0, 2.0, 5.0, 10.0, 20.0].into_iter().find(|step| most / step <= 8.0).unwrap_or(25.0);
    let top = (most / step).ceil() * step;
    let log = |blocks: u32| f64::from(blocks.max(1)).ln();
    let (first, last) = (log(rows[0].blocks), log(rows[rows.len() - 1].blocks));
    let (left, right, above, below) = MARGIN;
    let x = |blocks: u32| {
        let share = if last > first { (log(blocks) - first) / (last - first) } else { 0.5 };
        left + share * (WIDTH - left - right)
    };
    let y = |found: f64| HEIGHT - below - found / top * (HEIGHT - above - below);
    let mut out = begin(WIDTH, HEIGHT);
    for mark in 0..=(top / step).round() as u32 {
        let at = y(f64::from(mark) * step);
        let end = WIDTH - right;
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{end:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>"
        );
        text(&mut out, (left - 6.0, at + 4.0), "end", "black", &format!("{} %", f64::from(mark) * step));
    }
    for row in &rows {
        let label = crate::units::count(row.blocks.into());
        text(&mut out, (x(row.blocks), HEIGHT - below + 18.0), "middle", "black", &label);
    }
    let middle = (left + WIDTH - right) / 2.0;
    let unit = "blocks of the cache (memory of as many f16 blocks); blocks of prompts found in it";
    text(&mut out, (middle, HEIGHT - 8.0), "middle", "black", unit);
    for curve in &curves {
        let points = rows.iter().zip(&curve.found);
        let points: Vec<_> =
            points.map(|(row, found)| format!("{:.1},{:.1}", x(row.blocks), y(*found))).collect();
        let dash = curve.dash.map_or(String::new(), |dash| format!(" stroke-dasharray=\"{dash}\""));
        let (points, colour) = (points.join(" "), curve.colour);
        let _ = writeln!(
            out,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>"
        );
    }
    names(&mut out, &curves, y);
    out.push_str("</svg>\n");
    out
}

fn curves(rows: &[&Row], total: f64) -> Vec<Curve> {
    let policies = Policy::ALL.into_iter().zip(COLOURS).map(|(policy, colour)| Curve {
        name: policy.name().to_owned(),
        colour,
        dash: None,
        found: rows.iter().map(|row| 100.0 * row.of(policy) / total).collect(),
    });
    // f16 is Folio's curve itself.
    let formats = rows.first().map(|row| row.formats.len()).unwrap_or_default();
    let formats = (0..formats).filter(|i| rows[0].formats[*i].format.name() != "f16").map(|i| Curve {
        name: format!("Folio, {}", rows[0].formats[i].format.name()),
        colour: COLOURS[0],
        dash: Some(DASHES[i % DASHES.len()]),
        found: rows.iter().map(|row| 100.0 * row.formats[i].hits as f64 / total).collect(),
    });
    policies.chain(formats).collect()
}

/// At the right, in the order of the curves' ends and never over one another; a short line in the curve's own manner
/// before each.
fn names(out: &mut String, curves: &[Curve], y: impl Fn(f64) -> f64) {
    let (_, right, above, below) = MARGIN;
    let mut order: Vec<&Curve> = curves.iter().collect();
    let end = |curve: &Curve| y(curve.found.last().copied().unwrap_or_default());
    order.sort_by(|a, b| end(a).total_cmp(&end(b)));
    // As low as they have to be, but never below the plot.
    let lowest = HEIGHT - below;
    let mut free = above;
    for (i, curve) in order.iter().enumerate() {
        let room = lowest - LINE * (order.len() - i - 1) as f64;
        let at = end(curve).max(free).min(room);
        free = at + LINE;
        let (from, to, colour) = (WIDTH - right + 8.0, WIDTH - right + 30.0, curve.colour);
        let dash = curve.dash.map_or(String::new(), |dash| format!(" stroke-dasharray=\"{dash}\""));
        let _ = writeln!(
            out,
            "<line x1=\"{from:.1}\" y1=\"{at:.1}\" x2=\"{to:.1}\" y2=\"{at:.1}\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>"
        );
        text(out, (to + 5.0, at + 4.0), "start", colour, &curve.name);
    }
}

#[cfg(test)]
mod tests {
    use super::super::cache::tests::rows;
    use super::*;

    #[test]
    fn the_plot_has_a_curve_and_a_name_for_each_policy_and_format() {
        let svg = plot(&rows(), 100.0);
        assert_eq!(svg.matches("<polyline").count(), Policy::ALL.len() + 1);
        assert!(Policy::ALL.iter().all(|policy| svg.contains(&format!(">{}<", policy.name()))));
        assert!(svg.contains(">Folio, int4<"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
