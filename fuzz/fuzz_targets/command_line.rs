//! Any command line is either understood or answered with errors that can be shown.
#![no_main]

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use libfuzzer_sys::fuzz_target;
use tinyfwd::cli;

fuzz_target!(|data: &[u8]| {
    let words = data.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec()));
    if let Err(errors) = cli::parse(words) {
        assert!(!errors.is_empty());
        for error in errors {
            assert!(!error.to_string().is_empty());
        }
    }
});
