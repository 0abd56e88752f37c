//! The tag at the head of every datagram: who sent it, and as which one.
//!
//! 16 bytes: magic (4), client (u32), number (u64); big-endian. The rest of a datagram is filled
//! from its number, so that a reply can be compared whole.

/// Tag of one datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    pub client: u32,
    pub number: u64,
}

impl Tag {
    pub const SIZE: usize = 16;

    /// Writes tag and body over all of `datagram`, which holds at least `SIZE` bytes.
    pub fn fill(self, datagram: &mut [u8]) {
        self.mark(datagram);
        datagram[Self::SIZE..].fill(self.body());
    }

    /// Writes the tag alone.
    pub fn mark(self, datagram: &mut [u8]) {
        datagram[..4].copy_from_slice(&MAGIC);
        datagram[4..8].copy_from_slice(&self.client.to_be_bytes());
        datagram[8..16].copy_from_slice(&self.number.to_be_bytes());
    }

    /// The tag of a datagram, if it has one.
    pub fn read(datagram: &[u8]) -> Option<Self> {
        let (magic, rest) = datagram.split_first_chunk::<4>()?;
        let (client, rest) = rest.split_first_chunk::<4>()?;
        let (number, _) = rest.split_first_chunk::<8>()?;
        (*magic == MAGIC).then_some(Self {
            client: u32::from_be_bytes(*client),
            number: u64::from_be_bytes(*number),
        })
    }

    /// Whether a datagram is what `fill` made, `size` bytes long.
    pub fn is_whole(self, datagram: &[u8], size: usize) -> bool {
        datagram.len() == size
            && datagram.get(Self::SIZE..).is_some_and(|b| b.iter().all(|b| *b == self.body()))
    }

    fn body(self) -> u8 {
        (self.number as u8).wrapping_mul(31).wrapping_add(self.client as u8)
    }
}

const MAGIC: [u8; 4] = *b"tfwu";
