//! Kernel tunnels: follows the next hops of tunnels whose ports stay in the
//! kernel, as the mux follows those of its own tunnels ([`pdp_underlay`]).
//! The results go to the program that writes outer headers.
//!
//! Changes of the underlay take effect within about [`POLL_REST`]. An unknown next hop is
//! resolved at once and without a time limit. No frame waits for it, so nothing else would
//! trigger the resolution. A next hop that was used since the last check is kept fresh.

use pdp_model::UnderlayProblem;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pdp_net::interface::InterfaceState;
use pdp_net::ports::{ExternalEnd, LinkTarget, PortSpec, Ports, UnderlayHop};
use pdp_underlay::{TunnelEndpoints, TunnelNextHop, Underlay};

use crate::host::HostError;
use crate::plan::KernelTunnel;
use crate::util::{error_chain, lock};

/// Interval of checks for changes that the kernel does not announce.
const POLL_EVERY: Duration = Duration::from_secs(1);

/// Shortest time between two checks, however many changes are announced.
const POLL_REST: Duration = Duration::from_millis(10);

/// For this time an unknown next hop does not count as missing. A
/// previous pdpd may have found it, and its frames continue.
const LEARN: Duration = Duration::from_secs(2);

/// All kernel tunnels of a daemon.
#[derive(Debug, Default)]
pub struct KernelTunnels {
    underlay: Mutex<Option<Underlay>>,
    /// By port number.
    tunnels: Mutex<BTreeMap<u32, KernelTunnelState>>,
}

#[derive(Debug)]
struct KernelTunnelState {
    outside: ExternalEnd,
    ends: TunnelEndpoints,
    /// Longest IP packet, bytes.
    packet_bytes: u32,
    hop: Arc<TunnelNextHop>,
    since: Instant,
    /// Next hop that this pdpd gave to the program, if any.
    programmed_hop: Option<Option<UnderlayHop>>,
    /// Time of the last check whether the tunnel is used, and the
    /// vrouter's sent frames at that time.
    checked_at: Instant,
    made: u64,
}

/// Kernel state of the ports; `None` if there is none.
type OpenPorts = Mutex<Option<Arc<Ports>>>;

impl KernelTunnels {
    /// Connects a port to an external interface, over the device in its
    /// current condition. Without a device it leads nowhere.
    pub fn join(
        this: &Arc<Self>,
        open: &Arc<OpenPorts>,
        ports: &Ports,
        port: &PortSpec,
        tunnel: &KernelTunnel,
        device: Option<InterfaceState>,
    ) -> Result<(), HostError> {
        let number = port.number;
        let Some((device, (local, remote))) = device.zip(tunnel.by.ends()) else {
            this.remove(number);
            return Ok(ports.join(number, LinkTarget::None)?);
        };
        if let Some((limit, rate)) = tunnel.limit {
            ports.limit(limit, Some(rate))?;
        }
        let outside = ExternalEnd {
            interface: device.index,
            mac: device.mac,
            by: tunnel.by.clone(),
            limit: tunnel.limit.map(|(limit, _)| limit),
        };
        ports.join(number, LinkTarget::Outside(outside.clone()))?;
        let underlay = Self::followed(this, open)?;
        let (ends, packet_bytes) = ((device.index, local, remote), port.mtu + tunnel.by.overhead());
        let mut tunnels = lock(&this.tunnels);
        let is =
            |it: &KernelTunnelState| (&it.outside, it.packet_bytes) == (&outside, packet_bytes);
        if !tunnels.get(&number).is_some_and(is)
            && let Some(hop) = underlay.next_hop(device.index, local, remote, packet_bytes)
        {
            let (since, programmed_hop, made) = (Instant::now(), None, 0);
            let new = KernelTunnelState {
                outside,
                ends,
                packet_bytes,
                hop,
                since,
                programmed_hop,
                checked_at: since,
                made,
            };
            tunnels.insert(number, new);
            let lengths = tunnels.values().filter(|it| it.ends == ends).map(|it| it.packet_bytes);
            let longest = lengths.max().unwrap_or(packet_bytes);
            underlay.set_lengths(&[(ends, longest)].into());
        }
        drop(tunnels);
        // Apply what is already known of this tunnel, or of another one with the same ends.
        this.push_next_hops(ports, &underlay);
        Ok(())
    }

    /// Returns the watcher of the machine's routes; starts it for these ports if needed.
    fn followed(this: &Arc<Self>, open: &Arc<OpenPorts>) -> Result<Underlay, HostError> {
        let mut place = lock(&this.underlay);
        if let Some(underlay) = &*place {
            return Ok(underlay.clone());
        }
        let underlay = Underlay::start().map_err(HostError::Underlay)?;
        let (follows, tunnels, open) =
            (underlay.clone(), Arc::downgrade(this), Arc::downgrade(open));
        let thread = std::thread::Builder::new().name("kernel-tunnels".into());
        thread.spawn(move || follow(&follows, &tunnels, &open)).map_err(HostError::Underlay)?;
        Ok(place.insert(underlay).clone())
    }

    /// Forgets the tunnel of a port, if it has one.
    pub fn remove(&self, number: u32) {
        lock(&self.tunnels).remove(&number);
    }

    /// Forgets the tunnels of all other ports.
    pub fn retain(&self, kept: &BTreeSet<u32>) {
        lock(&self.tunnels).retain(|number, _| kept.contains(number));
    }

    /// Returns what is wrong with the path of a port's tunnel, if it has one.
    pub fn problem(&self, number: u32) -> Option<UnderlayProblem> {
        let tunnels = lock(&self.tunnels);
        let KernelTunnelState { ends: (index, local, remote), packet_bytes, .. } =
            *tunnels.get(&number)?;
        lock(&self.underlay).as_ref()?.problem(index, local, remote, packet_bytes)
    }

    /// Passes the known next hops to the program.
    fn push_next_hops(&self, ports: &Ports, underlay: &Underlay) {
        for (&number, it) in &mut *lock(&self.tunnels) {
            let hop = underlay.path(it.ends).map(|hop| UnderlayHop { mac: hop.mac, mtu: hop.mtu });
            if it.programmed_hop != Some(hop) && (hop.is_some() || it.since.elapsed() >= LEARN) {
                match ports.set_hop(number, hop) {
                    Ok(()) => it.programmed_hop = Some(hop),
                    Err(error) => tracing::warn!("{}", error_chain(&HostError::from(error))),
                }
            }
            let mut used = hop.is_none();
            if it.checked_at.elapsed() >= POLL_EVERY {
                it.checked_at = Instant::now();
                let made = ports.frames_sent(number).unwrap_or(it.made);
                used |= made != std::mem::replace(&mut it.made, made);
            }
            if used {
                it.hop.find();
            }
        }
    }
}

/// Follows the machine's routes as long as a user of them exists.
fn follow(underlay: &Underlay, tunnels: &Weak<KernelTunnels>, open: &Weak<OpenPorts>) {
    let mut seen = 0;
    loop {
        seen = underlay.wait(seen, POLL_EVERY);
        let (Some(tunnels), Some(open)) = (tunnels.upgrade(), open.upgrade()) else { return };
        let now = lock(&open).clone();
        if let Some(ports) = now {
            tunnels.push_next_hops(&ports, underlay);
        }
        drop((tunnels, open));
        std::thread::sleep(POLL_REST);
    }
}
