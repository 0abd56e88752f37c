//! The process itself: its descriptor limit and its standard error.

use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// From this many bytes on the allocators of musl and glibc map memory for an allocation alone and
/// unmap it when it is freed (131,052 and 131,072 bytes).
pub const MAPPED_ALLOCATION: usize = 136 << 10;

/// Raises the soft limit on open descriptors to the hard one; returns the limit in force.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard.max(soft))
}

/// Standard error for log lines: a line that nobody has room for is dropped and counted, because a
/// log reader that has stopped reading must not stop the relaying.
#[derive(Default)]
pub struct StandardError {
    dropped: u64,
}

impl Write for StandardError {
    /// Takes one whole line; `Ok` also when it was dropped.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let stderr = io::stderr();
        // A pipe says that it is writable only when it has room for PIPE_BUF bytes (4,096), so a
        // line up to that length never blocks and never arrives in pieces.
        let cut = &line[..line.len().min(PIPE_BUF)];
        let mut fds = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
        let writable = poll(&mut fds, PollTimeout::ZERO) == Ok(1)
            && fds[0].revents().is_some_and(|events| events.contains(PollFlags::POLLOUT));
        if !writable {
            self.dropped += 1;
            return Ok(line.len());
        }
        if self.dropped > 0 {
            let note = format!("warn: {} log lines were dropped, nobody read them\n", self.dropped);
            self.dropped = 0;
            // The note may use up the room that was there; the next line then has to ask again.
            (&stderr).write_all(note.as_bytes())?;
            return self.write(line);
        }
        (&stderr).write_all(cut)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const PIPE_BUF: usize = 4096;
