//! Batches of datagrams: `recvmmsg` and `sendmmsg` with control data of its own for each datagram.
//!
//! The only module with `unsafe`. The crates that wrap these calls either send the same control data
//! with every datagram of a batch, or lose the lengths of addresses and control data when headers
//! are used again; here each header is written anew before each call. What addresses and control
//! data mean is the business of [`super::control`].
#![allow(unsafe_code)]

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use super::control::{self, Ask, CONTROL_LEN, Control, NAME_LEN};

/// A datagram to be sent, or a run of them that the kernel takes apart again.
pub struct Outgoing {
    /// How many of the parts it is made of, following those of the one before it.
    pub parts: usize,
    /// Where it goes; `None` on a connected socket.
    pub to: Option<SocketAddr>,
    /// How it is to be sent.
    pub ask: Ask,
}

/// Room for the headers of one batch.
pub struct Batch {
    headers: Vec<libc::mmsghdr>,
    buffers: Vec<libc::iovec>,
    extras: Vec<Extra>,
}

/// Address and control data of one datagram, aligned as `struct cmsghdr` must be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Extra {
    control: [u8; CONTROL_LEN],
    name: [u8; NAME_LEN],
}

impl Batch {
    /// Room for `count` datagrams.
    pub fn new(count: usize) -> Batch {
        // SAFETY: all zeros (null pointers, no lengths) is a valid value of these C structs.
        let (header, buffer) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        Batch {
            headers: vec![header; count],
            buffers: vec![buffer; count],
            extras: vec![Extra { control: [0; CONTROL_LEN], name: [0; NAME_LEN] }; count],
        }
    }

    /// Receives datagrams without waiting, each into a slot of `slot_len` bytes of `arena`.
    /// Returns how many came.
    pub fn receive(
        &mut self,
        socket: BorrowedFd,
        arena: &mut [u8],
        slot_len: usize,
    ) -> io::Result<usize> {
        let count = self.headers.len().min(arena.len() / slot_len);
        for (index, slot) in arena.chunks_exact_mut(slot_len).take(count).enumerate() {
            self.buffers[index] =
                libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
            self.fill(index, index..index + 1, NAME_LEN, CONTROL_LEN);
        }
        // SAFETY: the first `count` headers were just filled. Their pointers lead to `arena`, which
        // is borrowed mutably until this returns, and to elements of `self.buffers` and
        // `self.extras`, which do not move meanwhile; each length is that of what it belongs to.
        let got = unsafe {
            let headers = self.headers.as_mut_ptr();
            libc::recvmmsg(socket.as_raw_fd(), headers, count as _, FLAGS as _, ptr::null_mut())
        };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }

    /// Length, sender and control data of the `index`th datagram of the last [`receive`](Self::receive).
    // The width of a length differs between the C libraries.
    #[allow(clippy::unnecessary_cast)]
    pub fn received(&self, index: usize) -> (usize, Option<SocketAddr>, Control) {
        let (header, extra) = (&self.headers[index], &self.extras[index]);
        let name = &extra.name[..NAME_LEN.min(header.msg_hdr.msg_namelen as usize)];
        let data = &extra.control[..CONTROL_LEN.min(header.msg_hdr.msg_controllen as usize)];
        (header.msg_len as usize, control::decode_name(name), control::decode_control(data))
    }

    /// Sends datagrams in order without waiting; returns how many went. An error is that of the
    /// first one and means that none went. `parts` are places in `arena`; there may not be more of
    /// them, nor of `datagrams`, than the batch has room for.
    pub fn send(
        &mut self,
        socket: BorrowedFd,
        arena: &[u8],
        datagrams: &[Outgoing],
        parts: &[Range<usize>],
    ) -> io::Result<usize> {
        for (buffer, part) in self.buffers.iter_mut().zip(parts) {
            let bytes = &arena[part.clone()];
            *buffer =
                libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        }
        let mut first = 0;
        for (index, datagram) in datagrams.iter().enumerate() {
            let extra = &mut self.extras[index];
            let name_len = control::encode_name(datagram.to, &mut extra.name);
            let control_len = control::encode_control(&datagram.ask, &mut extra.control);
            let buffers = first..first + datagram.parts;
            assert!(buffers.end <= parts.len(), "a datagram's parts are among those given");
            first = buffers.end;
            self.fill(index, buffers, name_len, control_len);
        }
        // The system call itself: musl's function of this name sends one by one. Its headers differ
        // from the kernel's only in padding, which is zero here as the kernel wants it.
        // SAFETY: as in `receive`; the parts are places in `arena`, which is borrowed until this
        // returns, and sending only reads them.
        let sent = unsafe {
            let headers = self.headers.as_mut_ptr();
            let count = datagrams.len() as libc::c_uint;
            libc::syscall(libc::SYS_sendmmsg, socket.as_raw_fd(), headers, count, FLAGS)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Points the `index`th header at these buffers and at its name and control data; a length of 0
    /// means that there is no name or no control data.
    fn fill(&mut self, index: usize, buffers: Range<usize>, name: usize, control: usize) {
        let extra = &mut self.extras[index];
        let header = &mut self.headers[index].msg_hdr;
        header.msg_name = if name > 0 { extra.name.as_mut_ptr().cast() } else { ptr::null_mut() };
        header.msg_namelen = name as _;
        header.msg_iovlen = buffers.len() as _;
        header.msg_iov = self.buffers[buffers].as_mut_ptr();
        let data = extra.control.as_mut_ptr().cast();
        header.msg_control = if control > 0 { data } else { ptr::null_mut() };
        header.msg_controllen = control as _;
        header.msg_flags = 0;
    }
}

const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
