//! Opening and moving UDP flows: a connected socket for each client, towards the address that the
//! rule's target has at the time.
//!
//! A datagram whose flow can't be had now is dropped; nothing waits here, not for a name either.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use mio::Interest;
use mio::net::UdpSocket;

use super::route::Place;
use super::{Server, is_exhaustion};
use crate::resolve::NameId;
use crate::sys::socket;
use crate::token::{Role, Token};
use crate::udp::Key;

/// What a flow has towards its target.
pub(super) struct FlowSocket {
    pub socket: UdpSocket,
    pub generation: u32,
    /// Which of the rule's targets it leads to.
    target: u8,
    /// The version of that target's addresses that the socket was opened for.
    version: u32,
    /// The largest datagrams that may leave as a run; 0 when none may.
    pub largest_segment: u16,
    /// It leads to an IPv4 address.
    pub ipv4: bool,
    /// Among the ready flows.
    pub queued: bool,
    /// Datagrams that its receive buffer had no room for so far.
    pub overflows: u32,
}

/// Where a flow is to lead.
struct Aim {
    addr: SocketAddr,
    target: u8,
    version: u32,
}

impl Server {
    /// The flow of this client, opened if need be; `None` when there can be none now.
    pub(super) fn flow_of(&mut self, key: Key) -> Option<u32> {
        let Some(slot) = self.shared.flows.find(&key) else {
            return self.open_flow(key);
        };
        let FlowSocket { target, version, .. } = self.shared.flows.peek(slot)?.socket;
        let route = &self.routes[self.listeners[key.listener as usize].route as usize];
        if let Place::Named(name) = route.targets[usize::from(target)].place {
            let (_, newest) = self.shared.names.addrs(name, route.refresh, self.now);
            if version != newest {
                self.move_flow(slot, name, newest);
            }
        }
        Some(slot)
    }

    fn open_flow(&mut self, key: Key) -> Option<u32> {
        if self.is_draining() {
            return None;
        }
        let route = self.listeners[key.listener as usize].route as usize;
        let aims = self.aims(key);
        if aims.is_empty() {
            self.tell_flow_trouble(route, format_args!("no address is known for the target yet"));
            return None;
        }
        if !self.make_room(route) {
            return None;
        }
        let slot = self.shared.flows.next_slot();
        let socket = self.open_first(slot, route, &aims)?;
        let route = &mut self.routes[route];
        route.counters.flows += 1;
        Some(self.shared.flows.insert(key, route.flow_rule, socket, self.now))
    }

    /// Makes sure that the rule may have one more flow; false when there is none to give up for it.
    fn make_room(&mut self, route: usize) -> bool {
        let flows = &self.shared.flows;
        let own = self.routes[route].flow_rule;
        let (rule, limit) = if flows.is_full(own) {
            (Some(own), "all sessions of the rule are taken")
        } else if flows.len() >= self.most_flows {
            (flows.largest_rule(), "half of all descriptors are flows")
        } else {
            return true;
        };
        // What is in the arena may belong to the flow that has to go.
        self.send_to_targets();
        let evicted = rule.and_then(|rule| self.shared.flows.evict(rule));
        if let Some(flow) = &evicted {
            let route = self.listeners[flow.key.listener as usize].route;
            self.routes[route as usize].counters.evicted += 1;
        }
        self.tell_flow_trouble(route, format_args!("{limit}, the oldest flow makes room"));
        evicted.is_some()
    }

    /// A socket towards the first address that one can be opened for.
    fn open_first(&mut self, slot: u32, route: usize, aims: &[Aim]) -> Option<FlowSocket> {
        for aim in aims {
            let error = match self.open_socket(slot, route, aim) {
                Ok(socket) => return Some(socket),
                Err(error) => error,
            };
            let addr = aim.addr;
            self.tell_flow_trouble(route, format_args!("open a socket to {addr}: {error}"));
            if is_exhaustion(&error) {
                self.pool.spare_descriptors();
                break;
            }
        }
        None
    }

    fn open_socket(&mut self, slot: u32, route: usize, aim: &Aim) -> io::Result<FlowSocket> {
        let generation = self.next_generation();
        let route = &self.routes[route];
        let mut socket = socket::udp_connected(aim.addr, route.udp)?;
        let token = Token::new(Role::Flow, slot, generation);
        self.poll.registry().register(&mut socket, token.into(), Interest::READABLE)?;
        Ok(FlowSocket {
            socket,
            generation,
            target: aim.target,
            version: aim.version,
            largest_segment: route.largest_segment,
            ipv4: aim.addr.ip().to_canonical().is_ipv4(),
            queued: false,
            overflows: 0,
        })
    }

    /// Every address of every target, in order.
    fn aims(&mut self, key: Key) -> Vec<Aim> {
        let listener = &self.listeners[key.listener as usize];
        let route = &self.routes[listener.route as usize];
        let mut aims = Vec::new();
        for (number, target) in (0..=u8::MAX).zip(&route.targets) {
            let port = target.port(listener.offset, listener.port);
            let mut add = |mut addr: SocketAddr, version| {
                addr.set_port(port);
                aims.push(Aim { addr, target: number, version });
            };
            match &target.place {
                Place::At(addr) => add(*addr, 0),
                Place::OnInterface(ip, name) => {
                    if let Some(index) = socket::interface_index(name) {
                        add(socket::scoped(*ip, index), 0);
                    }
                }
                Place::Named(name) => {
                    let (addrs, version) = self.shared.names.addrs(*name, route.refresh, self.now);
                    addrs.iter().for_each(|addr| add(*addr, version));
                }
            }
        }
        aims
    }

    /// The addresses of the flow's target have changed: it moves, unless the one that it has is
    /// still among them.
    fn move_flow(&mut self, slot: u32, name: NameId, version: u32) {
        let Some(flow) = self.shared.flows.slot(slot) else { return };
        let key = flow.key;
        let current = flow.socket.socket.peer_addr().map(|addr| addr.ip());
        let route = self.listeners[key.listener as usize].route as usize;
        let (addrs, _) = self.shared.names.addrs(name, self.routes[route].refresh, self.now);
        if current.is_ok_and(|ip| addrs.iter().any(|addr| addr.ip() == ip)) {
            flow.socket.version = version;
            return;
        }
        let aims = self.aims(key);
        let Some(socket) = self.open_first(slot, route, &aims) else { return };
        // What is in the arena belongs to the flow, so it may leave through either socket.
        if let Some(flow) = self.shared.flows.slot(slot) {
            flow.socket = socket;
        }
    }

    fn tell_flow_trouble(&mut self, route: usize, what: fmt::Arguments) {
        let route = &mut self.routes[route];
        if let Some(held) = route.flow_trouble.pass(self.now) {
            log::warn!("{}: {what}{held}", route.label);
        }
    }
}
