//! What a user writes, turned into what [`crate::rule`] holds, and the one type for what is wrong
//! with it.
//!
//! [`address`] reads listeners and targets, [`options`] is the table of rule options. Both take one
//! word and answer with a reason; whoever split the words (the command line, later a file) knows
//! the place and makes the [`Error`]. Nothing here does I/O, and no input panics.

use std::fmt;

pub mod address;
pub mod options;

/// One thing that is wrong in what the user wrote: where, in which word, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    place: Place,
    token: String,
    reason: String,
}

/// Where a word stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The command line as a whole.
    CommandLine,
    /// An argument of the command line; the first after the program's name is 1.
    Argument(usize),
}

impl Error {
    /// `token` is the word as it was written, empty where no single word is to blame; `reason`
    /// says what is wrong with it and what would be right.
    pub fn new(place: Place, token: &str, reason: &str) -> Error {
        Error { place, token: printable(token), reason: printable(reason) }
    }

    /// Where the word stands.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The word, fit for a terminal.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// What is wrong with it, fit for a terminal.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

impl fmt::Display for Error {
    /// One whole line, without its end, that starts with the place.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::CommandLine => f.write_str("tinyfwd: ")?,
            Place::Argument(number) => write!(f, "tinyfwd: argument {number}, ")?,
        }
        if !self.token.is_empty() {
            write!(f, "'{}': ", self.token)?;
        }
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Error {}

/// The one of `known` that `word` most likely stands for: at most a third of its letters (and one
/// in the shortest) added, left out, changed or swapped with their neighbour.
pub fn near<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut best = None;
    let mut least = usize::MAX;
    for name in known {
        let edits = distance(word.as_bytes(), name.as_bytes());
        if edits <= (name.len() / 3).max(1) && edits < name.len() && edits < least {
            least = edits;
            best = Some(name);
        }
    }
    best
}

/// How many single edits lead from one word to the other; `usize::MAX` for words too long to be
/// a slip of any name.
fn distance(from: &[u8], to: &[u8]) -> usize {
    if from.len() > LONGEST || to.len() > LONGEST {
        return usize::MAX;
    }
    let mut above = [0; LONGEST + 1];
    let mut row = [0; LONGEST + 1];
    for (column, cell) in row.iter_mut().enumerate() {
        *cell = column;
    }
    for (i, a) in from.iter().enumerate() {
        let before = above;
        above = row;
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let changed = above[j] + usize::from(!a.eq_ignore_ascii_case(b));
            let mut edits = changed.min(above[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *a == to[j - 1] && from[i - 1] == *b {
                edits = edits.min(before[j - 1] + 1);
            }
            row[j + 1] = edits;
        }
    }
    row[to.len()]
}

/// `text` with its control characters spelled out: one error stays one line and cannot move the
/// reader's cursor.
fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() {
            shown.extend(letter.escape_default());
        } else {
            shown.push(letter);
        }
    }
    shown
}

/// No name in any table is longer.
const LONGEST: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 5] = ["idle", "timeout", "half-close", "lb", "refresh"];

    fn nearest(word: &str) -> Option<&'static str> {
        near(word, NAMES.into_iter())
    }

    #[test]
    fn an_error_names_the_place_the_word_and_the_reason() {
        let error = Error::new(Place::Argument(3), "-o idel=3", "unknown option 'idel'");
        assert_eq!(error.to_string(), "tinyfwd: argument 3, '-o idel=3': unknown option 'idel'");
        let error = Error::new(Place::CommandLine, "", "nothing to forward");
        assert_eq!(error.to_string(), "tinyfwd: nothing to forward");
    }

    #[test]
    fn an_error_is_one_line_without_control_characters() {
        let error = Error::new(Place::Argument(1), "a\nb\x1b[2J", "bad\r'\u{85}'");
        assert_eq!(error.to_string(), "tinyfwd: argument 1, 'a\\nb\\u{1b}[2J': bad\\r'\\u{85}'");
    }

    #[test]
    fn a_slip_of_the_hand_finds_the_name_that_was_meant() {
        assert_eq!(nearest("idel"), Some("idle"));
        assert_eq!(nearest("Idle"), Some("idle"));
        assert_eq!(nearest("timout"), Some("timeout"));
        assert_eq!(nearest("tiemout"), Some("timeout"));
        assert_eq!(nearest("halfclose"), Some("half-close"));
        assert_eq!(nearest("half_close"), Some("half-close"));
        assert_eq!(nearest("refrsh"), Some("refresh"));
        assert_eq!(nearest("lbb"), Some("lb"));
    }

    #[test]
    fn another_word_finds_nothing() {
        assert_eq!(nearest(""), None);
        assert_eq!(nearest("rate"), None);
        assert_eq!(nearest("transparent"), None);
        assert_eq!(nearest(&"idle".repeat(100)), None);
        assert_eq!(nearest("ünïcödé"), None);
    }

    #[test]
    fn distance_counts_single_edits() {
        assert_eq!(distance(b"", b"abc"), 3);
        assert_eq!(distance(b"abc", b""), 3);
        assert_eq!(distance(b"abc", b"abc"), 0);
        assert_eq!(distance(b"acb", b"abc"), 1);
        assert_eq!(distance(b"kitten", b"sitting"), 3);
    }
}
