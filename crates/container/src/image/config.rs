//! An image's settings for running it: command, environment, directory and user.
//!
//! PdP checks the values like a spec's, and resolves file names inside the image. Source: OCI
//! image specification 1.1, "Image Configuration" (config.md).

use std::fs;
use std::path::{Component, Path};

use serde::Deserialize;

use super::{blob, failed, manifest, parse};
use crate::error::Result;

/// Architecture and system of the machines that PdP runs on.
const ARCHITECTURE: &str = "amd64";
const SYSTEM: &str = "linux";

/// Directories of the kernel's file systems. An image can't have its working directory there: their
/// content does not come from the image.
const KERNELS: [&str; 3] = ["dev", "proc", "sys"];

/// Settings for running an image.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ImageDefaults {
    /// Entry point and command; may be empty. They run if the spec names no other command.
    pub argv: Vec<String>,
    /// Environment, in order.
    pub env: Vec<(String, String)>,
    /// Working directory, absolute; empty if not given.
    pub workdir: String,
    /// `USER` or `USER:GROUP` by name or number; empty: root.
    pub user: String,
}

#[derive(Default, Deserialize)]
struct ImageConfigFile {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<ImageConfig>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ImageConfig {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
}

/// Returns the digests of an image's unpacked layers, lowest first; empty if not given.
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

impl ImageDefaults {
    /// Reads the settings of a layout's only image, and checks the digests.
    pub fn read(layout: &Path) -> Result<Self> {
        let (_, manifest) = manifest(layout, None)?;
        let bytes = blob(layout, manifest.config());
        let bytes = bytes.map_err(|error| failed(layout, format!("configuration: {error}")))?;
        Self::parse(&bytes).map_err(|why| failed(layout, format!("configuration: {why}")))
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let file: ImageConfigFile = parse(bytes).map_err(|error| error.to_string())?;
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
            return Err("a value with a zero byte".into());
        }
        if workdir.split('/').any(|part| part == "..") {
            return Err(format!("working directory {workdir:?} has .."));
        }
        let first = workdir.split('/').find(|part| !matches!(*part, "" | "."));
        if first.is_some_and(|first| KERNELS.contains(&first)) {
            return Err(format!("working directory {workdir:?} is reserved for the kernel"));
        }
        Ok(Self { argv, env, workdir: format!("/{}", workdir.trim_matches('/')), user })
    }
}

/// True if the absolute `path` is a directory of the image at `root`, without links in the path.
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
    fn reads_image_configuration_like_docker() {
        let text = br#"{"architecture": "amd64", "config": {"Entrypoint": ["/e"], "Cmd": ["a", "b"],
            "Env": ["PATH=/x:/y", "A=b=c", "broken", "=x"], "WorkingDir": "/srv/", "User": "frr:frr"}}"#;
        let own = ImageDefaults::parse(text).unwrap();
        assert_eq!(own.argv, ["/e", "a", "b"]);
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(own.env, [pair("PATH", "/x:/y"), pair("A", "b=c")]);
        assert_eq!((&*own.workdir, &*own.user), ("/srv", "frr:frr"));
        let none =
            ImageDefaults::parse(br#"{"config": {"Entrypoint": null, "Cmd": null}}"#).unwrap();
        assert_eq!(none, ImageDefaults { workdir: "/".into(), ..ImageDefaults::default() });
        assert!(ImageDefaults::parse(b"{}").is_ok());
        for bad in [
            &br#"{"architecture": "arm64"}"#[..],
            br#"{"os": "windows"}"#,
            br#"{"config": {"WorkingDir": "/./proc/self/fd/7"}}"#,
            br#"{"config": {"Cmd": ["\u0000"]}}"#,
            br#"{"config": {"WorkingDir": "/a/../b"}}"#,
            br#"{"config": {"Cmd": "text"}}"#,
            b"[",
        ] {
            assert!(ImageDefaults::parse(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }
}
