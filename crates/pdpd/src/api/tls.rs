//! The certificate of the API over TLS: the user's, or a self-signed one that is created here.

use crate::util::{PRIVATE, hex};
use std::fs;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use sha2::{Digest, Sha256};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// TLS configuration of the server.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Server configuration: TLS 1.3 only, no client certificates.
    pub config: Arc<ServerConfig>,
    /// SHA-256 of the certificate, hexadecimal.
    pub sha256: String,
}

impl Tls {
    /// Loads certificate and key from PEM files.
    pub fn of_files(certificate: &Path, key: &Path) -> anyhow::Result<Self> {
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect)
            .with_context(|| format!("certificate {}", certificate.display()))?;
        let first = chain.first();
        let first =
            first.with_context(|| format!("certificate {}: none in it", certificate.display()))?;
        let sha256 = hex(&Sha256::digest(first));
        let private =
            PrivateKeyDer::from_pem_file(key).with_context(|| format!("key {}", key.display()))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, private)
            .with_context(|| format!("key {} for that certificate", key.display()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { config: Arc::new(config), sha256 })
    }

    /// Loads `tls.crt` and `tls.key` from the state directory. Creates them if
    /// missing, for `localhost`, this machine's name, and the listen address.
    pub fn self_signed(state: &Path, listen: SocketAddr) -> anyhow::Result<Self> {
        let [certificate, key] = files(state);
        if !certificate.exists() || !key.exists() {
            let mut names = vec!["localhost".to_owned(), "127.0.0.1".into(), "::1".into()];
            names.extend(nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()));
            if !listen.ip().is_unspecified() {
                names.push(listen.ip().to_string());
            }
            names.sort_unstable();
            names.dedup();
            let made = rcgen::generate_simple_self_signed(names)?;
            write_new(&key, &made.signing_key.serialize_pem())?;
            write_new(&certificate, &made.cert.pem())?;
        }
        Self::of_files(&certificate, &key)
    }
}

/// Returns the paths of the generated certificate and key.
pub fn files(state: &Path) -> [PathBuf; 2] {
    ["tls.crt", "tls.key"].map(|name| state.join(name))
}

/// Writes a private file atomically.
fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let part = path.with_extension("new");
    let mut file =
        fs::File::options().create(true).write(true).truncate(true).mode(PRIVATE).open(&part)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&part, path)
}
