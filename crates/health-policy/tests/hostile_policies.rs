//! The cost of policy documents that are made to be expensive, counted in the bytes that reading them allocates.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use serde_json::{Value, json};

/// Maximum bytes of a text.
const TEXT_MAX: usize = 10 << 20;
/// Maximum values of a document, with aliases expanded.
const VALUES_MAX: usize = 500_000;
/// The most rules that an import may have.
const RULES_MAX: usize = 10_000;
/// The most bytes to allocate per value, and per byte of the text.
const PER_VALUE: usize = 512;
const PER_BYTE: usize = 8;

/// The system allocator, counting the bytes that each thread gets.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

fn count(bytes: usize) {
    ALLOCATED.set(ALLOCATED.get() + bytes);
}

// SAFETY: everything is delegated to the system allocator. Counting does not allocate: the counter is a plain number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller upholds the contract.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of `work`, and the bytes that it allocated.
fn counted<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATED.get();
    let result = work();
    (result, ALLOCATED.get() - before)
}

/// A list of this many allow rules.
fn rules(count: usize) -> String {
    let rule = r#"{"labels": ["a"], "endpointSelector": {}, "ingress": [{}]}"#;
    format!("[{}]", vec![rule; count].join(","))
}

/// A policy with this single ingress allow rule.
fn ingress(entry: Value) -> String {
    json!({
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "p"},
        "spec": {"endpointSelector": {}, "ingress": [entry]},
    })
    .to_string()
}

/// Lists that each have ten times the items of the one before.
fn bomb() -> String {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for i in 1..12 {
        let alias = format!("*a{}", i - 1);
        text += &format!("a{i}: &a{i} [{}]\n", vec![alias; 10].join(", "));
    }
    text
}

/// Reads a document of at most `values` values, and checks the cost against them.
fn read(document: &str, values: usize) -> Result<usize, String> {
    let (read, cost) = counted(|| health_policy::parse(document));
    let limit = values.min(VALUES_MAX) * PER_VALUE + document.len() * PER_BYTE;
    let result = read.map(|found| found.policies.len());
    let result = result.map_err(|error| error.to_string());
    assert!(cost <= limit, "{cost} of {limit} bytes: {result:.100?}");
    result
}

#[test]
fn hostile_documents_cost_what_honest_ones_of_their_size_do() {
    // Each value takes at least one byte.
    let honest = rules(RULES_MAX);
    assert_eq!(read(&honest, honest.len()), Ok(1));
    let exploded = read(&bomb(), usize::MAX).unwrap_err();
    let is_reported = exploded.contains("the document has more than 500000 values");
    assert!(is_reported && exploded.len() < 400, "{exploded}");
    let many_items = format!("[{}]", vec!["[]"; 3_000_000].join(","));
    let many_labels: serde_json::Map<_, _> =
        (0..10_000).map(|i| (format!("k{i}"), json!("v"))).collect();
    let many_ports: Vec<Value> = (1..=41).map(|i| json!({"port": i})).collect();
    let many_cidrs: Vec<String> = (0..20_000_u32)
        .map(|i| std::net::Ipv4Addr::from(i << 8).to_string())
        .collect();
    for (document, message) in [
        ("[".repeat(10_000), "not JSON: recursion limit exceeded"),
        (format!("a:\n{}", "- ".repeat(10_000)), "line 2"),
        (many_items, "the document has more than 500000 values"),
        (
            format!("[\"{}\"]", "x".repeat(TEXT_MAX)),
            "bytes; at most 10485760 are allowed",
        ),
        (
            format!("kind: \"{}\"", "x".repeat(9 << 20)),
            "xxx...\" is not a policy kind",
        ),
        (rules(100_000), "the document has more than 500000 values"),
        (
            rules(20_000),
            "too many entries: 20000; at most 10000 are allowed",
        ),
        (
            ingress(json!({"fromEndpoints": [{"matchLabels": many_labels}]})),
            "fromEndpoints[0].matchLabels: too many entries: 10000; at most 256",
        ),
        (
            ingress(json!({"toPorts": [{"ports": many_ports}]})),
            "toPorts[0].ports: too many entries: 41; at most 40 are allowed",
        ),
        (
            ingress(json!({"fromCIDR": many_cidrs})),
            "fromCIDR: too many entries: 20000",
        ),
    ] {
        let error = read(&document, document.len()).unwrap_err();
        assert!(error.contains(message), "{error}");
        assert!(error.len() < 400, "{error}");
    }
}
