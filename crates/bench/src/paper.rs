//! What the PdP paper measured, to stand beside our own figures.
//!
//! Source: the PdP paper's evaluation, its figure 12 and tables 1 to 3.

/// A figure of the paper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// As [`crate::sample::Sample::what`] of the experiment `pdp-paper`.
    pub what: &'static str,
    /// The paper's own words.
    pub series: &'static str,
    /// The parameter.
    pub x: f64,
    /// The value, in the unit of our own figures.
    pub value: f64,
}

const fn figure(what: &'static str, series: &'static str, x: f64, value: f64) -> Figure {
    Figure { what, series, x, value }
}

const TCP: &str = "figure 12: TCP goodput";
const REORDERED: &str = "tables 1 and 2: reordered packets";
const TRIP: &str = "table 3: round trip, median";

/// All of them.
pub const FIGURES: &[Figure] = &[
    figure(TCP, "kernel Click", 0.0, 860.0),
    figure(TCP, "PdP", 1.0, 369.0),
    figure(TCP, "PdP", 2.0, 565.0),
    figure(TCP, "PdP", 3.0, 763.0),
    figure(REORDERED, "PdP", 1.0, 0.31),
    figure(REORDERED, "PdP", 2.0, 10.19),
    figure(REORDERED, "PdP", 3.0, 13.02),
    figure(REORDERED, "PdP, engines of unequal power, round-robin", 3.0, 12.27),
    figure(REORDERED, "PdP, engines of unequal power, proportional", 3.0, 10.02),
    figure(TRIP, "user mode", 64.0, 208.0),
    figure(TRIP, "PdP", 64.0, 296.0),
    figure(TRIP, "kernel", 64.0, 132.0),
];
