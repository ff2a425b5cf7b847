//! Answers pdpd on the control socket.

use std::io;
use std::os::fd::OwnedFd;

use pdp_proto::channel::Channel;
use pdp_proto::tap::{TapReply, TapRequest};

use crate::ports::TapPorts;

/// Answers a request.
pub fn answer(
    request: TapRequest,
    fds: Vec<OwnedFd>,
    channel: &mut Channel,
    ports: &mut TapPorts,
) -> io::Result<()> {
    let (reply, fds) = match request {
        TapRequest::Serve { ports: requested } => {
            let reply = match ports.replace(requested, fds) {
                Ok(()) => TapReply::Done,
                Err(error) => TapReply::Failed { error: format!("can't serve: {error}") },
            };
            (reply, Vec::new())
        }
        TapRequest::Hold => {
            let (taps, fds) = ports.taps_and_descriptors();
            (TapReply::Held { ports: taps }, fds)
        }
        TapRequest::Stats => (TapReply::Stats { ports: ports.stats() }, Vec::new()),
    };
    channel.send(&reply, &fds)
}
