//! Whatever stands where the kernel writes addresses and control data, reading it never panics, and
//! what was understood survives being written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tinyfwd::sys::control::{
    CONTROL_LEN, NAME_LEN, decode_control, decode_name, encode_control, encode_name,
};

fuzz_target!(|data: &[u8]| {
    if let Some(addr) = decode_name(data) {
        let mut again = [0; NAME_LEN];
        let len = encode_name(Some(addr), &mut again);
        assert_eq!(decode_name(&again[..len]), Some(addr));
    }
    if let Some(local) = decode_control(data).local {
        let mut again = [0; CONTROL_LEN];
        let len = encode_control(Some(local), &mut again);
        assert_eq!(decode_control(&again[..len]).local, Some(local));
    }
});
