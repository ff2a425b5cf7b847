//! A node's management access besides its networks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pdp_container::{FileOwner, GuestFile, HelperSpec, LOG_BYTES_MAX};
use pdp_proto::management::{GATEWAY, ManagementConfig};
use pdp_spec::Management;

use super::NodePlanner;
use crate::plan::ManagementPlan;
use crate::plan::key::ProcessRole;

/// File with the name servers.
const RESOLV_CONF: &str = "/etc/resolv.conf";

impl NodePlanner<'_> {
    /// Plans the helper that creates and serves it, which can be replaced while the node runs.
    pub(super) fn management(&self) -> Option<ManagementPlan> {
        let Management { outside, ports } = self.node.management.as_ref()?;
        let directory = self.directory();
        let config_file = directory.join("management.json");
        let process = HelperSpec {
            id: self.key().process_id(ProcessRole::Management),
            dir: self.vnet.places.record(&self.key(), ProcessRole::Management),
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
        let config = ManagementConfig {
            netns: PathBuf::new(),
            control_socket: directory.join("management.sock"),
            uid: self.helper_uid(),
            outside: *outside,
            ports: ports.iter().map(|port| port.0).collect(),
        };
        Some(ManagementPlan { process, config_file, config })
    }

    /// Returns the file with the name server, unless the spec has one.
    pub(super) fn resolv_conf(&self) -> Option<GuestFile> {
        let outside = self.node.management.as_ref().is_some_and(|management| management.outside);
        let own = self.node.files.contains_key(RESOLV_CONF);
        (outside && !own).then(|| GuestFile {
            path: RESOLV_CONF.into(),
            content: format!("nameserver {GATEWAY}\n"),
            mode: 0o644,
            owner: FileOwner::Ids { uid: 0, gid: 0 },
            writable: true,
        })
    }
}
