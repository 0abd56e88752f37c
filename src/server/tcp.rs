//! TCP in the loop: accepting, moving bytes, and what each event and timeout means for a pair. How
//! its target is reached is the business of [`super::dial`].
//!
//! A pair ends in one place here, [`Server::pair_over`], which is where it is counted.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};

use mio::Interest;
use mio::event::Event;
use mio::net::TcpStream;

use super::{HOUSEKEEPING, Server, Socket, Work, is_exhaustion};
use crate::sys::socket;
use crate::tcp::{Advance, End, Pair, Step};
use crate::token::{Role, Token};

impl Server {
    /// Accepts what has come, up to a burst; the rest has its turn after the others.
    pub(super) fn accept(&mut self, index: u32) {
        for _ in 0..ACCEPT_BURST {
            let listener = &self.listeners[index as usize];
            let Socket::Tcp(socket) = &listener.socket else { return };
            if self.options.max_connections.is_some_and(|most| self.open_pairs() >= most as usize) {
                self.pause_accepting(index);
                return;
            }
            match socket.accept() {
                Ok((stream, addr)) => self.begin_pair(index, stream, addr),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_exhaustion(&error) => {
                    self.tell_exhaustion(&error);
                    self.pause_accepting(index);
                    self.is_starved = true;
                    return;
                }
                // The client has gone meanwhile, or the network has a passing fault that concerns
                // this client alone.
                Err(error) => log::debug!("{}: accept: {error}", listener.name),
            }
        }
        let listener = &mut self.listeners[index as usize];
        if !listener.queued {
            listener.queued = true;
            self.run_queue.push_back(Work::Accept(index));
        }
    }

    /// Lets paused listeners go on.
    pub(super) fn resume_accepting(&mut self) {
        if self.options.max_connections.is_some_and(|most| self.open_pairs() >= most as usize) {
            return;
        }
        self.is_starved = false;
        for index in std::mem::take(&mut self.paused) {
            if self.register_listener(index).is_err() {
                self.paused.push(index);
            }
        }
    }

    /// Takes the listener off the poll: clients wait in its backlog until there is room, and nothing
    /// spins meanwhile.
    fn pause_accepting(&mut self, index: u32) {
        if let Socket::Tcp(socket) = &mut self.listeners[index as usize].socket
            && self.poll.registry().deregister(socket).is_ok()
        {
            self.paused.push(index);
        }
    }

    pub(super) fn open_pairs(&self) -> usize {
        self.pairs.len() - self.ended.len()
    }

    pub(super) fn tell_exhaustion(&mut self, error: &io::Error) {
        self.pool.spare_descriptors();
        if let Some(held) = self.out_of_descriptors.pass(self.now) {
            log::warn!(
                "out of descriptors, waiting for connections to end: {error}; \
                 raise the limit on open files (ulimit -n, or LimitNOFILE= of systemd){held}"
            );
        }
    }

    fn begin_pair(&mut self, listener: u32, mut stream: TcpStream, addr: SocketAddr) {
        let key = self.pairs.vacant_key() as u32;
        let generation = self.next_generation();
        let token = Token::new(Role::Client, key, generation);
        let counters = &mut self.routes[self.listeners[listener as usize].route as usize].counters;
        counters.accepted += 1;
        if let Err(error) = self.poll.registry().register(&mut stream, token.into(), interest()) {
            counters.reset += 1;
            socket::reset_on_close(&stream);
            self.tell_exhaustion(&error);
            return;
        }
        counters.open += 1;
        self.pairs.insert(Pair::new(stream, addr, listener, generation));
        self.dial(key, Step::NextTarget(0));
    }

    pub(super) fn client_event(&mut self, token: Token, event: &Event) {
        let Some(pair) = self.pairs.get_mut(token.key as usize) else { return };
        if !token.is_of(pair.generation) || pair.is_over() {
            return;
        }
        pair.client_event(event);
        if pair.is_open() {
            self.advance(token.key);
        } else if pair.client_failed() {
            self.end_pair(token.key, End::ClientLeft);
        } else if pair.client_ended_empty() {
            self.client_may_have_left(token.key);
        }
    }

    pub(super) fn target_event(&mut self, token: Token, attempt: u8, event: &Event) {
        let key = token.key;
        let Some(pair) = self.pairs.get_mut(key as usize) else { return };
        if !token.is_of(pair.generation) || pair.is_over() {
            return;
        }
        if pair.is_open() {
            pair.target_event(attempt, event);
            self.advance(key);
            return;
        }
        let Some(dial) = pair.dial() else { return };
        let failed = event.is_error() || event.is_write_closed();
        if failed || (event.is_writable() && !dial.has_reached_target(attempt)) {
            if dial.attempt_failed(attempt) {
                let step = dial.next_step();
                self.dial(key, step);
            }
        } else if event.is_writable() && pair.connected(attempt) {
            pair.target_event(attempt, event);
            self.shared.deadlines.set(key, self.settling, self.now);
            if self.touch(key) {
                // It waits in another list, which says nothing of its age.
                self.settle(key);
            }
            self.advance(key);
        }
    }

    pub(super) fn resume_pair(&mut self, key: u32, generation: u32) {
        let Some(pair) = self.pairs.get_mut(key as usize) else { return };
        if pair.generation == generation && !pair.is_over() {
            pair.queued = false;
            self.advance(key);
        }
    }

    /// Gives the target's socket its options, now that the connection turns out to last.
    pub(super) fn settle(&mut self, key: u32) {
        let pair = &mut self.pairs[key as usize];
        let route = &self.routes[self.listeners[pair.listener as usize].route as usize];
        pair.settle(&route.tcp);
    }

    fn advance(&mut self, key: u32) {
        if self.pairs[key as usize].needs_to_settle() {
            self.settle(key);
        }
        let pair = &mut self.pairs[key as usize];
        match pair.advance(&mut self.pool) {
            Advance::Waits { moved: false } => {}
            Advance::Waits { moved: true } => {
                self.touch(key);
            }
            Advance::Again => {
                if !pair.queued {
                    pair.queued = true;
                    let generation = pair.generation;
                    self.run_queue.push_back(Work::Pair { key, generation });
                }
                self.touch(key);
            }
            Advance::Over(end) => self.pair_over(key, end),
        }
    }

    /// Starts the wait for the next byte anew; false when there is no limit to it.
    fn touch(&mut self, key: u32) -> bool {
        let pair = &self.pairs[key as usize];
        let route = &self.routes[self.listeners[pair.listener as usize].route as usize];
        let list = if pair.is_half_closed() { Some(route.half_close) } else { route.idle };
        if let Some(list) = list {
            self.shared.deadlines.set(key, list, self.now);
        }
        list.is_some()
    }

    /// The wait of a pair is over.
    pub(super) fn pair_waited(&mut self, key: u32) {
        if self.pairs[key as usize].is_open() {
            self.end_pair(key, End::TimedOut);
        } else {
            self.dial_waited(key);
        }
    }

    /// Ends a pair from outside.
    pub(super) fn end_pair(&mut self, key: u32, end: End) {
        let pair = &mut self.pairs[key as usize];
        if !pair.is_over() {
            pair.end(end, &mut self.pool);
            self.pair_over(key, end);
        }
    }

    fn pair_over(&mut self, key: u32, end: End) {
        self.shared.deadlines.clear(key);
        self.ended.push(key);
        let pair = &self.pairs[key as usize];
        let listener = &self.listeners[pair.listener as usize];
        let (up, down) = pair.bytes();
        let counters = &mut self.routes[listener.route as usize].counters;
        counters.open -= 1;
        counters.tcp_bytes[0] += up;
        counters.tcp_bytes[1] += down;
        match end {
            End::Finished => counters.finished += 1,
            End::Reset | End::Stopped => counters.reset += 1,
            End::Unreachable => counters.unreachable += 1,
            End::ClientLeft => counters.client_left += 1,
            End::TimedOut => counters.timed_out += 1,
        }
        log::debug!(
            "{}: {} {}, {up} bytes up, {down} down",
            listener.name,
            plain(pair.client_addr),
            end.name()
        );
    }

    /// Frees the slots of pairs that are over, now that no event of theirs can be left.
    pub(super) fn free_ended(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        for key in self.ended.drain(..) {
            self.pairs.remove(key as usize);
        }
        self.housekeeping.get_or_insert(self.now.after(HOUSEKEEPING));
        if !self.paused.is_empty() {
            self.resume_accepting();
        }
    }
}

/// An IPv4 client of a listener for both families as what it is.
fn plain(addr: SocketAddr) -> SocketAddr {
    match addr.ip().to_canonical() {
        IpAddr::V4(ip) => (ip, addr.port()).into(),
        IpAddr::V6(_) => addr,
    }
}

pub(super) fn interest() -> Interest {
    // Priority is out-of-band data, which a read must know of.
    Interest::READABLE | Interest::WRITABLE | Interest::PRIORITY
}

/// Clients that one listener may have accepted in a turn.
const ACCEPT_BURST: usize = 16;
