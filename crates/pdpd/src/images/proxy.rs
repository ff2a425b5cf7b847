//! The one way out of a pull's network namespace: an HTTP proxy that judges each destination.
//!
//! A registry may send a client anywhere. So skopeo has a network namespace with a loopback interface alone, where
//! this process (`pdpd pull-proxy`, with the pull's user id and in its cgroup) listens. Its other sockets are on the
//! machine. It connects to the pull's registry, to hosts that the pull's owner may use as well, and to addresses of
//! the public Internet that lead away from the machine; it connects to an address that it judged, and asks no name
//! twice. All else is refused in the same words, whoever listens there.
//!
//! Clients ask no proxy for loopback addresses. A registry there is relayed: the process listens at the same address
//! and port in the namespace.

use std::cell::RefCell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::handshake;
use hyper::header::{HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use pdp_management::privileges;
use pdp_management::ways::{Ways, is_near, is_public};
use rustix::process::{Resource, Rlimit, Signal, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set, set_no_new_privs};
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{LocalSet, spawn_local};

/// First argument of pdpd that makes it this process.
pub const WORD: &str = "pull-proxy";

/// Connections at a time; more wait to be accepted.
const CONNECTIONS_MAX: usize = 64;

/// Open files: two for a connection, and a few.
const OPEN_FILES_MAX: u64 = 4 * CONNECTIONS_MAX as u64;

/// Names that one pull may ask for.
const NAMES_MAX: usize = 256;

/// Time for a name and for each of its addresses.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// What is said of a destination that is not allowed.
const REFUSED: &str = "the registry leads to a place that pulls may not reach";

/// What the process is told, as JSON in its second argument. Its standard input is the listening socket.
#[derive(Debug, Serialize, Deserialize)]
pub struct Config {
    /// The pull's user id.
    pub uid: u32,
    /// `HOST:PORT` of registries, which may have private addresses.
    pub allowed: Vec<String>,
    /// `HOST:PORT` from the machine's settings, which may have addresses of the machine too.
    pub mirrors: Vec<String>,
    /// `HOST:PORT` on the machine that connections to standard output, a listening socket, lead to.
    pub relay: Option<String>,
}

/// Serves until it is killed.
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {WORD}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let config = std::env::args().nth(2).context("no configuration")?;
    let config: Config = serde_json::from_str(&config).context("no configuration")?;
    let open_files = Rlimit { current: Some(OPEN_FILES_MAX), maximum: Some(OPEN_FILES_MAX) };
    setrlimit(Resource::Nofile, open_files).context("cannot bound open files")?;
    let ways = Ways::new().context("cannot ask the machine's kernel for routes")?;
    for capability in CapabilitySet::all().iter() {
        // One that this kernel does not know is none.
        let _ = remove_capability_from_bounding_set(capability);
    }
    set_no_new_privs(true).context("cannot give up new privileges")?;
    privileges::become_user(config.uid)?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let listener = listener(io::stdin())?;
    let relay = match &config.relay {
        Some(to) => Some((self::listener(io::stdout())?, to.clone())),
        None => None,
    };
    let (allowed, mirrors) = (config.allowed, config.mirrors);
    let judge = Judge { allowed, mirrors, ways: RefCell::new(ways) };
    let known = RefCell::default();
    let proxy = Rc::new(Proxy { judge, upstream: Matcher::from_env(), known });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async move {
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        if let Some((listener, to)) = relay {
            spawn_local(serve_relay(TcpListener::from_std(listener)?, to, connections.clone()));
        }
        proxy.serve(TcpListener::from_std(listener)?, connections).await
    })
}

/// The listening socket that a standard stream is.
fn listener(stream: impl AsFd) -> Result<std::net::TcpListener> {
    let listener = std::net::TcpListener::from(stream.as_fd().try_clone_to_owned()?);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn serve_relay(listener: TcpListener, to: String, connections: Arc<Semaphore>) -> Result<()> {
    loop {
        let permit = connections.clone().acquire_owned().await?;
        let (mut inner, _) = listener.accept().await?;
        let to = to.clone();
        spawn_local(async move {
            let _permit = permit;
            if let Ok(Ok(mut outer)) =
                tokio::time::timeout(CONNECT_MAX, TcpStream::connect(to)).await
            {
                let _ = tokio::io::copy_bidirectional(&mut inner, &mut outer).await;
            }
        });
    }
}

/// The destinations that a pull may reach.
struct Judge {
    allowed: Vec<String>,
    mirrors: Vec<String>,
    ways: RefCell<Ways>,
}

impl Judge {
    fn is_allowed(&self, host: &str, port: u16, to: IpAddr) -> bool {
        let to = to.to_canonical();
        let name = format!("{host}:{port}");
        let is_in = |names: &[String]| names.iter().any(|it| it.eq_ignore_ascii_case(&name));
        if is_in(&self.mirrors) {
            return to.is_loopback() || !is_near(to);
        }
        if is_in(&self.allowed) {
            // Whoever answers for the registry's name in DNS can't move it to a service that listens on loopback, or
            // to the link-local address where clouds tell machines their secrets.
            return !is_near(to);
        }
        is_public(to) && self.ways.borrow_mut().leads_away(to, Instant::now())
    }
}

type Body = BoxBody<Bytes, hyper::Error>;

struct Proxy {
    judge: Judge,
    /// The daemon's own proxy.
    upstream: Matcher,
    /// Addresses by name and port, from the first look-up on: whoever answers for a registry's name in DNS can't
    /// move it to the machine between two requests.
    known: RefCell<HashMap<(String, u16), Vec<SocketAddr>>>,
}

/// A connection that leads to a destination, or to the daemon's proxy with what it wants to know.
struct Way {
    stream: TcpStream,
    proxy: Option<Option<HeaderValue>>,
}

impl Proxy {
    async fn serve(
        self: Rc<Self>,
        listener: TcpListener,
        connections: Arc<Semaphore>,
    ) -> Result<()> {
        loop {
            let permit = Rc::new(connections.clone().acquire_owned().await?);
            let (stream, _) = listener.accept().await?;
            let proxy = self.clone();
            spawn_local(async move {
                let service = service_fn(|request| {
                    let (proxy, permit) = (proxy.clone(), permit.clone());
                    async move { Ok::<_, Infallible>(proxy.answer(request, permit).await) }
                });
                let server = hyper::server::conn::http1::Builder::new();
                let _ =
                    server.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
            });
        }
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
        permit: Rc<OwnedSemaphorePermit>,
    ) -> Response<Body> {
        let done = match request.method() {
            &Method::CONNECT => self.tunnel(request, permit).await,
            _ => self.forward(request).await,
        };
        done.unwrap_or_else(|status| {
            let text = if status == StatusCode::FORBIDDEN { REFUSED } else { "" };
            let body = Full::new(Bytes::from_static(text.as_bytes()));
            let mut response = Response::new(body.map_err(|never| match never {}).boxed());
            *response.status_mut() = status;
            response
        })
    }

    /// Answers CONNECT (RFC 9110 section 9.3.6).
    async fn tunnel(
        &self,
        request: Request<Incoming>,
        permit: Rc<OwnedSemaphorePermit>,
    ) -> Result<Response<Body>, StatusCode> {
        let authority = request.uri().authority().cloned().ok_or(StatusCode::BAD_REQUEST)?;
        let uri = Uri::builder().scheme("https").authority(authority.clone()).path_and_query("/");
        let Way { mut stream, proxy } =
            self.way(&uri.build().map_err(|_| StatusCode::BAD_REQUEST)?).await?;
        let Some(authorization) = proxy else {
            spawn_local(async move {
                let _permit = permit;
                let Ok(inner) = hyper::upgrade::on(request).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(inner), &mut stream).await;
            });
            return Ok(Response::new(nothing()));
        };
        let mut onward = Request::new(nothing());
        *onward.method_mut() = Method::CONNECT;
        onward.headers_mut().extend(host(authority.as_str()));
        *onward.uri_mut() = Uri::from(authority);
        onward.headers_mut().extend(authorization.map(|value| (PROXY_AUTHORIZATION, value)));
        let response = send(stream, onward).await?;
        if !response.status().is_success() {
            return Err(response.status());
        }
        spawn_local(async move {
            let _permit = permit;
            let ends = tokio::try_join!(hyper::upgrade::on(request), hyper::upgrade::on(response));
            let Ok((inner, outer)) = ends else { return };
            let (mut inner, mut outer) = (TokioIo::new(inner), TokioIo::new(outer));
            let _ = tokio::io::copy_bidirectional(&mut inner, &mut outer).await;
        });
        Ok(Response::new(nothing()))
    }

    /// Answers a request for `http://…` (RFC 9112 section 3.2.2).
    async fn forward(&self, mut request: Request<Incoming>) -> Result<Response<Body>, StatusCode> {
        let uri = request.uri().clone();
        if uri.scheme_str() != Some("http") {
            return Err(StatusCode::BAD_REQUEST);
        }
        let Way { stream, proxy } = self.way(&uri).await?;
        let headers = request.headers_mut();
        for name in
            ["proxy-authorization", "proxy-connection", "connection", "keep-alive", "upgrade"]
        {
            headers.remove(name);
        }
        headers.remove("host");
        headers.extend(host(uri.authority().map_or("", |authority| authority.as_str())));
        match proxy {
            Some(authorization) => {
                headers.extend(authorization.map(|value| (PROXY_AUTHORIZATION, value)));
            }
            None => {
                let path = uri.path_and_query().map_or("/", |path| path.as_str());
                *request.uri_mut() = path.parse().map_err(|_| StatusCode::BAD_REQUEST)?;
            }
        }
        let response = send(stream, request.map(BodyExt::boxed)).await?;
        Ok(response.map(BodyExt::boxed))
    }

    /// Returns the addresses of a name. If it has public addresses, it returns no others.
    ///
    /// # Errors
    /// The pull asked for too many names, or the answer takes too long.
    async fn look_up(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, StatusCode> {
        let name = (host.to_ascii_lowercase(), port);
        if let Some(known) = self.known.borrow().get(&name) {
            return Ok(known.clone());
        }
        if self.known.borrow().len() >= NAMES_MAX {
            return Err(StatusCode::FORBIDDEN);
        }
        let found = tokio::time::timeout(CONNECT_MAX, lookup_host((host, port))).await;
        let found = found.map_err(|_| StatusCode::FORBIDDEN)?;
        let mut found: Vec<SocketAddr> = found.into_iter().flatten().collect();
        let is_public = |to: &SocketAddr| is_public(to.ip().to_canonical());
        if found.iter().any(is_public) {
            found.retain(is_public);
        }
        // Of two look-ups at a time the first answer counts.
        Ok(self.known.borrow_mut().entry(name).or_insert(found).clone())
    }

    /// Connects to a destination that is allowed, or to the daemon's proxy for it.
    async fn way(&self, uri: &Uri) -> Result<Way, StatusCode> {
        let host = uri.host().ok_or(StatusCode::BAD_REQUEST)?;
        let host = bare(host);
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        let port = uri.port_u16().unwrap_or(default);
        let found = self.look_up(host, port).await?;
        let allowed = |to: &&SocketAddr| self.judge.is_allowed(host, port, to.ip());
        if let Some(upstream) = self.upstream.intercept(uri) {
            // Who has a proxy may know no names of the Internet. The proxy finds its own address for the name.
            if host.parse::<IpAddr>().is_ok() && found.is_empty()
                || !found.iter().all(|to| allowed(&to))
            {
                return Err(StatusCode::FORBIDDEN);
            }
            let authorization = upstream.basic_auth().cloned();
            let at = upstream.uri();
            let name = (bare(at.host().unwrap_or_default()), at.port_u16().unwrap_or(80));
            let stream = tokio::time::timeout(CONNECT_MAX, TcpStream::connect(name)).await;
            let stream = stream.ok().and_then(Result::ok).ok_or(StatusCode::BAD_GATEWAY)?;
            return Ok(Way { stream, proxy: Some(authorization) });
        }
        let mut to = found.iter().filter(allowed).peekable();
        // A name that means nothing and one that may not be reached are told alike.
        if to.peek().is_none() {
            return Err(StatusCode::FORBIDDEN);
        }
        for to in to {
            let stream = tokio::time::timeout(CONNECT_MAX, TcpStream::connect(to)).await;
            if let Ok(Ok(stream)) = stream {
                return Ok(Way { stream, proxy: None });
            }
        }
        Err(StatusCode::BAD_GATEWAY)
    }
}

/// A host without the brackets of an IPv6 address.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Sends a request by a connection of its own.
async fn send(stream: TcpStream, request: Request<Body>) -> Result<Response<Incoming>, StatusCode> {
    let (mut sender, connection) =
        handshake(TokioIo::new(stream)).await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    spawn_local(connection.with_upgrades());
    sender.send_request(request).await.map_err(|_| StatusCode::BAD_GATEWAY)
}

fn nothing() -> Body {
    Empty::new().map_err(|never| match never {}).boxed()
}

fn host(authority: &str) -> Option<(HeaderName, HeaderValue)> {
    Some((hyper::header::HOST, HeaderValue::from_str(authority).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge() -> Judge {
        Judge {
            allowed: vec!["Hub.example:5000".into()],
            mirrors: vec!["mirror.example:80".into()],
            ways: RefCell::new(Ways::new().unwrap()),
        }
    }

    #[test]
    fn the_name_of_a_registry_leads_to_nothing_on_the_machine() {
        let judge = judge();
        for to in ["10.0.0.1", "fd00::1", "::ffff:10.0.0.1"] {
            assert!(judge.is_allowed("hub.example", 5000, to.parse().unwrap()), "{to}");
        }
        for to in ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "fe80::1", "0.0.0.0"]
        {
            assert!(!judge.is_allowed("hub.example", 5000, to.parse().unwrap()), "{to}");
        }
        assert!(judge.is_allowed("mirror.example", 80, "127.0.0.1".parse().unwrap()));
        assert!(!judge.is_allowed("mirror.example", 80, "169.254.169.254".parse().unwrap()));
        for (host, port) in [("hub.example", 443), ("other.example", 5000)] {
            assert!(!judge.is_allowed(host, port, "10.0.0.1".parse().unwrap()), "{host}:{port}");
        }
    }

    #[tokio::test]
    async fn a_name_keeps_the_addresses_of_its_first_look_up() {
        let known = RefCell::default();
        let proxy = Proxy { judge: judge(), upstream: Matcher::builder().build(), known };
        let first: Vec<SocketAddr> = vec!["203.0.113.1:80".parse().unwrap()];
        proxy.known.borrow_mut().insert(("localhost".into(), 80), first.clone());
        assert_eq!(proxy.look_up("LocalHost", 80).await.unwrap(), first);
        assert_ne!(proxy.look_up("localhost", 81).await.unwrap(), first);
        for port in 1000..1000 + NAMES_MAX as u16 {
            let _ = proxy.look_up("localhost", port).await;
        }
        assert_eq!(proxy.known.borrow().len(), NAMES_MAX);
        assert_eq!(proxy.look_up("localhost", 9999).await, Err(StatusCode::FORBIDDEN));
        assert_eq!(proxy.look_up("localhost", 80).await.unwrap(), first);
    }
}
