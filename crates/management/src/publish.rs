//! Published ports: each connection to a port of the
//! machine is connected to the node's loopback address.
//!
//! Sockets towards the node are opened in its network namespace, which
//! has no path out of it. A connection takes two sockets and two
//! buffers. Its limits apply to the whole node, over all its ports.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use pdp_proto::management::ManagementPort;
use rustix::net::sockopt::{
    set_socket_keepalive, set_socket_linger, set_tcp_keepidle, set_tcp_keepintvl,
};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

/// Most connections of a node at a time, but at least one for
/// each of its ports. Further ones wait to be accepted.
pub const CONNECTIONS_MAX: usize = 256;

/// Most senders of datagrams at a time at a port, with their
/// answers. Datagrams of further senders are dropped.
pub const SENDERS_MAX: usize = 64;

/// Time without a datagram in either direction after which a sender is forgotten.
const SENDER_IDLE: Duration = Duration::from_secs(60);

/// Time after which a keepalive probes the other end of a silent connection.
const IDLE: Duration = Duration::from_secs(60);

/// Longest time for the node to accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Pause after a failure that is not specific to one connection (descriptors, memory).
const PAUSE: Duration = Duration::from_millis(100);

/// Longest datagram, bytes.
const DATAGRAM_MAX: usize = 1 << 16;

/// Datagrams of a sender that wait for the node.
const DATAGRAMS_WAITING: usize = 16;

/// A port with a listening socket.
pub enum Listening {
    /// By TCP.
    Tcp(std::net::TcpListener, u16),
    /// By UDP.
    Udp(std::net::UdpSocket, u16),
}

impl Listening {
    /// Listens in this thread's network namespace.
    pub fn at(port: &ManagementPort) -> Result<Self> {
        let ManagementPort { listen, port: inside, udp } = *port;
        let listening = || {
            if udp {
                let socket = std::net::UdpSocket::bind(listen)?;
                socket.set_nonblocking(true)?;
                return Ok(Self::Udp(socket, inside));
            }
            let listener = std::net::TcpListener::bind(listen)?;
            listener.set_nonblocking(true)?;
            Ok(Self::Tcp(listener, inside))
        };
        listening().map_err(|error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => anyhow::anyhow!(
                "port {listen}{} is in use by another program of the machine",
                if udp { "/udp" } else { "" }
            ),
            io::ErrorKind::AddrNotAvailable => {
                anyhow::anyhow!("{} is no address of the machine", listen.ip())
            }
            _ => anyhow::Error::new(error).context(format!("cannot listen at {listen}")),
        })
    }

    /// Serves the port for ever.
    pub async fn serve(self, connections: Arc<Semaphore>) -> Result<()> {
        match self {
            Self::Tcp(listener, port) => {
                let listener = TcpListener::from_std(listener).context("cannot watch a port")?;
                serve_tcp(listener, port, connections).await
            }
            Self::Udp(socket, port) => {
                let socket = UdpSocket::from_std(socket).context("cannot watch a port")?;
                serve_udp(Rc::new(socket), port).await
            }
        }
    }
}

async fn serve_tcp(listener: TcpListener, port: u16, connections: Arc<Semaphore>) -> Result<()> {
    let mut running = JoinSet::new();
    loop {
        let connection = connections.clone().acquire_owned().await?;
        while running.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((outer, _)) => drop(running.spawn_local(async move {
                forward(outer, port).await;
                drop(connection);
            })),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Forwards a connection until it ends.
async fn forward(mut outer: TcpStream, port: u16) {
    let inner = tokio::time::timeout(CONNECT_MAX, connect(port)).await;
    let Ok(Ok(mut inner)) = inner else {
        // As if the port itself were closed.
        let _ = set_socket_linger(&outer, Some(Duration::ZERO));
        return;
    };
    for socket in [&outer, &inner] {
        let _ = socket.set_nodelay(true);
        let _ = set_socket_keepalive(socket, true);
        let _ = set_tcp_keepidle(socket, IDLE);
        let _ = set_tcp_keepintvl(socket, IDLE / 4);
    }
    // If one end breaks off, the other ends too.
    let _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
}

/// Connects to the port in the node by IPv4, or by IPv6 if it is closed there.
async fn connect(port: u16) -> io::Result<TcpStream> {
    match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
        Ok(stream) => Ok(stream),
        Err(first) => TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await.map_err(|_| first),
    }
}

async fn serve_udp(outer: Rc<UdpSocket>, port: u16) -> Result<()> {
    let mut senders: HashMap<SocketAddr, mpsc::Sender<Vec<u8>>> = HashMap::new();
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        let (length, from) = match outer.recv_from(&mut buffer).await {
            Ok(received) => received,
            // An error about an earlier answer, or lack of memory.
            Err(_) => {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        senders.retain(|_, sender| !sender.is_closed());
        if !senders.contains_key(&from) {
            if senders.len() >= SENDERS_MAX {
                continue;
            }
            let (sender, datagrams) = mpsc::channel(DATAGRAMS_WAITING);
            senders.insert(from, sender);
            tokio::task::spawn_local(answer(outer.clone(), from, port, datagrams));
        }
        // A datagram without room is dropped, as in any network.
        let _ = senders[&from].try_send(buffer[..length].to_vec());
    }
}

/// Forwards the datagrams of one sender and their answers, until the sender is idle for a while.
async fn answer(
    outer: Rc<UdpSocket>,
    from: SocketAddr,
    port: u16,
    mut datagrams: mpsc::Receiver<Vec<u8>>,
) -> io::Result<()> {
    let inner = UdpSocket::bind((IpAddr::V4(Ipv4Addr::LOCALHOST), 0)).await?;
    inner.connect((Ipv4Addr::LOCALHOST, port)).await?;
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        let idle = tokio::time::sleep(SENDER_IDLE);
        tokio::select! {
            datagram = datagrams.recv() => match datagram {
                Some(datagram) => drop(inner.send(&datagram).await),
                None => return Ok(()),
            },
            length = inner.recv(&mut buffer) => match length {
                Ok(length) => drop(outer.send_to(&buffer[..length], from).await),
                // The port is closed.
                Err(_) => tokio::time::sleep(PAUSE).await,
            },
            () = idle => return Ok(()),
        }
    }
}
