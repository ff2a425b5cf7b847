//! Where frames go that leave to the outside without the mux: next hops of tunnels whose ports stay in the kernel are
//! followed as the mux follows those of its own ([`pdp_underlay`]), and given to the program that writes outer headers.
//!
//! What is told of the underlay is told within [`LOOK_REST`] or so. A next hop that is not known is looked for at once
//! and then as long as it takes, since nobody knows whether frames wait for it: none does. One that was used since the
//! last look is kept fresh.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pdp_net::interface::Condition;
use pdp_net::ports::{Hop, Outside, PortSpec, Ports, Way};
use pdp_proto::mux::UnderlayProblem;
use pdp_underlay::{Ends, NextHop, Underlay};

use crate::host::{HostError, words};
use crate::plan::Far;
use crate::reconcile::lock;

/// Between two looks at what nothing is told of.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Between two looks, however much is told.
const LOOK_REST: Duration = Duration::from_millis(10);

/// Before this long a next hop that is not known yet is not taken to be none: another pdpd may have found it, whose
/// frames go on.
const LEARN: Duration = Duration::from_secs(2);

/// All such tunnels of a daemon.
#[derive(Debug, Default)]
pub struct Ways {
    underlay: Mutex<Option<Underlay>>,
    /// By the number of the port.
    known: Mutex<BTreeMap<u32, Known>>,
}

#[derive(Debug)]
struct Known {
    outside: Outside,
    ends: Ends,
    /// Longest IP packet, bytes.
    packet_bytes: u32,
    hop: Arc<NextHop>,
    since: Instant,
    /// What the program was told, if it was by this pdpd.
    told: Option<Option<Hop>>,
    /// When it was last seen whether it is used, and the frames that the vrouter had sent by then.
    asked: Instant,
    made: u64,
}

/// What there is in the kernel; `None`: nothing.
type Open = Mutex<Option<Arc<Ports>>>;

impl Ways {
    /// Joins a port to the outside, over a device as it is now; `None`: to nothing.
    pub fn join(
        this: &Arc<Self>,
        open: &Arc<Open>,
        ports: &Ports,
        port: &PortSpec,
        far: &Far,
        device: Option<Condition>,
    ) -> Result<(), HostError> {
        let number = port.number;
        let Some((device, (local, remote))) = device.zip(far.by.ends()) else {
            this.leave(number);
            return Ok(ports.join(number, Way::None)?);
        };
        if let Some((limit, rate)) = far.limit {
            ports.limit(limit, Some(rate))?;
        }
        let outside = Outside {
            interface: device.index,
            mac: device.mac,
            by: far.by.clone(),
            limit: far.limit.map(|(limit, _)| limit),
        };
        ports.join(number, Way::Outside(outside.clone()))?;
        let underlay = Self::followed(this, open)?;
        let (ends, packet_bytes) = ((device.index, local, remote), port.mtu + far.by.overhead());
        let mut known = lock(&this.known);
        let is = |it: &Known| (&it.outside, it.packet_bytes) == (&outside, packet_bytes);
        if !known.get(&number).is_some_and(is)
            && let Some(hop) = underlay.next_hop(device.index, local, remote, packet_bytes)
        {
            let (since, told, made) = (Instant::now(), None, 0);
            let new = Known { outside, ends, packet_bytes, hop, since, told, asked: since, made };
            known.insert(number, new);
            let lengths = known.values().filter(|it| it.ends == ends).map(|it| it.packet_bytes);
            let longest = lengths.max().unwrap_or(packet_bytes);
            underlay.set_lengths(&[(ends, longest)].into());
        }
        drop(known);
        // What is known already, of this tunnel or another of the same ends.
        this.look(ports, &underlay);
        Ok(())
    }

    /// What follows the machine's routes, from now on for these ports.
    fn followed(this: &Arc<Self>, open: &Arc<Open>) -> Result<Underlay, HostError> {
        let mut place = lock(&this.underlay);
        if let Some(underlay) = &*place {
            return Ok(underlay.clone());
        }
        let underlay = Underlay::start().map_err(HostError::Underlay)?;
        let (follows, ways, open) = (underlay.clone(), Arc::downgrade(this), Arc::downgrade(open));
        let thread = std::thread::Builder::new().name("far".into());
        thread.spawn(move || follow(&follows, &ways, &open)).map_err(HostError::Underlay)?;
        Ok(place.insert(underlay).clone())
    }

    /// Forgets the tunnel of a port, if it has one.
    pub fn leave(&self, number: u32) {
        lock(&self.known).remove(&number);
    }

    /// Forgets those of all ports but these.
    pub fn retain(&self, kept: &BTreeSet<u32>) {
        lock(&self.known).retain(|number, _| kept.contains(number));
    }

    /// What is wrong with the way of a port's tunnel, if it has one.
    pub fn problem(&self, number: u32) -> Option<UnderlayProblem> {
        let known = lock(&self.known);
        let Known { ends: (index, local, remote), packet_bytes, .. } = *known.get(&number)?;
        lock(&self.underlay).as_ref()?.problem(index, local, remote, packet_bytes)
    }

    /// Tells the program what is known by now.
    fn look(&self, ports: &Ports, underlay: &Underlay) {
        for (&number, it) in &mut *lock(&self.known) {
            let hop = underlay.way(it.ends).map(|hop| Hop { mac: hop.mac, mtu: hop.mtu });
            if it.told != Some(hop) && (hop.is_some() || it.since.elapsed() >= LEARN) {
                match ports.set_hop(number, hop) {
                    Ok(()) => it.told = Some(hop),
                    Err(error) => tracing::warn!("{}", words(&HostError::from(error))),
                }
            }
            let mut used = hop.is_none();
            if it.asked.elapsed() >= LOOK_EVERY {
                it.asked = Instant::now();
                let made = ports.made(number).unwrap_or(it.made);
                used |= made != std::mem::replace(&mut it.made, made);
            }
            if used {
                it.hop.find();
            }
        }
    }
}

/// Follows the machine's routes for as long as there is who wants them.
fn follow(underlay: &Underlay, ways: &Weak<Ways>, open: &Weak<Open>) {
    let mut seen = 0;
    loop {
        seen = underlay.wait(seen, LOOK_EVERY);
        let (Some(ways), Some(open)) = (ways.upgrade(), open.upgrade()) else { return };
        let now = lock(&open).clone();
        if let Some(ports) = now {
            ways.look(&ports, underlay);
        }
        drop((ways, open));
        std::thread::sleep(LOOK_REST);
    }
}
