//! Translates terms of specs into those of the mux and of guests.

use pdp_container::{BindMount, FileOwner, RootFilesystem, VolumeMount};
use pdp_proto::mux;
use pdp_spec::{FrameLimit, Image, ImageSource};

use super::allocations::image_owner_of;

/// Returns the root file system of a vnet's guest.
pub(super) fn root(vnet: &str, image: &Image) -> RootFilesystem {
    match image.source() {
        ImageSource::Host => RootFilesystem::Host,
        ImageSource::Rootfs(path) => RootFilesystem::Rootfs(path.into()),
        ImageSource::OciLayout(path, reference) => {
            RootFilesystem::OciLayout { path: path.into(), reference: reference.map(Into::into) }
        }
        ImageSource::Archive(_, _, digest) | ImageSource::Pull(_, digest) => {
            RootFilesystem::Image {
                owner: image_owner_of(vnet).into(),
                // An image that a dry run would pull has no digest.
                digest: digest.unwrap_or_default().into(),
            }
        }
    }
}

pub(super) fn owner(text: &str) -> FileOwner {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group.to_string())),
        None => (text, None),
    };
    FileOwner::Named { user: user.into(), group }
}

/// Returns `None` for a bind that the check of specs refuses.
pub(super) fn bind(bind: &pdp_spec::Bind) -> Option<BindMount> {
    let parts = bind.parts()?;
    Some(BindMount {
        source: parts.source.into(),
        target: parts.target.into(),
        writable: !parts.read_only,
        wished: true,
    })
}

/// Returns `None` for a volume that the check of specs refuses.
pub(super) fn volume(volume: &pdp_spec::Volume) -> Option<VolumeMount> {
    let parts = volume.parts()?;
    Some(VolumeMount { name: parts.source, target: parts.target.into(), bytes: parts.size.0 })
}

pub(super) fn rate(limit: FrameLimit) -> mux::Rate {
    mux::Rate { bps: limit.rate.map_or(0, |rate| rate.0), pps: limit.pps.unwrap_or(0) }
}

pub(super) fn punt_filter(filter: &pdp_spec::PuntFilter) -> mux::PuntFilterConfig {
    mux::PuntFilterConfig {
        matches: filter
            .matches
            .iter()
            .map(|bytes| mux::BytePattern {
                offset: bytes.offset,
                value: bytes.value.0.clone(),
                mask: match &bytes.mask {
                    Some(mask) => mask.0.clone(),
                    None => vec![0xff; bytes.value.0.len()],
                },
            })
            .collect(),
        class: match filter.class {
            pdp_spec::PuntClass::Local => 0,
            pdp_spec::PuntClass::Neighbour => 1,
            pdp_spec::PuntClass::Exception => 2,
            pdp_spec::PuntClass::Hook => 3,
            pdp_spec::PuntClass::Control => 4,
        },
    }
}
