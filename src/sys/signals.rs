//! Signals as readable events instead of handlers that interrupt.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use nix::sys::signal::{self, SigSet, SigmaskHow};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// What somebody wants of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP.
    Reload,
    /// SIGUSR1.
    Status,
}

/// The descriptor through which signals come.
pub struct Signals {
    fd: SignalFd,
}

impl Signals {
    /// Blocks the signals for this thread, and those that it starts, and takes them over.
    pub fn new() -> io::Result<Signals> {
        let mut set = SigSet::empty();
        for signal in [signal::SIGTERM, signal::SIGINT, signal::SIGHUP, signal::SIGUSR1] {
            set.add(signal);
        }
        signal::sigprocmask(SigmaskHow::SIG_BLOCK, Some(&set), None)?;
        Ok(Signals {
            fd: SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?,
        })
    }

    /// The next signal that has come, if any.
    pub fn take(&mut self) -> io::Result<Option<Signal>> {
        let Some(info) = self.fd.read_signal()? else { return Ok(None) };
        Ok(Some(match info.ssi_signo as i32 {
            libc::SIGHUP => Signal::Reload,
            libc::SIGUSR1 => Signal::Status,
            _ => Signal::Stop,
        }))
    }

    /// For registration with the poll.
    pub fn raw_fd(&self) -> RawFd {
        self.fd.as_fd().as_raw_fd()
    }
}
