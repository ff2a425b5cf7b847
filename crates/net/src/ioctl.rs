//! Calls of ioctls about interfaces.

use std::os::fd::AsRawFd;

use crate::error::{Error, Result};

/// Returns a request about the interface of this name.
pub(crate) fn named_request(name: &str) -> Result<libc::ifreq> {
    if name.len() >= libc::IFNAMSIZ {
        return Err(Error::Invalid {
            object: format!("interface {name}"),
            text: format!("{} bytes, {} at most", name.len(), libc::IFNAMSIZ - 1),
        });
    }
    // SAFETY: an all-zero `ifreq` is valid: a character array and a union of integers and a
    // pointer that may be null.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// Calls an ioctl whose argument the kernel reads and may write.
pub(crate) fn ioctl<T>(
    fd: &impl AsRawFd,
    request: libc::Ioctl,
    argument: *mut T,
) -> nix::Result<()> {
    // SAFETY: callers give the address of a live, exclusively borrowed value of the type that the
    // request takes; the kernel keeps no reference to it.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) };
    nix::errno::Errno::result(result).map(drop)
}
