//! Runs `skopeo` without privileges on this machine. It has its own user
//! id, no capabilities and no means to gain any, few files, a cgroup with
//! limits, and its own directories, whose bytes are counted while it runs.
//!
//! It ends with the thread that started it. It is killed if it takes too long,
//! makes no progress, or writes too much. Its output is untrusted:
//! [`pdp_container::image::ImageStore`] checks it once all its processes have ended.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pdp_container::cgroup::Cgroups;
use pdp_container::image::{ImageStaging, JSON_BYTES_MAX};
use pdp_container::{Limits, free_bytes};
use pdp_net::netns::within;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::proxy::{self, ProxyConfig};

/// Memory of one run, bytes.
const MEMORY_BYTES_MAX: u64 = 512 << 20;

/// Processes and threads of one run.
const PROCESSES_MAX: u64 = 128;

/// Open files of one run.
const OPEN_FILES_MAX: u64 = 256;

/// Files that one run may create.
const FILES_MAX: usize = 1024;

/// Directories among them; each is open while its content is measured.
const DIRECTORIES_MAX: usize = 64;

/// Part of standard error that is kept, bytes: the end.
const TEXT_BYTES_MAX: usize = 4096;

/// Interval of checks.
const CHECK_PAUSE: Duration = Duration::from_millis(100);

/// Error of a pull that the daemon's end prevents.
pub(super) const STOPPED: &str = "the daemon ends during the pull";

/// Longest wait for killed processes to end.
const END_WAIT: Duration = Duration::from_secs(10);

/// Variables of pdpd's environment that configure trust.
const PASSED: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Variables of pdpd's environment that configure proxies.
const PROXIES: [&str; 6] =
    ["HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy"];

/// One run of skopeo, with its permissions.
pub(super) struct SkopeoJob<'a> {
    /// Path of skopeo.
    pub skopeo: &'a Path,
    /// Path of pdpd, which runs as its proxy.
    pub pdpd: &'a Path,
    /// `HOST[:PORT]` of the registry.
    pub registry: &'a str,
    /// `HOST:PORT` that it may reach, at whatever address.
    pub allowed: Vec<String>,
    /// User id, to which [`ImageStaging`] belongs.
    pub uid: u32,
    /// Directories in which it works.
    pub work: &'a ImageStaging,
    /// Cgroup of this run alone.
    pub cgroup: String,
    pub cgroups: &'a Cgroups,
    pub bounds: PullLimits,
    /// True if it has to end.
    pub stopping: &'a AtomicBool,
}

/// Limits of a pull.
#[derive(Clone, Copy, Debug)]
pub struct PullLimits {
    /// Bytes of all its files.
    pub bytes: u64,
    /// Longest time without progress.
    pub stall: Duration,
    /// Longest time in total.
    pub time: Duration,
    /// Bytes that must stay free on the disk.
    pub free_bytes: u64,
}

/// Returns the credentials for one repository from a file like docker's
/// `config.json` or `auth.json`; `None` if it has none.
pub(super) fn credentials(text: &[u8], repository: &str) -> Result<Option<Value>, String> {
    let file: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let all = file["auths"].as_object().ok_or("it has no `auths`")?;
    let fits = |key: &String| {
        let key = key.trim_start_matches("https://").trim_end_matches('/');
        let key = match key {
            "index.docker.io/v1" | "index.docker.io" => "docker.io",
            key => key,
        };
        let rest = repository.strip_prefix(key);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let fitting: serde_json::Map<String, Value> = all
        .iter()
        .filter(|(key, _)| fits(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    Ok((!fitting.is_empty()).then(|| json!({ "auths": fitting })))
}

impl SkopeoJob<'_> {
    /// Writes a file that only this run can read.
    pub fn give(&self, name: &str, content: &[u8]) -> io::Result<PathBuf> {
        let path = self.work.scratch().join(name);
        let mut file = fs::File::options().write(true).create_new(true).open(&path)?;
        file.set_permissions(fs::Permissions::from_mode(0o400))?;
        file.write_all(content)?;
        chown(&path, Some(self.uid), Some(self.uid))?;
        Ok(path)
    }

    /// Runs skopeo until it and all its processes have ended. Returns
    /// its standard output, at most [`JSON_BYTES_MAX`]. `report` is called
    /// with the number of bytes written so far, whenever it grows.
    ///
    /// # Errors
    /// Describes why it failed.
    pub fn run(
        &self,
        arguments: &[String],
        report: &mut dyn FnMut(u64),
    ) -> Result<Vec<u8>, String> {
        let (mut child, mut proxy, _namespace) =
            self.start(arguments).map_err(|error| format!("skopeo: {error}"))?;
        let output = read(child.stdout.take(), JSON_BYTES_MAX as usize, true);
        let errors = read(child.stderr.take(), TEXT_BYTES_MAX, false);
        let watched = self.watch(&mut child, report);
        let _ = child.kill();
        let ended = child.wait();
        let _ = proxy.kill();
        let _ = proxy.wait();
        // All other processes that it started, which may hold its output open.
        self.cgroups
            .remove(&self.cgroup, END_WAIT)
            .map_err(|error| format!("the pull's processes do not end: {error}"))?;
        let errors = errors.join().unwrap_or_default();
        let output = output.join().unwrap_or_default();
        watched?;
        match ended {
            Ok(status) if status.success() => Ok(output),
            Ok(status) if status.signal() == Some(Signal::KILL.as_raw()) => {
                let most = MEMORY_BYTES_MAX >> 20;
                Err(format!("the pull was killed; it may use at most {most} MiB of memory"))
            }
            Ok(status) => Err(words(&String::from_utf8_lossy(&errors), &status.to_string())),
            Err(error) => Err(format!("skopeo: {error}")),
        }
    }

    /// Starts the proxy in a new network namespace. Returns it with the
    /// namespace, and the proxy's address there.
    fn start_proxy(&self) -> io::Result<(Child, OwnedFd, SocketAddr)> {
        for name in PROXIES {
            if let Some(proxy) = other_proxy(&std::env::var(name).unwrap_or_default()) {
                let text =
                    format!("pdpd's {name} names a {proxy} proxy; only http:// is supported");
                return Err(io::Error::other(text));
            }
        }
        let namespace = pdp_net::netns::alone().map_err(io::Error::other)?;
        let listen = |at: SocketAddr| {
            let bound = within(namespace.as_fd(), || Ok(TcpListener::bind(at)));
            bound.map_err(io::Error::other)?
        };
        // Bind this first; otherwise the proxy's own port might be the registry's.
        let relayed = relayed(self.registry);
        let relay = relayed.map(&listen).transpose()?;
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into())?;
        let at = listener.local_addr()?;
        let config = ProxyConfig {
            uid: self.uid,
            allowed: self.allowed.clone(),
            mirrors: mirrors(),
            relay: relayed.map(|to| match self.registry.split(':').next() {
                Some("localhost") => format!("localhost:{}", to.port()),
                _ => to.to_string(),
            }),
        };
        let config = serde_json::to_string(&config).map_err(io::Error::other)?;
        let mut command = Command::new(self.pdpd);
        command.args([proxy::WORD, &config]).env_clear().current_dir("/");
        for name in PROXIES {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        let output = relay.map_or_else(Stdio::null, |relay| OwnedFd::from(relay).into());
        command.stdin(OwnedFd::from(listener)).stdout(output);
        let mut child = command.spawn()?;
        if let Err(error) = self.cgroups.enter(&format!("{}/proxy", self.cgroup), child.id()) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(io::Error::other(error));
        }
        Ok((child, namespace, at))
    }

    /// Returns skopeo, its proxy, and its network namespace, which must
    /// stay open until skopeo runs.
    fn start(&self, arguments: &[String]) -> io::Result<(Child, Child, OwnedFd)> {
        let scratch = self.work.scratch();
        let uid = self.uid.to_string();
        let limits = Limits {
            cpu_cores: Some(1.0),
            memory_bytes: Some(MEMORY_BYTES_MAX),
            processes: Some(PROCESSES_MAX),
            ..Limits::default()
        };
        self.cgroups.ensure(&self.cgroup, &limits).map_err(io::Error::other)?;
        let (mut proxy, namespace, at) = self.start_proxy()?;
        // Waits until it is in its cgroup with the limits.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", r#"read -r _ && exec "$@" < /dev/null"#, "sh"]);
        // Its own network namespace, whose only path out is the proxy.
        let (pdpd, namespace_at) = (std::process::id(), namespace.as_raw_fd());
        command.arg("/usr/bin/nsenter").arg(format!("--net=/proc/{pdpd}/fd/{namespace_at}"));
        command.args(["/usr/bin/setpriv", "--reuid", &uid, "--regid", &uid, "--clear-groups"]);
        command.args(["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]);
        command.args(["--pdeathsig", "KILL", "/usr/bin/prlimit", "--core=0"]);
        command.arg(format!("--fsize={}", self.bounds.bytes));
        command.arg(format!("--nofile={OPEN_FILES_MAX}")).arg(self.skopeo).args(arguments);
        command.env_clear().env("PATH", "/usr/bin:/bin");
        for name in ["HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"] {
            command.env(name, &scratch);
        }
        for name in ["HTTPS_PROXY", "HTTP_PROXY"] {
            command.env(name, format!("http://{at}"));
        }
        for name in PASSED {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        command.current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut begin = || {
            let mut child = command.spawn()?;
            let entered = self.cgroups.enter(&format!("{}/skopeo", self.cgroup), child.id());
            let begun = entered.map_err(io::Error::other).and_then(|()| {
                child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(b"\n"))
            });
            if begun.is_err() {
                let _ = child.kill();
                let _ = child.wait();
            }
            begun.map(|()| child)
        };
        match begin() {
            Ok(child) => Ok((child, proxy, namespace)),
            Err(error) => {
                let _ = proxy.kill();
                let _ = proxy.wait();
                Err(error)
            }
        }
    }

    /// Checks the process periodically until it has ended or has to end.
    fn watch(&self, child: &mut Child, report: &mut dyn FnMut(u64)) -> Result<(), String> {
        let PullLimits { bytes: bytes_max, stall, time, free_bytes: kept_free } = self.bounds;
        let begun = Instant::now();
        let (mut last, mut moved) = (0, begun);
        loop {
            if child.try_wait().map_err(|error| format!("skopeo: {error}"))?.is_some() {
                return Ok(());
            }
            std::thread::sleep(CHECK_PAUSE);
            if self.stopping.load(Ordering::Relaxed) {
                return Err(STOPPED.to_owned());
            }
            let bytes = [self.work.inbox(), self.work.scratch()]
                .iter()
                .map(|dir| measure(dir))
                .sum::<Result<u64, String>>()?;
            if bytes > bytes_max {
                return Err(format!("it has more than {bytes_max} bytes"));
            }
            let free = free_bytes(&self.work.inbox()).map_err(|error| error.to_string())?;
            if free < kept_free {
                return Err(full(kept_free));
            }
            if bytes != last {
                (last, moved) = (bytes, Instant::now());
                report(bytes);
            }
            if moved.elapsed() > stall {
                return Err(format!("the registry sent nothing for {} s", stall.as_secs()));
            }
            if begun.elapsed() > time {
                return Err(format!("the pull took longer than {} s", time.as_secs()));
            }
        }
    }
}

/// Returns the registry's address if it is on the machine's loopback
/// interface. Clients use no proxy for it.
fn relayed(registry: &str) -> Option<SocketAddr> {
    let (host, port) = match registry.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
        _ => (registry, 443),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let address = match host {
        "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
        host => host.parse().ok()?,
    };
    address.is_loopback().then_some(SocketAddr::new(address, port))
}

/// Returns the scheme of a proxy that needs more than plain HTTP.
fn other_proxy(value: &str) -> Option<&str> {
    let (scheme, _) = value.split_once("://")?;
    (!scheme.eq_ignore_ascii_case("http")).then_some(scheme)
}

/// Returns `HOST:PORT` of the registry in a name; 443 is the default port.
pub(super) fn host_and_port(name: &str) -> String {
    let host = name.split('/').next().unwrap_or_default();
    let (_, port) = host.rsplit_once(':').unwrap_or_default();
    if port.parse::<u16>().is_ok() { host.to_owned() } else { format!("{host}:443") }
}

/// Returns `HOST:PORT` of the registries and mirrors in the machine's
/// own settings (containers-registries.conf(5)).
fn mirrors() -> Vec<String> {
    let mut files = vec![PathBuf::from("/etc/containers/registries.conf")];
    let more = fs::read_dir("/etc/containers/registries.conf.d").into_iter().flatten().flatten();
    files.extend(more.map(|entry| entry.path()));
    let texts = files.into_iter().filter_map(|file| fs::read_to_string(file).ok());
    let locations = texts.flat_map(|text| locations(&text));
    locations
        .flat_map(|mirror| {
            let tls = host_and_port(&mirror);
            // A mirror may work without TLS.
            let plain = tls.strip_suffix(":443").map(|host| format!("{host}:80"));
            std::iter::once(tls).chain(plain)
        })
        .collect()
}

/// Returns the values of `location` in a file.
fn locations(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let values = lines.flat_map(|line| line.split("location").skip(1));
    let quoted = values.filter_map(|rest| {
        let rest = rest.trim_start().strip_prefix('=')?.trim_start();
        let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        Some(rest[1..].split_once(quote)?.0.to_owned())
    });
    quoted.collect()
}

/// Error text: the disk is full.
pub(super) fn full(kept_free: u64) -> String {
    format!("the disk is full: {} MiB have to stay free", kept_free >> 20)
}

/// Returns the bytes of everything in a directory while others write to
/// it. Never follows a symbolic link, whenever it was created.
fn measure(top: &Path) -> Result<u64, String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = openat(CWD, top, flags, Mode::empty()).map_err(|error| error.to_string())?;
    let (mut bytes, mut files, mut dirs) = (0, 0, VecDeque::from([top]));
    let mut dirs_left = DIRECTORIES_MAX;
    while let Some(dir) = dirs.pop_front() {
        // Ignore entries that vanish meanwhile.
        let Ok(entries) = Dir::read_from(&dir) else { continue };
        for entry in entries.flatten() {
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            files += 1;
            if files > FILES_MAX {
                return Err(format!("the pull wrote more than {FILES_MAX} files"));
            }
            let Ok(stat) = statat(&dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let blocks = u64::try_from(stat.st_blocks).unwrap_or_default();
            bytes += u64::try_from(stat.st_size).unwrap_or_default().max(blocks * 512);
            if FileType::from_raw_mode(stat.st_mode).is_dir() {
                dirs_left = dirs_left.checked_sub(1).ok_or_else(|| {
                    format!("the pull wrote more than {DIRECTORIES_MAX} directories")
                })?;
                dirs.extend(openat(&dir, entry.file_name(), flags, Mode::empty()));
            }
        }
    }
    Ok(bytes)
}

/// Reads to the end, and keeps at most `bytes_max` bytes: the first, or else the last.
fn read(
    from: Option<impl Read + Send + 'static>,
    bytes_max: usize,
    first: bool,
) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
        let Some(mut from) = from else { return kept };
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if first && kept.len() >= bytes_max {
                continue;
            }
            kept.extend_from_slice(&buffer[..count]);
            if !first && kept.len() > bytes_max {
                kept.drain(..kept.len() - bytes_max);
            }
        }
        kept
    })
}

/// Extracts the reason from skopeo's output, without control characters.
fn words(output: &str, status: &str) -> String {
    let last = output.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or(status);
    let text = match last.split_once("msg=\"") {
        Some((_, text)) => text.trim_end_matches('"').replace("\\\"", "\""),
        None => last.to_owned(),
    };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pull_gets_only_its_registrys_credentials() {
        let text = br#"{"auths": {"r.example": {"auth": "1"}, "r.example:5000": {"auth": "2"},
            "https://index.docker.io/v1/": {"auth": "3"}, "r.example/lab": {"auth": "4"}}, "credsStore": "x"}"#;
        let of = |repository: &str| {
            let found = credentials(text, repository).unwrap();
            let auths = found.map(|found| found["auths"].as_object().unwrap().clone());
            auths
                .into_iter()
                .flatten()
                .map(|(_, value)| value["auth"].to_string())
                .collect::<String>()
        };
        assert_eq!(of("r.example/frr"), "\"1\"");
        assert_eq!(of("r.example/lab/frr"), "\"1\"\"4\"");
        assert_eq!(of("r.example:5000/a"), "\"2\"");
        assert_eq!(of("docker.io/library/a"), "\"3\"");
        assert_eq!(of("r.example.com/a"), "");
        assert!(credentials(b"[]", "a").is_err() && credentials(b"", "a").is_err());
    }

    /// A pull may create anything in its directories.
    #[test]
    fn pull_size_counts_only_its_own_files() {
        let top = tempfile::tempdir().unwrap();
        let empty = measure(top.path()).unwrap();
        fs::File::create(top.path().join("sparse")).unwrap().set_len(5 << 30).unwrap();
        for (name, place) in [("root", "/"), ("device", "/dev/zero"), ("above", "..")] {
            std::os::unix::fs::symlink(place, top.path().join(name)).unwrap();
        }
        let bytes = measure(top.path()).unwrap();
        assert!(bytes - empty >= 5 << 30 && bytes - empty < (5 << 30) + 4096, "{bytes}");
        // At a depth that no path reaches, as it would be too long.
        let mut dir = openat(CWD, top.path(), OFlags::PATH, Mode::empty()).unwrap();
        for _ in 0..20 {
            let name = "d".repeat(250);
            rustix::fs::mkdirat(&dir, &*name, Mode::RWXU).unwrap();
            dir = openat(&dir, &*name, OFlags::PATH, Mode::empty()).unwrap();
        }
        let flags = OFlags::CREATE | OFlags::WRONLY;
        let deep = fs::File::from(openat(&dir, "deep", flags, Mode::RWXU).unwrap());
        deep.set_len(7 << 30).unwrap();
        assert!(measure(top.path()).unwrap() >= 12 << 30);
        let many = tempfile::tempdir().unwrap();
        (0..=DIRECTORIES_MAX)
            .for_each(|n| fs::create_dir(many.path().join(n.to_string())).unwrap());
        assert!(measure(many.path()).unwrap_err().contains("64 directories"));
        let many = tempfile::tempdir().unwrap();
        (0..=FILES_MAX).for_each(|n| fs::write(many.path().join(n.to_string()), "").unwrap());
        assert!(measure(many.path()).unwrap_err().contains("1024 files"));
    }

    #[test]
    fn skopeo_errors_become_one_line_of_text() {
        let output = "note\ntime=\"now\" level=fatal msg=\"no \\\"x\\\" \u{1b}[31m\"\n";
        assert_eq!(words(output, "code 1"), "no \"x\"  [31m");
        assert_eq!(words("\n", "exit status: 1"), "exit status: 1");
    }
}
