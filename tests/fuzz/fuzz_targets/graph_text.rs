//! Bytes as the text form of a graph: an error, or a graph that prints as it is read.

#![no_main]

use fuzz::deep;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    deep(|| {
        let Ok(text) = std::str::from_utf8(bytes) else {
            return;
        };
        let Ok(read) = graph::parse(text) else { return };
        // Whatever it says.
        drop(graph::verify(&read));
        let printed = read.to_string();
        let again = graph::parse(&printed).expect("what is printed is parsed");
        assert_eq!(again.to_string(), printed);
    });
});
