//! Schedules of vlinks. The mux executes them itself, whether pdpd is running or not.
//!
//! When a step is due, the vnet is built again from its spec, as if it had been requested in its
//! new form. After missed steps, the mux applies the current state at once, whatever the delay.

use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use pdp_proto::mux;
use rustix::time::{ClockId, clock_gettime};
use tracing::{info, warn};

use crate::control::base::MuxControl;
use crate::control::plan::KnownVnet;

/// Time between two checks of the clock while a schedule runs. A step may be this late
/// if the machine slept meanwhile. A step that failed is tried again after this time.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The clock of schedules, nanoseconds: CLOCK_BOOTTIME.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns a vnet's spec as its schedules have it at a given time.
pub fn at(spec: &mux::VnetConfig, now_ns: u64) -> mux::VnetConfig {
    let mux::VnetConfig { name, police, nodes, vlinks } = spec;
    let vlinks = vlinks.iter().map(|vlink| vlink.at(now_ns)).collect();
    mux::VnetConfig { name: name.clone(), police: *police, nodes: nodes.clone(), vlinks }
}

impl MuxControl {
    /// Starts the thread that executes schedules. It ends with `control`.
    pub fn keep_time(control: &Arc<Self>) -> io::Result<()> {
        let weak = Arc::downgrade(control);
        let thread = thread::Builder::new().name("schedule".into()).spawn(move || run(&weak))?;
        control.clock.get_or_init(|| thread.thread().clone());
        Ok(())
    }

    /// Wakes that thread to check for the next step.
    pub(super) fn check_schedules(&self) {
        self.clock.get().inspect(|thread| thread.unpark());
    }

    /// Executes the steps that are due. Returns the time
    /// to wait; `None` waits until the thread is woken.
    fn follow_schedules(&self) -> Option<Duration> {
        let mut state = self.state();
        let now_ns = now_ns();
        let next_ns = |vnet: &KnownVnet| {
            let schedules = vnet.spec.vlinks.iter().filter_map(|vlink| vlink.schedule.as_ref());
            schedules.map(|schedule| schedule.next_ns(now_ns).unwrap_or(u64::MAX)).min()
        };
        let scheduled = state.vnets.values().filter(|it| next_ns(it).is_some());
        let scheduled: Vec<_> = scheduled.cloned().collect();
        let next_ns = scheduled.iter().filter_map(next_ns).min()?;
        let mut wait = CHECK_INTERVAL.min(Duration::from_nanos(next_ns.saturating_sub(now_ns)));
        for known in scheduled {
            let same = |vlink: &mux::Vlink| vlink.at(now_ns) == vlink.at(known.at_ns);
            if known.spec.vlinks.iter().all(same) {
                continue;
            }
            let name = known.spec.name.clone();
            match self.install(&mut state, KnownVnet { at_ns: now_ns, ..known }, None) {
                Ok(()) => info!("vnet {name}: applied a step of its schedule"),
                Err(error) => {
                    warn!("vnet {name}: can't apply a step of its schedule: {error:?}");
                    wait = CHECK_INTERVAL;
                }
            }
        }
        Some(wait)
    }
}

fn run(control: &Weak<MuxControl>) {
    loop {
        let Some(wait) = control.upgrade().map(|control| control.follow_schedules()) else {
            return;
        };
        match wait {
            Some(wait) => thread::park_timeout(wait),
            None => thread::park(),
        }
    }
}
