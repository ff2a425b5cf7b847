//! A client of the API over a Unix socket or TLS. Every call opens a connection of its own.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::exec::ExecRequest;
use crate::{
    ApplyRequest, AuditEntry, AuditQuery, CaptureQuery, ChangeEvent, ChangeReport, DaemonVersion,
    DeleteQuery, DownRequest, FastpathChange, FastpathChanged, FastpathCounters,
    FastpathCountersQuery, FastpathFilters, FastpathFiltersQuery, FastpathFrame, FastpathQueues,
    FastpathQueuesQuery, FdbEntry, GuestProcess, ImageInfo, ImageQuery, LinkChange, LinkRequest,
    LogQuery, MachineCheck, NewToken, NodeProcess, Problem, Progress, PullRequest, RestartRequest,
    RouteEntry, RouteLine, RoutesQuery, ScaleRequest, Stats, StatsQuery, SubstrateInfo, TenantInfo,
    Token, TokenRequest, Trace, TraceRequest, Vnet, VnetSummary, WatchLine, WatchQuery, paths,
};

/// Largest answer that is read whole, and longest line of a stream, bytes.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// Cause of a failed call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No daemon answers there.
    #[error("no daemon at {place}")]
    NoDaemon {
        /// The socket, or address and port.
        place: String,
        /// Why the connection failed.
        source: io::Error,
    },
    /// The TLS handshake failed, for example because the server's certificate is not trusted.
    #[error("TLS with {place}")]
    Tls {
        /// Address and port.
        place: String,
        /// Cause of the failure.
        source: io::Error,
    },
    /// The server's URL or the certificates to trust it by are invalid.
    #[error("{0}")]
    InvalidAddress(String),
    /// The daemon refused.
    #[error(transparent)]
    Problem(Box<Problem>),
    /// The answer does not follow this API.
    #[error("unexpected answer from the daemon: {0}")]
    Answer(String),
    /// The connection broke.
    #[error("connection to the daemon")]
    Http(#[from] hyper::Error),
    /// A streamed answer broke off before its end.
    #[error(
        "the answer ended early: the daemon stopped, the connection broke, or your access ended"
    )]
    BrokenOff(#[source] hyper::Error),
    /// The receiver of the answer failed, for example in writing it out.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        Self::Problem(Box::new(problem))
    }
}

type Result<T> = std::result::Result<T, Error>;

/// Client of the daemon behind one socket or at one address.
#[derive(Clone, Debug)]
pub struct Client {
    address: DaemonAddress,
    token: Option<String>,
}

#[derive(Clone, Debug)]
enum DaemonAddress {
    Socket(PathBuf),
    Server(TlsServer),
}

#[derive(Clone)]
struct TlsServer {
    host: String,
    port: u16,
    name: ServerName<'static>,
    connector: TlsConnector,
}

impl fmt::Debug for TlsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Byte stream of a connection, plain or with TLS.
trait Bytestream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytestream for T {}

impl Client {
    /// Returns a client of a Unix socket. It connects at each call.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { address: DaemonAddress::Socket(socket.into()), token: None }
    }

    /// Returns a client of the server `https://HOST:PORT` over TLS. The client trusts these
    /// certificates (PEM): those of authorities, or the server's own if it is self-signed.
    pub fn over_tls(server: &str, authorities: &[u8]) -> Result<Self> {
        let form =
            || Error::InvalidAddress(format!("server {server:?}: write it like https://HOST:PORT"));
        let uri: Uri = server.trim_end_matches('/').parse().map_err(|_| form())?;
        let (Some("https"), Some(host), Some(port), "" | "/") =
            (uri.scheme_str(), uri.host(), uri.port_u16(), uri.path())
        else {
            return Err(form());
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| form())?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(authorities) {
            let bad =
                |error: &dyn fmt::Display| Error::InvalidAddress(format!("certificates: {error}"));
            let certificate = certificate.map_err(|error| bad(&error))?;
            roots.add(certificate).map_err(|error| bad(&error))?;
        }
        if roots.is_empty() {
            return Err(Error::InvalidAddress(
                "certificates: no trusted certificate in the file".into(),
            ));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::InvalidAddress(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        let server = TlsServer { host, port, name, connector };
        Ok(Self { address: DaemonAddress::Server(server), token: None })
    }

    /// Adds a token, which identifies the client.
    #[must_use]
    pub fn with_token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Returns the socket; `None` for a client over TLS.
    pub fn socket(&self) -> Option<&Path> {
        match &self.address {
            DaemonAddress::Socket(path) => Some(path),
            DaemonAddress::Server(_) => None,
        }
    }

    /// Lists tenants.
    pub async fn tenants(&self) -> Result<Vec<TenantInfo>> {
        self.get(paths::TENANTS).await
    }

    /// Deletes a tenant and its tokens. The daemon refuses while the tenant has vnets.
    pub async fn delete_tenant(
        &self,
        tenant: &str,
        progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        self.change(Method::DELETE, &paths::tenant(tenant), None::<&()>, progress).await
    }

    /// Lists tokens.
    pub async fn tokens(&self) -> Result<Vec<Token>> {
        self.get(paths::TOKENS).await
    }

    /// Creates a token.
    pub async fn create_token(&self, request: &TokenRequest) -> Result<NewToken> {
        whole(self.send(Method::POST, paths::TOKENS, Some(request)).await?).await
    }

    /// Revokes a token.
    pub async fn revoke_token(&self, id: u64) -> Result<()> {
        whole(self.send(Method::DELETE, &paths::token(id), None::<&()>).await?).await
    }

    /// Lists the images that the daemon keeps.
    pub async fn images(&self) -> Result<Vec<ImageInfo>> {
        self.get(paths::IMAGES).await
    }

    /// Pulls the current image of a name.
    pub async fn pull_image(
        &self,
        request: &PullRequest,
        progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        self.change(Method::POST, paths::IMAGES, Some(request), progress).await
    }

    /// Removes an image by one of its names or its digest.
    pub async fn delete_image(&self, image: &str, query: &ImageQuery) -> Result<()> {
        let path = with_query(&paths::image(image), query)?;
        whole(self.send(Method::DELETE, &path, None::<&()>).await?).await
    }

    /// Removes unused images and returns them.
    pub async fn prune_images(&self, query: &ImageQuery) -> Result<Vec<ImageInfo>> {
        let path = with_query(paths::IMAGES, query)?;
        whole(self.send(Method::DELETE, &path, None::<&()>).await?).await
    }

    /// Lists requests of the audit log.
    pub async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditEntry>> {
        self.get(&with_query(paths::AUDIT, query)?).await
    }

    /// Returns the daemon's version.
    pub async fn version(&self) -> Result<DaemonVersion> {
        self.get(paths::VERSION).await
    }

    /// Returns the abilities of the machine.
    pub async fn doctor(&self) -> Result<Vec<MachineCheck>> {
        self.get(paths::DOCTOR).await
    }

    /// Returns the substrate.
    pub async fn substrate(&self) -> Result<SubstrateInfo> {
        self.get(paths::SUBSTRATE).await
    }

    /// Lists all vnets.
    pub async fn vnets(&self) -> Result<Vec<VnetSummary>> {
        self.get(paths::VNETS).await
    }

    /// Returns one vnet.
    pub async fn vnet(&self, vnet: &str) -> Result<Vnet> {
        self.get(&paths::vnet(vnet)).await
    }

    /// Returns counters.
    pub async fn stats(&self, query: &StatsQuery) -> Result<Stats> {
        self.get(&with_query(paths::STATS, query)?).await
    }

    /// Returns the current state and then events, line by line ([`WatchLine`]).
    pub async fn watch(&self, query: &WatchQuery) -> Result<WatchStream> {
        let path = with_query(paths::WATCH, query)?;
        Ok(WatchStream(JsonLineReader::new(self.send(Method::GET, &path, None::<&()>).await?)))
    }

    /// Applies files. Calls `progress` with each step.
    pub async fn apply(
        &self,
        request: &ApplyRequest,
        progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        self.change(Method::POST, paths::APPLY, Some(request), progress).await
    }

    /// Starts everything that is stored.
    pub async fn up(&self, progress: impl FnMut(Progress)) -> Result<ChangeReport> {
        self.change(Method::POST, paths::UP, None::<&()>, progress).await
    }

    /// Stops everything.
    pub async fn down(
        &self,
        request: &DownRequest,
        progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        self.change(Method::POST, paths::DOWN, Some(request), progress).await
    }

    /// Deletes a vnet.
    pub async fn delete_vnet(
        &self,
        vnet: &str,
        progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        self.change(Method::DELETE, &paths::vnet(vnet), None::<&()>, progress).await
    }

    /// Deletes nodes of a vnet, with their links.
    pub async fn delete_nodes(
        &self,
        vnet: &str,
        nodes: &[String],
        progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        let path = with_query(&paths::vnet(vnet), &DeleteQuery { only: Some(nodes.join(",")) })?;
        self.change(Method::DELETE, &path, None::<&()>, progress).await
    }

    /// Deletes the substrate. The daemon refuses while there are vnets.
    pub async fn delete_substrate(&self, progress: impl FnMut(Progress)) -> Result<ChangeReport> {
        self.change(Method::DELETE, paths::SUBSTRATE, None::<&()>, progress).await
    }

    /// Changes the number of forwarding guests of a router.
    pub async fn scale(
        &self,
        vnet: &str,
        node: &str,
        request: &ScaleRequest,
        progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        self.change(Method::PUT, &paths::guests(vnet, node), Some(request), progress).await
    }

    /// Restarts the processes of nodes.
    pub async fn restart(
        &self,
        vnet: &str,
        request: &RestartRequest,
        progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        self.change(Method::POST, &paths::restart(vnet), Some(request), progress).await
    }

    /// Sets a link's administrative state; see [`paths::link`] for the link's name.
    pub async fn set_link(
        &self,
        vnet: &str,
        link: &str,
        request: LinkRequest,
    ) -> Result<ChangeReport> {
        self.change(Method::PUT, &paths::link(vnet, link), Some(&request), |_| ()).await
    }

    /// Changes how a link's ends send frames; see [`paths::link`] for the link's name.
    pub async fn change_link(
        &self,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<ChangeReport> {
        self.change(Method::PATCH, &paths::link(vnet, link), Some(request), |_| ()).await
    }

    /// Returns the MAC addresses that a segment has learned; see [`paths::link`] for the link's
    /// name.
    pub async fn fdb(&self, vnet: &str, link: &str) -> Result<Vec<FdbEntry>> {
        self.get(&paths::fdb(vnet, link)).await
    }

    /// Makes a segment forget all MAC addresses.
    pub async fn clear_fdb(&self, vnet: &str, link: &str) -> Result<()> {
        whole(self.send(Method::DELETE, &paths::fdb(vnet, link), None::<&()>).await?).await
    }

    /// Passes the routes of a router or host to `row`, one by one. Returns their count.
    pub async fn routes(
        &self,
        vnet: &str,
        node: &str,
        query: &RoutesQuery,
        mut row: impl FnMut(RouteEntry) -> io::Result<()>,
    ) -> Result<u64> {
        let path = with_query(&paths::routes(vnet, node), query)?;
        let mut lines = JsonLineReader::new(self.send(Method::GET, &path, None::<&()>).await?);
        while let Some(line) = lines.next().await? {
            match line {
                RouteLine::Route(route) => row(route)?,
                RouteLine::End(end) => return Ok(end.count),
                RouteLine::Problem(problem) => return Err(problem.into()),
            }
        }
        Err(cut_off())
    }

    /// Returns filters of a fast path, at most
    /// [`FASTPATH_FILTERS_AT_ONCE`](crate::FASTPATH_FILTERS_AT_ONCE).
    pub async fn fastpath_filters(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathFiltersQuery,
    ) -> Result<FastpathFilters> {
        self.get(&with_query(&paths::fastpath_filters(vnet, node), query)?).await
    }

    /// Changes filters of a fast path.
    pub async fn change_fastpath(
        &self,
        vnet: &str,
        node: &str,
        change: &FastpathChange,
    ) -> Result<FastpathChanged> {
        let path = paths::fastpath_filters(vnet, node);
        whole(self.send(Method::POST, &path, Some(change)).await?).await
    }

    /// Returns the counters of a fast path's filters.
    pub async fn fastpath_counters(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathCountersQuery,
    ) -> Result<FastpathCounters> {
        self.get(&with_query(&paths::fastpath_counters(vnet, node), query)?).await
    }

    /// Returns the queues of a fast path.
    pub async fn fastpath_queues(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues> {
        self.get(&with_query(&paths::fastpath_queues(vnet, node), query)?).await
    }

    /// Makes a fast path send a frame.
    pub async fn send_frame(&self, vnet: &str, node: &str, frame: &FastpathFrame) -> Result<()> {
        let path = paths::fastpath_frames(vnet, node);
        whole(self.send(Method::POST, &path, Some(frame)).await?).await
    }

    /// Captures frames of a port as pcap, until either side ends the capture.
    pub async fn capture(
        &self,
        vnet: &str,
        node: &str,
        port: &str,
        query: &CaptureQuery,
    ) -> Result<ResponseStream> {
        let path = with_query(&paths::capture(vnet, node, port), query)?;
        Ok(ResponseStream(self.send(Method::GET, &path, None::<&()>).await?.into_body()))
    }

    /// Traces one frame.
    pub async fn trace(
        &self,
        vnet: &str,
        node: &str,
        port: &str,
        request: &TraceRequest,
    ) -> Result<Trace> {
        let path = paths::trace(vnet, node, port);
        whole(self.send(Method::POST, &path, Some(request)).await?).await
    }

    /// Returns a log of the node itself.
    pub async fn logs(&self, process: NodeProcess, query: &LogQuery) -> Result<ResponseStream> {
        let path = with_query(&paths::logs(process), query)?;
        Ok(ResponseStream(self.send(Method::GET, &path, None::<&()>).await?.into_body()))
    }

    /// Returns a log of a process of a vnet's node.
    pub async fn node_logs(
        &self,
        vnet: &str,
        node: &str,
        process: GuestProcess,
        query: &LogQuery,
    ) -> Result<ResponseStream> {
        let path = with_query(&paths::node_logs(vnet, node, process), query)?;
        Ok(ResponseStream(self.send(Method::GET, &path, None::<&()>).await?.into_body()))
    }

    /// Runs a command in a guest. Frames of [`crate::exec`] follow on the connection.
    pub async fn exec(
        &self,
        vnet: &str,
        node: &str,
        request: &ExecRequest,
    ) -> Result<TokioIo<Upgraded>> {
        let response = self.send(Method::POST, &paths::exec(vnet, node), Some(request)).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(Error::Answer(format!(
                "status {} instead of a protocol upgrade",
                response.status()
            )));
        }
        Ok(TokioIo::new(hyper::upgrade::on(response).await?))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        whole(self.send(Method::GET, path, None::<&()>).await?).await
    }

    async fn change(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        mut progress: impl FnMut(Progress),
    ) -> Result<ChangeReport> {
        let mut lines = JsonLineReader::new(self.send(method, path, body).await?);
        while let Some(event) = lines.next().await? {
            match event {
                ChangeEvent::Progress(step) => progress(step),
                ChangeEvent::Result(report) => return Ok(report),
                ChangeEvent::Problem(problem) => return Err(problem.into()),
            }
        }
        Err(cut_off())
    }

    async fn connect(&self) -> Result<Box<dyn Bytestream>> {
        match &self.address {
            DaemonAddress::Socket(path) => {
                let connected = UnixStream::connect(path).await;
                let place = || path.display().to_string();
                let stream =
                    connected.map_err(|source| Error::NoDaemon { place: place(), source })?;
                Ok(Box::new(stream))
            }
            DaemonAddress::Server(server) => {
                let place = || format!("{}:{}", server.host, server.port);
                let connected = TcpStream::connect((server.host.as_str(), server.port)).await;
                let stream =
                    connected.map_err(|source| Error::NoDaemon { place: place(), source })?;
                let secured = server.connector.connect(server.name.clone(), stream).await;
                let stream = secured.map_err(|source| Error::Tls { place: place(), source })?;
                Ok(Box::new(stream))
            }
        }
    }

    /// Sends a request. Returns an answer with an error status as an error.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Response<Incoming>> {
        let stream = self.connect().await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // The task ends with the answer's body or the upgraded stream.
        tokio::spawn(connection.with_upgrades());
        let host = match &self.address {
            DaemonAddress::Socket(_) => "pdp",
            DaemonAddress::Server(server) => &server.host,
        };
        let mut request = Request::builder().method(method).uri(path).header(HOST, host);
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if path.ends_with("/exec") {
            request = request.header(CONNECTION, "upgrade").header(UPGRADE, crate::exec::UPGRADE);
        }
        let bytes = match body {
            Some(body) => {
                request = request.header(CONTENT_TYPE, "application/json");
                serde_json::to_vec(body).map_err(io::Error::other)?
            }
            None => Vec::new(),
        };
        let request = request.body(Full::new(Bytes::from(bytes))).map_err(io::Error::other)?;
        let response = sender.send_request(request).await?;
        if response.status().is_client_error() || response.status().is_server_error() {
            let status = response.status();
            return Err(match whole::<Problem>(response).await {
                Ok(problem) => problem.into(),
                Err(_) => Error::Answer(status.to_string()),
            });
        }
        Ok(response)
    }
}

/// A streamed answer, chunk by chunk.
#[derive(Debug)]
pub struct ResponseStream(Incoming);

impl ResponseStream {
    /// Returns the next bytes; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        while let Some(frame) = self.0.frame().await {
            if let Ok(bytes) = frame.map_err(Error::BrokenOff)?.into_data() {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }
}

/// A watch: an answer that continues until either side ends it.
#[derive(Debug)]
pub struct WatchStream(JsonLineReader);

impl WatchStream {
    /// Returns the next line; `None` at the end. Dropping the future loses no data that has
    /// arrived.
    pub async fn next(&mut self) -> Result<Option<WatchLine>> {
        self.0.next().await
    }
}

/// A streamed answer with one JSON value per line.
#[derive(Debug)]
struct JsonLineReader {
    body: ResponseStream,
    bytes: BytesMut,
    /// Bytes known to have no end of line.
    searched: usize,
}

impl JsonLineReader {
    fn new(response: Response<Incoming>) -> Self {
        Self { body: ResponseStream(response.into_body()), bytes: BytesMut::new(), searched: 0 }
    }

    async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            let end = self.bytes[self.searched..].iter().position(|&byte| byte == b'\n');
            if let Some(end) = end {
                let line = self.bytes.split_to(self.searched + end + 1);
                self.searched = 0;
                return serde_json::from_slice(&line).map(Some).map_err(unreadable);
            }
            self.searched = self.bytes.len();
            if self.bytes.len() > ANSWER_BYTES_MAX {
                return Err(Error::Answer(format!("line over {ANSWER_BYTES_MAX} bytes")));
            }
            match self.body.next().await? {
                Some(bytes) => self.bytes.extend_from_slice(&bytes),
                None if self.bytes.is_empty() => return Ok(None),
                None => return Err(cut_off()),
            }
        }
    }
}

async fn whole<T: DeserializeOwned>(response: Response<Incoming>) -> Result<T> {
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
    let bytes = body.collect().await.map_err(|error| Error::Answer(error.to_string()))?.to_bytes();
    serde_json::from_slice(&bytes).map_err(unreadable)
}

fn with_query(path: &str, query: &impl Serialize) -> Result<String> {
    let query = serde_urlencoded::to_string(query).map_err(io::Error::other)?;
    Ok(if query.is_empty() { path.to_string() } else { format!("{path}?{query}") })
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::Answer(format!("unreadable: {error}"))
}

fn cut_off() -> Error {
    Error::Answer("ended before its result; see `pdp logs`".into())
}
