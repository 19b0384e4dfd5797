//! The plot of `folio plan`: time to the first token and per token after it, over the rate, as SVG.
//!
//! Owns: the picture. Must never: compute a figure.

use std::fmt::Write as _;

use super::load::{Case, LoadPoint};
use crate::svg::{begin, text};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 560.0;
/// Of the two panels, beside each other from top to bottom.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 150.0;
const PANEL: f64 = 200.0;
const TOPS: [f64; 2] = [40.0, 300.0];
/// One end, or the slow and the fast end.
const COLOURS: [&str; 2] = ["#c0392b", "#2980b9"];

/// `title`: the model and the machine.
pub fn plot(title: &str, cases: &[Case]) -> String {
    let mut out = begin(WIDTH, HEIGHT);
    text(&mut out, (LEFT, 20.0), "start", "black", title);
    let points = || cases.iter().flat_map(|case| &case.points);
    let most = points().map(|point| point.requests_per_s).fold(f64::MIN_POSITIVE, f64::max) * 1.05;
    let x = |rate: f64| LEFT + rate / most * (WIDTH - LEFT - RIGHT);
    type Value = fn(&LoadPoint) -> f64;
    let panels: [(&str, Value); 2] = [
        ("time to first token, s (median)", |point| point.ttft_s.p50),
        ("time per token, ms (median)", |point| 1e3 * point.tpot_s.p50),
    ];
    for ((name, value), top) in panels.into_iter().zip(TOPS) {
        panel(&mut out, cases, (name, top), &x, value);
    }
    for mark in 0..=4 {
        let rate = most * f64::from(mark) / 4.0;
        text(&mut out, (x(rate), TOPS[1] + PANEL + 18.0), "middle", "black", &format!("{rate:.2}"));
    }
    text(&mut out, ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 12.0), "middle", "black", "requests a second");
    out.push_str("</svg>\n");
    out
}

fn panel(
    out: &mut String,
    cases: &[Case],
    (name, top): (&str, f64),
    x: &impl Fn(f64) -> f64,
    value: fn(&LoadPoint) -> f64,
) {
    let values = || cases.iter().flat_map(|case| &case.points).map(value).filter(|value| *value > 0.0);
    // Whole powers of ten around all of them.
    let least = values().fold(f64::MAX, f64::min).log10().floor();
    let decades = (values().fold(f64::MIN_POSITIVE, f64::max).log10().ceil() - least).clamp(1.0, 12.0);
    let y = |value: f64| {
        let share = (value.max(f64::MIN_POSITIVE).log10() - least) / decades;
        top + PANEL * (1.0 - share.clamp(0.0, 1.0))
    };
    text(out, (LEFT, top - 6.0), "start", "#555", name);
    for decade in 0..=decades as i32 {
        let value = 10f64.powf(least + f64::from(decade));
        let (at, end) = (y(value), WIDTH - RIGHT);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{end:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>"
        );
        text(out, (LEFT - 6.0, at + 4.0), "end", "black", &format!("{value}"));
    }
    for (index, (case, colour)) in cases.iter().zip(COLOURS).enumerate() {
        let mut points: Vec<&LoadPoint> = case.points.iter().collect();
        points.sort_by(|one, other| one.requests_per_s.total_cmp(&other.requests_per_s));
        let places: Vec<String> =
            points.iter().map(|of| format!("{:.1},{:.1}", x(of.requests_per_s), y(value(of)))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            places.join(" ")
        );
        let (knee, bottom) = (x(case.knee_per_s), top + PANEL);
        let _ = writeln!(
            out,
            "<line x1=\"{knee:.1}\" y1=\"{top}\" x2=\"{knee:.1}\" y2=\"{bottom}\" stroke=\"{colour}\" stroke-dasharray=\"4 4\"/>"
        );
        let name = match case.share_of_limits {
            Some(share) => format!("{:.0} % of its limits", 100.0 * share),
            None => "as measured".to_owned(),
        };
        text(out, (WIDTH - RIGHT + 8.0, top + 16.0 * (index + 1) as f64), "start", colour, &name);
    }
    text(out, (WIDTH - RIGHT + 8.0, top + 48.0), "start", "#555", "dashed: the knee");
}
