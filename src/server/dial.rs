//! Reaching a target for a pair: its addresses, the attempts and their waits, names that have no
//! address yet.
//!
//! A pair that is being dialled always has a deadline, so none can be forgotten here.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::route::Place;
use super::{Server, is_exhaustion};
use crate::deadline::List;
use crate::resolve::{NameId, News};
use crate::sys::socket;
use crate::tcp::{End, Step};
use crate::token::{Role, Token};

impl Server {
    /// Goes on with reaching a target until an attempt runs, a name is waited for, or nothing is
    /// left to try.
    pub(super) fn dial(&mut self, key: u32, mut step: Step) {
        let index = self.pairs[key as usize].listener;
        let route = self.listeners[index as usize].route as usize;
        loop {
            step = match step {
                Step::Wait => {
                    // The wait of the attempts that run may have been the one that is over.
                    let list = self.last_wait(key, route);
                    self.shared.deadlines.set(key, list, self.now);
                    return;
                }
                Step::Try(addr) => match self.try_address(key, route, addr) {
                    Ok(()) => return,
                    Err(error) if is_exhaustion(&error) => {
                        self.tell_exhaustion(&error);
                        let Some(dial) = self.pairs[key as usize].dial() else { return };
                        if !dial.is_running() {
                            self.end_pair(key, End::Unreachable);
                            return;
                        }
                        Step::Wait
                    }
                    Err(error) => {
                        let Some(dial) = self.pairs[key as usize].dial() else { return };
                        dial.failed(addr, error);
                        dial.next_step()
                    }
                },
                Step::NextTarget(target) if self.await_fresh_addresses(key, route, target) => {
                    return;
                }
                Step::NextTarget(target) if target >= self.routes[route].targets.len() => {
                    self.tell_unreachable(key);
                    self.end_pair(key, End::Unreachable);
                    return;
                }
                Step::NextTarget(target) => match self.begin_target(key, index, target) {
                    Some(step) => step,
                    None => return,
                },
            };
        }
    }

    /// The target's addresses become those of the dial; `None` when its name has none yet, which the
    /// pair then waits for.
    fn begin_target(&mut self, key: u32, listener: u32, target: usize) -> Option<Step> {
        let addrs = self.addresses(listener, target);
        let dial = self.pairs[key as usize].dial()?;
        match addrs {
            Ok(addrs) => {
                dial.begin_target(target, addrs);
                Some(dial.next_step())
            }
            Err(name) => {
                dial.begin_target(target, Vec::new());
                self.wait_for_name(key, name);
                None
            }
        }
    }

    /// When every address of the target before `next` has failed while newer ones are being looked
    /// up, those get their try first, once. True when they are waited for.
    fn await_fresh_addresses(&mut self, key: u32, route: usize, next: usize) -> bool {
        let Some(target) = next.checked_sub(1) else { return false };
        let Place::Named(name) = self.routes[route].targets[target].place else { return false };
        let Some(dial) = self.pairs[key as usize].dial() else { return false };
        if dial.waited_for == Some(target) || !self.shared.names.is_asking(name) {
            return false;
        }
        dial.begin_target(target, Vec::new());
        self.wait_for_name(key, name);
        true
    }

    /// Opens a socket towards `addr` and gives it its time.
    fn try_address(&mut self, key: u32, route: usize, addr: SocketAddr) -> io::Result<()> {
        let pair = &mut self.pairs[key as usize];
        let generation = pair.generation;
        let Some(dial) = pair.dial() else { return Ok(()) };
        let mut stream = socket::tcp_connect(addr, &self.routes[route].tcp)?;
        let number = dial.number();
        let token = Token::new(Role::Target(number), key, generation);
        self.poll.registry().register(&mut stream, token.into(), super::tcp::interest())?;
        dial.started(number, addr, stream);
        let list = match dial.has_untried() {
            true => self.routes[route].head_start,
            false => self.last_wait(key, route),
        };
        self.shared.deadlines.set(key, list, self.now);
        Ok(())
    }

    /// How long the attempts of a dial that has no further address may take.
    fn last_wait(&mut self, key: u32, route: usize) -> List {
        let targets = self.routes[route].targets.len();
        match self.pairs[key as usize].dial() {
            Some(dial) if dial.client_may_have_left && dial.target() + 1 >= targets => self.leaving,
            _ => self.routes[route].connect,
        }
    }

    /// The addresses of a target as seen from a listener, or the name that has none yet.
    fn addresses(&mut self, listener: u32, target: usize) -> Result<Vec<SocketAddr>, NameId> {
        let listener = &self.listeners[listener as usize];
        let route = &self.routes[listener.route as usize];
        let target = &route.targets[target];
        let port = target.port(listener.offset, listener.port);
        let with_port = |mut addr: SocketAddr| {
            addr.set_port(port);
            addr
        };
        match &target.place {
            Place::At(addr) => Ok(vec![with_port(*addr)]),
            // The interface may have come or gone since the last time.
            Place::OnInterface(ip, name) => {
                let index = socket::interface_index(name);
                Ok(index.map(|index| with_port(socket::scoped(*ip, index))).into_iter().collect())
            }
            Place::Named(name) => {
                let (addrs, _) = self.shared.names.addrs(*name, route.refresh, self.now);
                if addrs.is_empty() {
                    return Err(*name);
                }
                Ok(addrs.iter().copied().map(with_port).collect())
            }
        }
    }

    fn wait_for_name(&mut self, key: u32, name: NameId) {
        let pair = &mut self.pairs[key as usize];
        let route = self.listeners[pair.listener as usize].route;
        self.waiting.push((name, key, pair.generation));
        if let Some(dial) = pair.dial() {
            dial.waited_for = Some(dial.target());
        }
        self.shared.names.await_first(name);
        self.shared.deadlines.set(key, self.routes[route as usize].connect, self.now);
    }

    /// Starts lookups of all names whose answers are old or missing, so that clients find them done.
    pub(super) fn look_up_names(&mut self) {
        for route in &self.routes {
            for target in &route.targets {
                if let Place::Named(name) = target.place {
                    self.shared.names.addrs(name, route.refresh, self.now);
                }
            }
        }
    }

    /// Answers have come: pairs that wait for them go on.
    pub(super) fn take_names(&mut self) {
        for News { id, error } in self.shared.names.collect(self.now) {
            if let Some(error) = &error
                && let Some(held) = self.name_trouble.pass(self.now)
            {
                log::warn!("look up '{}': {error}{held}", self.shared.names.name(id));
            }
            let waiting = std::mem::take(&mut self.waiting);
            let (concerned, others): (Vec<_>, _) =
                waiting.into_iter().partition(|(name, ..)| *name == id);
            self.waiting = others;
            for (name, key, generation) in concerned {
                self.name_answered(name, key, generation, error.is_some());
            }
        }
    }

    fn name_answered(&mut self, name: NameId, key: u32, generation: u32, failed: bool) {
        let Some(pair) = self.pairs.get_mut(key as usize) else { return };
        let route = &self.routes[self.listeners[pair.listener as usize].route as usize];
        if pair.generation != generation {
            return;
        }
        let Some(dial) = pair.dial() else { return };
        let target = dial.target();
        // It may have gone on to another target meanwhile.
        let awaits =
            matches!(route.targets[target].place, Place::Named(awaited) if awaited == name);
        if !awaits || dial.is_running() {
            return;
        }
        if !failed {
            self.dial(key, Step::NextTarget(target));
        } else if target + 1 < route.targets.len() {
            self.dial(key, Step::NextTarget(target + 1));
        } else {
            // Nobody else to turn to: the name is asked for again until the time is over.
            self.waiting.push((name, key, generation));
        }
    }

    /// Asks again for names that pairs still wait for.
    pub(super) fn retry_names(&mut self) {
        let pairs = &mut self.pairs;
        self.waiting.retain(|(_, key, generation)| {
            let pair = pairs.get_mut(*key as usize);
            pair.is_some_and(|pair| pair.generation == *generation && pair.dial().is_some())
        });
        for name in self.shared.names.due(self.now) {
            if self.waiting.iter().any(|(awaited, ..)| *awaited == name) {
                self.shared.names.ask(name);
            } else {
                self.shared.names.stop_waiting(name);
            }
        }
    }

    /// The client has ended its side before it has sent a byte. With nothing else left to try, the
    /// attempts that run get a little time more.
    pub(super) fn client_may_have_left(&mut self, key: u32) {
        let pair = &mut self.pairs[key as usize];
        let route = self.listeners[pair.listener as usize].route as usize;
        let Some(dial) = pair.dial() else { return };
        if std::mem::replace(&mut dial.client_may_have_left, true) {
            return;
        }
        if dial.is_running() && !dial.has_untried() {
            let list = self.last_wait(key, route);
            self.shared.deadlines.set(key, list, self.now);
        }
    }

    /// The wait of a pair that dials is over.
    pub(super) fn dial_waited(&mut self, key: u32) {
        let pair = &mut self.pairs[key as usize];
        let targets = &self.routes[self.listeners[pair.listener as usize].route as usize].targets;
        let left = pair.client_ended_empty();
        let Some(dial) = pair.dial() else { return };
        let is_last = !dial.has_untried() && dial.target() + 1 >= targets.len();
        if left && dial.client_may_have_left && is_last {
            self.end_pair(key, End::ClientLeft);
        } else {
            let step = dial.waited();
            self.dial(key, step);
        }
    }

    fn tell_unreachable(&mut self, key: u32) {
        let pair = &mut self.pairs[key as usize];
        let listener = &self.listeners[pair.listener as usize];
        let route = &mut self.routes[listener.route as usize];
        let Some(dial) = pair.dial() else { return };
        let failure = dial.failure();
        if let Some(held) = route.unreachable.pass(self.now) {
            match failure.addr {
                Some(addr) => {
                    log::warn!("{}: cannot reach {addr}: {}{held}", listener.name, failure.error);
                }
                None => log::warn!("{}: cannot reach it: {}{held}", listener.name, failure.error),
            }
        }
    }
}

/// A client that ends its side before it has sent a byte and before the target has answered has
/// probably left. It may instead be waiting for a target that speaks first, so the last attempt gets
/// this long: enough for a SYN that was lost to be sent again (1 s, RFC 6298).
pub(super) const LEAVE_GRACE: Duration = Duration::from_millis(1500);
