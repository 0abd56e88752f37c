//! What a user asked for: one [`Rule`] is a listening address (or a range of them), the targets
//! behind it and the limits of what passes between.
//!
//! A rule is valid by construction: [`Rule::new`] is the only way to make one, and it refuses what
//! makes no sense. Nothing here does I/O; names stay names until [`crate::resolve`] looks them up.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

/// One listener (or range of listeners) and what is behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    listen: Listen,
    targets: Vec<Target>,
    limits: Limits,
}

impl Rule {
    /// Joins the parts, or says why they do not fit each other.
    pub fn new(listen: Listen, targets: Vec<Target>, limits: Limits) -> Result<Rule, RuleError> {
        if targets.is_empty() {
            return Err(RuleError::NoTarget);
        }
        for target in &targets {
            match target.ports {
                Some(ports) if ports.len() != listen.ports.len() && ports.len() != 1 => {
                    return Err(RuleError::RangeLength { listen: listen.ports, target: ports });
                }
                Some(ports) if ports.first == 0 => return Err(RuleError::TargetPortZero),
                None if listen.ports.first == 0 => return Err(RuleError::NoTargetPort),
                _ => {}
            }
        }
        Ok(Rule { listen, targets, limits })
    }

    /// Where the rule listens.
    pub fn listen(&self) -> &Listen {
        &self.listen
    }

    /// Where its traffic goes: the first target, and in order those that stand in for it.
    /// Never empty.
    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// Timeouts, caps and socket options.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }
}

/// A listening address: one host, one or more ports, one or both protocols.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// The local address.
    pub host: ListenHost,
    /// The ports; `0` stands for any free one.
    pub ports: Ports,
    /// TCP, UDP or both.
    pub protocols: Protocols,
}

impl fmt::Display for Listen {
    /// The form that the command line takes, without the protocol.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            ListenHost::Any => write!(f, ":{}", self.ports),
            ListenHost::Host(host) => write!(f, "{host}:{}", self.ports),
        }
    }
}

/// The local address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenHost {
    /// Every address of both families; IPv4 alone where the machine has no IPv6.
    Any,
    /// One address (possibly one family's wildcard), or a name that is looked up once at start.
    Host(Host),
}

/// An address or the name of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// A numeric address.
    Ip(IpAddr),
    /// An IPv6 link-local address and the interface it belongs to, by name or number.
    Scoped(std::net::Ipv6Addr, Box<str>),
    /// A host name.
    Name(Box<str>),
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Ip(IpAddr::V4(ip)) => write!(f, "{ip}"),
            Host::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]"),
            Host::Scoped(ip, scope) => write!(f, "[{ip}%{scope}]"),
            Host::Name(name) => f.write_str(name),
        }
    }
}

/// A range of ports with both ends in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    first: u16,
    last: u16,
}

impl Ports {
    /// A single port.
    pub fn one(port: u16) -> Ports {
        Ports { first: port, last: port }
    }

    /// `first` to `last`; `None` unless `first < last` and `first` is a real port.
    pub fn range(first: u16, last: u16) -> Option<Ports> {
        (first > 0 && first < last).then_some(Ports { first, last })
    }

    /// The lowest port.
    pub fn first(&self) -> u16 {
        self.first
    }

    /// How many ports; never zero.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        usize::from(self.last - self.first) + 1
    }

    /// Every port in order.
    pub fn iter(&self) -> impl Iterator<Item = u16> + use<> {
        self.first..=self.last
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}-{}", self.first, self.last)
        }
    }
}

/// Which protocols a listener takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocols {
    /// TCP alone.
    Tcp,
    /// UDP alone.
    Udp,
    /// TCP and UDP on the same port.
    Both,
}

impl Protocols {
    /// Whether TCP is among them.
    pub fn tcp(self) -> bool {
        self != Protocols::Udp
    }

    /// Whether UDP is among them.
    pub fn udp(self) -> bool {
        self != Protocols::Tcp
    }
}

/// Where traffic goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The address or name.
    pub host: Host,
    /// The ports; `None` means the listener's own.
    pub ports: Option<Ports>,
}

impl Target {
    /// The port for the `offset`th port of the listener's range, whose number is `listener_port`.
    pub fn port(&self, offset: u16, listener_port: u16) -> u16 {
        match self.ports {
            None => listener_port,
            Some(ports) if ports.len() == 1 => ports.first,
            Some(ports) => ports.first + offset,
        }
    }
}

/// Timeouts, caps and socket options of one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// To reach one target address; then the next is tried.
    pub connect: Duration,
    /// How long a TCP connection may go without a byte either way; `None` is for ever.
    pub idle: Option<Duration>,
    /// How long a UDP flow may go without a datagram either way.
    pub timeout: Duration,
    /// How long a TCP connection with one side ended may go without a byte from the other.
    pub half_close: Duration,
    /// TCP keepalive: silence before the first probe; `None` sends none.
    pub keepalive: Option<Duration>,
    /// How many UDP flows the rule may have at once; at least 1.
    pub sessions: u32,
    /// How many connections the kernel may hold that were not accepted yet; at least 1.
    pub backlog: u32,
    /// Kernel buffer of each socket and direction in bytes; `None` leaves it to the kernel.
    pub sockbuf: Option<u32>,
    /// Age at which a name is looked up again.
    pub refresh: Duration,
    /// Whether runs of datagrams are received as one.
    pub gro: bool,
    /// Whether runs of datagrams are sent as one.
    pub gso: bool,
    /// Whether the whole traffic class of a datagram is passed on; its ECN bits always are.
    pub pass_tos: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connect: Duration::from_secs(5),
            idle: None,
            timeout: Duration::from_secs(60),
            half_close: Duration::from_secs(300),
            keepalive: Some(Duration::from_secs(60)),
            sessions: 4096,
            backlog: 4096,
            sockbuf: None,
            refresh: Duration::from_secs(60),
            gro: true,
            gso: true,
            pass_tos: false,
        }
    }
}

/// Why the parts of a rule do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleError {
    /// A listener without a target.
    NoTarget,
    /// The target names no port and the listener's is chosen by the kernel.
    NoTargetPort,
    /// Nothing listens on port 0.
    TargetPortZero,
    /// The two ranges differ in length.
    RangeLength {
        /// The listener's ports.
        listen: Ports,
        /// The target's ports.
        target: Ports,
    },
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RuleError::NoTarget => f.write_str("the listener has no target; add -t HOST:PORT"),
            RuleError::NoTargetPort => f.write_str(
                "the target has no port and the listener's is any free one; give the target a port",
            ),
            RuleError::TargetPortZero => {
                f.write_str("nothing can be reached on port 0; give the target's real port")
            }
            RuleError::RangeLength { listen, target } => write!(
                f,
                "the target's range {target} has {} ports and the listener's {listen} has {}; \
                 make them equal, or give the target one port or none",
                target.len(),
                listen.len()
            ),
        }
    }
}

impl std::error::Error for RuleError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(ports: Ports) -> Listen {
        Listen { host: ListenHost::Any, ports, protocols: Protocols::Both }
    }

    fn target(ports: Option<Ports>) -> Target {
        Target { host: Host::Name("host".into()), ports }
    }

    #[test]
    fn a_range_maps_port_by_port_or_onto_one() {
        let eleven = Ports::range(8000, 8010).unwrap();
        assert_eq!(eleven.len(), 11);
        assert_eq!(target(None).port(3, 8003), 8003);
        assert_eq!(target(Ports::range(9000, 9010)).port(3, 8003), 9003);
        assert_eq!(target(Some(Ports::one(80))).port(3, 8003), 80);
    }

    #[test]
    fn ranges_of_different_lengths_are_refused() {
        let error = Rule::new(
            listen(Ports::range(8000, 8010).unwrap()),
            vec![target(Ports::range(9000, 9002))],
            Limits::default(),
        )
        .unwrap_err();
        assert!(matches!(error, RuleError::RangeLength { .. }), "{error}");
    }

    #[test]
    fn a_free_port_needs_a_target_port() {
        let rule = |ports| Rule::new(listen(Ports::one(0)), vec![target(ports)], Limits::default());
        assert_eq!(rule(None).unwrap_err(), RuleError::NoTargetPort);
        assert_eq!(rule(Some(Ports::one(0))).unwrap_err(), RuleError::TargetPortZero);
        assert!(rule(Some(Ports::one(80))).is_ok());
    }

    #[test]
    fn ranges_run_upwards_from_a_real_port() {
        assert_eq!(Ports::range(10, 10), None);
        assert_eq!(Ports::range(11, 10), None);
        assert_eq!(Ports::range(0, 10), None);
    }
}
