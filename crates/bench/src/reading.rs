//! Figures of a run.

/// A figure of one run; see [`FigureSample`](crate::sample::FigureSample).
#[derive(Clone, Debug)]
pub struct Reading {
    pub(crate) what: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) value: f64,
    pub(crate) cycles: Option<f64>,
    pub(crate) notes: String,
}

impl Reading {
    /// Makes a figure with its unit.
    pub fn new(what: &'static str, value: f64, unit: &'static str) -> Self {
        Self { what, unit, value, cycles: None, notes: String::new() }
    }

    /// Kind of figure.
    pub fn what(&self) -> &str {
        self.what
    }

    /// The figure.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// Adds CPU cycles per packet.
    pub fn cycles(self, per_packet: f64) -> Self {
        Self { cycles: Some(per_packet), ..self }
    }

    /// Adds further notes.
    pub fn notes(self, notes: impl Into<String>) -> Self {
        Self { notes: notes.into(), ..self }
    }
}
