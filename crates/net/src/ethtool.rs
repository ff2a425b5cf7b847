//! Offloads and queues of interfaces, through the ethtool ioctl.

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};

use crate::error::{NetContext, Result};
use crate::ioctl::{ioctl, named_request};

/// `struct ethtool_value` of linux/ethtool.h.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// `struct ethtool_channels` of linux/ethtool.h.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    maxima: [u32; 4],
    receive_count: u32,
    send_count: u32,
    other_count: u32,
    combined_count: u32,
}

/// `struct ethtool_sset_info` of linux/ethtool.h, for a single set.
#[repr(C)]
struct Sets {
    command: u32,
    reserved: u32,
    mask: u64,
    count: u32,
}

/// `struct ethtool_gstrings` of linux/ethtool.h.
#[repr(C)]
struct Strings {
    command: u32,
    set: u32,
    count: u32,
    strings: [[u8; STRING_BYTES]; FEATURES_MAX],
}

/// `struct ethtool_sfeatures` of linux/ethtool.h. For each block of 32
/// features: a mask of those to set, and their values.
#[repr(C)]
struct Features {
    command: u32,
    blocks: u32,
    valid_and_wanted: [[u32; 2]; FEATURES_MAX / 32],
}

/// ETH_GSTRING_LEN of linux/ethtool.h.
const STRING_BYTES: usize = 32;

/// Linux 6.18 has 64.
const FEATURES_MAX: usize = 256;

/// ETH_SS_FEATURES of linux/ethtool.h.
const FEATURES: u32 = 4;

/// ETHTOOL_GSSET_INFO, ETHTOOL_GSTRINGS and ETHTOOL_SFEATURES of linux/ethtool.h.
const GET_SETS: u32 = 0x37;
const GET_STRINGS: u32 = 0x1b;
const SET_FEATURES: u32 = 0x3b;

/// Features that keep checksums and VLAN tags out of the frames that an interface sends, by the
/// kernel's names (net/ethtool/common.c).
const BESIDE_FRAMES: [&str; 4] =
    ["tx-checksum-ip-generic", "tx-checksum-sctp", "tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"];

/// ETHTOOL_GCHANNELS of linux/ethtool.h.
const GET_CHANNELS: u32 = 0x3c;

/// ETHTOOL_GLINK of linux/ethtool.h.
const GET_LINK: u32 = 0x0a;

/// ETHTOOL_SGRO of linux/ethtool.h.
const SET_AGGREGATION: u32 = 0x2c;

/// ETHTOOL_GFLAGS and ETHTOOL_SFLAGS of linux/ethtool.h.
const GET_FLAGS: u32 = 0x25;
const SET_FLAGS: u32 = 0x26;

/// ETH_FLAG_TXVLAN and ETH_FLAG_RXVLAN of linux/ethtool.h.
const SEND_TAGS: u32 = 1 << 7;
const RECEIVE_TAGS: u32 = 1 << 8;

/// Serializes changes of flags. The kernel sets all flags of a device at once, so changing one
/// needs the current value of the others.
static FLAGS: Mutex<()> = Mutex::new(());

/// ETHTOOL_STXCSUM, STSO, SGSO, SGRO of linux/ethtool.h.
const OFFLOADS: [u32; 4] = [0x17, 0x1f, 0x24, SET_AGGREGATION];

/// Turns transmit checksum, segmentation (TSO, GSO) and receive aggregation (GRO) off on an
/// interface of this network namespace. Then AF_XDP and packet sockets at the other end of a veth
/// read whole frames. Skips offloads that the device doesn't have.
pub fn offloads_off(device: &str) -> Result<()> {
    off(device, &OFFLOADS)
}

/// Turns receive aggregation (GRO) off on an interface of this network
/// namespace, so that frames are read as they arrived.
pub fn aggregation_off(device: &str) -> Result<()> {
    off(device, &[SET_AGGREGATION])
}

/// Keeps VLAN tags in the frames that an interface of this network namespace receives.
///
/// An XDP program and AF_XDP need this, since they never see a tag that the device has removed. For
/// a veth, the other end adds the tags; it is configured too, if it is in this namespace. The
/// setting stays when the interface is released. Tags of 802.1ad are unaffected: devices remove
/// them only if told to. Returns false if the device still removes tags.
pub fn tags_in_frames(device: &str, veth_peer: Option<&str>) -> Result<bool> {
    if let Some(peer) = veth_peer {
        flag_off(peer, SEND_TAGS)?;
    }
    flag_off(device, RECEIVE_TAGS)
}

/// Keeps checksums and VLAN tags in the frames that an interface of this
/// network namespace sends. An XDP program at the other end of a veth needs
/// this, since it would lose metadata outside the frame.
pub fn all_in_frames(device: &str) -> Result<()> {
    let about = |result: nix::Result<()>| result.on("set the offloads of", device);
    let mut sets = Sets { command: GET_SETS, reserved: 0, mask: 1 << FEATURES, count: 0 };
    about(ethtool(device, &mut sets)?)?;
    if sets.mask == 0 || sets.count as usize > FEATURES_MAX {
        return about(Err(Errno::EOPNOTSUPP));
    }
    let strings = [[0; STRING_BYTES]; FEATURES_MAX];
    let mut names = Strings { command: GET_STRINGS, set: FEATURES, count: sets.count, strings };
    about(ethtool(device, &mut names)?)?;
    let blocks = sets.count.div_ceil(32);
    let valid_and_wanted = [[0; 2]; FEATURES_MAX / 32];
    let mut features = Features { command: SET_FEATURES, blocks, valid_and_wanted };
    for (at, string) in names.strings.iter().enumerate().take(sets.count as usize) {
        let name = string.split(|byte| *byte == 0).next().unwrap_or_default();
        if BESIDE_FRAMES.iter().any(|beside| beside.as_bytes() == name) {
            features.valid_and_wanted[at / 32][0] |= 1 << (at % 32);
        }
    }
    about(ethtool(device, &mut features)?)
}

/// True if an interface of this network namespace has carrier.
pub(crate) fn has_link(device: &str) -> Result<bool> {
    let mut link = EthtoolValue { command: GET_LINK, data: 0 };
    ethtool(device, &mut link)?.on("read the carrier of", device)?;
    Ok(link.data != 0)
}

/// Turns a flag off. Returns true if it is off afterwards.
fn flag_off(device: &str, flag: u32) -> Result<bool> {
    let _flags = FLAGS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut flags = EthtoolValue { command: GET_FLAGS, data: 0 };
    match ethtool(device, &mut flags)? {
        Err(Errno::EOPNOTSUPP) => return Ok(true),
        other => other.on("read the offloads of", device)?,
    }
    if flags.data & flag == 0 {
        return Ok(true);
    }
    // Some drivers report success without changing the flag, others fail
    // although they changed it. So it is read again.
    let _ = ethtool(device, &mut EthtoolValue { command: SET_FLAGS, data: flags.data & !flag })?;
    ethtool(device, &mut flags)?.on("read the offloads of", device)?;
    Ok(flags.data & flag == 0)
}

fn off(device: &str, commands: &[u32]) -> Result<()> {
    for &command in commands {
        match ethtool(device, &mut EthtoolValue { command, data: 0 })? {
            Ok(()) | Err(Errno::EOPNOTSUPP) => {}
            Err(error) => return Err(error).on("turn offloads off on", device),
        }
    }
    Ok(())
}

/// Receive queues in use, if the driver says.
pub(crate) fn receive_queues(device: &str) -> Option<u32> {
    let mut channels = Channels { command: GET_CHANNELS, ..Channels::default() };
    ethtool(device, &mut channels).ok()?.ok()?;
    Some(channels.receive_count + channels.combined_count).filter(|count| *count > 0)
}

/// Runs one command, which begins `argument`.
fn ethtool<T>(device: &str, argument: &mut T) -> Result<nix::Result<()>> {
    let any = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
        .on("open a socket to configure", device)?;
    let mut request = named_request(device)?;
    request.ifr_ifru.ifru_data = (&raw mut *argument).cast();
    Ok(ioctl(&any.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request))
}
