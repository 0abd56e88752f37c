//! A rule at work: its targets as far as they are known, its timeouts as lists of the server, what
//! was counted for it.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use mio::net::UdpSocket;

use super::{Listener, Shared, Socket};
use crate::deadline::List;
use crate::resolve::NameId;
use crate::rule::{Host, Limits, Listen, Ports, Rule, Target};
use crate::stats::{Brake, Counters};
use crate::sys::socket::{self, TcpOptions, UdpOptions};
use crate::tcp::HEAD_START;

/// What the server keeps for one rule.
pub(super) struct Route {
    pub targets: Vec<RouteTarget>,
    pub tcp: TcpOptions,
    pub udp: UdpOptions,
    /// The largest datagrams that a new flow may send as a run; 0 when it may send none.
    pub largest_segment: u16,
    /// Which bits of a datagram's traffic class are passed on.
    pub class_mask: u8,
    pub refresh: Duration,
    pub connect: List,
    /// How long an address is tried alone before the next one joins it.
    pub head_start: List,
    /// Idle time, unless that is off.
    pub idle: Option<List>,
    /// Half-close time, or the idle time if that is shorter.
    pub half_close: List,
    /// Index of the rule in the flow table.
    pub flow_rule: u32,
    pub counters: Counters,
    pub unreachable: Brake,
    pub flow_trouble: Brake,
    /// The log was told that runs of datagrams are limited.
    pub told_of_runs: bool,
    /// `listen -> target`, as it was asked for.
    pub label: Box<str>,
}

/// One target of a rule.
pub(super) struct RouteTarget {
    pub place: Place,
    target: Target,
}

/// Where a target is.
pub(super) enum Place {
    /// At an address; the port is not set.
    At(SocketAddr),
    /// At a link-local address on the interface of this name or number.
    OnInterface(Ipv6Addr, Box<str>),
    /// Wherever this name leads.
    Named(NameId),
}

impl RouteTarget {
    /// The port for a listener that has this port and this place in its rule's range.
    pub fn port(&self, offset: u16, listener_port: u16) -> u16 {
        self.target.port(offset, listener_port)
    }
}

impl Route {
    /// Makes room for the traffic of a rule that has these listeners; its names become known to the
    /// resolver.
    pub fn new(rule: &Rule, listeners: &[Listener], shared: &mut Shared) -> Route {
        let limits = rule.limits();
        let port = listeners.first().map_or(0, |listener| listener.port);
        let largest_segment = listeners.iter().find_map(|listener| match listener.socket {
            Socket::Udp { largest_segment, .. } => Some(largest_segment),
            _ => None,
        });
        let half_close = limits.idle.map_or(limits.half_close, |idle| idle.min(limits.half_close));
        Route {
            targets: rule.targets().iter().map(|target| route_target(target, shared)).collect(),
            tcp: TcpOptions { keepalive: limits.keepalive, sockbuf: limits.sockbuf },
            udp: udp_options(limits),
            largest_segment: largest_segment.unwrap_or(0),
            class_mask: if limits.pass_tos { u8::MAX } else { ECN },
            refresh: limits.refresh,
            connect: shared.deadlines.shared(limits.connect),
            head_start: shared.deadlines.shared(HEAD_START.min(limits.connect)),
            idle: limits.idle.map(|idle| shared.deadlines.shared(idle)),
            half_close: shared.deadlines.shared(half_close),
            flow_rule: shared.flows.add_rule(limits.timeout, limits.sessions),
            counters: Counters::default(),
            unreachable: Brake::default(),
            flow_trouble: Brake::default(),
            told_of_runs: false,
            label: format!("{} -> {}", with_port(rule.listen(), port), describe_targets(rule))
                .into(),
        }
    }

    /// Whether log lines of it are held back that were not told of.
    pub fn is_holding_lines(&self) -> bool {
        self.unreachable.is_holding() || self.flow_trouble.is_holding()
    }
}

/// The options of a rule's UDP sockets.
pub(super) fn udp_options(limits: &Limits) -> UdpOptions {
    UdpOptions { sockbuf: limits.sockbuf, gro: limits.gro }
}

/// The largest datagrams that this UDP socket of a rule may send as a run; 0 when it may not.
pub(super) fn largest_segment(limits: &Limits, socket: &UdpSocket) -> u16 {
    // A kernel that does not know of runs would send one as a single large datagram.
    if limits.gso && socket::can_send_runs(socket) { u16::MAX } else { 0 }
}

/// The listening address as the user wrote it, a free port as what it has become.
fn with_port(listen: &Listen, port: u16) -> Listen {
    let mut listen = listen.clone();
    if listen.ports.first() == 0 {
        listen.ports = Ports::one(port);
    }
    listen
}

/// The targets as the user wrote them.
fn describe_targets(rule: &Rule) -> String {
    let targets = rule.targets().iter().map(|target| match target.ports {
        Some(ports) => format!("{}:{ports}", target.host),
        None => target.host.to_string(),
    });
    targets.collect::<Vec<_>>().join(",")
}

fn route_target(target: &Target, shared: &mut Shared) -> RouteTarget {
    let place = match &target.host {
        Host::Ip(ip) => Place::At(SocketAddr::new(*ip, 0)),
        Host::Scoped(ip, scope) => Place::OnInterface(*ip, scope.clone()),
        Host::Name(name) => Place::Named(shared.names.add(name)),
    };
    RouteTarget { place, target: target.clone() }
}

/// The two bits of explicit congestion notification (RFC 3168), which belong to the two ends of a
/// flow and not to a hop between them.
const ECN: u8 = 0b11;
