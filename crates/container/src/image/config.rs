//! What an image says of how it is run: its command, and with what environment, where and as whom.
//!
//! What it says is checked as a spec's would be; the files that it names are looked for inside of it.
//! Source: OCI image specification 1.1, "Image Configuration" (config.md).

use std::fs;
use std::path::{Component, Path};

use serde::Deserialize;

use super::{blob, failed, manifest, parse};
use crate::error::Result;

/// Architecture of the machines that PdP runs on, and their system.
const ARCHITECTURE: &str = "amd64";
const SYSTEM: &str = "linux";

/// Directories of the kernel's, where no image works: what is in them at its start is not its own.
const KERNELS: [&str; 3] = ["dev", "proc", "sys"];

/// How an image is run.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Own {
    /// Entry point and command: what is run where nothing else is asked for; may be empty.
    pub argv: Vec<String>,
    /// Environment, in its order.
    pub env: Vec<(String, String)>,
    /// Working directory, absolute; empty where it says none.
    pub workdir: String,
    /// `USER` or `USER:GROUP` by name or number; empty: root.
    pub user: String,
}

#[derive(Default, Deserialize)]
struct File {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<Config>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Config {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
}

/// The digests of an image's layers, unpacked, lowest first; empty where it says none.
pub(super) fn diff_ids(bytes: &[u8]) -> std::result::Result<Vec<String>, String> {
    #[derive(Default, Deserialize)]
    struct File {
        #[serde(default)]
        rootfs: Option<RootFs>,
    }
    #[derive(Default, Deserialize)]
    struct RootFs {
        #[serde(default)]
        diff_ids: Option<Vec<String>>,
    }
    let file: File = parse(bytes).map_err(|error| error.to_string())?;
    Ok(file.rootfs.unwrap_or_default().diff_ids.unwrap_or_default())
}

impl Own {
    /// Of the one image of a layout; its digests are checked.
    pub fn read(layout: &Path) -> Result<Self> {
        let (_, manifest) = manifest(layout, None)?;
        let bytes = blob(layout, manifest.config());
        let bytes = bytes.map_err(|error| failed(layout, format!("configuration: {error}")))?;
        Self::parse(&bytes).map_err(|why| failed(layout, format!("configuration: {why}")))
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let file: File = parse(bytes).map_err(|error| error.to_string())?;
        if !matches!(&*file.architecture, "" | ARCHITECTURE) {
            return Err(format!("it is for {}, not {ARCHITECTURE}", file.architecture));
        }
        if !matches!(&*file.os, "" | SYSTEM) {
            return Err(format!("it is for {}, not {SYSTEM}", file.os));
        }
        let config = file.config.unwrap_or_default();
        let mut argv = config.entrypoint.unwrap_or_default();
        argv.extend(config.cmd.unwrap_or_default());
        let env = config.env.unwrap_or_default();
        let pairs = env.iter().filter_map(|pair| pair.split_once('='));
        let env: Vec<_> = pairs
            .filter(|(key, _)| !key.is_empty())
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        let workdir = config.working_dir.unwrap_or_default();
        let user = config.user.unwrap_or_default();
        let words = argv.iter().chain([&workdir, &user]);
        let values = env.iter().flat_map(|(key, value)| [key, value]);
        if words.chain(values).any(|word| word.contains('\0')) {
            return Err("a word with a zero byte".into());
        }
        if workdir.split('/').any(|part| part == "..") {
            return Err(format!("working directory {workdir:?} has .."));
        }
        let first = workdir.split('/').find(|part| !matches!(*part, "" | "."));
        if first.is_some_and(|first| KERNELS.contains(&first)) {
            return Err(format!("working directory {workdir:?} is the kernel's"));
        }
        Ok(Self { argv, env, workdir: format!("/{}", workdir.trim_matches('/')), user })
    }
}

/// Whether `path`, absolute, is a directory of the image at `root`, without links on its way.
pub(crate) fn has_directory(root: &Path, path: &Path) -> bool {
    let mut dir = root.to_owned();
    path.components().all(|component| {
        if let Component::Normal(name) = component {
            dir.push(name);
        }
        fs::symlink_metadata(&dir).is_ok_and(|meta| meta.is_dir())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_read_as_docker_reads_it() {
        let text = br#"{"architecture": "amd64", "config": {"Entrypoint": ["/e"], "Cmd": ["a", "b"],
            "Env": ["PATH=/x:/y", "A=b=c", "broken", "=x"], "WorkingDir": "/srv/", "User": "frr:frr"}}"#;
        let own = Own::parse(text).unwrap();
        assert_eq!(own.argv, ["/e", "a", "b"]);
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(own.env, [pair("PATH", "/x:/y"), pair("A", "b=c")]);
        assert_eq!((&*own.workdir, &*own.user), ("/srv", "frr:frr"));
        let none = Own::parse(br#"{"config": {"Entrypoint": null, "Cmd": null}}"#).unwrap();
        assert_eq!(none, Own { workdir: "/".into(), ..Own::default() });
        assert!(Own::parse(b"{}").is_ok());
        for bad in [
            &br#"{"architecture": "arm64"}"#[..],
            br#"{"os": "windows"}"#,
            br#"{"config": {"WorkingDir": "/./proc/self/fd/7"}}"#,
            br#"{"config": {"Cmd": ["\u0000"]}}"#,
            br#"{"config": {"WorkingDir": "/a/../b"}}"#,
            br#"{"config": {"Cmd": "text"}}"#,
            b"[",
        ] {
            assert!(Own::parse(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }
}
