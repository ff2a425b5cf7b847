//! Connections: who is at the other end, how many there may be, TLS, and HTTP on them.

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

use super::answer::{Failure, panicked};
use super::{
    Api, CONNECTIONS_MAX, CONNECTIONS_PER_PEER_MAX, HANDSHAKE_TIME_MAX, HEAD_BYTES_MAX,
    HEADERS_TIME_MAX, IDLE_TIME_MAX, router,
};
use crate::access::{Peer, is_operator};

/// A connection's whole life.
pub type Connection = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Serves connections.
#[derive(Clone)]
pub struct Server {
    pub(super) api: Api,
    service: TowerToHyperService<axum::Router>,
    builder: http1::Builder,
    operators: Arc<Semaphore>,
    users: Arc<Semaphore>,
    addresses: Arc<Semaphore>,
    peers: Arc<Mutex<Counts>>,
}

/// Connections by whose they are.
type Counts = HashMap<Who, usize>;

/// Whose connections are counted together.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Who {
    User(u32),
    Address(IpAddr),
}

impl Who {
    /// Whoever has an IPv6 address has all of its /64 (RFC 6177).
    fn at(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            address => address,
        })
    }
}

/// Room for a connection, until it ends.
struct Place {
    _permit: OwnedSemaphorePermit,
    of: Option<(Who, Arc<Mutex<Counts>>)>,
}

impl Drop for Place {
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

impl Server {
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

    /// Serves a connection by the Unix socket; `None` if there is no room for it.
    pub fn unix(&self, stream: UnixStream) -> Option<Connection> {
        // Who connected, even if it has gone since.
        let credentials = stream.peer_cred().ok()?;
        let (uid, pid) = (credentials.uid(), credentials.pid().unwrap_or(0));
        let place = match is_operator(uid) {
            true => self.operators_place()?,
            false => self.place(&self.users, Who::User(uid))?,
        };
        Some(Box::pin(self.serve(stream, Peer::Unix { uid, pid }, place)))
    }

    /// Serves a connection over TLS; `None` if there is no room for it.
    pub fn tls(
        &self,
        stream: TcpStream,
        from: SocketAddr,
        acceptor: &TlsAcceptor,
    ) -> Option<Connection> {
        let place = self.place(&self.addresses, Who::at(from.ip()))?;
        // Where that is refused, one that went without a word ends when something is said to it.
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
                Ok(Ok(stream)) => this.serve(stream, Peer::Tls(from), place).await,
                Ok(Err(error)) => tracing::debug!(%from, %error, "TLS handshake"),
                Err(_) => tracing::debug!(%from, "TLS handshake took too long"),
            }
        }))
    }

    /// Serves one that was made otherwise, as of this peer; `None` if there is no room for it.
    pub fn other(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        peer: Peer,
    ) -> Option<Connection> {
        let place = self.operators_place()?;
        Some(Box::pin(self.serve(stream, peer, place)))
    }

    fn operators_place(&self) -> Option<Place> {
        Some(Place { _permit: self.operators.clone().try_acquire_owned().ok()?, of: None })
    }

    fn place(&self, room: &Arc<Semaphore>, who: Who) -> Option<Place> {
        let permit = room.clone().try_acquire_owned().ok()?;
        let mut peers = self.peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let count = peers.entry(who).or_default();
        if *count >= CONNECTIONS_PER_PEER_MAX {
            return None;
        }
        *count += 1;
        Some(Place { _permit: permit, of: Some((who, self.peers.clone())) })
    }

    fn serve(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        peer: Peer,
        place: Place,
    ) -> impl Future<Output = ()> + Send + 'static {
        let service = self.service.clone();
        let asked = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(peer);
            // A task of its own, from the start: what came is written down to its end, even when
            // its client goes away at once.
            let answer = tokio::spawn(service.call(request));
            async move {
                match answer.await {
                    Ok(answer) => answer,
                    Err(error) => Ok(Failure::from(panicked(error)).into_response()),
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
    fn addresses_of_one_prefix_are_one() {
        let same = |a: &str, b: &str| Who::at(a.parse().unwrap()) == Who::at(b.parse().unwrap());
        assert!(same("2001:db8::1", "2001:db8::ffff:1") && !same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("::ffff:192.0.2.1", "192.0.2.1") && !same("192.0.2.1", "192.0.2.2"));
        assert!(!same("::ffff:192.0.2.1", "::ffff:192.0.2.2"));
    }
}
