//! Removes whitespace between the tokens of the OpenAPI document: it is a third of the size, and only people need it.

use std::path::Path;
use std::{env, fs};

const DOCUMENT: &str = "src/openapi.json";

fn main() {
    println!("cargo::rerun-if-changed={DOCUMENT}");
    println!("cargo::rerun-if-changed=build.rs");
    let mut text = fs::read_to_string(DOCUMENT).expect(DOCUMENT);
    let (mut is_in_string, mut is_escaped) = (false, false);
    text.retain(|c| {
        if c == '"' && !is_escaped {
            is_in_string = !is_in_string;
        }
        is_escaped = is_in_string && c == '\\' && !is_escaped;
        is_in_string || !c.is_ascii_whitespace()
    });
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("openapi.json"), text).expect("OUT_DIR can be written to");
}
