//! Checks of one node, and of values that nodes and their data planes have in common.

use crate::command::Command;
use crate::file::File;
use crate::image::{Image, ImageSource};
use crate::limits::*;
use crate::path::{BAD_PATH, good_path, is_below};
use crate::registry::{ImageName, NAME_BYTES_MAX, is_digest};
use crate::units::{Bytes, Cores};

/// Advice about a path that is not [good](good_path).
const PATH_HINT: &str = "begin it with /";

/// Checks of one node. Paths are those of its keys.
pub struct NodeCheck<'a> {
    pub(crate) vnet: &'a str,
    pub(crate) node: &'a str,
    /// Takes a fault: the path from the document, message, and hint.
    pub(crate) report: &'a mut dyn FnMut(&[&str], String, String),
}

impl NodeCheck<'_> {
    /// Reports a fault.
    pub(crate) fn fault(
        &mut self,
        path: &[&str],
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        let path = [&["spec", "nodes", self.node], path].concat();
        (self.report)(&path, message.into(), hint.into());
    }

    pub(crate) fn too_many(&mut self, path: &[&str], count: usize, max: usize) {
        if count > max {
            let what = path.last().copied().unwrap_or("entries");
            self.fault(path, format!("{count} {what} exceed {max}"), "remove some");
        }
    }

    pub(crate) fn command(&mut self, path: &[&str], command: &Command) {
        let words = match command {
            Command::Words(words) => Some(words.clone()),
            Command::Line(line) => shlex::split(line),
        };
        let Some(words) = words else {
            self.fault(path, "the command's quotes do not close", "close them, or give a list");
            return;
        };
        if words.len() > WORDS_MAX {
            let message = format!("the command has {} words, {WORDS_MAX} at most", words.len());
            self.fault(path, message, "put it into a script");
        }
        if words.first().is_none_or(String::is_empty) {
            self.fault(path, "the command has no words", "name a program");
        }
        if words.iter().any(|word| word.contains('\0')) {
            self.fault(path, "the command has a zero byte", "remove it");
        }
    }

    pub(crate) fn image(&mut self, path: &[&str], image: &Image) {
        if let ImageSource::Pull(name, _) = image.source()
            && let Err(why) = ImageName::parse(name)
        {
            let hint = "write it as docker does, like registry.example/frr:10";
            self.fault(path, format!("image {name:?} {why}"), hint);
        }
        let Image::Form(image) = image else { return };
        let forms = usize::from(image.host.is_some())
            + usize::from(image.rootfs.is_some())
            + usize::from(image.oci_layout.is_some())
            + usize::from(image.archive.is_some())
            + usize::from(image.pull.is_some());
        let hint =
            "give one of host: true, rootfs: PATH, ociLayout: PATH, archive: PATH, pull: NAME";
        if forms > 1 {
            let message = "image has more than one of host, rootfs, ociLayout, archive and pull";
            self.fault(path, message, hint);
        }
        if image.host == Some(false) {
            self.fault(&[path, &["host"]].concat(), "host is false", hint);
        }
        if image.reference.is_some() && image.oci_layout.is_none() && image.archive.is_none() {
            let path = [path, &["reference"]].concat();
            let message = "reference without ociLayout or archive";
            self.fault(&path, message, "add ociLayout: PATH or archive: PATH");
        }
        if let Some(reference) = &image.reference
            && (reference.len() > NAME_BYTES_MAX || reference.contains(char::is_control))
        {
            let path = [path, &["reference"]].concat();
            let message =
                format!("reference has control characters, or more than {NAME_BYTES_MAX} bytes");
            self.fault(&path, message, "write it like frr:10");
        }
        if let Some(digest) = &image.digest {
            let path = [path, &["digest"]].concat();
            if image.archive.is_none() && image.pull.is_none() {
                self.fault(
                    &path,
                    "digest without archive or pull",
                    "remove it, or add one of them",
                );
            } else if !is_digest(digest) {
                let message = format!("digest {digest:?} is not sha256: and 64 hexadecimal digits");
                self.fault(&path, message, "remove it: pdpd fills it in when you apply");
            }
        }
        for (key, value) in [
            ("rootfs", &image.rootfs),
            ("ociLayout", &image.oci_layout),
            ("archive", &image.archive),
        ] {
            let Some(value) = value else { continue };
            if value.len() > IMAGE_PATH_BYTES_MAX || value.contains(char::is_control) {
                let message = format!(
                    "{key} has control characters, or {} bytes, {IMAGE_PATH_BYTES_MAX} at most",
                    value.len()
                );
                self.fault(&[path, &[key]].concat(), message, "choose a shorter path");
            } else if !good_path(value) {
                let (message, hint) = match value.as_str() {
                    "/" => (
                        format!("{key} is the machine's root directory"),
                        "use host: true for the machine's programs, or another directory",
                    ),
                    _ => (format!("{key} {value:?} is {BAD_PATH}"), PATH_HINT),
                };
                self.fault(&[path, &[key]].concat(), message, hint);
            }
        }
    }

    /// Checks a file, except for its place. Returns true if its path is valid.
    pub(crate) fn file(&mut self, at: &[&str], path: &str, file: &File) -> bool {
        let good = good_path(path) && !path.ends_with('/');
        if !good {
            self.fault(at, format!("{path:?} is {BAD_PATH}"), PATH_HINT);
        } else if is_below(path, "/run/pdp") || path == "/run/pdp" {
            let message = format!("PdP puts no files at {path}");
            self.fault(at, message, "/run/pdp belongs to PdP; use another path");
        }
        match (&file.content, &file.from) {
            (Some(text), _) if text.len() > FILE_BYTES_MAX => {
                let message =
                    format!("file {path} has {} bytes, {FILE_BYTES_MAX} at most", text.len());
                self.fault(at, message, "put it into the image instead");
            }
            (Some(_), None) => {}
            _ => {
                let message = format!("file {path} needs exactly one of content and from");
                self.fault(at, message, "give one of them");
            }
        }
        let octal = file.mode.bytes().all(|b| (b'0'..=b'7').contains(&b));
        if !octal || !(3..=4).contains(&file.mode.len()) {
            let message = format!("mode {:?} is not a file mode", file.mode);
            self.fault(&[at, &["mode"]].concat(), message, "write it like \"0640\"");
        }
        let is_name = |part: &str| {
            !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
        };
        let (user, group) = file.owner.split_once(':').unwrap_or((&file.owner, "root"));
        if !is_name(user) || !is_name(group) {
            let message = format!("owner {:?} is not a user or user and group", file.owner);
            self.fault(&[at, &["owner"]].concat(), message, "write it like frr:frr");
        }
        good
    }

    pub(crate) fn power(&mut self, path: &[&str], power: Cores) {
        if power.0 < POWER_MILLICORES_MIN {
            let key = path.last().copied().unwrap_or("power");
            let message = format!("{key} {power} is below {}", Cores(POWER_MILLICORES_MIN));
            self.fault(path, message, "ask for more");
        }
    }

    pub(crate) fn memory(&mut self, path: &[&str], memory: Bytes) {
        if !(MEMORY_BYTES_MIN..=MEMORY_BYTES_MAX).contains(&memory.0) {
            let (min, max) = (Bytes(MEMORY_BYTES_MIN), Bytes(MEMORY_BYTES_MAX));
            self.fault(path, format!("memory {memory} is not within {min} to {max}"), "");
        }
    }

    pub(crate) fn plane_power(&mut self, power: Option<Cores>) {
        if let Some(power) = power {
            self.power(&["dataPlane", "power"], power);
        }
    }

    pub(crate) fn fields(&mut self, path: &[&str], bytes: usize) {
        if bytes > FIELDS_BYTES_MAX {
            let message =
                format!("the fields have {bytes} bytes together, {FIELDS_BYTES_MAX} at most");
            self.fault(path, message, "leave some out");
        }
    }

    pub(crate) fn field(&mut self, path: &[&str], offset: u16, bytes: usize) {
        let end = usize::from(offset) + bytes;
        if end > FRAME_BYTES_MAX {
            let message = format!("the field ends at byte {end}, but a frame at {FRAME_BYTES_MAX}");
            self.fault(path, message, "lower the offset");
        }
    }
}
