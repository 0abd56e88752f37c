//! A pipe as a place for bytes inside the kernel, and the two ways of splicing through it.
//!
//! Nothing blocks: a source without bytes and a full pipe both answer `WouldBlock`, and only a
//! caller who knows that the pipe is empty can tell which it was.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};
use nix::unistd::pipe2;

/// A pipe, both ends of it.
#[derive(Debug)]
pub struct Pipe {
    out_end: OwnedFd,
    in_end: OwnedFd,
}

impl Pipe {
    /// An empty pipe that holds `size` bytes, or fewer where the system's limit for a user's pipes
    /// is reached.
    pub fn new(size: usize) -> io::Result<Pipe> {
        let (out_end, in_end) = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC)?;
        // A smaller pipe does the same work with more calls.
        let _ = fcntl(&in_end, FcntlArg::F_SETPIPE_SZ(size as i32));
        Ok(Pipe { out_end, in_end })
    }

    /// The end that bytes go into.
    pub fn in_end(&self) -> &OwnedFd {
        &self.in_end
    }

    /// The end that bytes come out of.
    pub fn out_end(&self) -> &OwnedFd {
        &self.out_end
    }
}

/// Moves at most `most` bytes from a socket into the pipe; 0 is the end of the stream.
pub fn splice_in(source: impl AsFd, pipe: &Pipe, most: usize) -> io::Result<usize> {
    Ok(splice(source, None, &pipe.in_end, None, most, flags())?)
}

/// Moves at most `most` bytes from the pipe, which holds some, to a socket.
pub fn splice_out(pipe: &Pipe, sink: impl AsFd, most: usize) -> io::Result<usize> {
    Ok(splice(&pipe.out_end, None, sink, None, most, flags())?)
}

fn flags() -> SpliceFFlags {
    SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE
}
