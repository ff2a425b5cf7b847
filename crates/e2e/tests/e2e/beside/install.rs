//! `scripts/install-deps` on machines without the pinned Rust, or without any. The programs that it
//! calls are simulated: nothing is downloaded, and this machine stays unchanged.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// System tools called by the script and by the simulated programs.
const TOOLS: [&str; 8] = ["cat", "chmod", "cut", "dirname", "grep", "mkdir", "sed", "sh"];

/// Reports every package as installed.
const DPKG_QUERY: &str = r#"shift 3; for package; do echo "ii  $package"; done"#;

/// Installs a rustup, as rustup's own script does.
const CURL: &str = r#"echo "curl $*" >> "$LOG"
cat << 'SCRIPT'
echo "init $*" >> "$LOG"
bin="${CARGO_HOME:-$HOME/.cargo}/bin"
mkdir -p "$bin"
cat "$PLAYED/rustup" > "$bin/rustup"
cat "$PLAYED/proxy" > "$bin/rustc"
chmod 0755 "$bin/rustup" "$bin/rustc"
SCRIPT"#;

const RUSTUP: &str = r#"echo "rustup $*" >> "$LOG"
[ "$1 $2" = "toolchain install" ] && echo "$3" > "$PLAYED/toolchain""#;

/// rustup's rustc: an error until the toolchain is there.
const PROXY: &str = r#"[ "$RUSTUP_AUTO_INSTALL" = 0 ] || exit 9
version=$(cat "$PLAYED/toolchain" 2> /dev/null) || exit 1
echo "rustc $version (0000 2026-01-01)""#;

const DEBIANS_RUSTC: &str = "echo 'rustc 1.63.0'";

struct Machine {
    directory: tempfile::TempDir,
    cargo_home: Option<PathBuf>,
}

impl Machine {
    fn new(programs: &[(&str, &str)]) -> Self {
        let machine = Self { directory: tempfile::tempdir().unwrap(), cargo_home: None };
        for name in ["bin", "played", "home"] {
            fs::create_dir(machine.path(name)).unwrap();
        }
        for tool in TOOLS {
            symlink(Path::new("/usr/bin").join(tool), machine.path("bin").join(tool)).unwrap();
        }
        machine.play("bin/dpkg-query", DPKG_QUERY);
        machine.play("bin/curl", CURL);
        machine.play("played/rustup", RUSTUP);
        machine.play("played/proxy", PROXY);
        for (path, script) in programs {
            machine.play(path, script);
        }
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn play(&self, path: &str, script: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn install(&self) -> Output {
        let mut command = Command::new(Path::new(REPOSITORY).join("scripts/install-deps"));
        command
            .env_clear()
            .env("PATH", self.path("bin"))
            .env("HOME", self.path("home"))
            .env("LOG", self.path("log"))
            .env("PLAYED", self.path("played"));
        if let Some(path) = &self.cargo_home {
            command.env("CARGO_HOME", path);
        }
        command.output().unwrap()
    }

    /// Calls made, with a word before each line's arguments.
    #[track_caller]
    fn installs(&self) -> Vec<String> {
        let output = self.install();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        let _ = fs::remove_file(self.path("log"));
        log.lines().map(str::to_owned).collect()
    }
}

fn pinned() -> String {
    let text = fs::read_to_string(Path::new(REPOSITORY).join("rust-toolchain.toml")).unwrap();
    text.split('"').nth(1).unwrap().to_owned()
}

fn calls(rustup: bool) -> Vec<String> {
    let mut calls = Vec::new();
    if rustup {
        calls.push("curl --proto =https --tlsv1.2 -fsS https://sh.rustup.rs".to_owned());
        calls.push("init -y --no-modify-path --profile minimal --default-toolchain none".into());
    }
    calls.push(format!(
        "rustup toolchain install {} --no-self-update --profile minimal \
         --component clippy --component rustfmt",
        pinned()
    ));
    calls
}

#[test]
fn missing_or_wrong_rust_is_installed() {
    let rustup = ("home/.cargo/bin/rustup", RUSTUP);
    let proxy = ("home/.cargo/bin/rustc", PROXY);
    let debians = ("bin/rustc", DEBIANS_RUSTC);
    for (what, programs, expected) in [
        ("no Rust", &[][..], calls(true)),
        ("Debian's", &[debians], calls(true)),
        ("rustup without the toolchain", &[rustup, proxy], calls(false)),
        ("both", &[rustup, proxy, debians], calls(false)),
    ] {
        let machine = Machine::new(programs);
        assert_eq!(machine.installs(), expected, "{what}");
        assert_eq!(machine.installs(), [""; 0], "{what}: all is there");
    }
    let current = format!("echo 'rustc {} (0000 2026-01-01)'", pinned());
    let machine = Machine::new(&[("bin/rustc", &current)]);
    assert_eq!(machine.installs(), [""; 0], "the pinned one without rustup");
    let mut machine = Machine::new(&[debians]);
    machine.cargo_home = Some(machine.path("elsewhere"));
    assert_eq!(machine.installs(), calls(true), "Cargo's files elsewhere");
}

#[test]
fn a_failed_download_is_an_error() {
    let machine = Machine::new(&[("bin/curl", "echo 'curl: (6) no such host' >&2; exit 6")]);
    let output = machine.install();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no such host"));
    assert!(!machine.path("played/toolchain").exists());
}
