//! Settings of running guests and hosts that can change without a restart, as the journal has
//! them. They are JSON with a version. Earlier versions of pdpd wrote text without a version.

use pdp_container::Limits;
use pdp_net::route::StaticRouteSpec;
use pdp_proto::routes;
use serde::{Deserialize, Serialize};

use crate::plan::{GuestPlan, NodePlan};

/// Version of the settings in the journal. Settings of a later version are unknown: a step applies
/// all of them again, and replaces the node's mirror.
pub const VERSION: u32 = 1;

/// Settings of a control guest, host or forwarding guest that its hash does not cover.
/// The default stands for unknown settings; it differs from those of every plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AppliedSettings {
    /// Limits of its cgroup.
    pub limits: Limits,
    /// For a node whose kernel forwards: limits of the kernel's work for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Limits>,
    /// Static routes of a control guest or host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub static_routes: Vec<StaticRouteSpec>,
    /// Version of the route protocol that a node's mirror uses; 0 for forwarding guests.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub routes_version: u16,
}

/// Settings with their version.
#[derive(Serialize, Deserialize)]
struct VersionedSettings {
    version: u32,
    settings: AppliedSettings,
}

impl AppliedSettings {
    /// Returns the planned settings of a node's control side.
    pub fn of_node(plan: &NodePlan) -> Self {
        Self {
            limits: plan.control.limits.clone(),
            kernel: plan.kernel.as_ref().map(|kernel| kernel.limits.clone()),
            static_routes: plan.routes.clone(),
            routes_version: routes::VERSION,
        }
    }

    /// Returns the planned settings of a forwarding guest.
    pub fn of_guest(plan: &GuestPlan) -> Self {
        Self { limits: plan.container.limits.clone(), ..Self::default() }
    }

    /// Formats them for the journal.
    pub fn to_journal(&self) -> String {
        let versioned = VersionedSettings { version: VERSION, settings: self.clone() };
        // Plain data with string keys is always valid JSON.
        serde_json::to_string(&versioned).unwrap_or_default()
    }

    /// Parses the journal's text. Returns the default if nothing is known.
    pub fn from_journal(text: &str) -> Self {
        match serde_json::from_str(text) {
            Ok(VersionedSettings { version: VERSION, settings }) => settings,
            _ if text.starts_with('{') => Self::default(),
            _ => Self::from_old_text(text),
        }
    }

    /// Parses the text of earlier versions, `LIMITS[ kernel LIMITS BYPASS][ static JSON][ routes
    /// VERSION]`. The limits stay unknown, since they are in Rust's debug format.
    fn from_old_text(text: &str) -> Self {
        let json = text.split_once(" static ").map_or("", |(_, json)| json);
        let mut static_routes = serde_json::Deserializer::from_str(json).into_iter();
        let version = text.rsplit_once(" routes ").and_then(|(_, version)| version.parse().ok());
        Self {
            limits: Limits::default(),
            kernel: text.contains(" kernel ").then(Limits::default),
            static_routes: static_routes.next().and_then(Result::ok).unwrap_or_default(),
            routes_version: version.unwrap_or_default(),
        }
    }
}

fn is_zero(version: &u16) -> bool {
    *version == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn static_routes() -> Vec<StaticRouteSpec> {
        let json = r#"[{"to":"10.9.0.0/16","kind":"Blackhole","hops":[],"metric":7,"table":254,
                        "src":null,"mtu":null,"scope":"Global"}]"#;
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn settings_round_trip_for_all_shares_of_a_core() {
        for millicores in (0..64_000).step_by(7) {
            let limits = Limits {
                cpu_cores: Some(f64::from(millicores) / 1000.0),
                memory_bytes: Some(u64::MAX),
                cpus: Some("0-2,5".into()),
                ..Limits::default()
            };
            let settings = AppliedSettings {
                kernel: Some(limits.clone()),
                limits,
                static_routes: static_routes(),
                routes_version: 2,
            };
            assert_eq!(AppliedSettings::from_journal(&settings.to_journal()), settings);
        }
    }

    #[test]
    fn old_text_has_all_but_the_limits() {
        let limits = "Limits { cpu_cores: Some(0.1), cpu_period_us: None, cpu_weight: Some(100), \
                      memory_bytes: None, processes: Some(64), cpus: None, io_weight: None }";
        let set = serde_json::to_string(&static_routes()).unwrap();
        let known = |kernel: bool, static_routes, routes_version| AppliedSettings {
            kernel: kernel.then(Limits::default),
            static_routes,
            routes_version,
            ..AppliedSettings::default()
        };
        for (text, expected) in [
            (limits.to_owned(), known(false, Vec::new(), 0)),
            (format!("{limits} routes 2"), known(false, Vec::new(), 2)),
            (format!("{limits} static {set} routes 1"), known(false, static_routes(), 1)),
            (format!("{limits} kernel {limits} true routes 2"), known(true, Vec::new(), 2)),
            (
                format!("{limits} kernel {limits} false static {set} routes 2"),
                known(true, static_routes(), 2),
            ),
        ] {
            assert_eq!(AppliedSettings::from_journal(&text), expected, "{text}");
        }
    }

    #[test]
    fn settings_of_another_version_are_unknown() {
        let settings = AppliedSettings { routes_version: 2, ..AppliedSettings::default() };
        let later = settings.to_journal().replace(r#""version":1,"#, r#""version":2,"#);
        for text in [&later, "", "older", r#"{"limits":{}}"#, r#"{"version":1} static [] routes 2"#]
        {
            let read = AppliedSettings::from_journal(text);
            assert_eq!(read, AppliedSettings::default(), "{text}");
        }
        assert_ne!(later, settings.to_journal());
    }
}
