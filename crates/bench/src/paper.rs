//! Measurements of papers, to show beside our own figures.
//!
//! Sources: the PdP paper's evaluation, its figure 12 and tables 1 to 3; Turner et al.,
//! "Supercharging PlanetLab", SIGCOMM 2007, where its text has numbers (section 5 for figure 5,
//! section 7.1 for the others).

/// A figure of the paper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaperFigure {
    /// Kind of the figure, as [`crate::sample::FigureSample::what`].
    pub what: &'static str,
    /// Series, in the paper's words.
    pub series: &'static str,
    /// The parameter.
    pub x: f64,
    /// The value, in the unit of our own figures.
    pub value: f64,
}

const fn figure(what: &'static str, series: &'static str, x: f64, value: f64) -> PaperFigure {
    PaperFigure { what, series, x, value }
}

const TCP: &str = "figure 12: TCP goodput";
const REORDERED: &str = "tables 1 and 2: reordered packets";
const TRIP: &str = "table 3: round trip, median";

/// Figures of the paper whose evaluation an experiment repeats.
pub fn figures(experiment: &str) -> &'static [PaperFigure] {
    match experiment {
        "pdp-paper" => PDP,
        "spp" => SPP,
        _ => &[],
    }
}

const PDP: &[PaperFigure] = &[
    figure(TCP, "kernel Click", 0.0, 860.0),
    figure(TCP, "PdP", 1.0, 369.0),
    figure(TCP, "PdP", 2.0, 565.0),
    figure(TCP, "PdP", 3.0, 763.0),
    figure(REORDERED, "PdP", 1.0, 0.31),
    figure(REORDERED, "PdP", 2.0, 10.19),
    figure(REORDERED, "PdP", 3.0, 13.02),
    figure(REORDERED, "PdP, engines of unequal power, round-robin", 2.0, 12.27),
    figure(REORDERED, "PdP, engines of unequal power, proportional", 2.0, 10.02),
    figure(TRIP, "user mode", 64.0, 208.0),
    figure(TRIP, "PdP", 64.0, 296.0),
    figure(TRIP, "kernel", 64.0, 132.0),
];

const ROUND: &str = "figure 5: round, median";
const PART: &str = "figure 7: part of the output";
const MOST: &str = "figure 9: highest throughput";
const FRAMES: &str = "figure 9: most frames";
const TRIP_400: &str = "figure 10: round trip beside 400 bytes, mean";

const SPP: &[PaperFigure] = &[
    figure("figure 5: round, longest", "vServers, 50 to 100 tokens", 8.0, 500.0),
    // "Roughly equal to the product of the number of vServers and the number of tokens."
    figure(ROUND, "vServers, 2 tokens", 8.0, 16.0),
    figure(ROUND, "vServers, 16 tokens", 8.0, 128.0),
    figure(PART, "as configured", 30.0, 30.0),
    figure(PART, "as configured", 25.0, 25.0),
    figure(PART, "as configured", 20.0, 20.0),
    figure(PART, "as configured", 15.0, 15.0),
    figure(PART, "as configured", 10.0, 10.0),
    figure("figure 8: all inputs", "NPE", 5.0, 4000.0),
    figure("figure 8: all outputs, most", "NPE", 5.0, 4000.0),
    // Without any payload; there frames have 98 bytes in addition.
    figure(MOST, "NPE", 0.0, 3700.0),
    figure(MOST, "Click in a vServer, under", 0.0, 50.0),
    figure(MOST, "Click in a vServer, of all payloads", 1400.0, 540.0),
    figure(FRAMES, "NPE", 0.0, 4800.0),
    figure(FRAMES, "Click in a vServer", 0.0, 59.0),
    figure(FRAMES, "Click in a vServer, four cores", 0.0, 120.0),
    // "Never exceeded 0.2 ms"; "well above 10 ms" once the input is near the sustainable maximum.
    figure(TRIP_400, "NPE, at most", 5000.0, 200.0),
    figure(TRIP_400, "Click in a vServer near its limit, over", 540.0, 10_000.0),
];
