//! Sysctls of network namespaces.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::{fs, io};

use crate::error::{Error, NetContext, Result};
use crate::netns::within;

/// Sets a sysctl of a network namespace, e.g. `net.ipv4.ip_forward`. As with sysctl(8), a `.` in an
/// interface's name is written `/`.
pub fn set(netns: BorrowedFd<'_>, key: &str, value: &str) -> Result<()> {
    within(netns, || set_here(key, value))
}

/// Sets several, in this order.
pub fn set_all(netns: BorrowedFd<'_>, values: &[(String, String)]) -> Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    within(netns, || values.iter().try_for_each(|(key, value)| set_here(key, value)))
}

/// Reads a sysctl of a network namespace, without the trailing newline.
pub fn get(netns: BorrowedFd<'_>, key: &str) -> Result<String> {
    within(netns, || {
        let value = fs::read_to_string(path(key)?).on("read sysctl", key)?;
        Ok(value.trim_end().to_owned())
    })
}

/// Sets a sysctl of the calling thread's network namespace.
pub(crate) fn set_here(key: &str, value: &str) -> Result<()> {
    let written = fs::write(path(key)?, value);
    match written {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(missing(key)),
        written => written.on("set sysctl", format!("{key}={value}")),
    }
}

/// Sets an IPv6 sysctl of the calling thread's network namespace, if the kernel has IPv6.
pub(crate) fn set_v6_here(key: &str, value: &str) -> Result<()> {
    if has_v6() { set_here(key, value) } else { Ok(()) }
}

/// True if the kernel has IPv6. Booted with `ipv6.disable=1`, it has no IPv6 sysctls.
pub fn has_v6() -> bool {
    exists("net.ipv6")
}

/// True if the kernel has a sysctl, or a directory of them.
pub fn exists(key: &str) -> bool {
    path(key).is_ok_and(|path| path.exists())
}

/// Returns the error for a missing sysctl.
fn missing(key: &str) -> Error {
    let modules =
        [("net.mpls.", "mpls_router"), ("net.vrf.", "vrf"), ("net.bridge.", "br_netfilter")];
    let module = modules.iter().find(|(names, _)| key.starts_with(names));
    let text = match module {
        Some((_, module)) => {
            format!("this machine's kernel does not have it; {}", module_advice(module))
        }
        None => {
            "this machine's kernel does not have it; remove it, or take a newer kernel".to_owned()
        }
    };
    Error::Invalid { object: format!("sysctl {key}"), text }
}

/// Says how to get a kernel module: load it, or take a kernel that has it.
pub(crate) fn module_advice(module: &str) -> String {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let list = fs::read_to_string(format!("/lib/modules/{release}/modules.dep"));
    match list.is_ok_and(|list| lists(&list, module)) {
        true => format!("load its module: modprobe {module}"),
        false => format!("it needs a kernel with the module {module}"),
    }
}

/// True if a list of modules as depmod(8) writes it has this one.
fn lists(list: &str, module: &str) -> bool {
    let file = format!("{module}.ko");
    let paths = list.lines().filter_map(|line| line.split(':').next());
    let mut names = paths.filter_map(|path| path.rsplit('/').next());
    names.any(|name| {
        name.strip_prefix(&file).is_some_and(|end| end.is_empty() || end.starts_with('.'))
    })
}

/// Returns the path of a sysctl. /proc/sys/net shows the namespace of the thread that opens it.
fn path(key: &str) -> Result<PathBuf> {
    let swapped: String = key
        .chars()
        .map(|c| match c {
            '.' => '/',
            '/' => '.',
            other => other,
        })
        .collect();
    let plain = swapped.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if plain && swapped.starts_with("net/") {
        return Ok(PathBuf::from("/proc/sys").join(swapped));
    }
    let text = "no sysctl of a network namespace: net. and names".to_owned();
    Err(Error::Invalid { object: key.to_owned(), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_sysctl_error_names_the_remedy() {
        let error = set_here("net.ipv4.no_such_setting", "1").unwrap_err().to_string();
        let expected = "sysctl net.ipv4.no_such_setting: this machine's kernel does not have it; remove \
                        it, or take a newer kernel";
        assert_eq!(error, expected);
        let error = missing("net.mpls.conf.eth0.input").to_string();
        assert!(
            error.contains("module mpls_router") || error.contains("modprobe mpls_router"),
            "{error}"
        );
        let list = "kernel/net/mpls/mpls_router.ko.xz: kernel/net/ipv4/ip_tunnel.ko.xz\n";
        assert!(lists(list, "mpls_router") && !lists(list, "ip_tunnel") && !lists(list, "mpls"));
    }

    #[test]
    fn missing_and_foreign_sysctls_do_not_exist() {
        assert!(exists("net.ipv4.ip_forward") && exists("net.ipv4"));
        assert!(!exists("net.ipv4.no_such_setting") && !exists("kernel.hostname"));
    }

    #[test]
    fn dot_in_interface_name_is_preserved() {
        let want = PathBuf::from("/proc/sys/net/ipv4/conf/eth0.5/rp_filter");
        assert_eq!(path("net.ipv4.conf.eth0/5.rp_filter").unwrap(), want);
    }

    #[test]
    fn sysctl_keys_cannot_leave_net() {
        for key in ["kernel.hostname", "net..x", "net.//.kernel", "net.//.//.x", ""] {
            assert!(path(key).is_err(), "{key}");
        }
    }
}
