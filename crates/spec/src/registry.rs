//! Names of images in registries, written and completed
//! as in docker: `frr` is `docker.io/library/frr:latest`.
//!
//! A parsed name has only characters of the grammar, so it is safe as a
//! path and as a program's argument. Source: OCI distribution specification
//! 1.1, "Pulling manifests"; github.com/distribution/reference.

use std::fmt;

/// Docker's registry for names without one.
const REGISTRY_DEFAULT: &str = "docker.io";

/// Maximum bytes of a name, as in docker.
pub const NAME_BYTES_MAX: usize = 255;

/// Bytes of a tag.
const TAG_BYTES_MAX: usize = 128;

/// The complete name of an image in a registry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImageName {
    /// Host, and port if given.
    pub registry: String,
    /// Repository in the registry.
    pub path: String,
    /// Tag. `latest` if neither tag nor digest is given.
    pub tag: Option<String>,
    /// Digest of its manifest, or of an index that contains it, if given.
    pub digest: Option<String>,
}

impl ImageName {
    /// Parses a name and adds docker's defaults.
    ///
    /// # Errors
    /// The problem, as text to follow the name.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > NAME_BYTES_MAX {
            return Err(format!("has {} bytes, {NAME_BYTES_MAX} at most", text.len()));
        }
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (text, None),
        };
        if digest.is_some_and(|digest| !is_digest(digest)) {
            return Err("has a digest that is not sha256: and 64 hexadecimal digits".into());
        }
        // A colon before the last slash belongs to a port.
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (rest, None),
        };
        let is_tag = |tag: &str| {
            let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
            tag.len() <= TAG_BYTES_MAX && tag.chars().all(good) && !tag.starts_with(['.', '-'])
        };
        if tag.is_some_and(|tag| tag.is_empty() || !is_tag(tag)) {
            return Err("has a tag with characters other than A-Z a-z 0-9 _ . -".into());
        }
        let (registry, path) = split(name)?;
        let tag = match (tag, digest) {
            (None, None) => Some("latest"),
            (tag, _) => tag,
        };
        let [tag, digest] = [tag, digest].map(|part| part.map(str::to_owned));
        Ok(Self { registry, path, tag, digest })
    }

    /// Registry and path.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.registry, self.path)
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.path)?;
        self.tag.iter().try_for_each(|tag| write!(f, ":{tag}"))?;
        self.digest.iter().try_for_each(|digest| write!(f, "@{digest}"))
    }
}

/// Splits a name without tag and digest into registry and path.
fn split(name: &str) -> Result<(String, String), String> {
    let first = name.split_once('/');
    let is_host = |host: &str| host.contains(['.', ':']) || host == "localhost";
    let (registry, path) = match first {
        Some((host, path)) if is_host(host) => (host, path.to_owned()),
        Some(_) => (REGISTRY_DEFAULT, name.to_owned()),
        None => (REGISTRY_DEFAULT, format!("library/{name}")),
    };
    check_host(registry)?;
    if !path.split('/').all(is_component) {
        return Err("needs parts of a-z 0-9, with . _ - inside, joined by /".into());
    }
    Ok((registry.to_owned(), path))
}

fn check_host(host: &str) -> Result<(), String> {
    let (name, port) = match host.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (host, None),
    };
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-');
    if name.is_empty() || !name.chars().all(good) || name.starts_with(['.', '-']) {
        return Err("has a registry that is not a host name in lower case".into());
    }
    if port.is_some_and(|port| port.starts_with('+') || port.parse::<u16>().is_err()) {
        return Err("has a registry whose port is not a number below 65536".into());
    }
    Ok(())
}

fn is_component(part: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let good = |c: char| inner(c) || matches!(c, '.' | '_' | '-');
    part.starts_with(inner)
        && part.ends_with(inner)
        && part.chars().all(good)
        && !part.contains("..")
}

/// True if a text is the digest of an image's manifest.
pub fn is_digest(text: &str) -> bool {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let hex = text.strip_prefix("sha256:");
    hex.is_some_and(|hex| hex.len() == 64 && hex.bytes().all(is_hex))
}

/// Checks a tenant's `registries` entry: a registry, optionally with the beginning of a path.
///
/// # Errors
/// The problem, as text to follow the entry.
pub fn check_prefix(prefix: &str) -> Result<(), String> {
    let (host, path) = match prefix.split_once('/') {
        Some((host, path)) => (host, Some(path)),
        None => (prefix, None),
    };
    if !host.contains(['.', ':']) && host != "localhost" {
        return Err("does not begin with a registry".into());
    }
    check_host(host)?;
    match path {
        Some(path) if !path.split('/').all(is_component) => {
            Err("needs parts of a-z 0-9, with . _ - inside, joined by /".into())
        }
        _ => Ok(()),
    }
}

/// Checks if a tenant with these `prefixes` may pull an image.
/// Returns the refusal and advice, or `None` if it may.
pub fn refused(name: &ImageName, prefixes: &[String]) -> Option<(String, String)> {
    let repository = name.repository();
    let below = |prefix: &String| {
        let rest = repository.strip_prefix(prefix.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if prefixes.iter().any(below) {
        return None;
    }
    let hint = match prefixes.is_empty() {
        true => "ask an operator for registries".to_owned(),
        false => format!("it may use {}", prefixes.join(", ")),
    };
    Some((format!("image {repository} is in no registry that the tenant may use"), hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn image_names_are_completed_like_docker() {
        let digest = format!("sha256:{}", "0".repeat(64));
        for (text, whole) in [
            ("frr", "docker.io/library/frr:latest".to_owned()),
            ("frrouting/frr:v10.1", "docker.io/frrouting/frr:v10.1".into()),
            ("registry.example/frr:10", "registry.example/frr:10".into()),
            ("localhost/a/b/c", "localhost/a/b/c:latest".into()),
            ("registry:5000/frr", "registry:5000/frr:latest".into()),
            (&format!("frr@{digest}"), format!("docker.io/library/frr@{digest}")),
            (&format!("127.0.0.1:5000/frr:1@{digest}"), format!("127.0.0.1:5000/frr:1@{digest}")),
        ] {
            assert_eq!(ImageName::parse(text).unwrap().to_string(), whole);
        }
        for text in [
            "",
            "/",
            "a/",
            "/a",
            "A",
            "a b",
            "a/../b",
            "--policy",
            "a:",
            "a:-b",
            "a@sha256:00",
            "a@",
            "r.e:70000/a",
            "r.e:/a",
            "-r.e/a",
            "a//b",
            "a\nb",
            "docker://a",
            "R.example/a",
            "a:b:c",
            "r.e:+5/a",
        ] {
            assert!(ImageName::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn pull_prefixes_match_whole_name_components() {
        let prefixes = ["registry.example".to_owned(), "docker.io/frrouting".to_owned()];
        let may = |text: &str| refused(&ImageName::parse(text).unwrap(), &prefixes).is_none();
        assert!(
            may("registry.example/a/b") && may("frrouting/frr") && may("docker.io/frrouting/frr")
        );
        assert!(!may("frr") && !may("frroutings/frr") && !may("registry.example:5000/a"));
        assert!(!may("registry.example.com/a"));
        assert!(check_prefix("r.example:5000/a/b").is_ok() && check_prefix("localhost").is_ok());
        for prefix in
            ["", "frrouting", "r.example/", "r.example/A", "https://r.example", "r.example/.."]
        {
            assert!(check_prefix(prefix).is_err(), "{prefix:?}");
        }
    }

    proptest! {
        #[test]
        fn printed_image_names_parse_again(text in "[a-zA-Z0-9./:@_-]{0,40}") {
            if let Ok(name) = ImageName::parse(&text) {
                prop_assert_eq!(&ImageName::parse(&name.to_string()).unwrap(), &name);
                prop_assert!(!name.to_string().starts_with('-'));
            }
        }
    }
}
