//! One netlink conversation in the calling thread's network namespace.

use std::future::Future;
use std::io;

use rtnetlink::Handle;

use crate::error::{Context, Error, Result};
use crate::netns::in_thread;

/// Runs `work` with a netlink handle to its end, in a thread of its own: callers may be inside a
/// runtime, which can't have another one in it.
pub(crate) fn converse<T: Send, F: Future<Output = Result<T>>>(
    work: impl FnOnce(Handle) -> F + Send,
) -> Result<T> {
    in_thread(|| converse_here(work))
}

fn converse_here<T, F: Future<Output = Result<T>>>(work: impl FnOnce(Handle) -> F) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .on("start", "a netlink conversation")?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().on("open", "rtnetlink")?;
        let connection = tokio::spawn(connection);
        let result = work(handle).await;
        connection.abort();
        result
    })
}

/// Says what was tried with which object when the kernel refuses.
pub(crate) fn refused(
    what: &'static str,
    object: impl ToString,
) -> impl FnOnce(rtnetlink::Error) -> Error {
    let object = object.to_string();
    move |error| {
        let source = match &error {
            rtnetlink::Error::NetlinkError(message) => message.to_io(),
            _ => io::Error::other(error.to_string()),
        };
        Error::Io { what, object, source }
    }
}
