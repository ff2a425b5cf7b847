//! Counters of a node that only pdpd knows, added to those of the mux.

use std::path::Path;
use std::time::Duration;

use pdp_model::NodeStats;
use pdp_proto::{mirror, tap};

use crate::host::control::{ControlError, MirrorClient, TapHelperClient};
use crate::host::query::HelperReply;
use crate::plan::NodePlan;

/// A helper that has counters.
pub(crate) enum HelperEndpoint<'a> {
    Tap(&'a Path),
    Mirror(&'a Path),
}

/// Counters of such a helper.
pub(crate) enum HelperCounters {
    Taps(Vec<tap::TapPortStats>),
    Routes(Box<mirror::MirrorStatusReply>),
}

impl HelperEndpoint<'_> {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Tap(path) | Self::Mirror(path) => path,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Tap(_) => "tap",
            Self::Mirror(_) => "mirror",
        }
    }

    pub(crate) fn ask(&self, wait: Duration) -> Result<HelperCounters, ControlError> {
        let path = self.path().to_owned();
        match self {
            Self::Tap(_) => TapHelperClient { path }.stats(wait).map(HelperCounters::Taps),
            Self::Mirror(_) => {
                MirrorClient { path }.status(wait).map(Box::new).map(HelperCounters::Routes)
            }
        }
    }
}

/// Adds what the mux does not know to a node's counters, and removes what only pdpd reads.
pub(crate) fn complete(
    stats: &mut NodeStats,
    plan: Option<&NodePlan>,
    helpers: Vec<(&HelperEndpoint<'_>, HelperReply<HelperCounters>)>,
) {
    stats.tap_connected = false;
    for port in stats.ports.values_mut() {
        port.underlay = None;
        port.limiting.clear();
    }
    for (number, guest) in &mut stats.guests {
        if let Some(planned) = plan.and_then(|plan| plan.guests.get(number)) {
            guest.fe = planned.placement.engine.clone();
            guest.share_millicores = planned.placement.power_millicores.into();
        }
    }
    if let Some(engine) = &mut stats.engine {
        engine.power_millicores = plan.map_or(0, |plan| plan.mux_millicores.into());
    }
    for (helper, answer) in helpers {
        match answer {
            HelperReply::Reply(HelperCounters::Taps(taps)) => {
                plan.inspect(|plan| add_taps(stats, plan, taps));
            }
            HelperReply::Reply(HelperCounters::Routes(status)) => stats.routes = Some(status.stats),
            HelperReply::TimedOut => stats.late.push(helper.name().to_owned()),
            HelperReply::None => {}
        }
    }
}

fn add_taps(stats: &mut NodeStats, plan: &NodePlan, taps: Vec<tap::TapPortStats>) {
    for tap in taps {
        let name = plan.taps.get(usize::from(tap.vport)).map(|tap| tap.name.as_str());
        if let Some(port) = name.and_then(|name| stats.ports.get_mut(name)) {
            port.tap = Some(tap.stats);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_model::{PortStats, UnderlayProblem};

    #[test]
    fn answers_have_only_described_counters() {
        let port = PortStats {
            underlay: Some(UnderlayProblem::Down),
            limiting: vec!["flood-limit".into()],
            ..PortStats::default()
        };
        let ports = [("eth0".to_owned(), port)].into();
        let mut stats = NodeStats { ports, tap_connected: true, ..NodeStats::default() };
        complete(&mut stats, None, Vec::new());
        let ports = [("eth0".to_owned(), PortStats::default())].into();
        assert_eq!(stats, NodeStats { ports, ..NodeStats::default() });
    }
}
