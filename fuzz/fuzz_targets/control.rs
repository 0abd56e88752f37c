//! Whatever stands where the kernel writes addresses and control data, reading it never panics, and
//! what was understood survives being written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tinyfwd::sys::control::{
    Ask, CONTROL_LEN, NAME_LEN, decode_control, decode_name, encode_control, encode_name,
};

fuzz_target!(|data: &[u8]| {
    if let Some(addr) = decode_name(data) {
        let mut again = [0; NAME_LEN];
        let len = encode_name(Some(addr), &mut again);
        assert_eq!(decode_name(&again[..len]), Some(addr));
    }
    let control = decode_control(data);
    let ask = Ask {
        from: control.local,
        segment: control.segment,
        traffic_class: control.traffic_class,
        ipv4: data.len().is_multiple_of(2),
    };
    let mut again = [0; CONTROL_LEN];
    let len = encode_control(&ask, &mut again);
    let written = decode_control(&again[..len]);
    assert_eq!((written.local, written.traffic_class), (control.local, control.traffic_class));
});
