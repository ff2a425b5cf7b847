//! Open vSwitch with its datapath in user space (Debian's package `openvswitch-switch`).
//!
//! It forwards as a router would with two flows: it sets the MAC addresses and decrements the TTL.
//! While it is not measured, a signal stops its polling thread.

use std::time::Duration;

use anyhow::Result;
use pdp_testbed::ovs::OpenVswitch;

use crate::site::{MAC_B, MAC_MIDDLE_B, Site, words};

/// Access to network devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OvsDevice {
    /// By packet sockets.
    Packet,
    /// By AF_XDP.
    Xdp,
}

/// Time to start polling again.
const WAKE: Duration = Duration::from_millis(200);

/// Running switch; ends when dropped.
#[derive(Debug)]
pub struct Ovs(OpenVswitch);

impl Ovs {
    /// Starts it in the site's node, on one CPU.
    pub fn start(site: &Site, device: OvsDevice, cpu: usize) -> Result<Self> {
        let mask = format!("other_config:pmd-cpu-mask={:#x}", 1 << cpu);
        let on_cpu = ["taskset", "-c", &cpu.to_string()];
        let switch = OpenVswitch::start(&site.node.namespace(), &mask, &on_cpu);
        let more = match device {
            OvsDevice::Packet => "",
            OvsDevice::Xdp => "type=afxdp options:xdp-mode=native",
        };
        let set = |name: &str| match more {
            "" => String::new(),
            more => format!("-- set interface {name} {more}"),
        };
        switch.vsctl(&format!(
            "add-br br0 -- set bridge br0 datapath_type=netdev
             -- add-port br0 extA {} -- add-port br0 extB {}",
            set("extA"),
            set("extB")
        ));
        let flow = format!(
            "in_port=extA,ip,actions=mod_dl_src:{},mod_dl_dst:{},dec_ttl,output:extB",
            words(MAC_MIDDLE_B),
            words(MAC_B)
        );
        switch.ofctl(&["del-flows", "br0"]);
        switch.ofctl(&["add-flow", "br0", &flow]);
        let ovs = Self(switch);
        ovs.sleep();
        Ok(ovs)
    }

    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Resumes it.
    pub fn wake(&self) {
        pdp_testbed::sh(&format!("kill -CONT {}", self.pid()));
        std::thread::sleep(WAKE);
    }

    /// Stops it.
    pub fn sleep(&self) {
        pdp_testbed::sh(&format!("kill -STOP {}", self.pid()));
    }
}
