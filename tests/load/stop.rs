//! When a server or a hold ends: standard input, a signal, or the clock.
//!
//! Standard input is watched only where it can be (a pipe, socket or terminal): a server started
//! with `/dev/null` runs until its signal or time. SIGTERM and SIGINT end it in order, so that the
//! report is still printed.

use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// The reasons to end, registered with one poll loop.
pub struct Stop {
    deadline: Option<Instant>,
    input_ended: bool,
    signalled: bool,
    // Held for its descriptor: a signal that arrives makes it readable.
    _signals: SignalFd,
}

impl Stop {
    pub fn watch(registry: &Registry, limit: Option<Duration>) -> io::Result<Self> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGTERM);
        mask.add(Signal::SIGINT);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        registry.register(&mut SourceFd(&signals.as_raw_fd()), SIGNAL, Interest::READABLE)?;

        let stdin = io::stdin().as_raw_fd();
        match registry.register(&mut SourceFd(&stdin), STDIN, Interest::READABLE) {
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied => return Err(error),
            // epoll refuses plain files and /dev/null: nothing to wait for there.
            Ok(()) | Err(_) => {}
        }
        let deadline = limit.map(|limit| Instant::now() + limit);
        Ok(Self { deadline, input_ended: false, signalled: false, _signals: signals })
    }

    /// Whether the event was one of these; the others belong to the caller.
    pub fn takes(&mut self, event: &Event) -> bool {
        match event.token() {
            SIGNAL => self.signalled = true,
            STDIN if event.is_read_closed() => self.input_ended = true,
            STDIN => self.input_ended |= matches!(io::stdin().read(&mut [0; 4096]), Ok(0)),
            _ => return false,
        }
        true
    }

    pub fn is_over(&self, now: Instant) -> bool {
        self.input_ended || self.is_late(now)
    }

    /// Over whatever standard input says: for work that is bounded by itself.
    pub fn is_late(&self, now: Instant) -> bool {
        self.signalled || self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Sets another time limit, counted from now.
    pub fn extend(&mut self, limit: Duration) {
        self.deadline = Some(Instant::now() + limit);
    }

    /// How long the next poll may sleep; `None` without a time limit.
    pub fn timeout(&self, now: Instant) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(now))
    }
}

const SIGNAL: Token = Token(usize::MAX - 1);
const STDIN: Token = Token(usize::MAX - 2);
