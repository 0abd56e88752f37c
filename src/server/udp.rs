//! UDP in the loop: datagrams from clients to the sockets of their flows, and back.
//!
//! Events only queue a listener or a flow as ready; the datagrams move after all events of a turn
//! were taken in, first those of the listeners, then those of the flows, so that the answers of many
//! flows leave together. Which flow a datagram belongs to is the business of [`super::flows`].

use std::io::ErrorKind;

use super::flows::FlowSocket;
use super::{Server, Socket};
use crate::stats::Counters;
use crate::sys::control::Control;
use crate::token::{Role, Token};
use crate::udp::{Door, Key, Received, Refused, SLOTS, Sent, Way};

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
            let Socket::Udp { socket, .. } = &self.listeners[index as usize].socket else {
                return false;
            };
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
        let control = &received.control;
        let slot = match received.sender {
            Some(client) => self.flow_of(Key::new(index, client, control.local)),
            None => None,
        };
        let listener = &mut self.listeners[index as usize];
        let route = &mut self.routes[listener.route as usize];
        if let Socket::Udp { overflows, .. } = &mut listener.socket {
            count_overflows(overflows, control, &mut route.counters);
        }
        let flow = slot.and_then(|slot| Some((slot, self.shared.flows.peek(slot)?)));
        let Some((owner, flow)) = flow else {
            route.counters.dropped += received.datagrams();
            return;
        };
        let way = Way {
            owner,
            to: None,
            from: None,
            traffic_class: control.traffic_class & route.class_mask,
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
            traffic_class: received.control.traffic_class & route.class_mask,
            ipv4: client.ip().to_canonical().is_ipv4(),
        };
        self.relay.assign(received, way);
    }

    pub(super) fn send_to_targets(&mut self) {
        let Server { relay, shared, listeners, routes, .. } = self;
        let flows = &shared.flows;
        let mut refused = Vec::new();
        relay.send(
            |slot| {
                let FlowSocket { socket, largest_segment, .. } = &flows.peek(slot)?.socket;
                Some(Door { socket, largest_segment: *largest_segment })
            },
            |slot, sent| {
                if let Some(flow) = flows.peek(slot) {
                    let route = listeners[flow.key.listener as usize].route;
                    count(&mut routes[route as usize].counters, 0, &sent);
                    refused.extend(sent.refused.map(|refused| (slot, refused)));
                }
            },
        );
        for (slot, refused) in refused {
            let Some(flow) = self.shared.flows.slot(slot) else { continue };
            // A flow has one way, so what exceeds its MTU once will do so again.
            flow.socket.largest_segment = match refused {
                Refused::Larger(than) => than,
                Refused::All => 0,
            };
            let route = self.listeners[flow.key.listener as usize].route as usize;
            self.tell_of_runs(route, refused);
        }
    }

    fn send_to_clients(&mut self) {
        if self.relay.is_empty() {
            return;
        }
        let Server { relay, listeners, routes, .. } = self;
        let mut refused = Vec::new();
        relay.send(
            |index| match &listeners[index as usize].socket {
                Socket::Udp { socket, largest_segment, .. } => {
                    Some(Door { socket, largest_segment: *largest_segment })
                }
                _ => None,
            },
            |index, sent| {
                let route = listeners[index as usize].route;
                count(&mut routes[route as usize].counters, 1, &sent);
                refused.extend(sent.refused.map(|refused| (index, refused)));
            },
        );
        for (index, refused) in refused {
            let listener = &mut self.listeners[index as usize];
            // The MTU of the way to one client says nothing of the others.
            if let (Refused::All, Socket::Udp { largest_segment, .. }) =
                (refused, &mut listener.socket)
            {
                *largest_segment = 0;
            }
            let route = listener.route as usize;
            self.tell_of_runs(route, refused);
        }
    }

    /// Says once for each rule that runs of datagrams do not always work.
    fn tell_of_runs(&mut self, route: usize, refused: Refused) {
        let route = &mut self.routes[route];
        if std::mem::replace(&mut route.told_of_runs, true) {
            return;
        }
        match refused {
            Refused::All => log::info!("{}: segmentation offload does not work here", route.label),
            Refused::Larger(than) => log::info!(
                "{}: datagrams of more than {than} bytes leave without segmentation offload",
                route.label
            ),
        }
    }
}

fn count(counters: &mut Counters, direction: usize, sent: &Sent) {
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
