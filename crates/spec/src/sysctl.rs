//! Kernel settings (sysctls) that a node may change, and those that it may not, with reasons.
//!
//! All belong to the node's own network namespace, where its root may
//! set them anyway. docs/sysctls.md is generated from this module.

use std::fmt;
use std::fmt::Write as _;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::nearest::nearest;

/// Value of a sysctl.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum SysctlValue {
    /// A number.
    Number(u64),
    /// A text, for several numbers or words.
    Text(String),
}

impl fmt::Display for SysctlValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// Names below `conf` for all interfaces, and for interfaces made later.
const OF_ALL: [&str; 2] = ["all", "default"];

/// Below `net.ipv4.conf.INTERFACE`.
const CONF_V4: &str = "accept_local accept_redirects accept_source_route arp_accept arp_announce \
    arp_evict_nocarrier arp_filter arp_ignore arp_notify bc_forwarding drop_gratuitous_arp \
    drop_unicast_in_l2_multicast force_igmp_version forwarding igmpv2_unsolicited_report_interval \
    igmpv3_unsolicited_report_interval ignore_routes_with_linkdown promote_secondaries proxy_arp \
    proxy_arp_pvlan route_localnet rp_filter secure_redirects send_redirects shared_media src_valid_mark";

/// Below `net.ipv6.conf.INTERFACE`.
const CONF_V6: &str = "accept_ra accept_ra_defrtr accept_ra_from_local accept_ra_min_hop_limit \
    accept_ra_min_lft accept_ra_mtu accept_ra_pinfo accept_ra_rt_info_max_plen accept_ra_rt_info_min_plen \
    accept_ra_rtr_pref accept_redirects accept_source_route accept_untracked_na addr_gen_mode autoconf \
    disable_ipv6 drop_unicast_in_l2_multicast drop_unsolicited_na force_mld_version force_tllao forwarding \
    hop_limit ignore_routes_with_linkdown mldv1_unsolicited_report_interval \
    mldv2_unsolicited_report_interval ndisc_evict_nocarrier ndisc_notify ndisc_tclass proxy_ndp \
    ra_defrtr_metric router_probe_interval router_solicitation_delay router_solicitation_interval \
    router_solicitation_max_interval router_solicitations rpl_seg_enabled seg6_enabled seg6_require_hmac \
    suppress_frag_ndisc temp_prefered_lft temp_valid_lft use_oif_addrs_only use_tempaddr";

/// Below `net.ipv4`.
const V4: &str = "fib_multipath_hash_fields fib_multipath_hash_policy fib_multipath_hash_seed \
    fib_multipath_use_neigh fwmark_reflect \
    icmp_echo_enable_probe icmp_echo_ignore_all icmp_echo_ignore_broadcasts \
    icmp_errors_use_inbound_ifaddr icmp_ignore_bogus_error_responses icmp_ratelimit icmp_ratemask \
    igmp_link_local_mcast_reports igmp_qrv ip_default_ttl ip_dynaddr ip_forward ip_forward_update_priority \
    ip_forward_use_pmtu ip_local_port_range ip_local_reserved_ports ip_no_pmtu_disc ip_nonlocal_bind \
    ip_unprivileged_port_start nexthop_compat_mode ping_group_range raw_l3mdev_accept \
    tcp_abort_on_overflow tcp_adv_win_scale tcp_app_win tcp_autocorking tcp_base_mss \
    tcp_comp_sack_delay_ns tcp_comp_sack_nr tcp_comp_sack_slack_ns tcp_congestion_control tcp_dsack \
    tcp_early_retrans tcp_ecn tcp_ecn_fallback tcp_fastopen tcp_fin_timeout tcp_frto tcp_fwmark_accept \
    tcp_invalid_ratelimit tcp_keepalive_intvl tcp_keepalive_probes tcp_keepalive_time tcp_l3mdev_accept \
    tcp_limit_output_bytes tcp_max_reordering tcp_max_syn_backlog tcp_min_rtt_wlen tcp_min_snd_mss \
    tcp_min_tso_segs tcp_moderate_rcvbuf tcp_mtu_probe_floor tcp_mtu_probing tcp_no_metrics_save \
    tcp_no_ssthresh_metrics_save tcp_notsent_lowat tcp_orphan_retries tcp_pacing_ca_ratio \
    tcp_pacing_ss_ratio tcp_probe_interval tcp_probe_threshold tcp_recovery tcp_reflect_tos \
    tcp_reordering tcp_retrans_collapse tcp_retries1 tcp_retries2 tcp_rfc1337 tcp_rmem tcp_sack \
    tcp_shrink_window tcp_slow_start_after_idle tcp_stdurg tcp_syn_linear_timeouts tcp_syn_retries \
    tcp_synack_retries tcp_syncookies tcp_thin_linear_timeouts tcp_timestamps tcp_tso_win_divisor \
    tcp_tw_reuse tcp_window_scaling tcp_wmem tcp_workaround_signed_windows udp_l3mdev_accept \
    udp_rmem_min udp_wmem_min";

/// Below `net.ipv6`.
const V6: &str = "anycast_src_echo_reply auto_flowlabels bindv6only fib_multipath_hash_fields \
    fib_multipath_hash_policy flowlabel_consistency flowlabel_reflect flowlabel_state_ranges \
    fwmark_reflect icmp.echo_ignore_all icmp.echo_ignore_anycast icmp.echo_ignore_multicast \
    icmp.ratelimit icmp.ratemask ip_nonlocal_bind max_dst_opts_length max_dst_opts_number \
    max_hbh_length max_hbh_opts_number seg6_flowlabel";

/// Prefix of an interface's MPLS settings.
const CONF_OF_MPLS: &str = "net.mpls.conf.";

/// Below `net.mpls.conf.INTERFACE`.
const CONF_MPLS: &str = "input";

/// Below `net.mpls`.
const MPLS: &str = "default_ttl ip_ttl_propagate platform_labels";

/// Below `net.vrf`.
const VRF: &str = "strict_mode";

/// Size of the kernel's label table; [`MPLS_LABELS_MAX`] limits it.
const PLATFORM_LABELS: &str = "net.mpls.platform_labels";

/// Maximum number of MPLS labels of a node. The kernel takes 8 bytes per label and charges
/// no cgroup for them (net/mpls/af_mpls.c, `resize_platform_label_table`): 1 MiB in total.
const MPLS_LABELS_MAX: u64 = 131_072;

/// Last words of settings that routers can't change, and reasons.
const NOT_OF_ROUTERS: [(&str, &str); 4] = [
    ("ip_forward", "a router forwards, and so do its forwarding guests"),
    ("forwarding", "a router forwards, and so do its forwarding guests"),
    (
        "fib_multipath_hash_policy",
        "PdP distributes flows to its forwarding guests by addresses and ports",
    ),
    (
        "fib_multipath_hash_fields",
        "PdP distributes flows to its forwarding guests by addresses and ports",
    ),
];

/// Prefixes of all other settings, with the reasons why they are not allowed.
const OTHERS: [(&str, &str); 16] = [
    ("net.ipv6.conf.*.accept_dad", "set by PdP: its addresses are usable at once"),
    ("net.ipv6.conf.*.dad_transmits", "as accept_dad"),
    ("net.ipv6.conf.*.keep_addr_on_down", "set by PdP: a link keeps its addresses while down"),
    ("net.ipv6.conf.*.mtu", "the interface's key `mtu`"),
    ("net.ipv6.conf.*.stable_secret", "the interface's key `mac`, which determines addresses"),
    ("net.ipv4.conf.*.log_martians", "their log is the machine's"),
    ("net.ipv4.ipfrag_", "kernel memory that is charged to no node"),
    ("net.ipv6.ip6frag_", "kernel memory that is charged to no node"),
    ("net.ipv4.igmp_max_", "kernel memory that is charged to no node"),
    ("net.ipv4.tcp_max_tw_buckets", "kernel memory that is charged to no node"),
    ("net.ipv6.route.", "kernel memory that is charged to no node"),
    ("net.ipv4.neigh.", "some kernels hide them from nodes, or share them machine-wide"),
    ("net.ipv6.neigh.", "some kernels hide them from nodes, or share them machine-wide"),
    ("net.ipv4.icmp_msgs_", "machine-wide before Linux 6.12"),
    ("net.core.", "machine-wide, or hidden from nodes by Linux 6.1"),
    ("net.", "not on PdP's list"),
];

/// Scope of a sysctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SysctlOf<'a> {
    /// The whole namespace, or interfaces made later.
    Node,
    /// One interface, by name.
    Interface(&'a str),
}

/// Parses a name as in sysctl(8), where `/` in an interface's name means `.`.
/// Returns its scope, and the name with `INTERFACE` in place of the interface.
pub fn sysctl_of(name: &str) -> (SysctlOf<'_>, String) {
    for family in ["net.ipv4.conf.", "net.ipv6.conf.", CONF_OF_MPLS] {
        if let Some((interface, last)) =
            name.strip_prefix(family).and_then(|rest| rest.split_once('.'))
        {
            // MPLS is enabled per interface.
            let of = match OF_ALL.contains(&interface) && family != CONF_OF_MPLS {
                true => SysctlOf::Node,
                false => SysctlOf::Interface(interface),
            };
            return (of, format!("{family}INTERFACE.{last}"));
        }
    }
    (SysctlOf::Node, name.to_owned())
}

/// Returns all allowed names, with `INTERFACE` for `all`, `default` or an interface.
pub fn sysctls() -> impl Iterator<Item = String> {
    let groups = [
        ("net.ipv4.conf.INTERFACE", CONF_V4),
        ("net.ipv6.conf.INTERFACE", CONF_V6),
        ("net.mpls.conf.INTERFACE", CONF_MPLS),
        ("net.ipv4", V4),
        ("net.ipv6", V6),
        ("net.mpls", MPLS),
        ("net.vrf", VRF),
    ];
    groups.into_iter().flat_map(|(before, names)| {
        names.split_whitespace().map(move |name| format!("{before}.{name}"))
    })
}

/// Returns why a sysctl can't have a value, and advice. `None` if PdP knows no reason.
pub(crate) fn bad_value(name: &str, value: &str) -> Option<(String, String)> {
    if name != PLATFORM_LABELS
        || value.trim().parse().is_ok_and(|labels: u64| labels <= MPLS_LABELS_MAX)
    {
        return None;
    }
    let message = format!("sysctl {name}: {value} is not a number up to {MPLS_LABELS_MAX}");
    Some((
        message,
        format!("use {MPLS_LABELS_MAX} or less: more labels take too much kernel memory"),
    ))
}

/// Returns why a sysctl can't be set, and advice. `None` if it can.
pub(crate) fn refused(name: &str, router: bool) -> Option<(String, String)> {
    let (of, generic) = sysctl_of(name);
    let last = name.rsplit('.').next().unwrap_or_default();
    if !sysctls().any(|known| known == generic) {
        let other = OTHERS.iter().find(|(other, _)| {
            let (before, after) = other.split_once('*').unwrap_or((other, ""));
            name.starts_with(before) && name.ends_with(after)
        });
        let written = |known: String| match of {
            SysctlOf::Interface(interface) => known.replace("INTERFACE", interface),
            SysctlOf::Node => known.replace("INTERFACE", "all"),
        };
        let all: Vec<String> = sysctls().map(written).collect();
        let place = "docs/sysctls.md lists what can be set";
        let hint = match (other, nearest(name, all.iter().map(String::as_str))) {
            (Some((other, why)), _) if *other != "net." => format!("{why}; {place}"),
            (_, Some(nearest)) => format!("did you mean {nearest}? {place}"),
            (Some((_, why)), None) => format!("{why}; {place}"),
            (None, None) => format!("only settings of a network namespace can be set; {place}"),
        };
        return Some((format!("sysctl {name:?} can't be set"), hint));
    }
    let of_router = NOT_OF_ROUTERS.iter().find(|(word, _)| router && *word == last)?;
    let hint = format!("{}; make it kind: host, or remove it", of_router.1);
    Some((format!("sysctl {name} can't be set on a router"), hint))
}

/// Returns the page docs/sysctls.md.
pub fn markdown() -> String {
    let mut page = "# Sysctls

This page lists the kernel settings that a node's key `sysctls` may change in its network namespace.

```yaml
h1:
  kind: host
  sysctls: {net.ipv4.ip_forward: 1, net.ipv4.conf.eth0.rp_filter: 2, net.ipv4.tcp_rmem: \"4096 131072 6291456\"}
```

- **Names.** `INTERFACE` is an interface of the node, `lo`, `all`, or `default` for later interfaces. `net.mpls.conf`
  has no `all` and `default`. Write `/` for `.` in an interface's name.
- **Values.** The kernel's ip-sysctl.rst describes them. If the kernel lacks a setting or refuses a value, the node does
  not start, and its NOTE says why. `net.mpls.platform_labels` is at most 131072.
- **Order.** PdP sets an interface's settings once it exists, others before.
- **Changes** restart the node's container. Settings that its commands change are lost then.
- **Modules.** `net.mpls.*` needs the machine's kernel module `mpls_router`, `net.vrf.*` the module `vrf`.
- **Multipath.** From Linux 6.11, each node has its own, stable `net.ipv4.fib_multipath_hash_seed`. So `kernel` routers
  in a row use all equal-cost paths. Older kernels leave some unused.

Settings marked `hosts` are not for routers:

"
    .to_owned();
    for name in sysctls() {
        let last = name.rsplit('.').next().unwrap_or_default();
        let of_hosts = NOT_OF_ROUTERS.iter().find(|(word, _)| *word == last);
        let why = of_hosts.map_or(String::new(), |(_, why)| format!(" (hosts only: {why})"));
        let _ = writeln!(page, "- `{name}`{why}");
    }
    page.push_str("\nPdP refuses these settings:\n\nreason | settings\n---|---\n");
    for equal in OTHERS.chunk_by(|one, next| one.1 == next.1) {
        let settings = equal.iter().map(|(what, _)| {
            let what = what.replace('*', "INTERFACE");
            match what.strip_suffix(['.', '_']) {
                _ if what == "net." => "all others".to_owned(),
                Some(_) => format!("`{what}…`"),
                None => format!("`{what}`"),
            }
        });
        let settings = settings.collect::<Vec<_>>().join(", ");
        let _ = writeln!(page, "{} | {settings}", equal[0].1);
    }
    page
}
