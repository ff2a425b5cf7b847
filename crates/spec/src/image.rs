//! Root file systems of nodes and programs, as written in specs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Root file system: a registry image, or a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Image {
    /// Short for `pull`.
    Reference(String),
    /// A source with its options.
    Form(ImageForm),
}

impl Default for Image {
    fn default() -> Self {
        Self::Form(ImageForm::default())
    }
}

/// A root file system.
///
/// Set exactly one of `host`, `rootfs`, `ociLayout`, `archive` and `pull`. A text is short for
/// `pull`. Default: `host`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageForm {
    /// `true`: the machine's `/usr`, read-only, with a generated `/etc`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<bool>,
    /// Absolute path of a root directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<String>,
    /// Absolute path of an OCI image layout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oci_layout: Option<String>,
    /// Absolute path of an archive from `docker save` or `podman save`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive: Option<String>,
    /// Registry image: `frrouting/frr:10`, `registry.example:5000/lab/frr@sha256:…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<String>,
    /// Image in the layout (`org.opencontainers.image.ref.name`)
    /// or archive (tag). Default: the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Manifest digest, with `archive` or `pull`. Default: `apply` sets and keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// An [`Image`] as one of its forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageSource<'a> {
    /// The machine's own programs.
    Host,
    /// Path of a directory.
    Rootfs(&'a str),
    /// Path of an OCI image layout, and the image's reference.
    OciLayout(&'a str, Option<&'a str>),
    /// Path of an archive, the image's reference, and the digest if known.
    Archive(&'a str, Option<&'a str>, Option<&'a str>),
    /// Name of a registry image, and the digest if known.
    Pull(&'a str, Option<&'a str>),
}

impl ImageSource<'_> {
    /// Digest of an image that the daemon stores. Empty if `apply` has yet to determine it.
    pub fn stored_digest(&self) -> Option<&str> {
        match *self {
            Self::Host | Self::Rootfs(_) | Self::OciLayout(..) => None,
            Self::Archive(_, _, digest) | Self::Pull(_, digest) => Some(digest.unwrap_or_default()),
        }
    }
}

impl Image {
    /// Returns the form that is set; the machine's own programs if none is.
    pub fn source(&self) -> ImageSource<'_> {
        let form = match self {
            Self::Reference(name) => return ImageSource::Pull(name, None),
            Self::Form(form) => form,
        };
        let (reference, digest) = (form.reference.as_deref(), form.digest.as_deref());
        match (&form.rootfs, &form.oci_layout, &form.archive, &form.pull) {
            (Some(path), ..) => ImageSource::Rootfs(path),
            (None, Some(path), ..) => ImageSource::OciLayout(path, reference),
            (None, None, Some(path), _) => ImageSource::Archive(path, reference, digest),
            (None, None, None, Some(name)) => ImageSource::Pull(name, digest),
            (None, None, None, None) => ImageSource::Host,
        }
    }

    /// Pins an image from an archive or registry to the daemon's image with this digest.
    pub fn pin(&mut self, digest: String) {
        if let Self::Reference(name) = self {
            *self = Self::Form(ImageForm { pull: Some(name.clone()), ..ImageForm::default() });
        }
        if let Self::Form(form) = self {
            form.digest = Some(digest);
        }
    }
}
