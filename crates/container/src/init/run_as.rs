//! User and directory of a command: its `user` and `workdir`, looked up in the guest.
//!
//! Processes of the guest look them up, with the guest's rights, whenever a command starts. So a
//! guest's own `/etc/passwd` or directories lead to nothing new, and only the guest waits for the
//! lookup. A user that an earlier command adds exists for a later command.
//!
//! Users are found as in docker: the first account with that name or number. Without a named group,
//! the user has the account's group and those that list it in `/etc/group`. With a named group, the
//! user has only that one. A number without an account is in group 0, with `/` as its home. Other
//! users than root have no capability: the kernel clears them all, and none is ambient in a guest
//! whose process 1 is root.
//!
//! Limits: [`USER_IDS`] ids, [`GROUPS_MAX`] further groups, the files that [`account_file`] reads.
//! Source: passwd(5), group(5), capabilities(7) "Effect of user ID changes on capabilities".

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::root::{account_file, accounts};
use crate::spec::{RunAs, USER_IDS};

/// Largest number of a user's supplementary groups.
const GROUPS_MAX: usize = 256;

/// User and directory of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ResolvedRunAs {
    /// `None`: the user that runs the guest.
    pub user: Option<GuestUser>,
    /// `None`: the guest's directory.
    workdir: Option<PathBuf>,
}

/// A user of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GuestUser {
    pub uid: u32,
    pub gid: u32,
    groups: Vec<u32>,
    /// Value for `HOME`; `None`: the environment's.
    pub home: Option<String>,
}

impl ResolvedRunAs {
    /// Looks a user up in this process's root. `keeps_home`: the environment's `HOME` stays.
    pub fn of(run_as: &RunAs, keeps_home: bool) -> io::Result<Self> {
        let found = run_as.user.as_deref().map(|user| {
            let text = |file| account_file(Path::new("/"), file).unwrap_or_default();
            let found = GuestUser::of(user, &text("etc/passwd"), &text("etc/group"));
            found.map_err(|why| io::Error::other(format!("user {user}: {why}")))
        });
        let mut found = found.transpose()?;
        if let Some(found) = found.as_mut().filter(|_| keeps_home) {
            found.home = None;
        }
        Ok(Self { user: found, workdir: run_as.workdir.clone() })
    }

    /// Opens the directory, for fchdir(2).
    pub fn directory(&self) -> io::Result<Option<OwnedFd>> {
        let Some(path) = &self.workdir else { return Ok(None) };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).map(Some).map_err(|error| {
            let why = match error {
                Errno::NOENT => "no such directory".to_owned(),
                Errno::NOTDIR => "not a directory".to_owned(),
                error => io::Error::from(error).to_string(),
            };
            io::Error::other(format!("workdir {}: {why}", path.display()))
        })
    }
}

impl GuestUser {
    /// Finds the user `user_spec`, `USER` or `USER:GROUP`, in the texts of `passwd` and `group`.
    /// Returns the reason if there is none.
    fn of(user_spec: &str, passwd: &str, group: &str) -> Result<Self, String> {
        let (user, with) = match user_spec.split_once(':') {
            Some((user, with)) => (user, Some(with)),
            None => (user_spec, None),
        };
        let account = accounts(passwd).find(|account| account.is(user));
        let (name, uid, own, home) = match (&account, user.parse(), user) {
            (Some(account), ..) => (Some(account.name), account.id, account.group, account.home()),
            (None, Ok(uid), _) => (None, uid, 0, None),
            (None, _, "root") => (Some("root"), 0, 0, Some("/root")),
            _ => return Err("not in /etc/passwd".to_owned()),
        };
        let gid = match with {
            None => own,
            Some(with) => {
                let found = accounts(group).find(|group| group.is(with)).map(|group| group.id);
                let found = found.or(with.parse().ok()).or((with == "root").then_some(0));
                found.ok_or_else(|| format!("group {with} is not in /etc/group"))?
            }
        };
        let groups: Vec<u32> = match (name, with) {
            (Some(name), None) => {
                let has = accounts(group).filter(|group| group.members().any(|it| it == name));
                has.map(|group| group.id).take(GROUPS_MAX + 1).collect()
            }
            _ => Vec::new(),
        };
        if groups.len() > GROUPS_MAX {
            return Err(format!("in more than {GROUPS_MAX} groups of /etc/group"));
        }
        // Larger ids are no users of this guest. With 2^32 - 1, system calls change nothing.
        if let Some(id) = groups.iter().chain([&uid, &gid]).find(|id| **id >= USER_IDS) {
            return Err(format!("id {id} is not one of 0 to {}", USER_IDS - 1));
        }
        Ok(Self { uid, gid, groups, home: Some(home.unwrap_or("/").to_owned()) })
    }

    /// Becomes this user forever. Allocates nothing.
    pub fn become_user(&self) -> io::Result<()> {
        let check = |result: libc::c_int| match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: `groups` is valid for reads of as many ids as it has, for the call's time; the
        // other calls take no pointer.
        unsafe {
            check(libc::setgroups(self.groups.len(), self.groups.as_ptr()))?;
            check(libc::setgid(self.gid))?;
            check(libc::setuid(self.uid))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken\nfrr:x:42:43:frr:/home/frr:/bin/sh\n\
        far:x:70000:1::/:/bin/sh\nnone:x:4294967295:1::/:/bin/sh\nminus:x:-1:1::/:/bin/sh\n1000:x:7:8::relative:\n";
    const GROUP: &str = "root:x:0:\nfrr:x:43:\nfrrvty:x:44:bird,frr\nadm:x:4:frrx,xfrr\nlate:x:50:frr\nfar:x:65536:\n";

    fn of(user_spec: &str) -> Result<(u32, u32, Vec<u32>, String), String> {
        let found = GuestUser::of(user_spec, PASSWD, GROUP)?;
        Ok((found.uid, found.gid, found.groups, found.home.unwrap_or_default()))
    }

    #[test]
    fn resolves_users_like_docker() {
        let frr = (42, 43, vec![44, 50], "/home/frr".to_owned());
        assert_eq!(of("frr"), Ok(frr.clone()));
        assert_eq!(of("42"), Ok(frr));
        assert_eq!(of("frr:4"), Ok((42, 4, vec![], "/home/frr".into())));
        assert_eq!(of("frr:frrvty"), Ok((42, 44, vec![], "/home/frr".into())));
        assert_eq!(of("1001"), Ok((1001, 0, vec![], "/".into())));
        assert_eq!(of("1001:1002"), Ok((1001, 1002, vec![], "/".into())));
        assert_eq!(of("1000"), Ok((7, 8, vec![], "/".into())), "a name of digits");
        assert_eq!(of("root"), Ok((0, 0, vec![], "/root".into())));
        let bare = GuestUser::of("root:root", "", "").unwrap();
        assert_eq!((bare.uid, bare.gid, bare.home.as_deref()), (0, 0, Some("/root")));
    }

    #[test]
    fn refuses_unknown_users_and_ids_out_of_range() {
        for (user_spec, why) in [
            ("alice", "not in /etc/passwd"),
            ("frr:alice", "group alice is not in /etc/group"),
            ("minus", "not in /etc/passwd"),
            ("", "not in /etc/passwd"),
            ("far", "id 70000 is not one of 0 to 65535"),
            ("none", "id 4294967295 is not one of 0 to 65535"),
            ("4294967295", "id 4294967295 is not one of 0 to 65535"),
            ("frr:4294967295", "id 4294967295 is not one of 0 to 65535"),
            ("frr:far", "id 65536 is not one of 0 to 65535"),
        ] {
            assert_eq!(of(user_spec), Err(why.to_owned()), "{user_spec}");
        }
        let many: String = (1..=GROUPS_MAX + 1).map(|id| format!("g{id}:x:{id}:frr\n")).collect();
        assert!(GuestUser::of("frr", PASSWD, &many).unwrap_err().contains("more than 256 groups"));
        assert!(GuestUser::of("frr:g1", PASSWD, &many).is_ok());
    }

    proptest! {
        #[test]
        fn resolved_users_have_ids_in_range(
            user_spec in "[a-c0-9]{0,3}(:[a-c0-9]{0,11})?",
            passwd in "([a-c0-9]{0,2}:x:-?[0-9]{0,10}:[0-9]{0,10}:[:/\n]{0,4}\n){0,6}",
            group in "([a-c0-9]{0,2}:x:[0-9]{0,10}:[a-c,]{0,6}\n){0,6}",
        ) {
            if let Ok(found) = GuestUser::of(&user_spec, &passwd, &group) {
                prop_assert!(found.groups.iter().chain([&found.uid, &found.gid]).all(|id| *id < USER_IDS));
                prop_assert!(found.home.is_some_and(|home| home.starts_with('/')));
            }
        }
    }
}
