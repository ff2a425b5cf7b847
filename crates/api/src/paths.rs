//! The paths of the API, `/v1/…`, with their variable parts escaped.

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
pub fn tenant(tenant: &str) -> String {
    format!("{TENANTS}/{}", segment(tenant))
}

/// `DELETE`: remove the image, by one of its names or its digest.
pub fn image(image: &str) -> String {
    format!("{IMAGES}/{}", segment(image))
}

/// `DELETE`: revoke the token.
pub fn token(id: u64) -> String {
    format!("{TOKENS}/{id}")
}

/// `GET`: [`Vnet`](crate::Vnet). `DELETE`: [`ChangeEvent`](crate::ChangeEvent)s.
pub fn vnet(vnet: &str) -> String {
    format!("{VNETS}/{}", segment(vnet))
}

/// `PUT` [`ScaleRequest`](crate::ScaleRequest): [`ChangeEvent`](crate::ChangeEvent)s.
pub fn guests(vnet: &str, node: &str) -> String {
    format!("{VNETS}/{}/nodes/{}/guests", segment(vnet), segment(node))
}

/// `POST` [`RestartRequest`](crate::RestartRequest): [`ChangeEvent`](crate::ChangeEvent)s.
pub fn restart(vnet: &str) -> String {
    format!("{}/restart", self::vnet(vnet))
}

/// `PUT` [`LinkRequest`](crate::LinkRequest), `PATCH` [`LinkChange`](crate::LinkChange):
/// [`ChangeEvent`](crate::ChangeEvent)s. `link` is the link's name or one of its ends, `r1:eth0`.
pub fn link(vnet: &str, link: &str) -> String {
    format!("{VNETS}/{}/links/{}", segment(vnet), segment(link))
}

/// `GET`: the MAC addresses that a segment has learned, [`FdbEntry`](crate::FdbEntry). `DELETE`:
/// forget them. `link` is as in [`link`].
pub fn fdb(vnet: &str, link: &str) -> String {
    format!("{}/fdb", self::link(vnet, link))
}

/// `POST` [`ExecRequest`](crate::exec::ExecRequest): upgrade to [`crate::exec::UPGRADE`].
pub fn exec(vnet: &str, node: &str) -> String {
    format!("{}/exec", self::node(vnet, node))
}

/// `GET`: [`RouteLine`](crate::RouteLine)s.
pub fn routes(vnet: &str, node: &str) -> String {
    format!("{}/routes", self::node(vnet, node))
}

/// `GET`: [`FastpathFilters`](crate::FastpathFilters). `POST`
/// [`FastpathChange`](crate::FastpathChange): [`FastpathChanged`](crate::FastpathChanged).
pub fn fastpath_filters(vnet: &str, node: &str) -> String {
    format!("{}/fastpath/filters", self::node(vnet, node))
}

/// `GET`: [`FastpathCounters`](crate::FastpathCounters).
pub fn fastpath_counters(vnet: &str, node: &str) -> String {
    format!("{}/fastpath/counters", self::node(vnet, node))
}

/// `GET`: [`FastpathQueues`](crate::FastpathQueues).
pub fn fastpath_queues(vnet: &str, node: &str) -> String {
    format!("{}/fastpath/queues", self::node(vnet, node))
}

/// `POST` [`FastpathFrame`](crate::FastpathFrame): send it.
pub fn fastpath_frames(vnet: &str, node: &str) -> String {
    format!("{}/fastpath/frames", self::node(vnet, node))
}

/// `GET`: pcap until the client disconnects.
pub fn capture(vnet: &str, node: &str, port: &str) -> String {
    format!("{}/ports/{}/capture", self::node(vnet, node), segment(port))
}

/// `POST` [`TraceRequest`](crate::TraceRequest): [`Trace`](crate::Trace).
pub fn trace(vnet: &str, node: &str, port: &str) -> String {
    format!("{}/ports/{}/trace", self::node(vnet, node), segment(port))
}

/// `GET`: a log of the node itself, as text.
pub fn logs(process: crate::NodeProcess) -> String {
    match process {
        crate::NodeProcess::Daemon => "/v1/logs/daemon".into(),
        crate::NodeProcess::Mux => "/v1/logs/mux".into(),
    }
}

/// `GET`: a log of a process of a vnet's node, as text.
pub fn node_logs(vnet: &str, node: &str, process: crate::GuestProcess) -> String {
    format!("{}/logs/{process}", self::node(vnet, node))
}

fn node(vnet: &str, node: &str) -> String {
    format!("{VNETS}/{}/nodes/{}", segment(vnet), segment(node))
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
