//! Connections: identity of the peer, limits, TLS, and HTTP.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use axum::response::IntoResponse;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;

use super::answer::{ProblemResponse, panicked};
use super::{
    Api, CONNECTIONS_MAX, CONNECTIONS_PER_PEER_MAX, HANDSHAKE_TIME_MAX, HEAD_BYTES_MAX,
    HEADERS_TIME_MAX, IDLE_TIME_MAX, router,
};
use crate::access::{PeerIdentity, is_operator};

/// Task that serves one connection until it ends.
pub type ConnectionTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Serves connections.
#[derive(Clone)]
pub struct HttpServer {
    pub(super) api: Api,
    service: TowerToHyperService<axum::Router>,
    builder: http1::Builder,
    operators: Arc<Semaphore>,
    users: Arc<Semaphore>,
    addresses: Arc<Semaphore>,
    peers: Arc<Mutex<ConnectionCounts>>,
}

/// Number of connections by owner.
type ConnectionCounts = HashMap<ConnectionOwner, usize>;

/// Owner whose connections are counted together.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum ConnectionOwner {
    User(u32),
    Address(IpAddr),
}

impl ConnectionOwner {
    /// Returns the owner of an address. An IPv6 site has a whole /64 (RFC 6177).
    fn at(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            address => address,
        })
    }
}

/// Permit for one connection, until it ends.
struct ConnectionPermit {
    _permit: OwnedSemaphorePermit,
    of: Option<(ConnectionOwner, Arc<Mutex<ConnectionCounts>>)>,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let Some((who, peers)) = &self.of else { return };
        let mut peers = peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(count) = peers.get_mut(who) {
            *count -= 1;
            if *count == 0 {
                peers.remove(who);
            }
        }
    }
}

impl HttpServer {
    pub(super) fn new(api: Api) -> Self {
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(HEADERS_TIME_MAX)
            .max_buf_size(HEAD_BYTES_MAX);
        let room = || Arc::new(Semaphore::new(CONNECTIONS_MAX));
        Self {
            service: TowerToHyperService::new(router(api.clone())),
            api,
            builder,
            operators: room(),
            users: room(),
            addresses: room(),
            peers: Arc::default(),
        }
    }

    /// Serves a connection over the Unix socket; `None` if the limit is reached.
    pub fn unix(&self, stream: UnixStream) -> Option<ConnectionTask> {
        // The user who connected, even if it has gone since.
        let credentials = stream.peer_cred().ok()?;
        let (uid, pid) = (credentials.uid(), credentials.pid().unwrap_or(0));
        let place = match is_operator(uid) {
            true => self.operators_place()?,
            false => self.acquire_permit(&self.users, ConnectionOwner::User(uid))?,
        };
        Some(Box::pin(self.serve(stream, PeerIdentity::Unix { uid, pid }, place)))
    }

    /// Serves a connection over TLS; `None` if the limit is reached.
    pub fn tls(
        &self,
        stream: TcpStream,
        from: SocketAddr,
        acceptor: &TlsAcceptor,
    ) -> Option<ConnectionTask> {
        let place = self.acquire_permit(&self.addresses, ConnectionOwner::at(from.ip()))?;
        // If setting this fails, a peer that vanished silently is
        // noticed only when the daemon sends something.
        let _ = set_socket_keepalive(&stream, true);
        let _ = set_tcp_keepidle(&stream, IDLE_TIME_MAX);
        let _ = set_tcp_keepintvl(&stream, IDLE_TIME_MAX / 4);
        let _ = set_tcp_keepcnt(&stream, 4);
        let handshake = tokio::time::timeout(HANDSHAKE_TIME_MAX, acceptor.accept(stream));
        let this = self.clone();
        Some(Box::pin(async move {
            let shaken = tokio::select! {
                shaken = handshake => shaken,
                () = this.api.stop() => return,
            };
            match shaken {
                Ok(Ok(stream)) => this.serve(stream, PeerIdentity::Tls(from), place).await,
                Ok(Err(error)) => tracing::debug!(%from, %error, "TLS handshake"),
                Err(_) => tracing::debug!(%from, "TLS handshake took too long"),
            }
        }))
    }

    /// Serves a connection of another kind on behalf of `peer`; `None` if the limit is reached.
    pub fn other(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        peer: PeerIdentity,
    ) -> Option<ConnectionTask> {
        let place = self.operators_place()?;
        Some(Box::pin(self.serve(stream, peer, place)))
    }

    fn operators_place(&self) -> Option<ConnectionPermit> {
        Some(ConnectionPermit {
            _permit: self.operators.clone().try_acquire_owned().ok()?,
            of: None,
        })
    }

    fn acquire_permit(
        &self,
        room: &Arc<Semaphore>,
        who: ConnectionOwner,
    ) -> Option<ConnectionPermit> {
        let permit = room.clone().try_acquire_owned().ok()?;
        let mut peers = self.peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let count = peers.entry(who).or_default();
        if *count >= CONNECTIONS_PER_PEER_MAX {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit { _permit: permit, of: Some((who, self.peers.clone())) })
    }

    fn serve(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        peer: PeerIdentity,
        place: ConnectionPermit,
    ) -> impl Future<Output = ()> + Send + 'static {
        let service = self.service.clone();
        let asked = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(peer);
            // A separate task from the start, so that the request is
            // logged to its end even if the client goes away at once.
            let answer = tokio::spawn(service.call(request));
            async move {
                match answer.await {
                    Ok(answer) => answer,
                    Err(error) => Ok(ProblemResponse::from(panicked(error)).into_response()),
                }
            }
        });
        let connection = self.builder.serve_connection(TokioIo::new(stream), asked).with_upgrades();
        let api = self.api.clone();
        async move {
            let _place = place;
            tokio::pin!(connection);
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = api.stop() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "connection of a client");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_limit_groups_addresses_by_prefix() {
        let same = |a: &str, b: &str| {
            ConnectionOwner::at(a.parse().unwrap()) == ConnectionOwner::at(b.parse().unwrap())
        };
        assert!(same("2001:db8::1", "2001:db8::ffff:1") && !same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("::ffff:192.0.2.1", "192.0.2.1") && !same("192.0.2.1", "192.0.2.2"));
        assert!(!same("::ffff:192.0.2.1", "::ffff:192.0.2.2"));
    }
}
