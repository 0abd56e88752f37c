//! The process itself: its descriptor limit and its standard error.

use std::io::{self, Stderr, Write};
use std::os::fd::AsFd;
use std::thread;

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

/// Writes the lines that say what was opened to standard error, without waiting for whoever reads
/// them: more than fits into a pipe at once is left to a thread, which ends with the last line.
pub fn announce(lines: String) {
    if lines.len() <= PIPE_BUF && is_writable(&io::stderr()) {
        // Nobody may be listening any more; that is no reason not to relay.
        let _ = io::stderr().write_all(lines.as_bytes());
        return;
    }
    // Not through `Stderr`, whose lock the loop would have to wait for with its next log line.
    let write = move || {
        let mut rest = lines.as_bytes();
        while let Ok(count @ 1..) = nix::unistd::write(io::stderr(), rest) {
            rest = &rest[count..];
        }
    };
    let _ = thread::Builder::new().name("announce".into()).spawn(write);
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
        if !is_writable(&stderr) {
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
        match line.split_at_checked(PIPE_BUF - 1) {
            Some((start, rest)) if rest.len() > 1 => {
                (&stderr).write_all(&[start, b"\n"].concat())?;
            }
            _ => (&stderr).write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn is_writable(stderr: &Stderr) -> bool {
    let mut fds = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    poll(&mut fds, PollTimeout::ZERO) == Ok(1)
        && fds[0].revents().is_some_and(|events| events.contains(PollFlags::POLLOUT))
}

/// Bytes that a pipe takes as a whole or not at all.
const PIPE_BUF: usize = 4096;
