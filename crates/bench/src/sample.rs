//! Samples and their files.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::machine::MachineInfo;
use crate::steal::STOLEN_MAX;

/// Version of the file format. Increment it when the meaning of a key changes.
pub const SCHEMA: u32 = 1;

/// Two cores below this latency are near, nanoseconds from core to core.
pub const NEAR_NS: f64 = 100.0;

/// Two cores above this latency are far, nanoseconds from core to core.
pub const FAR_NS: f64 = 250.0;

/// Fraction of its full speed below which a core is slow,
/// because another machine uses its other thread.
pub const SPEED_SHARE_MIN: f64 = 0.75;

/// Distance between two cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CoreProximity {
    /// Below [`NEAR_NS`].
    Near,
    /// In between.
    Between,
    /// Above [`FAR_NS`].
    Far,
}

impl CoreProximity {
    /// Classifies a latency from core to core, nanoseconds.
    pub fn of(core_to_core_ns: f64) -> Self {
        match core_to_core_ns {
            ns if ns < NEAR_NS => Self::Near,
            ns if ns > FAR_NS => Self::Far,
            _ => Self::Between,
        }
    }

    /// Name in files.
    pub fn word(self) -> &'static str {
        match self {
            Self::Near => "near",
            Self::Between => "between",
            Self::Far => "far",
        }
    }
}

/// One figure of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FigureSample {
    /// Series: `pdp`, `kernel`, ….
    pub series: String,
    /// Kind of figure: `rate`, `loss`, ….
    pub what: String,
    /// The parameter.
    pub x: f64,
    /// Unit of the parameter.
    pub x_unit: String,
    /// The figure.
    pub value: f64,
    /// Unit.
    pub unit: String,
    /// Round, from 1.
    pub round: u32,
    /// Half a round trip between the first and the last core just before, nanoseconds.
    pub core_to_core_ns: f64,
    /// State derived from it.
    pub state: CoreProximity,
    /// Operations per cycle of the slower of these cores just before
    /// ([`pdp_testbed::meter::operations_a_cycle`]). Half of the usual value if another machine's
    /// thread uses the other half of the core. 0 if unknown.
    #[serde(default)]
    pub core_speed: f64,
    /// Fraction of its time that the CPU with the greatest
    /// loss lost to the host's other guests meanwhile.
    #[serde(default)]
    pub stolen: f64,
    /// CPU cycles per packet of the measured programs, without
    /// generator and sink unless `notes` say otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cycles_per_packet: Option<f64>,
    /// Further notes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub notes: String,
}

impl FigureSample {
    /// True if the host took much of a CPU away meanwhile, or if a core was slower than
    /// `full_speed`, in operations per cycle.
    pub fn is_disturbed(&self, full_speed: f64) -> bool {
        let is_slow = self.core_speed > 0.0 && self.core_speed < SPEED_SHARE_MIN * full_speed;
        self.stolen > STOLEN_MAX || is_slow
    }
}

/// Results of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// Start time, UTC.
    pub began: String,
    /// Duration, seconds.
    pub seconds: f64,
    /// True if runs were shorter than usual.
    pub quick: bool,
    /// Machine of the measurement.
    pub machine: MachineInfo,
    /// Missing measurements, with the reasons.
    #[serde(default)]
    pub missing: Vec<String>,
    /// All samples, in order.
    pub samples: Vec<FigureSample>,
}

impl Results {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let results: Self =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let (is, can) = (results.schema, SCHEMA);
        ensure!(is == can, "{}: schema {is}, this program reads {can}", path.display());
        Ok(results)
    }

    /// Writes a file.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        }
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// Kinds of figures with their units, in the order of the samples.
    pub fn measured(&self) -> Vec<(String, String)> {
        let mut seen = BTreeSet::new();
        let pairs = self.samples.iter().map(|sample| (sample.what.clone(), sample.unit.clone()));
        pairs.filter(|pair| seen.insert(pair.clone())).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Results with the given series, parameter, value, and latency.
    pub(crate) fn results(samples: &[(&str, f64, f64, f64)]) -> Results {
        let sample =
            |(round, &(series, x, value, core_to_core_ns)): (usize, &(&str, _, _, f64))| {
                FigureSample {
                    series: series.into(),
                    what: "rate".into(),
                    x,
                    x_unit: "routes".into(),
                    value,
                    unit: "Mpps".into(),
                    round: round as u32 + 1,
                    core_to_core_ns,
                    state: CoreProximity::of(core_to_core_ns),
                    core_speed: 0.0,
                    stolen: 0.0,
                    cycles_per_packet: Some(100.0),
                    notes: String::new(),
                }
            };
        Results {
            schema: SCHEMA,
            experiment: "veth".into(),
            began: "2026-01-02T03:04:05Z".into(),
            seconds: 1.0,
            quick: false,
            machine: MachineInfo::default(),
            missing: vec![],
            samples: samples.iter().enumerate().map(sample).collect(),
        }
    }

    #[test]
    fn states_have_their_bounds() {
        let states = [60.0, 99.9, 100.0, 250.0, 250.1].map(CoreProximity::of);
        let [near, between, far] =
            [CoreProximity::Near, CoreProximity::Between, CoreProximity::Far];
        assert_eq!(states, [near, near, between, between, far]);
    }

    #[test]
    fn round_trip_keeps_every_value() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("results/veth.json");
        let mut written = results(&[("pdp", 2.0, 1.5, 70.0), ("kernel", 2.0, 0.8, 300.0)]);
        written.write(&path).unwrap();
        assert_eq!(Results::read(&path).unwrap(), written);
        written.schema += 1;
        written.write(&path).unwrap();
        assert!(Results::read(&path).unwrap_err().to_string().contains("schema 2"));
    }
}
