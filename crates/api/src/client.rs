//! A client of the API over a Unix socket. Every call opens a connection of its own.

use std::io;
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::exec::ExecRequest;
use crate::{
    ApplyRequest, CaptureQuery, Check, DownRequest, Event, GuestProcess, LinkRequest, LogQuery,
    NodeProcess, Problem, Progress, Report, RouteLine, RouteRow, RoutesQuery, ScaleRequest, Stats,
    StatsQuery, Substrate, Trace, TraceRequest, Version, Vnet, VnetSummary, paths,
};

/// Bytes of an answer that is read whole, and of one line of a stream.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers at the socket.
    #[error("no daemon at {}", path.display())]
    NoDaemon {
        /// The socket.
        path: PathBuf,
        /// Why the connection failed.
        source: io::Error,
    },
    /// The daemon refused.
    #[error(transparent)]
    Problem(Box<Problem>),
    /// The answer is not of this API.
    #[error("answer of the daemon: {0}")]
    Answer(String),
    /// The connection broke.
    #[error("connection to the daemon")]
    Http(#[from] hyper::Error),
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

/// A client of the daemon behind one socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client; connects at each call.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
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

    /// Sets a link's administrative state; see [`paths::link`] for its name.
    pub async fn set_link(&self, vnet: &str, link: &str, up: bool) -> Result<Report> {
        let request = LinkRequest { up };
        self.change(Method::PUT, &paths::link(vnet, link), Some(&request), |_| ()).await
    }

    /// Routes of a router, one by one to `row`; returns their count.
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
                RouteLine::End { count } => return Ok(count),
                RouteLine::Problem(problem) => return Err(problem.into()),
            }
        }
        Err(cut_off())
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

    /// Sends a request; an answer of failure is returned as an error.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Response<Incoming>> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|source| Error::NoDaemon { path: self.socket.clone(), source })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // Ends with the answer's body or the upgraded stream.
        tokio::spawn(connection.with_upgrades());
        let mut request = Request::builder().method(method).uri(path).header(HOST, "pdp");
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
            if let Ok(bytes) = frame?.into_data() {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }
}

/// An answer of one JSON value a line.
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
