//! Connection to the daemon.

use std::path::{Path, PathBuf};

use pdp_api::DaemonName;
use pdp_api::client::Client;

use crate::failure::CliFailure;

/// Path of Debian's file of CA certificates.
const CA_DEFAULT: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Heading of the options that all verbs have, listed after the verb's own.
const CONNECTION: &str = "Connection";

/// Options that select the daemon and the identity.
#[derive(Debug, clap::Args)]
pub struct Connection {
    /// Socket of the daemon [default: /run/pdp/pdpd.sock].
    #[arg(
        long,
        global = true,
        env = "PDP_SOCKET",
        value_name = "PATH",
        help_heading = CONNECTION
    )]
    pub socket: Option<PathBuf>,
    /// Daemon with this name, if this machine runs several. `pdp up` starts it with its own
    /// directories and cgroup, each named pdp-NAME.
    #[arg(
        id = "daemon",
        long = "name",
        global = true,
        env = "PDP_NAME",
        value_name = "NAME",
        help_heading = CONNECTION,
        conflicts_with = "socket"
    )]
    pub daemon: Option<DaemonName>,
    /// Daemon on another machine, over TLS, instead of the socket; needs a token.
    #[arg(
        long,
        global = true,
        env = "PDP_SERVER",
        value_name = "https://HOST:PORT",
        help_heading = CONNECTION
    )]
    pub server: Option<String>,
    /// Certificates (PEM) to trust the server by: those of authorities, or its own.
    #[arg(
        long,
        global = true,
        env = "PDP_CA",
        value_name = "FILE",
        default_value = CA_DEFAULT,
        help_heading = CONNECTION
    )]
    pub ca: PathBuf,
    /// File with the token that identifies the client. Without it: the variable PDP_TOKEN, or else
    /// the Unix user.
    #[arg(
        long,
        global = true,
        env = "PDP_TOKEN_FILE",
        value_name = "FILE",
        help_heading = CONNECTION
    )]
    pub token_file: Option<PathBuf>,
}

impl Connection {
    /// Returns a client for the daemon and the identity that the options select.
    pub fn client(&self) -> Result<Client, CliFailure> {
        let read = |path: &Path| {
            std::fs::read(path)
                .map_err(|error| CliFailure::Other(format!("{}: {error}", path.display())))
        };
        let client = match &self.server {
            Some(server) => Client::over_tls(server, &read(&self.ca)?)?,
            None => {
                let named = || DaemonName::socket(self.daemon.as_ref());
                Client::new(self.socket.clone().unwrap_or_else(named))
            }
        };
        let token = match (&self.token_file, std::env::var("PDP_TOKEN")) {
            (Some(path), _) => Some(String::from_utf8_lossy(&read(path)?).into_owned()),
            (None, Ok(token)) => Some(token),
            (None, Err(_)) => None,
        };
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        Ok(match token {
            Some(token) => client.with_token(token),
            None => client,
        })
    }
}
