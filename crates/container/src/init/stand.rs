//! As whom, and where, a command runs: its `user` and `workdir`, looked up in the guest.
//!
//! Processes of the guest look them up, with its own rights, whenever a command is started. What a guest has made
//! of its `/etc/passwd` or of a directory so leads to nothing that it had not, and nobody else waits for it; and a
//! user that an earlier command adds is there for a later one.
//!
//! Users are found as docker finds them: the first account of that name or number; without a named group the
//! account's own and those that `/etc/group` has it in, with one that and no others; a number without an account
//! is in group 0, with `/` as its home. Another user than root has no capability: the kernel clears them all, and
//! none is an ambient one in a guest whose process 1 is root.
//!
//! Limits: [`USER_IDS`] ids, [`GROUPS_MAX`] further groups, what [`account_file`] reads.
//! Source: passwd(5), group(5), capabilities(7) "Effect of user ID changes on capabilities".

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::root::{account_file, accounts};
use crate::spec::{RunAs, USER_IDS};

/// Groups that a user has beside the first.
const GROUPS_MAX: usize = 256;

/// As whom and where a command runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stand {
    /// `None`: as whoever runs the guest.
    pub who: Option<Who>,
    /// `None`: where the guest does.
    workdir: Option<PathBuf>,
}

/// A user of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Who {
    pub uid: u32,
    pub gid: u32,
    groups: Vec<u32>,
    /// `HOME`; `None`: what the environment says.
    pub home: Option<String>,
}

impl Stand {
    /// Looks a user up in this process's root; `keeps_home`: the environment's `HOME` stays.
    pub fn of(run_as: &RunAs, keeps_home: bool) -> io::Result<Self> {
        let who = run_as.user.as_deref().map(|user| {
            let text = |file| account_file(Path::new("/"), file).unwrap_or_default();
            let who = Who::of(user, &text("etc/passwd"), &text("etc/group"));
            who.map_err(|why| io::Error::other(format!("user {user}: {why}")))
        });
        let mut who = who.transpose()?;
        if let Some(who) = who.as_mut().filter(|_| keeps_home) {
            who.home = None;
        }
        Ok(Self { who, workdir: run_as.workdir.clone() })
    }

    /// Its directory, for fchdir(2).
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

impl Who {
    /// `wanted`: `USER` or `USER:GROUP`; the others: what the files of accounts say. Why there is no such user.
    fn of(wanted: &str, passwd: &str, group: &str) -> Result<Self, String> {
        let (user, with) = match wanted.split_once(':') {
            Some((user, with)) => (user, Some(with)),
            None => (wanted, None),
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
        // Beyond them is no user of this guest, and with 2^32 - 1 system calls change nothing.
        if let Some(id) = groups.iter().chain([&uid, &gid]).find(|id| **id >= USER_IDS) {
            return Err(format!("id {id} is not one of 0 to {}", USER_IDS - 1));
        }
        Ok(Self { uid, gid, groups, home: Some(home.unwrap_or("/").to_owned()) })
    }

    /// Becomes this user for good. Allocates nothing.
    pub fn take_on(&self) -> io::Result<()> {
        let check = |result: libc::c_int| match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: `groups` is valid for reads of as many ids as it has, for the call's time; the other calls take
        // no pointer.
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

    fn of(wanted: &str) -> Result<(u32, u32, Vec<u32>, String), String> {
        let who = Who::of(wanted, PASSWD, GROUP)?;
        Ok((who.uid, who.gid, who.groups, who.home.unwrap_or_default()))
    }

    #[test]
    fn users_are_found_as_docker_finds_them() {
        let frr = (42, 43, vec![44, 50], "/home/frr".to_owned());
        assert_eq!(of("frr"), Ok(frr.clone()));
        assert_eq!(of("42"), Ok(frr));
        assert_eq!(of("frr:4"), Ok((42, 4, vec![], "/home/frr".into())));
        assert_eq!(of("frr:frrvty"), Ok((42, 44, vec![], "/home/frr".into())));
        assert_eq!(of("1001"), Ok((1001, 0, vec![], "/".into())));
        assert_eq!(of("1001:1002"), Ok((1001, 1002, vec![], "/".into())));
        assert_eq!(of("1000"), Ok((7, 8, vec![], "/".into())), "a name of digits");
        assert_eq!(of("root"), Ok((0, 0, vec![], "/root".into())));
        let bare = Who::of("root:root", "", "").unwrap();
        assert_eq!((bare.uid, bare.gid, bare.home.as_deref()), (0, 0, Some("/root")));
    }

    #[test]
    fn who_is_not_there_or_beyond_the_ids_is_none() {
        for (wanted, why) in [
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
            assert_eq!(of(wanted), Err(why.to_owned()), "{wanted}");
        }
        let many: String = (1..=GROUPS_MAX + 1).map(|id| format!("g{id}:x:{id}:frr\n")).collect();
        assert!(Who::of("frr", PASSWD, &many).unwrap_err().contains("more than 256 groups"));
        assert!(Who::of("frr:g1", PASSWD, &many).is_ok());
    }

    proptest! {
        #[test]
        fn nothing_that_is_found_is_beyond_the_ids(
            wanted in "[a-c0-9]{0,3}(:[a-c0-9]{0,11})?",
            passwd in "([a-c0-9]{0,2}:x:-?[0-9]{0,10}:[0-9]{0,10}:[:/\n]{0,4}\n){0,6}",
            group in "([a-c0-9]{0,2}:x:[0-9]{0,10}:[a-c,]{0,6}\n){0,6}",
        ) {
            if let Ok(who) = Who::of(&wanted, &passwd, &group) {
                prop_assert!(who.groups.iter().chain([&who.uid, &who.gid]).all(|id| *id < USER_IDS));
                prop_assert!(who.home.is_some_and(|home| home.starts_with('/')));
            }
        }
    }
}
