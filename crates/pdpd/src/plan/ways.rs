//! A node's way out and in beside its networks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pdp_container::{File, HelperSpec, LOG_BYTES_MAX, Owned};
use pdp_proto::management::{Config, GATEWAY};
use pdp_spec::Management;

use super::node::NodePlanner;
use super::{ManagementPlan, Part};

/// Where programs look for who answers for names.
const RESOLV_CONF: &str = "/etc/resolv.conf";

impl NodePlanner<'_> {
    /// The helper that makes and serves it, which may be replaced while the node runs.
    pub(super) fn management(&self) -> Option<ManagementPlan> {
        let Management { outside, ports } = self.node.management.as_ref()?;
        let directory = self.directory();
        let config_file = directory.join("management.json");
        let process = HelperSpec {
            id: self.id(Part::Management),
            dir: self.record(Part::Management),
            argv: vec![
                self.vnet.places.binary("pdp-management"),
                "--config".into(),
                config_file.to_string_lossy().into_owned(),
            ],
            env: BTreeMap::new(),
            cgroup: format!("{}/helpers", self.cgroup()),
            uid: 0,
            keep_root: true,
            log_bytes_max: LOG_BYTES_MAX,
        };
        let config = Config {
            netns: PathBuf::new(),
            control_socket: directory.join("management.sock"),
            uid: self.helper_uid(),
            outside: *outside,
            ports: ports.iter().map(|port| port.0).collect(),
        };
        Some(ManagementPlan { process, config_file, config })
    }

    /// The file with who answers for names, where the spec has none.
    pub(super) fn resolv_conf(&self) -> Option<File> {
        let outside = self.node.management.as_ref().is_some_and(|management| management.outside);
        let own = self.node.files.contains_key(RESOLV_CONF);
        (outside && !own).then(|| File {
            path: RESOLV_CONF.into(),
            content: format!("nameserver {GATEWAY}\n"),
            mode: 0o644,
            owner: Owned::Ids { uid: 0, gid: 0 },
            writable: true,
        })
    }
}
