//! Paths in nodes and on the machine.

/// Message about a path that is not [good](good_path).
pub(crate) const BAD_PATH: &str = "not an absolute path without ..";

/// True if an absolute path is below a directory.
pub(crate) fn is_below(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'))
}

/// True if the path is absolute, without `..`.
pub(crate) fn good_path(path: &str) -> bool {
    path.len() > 1
        && path.starts_with('/')
        && !path.contains('\0')
        && !path.split('/').any(|part| part == "..")
}
