//! Socket addresses and control data as Linux lays them out in memory, read and written as bytes.
//!
//! Plain safe code: what comes from the kernel is never indexed without a check, and what is unknown
//! or cut short is passed over.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The local address of a datagram, with the interface where an IPv6 link-local address needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// The address that the datagram was sent to, or is to be sent from.
    pub ip: IpAddr,
    /// Interface index; 0 leaves the choice to the routing.
    pub interface: u32,
}

/// What the control data of a received datagram says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// The address that it was sent to, where the socket was asked to tell.
    pub local: Option<Local>,
}

/// Reads the control data of one received datagram.
pub fn decode_control(data: &[u8]) -> Control {
    let mut control = Control::default();
    let mut rest = data;
    while let Some((len, level, kind)) = decode_header(rest) {
        let Some(body) = rest.get(HEADER..len) else { break };
        match (level, kind, body.len()) {
            // struct in_pktinfo: interface, local address, destination as it stands in the packet
            (libc::IPPROTO_IP, libc::IP_PKTINFO, 12..) => {
                let ip = Ipv4Addr::from(array(body, 4));
                control.local = Some(Local { ip: ip.into(), interface: 0 });
            }
            // struct in6_pktinfo: destination, interface
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, 20..) => {
                let ip = Ipv6Addr::from(array(body, 0));
                // Only a link-local address means nothing without its interface; with any other
                // the answer may leave by another way than the question came.
                let scoped = ip.is_unicast_link_local();
                let interface = if scoped { u32::from_ne_bytes(array(body, 16)) } else { 0 };
                control.local = Some(Local { ip: ip.into(), interface });
            }
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(WORD)..).unwrap_or_default();
    }
    control
}

/// Writes control data that sets the address a datagram leaves from; returns its length.
pub fn encode_control(from: Option<Local>, into: &mut [u8; CONTROL_LEN]) -> usize {
    let Some(from) = from else { return 0 };
    let (level, kind, body) = match from.ip {
        IpAddr::V4(ip) => {
            into[HEADER..][..12].fill(0);
            into[HEADER + 4..][..4].copy_from_slice(&ip.octets());
            (libc::IPPROTO_IP, libc::IP_PKTINFO, 12)
        }
        IpAddr::V6(ip) => {
            into[HEADER..][..16].copy_from_slice(&ip.octets());
            into[HEADER + 16..][..4].copy_from_slice(&from.interface.to_ne_bytes());
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, 20)
        }
    };
    into[..WORD].copy_from_slice(&(HEADER + body).to_ne_bytes());
    into[HEADER - 8..][..4].copy_from_slice(&level.to_ne_bytes());
    into[HEADER - 4..][..4].copy_from_slice(&kind.to_ne_bytes());
    (HEADER + body).next_multiple_of(WORD)
}

/// Reads a socket address; `None` when it is not one of IPv4 or IPv6.
pub fn decode_name(name: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(*name.first_chunk()?);
    let port = u16::from_be_bytes(array(name, 2));
    match (i32::from(family), name.len()) {
        (libc::AF_INET, 16..) => Some((Ipv4Addr::from(array(name, 4)), port).into()),
        (libc::AF_INET6, 28..) => {
            let (ip, scope) = (Ipv6Addr::from(array(name, 8)), u32::from_ne_bytes(array(name, 24)));
            Some(SocketAddrV6::new(ip, port, 0, scope).into())
        }
        _ => None,
    }
}

/// Writes a socket address; returns its length, 0 for none.
pub fn encode_name(to: Option<SocketAddr>, into: &mut [u8; NAME_LEN]) -> usize {
    let Some(to) = to else { return 0 };
    into.fill(0);
    into[2..4].copy_from_slice(&to.port().to_be_bytes());
    let (family, len) = match to {
        SocketAddr::V4(to) => {
            into[4..8].copy_from_slice(&to.ip().octets());
            (libc::AF_INET, 16)
        }
        SocketAddr::V6(to) => {
            into[8..24].copy_from_slice(&to.ip().octets());
            into[24..28].copy_from_slice(&to.scope_id().to_ne_bytes());
            (libc::AF_INET6, 28)
        }
    };
    into[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    len
}

/// Length, level and type of a `struct cmsghdr` that is there whole.
fn decode_header(data: &[u8]) -> Option<(usize, i32, i32)> {
    let header = data.get(..HEADER)?;
    let len = usize::from_ne_bytes(array(header, 0));
    let level = i32::from_ne_bytes(array(header, HEADER - 8));
    let kind = i32::from_ne_bytes(array(header, HEADER - 4));
    (len >= HEADER).then_some((len, level, kind))
}

/// The `N` bytes at `at`, zeros where there are none.
fn array<const N: usize>(data: &[u8], at: usize) -> [u8; N] {
    data.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

/// Room for a socket address: `struct sockaddr_in6` has 28 bytes.
pub const NAME_LEN: usize = 32;

/// Room for the control data of a datagram: packet info takes 40 bytes with its header.
pub const CONTROL_LEN: usize = 80;

/// `struct cmsghdr`: a length of word size, level and type of four bytes each.
const HEADER: usize = WORD + 8;

/// Control messages start at multiples of this.
const WORD: usize = size_of::<usize>();

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn control_round_trip(ip: &str, interface: u32) {
        let local = Local { ip: ip.parse().unwrap(), interface };
        let mut data = [0xff; CONTROL_LEN];
        let len = encode_control(Some(local), &mut data);
        assert_eq!(decode_control(&data[..len]).local, Some(local));
        // Every cut of it is passed over.
        for cut in 0..HEADER + 12 {
            assert_eq!(decode_control(&data[..cut]).local, None, "cut at {cut}");
        }
    }

    #[test]
    fn a_local_address_survives_encoding() {
        control_round_trip("127.0.0.2", 0);
        control_round_trip("2001:db8::7", 0);
        control_round_trip("::ffff:127.0.0.2", 0);
        control_round_trip("fe80::1", 3);
    }

    #[test]
    fn only_a_link_local_address_keeps_its_interface() {
        let mut data = [0; CONTROL_LEN];
        let from = Local { ip: "2001:db8::7".parse().unwrap(), interface: 3 };
        let len = encode_control(Some(from), &mut data);
        assert_eq!(decode_control(&data[..len]).local, Some(Local { interface: 0, ..from }));
    }

    #[test]
    fn a_socket_address_survives_encoding() {
        for addr in ["1.2.3.4:80", "[2001:db8::7]:65535", "[fe80::1%4]:1"] {
            let addr: SocketAddr = addr.parse().unwrap();
            let mut data = [0xff; NAME_LEN];
            let len = encode_name(Some(addr), &mut data);
            assert_eq!(decode_name(&data[..len]), Some(addr));
            assert_eq!(decode_name(&data[..len - 1]), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(data in prop::collection::vec(any::<u8>(), 0..120)) {
            decode_control(&data);
            decode_name(&data);
        }
    }
}
