//! The only path out of a pull's network namespace: an HTTP proxy that checks each destination.
//!
//! A registry may redirect a client anywhere. So skopeo runs in a network namespace
//! with a loopback interface alone. This process (`pdpd pull-proxy`, with the pull's
//! user id and in its cgroup) listens there; its other sockets are on the machine.
//!
//! It connects to the pull's registry, to hosts that the pull's owner may use as
//! well, and to public Internet addresses whose route leads away from the machine.
//! It resolves each name once and connects to the address that it checked.
//! Everything else is refused with the same text, whatever listens there.
//!
//! HTTP clients use no proxy for loopback addresses. A registry there is
//! relayed: the process listens at the same address and port in the namespace.

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
use pdp_management::reachability::{RouteQuery, is_near, is_public};
use rustix::process::{Resource, Rlimit, Signal, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set, set_no_new_privs};
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{LocalSet, spawn_local};

/// First argument that makes pdpd run as this process.
pub const WORD: &str = "pull-proxy";

/// Simultaneous connections; more wait to be accepted.
const CONNECTIONS_MAX: usize = 64;

/// Open files: two per connection, and some more.
const OPEN_FILES_MAX: u64 = 4 * CONNECTIONS_MAX as u64;

/// Names that one pull may resolve.
const NAMES_MAX: usize = 256;

/// Longest time to resolve a name, and to connect to each of its addresses.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Response for a destination that is not allowed.
const REFUSED: &str = "the registry refers to an address that pulls may not reach";

/// Configuration of the process: JSON in its second argument. Its
/// standard input is the listening socket.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProxyConfig {
    /// The pull's user id.
    pub uid: u32,
    /// `HOST:PORT` of registries that may have private addresses.
    pub allowed: Vec<String>,
    /// `HOST:PORT` from the machine's settings, which may also have addresses of the machine.
    pub mirrors: Vec<String>,
    /// `HOST:PORT` on the machine to which connections are relayed.
    /// Standard output is the listening socket for them.
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
    let config: ProxyConfig = serde_json::from_str(&config).context("no configuration")?;
    let open_files = Rlimit { current: Some(OPEN_FILES_MAX), maximum: Some(OPEN_FILES_MAX) };
    setrlimit(Resource::Nofile, open_files).context("cannot bound open files")?;
    let routes = RouteQuery::new().context("cannot ask the machine's kernel for routes")?;
    for capability in CapabilitySet::all().iter() {
        // A capability that this kernel does not know is not set.
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
    let judge = DestinationPolicy { allowed, mirrors, routes: RefCell::new(routes) };
    let addresses = RefCell::default();
    let proxy = Rc::new(Proxy { judge, upstream: Matcher::from_env(), addresses });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async move {
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        if let Some((listener, to)) = relay {
            spawn_local(serve_relay(TcpListener::from_std(listener)?, to, connections.clone()));
        }
        proxy.serve(TcpListener::from_std(listener)?, connections).await
    })
}

/// Returns the listening socket behind a standard stream.
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

/// Destinations that a pull may reach.
struct DestinationPolicy {
    allowed: Vec<String>,
    mirrors: Vec<String>,
    routes: RefCell<RouteQuery>,
}

impl DestinationPolicy {
    fn is_allowed(&self, host: &str, port: u16, to: IpAddr) -> bool {
        let to = to.to_canonical();
        let name = format!("{host}:{port}");
        let is_in = |names: &[String]| names.iter().any(|it| it.eq_ignore_ascii_case(&name));
        if is_in(&self.mirrors) {
            return to.is_loopback() || !is_near(to);
        }
        if is_in(&self.allowed) {
            // The owner of the registry's DNS name can't redirect it to a service on
            // loopback, or to the link-local address where clouds serve secrets to machines.
            return !is_near(to);
        }
        is_public(to) && self.routes.borrow_mut().leads_away(to, Instant::now())
    }
}

type ProxyBody = BoxBody<Bytes, hyper::Error>;

struct Proxy {
    judge: DestinationPolicy,
    /// The daemon's own proxy.
    upstream: Matcher,
    /// Addresses by name and port, from the first look-up on. So the owner of a
    /// registry's DNS name can't redirect it to the machine between two requests.
    addresses: RefCell<HashMap<(String, u16), Vec<SocketAddr>>>,
}

/// A connection to a destination, or to the daemon's proxy with the credentials for it.
struct ProxyUpstream {
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
    ) -> Response<ProxyBody> {
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
    ) -> Result<Response<ProxyBody>, StatusCode> {
        let authority = request.uri().authority().cloned().ok_or(StatusCode::BAD_REQUEST)?;
        let uri = Uri::builder().scheme("https").authority(authority.clone()).path_and_query("/");
        let ProxyUpstream { mut stream, proxy } =
            self.connect(&uri.build().map_err(|_| StatusCode::BAD_REQUEST)?).await?;
        let Some(authorization) = proxy else {
            spawn_local(async move {
                let _permit = permit;
                let Ok(inner) = hyper::upgrade::on(request).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(inner), &mut stream).await;
            });
            return Ok(Response::new(nothing()));
        };
        let mut connect_request = Request::new(nothing());
        *connect_request.method_mut() = Method::CONNECT;
        connect_request.headers_mut().extend(host(authority.as_str()));
        *connect_request.uri_mut() = Uri::from(authority);
        connect_request
            .headers_mut()
            .extend(authorization.map(|value| (PROXY_AUTHORIZATION, value)));
        let response = send(stream, connect_request).await?;
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
    async fn forward(
        &self,
        mut request: Request<Incoming>,
    ) -> Result<Response<ProxyBody>, StatusCode> {
        let uri = request.uri().clone();
        if uri.scheme_str() != Some("http") {
            return Err(StatusCode::BAD_REQUEST);
        }
        let ProxyUpstream { stream, proxy } = self.connect(&uri).await?;
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
        if let Some(addresses) = self.addresses.borrow().get(&name) {
            return Ok(addresses.clone());
        }
        if self.addresses.borrow().len() >= NAMES_MAX {
            return Err(StatusCode::FORBIDDEN);
        }
        let found = tokio::time::timeout(CONNECT_MAX, lookup_host((host, port))).await;
        let found = found.map_err(|_| StatusCode::FORBIDDEN)?;
        let mut found: Vec<SocketAddr> = found.into_iter().flatten().collect();
        let is_public = |to: &SocketAddr| is_public(to.ip().to_canonical());
        if found.iter().any(is_public) {
            found.retain(is_public);
        }
        // Of two simultaneous look-ups the first answer counts.
        Ok(self.addresses.borrow_mut().entry(name).or_insert(found).clone())
    }

    /// Connects to an allowed destination, or to the daemon's proxy for it.
    async fn connect(&self, uri: &Uri) -> Result<ProxyUpstream, StatusCode> {
        let host = uri.host().ok_or(StatusCode::BAD_REQUEST)?;
        let host = bare(host);
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        let port = uri.port_u16().unwrap_or(default);
        let found = self.look_up(host, port).await?;
        let allowed = |to: &&SocketAddr| self.judge.is_allowed(host, port, to.ip());
        if let Some(upstream) = self.upstream.intercept(uri) {
            // A network with a proxy may not resolve Internet names.
            // The proxy resolves the name itself.
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
            return Ok(ProxyUpstream { stream, proxy: Some(authorization) });
        }
        let mut to = found.iter().filter(allowed).peekable();
        // An unknown name and a forbidden one get the same answer.
        if to.peek().is_none() {
            return Err(StatusCode::FORBIDDEN);
        }
        for to in to {
            let stream = tokio::time::timeout(CONNECT_MAX, TcpStream::connect(to)).await;
            if let Ok(Ok(stream)) = stream {
                return Ok(ProxyUpstream { stream, proxy: None });
            }
        }
        Err(StatusCode::BAD_GATEWAY)
    }
}

/// Strips the brackets from an IPv6 host.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Sends a request over a new connection.
async fn send(
    stream: TcpStream,
    request: Request<ProxyBody>,
) -> Result<Response<Incoming>, StatusCode> {
    let (mut sender, connection) =
        handshake(TokioIo::new(stream)).await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    spawn_local(connection.with_upgrades());
    sender.send_request(request).await.map_err(|_| StatusCode::BAD_GATEWAY)
}

fn nothing() -> ProxyBody {
    Empty::new().map_err(|never| match never {}).boxed()
}

fn host(authority: &str) -> Option<(HeaderName, HeaderValue)> {
    Some((hyper::header::HOST, HeaderValue::from_str(authority).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge() -> DestinationPolicy {
        DestinationPolicy {
            allowed: vec!["Hub.example:5000".into()],
            mirrors: vec!["mirror.example:80".into()],
            routes: RefCell::new(RouteQuery::new().unwrap()),
        }
    }

    #[test]
    fn registry_name_cannot_reach_local_addresses() {
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
    async fn proxy_caches_the_first_address_lookup() {
        let addresses = RefCell::default();
        let proxy = Proxy { judge: judge(), upstream: Matcher::builder().build(), addresses };
        let first: Vec<SocketAddr> = vec!["203.0.113.1:80".parse().unwrap()];
        proxy.addresses.borrow_mut().insert(("localhost".into(), 80), first.clone());
        assert_eq!(proxy.look_up("LocalHost", 80).await.unwrap(), first);
        assert_ne!(proxy.look_up("localhost", 81).await.unwrap(), first);
        for port in 1000..1000 + NAMES_MAX as u16 {
            let _ = proxy.look_up("localhost", port).await;
        }
        assert_eq!(proxy.addresses.borrow().len(), NAMES_MAX);
        assert_eq!(proxy.look_up("localhost", 9999).await, Err(StatusCode::FORBIDDEN));
        assert_eq!(proxy.look_up("localhost", 80).await.unwrap(), first);
    }
}
