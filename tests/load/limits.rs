//! The process limits that a load tool needs to be out of the way.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the descriptor limit to the hard limit, and says so early when `wanted` doesn't fit.
pub fn raise_descriptors(wanted: usize) -> io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    if (hard as usize) < wanted {
        return Err(io::Error::other(format!("{wanted} descriptors wanted, the limit is {hard}")));
    }
    Ok(())
}
