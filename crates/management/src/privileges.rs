//! Enters the node's network namespace and drops all privileges.

use std::fs::File;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use rustix::process::{Gid, Resource, Rlimit, Uid, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, move_into_link_name_space, set_capabilities,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

/// Most descriptors of the helper, and of passt. It limits the connections of a node.
pub const DESCRIPTORS_MAX: u64 = 1024;

/// Limits the descriptors and privileges of this process and its children.
pub fn bound() -> Result<()> {
    let limit = Rlimit { current: Some(DESCRIPTORS_MAX), maximum: Some(DESCRIPTORS_MAX) };
    setrlimit(Resource::Nofile, limit).context("cannot bound descriptors")?;
    set_no_new_privs(true).context("cannot give up new privileges")
}

/// Moves this thread, the only one, into the node's network namespace for all further sockets.
/// Makes it an ordinary user's without any capability.
pub fn enter(netns: &File, uid: u32) -> Result<()> {
    move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter the node's network namespace")?;
    become_user(uid)
}

/// Makes this thread, the only one, an ordinary user's without any capability.
pub fn become_user(uid: u32) -> Result<()> {
    let become_user = || {
        let (gid, uid) = (Gid::from_raw(uid), Uid::from_raw(uid));
        set_thread_groups(&[])?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        let none = CapabilitySet::empty();
        set_capabilities(
            None,
            CapabilitySets { effective: none, permitted: none, inheritable: none },
        )
    };
    become_user().context("cannot give up privileges")
}
