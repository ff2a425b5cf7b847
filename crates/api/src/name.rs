use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Longest name of a daemon, bytes. A Unix socket's path below its run directory has at most 107.
pub const DAEMON_NAME_BYTES_MAX: usize = 16;

/// Name of one of several daemons on a machine. It is part of the names of the daemon's run
/// directory `/run/pdp-NAME`, state directory `/var/lib/pdp-NAME`, cgroup `pdp-NAME`, and directory
/// of BPF pins `/sys/fs/bpf/pdp-NAME`. A daemon without a name uses `pdp` in all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonName(String);

impl DaemonName {
    /// Returns the common name of its directories and cgroup: `pdp-NAME`, or `pdp`.
    pub fn base(name: Option<&Self>) -> String {
        name.map_or("pdp".into(), |name| format!("pdp-{name}"))
    }

    /// Returns the path of its socket.
    pub fn socket(name: Option<&Self>) -> PathBuf {
        PathBuf::from(format!("/run/{}/pdpd.sock", Self::base(name)))
    }
}

impl fmt::Display for DaemonName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for DaemonName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let fits = (1..=DAEMON_NAME_BYTES_MAX).contains(&text.len());
        if fits && text.bytes().all(plain) && !text.starts_with('-') && !text.ends_with('-') {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "use 1 to {DAEMON_NAME_BYTES_MAX} lower-case letters, digits and -, not - first or last"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemon_name_determines_its_socket_path() {
        assert_eq!(DaemonName::socket(None).to_str(), Some("/run/pdp/pdpd.sock"));
        let name: DaemonName = "lab-2".parse().unwrap();
        assert_eq!(DaemonName::socket(Some(&name)).to_str(), Some("/run/pdp-lab-2/pdpd.sock"));
        for bad in ["", "-a", "a-", "a/b", "..", "A", "a b", "12345678901234567"] {
            assert!(bad.parse::<DaemonName>().is_err(), "{bad}");
        }
    }
}
