//! What an event belongs to: a [`Token`] is a role, a slab key and a generation, packed into the one
//! word that the poll hands back.
//!
//! Slab keys are reused, so a key alone could deliver an event of a socket that is gone to the one
//! that took its place; the generation tells them apart. No token is made anywhere but here.

/// Who an event is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The signal descriptor.
    Signals,
    /// Answers of the lookup thread are there.
    Names,
    /// A TCP listener, by its index.
    TcpListener,
    /// A UDP listener, by its index.
    UdpListener,
    /// The client's side of a pair.
    Client,
    /// The target's side of a pair: the attempt that the socket was opened for, modulo
    /// [`ATTEMPTS`].
    Target(u8),
    /// The socket of a UDP flow.
    Flow,
}

/// How many connection attempts of one pair can be told apart at a time.
pub const ATTEMPTS: u8 = 16;

/// A role, a slab key and a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Who the event is for.
    pub role: Role,
    /// The slab key or index.
    pub key: u32,
    /// Which of the users of this key, modulo a power of two.
    pub generation: u32,
}

impl Token {
    /// A token; what does not fit of the generation is cut off.
    pub fn new(role: Role, key: u32, generation: u32) -> Token {
        debug_assert!(key as usize <= KEY_MASK);
        Token { role, key, generation: generation & GENERATION_MASK as u32 }
    }

    /// Whether this token was made for `generation`.
    pub fn is_of(&self, generation: u32) -> bool {
        self.generation == generation & GENERATION_MASK as u32
    }
}

impl From<Token> for mio::Token {
    fn from(token: Token) -> mio::Token {
        let role = match token.role {
            Role::Signals => 0,
            Role::Names => 1,
            Role::TcpListener => 2,
            Role::UdpListener => 3,
            Role::Client => 4,
            Role::Flow => 5,
            Role::Target(attempt) => FIRST_TARGET + usize::from(attempt % ATTEMPTS),
        };
        mio::Token(
            role << (KEY_BITS + GENERATION_BITS)
                | (token.generation as usize) << KEY_BITS
                | token.key as usize,
        )
    }
}

impl From<mio::Token> for Token {
    fn from(mio::Token(word): mio::Token) -> Token {
        let role = match word >> (KEY_BITS + GENERATION_BITS) {
            0 => Role::Signals,
            1 => Role::Names,
            2 => Role::TcpListener,
            3 => Role::UdpListener,
            4 => Role::Client,
            5 => Role::Flow,
            target => Role::Target((target - FIRST_TARGET) as u8 % ATTEMPTS),
        };
        Token {
            role,
            key: (word & KEY_MASK) as u32,
            generation: (word >> KEY_BITS & GENERATION_MASK) as u32,
        }
    }
}

const FIRST_TARGET: usize = 6;

// A 32-bit machine keeps room for a million sockets and 128 generations.
const KEY_BITS: u32 = if usize::BITS == 64 { 32 } else { 20 };
const GENERATION_BITS: u32 = if usize::BITS == 64 { 24 } else { 7 };
const KEY_MASK: usize = (1 << KEY_BITS) - 1;
const GENERATION_MASK: usize = (1 << GENERATION_BITS) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_the_poll() {
        let roles = [
            Role::Signals,
            Role::Names,
            Role::TcpListener,
            Role::UdpListener,
            Role::Client,
            Role::Flow,
            Role::Target(0),
            Role::Target(ATTEMPTS - 1),
        ];
        for role in roles {
            for key in [0, 1, 70_000, KEY_MASK as u32] {
                for generation in [0, 1, 77, GENERATION_MASK as u32] {
                    let token = Token::new(role, key, generation);
                    assert_eq!(Token::from(mio::Token::from(token)), token);
                }
            }
        }
    }

    #[test]
    fn a_generation_is_told_from_its_neighbours_and_wraps() {
        let token = Token::new(Role::Client, 7, u32::MAX);
        assert!(token.is_of(u32::MAX));
        assert!(!token.is_of(u32::MAX - 1));
        assert!(!token.is_of(0));
    }
}
