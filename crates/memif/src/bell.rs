//! Doorbells: eventfds by which one side wakes the other.
//!
//! The client of a connection makes both, so a hostile one can fill the counter and make the
//! descriptor blocking at any moment; write(2) would then hang the server. The server therefore
//! rings by a completed asynchronous request (io_submit(2) with `IOCB_FLAG_RESFD`), which adds to
//! the counter without ever waiting, and refuses descriptors that are not eventfds.
//! Costs 0.46 µs against 0.17 µs of a write, and only when the peer sleeps.

use std::cell::OnceCell;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::io::ReadWriteFlags;

/// From linux/aio_abi.h, which libc lacks.
const IOCB_CMD_POLL: u16 = 5;
const IOCB_FLAG_RESFD: u32 = 1;

/// Completions that the kernel keeps until they are reaped.
const EVENTS: usize = 64;

/// A new doorbell.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Rings a doorbell of our own.
pub(crate) fn ring_own(bell: BorrowedFd<'_>) {
    // Fails only where the counter is full, and then the peer is awake.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// Empties a doorbell, whoever made it, without blocking.
pub(crate) fn drain(bell: BorrowedFd<'_>) {
    let mut count = [0; 8];
    // An offset of -1 stands for the file position. Nothing to read is as good as read.
    let _ = rustix::io::preadv2(
        bell,
        &mut [IoSliceMut::new(&mut count)],
        u64::MAX,
        ReadWriteFlags::NOWAIT,
    );
}

/// Rings a doorbell that a peer made. Never blocks; fails if it is not an eventfd, or if the kernel
/// has no asynchronous I/O (`CONFIG_AIO`).
pub(crate) fn ring_of_peer(bell: BorrowedFd<'_>) -> io::Result<()> {
    thread_local!(static RINGER: OnceCell<Ringer> = const { OnceCell::new() });
    RINGER.with(|cell| {
        if cell.get().is_none() {
            // Nobody else sets it: it is this thread's.
            let _ = cell.set(Ringer::new()?);
        }
        cell.get().map_or_else(|| Err(io::ErrorKind::Other.into()), |ringer| ringer.ring(bell))
    })
}

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct Event {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// A context of asynchronous requests, one a thread.
#[derive(Debug)]
struct Ringer {
    context: libc::c_ulong,
    /// Always writable, so that polling it completes at once.
    ready: OwnedFd,
}

impl Ringer {
    fn new() -> io::Result<Self> {
        let ready = eventfd()?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: io_setup writes a context to the word given, which is zero as it has to be.
        let result =
            unsafe { libc::syscall(libc::SYS_io_setup, EVENTS as libc::c_uint, &mut context) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { context, ready })
    }

    fn ring(&self, bell: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: iocb is plain integers, for which zero is a value.
        let mut request: libc::iocb = unsafe { std::mem::zeroed() };
        request.aio_lio_opcode = IOCB_CMD_POLL;
        request.aio_fildes = self.ready.as_raw_fd() as u32;
        request.aio_buf = libc::POLLOUT as u64;
        request.aio_flags = IOCB_FLAG_RESFD;
        request.aio_resfd = bell.as_raw_fd() as u32;
        loop {
            let mut requests = [&mut request as *mut libc::iocb];
            // SAFETY: the context is ours, one request is given and valid during the call; a poll
            // of what is ready completes inside it and keeps no pointer.
            let submitted = unsafe {
                libc::syscall(libc::SYS_io_submit, self.context, 1, requests.as_mut_ptr())
            };
            if submitted == 1 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) if self.reap() > 0 => {}
                _ => return Err(error),
            }
        }
    }

    /// Takes completions out of the way; returns how many.
    fn reap(&self) -> usize {
        let mut events = [Event { data: 0, object: 0, result: 0, result2: 0 }; EVENTS];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: room for EVENTS events is given; a zero time-out does not wait.
        let count = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0 as libc::c_long,
                EVENTS as libc::c_long,
                events.as_mut_ptr(),
                &now,
            )
        };
        usize::try_from(count).unwrap_or(0)
    }
}

impl Drop for Ringer {
    fn drop(&mut self) {
        // SAFETY: the context is ours and not used afterwards.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn count(bell: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(bell, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn rings_add_up_beyond_what_the_kernel_keeps() {
        let bell = eventfd().unwrap();
        for _ in 0..10_000 {
            ring_of_peer(bell.as_fd()).unwrap();
        }
        assert_eq!(count(&bell), 10_000);
    }

    #[test]
    fn a_full_blocking_counter_does_not_hang() {
        let bell = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ring_of_peer(bell.as_fd()).unwrap();
        ring_of_peer(bell.as_fd()).unwrap();
        drain(bell.as_fd());
        drain(bell.as_fd()); // empty and blocking
    }

    #[test]
    fn other_descriptors_are_no_bells() {
        let (a, _b) = rustix::pipe::pipe().unwrap();
        assert!(ring_of_peer(a.as_fd()).is_err());
        assert!(ring_of_peer(tempfile::tempfile().unwrap().as_fd()).is_err());
        assert!(ring_of_peer(eventfd().unwrap().as_fd()).is_ok());
    }
}
