//! The small root of [`crate::RootFilesystem::Host`]: directories to mount on, links as on the
//! host, and an `/etc` of the files that programs look up.
//!
//! It has only a few things of the host: `/usr`, the system's accounts, the files of
//! [`ETC_COPIED`], certificates, and the names of directories for state. None of these is secret on
//! a usual machine. It has no password, no private key ([`is_secret`]) and no file below `/var` of
//! the machine.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use crate::error::{Error, ErrorContext, Result};
use crate::process::end_within;
use crate::spec::{FileOwner, GuestFile, GuestSpec};

/// Largest user id of the system.
const SYSTEM_ID_MAX: u32 = 999;

/// Id of `nobody` and `nogroup`.
const NOBODY_ID: u32 = 65534;

/// Largest `/etc/passwd` or `/etc/group` of a guest that users are looked up in, bytes.
const ACCOUNTS_BYTES_MAX: u64 = 1 << 20;

/// User and group id of root inside the guest.
const ROOT: (u32, u32) = (0, 0);

/// Links or directories beside `/usr` by which programs and their loader are found.
const USR_LINKS: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

const DIRS: &[(&str, u32)] = &[
    ("dev", 0o755),
    ("etc", 0o755),
    ("etc/default", 0o755),
    ("etc/dhcp", 0o755),
    ("etc/profile.d", 0o755),
    ("etc/ssh", 0o755),
    ("etc/ssl", 0o755),
    ("home", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o755),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("srv", 0o755),
    ("sys", 0o755),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
];

/// Directories where packages make directories for their programs' state, such as `/var/lib/misc`
/// for dnsmasq. The guest gets the machine's directories empty, with their owners and modes.
const STATE_DIRS: [&str; 4] = ["var/cache", "var/lib", "var/log", "var/spool"];

/// State of the machine's own package manager. An empty one would be wrong.
const STATE_LEFT_OUT: [&str; 3] = ["apt", "debconf", "dpkg"];

/// Largest number of directories below each of [`STATE_DIRS`].
const STATE_DIRS_MAX: usize = 256;

/// Records of logins, with group `utmp`. Login programs complain if they are missing.
const LOGIN_FILES: [&str; 2] = ["var/log/lastlog", "var/log/wtmp"];

/// Directories of routing software, made if its user exists.
const USERS_DIRS: &[(&str, &str)] = &[
    ("bird", "etc/bird"),
    ("bird", "run/bird"),
    ("frr", "etc/frr"),
    ("frr", "run/frr"),
    ("frr", "var/lib/frr"),
    ("frr", "var/log/frr"),
];

const LINKS: &[(&str, &str)] =
    &[("var/run", "/run"), ("var/lock", "/run/lock"), ("etc/mtab", "/proc/self/mounts")];

/// Files and directories of `/etc` that are copied from the host.
const ETC_COPIED: &[&str] = &[
    "bash.bashrc",
    "bindresvport.blacklist",
    "ca-certificates.conf",
    "debian_version",
    "default/locale",
    "default/nss",
    "default/useradd",
    "dhcp/debug",
    "dhcp/dhclient-enter-hooks.d",
    "dhcp/dhclient-exit-hooks.d",
    "environment",
    "ethertypes",
    "gai.conf",
    "inputrc",
    "iproute2",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "login.defs",
    "networks",
    "nsswitch.conf",
    "os-release",
    "pam.conf",
    "pam.d",
    "profile",
    "protocols",
    "rpc",
    "services",
    "shells",
    "skel",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
];

/// Hundreds of links, the same in all guests.
const ALTERNATIVES: &str = "/etc/alternatives";

/// Certificates that TLS trusts: hundreds of links, too.
const CERTIFICATES: &str = "/etc/ssl/certs";

/// Largest file that is read whole to check for secrets, bytes.
const COPIED_BYTES_MAX: u64 = 4 << 20;

/// dhclient's configuration as in Debian. The machine's own file may have keys of its network.
const DHCLIENT: &str = "/etc/dhcp/dhclient.conf";
const DHCLIENT_CONF: &str = "\
option rfc3442-classless-static-routes code 121 = array of unsigned integer 8;
send host-name = gethostname();
request subnet-mask, broadcast-address, time-offset, routers, domain-name, domain-name-servers, domain-search,
    host-name, dhcp6.name-servers, dhcp6.domain-search, dhcp6.fqdn, dhcp6.sntp-servers, netbios-name-servers,
    netbios-scope, interface-mtu, rfc3442-classless-static-routes, ntp-servers;
";

/// The machine's own configuration may permit only its users. This one works without PAM, whose
/// modules need more than a guest has.
const SSHD: &str = "/usr/sbin/sshd";
const SSHD_CONFIG: &str = "\
Include /etc/ssh/sshd_config.d/*.conf
PermitRootLogin prohibit-password
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
";
const SSH_KEYGEN: &str = "/usr/bin/ssh-keygen";

/// Longest time for making a key.
const KEYGEN_WAIT: Duration = Duration::from_secs(10);

/// An entry of `/etc/passwd` or `/etc/group`.
pub(crate) struct AccountEntry<'a> {
    pub(crate) name: &'a str,
    line: &'a str,
    pub(crate) id: u32,
    pub(crate) group: u32,
}

impl<'a> AccountEntry<'a> {
    /// True if it has this name or number.
    pub(crate) fn is(&self, owner: &str) -> bool {
        self.name == owner || owner.parse() == Ok(self.id)
    }

    /// Returns the home directory of an entry of `/etc/passwd` if it is an absolute path.
    pub(crate) fn home(&self) -> Option<&'a str> {
        self.line.split(':').nth(5).filter(|home| home.starts_with('/'))
    }

    /// Returns the members of an entry of `/etc/group`.
    pub(crate) fn members(&self) -> impl Iterator<Item = &'a str> {
        self.last().split(',')
    }

    /// Returns the members as written in the entry.
    fn last(&self) -> &'a str {
        self.line.split(':').nth(3).unwrap_or_default()
    }
}

/// Returns the entries of a file like `/etc/passwd` or `/etc/group`.
pub(crate) fn accounts(text: &str) -> impl Iterator<Item = AccountEntry<'_>> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let id = fields.nth(1)?.parse().ok()?;
        let group = fields.next().and_then(|group| group.parse().ok()).unwrap_or(id);
        Some(AccountEntry { name, line, id, group })
    })
}

/// Returns the text of a file like `etc/passwd` in a guest's root, if the file has at most
/// [`ACCOUNTS_BYTES_MAX`]. Links are resolved inside the root, as in the guest. Links of an image
/// never lead to files of the machine.
pub(crate) fn account_file(root: &Path, file: &str) -> Option<String> {
    let top = fs::File::open(root).ok()?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = fs::File::from(openat2(&top, file, flags, Mode::empty(), inside).ok()?);
    let mut text = Vec::new();
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    file.take(ACCOUNTS_BYTES_MAX + 1).read_to_end(&mut text).ok()?;
    let short = text.len() as u64 <= ACCOUNTS_BYTES_MAX;
    // People's names in it may have any encoding.
    short.then(|| String::from_utf8_lossy(&text).into_owned())
}

/// True if a guest finds no directory at a path in its root. Other errors appear when it is
/// mounted.
pub(crate) fn lacks_directory(root: &Path, path: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let Ok(top) = fs::File::open(root) else { return false };
    let found = openat2(&top, path, flags, Mode::empty(), inside);
    matches!(found, Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// Returns the entries that belong to the system.
fn system_accounts(text: &str) -> impl Iterator<Item = AccountEntry<'_>> {
    accounts(text).filter(|account| account.id <= SYSTEM_ID_MAX || account.id == NOBODY_ID)
}

/// Returns the user and group id inside, for an owner in a guest with this root.
pub(crate) fn ids(spec: &GuestSpec, root: &Path, owner: &FileOwner) -> Result<(u32, u32)> {
    let fail = |text: String| Error::Spec { id: spec.id.clone(), text };
    let (uid, gid) = match owner {
        FileOwner::Ids { uid, gid } => (*uid, *gid),
        FileOwner::Named { user, group } => {
            // Without a named group, a number is its own group. So is root's, which every root has.
            let find = |name: &str, file: &str| match (name.parse(), name) {
                (Ok(id), _) => Some((id, id)),
                (_, "root") => Some((0, 0)),
                _ => {
                    let text = account_file(root, file)?;
                    let found = accounts(&text).find(|account| account.name == name)?;
                    Some((found.id, found.group))
                }
            };
            let missing = |kind: &str, name: &str, file: &str| {
                fail(format!("no {kind} {name} in its /{file}; give a number, or another name"))
            };
            let (uid, own) =
                find(user, "etc/passwd").ok_or_else(|| missing("user", user, "etc/passwd"))?;
            let gid = match group {
                Some(group) => {
                    let found = find(group, "etc/group");
                    found.ok_or_else(|| missing("group", group, "etc/group"))?.0
                }
                None => own,
            };
            (uid, gid)
        }
    };
    if uid.max(gid) >= spec.users.length {
        let last = spec.users.length.saturating_sub(1);
        return Err(fail(format!("owner {uid}:{gid}: its ids are 0 to {last}")));
    }
    Ok((uid, gid))
}

/// Returns the host's directories that this guest's root shows read-only.
pub(crate) fn shown(spec: &GuestSpec) -> Vec<PathBuf> {
    let beside =
        USR_LINKS.iter().map(|name| Path::new("/").join(name)).chain([ALTERNATIVES.into()]);
    let certificates = shows_certificates(spec).then(|| PathBuf::from(CERTIFICATES));
    let dirs = beside.chain(certificates).filter(|path| path.is_dir() && !path.is_symlink());
    std::iter::once(PathBuf::from("/usr")).chain(dirs).collect()
}

/// True if the guest sees the machine's own directory of certificates. Otherwise it gets a copy
/// without secrets, to which its own files are added.
fn shows_certificates(spec: &GuestSpec) -> bool {
    let below = |path: &Path| path.starts_with(CERTIFICATES);
    let own = spec.files.iter().any(|file| below(&file.path))
        || spec.binds.iter().any(|bind| below(&bind.target))
        || spec.volumes.iter().any(|volume| below(&volume.target));
    !own && !has_secrets(Path::new(CERTIFICATES))
}

/// True if a directory has anything secret.
fn has_secrets(dir: &Path) -> bool {
    let Ok(entries) = fs::read_dir(dir) else { return false };
    entries.flatten().any(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => is_secret(&entry.path()) || has_secrets(&entry.path()),
        // The link is resolved in the guest's own root.
        Ok(kind) if kind.is_symlink() => false,
        _ => is_secret(&entry.path()),
    })
}

/// True if a file's name or text indicates a private key, or if the file is too long to read.
fn is_secret(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    if name == "private" || ["jks", "key", "keystore", "p12", "pfx"].contains(&ending) {
        return true;
    }
    let Ok(meta) = fs::symlink_metadata(path) else { return true };
    if !meta.is_file() {
        return !meta.is_dir();
    }
    let words = b"PRIVATE KEY";
    let is_key = |text: Vec<u8>| text.windows(words.len()).any(|text| text == words);
    meta.len() > COPIED_BYTES_MAX || fs::read(path).map_or(true, is_key)
}

/// Makes the root of a guest at the new path `root`, with mount points for the host's directories
/// [`shown`] in it.
pub(crate) fn make(spec: &GuestSpec, root: &Path, shown: &[PathBuf]) -> Result<()> {
    make_dir(spec, root, 0o755, ROOT)?;
    for (dir, mode) in DIRS {
        make_dir(spec, &root.join(dir), *mode, ROOT)?;
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    for (user, dir) in USERS_DIRS {
        if let Some(account) = system_accounts(&passwd).find(|account| account.name == *user) {
            make_dir(spec, &root.join(dir), 0o750, (account.id, account.group))?;
        }
    }
    for name in USR_LINKS {
        let (host, guest) = (Path::new("/").join(name), root.join(name));
        match fs::read_link(&host) {
            Ok(target) => make_link(spec, &target, &guest)?,
            Err(_) if host.is_dir() => make_dir(spec, &guest, 0o755, ROOT)?,
            Err(_) => {}
        }
    }
    for (link, target) in LINKS {
        make_link(spec, Path::new(target), &root.join(link))?;
    }
    for dir in STATE_DIRS {
        make_state(spec, &Path::new("/").join(dir), &root.join(dir))?;
    }
    let utmp = (0, group_of("utmp"));
    for file in LOGIN_FILES {
        make_file_of(spec, &root.join(file), "", 0o664, utmp)?;
    }
    make_etc(spec, &root.join("etc"), shown)?;
    if Path::new(SSHD).exists() {
        make_dir(spec, &root.join("run/sshd"), 0o755, ROOT)?;
        make_file(spec, &root.join("etc/ssh/sshd_config"), SSHD_CONFIG)?;
        make_host_key(spec, &root.join("etc/ssh"))?;
    }
    Ok(())
}

/// Makes empty directories like those in a directory of the machine, if their owners exist in the
/// guest.
fn make_state(spec: &GuestSpec, from: &Path, to: &Path) -> Result<()> {
    let is_system = |id: u32| id <= SYSTEM_ID_MAX || id == NOBODY_ID;
    let entries = fs::read_dir(from).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let named = dirs.filter(|entry| {
        entry.file_name().to_str().is_some_and(|name| {
            !STATE_LEFT_OUT.contains(&name) && !name.starts_with("pdp") && !name.starts_with('.')
        })
    });
    for entry in named.take(STATE_DIRS_MAX) {
        let Ok(meta) = entry.metadata() else { continue };
        let place = to.join(entry.file_name());
        if is_system(meta.uid()) && is_system(meta.gid()) && !place.exists() {
            make_dir(spec, &place, meta.mode() & 0o3777, (meta.uid(), meta.gid()))?;
        }
    }
    Ok(())
}

/// Makes a host key if a command is an SSH server. The guest does not get the machine's keys.
fn make_host_key(spec: &GuestSpec, dir: &Path) -> Result<()> {
    let mut words = spec.commands.iter().flat_map(|command| &command.argv);
    let given = Path::new("/etc/ssh/ssh_host_ed25519_key");
    if !words.any(|word| word.contains("sshd")) || spec.files.iter().any(|it| it.path == given) {
        return Ok(());
    }
    let key = dir.join("ssh_host_ed25519_key");
    let mut keygen = Command::new(SSH_KEYGEN);
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "", "-f"]).arg(&key).env_clear();
    keygen.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let made = keygen.spawn().and_then(|mut child| end_within(&mut child, KEYGEN_WAIT));
    // Without a key, the server reports it.
    if made.is_ok_and(|status| status.success()) {
        for (file, mode) in [(key.clone(), 0o600), (key.with_extension("pub"), 0o644)] {
            set_mode(&file, mode)?;
            own(spec, &file, ROOT)?;
        }
    }
    Ok(())
}

/// Returns the id of a group of the machine's system; root's if there is none.
fn group_of(name: &str) -> u32 {
    let text = fs::read_to_string("/etc/group").unwrap_or_default();
    system_accounts(&text).find(|group| group.name == name).map_or(0, |group| group.id)
}

fn make_etc(spec: &GuestSpec, etc: &Path, shown: &[PathBuf]) -> Result<()> {
    for name in ETC_COPIED {
        copy(spec, &Path::new("/etc").join(name), &etc.join(name))?;
    }
    make_dir(spec, &etc.join("alternatives"), 0o755, ROOT)?;
    match shown.iter().any(|dir| dir == Path::new(CERTIFICATES)) {
        true => make_dir(spec, &etc.join("ssl/certs"), 0o755, ROOT)?,
        false => copy(spec, Path::new(CERTIFICATES), &etc.join("ssl/certs"))?,
    }
    // No account has a password. With `*`, logins by key work.
    let shadow = (0, group_of("shadow"));
    for (name, private) in [("passwd", "shadow"), ("group", "gshadow")] {
        let host = Path::new("/etc").join(name);
        let host = fs::read_to_string(&host).at("read", &host)?;
        let (mut lines, mut without) = (String::new(), String::new());
        for account in system_accounts(&host) {
            lines += &format!("{}\n", account.line);
            without += &match name {
                "passwd" => format!("{}:*:19000:0:99999:7:::\n", account.name),
                _ => format!("{}:*::{}\n", account.name, account.last()),
            };
        }
        make_file(spec, &etc.join(name), &lines)?;
        make_file_of(spec, &etc.join(private), &without, 0o640, shadow)?;
    }
    if Path::new(DHCLIENT).exists() {
        make_file(spec, &etc.join("dhcp/dhclient.conf"), DHCLIENT_CONF)?;
    }
    // Scripts look for it, such as dhclient's.
    make_file(spec, &etc.join("fstab"), "")?;
    let hostname = &spec.hostname;
    let hosts = format!("127.0.0.1 localhost {hostname}\n::1 localhost {hostname}\n");
    make_file(spec, &etc.join("hosts"), &hosts)?;
    make_file(spec, &etc.join("hostname"), &format!("{hostname}\n"))?;
    make_file(spec, &etc.join("resolv.conf"), "")?;
    if etc.join("frr").is_dir() {
        // Without it, vtysh complains at each start.
        make_file(spec, &etc.join("frr/vtysh.conf"), "service integrated-vtysh-config\n")?;
    }
    Ok(())
}

/// Copies a file, link or directory of the host if it exists and everybody may read it.
fn copy(spec: &GuestSpec, from: &Path, to: &Path) -> Result<()> {
    let Ok(meta) = fs::symlink_metadata(from) else { return Ok(()) };
    if meta.is_symlink() {
        return make_link(spec, &fs::read_link(from).at("read the link", from)?, to);
    }
    if meta.permissions().mode() & 0o004 == 0 || is_secret(from) {
        return Ok(());
    }
    if meta.is_dir() {
        make_dir(spec, to, 0o755, ROOT)?;
        for entry in fs::read_dir(from).at("read", from)? {
            let entry = entry.at("read", from)?;
            copy(spec, &entry.path(), &to.join(entry.file_name()))?;
        }
    } else if meta.is_file() {
        fs::copy(from, to).at("copy", from)?;
        own(spec, to, ROOT)?;
    }
    Ok(())
}

/// Puts a file into a generated root, with the directories above it. Replaces an existing file. No
/// other process writes in the root yet. Follows no link in it.
pub(crate) fn write_file(
    spec: &GuestSpec,
    root: &Path,
    file: &GuestFile,
    owner: (u32, u32),
) -> Result<()> {
    let (place, parent) = (inside(spec, root, &file.path)?, file.path.parent());
    make_parents(spec, root, parent.unwrap_or(&file.path))?;
    match fs::symlink_metadata(&place) {
        Ok(found) if found.is_dir() => {
            let text = format!("file {}: there is a directory with this path", file.path.display());
            return Err(Error::Spec { id: spec.id.clone(), text });
        }
        Ok(_) => fs::remove_file(&place).at("replace", &place)?,
        Err(_) => {}
    }
    fs::write(&place, &file.content).at("write", &place)?;
    let mode = fs::Permissions::from_mode(file.mode & 0o777);
    fs::set_permissions(&place, mode).at("set the mode of", &place)?;
    own(spec, &place, owner)
}

/// Makes a mount point for a directory or file in a generated root if it does not exist.
pub(crate) fn make_mount_point(
    spec: &GuestSpec,
    root: &Path,
    path: &Path,
    directory: bool,
) -> Result<()> {
    let place = inside(spec, root, path)?;
    if directory {
        return make_parents(spec, root, path);
    }
    make_parents(spec, root, path.parent().unwrap_or(path))?;
    match fs::symlink_metadata(&place) {
        Ok(_) => Ok(()),
        Err(_) => make_file(spec, &place, ""),
    }
}

/// Returns the machine's path of a path inside the guest.
fn inside(spec: &GuestSpec, root: &Path, path: &Path) -> Result<PathBuf> {
    match path.strip_prefix("/") {
        Ok(below) if below.components().all(|part| matches!(part, Component::Normal(_))) => {
            Ok(root.join(below))
        }
        _ => {
            let text = format!("{}: not an absolute path without ..", path.display());
            Err(Error::Spec { id: spec.id.clone(), text })
        }
    }
}

/// Makes a directory in a generated root with the directories above it, if they do not exist.
fn make_parents(spec: &GuestSpec, root: &Path, path: &Path) -> Result<()> {
    let place = inside(spec, root, path)?;
    if place == root {
        return Ok(());
    }
    make_parents(spec, root, path.parent().unwrap_or(path))?;
    match fs::symlink_metadata(&place) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => {
            let text = format!("{}: a file or link, not a directory", path.display());
            Err(Error::Spec { id: spec.id.clone(), text })
        }
        Err(_) => make_dir(spec, &place, 0o755, ROOT),
    }
}

fn make_dir(spec: &GuestSpec, path: &Path, mode: u32, owner: (u32, u32)) -> Result<()> {
    fs::create_dir(path).at("make", path)?;
    // The process's umask would restrict the mode of mkdir(2).
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).at("set the mode of", path)?;
    own(spec, path, owner)
}

fn make_link(spec: &GuestSpec, target: &Path, link: &Path) -> Result<()> {
    symlink(target, link).at("link", link)?;
    own(spec, link, ROOT)
}

fn make_file(spec: &GuestSpec, path: &Path, text: &str) -> Result<()> {
    make_file_of(spec, path, text, 0o644, ROOT)
}

/// Makes a file with a mode and an owner.
fn make_file_of(
    spec: &GuestSpec,
    path: &Path,
    text: &str,
    mode: u32,
    owner: (u32, u32),
) -> Result<()> {
    fs::write(path, text).at("write", path)?;
    set_mode(path, mode)?;
    own(spec, path, owner)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).at("set the mode of", path)
}

/// Gives a file of the host to a user and group of the guest.
pub(crate) fn own(spec: &GuestSpec, path: &Path, (uid, gid): (u32, u32)) -> Result<()> {
    let result: io::Result<()> = lchown(path, Some(spec.host_id(uid)), Some(spec.host_id(gid)));
    result.at("give away", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selects_only_system_accounts() {
        let text = "root:x:0:0:root:/root:/bin/bash\nanna:x:1000:1000::/home/anna:/bin/sh\n\
                    frr:x:106:111::/nonexistent:/usr/sbin/nologin\nbroken\n:::\n\
                    nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
        let names: Vec<_> = system_accounts(text).map(|account| account.name).collect();
        assert_eq!(names, ["root", "frr", "nobody"]);
        assert_eq!(system_accounts(text).nth(1).map(|frr| (frr.id, frr.group)), Some((106, 111)));
        // In /etc/group, the field after the id has the members.
        assert_eq!(accounts("frrvty:x:110:frr\n").next().map(|group| group.id), Some(110));
    }

    #[test]
    fn detects_private_keys_by_name_and_content() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path();
        let put = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).unwrap();
            path
        };
        fs::create_dir(dir.join("more")).unwrap();
        for (name, text) in [
            ("ca.crt", "-----BEGIN CERTIFICATE-----\n"),
            ("more/openssl.cnf", "private_key = $dir/private/cakey.pem\n"),
            ("key", "of a map\n"),
        ] {
            assert!(!is_secret(&put(name, text)), "{name}");
        }
        symlink("/etc/ssl/private/key.pem", dir.join("more/link")).unwrap();
        assert!(!has_secrets(dir), "a link has no text of its own");
        for (name, text) in [
            ("both.pem", "-----BEGIN CERTIFICATE-----\n-----BEGIN RSA PRIVATE KEY-----\n"),
            ("more/new.pem", "-----BEGIN PRIVATE KEY-----\n"),
            ("server.key", ""),
            ("store.p12", ""),
            ("private", ""),
        ] {
            let path = put(name, text);
            assert!(is_secret(&path) && has_secrets(dir), "{name}");
            fs::remove_file(path).unwrap();
        }
        let long = put("long", "");
        fs::File::options().write(true).open(&long).unwrap().set_len(COPIED_BYTES_MAX + 1).unwrap();
        assert!(is_secret(&long) && is_secret(&dir.join("none")));
    }

    #[test]
    fn no_secret_is_copied() {
        let top = tempfile::tempdir().unwrap();
        let (from, to) = (top.path().join("from"), top.path().join("to"));
        fs::create_dir_all(from.join("private")).unwrap();
        for (name, text, mode) in [
            ("ca.crt", "a", 0o644),
            ("mine.pem", "PRIVATE KEY", 0o644),
            ("closed", "a", 0o640),
            ("private/x", "a", 0o644),
        ] {
            fs::write(from.join(name), text).unwrap();
            set_mode(&from.join(name), mode).unwrap();
        }
        let spec = serde_json::json!({
            "id": "a", "dir": "/a", "cgroup": "a", "root": "Host", "profile": "Host", "privileged": false,
            "packet_rings": false, "users": { "base": rustix::process::getuid().as_raw(), "length": 1 },
            "uid": 0, "hostname": "a", "files": [], "binds": [], "commands": [], "env": {}, "sysctls": {},
            "limits": {}, "open_files_max": 1, "log_bytes_max": 1,
        });
        copy(&serde_json::from_value(spec).unwrap(), &from, &to).unwrap();
        let names = fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["ca.crt"]);
    }

    /// An image may have anything at `/etc/passwd`.
    #[test]
    fn account_lookup_stays_in_root_and_is_bounded() {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("root");
        let etc = root.join("etc");
        let passwd = etc.join("passwd");
        fs::create_dir_all(&etc).unwrap();
        let of = || account_file(&root, "etc/passwd");
        assert_eq!(of(), None);
        fs::write(&passwd, "frr:x:1:1\n").unwrap();
        assert_eq!(of().as_deref(), Some("frr:x:1:1\n"));
        let size = |bytes| fs::File::options().write(true).open(&passwd).unwrap().set_len(bytes);
        size(ACCOUNTS_BYTES_MAX).unwrap();
        assert_eq!(of().map(|text| text.len() as u64), Some(ACCOUNTS_BYTES_MAX));
        size(16 << 30).unwrap();
        assert_eq!(of(), None);
        // A device without an end, and a pipe without a writer.
        fs::remove_file(&passwd).unwrap();
        symlink("/dev/zero", &passwd).unwrap();
        assert_eq!(of(), None);
        fs::remove_file(&passwd).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &passwd, rustix::fs::FileType::Fifo, Mode::RWXU, 0)
            .unwrap();
        assert_eq!(of(), None);
        // A link is resolved inside the image, in every part of the path.
        fs::remove_dir_all(&etc).unwrap();
        fs::create_dir(top.path().join("secret")).unwrap();
        fs::write(top.path().join("secret/passwd"), "machine's").unwrap();
        symlink(top.path().join("secret"), &etc).unwrap();
        assert_eq!(of(), None);
        fs::remove_file(&etc).unwrap();
        symlink("../../secret", &etc).unwrap();
        assert_eq!(of(), None);
        fs::create_dir(root.join("secret")).unwrap();
        fs::write(root.join("secret/passwd"), "image's").unwrap();
        assert_eq!(of().as_deref(), Some("image's"));
    }
}
