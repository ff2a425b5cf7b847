//! A node's access to the machine's network, beside its vnet.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use pdp_proto::management as helper;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::{BadValue, KeySet, PublishedPort};

/// Access to the machine's network, outside the virtual network and its routing tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Management {
    /// Interface `mgmt0` to the machine's IPv4 network, with NAT and DNS.
    pub outside: bool,
    /// Machine ports to forward to the node's loopback address; at most 64.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PublishedPort>,
}

impl Default for Management {
    fn default() -> Self {
        Self { outside: true, ports: Vec::new() }
    }
}

/// Access of a tenant's nodes to the machine's network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ManagementGrant {
    /// Allow `management.outside`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub outside: bool,
    /// Machine ports that its nodes may publish, from 1024.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<KeySet>,
    /// Machine addresses for these ports. Default: 127.0.0.1.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
}

impl ManagementGrant {
    /// Addresses at which its nodes may publish ports.
    pub(crate) fn at(&self) -> Vec<IpAddr> {
        match self.addresses.is_empty() {
            true => vec![Ipv4Addr::LOCALHOST.into()],
            false => self.addresses.clone(),
        }
    }
}

const PORT_HINT: &str =
    "write [ADDRESS:]PORT_OF_MACHINE:PORT_OF_NODE[/udp], like 8080:80 or 0.0.0.0:5353:53/udp";

impl PublishedPort {
    /// True if both can't listen at the same time: same port and
    /// protocol, at the same address or at a wildcard address.
    pub(crate) fn conflicts_with(&self, other: &Self) -> bool {
        let (one, two) = (self.0.listen, other.0.listen);
        let any = one.ip().is_unspecified() || two.ip().is_unspecified();
        one.port() == two.port() && self.0.udp == other.0.udp && (any || one.ip() == two.ip())
    }
}

impl FromStr for PublishedPort {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let bad = |problem: &str| BadValue {
            value: text.into(),
            problem: problem.into(),
            hint: PORT_HINT,
        };
        let is_none = || bad("is not a published port");
        let (rest, udp) = match text.rsplit_once('/') {
            Some((rest, "udp")) => (rest, true),
            Some((rest, "tcp")) => (rest, false),
            Some(_) => return Err(bad("is neither tcp nor udp")),
            None => (text, false),
        };
        let (rest, inside) = rest.rsplit_once(':').ok_or_else(is_none)?;
        let (address, port) = match rest.rsplit_once(':') {
            Some((address, port)) => {
                let inner = address.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
                let address: IpAddr =
                    inner.unwrap_or(address).parse().map_err(|_| bad("has an invalid address"))?;
                if address.is_ipv6() != inner.is_some() {
                    return Err(bad("needs brackets around IPv6 addresses, and only there"));
                }
                (address, port)
            }
            None => (Ipv4Addr::LOCALHOST.into(), rest),
        };
        if address.is_multicast() {
            return Err(bad("has a multicast address"));
        }
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            let port = plain.then(|| digits.parse::<u16>().ok()).flatten().filter(|port| *port > 0);
            port.ok_or_else(|| bad("has a port outside 1 to 65535"))
        };
        let listen = SocketAddr::new(address, number(port)?);
        Ok(Self(helper::ManagementPort { listen, port: number(inside)?, udp }))
    }
}

impl fmt::Display for PublishedPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let helper::ManagementPort { listen, port, udp } = self.0;
        if listen.ip() != IpAddr::V4(Ipv4Addr::LOCALHOST) {
            write!(f, "{listen}:{port}")?;
        } else {
            write!(f, "{}:{port}", listen.port())?;
        }
        if udp { f.write_str("/udp") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_ports_parse_and_read_back() {
        for (text, listen, port, udp) in [
            ("8080:80", "127.0.0.1:8080", 80, false),
            ("8080:80/tcp", "127.0.0.1:8080", 80, false),
            ("5353:53/udp", "127.0.0.1:5353", 53, true),
            ("0.0.0.0:8080:80", "0.0.0.0:8080", 80, false),
            ("[2001:db8::1]:8080:80", "[2001:db8::1]:8080", 80, false),
        ] {
            let read: PublishedPort = text.parse().unwrap();
            assert_eq!(
                read.0,
                helper::ManagementPort { listen: listen.parse().unwrap(), port, udp }
            );
            assert_eq!(read.to_string().parse::<PublishedPort>().unwrap(), read);
        }
        for text in [
            "",
            "80",
            ":80",
            "80:",
            "8080:80/sctp",
            "8080:80:",
            "0:80",
            "80:0",
            "65536:80",
            "+80:80",
            "::1:80:80",
            "[127.0.0.1]:80:80",
            "host:80:80",
            "224.0.0.1:80:80",
            "80-81:80",
            "1:2:3:4",
        ] {
            assert!(text.parse::<PublishedPort>().is_err(), "{text}");
        }
    }

    #[test]
    fn wildcard_addresses_conflict_with_every_address() {
        let meets = |one: &str, two: &str| {
            let (one, two): (PublishedPort, PublishedPort) =
                (one.parse().unwrap(), two.parse().unwrap());
            assert_eq!(one.conflicts_with(&two), two.conflicts_with(&one));
            one.conflicts_with(&two)
        };
        assert!(meets("80:80", "80:81"));
        assert!(meets("80:80", "0.0.0.0:80:81"));
        assert!(meets("[::]:80:80", "0.0.0.0:80:81"));
        assert!(!meets("80:80", "80:80/udp"));
        assert!(!meets("80:80", "192.0.2.1:80:80"));
        assert!(!meets("80:80", "81:80"));
    }
}
