//! Fast paths: the mux forwards by itself.

use pdp_proto::mux;
use pdp_proto::slowpath::DATA_BYTES;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DataPlaneKind, DataPlaneNeeds, KernelHooks, Plane, PuntFilter, PuntLimits, Punts};
use crate::limits::*;
use crate::node_check::NodeCheck;
use crate::units::Cores;

/// The kind of [`Fastpath`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FastpathKind {
    /// The mux forwards, without crossing to a guest.
    #[default]
    Fastpath,
}

/// The mux itself forwards.
///
/// The mux forwards packets itself, and punts the rest to the control guest (docs/fastpath.md).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fastpath {
    /// Kind.
    pub kind: FastpathKind,
    /// Forwarding code.
    #[serde(default)]
    pub code: FastpathCode,
    /// Bytes to match and to write, with `code: fields`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fields: Option<FastpathFields>,
    /// Maximum number of filters, IPv4 and IPv6 together (docs/slowpath.md). If `filters` and
    /// `counters` are 0, programs cannot connect.
    #[serde(default = "filters")]
    #[schemars(range(max = FILTERS_MAX))]
    pub filters: u32,
    /// Maximum number of filter counters.
    #[serde(default = "filters")]
    #[schemars(range(max = COUNTERS_MAX))]
    pub counters: u32,
    /// Power guaranteed to the router, from half of the mux's `power`. It is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
    /// Frames to punt without further processing. The first match applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub punt: Vec<PuntFilter>,
    /// Rate limits of punts, per interface. PdP drops the excess.
    #[serde(default)]
    pub punt_limits: PuntLimits,
    /// Treatment of packets that kernel hooks, such as firewalls, may change (docs/dataplane.md).
    #[serde(default)]
    pub kernel_hooks: KernelHooks,
}

impl Plane for Fastpath {
    fn name(&self) -> &'static str {
        DataPlaneKind::Fastpath.name()
    }

    fn forwarder(&self) -> &'static str {
        "a fast path: the mux forwards by itself"
    }

    fn needs(&self) -> DataPlaneNeeds<'_> {
        DataPlaneNeeds {
            mux_routes: self.code == FastpathCode::Ip,
            slowpath: Some((self.filters, self.counters)).filter(|it| *it != (0, 0)),
            fields: self.fields.as_ref().filter(|_| self.code == FastpathCode::Fields),
            mux_millicores: self.power.map_or(0, |power| power.0),
            punts: Some(Punts {
                filters: &self.punt,
                limits: &self.punt_limits,
                hooks: self.kernel_hooks,
            }),
            ..DataPlaneNeeds::default()
        }
    }

    fn check(&self, check: &mut NodeCheck<'_>) {
        check.plane_power(self.power);
        let fields = match (self.code, &self.fields) {
            (FastpathCode::Fields, Some(fields)) => fields,
            (FastpathCode::Fields, None) => {
                let hint = "add fields with a key, as in examples/labels.yaml";
                return check.fault(&["dataPlane", "code"], "code: fields has no fields", hint);
            }
            (FastpathCode::Ip, Some(_)) => {
                let hint = "set code: fields, or remove them";
                return check.fault(&["dataPlane", "fields"], "fields need code: fields", hint);
            }
            (FastpathCode::Ip, None) => return,
        };
        let bytes: usize = fields.key.iter().map(|field| usize::from(field.bytes)).sum();
        if bytes == 0 || bytes > KEY_BYTES_MAX {
            let message = format!("the key has {bytes} bytes, not 1 to {KEY_BYTES_MAX}");
            check.fault(&["dataPlane", "fields", "key"], message, "change its fields");
        }
        let writes = &["dataPlane", "fields", "write"];
        check.too_many(writes, fields.write.len(), mux::WRITES_MAX);
        for (index, write) in fields.write.iter().enumerate() {
            let index = index.to_string();
            let path = [&writes[..], &[&index]].concat();
            let data = write.data.map_or(0, |data| u16::from(data.from) + u16::from(data.bytes));
            if write.written().is_none() {
                let hint = "give one of data, source: true and hops: true";
                check.fault(&path, "write needs exactly one value", hint);
            } else if usize::from(data) > DATA_BYTES {
                let message = format!("data end at byte {data}, but a filter has {DATA_BYTES}");
                check.fault(&path, message, "from and bytes may add up to 16");
            }
        }
    }
}

fn filters() -> u32 {
    FILTERS
}

/// Code of a fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FastpathCode {
    /// IP, by the control guest's routes.
    #[default]
    Ip,
    /// Any protocol, by filters on `fields`.
    Fields,
}

/// Frame layout of a protocol that PdP does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FastpathFields {
    /// Bytes that filters match, in this order; at most 38 in total. PdP drops shorter frames.
    pub key: Vec<KeyField>,
    /// Bytes to write into sent frames, in this order; at most 16 entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub write: Vec<FieldWrite>,
    /// Verdict on frames without a match, or passed by their filter.
    #[serde(default)]
    pub miss: MissAction,
}

/// A byte range of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeyField {
    /// Byte offset from the start of the frame.
    #[schemars(range(max = MTU_MAX))]
    pub offset: u16,
    /// Length in bytes.
    #[schemars(range(min = 1, max = KEY_BYTES_MAX))]
    pub bytes: u8,
}

/// Bytes to write into a frame.
///
/// Set exactly one of `data`, `source` and `hops`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FieldWrite {
    /// Byte offset from the start of the frame.
    #[schemars(range(max = MTU_MAX))]
    pub offset: u16,
    /// Write a part of the filter's data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataBytes>,
    /// Write the egress interface's MAC address.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub source: bool,
    /// Decrement the byte. PdP punts frames with 1 or 0 there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hops: bool,
}

impl FieldWrite {
    /// Returns the value to write; `None` unless exactly one of the three is set.
    pub fn written(&self) -> Option<mux::WriteSource> {
        match (self.data, self.source, self.hops) {
            (Some(DataBytes { from, bytes }), false, false) => {
                Some(mux::WriteSource::Data { from, bytes })
            }
            (None, true, false) => Some(mux::WriteSource::Source),
            (None, false, true) => Some(mux::WriteSource::Hops),
            _ => None,
        }
    }
}

impl FastpathFields {
    /// Converts to the mux's form.
    pub fn of_mux(&self) -> mux::FieldsConfig {
        let key =
            |field: &KeyField| mux::KeyFieldConfig { offset: field.offset, bytes: field.bytes };
        let write = |write: &FieldWrite| {
            Some(mux::HeaderWrite { offset: write.offset, what: write.written()? })
        };
        mux::FieldsConfig {
            key: self.key.iter().map(key).collect(),
            write: self.write.iter().filter_map(write).collect(),
            miss: match self.miss {
                MissAction::Drop => mux::MissPolicy::Drop,
                MissAction::Punt => mux::MissPolicy::Punt,
            },
        }
    }
}

/// Byte range of a filter's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DataBytes {
    /// First of the filter's 16 data bytes.
    #[schemars(range(max = 15))]
    pub from: u8,
    /// Length in bytes.
    #[schemars(range(min = 1, max = 16))]
    pub bytes: u8,
}

/// Verdict on frames that no filter decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MissAction {
    /// Drop.
    #[default]
    Drop,
    /// Punt.
    Punt,
}
