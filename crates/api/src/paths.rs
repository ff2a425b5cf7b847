//! The paths of the API, `/v1/…`. A constant has its variable parts in braces, as the API's
//! description; the function of the same name replaces them with escaped names.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Characters to escape in one segment of a path (RFC 3986 section 3.3).
const SEGMENT: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'/')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// `GET`: the daemon's version, [`DaemonVersion`](crate::DaemonVersion).
pub const VERSION: &str = "/v1/version";
/// `GET`: this API's OpenAPI 3.1 description.
pub const OPENAPI: &str = "/v1/openapi.json";
/// `GET`: the JSON Schema of specs, to which the OpenAPI description refers.
pub const SPEC_SCHEMA: &str = "/v1/pdp-v1.json";
/// `GET`: the machine's abilities, `[MachineCheck]`.
pub const DOCTOR: &str = "/v1/doctor";
/// `POST` [`ApplyRequest`](crate::ApplyRequest): [`ChangeEvent`](crate::ChangeEvent)s.
pub const APPLY: &str = "/v1/apply";
/// `POST`: start everything that is stored. [`ChangeEvent`](crate::ChangeEvent)s.
pub const UP: &str = "/v1/up";
/// `POST` [`DownRequest`](crate::DownRequest): stop everything.
/// [`ChangeEvent`](crate::ChangeEvent)s.
pub const DOWN: &str = "/v1/down";
/// `GET`: [`SubstrateInfo`](crate::SubstrateInfo). `DELETE`: [`ChangeEvent`](crate::ChangeEvent)s.
pub const SUBSTRATE: &str = "/v1/substrate";
/// `GET`: `[VnetSummary]`.
pub const VNETS: &str = "/v1/vnets";
/// `GET`: [`Stats`](crate::Stats).
pub const STATS: &str = "/v1/stats";
/// `GET`: [`WatchLine`](crate::WatchLine)s until the client disconnects.
pub const WATCH: &str = "/v1/watch";

/// `GET`: `[TenantInfo]`.
pub const TENANTS: &str = "/v1/tenants";
/// `GET`: `[Token]`. `POST` [`TokenRequest`](crate::TokenRequest): [`NewToken`](crate::NewToken).
pub const TOKENS: &str = "/v1/tokens";
/// `GET`: `[ImageInfo]`. `POST` [`PullRequest`](crate::PullRequest):
/// [`ChangeEvent`](crate::ChangeEvent)s. `DELETE`: remove unused images; `[ImageInfo]` of them.
pub const IMAGES: &str = "/v1/images";
/// `GET`: `[AuditEntry]`.
pub const AUDIT: &str = "/v1/audit";

/// `DELETE`: [`ChangeEvent`](crate::ChangeEvent)s.
pub const TENANT: &str = "/v1/tenants/{tenant}";
/// `DELETE`: remove the image, by one of its names or its digest.
pub const IMAGE: &str = "/v1/images/{image}";
/// `DELETE`: revoke the token.
pub const TOKEN: &str = "/v1/tokens/{id}";
/// `GET`: a log of the node itself, as text.
pub const LOGS: &str = "/v1/logs/{process}";

/// `GET`: [`Vnet`](crate::Vnet). `DELETE`: [`ChangeEvent`](crate::ChangeEvent)s.
pub const VNET: &str = "/v1/vnets/{vnet}";
/// `POST` [`RestartRequest`](crate::RestartRequest): [`ChangeEvent`](crate::ChangeEvent)s.
pub const RESTART: &str = "/v1/vnets/{vnet}/restart";
/// `PUT` [`LinkRequest`](crate::LinkRequest), `PATCH` [`LinkChange`](crate::LinkChange):
/// [`ChangeEvent`](crate::ChangeEvent)s. `link` is the link's name or one of its ends, `r1:eth0`.
pub const LINK: &str = "/v1/vnets/{vnet}/links/{link}";
/// `GET`: the MAC addresses that a segment has learned, [`FdbEntry`](crate::FdbEntry). `DELETE`:
/// forget them. `link` is as in [`LINK`].
pub const FDB: &str = "/v1/vnets/{vnet}/links/{link}/fdb";

/// `PUT` [`ScaleRequest`](crate::ScaleRequest): [`ChangeEvent`](crate::ChangeEvent)s.
pub const GUESTS: &str = "/v1/vnets/{vnet}/nodes/{node}/guests";
/// `POST` [`ExecRequest`](crate::exec::ExecRequest): upgrade to [`crate::exec::UPGRADE`].
pub const EXEC: &str = "/v1/vnets/{vnet}/nodes/{node}/exec";
/// `GET`: [`RouteLine`](crate::RouteLine)s.
pub const ROUTES: &str = "/v1/vnets/{vnet}/nodes/{node}/routes";
/// `GET`: a log of a process of a vnet's node, as text.
pub const NODE_LOGS: &str = "/v1/vnets/{vnet}/nodes/{node}/logs/{process}";
/// `GET`: [`FastpathFilters`](crate::FastpathFilters). `POST`
/// [`FastpathChange`](crate::FastpathChange): [`FastpathChanged`](crate::FastpathChanged).
pub const FASTPATH_FILTERS: &str = "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters";
/// `GET`: [`FastpathCounters`](crate::FastpathCounters).
pub const FASTPATH_COUNTERS: &str = "/v1/vnets/{vnet}/nodes/{node}/fastpath/counters";
/// `GET`: [`FastpathQueues`](crate::FastpathQueues).
pub const FASTPATH_QUEUES: &str = "/v1/vnets/{vnet}/nodes/{node}/fastpath/queues";
/// `POST` [`FastpathFrame`](crate::FastpathFrame): send it.
pub const FASTPATH_FRAMES: &str = "/v1/vnets/{vnet}/nodes/{node}/fastpath/frames";
/// `GET`: pcap until the client disconnects.
pub const CAPTURE: &str = "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/capture";
/// `POST` [`TraceRequest`](crate::TraceRequest): [`Trace`](crate::Trace).
pub const TRACE: &str = "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/trace";

/// [`TENANT`] of these names.
pub fn tenant(tenant: &str) -> String {
    fill(TENANT, &[tenant])
}

/// [`IMAGE`] of these names.
pub fn image(image: &str) -> String {
    fill(IMAGE, &[image])
}

/// [`TOKEN`] of these names.
pub fn token(id: u64) -> String {
    fill(TOKEN, &[&id.to_string()])
}

/// [`LOGS`] of these names.
pub fn logs(process: crate::NodeProcess) -> String {
    let process = match process {
        crate::NodeProcess::Daemon => "daemon",
        crate::NodeProcess::Mux => "mux",
    };
    fill(LOGS, &[process])
}

/// [`VNET`] of these names.
pub fn vnet(vnet: &str) -> String {
    fill(VNET, &[vnet])
}

/// [`RESTART`] of these names.
pub fn restart(vnet: &str) -> String {
    fill(RESTART, &[vnet])
}

/// [`LINK`] of these names.
pub fn link(vnet: &str, link: &str) -> String {
    fill(LINK, &[vnet, link])
}

/// [`FDB`] of these names.
pub fn fdb(vnet: &str, link: &str) -> String {
    fill(FDB, &[vnet, link])
}

/// [`GUESTS`] of these names.
pub fn guests(vnet: &str, node: &str) -> String {
    fill(GUESTS, &[vnet, node])
}

/// [`EXEC`] of these names.
pub fn exec(vnet: &str, node: &str) -> String {
    fill(EXEC, &[vnet, node])
}

/// [`ROUTES`] of these names.
pub fn routes(vnet: &str, node: &str) -> String {
    fill(ROUTES, &[vnet, node])
}

/// [`NODE_LOGS`] of these names.
pub fn node_logs(vnet: &str, node: &str, process: crate::GuestProcess) -> String {
    fill(NODE_LOGS, &[vnet, node, &process.to_string()])
}

/// [`FASTPATH_FILTERS`] of these names.
pub fn fastpath_filters(vnet: &str, node: &str) -> String {
    fill(FASTPATH_FILTERS, &[vnet, node])
}

/// [`FASTPATH_COUNTERS`] of these names.
pub fn fastpath_counters(vnet: &str, node: &str) -> String {
    fill(FASTPATH_COUNTERS, &[vnet, node])
}

/// [`FASTPATH_QUEUES`] of these names.
pub fn fastpath_queues(vnet: &str, node: &str) -> String {
    fill(FASTPATH_QUEUES, &[vnet, node])
}

/// [`FASTPATH_FRAMES`] of these names.
pub fn fastpath_frames(vnet: &str, node: &str) -> String {
    fill(FASTPATH_FRAMES, &[vnet, node])
}

/// [`CAPTURE`] of these names.
pub fn capture(vnet: &str, node: &str, port: &str) -> String {
    fill(CAPTURE, &[vnet, node, port])
}

/// [`TRACE`] of these names.
pub fn trace(vnet: &str, node: &str, port: &str) -> String {
    fill(TRACE, &[vnet, node, port])
}

/// Replaces the variable parts of a path, in order.
fn fill(path: &str, names: &[&str]) -> String {
    let mut names = names.iter();
    let mut part = |part: &str| match part.starts_with('{') {
        true => names.next().map_or_else(String::new, |name| segment(name)),
        false => part.to_owned(),
    };
    path.split('/').map(&mut part).collect::<Vec<_>>().join("/")
}

fn segment(name: &str) -> String {
    // A name of dots alone would be taken for a relative path segment.
    if !name.is_empty() && name.bytes().all(|byte| byte == b'.') {
        return "%2E".repeat(name.len());
    }
    utf8_percent_encode(name, SEGMENT).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_names_are_escaped_within_their_segment() {
        assert_eq!(vnet("red"), "/v1/vnets/red");
        assert_eq!(vnet("../up?x#y z"), "/v1/vnets/..%2Fup%3Fx%23y%20z");
        assert_eq!(vnet(".."), "/v1/vnets/%2E%2E");
        assert_eq!(link("red", "r1:eth0"), "/v1/vnets/red/links/r1:eth0");
        assert_eq!(exec("a%2Fb", "ü"), "/v1/vnets/a%252Fb/nodes/%C3%BC/exec");
    }
}
