//! UDP in the loop: datagrams from clients to the sockets of their flows, and back.
//!
//! Events only queue a listener or a flow as ready; the datagrams move after all events of a turn
//! were taken in, first those of the listeners, then those of the flows, so that the answers of many
//! flows leave together.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;

use mio::Interest;
use mio::net::UdpSocket;

use super::route::Place;
use super::{Server, Socket, is_exhaustion};
use crate::resolve::NameId;
use crate::stats::Counters;
use crate::sys::control::Control;
use crate::sys::socket::{self, UdpOptions};
use crate::token::{Role, Token};
use crate::udp::{Door, Key, Received, SLOTS, Sent, Way};

/// What a flow has towards its target.
pub(super) struct FlowSocket {
    socket: UdpSocket,
    generation: u32,
    /// The version of the target name's addresses that the socket was opened for.
    version: u32,
    /// The largest datagrams that may leave as a run; 0 when none may.
    largest_segment: u16,
    ipv4: bool,
    queued: bool,
    /// Datagrams that its receive buffer had no room for so far.
    overflows: u32,
}

impl Server {
    pub(super) fn listener_ready(&mut self, index: u32) {
        let listener = &mut self.listeners[index as usize];
        if !listener.queued {
            listener.queued = true;
            self.ready_listeners.push_back(index);
        }
    }

    pub(super) fn flow_ready(&mut self, token: Token) {
        let Some(flow) = self.shared.flows.slot(token.key) else { return };
        let socket = &mut flow.socket;
        if token.is_of(socket.generation) && !socket.queued {
            socket.queued = true;
            self.ready_flows.push_back((token.key, socket.generation));
        }
    }

    /// Gives every listener and flow that is ready its turn.
    pub(super) fn relay_datagrams(&mut self) {
        for _ in 0..self.ready_listeners.len() {
            let Some(index) = self.ready_listeners.pop_front() else { break };
            self.listeners[index as usize].queued = false;
            if self.receive_from_clients(index) {
                self.listener_ready(index);
            }
        }
        for _ in 0..self.ready_flows.len() {
            let Some((slot, generation)) = self.ready_flows.pop_front() else { break };
            let Some(flow) = self.shared.flows.slot(slot) else { continue };
            if flow.socket.generation != generation {
                continue;
            }
            flow.socket.queued = false;
            if self.receive_from_target(slot) {
                self.flow_ready(Token::new(Role::Flow, slot, generation));
            }
        }
        self.send_to_clients();
    }

    /// Passes on what has come from clients, at most a few batches; true when there may be more.
    fn receive_from_clients(&mut self, index: u32) -> bool {
        for _ in 0..BATCHES {
            let Socket::Udp(socket) = &self.listeners[index as usize].socket else { return false };
            let (first, count) = match self.relay.receive(socket, SLOTS) {
                Ok(received) => received,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                // An error that was left by something sent earlier; what was received is behind it.
                Err(_) => continue,
            };
            for number in 0..count {
                let Some(received) = self.relay.received(first, number) else { break };
                self.take_from_client(index, &received);
            }
            self.send_to_targets();
            if usize::from(count) < SLOTS {
                return false;
            }
        }
        true
    }

    /// Assigns a datagram from a client to its flow.
    fn take_from_client(&mut self, index: u32, received: &Received) {
        let Some(client) = received.sender else { return };
        let control = &received.control;
        let key = Key::new(index, client, control.local);
        let slot = self.flow_of(key);
        let listener = &mut self.listeners[index as usize];
        let route = &mut self.routes[listener.route as usize];
        count_overflows(&mut listener.overflows, control, &mut route.counters);
        let flow = slot.and_then(|slot| Some((slot, self.shared.flows.peek(slot)?)));
        let Some((owner, flow)) = flow else {
            route.counters.dropped += 1;
            return;
        };
        let way = Way {
            owner,
            to: None,
            from: None,
            traffic_class: control.traffic_class & route.traffic_class,
            ipv4: flow.socket.ipv4,
        };
        self.relay.assign(received, way);
        self.shared.flows.asked(owner, self.now);
    }

    /// Gathers what has come for one flow, sending when the arena is full; true when there may be
    /// more.
    fn receive_from_target(&mut self, slot: u32) -> bool {
        for _ in 0..FLOW_RECEIVES {
            if self.relay.is_full() {
                self.send_to_clients();
            }
            let Some(flow) = self.shared.flows.slot(slot) else { return false };
            let key = flow.key;
            let room = self.relay.room().min(FLOW_BATCH);
            match self.relay.receive(&flow.socket.socket, room) {
                Ok((first, count)) => {
                    for number in 0..count {
                        let Some(received) = self.relay.received(first, number) else { break };
                        self.take_from_target(slot, key, &received);
                    }
                    self.shared.flows.answered(slot, self.now);
                    if usize::from(count) < room {
                        return false;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                // The target's machine says that it does not want a datagram that we sent. Its next
                // answer, if there is one, is behind this error.
                Err(_) => {}
            }
        }
        true
    }

    /// Assigns a datagram from a target to the listener that its client wrote to.
    fn take_from_target(&mut self, slot: u32, key: Key, received: &Received) {
        let route = self.listeners[key.listener as usize].route as usize;
        let route = &mut self.routes[route];
        if let Some(flow) = self.shared.flows.slot(slot) {
            let seen = &mut flow.socket.overflows;
            count_overflows(seen, &received.control, &mut route.counters);
        }
        let client = key.client();
        let way = Way {
            owner: key.listener,
            to: Some(client),
            from: key.local(),
            traffic_class: received.control.traffic_class & route.traffic_class,
            ipv4: client.ip().to_canonical().is_ipv4(),
        };
        self.relay.assign(received, way);
    }

    fn send_to_targets(&mut self) {
        let Server { relay, shared, listeners, routes, .. } = self;
        let mut refused = None;
        let flows = &shared.flows;
        relay.send(
            |slot| {
                let socket = &flows.peek(slot)?.socket;
                Some(Door { socket: &socket.socket, largest_segment: socket.largest_segment })
            },
            |slot, sent| {
                if let Some(flow) = flows.peek(slot) {
                    let route = listeners[flow.key.listener as usize].route;
                    count(&mut routes[route as usize].counters, 0, sent);
                    refused = sent.refused_segment.map(|size| (slot, size)).or(refused);
                }
            },
        );
        if let Some((slot, size)) = refused
            && let Some(flow) = shared.flows.slot(slot)
        {
            flow.socket.largest_segment = size;
            let route = listeners[flow.key.listener as usize].route as usize;
            self.limit_runs(route, size);
        }
    }

    fn send_to_clients(&mut self) {
        if self.relay.is_empty() {
            return;
        }
        let Server { relay, listeners, routes, .. } = self;
        let mut refused = None;
        relay.send(
            |index| {
                let listener = &listeners[index as usize];
                match &listener.socket {
                    Socket::Udp(socket) => {
                        Some(Door { socket, largest_segment: listener.largest_segment })
                    }
                    _ => None,
                }
            },
            |index, sent| {
                let route = listeners[index as usize].route;
                count(&mut routes[route as usize].counters, 1, sent);
                refused = sent.refused_segment.map(|size| (index, size)).or(refused);
            },
        );
        if let Some((index, size)) = refused {
            let listener = &mut self.listeners[index as usize];
            listener.largest_segment = size;
            let route = listener.route as usize;
            self.limit_runs(route, size);
        }
    }

    /// Runs of this size or larger have been refused once: new flows of the rule begin below it.
    fn limit_runs(&mut self, route: usize, size: u16) {
        let route = &mut self.routes[route];
        if size < route.largest_segment {
            route.largest_segment = size;
            match size {
                0 => log::info!("{}: segmentation offload is off, it does not work", route.label),
                size => log::info!(
                    "{}: segmentation offload only for datagrams of up to {size} bytes",
                    route.label
                ),
            }
        }
    }

    /// The flow of this client, opened if need be; `None` when there can be none now.
    fn flow_of(&mut self, key: Key) -> Option<u32> {
        let Some(slot) = self.shared.flows.find(&key) else {
            return self.open_flow(key);
        };
        let route = &self.routes[self.listeners[key.listener as usize].route as usize];
        let Some(Place::Named(name)) = route.targets.first().map(|target| target.place) else {
            return Some(slot);
        };
        let (_, version) = self.shared.names.addrs(name, route.refresh, self.now);
        if self.shared.flows.slot(slot)?.socket.version != version {
            self.move_flow(slot, name, version);
        }
        Some(slot)
    }

    fn open_flow(&mut self, key: Key) -> Option<u32> {
        if self.is_draining() {
            return None;
        }
        let route = self.listeners[key.listener as usize].route as usize;
        let rule = self.routes[route].flow_rule;
        let Some((addr, version)) = self.target_address(key) else {
            self.tell_flow_trouble(route, "no address is known for the target yet");
            return None;
        };
        if self.shared.flows.len() >= self.most_flows {
            self.tell_flow_trouble(route, "half of all descriptors are UDP flows");
            return None;
        }
        if self.shared.flows.is_full(rule) {
            // What is in the arena may belong to the flow that has to go.
            self.send_to_targets();
            if self.shared.flows.evict(rule).is_some() {
                self.routes[route].counters.evicted += 1;
                self.tell_flow_trouble(route, "all sessions are taken, the oldest flow makes room");
            }
        }
        let slot = self.shared.flows.next_slot();
        let generation = self.next_generation();
        match self.open_socket(slot, generation, addr, self.routes[route].udp) {
            Ok(socket) => {
                self.routes[route].counters.flows += 1;
                let socket = self.flow_socket(socket, route, generation, version, addr);
                Some(self.shared.flows.insert(key, rule, socket, self.now))
            }
            Err(error) => {
                if is_exhaustion(&error) {
                    self.pool.spare_descriptors();
                }
                self.tell_flow_trouble(route, &format!("open a socket to {addr}: {error}"));
                None
            }
        }
    }

    fn flow_socket(
        &self,
        socket: UdpSocket,
        route: usize,
        generation: u32,
        version: u32,
        addr: SocketAddr,
    ) -> FlowSocket {
        FlowSocket {
            socket,
            generation,
            version,
            largest_segment: self.routes[route].largest_segment,
            ipv4: addr.ip().to_canonical().is_ipv4(),
            queued: false,
            overflows: 0,
        }
    }

    fn open_socket(
        &self,
        slot: u32,
        generation: u32,
        addr: SocketAddr,
        options: UdpOptions,
    ) -> io::Result<UdpSocket> {
        let mut socket = socket::udp_connected(addr, options)?;
        let token = Token::new(Role::Flow, slot, generation);
        self.poll.registry().register(&mut socket, token.into(), Interest::READABLE)?;
        Ok(socket)
    }

    /// The first address of the first target that has one, and the version of its name's addresses.
    fn target_address(&mut self, key: Key) -> Option<(SocketAddr, u32)> {
        let listener = &self.listeners[key.listener as usize];
        let route = &self.routes[listener.route as usize];
        route.targets.iter().find_map(|target| {
            let (mut addr, version) = match target.place {
                Place::At(addr) => (addr, 0),
                Place::Nowhere => return None,
                Place::Named(name) => {
                    let (addrs, version) = self.shared.names.addrs(name, route.refresh, self.now);
                    (*addrs.first()?, version)
                }
            };
            addr.set_port(target.port(listener.offset, listener.port));
            Some((addr, version))
        })
    }

    /// The addresses of the flow's target have changed: it moves, unless the one that it has is
    /// still among them.
    fn move_flow(&mut self, slot: u32, name: NameId, version: u32) {
        let Some(flow) = self.shared.flows.slot(slot) else { return };
        let key = flow.key;
        flow.socket.version = version;
        let current = flow.socket.socket.peer_addr().map(|addr| addr.ip());
        let refresh = self.routes[self.listeners[key.listener as usize].route as usize].refresh;
        let (addrs, _) = self.shared.names.addrs(name, refresh, self.now);
        if current.is_ok_and(|ip| addrs.iter().any(|addr| addr.ip() == ip)) {
            return;
        }
        let Some((addr, _)) = self.target_address(key) else { return };
        let route = self.listeners[key.listener as usize].route as usize;
        let generation = self.next_generation();
        match self.open_socket(slot, generation, addr, self.routes[route].udp) {
            Ok(socket) => {
                let moved = self.flow_socket(socket, route, generation, version, addr);
                // What is in the arena belongs to the flow, so it may leave through either socket.
                if let Some(flow) = self.shared.flows.slot(slot) {
                    flow.socket = moved;
                }
            }
            Err(error) => {
                self.tell_flow_trouble(route, &format!("open a socket to {addr}: {error}"));
            }
        }
    }

    fn tell_flow_trouble(&mut self, route: usize, what: &str) {
        let route = &mut self.routes[route];
        if let Some(held) = route.flow_trouble.pass(self.now) {
            log::warn!("{}: {what}{held}", route.label);
        }
    }
}

fn count(counters: &mut Counters, direction: usize, sent: Sent) {
    counters.datagrams[direction] += sent.datagrams;
    counters.udp_bytes[direction] += sent.bytes;
    counters.blocked += sent.blocked;
    counters.dropped += sent.failed;
}

/// Adds what the kernel has dropped since it last told of that for this socket.
fn count_overflows(seen: &mut u32, control: &Control, counters: &mut Counters) {
    if control.overflows > 0 {
        counters.overflowed += u64::from(control.overflows.wrapping_sub(*seen));
        *seen = control.overflows;
    }
}

/// Full batches that one listener may have in a turn.
const BATCHES: usize = 4;

/// Datagrams asked for from a flow at a time: most have one, and every header costs.
const FLOW_BATCH: usize = 4;

/// How often a flow is asked in a turn.
const FLOW_RECEIVES: usize = 16;
