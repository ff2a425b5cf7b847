//! Users of a node other than root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{TestNode, bin, run};

/// User of the `pdp` command.
#[derive(Debug)]
pub struct PdpUser {
    /// Words before the arguments.
    words: Vec<String>,
}

impl PdpUser {
    /// A user of the machine.
    #[track_caller]
    pub fn user(node: &TestNode, uid: u32) -> Self {
        // Other users may have no access to the build directory.
        let pdp = node.directory.join("pdp");
        // A process of its own: a descriptor for writing here would pass to processes that other
        // threads start, and the copy could not be executed (ETXTBSY) until they close it.
        let copied = Command::new("cp").arg(bin("pdp")).arg(&pdp).status().expect("cp");
        assert!(copied.success(), "copy of pdp");
        fs::set_permissions(&pdp, fs::Permissions::from_mode(0o755)).expect("mode of pdp");
        let (uid, gid) = (format!("--reuid={uid}"), format!("--regid={uid}"));
        let socket = node.socket().display().to_string();
        let pdp = pdp.display().to_string();
        let words = ["setpriv", &uid, &gid, "--clear-groups", &pdp, "--socket", &socket];
        Self { words: words.map(str::to_owned).into() }
    }

    /// User with the token in this file, over TLS, of a node that listens at `address`.
    pub fn token(node: &TestNode, address: &str, file: &Path) -> Self {
        let net = format!("--net=/run/netns/{}", node.netns);
        let pdp = bin("pdp").display().to_string();
        let server = format!("https://{address}");
        let ca = node.directory.join("state/tls.crt").display().to_string();
        let file = file.display().to_string();
        let words =
            ["nsenter", &net, &pdp, "--server", &server, "--ca", &ca, "--token-file", &file];
        Self { words: words.map(str::to_owned).into() }
    }

    /// A `pdp` command of this user, not yet started.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args(arguments).env("NO_COLOR", "1");
        command
    }

    /// Runs `pdp`. Returns its output as error on failure.
    pub fn pdp(&self, arguments: &[&str], input: &str) -> Result<String, String> {
        let output = run(&mut self.command(arguments), input);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    /// Runs `pdp ARGUMENTS --format json` and parses the output. Panics if it fails.
    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let mut all = arguments.to_vec();
        all.extend(["--format", "json"]);
        let text = self.pdp(&all, "").unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
        serde_json::from_str(&text).expect("JSON")
    }
}
