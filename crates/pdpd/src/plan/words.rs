//! Words of specs as those of the mux and of guests.

use pdp_container::{Bind, Owned, Root, Volume};
use pdp_proto::mux;
use pdp_spec::{Image, ImageSource, Limit};

use crate::images::owner_of;

/// The root of a vnet's guest.
pub(super) fn root(vnet: &str, image: &Image) -> Root {
    match image.source() {
        ImageSource::Host => Root::Host,
        ImageSource::Rootfs(path) => Root::Rootfs(path.into()),
        ImageSource::OciLayout(path, reference) => {
            Root::OciLayout { path: path.into(), reference: reference.map(Into::into) }
        }
        ImageSource::Archive(_, _, digest) | ImageSource::Pull(_, digest) => Root::Image {
            owner: owner_of(vnet).into(),
            // What a dry run would pull has none.
            digest: digest.unwrap_or_default().into(),
        },
    }
}

pub(super) fn owner(text: &str) -> Owned {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group.to_string())),
        None => (text, None),
    };
    Owned::Named { user: user.into(), group }
}

/// `None` where the check of specs would have refused it.
pub(super) fn bind(bind: &pdp_spec::Bind) -> Option<Bind> {
    let parts = bind.parts()?;
    Some(Bind {
        source: parts.source.into(),
        target: parts.target.into(),
        writable: !parts.read_only,
        wished: true,
    })
}

/// `None` where the check of specs would have refused it.
pub(super) fn volume(volume: &pdp_spec::Volume) -> Option<Volume> {
    let parts = volume.parts()?;
    Some(Volume { name: parts.source, target: parts.target.into(), bytes: parts.size.0 })
}

pub(super) fn rate(limit: Limit) -> mux::Rate {
    mux::Rate { bps: limit.rate.map_or(0, |rate| rate.0), pps: limit.pps.unwrap_or(0) }
}

pub(super) fn punt_filter(filter: &pdp_spec::PuntFilter) -> mux::PuntFilter {
    mux::PuntFilter {
        matches: filter
            .matches
            .iter()
            .map(|bytes| mux::Match {
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
