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
    ApplyRequest, AuditEntry, AuditQuery, CaptureQuery, Check, DeleteQuery, DownRequest, Event,
    FastpathChange, FastpathChanged, FastpathCounters, FastpathCountersQuery, FastpathFilters,
    FastpathFiltersQuery, FastpathFrame, FastpathQueues, FastpathQueuesQuery, FdbEntry,
    GuestProcess, ImageInfo, ImageQuery, LinkChange, LinkRequest, LogQuery, NewToken, NodeProcess,
    Problem, Progress, PullRequest, Report, RestartRequest, RouteLine, RouteRow, RoutesQuery,
    ScaleRequest, Stats, StatsQuery, Substrate, TenantInfo, Token, TokenRequest, Trace,
    TraceRequest, Version, Vnet, VnetSummary, WatchLine, WatchQuery, paths,
};

/// Bytes of an answer that is read whole, and of one line of a stream.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers there.
    #[error("no daemon at {place}")]
    NoDaemon {
        /// The socket, or address and port.
        place: String,
        /// Why the connection failed.
        source: io::Error,
    },
    /// Who answers is not shown to be who was asked for.
    #[error("TLS with {place}")]
    Tls {
        /// Address and port.
        place: String,
        /// What is wrong with it.
        source: io::Error,
    },
    /// It can't be asked for like this.
    #[error("{0}")]
    Place(String),
    /// The daemon refused.
    #[error(transparent)]
    Problem(Box<Problem>),
    /// The answer is not of this API.
    #[error("answer of the daemon: {0}")]
    Answer(String),
    /// The connection broke.
    #[error("connection to the daemon")]
    Http(#[from] hyper::Error),
    /// An answer that goes on had begun and did not come to its end.
    #[error(
        "the answer broke off before its end, with the daemon or the connection, or because you may no longer \
         ask for it"
    )]
    BrokenOff(#[source] hyper::Error),
    /// What the answer was passed to failed (such as writing it out).
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        Self::Problem(Box::new(problem))
    }
}

type Result<T> = std::result::Result<T, Error>;

/// A client of the daemon behind one socket, or at one address.
#[derive(Clone, Debug)]
pub struct Client {
    place: Place,
    token: Option<String>,
}

#[derive(Clone, Debug)]
enum Place {
    Socket(PathBuf),
    Server(Server),
}

#[derive(Clone)]
struct Server {
    host: String,
    port: u16,
    name: ServerName<'static>,
    connector: TlsConnector,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// What bytes go by.
trait Bytestream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytestream for T {}

impl Client {
    /// A client; connects at each call.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { place: Place::Socket(socket.into()), token: None }
    }

    /// A client over TLS of the server `https://HOST:PORT`, which is trusted by these certificates
    /// (PEM): of authorities, or its own where that signs itself.
    pub fn over_tls(server: &str, authorities: &[u8]) -> Result<Self> {
        let form = || Error::Place(format!("server {server:?}: write it like https://HOST:PORT"));
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
            let bad = |error: &dyn fmt::Display| Error::Place(format!("certificates: {error}"));
            let certificate = certificate.map_err(|error| bad(&error))?;
            roots.add(certificate).map_err(|error| bad(&error))?;
        }
        if roots.is_empty() {
            return Err(Error::Place("certificates: none to trust the server by".into()));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Place(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        let server = Server { host, port, name, connector };
        Ok(Self { place: Place::Server(server), token: None })
    }

    /// The same with a token, which says who asks.
    #[must_use]
    pub fn with_token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// The socket; `None` for a client over TLS.
    pub fn socket(&self) -> Option<&Path> {
        match &self.place {
            Place::Socket(path) => Some(path),
            Place::Server(_) => None,
        }
    }

    /// Tenants.
    pub async fn tenants(&self) -> Result<Vec<TenantInfo>> {
        self.get(paths::TENANTS).await
    }

    /// Deletes a tenant and its tokens; refused while it has vnets.
    pub async fn delete_tenant(
        &self,
        tenant: &str,
        progress: impl FnMut(Progress),
    ) -> Result<Report> {
        self.change(Method::DELETE, &paths::tenant(tenant), None::<&()>, progress).await
    }

    /// Tokens.
    pub async fn tokens(&self) -> Result<Vec<Token>> {
        self.get(paths::TOKENS).await
    }

    /// Makes a token.
    pub async fn create_token(&self, request: &TokenRequest) -> Result<NewToken> {
        whole(self.send(Method::POST, paths::TOKENS, Some(request)).await?).await
    }

    /// Revokes a token.
    pub async fn revoke_token(&self, id: u64) -> Result<()> {
        whole(self.send(Method::DELETE, &paths::token(id), None::<&()>).await?).await
    }

    /// Images that the daemon keeps.
    pub async fn images(&self) -> Result<Vec<ImageInfo>> {
        self.get(paths::IMAGES).await
    }

    /// Pulls what a name stands for now.
    pub async fn pull_image(
        &self,
        request: &PullRequest,
        progress: impl FnMut(Progress),
    ) -> Result<Report> {
        self.change(Method::POST, paths::IMAGES, Some(request), progress).await
    }

    /// Removes an image, by a name that it has or its digest.
    pub async fn delete_image(&self, image: &str, query: &ImageQuery) -> Result<()> {
        let path = with_query(&paths::image(image), query)?;
        whole(self.send(Method::DELETE, &path, None::<&()>).await?).await
    }

    /// Removes images that nothing uses; returns which.
    pub async fn prune_images(&self, query: &ImageQuery) -> Result<Vec<ImageInfo>> {
        let path = with_query(paths::IMAGES, query)?;
        whole(self.send(Method::DELETE, &path, None::<&()>).await?).await
    }

    /// Requests that came.
    pub async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditEntry>> {
        self.get(&with_query(paths::AUDIT, query)?).await
    }

    /// Who answers.
    pub async fn version(&self) -> Result<Version> {
        self.get(paths::VERSION).await
    }

    /// What the machine can do.
    pub async fn doctor(&self) -> Result<Vec<Check>> {
        self.get(paths::DOCTOR).await
    }

    /// The substrate.
    pub async fn substrate(&self) -> Result<Substrate> {
        self.get(paths::SUBSTRATE).await
    }

    /// All vnets.
    pub async fn vnets(&self) -> Result<Vec<VnetSummary>> {
        self.get(paths::VNETS).await
    }

    /// One vnet.
    pub async fn vnet(&self, vnet: &str) -> Result<Vnet> {
        self.get(&paths::vnet(vnet)).await
    }

    /// Counters.
    pub async fn stats(&self, query: &StatsQuery) -> Result<Stats> {
        self.get(&with_query(paths::STATS, query)?).await
    }

    /// What is, and what happens from then on, line by line ([`WatchLine`]).
    pub async fn watch(&self, query: &WatchQuery) -> Result<Watch> {
        let path = with_query(paths::WATCH, query)?;
        Ok(Watch(Lines::new(self.send(Method::GET, &path, None::<&()>).await?)))
    }

    /// Applies files; `progress` is told what is being done.
    pub async fn apply(
        &self,
        request: &ApplyRequest,
        progress: impl FnMut(Progress),
    ) -> Result<Report> {
        self.change(Method::POST, paths::APPLY, Some(request), progress).await
    }

    /// Starts all that is stored.
    pub async fn up(&self, progress: impl FnMut(Progress)) -> Result<Report> {
        self.change(Method::POST, paths::UP, None::<&()>, progress).await
    }

    /// Stops all.
    pub async fn down(
        &self,
        request: &DownRequest,
        progress: impl FnMut(Progress),
    ) -> Result<Report> {
        self.change(Method::POST, paths::DOWN, Some(request), progress).await
    }

    /// Deletes a vnet.
    pub async fn delete_vnet(&self, vnet: &str, progress: impl FnMut(Progress)) -> Result<Report> {
        self.change(Method::DELETE, &paths::vnet(vnet), None::<&()>, progress).await
    }

    /// Deletes nodes of a vnet, with their links.
    pub async fn delete_nodes(
        &self,
        vnet: &str,
        nodes: &[String],
        progress: impl FnMut(Progress),
    ) -> Result<Report> {
        let path = with_query(&paths::vnet(vnet), &DeleteQuery { only: Some(nodes.join(",")) })?;
        self.change(Method::DELETE, &path, None::<&()>, progress).await
    }

    /// Deletes the substrate; refused while there are vnets.
    pub async fn delete_substrate(&self, progress: impl FnMut(Progress)) -> Result<Report> {
        self.change(Method::DELETE, paths::SUBSTRATE, None::<&()>, progress).await
    }

    /// Changes the number of forwarding guests of a router.
    pub async fn scale(
        &self,
        vnet: &str,
        node: &str,
        request: &ScaleRequest,
        progress: impl FnMut(Progress),
    ) -> Result<Report> {
        self.change(Method::PUT, &paths::guests(vnet, node), Some(request), progress).await
    }

    /// Ends and starts anew what runs of nodes.
    pub async fn restart(
        &self,
        vnet: &str,
        request: &RestartRequest,
        progress: impl FnMut(Progress),
    ) -> Result<Report> {
        self.change(Method::POST, &paths::restart(vnet), Some(request), progress).await
    }

    /// Sets a link's administrative state; see [`paths::link`] for its name.
    pub async fn set_link(&self, vnet: &str, link: &str, request: LinkRequest) -> Result<Report> {
        self.change(Method::PUT, &paths::link(vnet, link), Some(&request), |_| ()).await
    }

    /// Changes how frames leave by a link's ends; see [`paths::link`] for its name.
    pub async fn change_link(
        &self,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<Report> {
        self.change(Method::PATCH, &paths::link(vnet, link), Some(request), |_| ()).await
    }

    /// What a segment has learned; see [`paths::link`] for its name.
    pub async fn fdb(&self, vnet: &str, link: &str) -> Result<Vec<FdbEntry>> {
        self.get(&paths::fdb(vnet, link)).await
    }

    /// Has a segment forget what it has learned.
    pub async fn clear_fdb(&self, vnet: &str, link: &str) -> Result<()> {
        whole(self.send(Method::DELETE, &paths::fdb(vnet, link), None::<&()>).await?).await
    }

    /// Routes of a router or host, one by one to `row`; returns their count.
    pub async fn routes(
        &self,
        vnet: &str,
        node: &str,
        query: &RoutesQuery,
        mut row: impl FnMut(RouteRow) -> io::Result<()>,
    ) -> Result<u64> {
        let path = with_query(&paths::routes(vnet, node), query)?;
        let mut lines = Lines::new(self.send(Method::GET, &path, None::<&()>).await?);
        while let Some(line) = lines.next().await? {
            match line {
                RouteLine::Route(route) => row(route)?,
                RouteLine::End(end) => return Ok(end.count),
                RouteLine::Problem(problem) => return Err(problem.into()),
            }
        }
        Err(cut_off())
    }

    /// Filters of a fast path, as many as one answer has.
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

    /// What counters of a fast path have.
    pub async fn fastpath_counters(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathCountersQuery,
    ) -> Result<FastpathCounters> {
        self.get(&with_query(&paths::fastpath_counters(vnet, node), query)?).await
    }

    /// How queues of a fast path are.
    pub async fn fastpath_queues(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues> {
        self.get(&with_query(&paths::fastpath_queues(vnet, node), query)?).await
    }

    /// Has a fast path send a frame.
    pub async fn send_frame(&self, vnet: &str, node: &str, frame: &FastpathFrame) -> Result<()> {
        let path = paths::fastpath_frames(vnet, node);
        whole(self.send(Method::POST, &path, Some(frame)).await?).await
    }

    /// Frames of a port as pcap, until either side ends it.
    pub async fn capture(
        &self,
        vnet: &str,
        node: &str,
        port: &str,
        query: &CaptureQuery,
    ) -> Result<Stream> {
        let path = with_query(&paths::capture(vnet, node, port), query)?;
        Ok(Stream(self.send(Method::GET, &path, None::<&()>).await?.into_body()))
    }

    /// Follows one frame.
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

    /// A log of the node itself.
    pub async fn logs(&self, process: NodeProcess, query: &LogQuery) -> Result<Stream> {
        let path = with_query(&paths::logs(process), query)?;
        Ok(Stream(self.send(Method::GET, &path, None::<&()>).await?.into_body()))
    }

    /// A log of a node of a vnet.
    pub async fn node_logs(
        &self,
        vnet: &str,
        node: &str,
        process: GuestProcess,
        query: &LogQuery,
    ) -> Result<Stream> {
        let path = with_query(&paths::node_logs(vnet, node, process), query)?;
        Ok(Stream(self.send(Method::GET, &path, None::<&()>).await?.into_body()))
    }

    /// Runs a command in a guest; frames of [`crate::exec`] follow on the connection.
    pub async fn exec(
        &self,
        vnet: &str,
        node: &str,
        request: &ExecRequest,
    ) -> Result<TokioIo<Upgraded>> {
        let response = self.send(Method::POST, &paths::exec(vnet, node), Some(request)).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(Error::Answer(format!("{} instead of an upgrade", response.status())));
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
    ) -> Result<Report> {
        let mut lines = Lines::new(self.send(method, path, body).await?);
        while let Some(event) = lines.next().await? {
            match event {
                Event::Progress(step) => progress(step),
                Event::Result(report) => return Ok(report),
                Event::Problem(problem) => return Err(problem.into()),
            }
        }
        Err(cut_off())
    }

    async fn connect(&self) -> Result<Box<dyn Bytestream>> {
        match &self.place {
            Place::Socket(path) => {
                let connected = UnixStream::connect(path).await;
                let place = || path.display().to_string();
                let stream =
                    connected.map_err(|source| Error::NoDaemon { place: place(), source })?;
                Ok(Box::new(stream))
            }
            Place::Server(server) => {
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

    /// Sends a request; an answer of failure is returned as an error.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Response<Incoming>> {
        let stream = self.connect().await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // Ends with the answer's body or the upgraded stream.
        tokio::spawn(connection.with_upgrades());
        let host = match &self.place {
            Place::Socket(_) => "pdp",
            Place::Server(server) => &server.host,
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

/// An answer that goes on, chunk by chunk.
#[derive(Debug)]
pub struct Stream(Incoming);

impl Stream {
    /// The next bytes; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        while let Some(frame) = self.0.frame().await {
            if let Ok(bytes) = frame.map_err(Error::BrokenOff)?.into_data() {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }
}

/// A watch: an answer that goes on until either side ends it.
#[derive(Debug)]
pub struct Watch(Lines);

impl Watch {
    /// The next line; `None` at the end. Dropping the future loses nothing that came.
    pub async fn next(&mut self) -> Result<Option<WatchLine>> {
        self.0.next().await
    }
}

/// An answer of one JSON value a line.
#[derive(Debug)]
struct Lines {
    body: Stream,
    bytes: BytesMut,
    /// Bytes known to hold no end of line.
    searched: usize,
}

impl Lines {
    fn new(response: Response<Incoming>) -> Self {
        Self { body: Stream(response.into_body()), bytes: BytesMut::new(), searched: 0 }
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
