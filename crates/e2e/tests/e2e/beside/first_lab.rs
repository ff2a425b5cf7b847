//! docs/first-lab.md can be followed. The test runs its commands as written, and their output
//! matches the page, except for numbers that vary.

use std::fs;

use pdp_e2e::TestNode;

use super::examples::{Shell, blocks, fenced, read};

const PAGE: &str = "docs/first-lab.md";

/// Words of a line. Any kind of number (a time, an id, a counter)
/// becomes `#`, except addresses of labs and hop counts.
fn loosely(line: &str) -> Vec<String> {
    let word = |word: &str| {
        let word = word.trim_end_matches([',', ':']);
        if word.starts_with("10.") || word.starts_with("ttl=") {
            return word.to_owned();
        }
        let mut loose = String::new();
        for c in word.chars() {
            match c {
                '0'..='9' | '.' if loose.ends_with('#') => {}
                '0'..='9' => loose.push('#'),
                _ => loose.push(c),
            }
        }
        loose
    };
    line.split_whitespace().map(word).collect()
}

/// True if a promised line is within a printed one: its words consecutively and in this order.
fn is_within(promised: &str, printed: &str) -> bool {
    let (promised, printed) = (loosely(promised), loosely(printed));
    printed.windows(promised.len().max(1)).any(|window| window == promised)
}

#[test]
fn promised_output_is_matched_loosely() {
    let is = |promised: &str| {
        is_within(promised, "64 bytes from 10.2.0.2: icmp_seq=3 ttl=63 time=12 ms")
    };
    assert!(is("64 bytes from 10.2.0.2: icmp_seq=1 ttl=63 time=0.51 ms"));
    assert!(is("from 10.2.0.2:"));
    assert!(!is("64 bytes from 10.2.0.2: icmp_seq=1 ttl=62 time=1 ms"));
    assert!(!is("64 bytes from 10.2.0.3: icmp_seq=1 ttl=63 time=1 ms"));
    assert!(!is("3 packets transmitted"));
}

#[test]
fn the_first_lab_can_be_followed() {
    let node = TestNode::start("first-lab");
    let page = read(PAGE);
    assert!(read("README.md").contains(PAGE), "README links it");
    // The reader does this; it built the programs that run here.
    let install = blocks(&page, "bash").concat();
    assert!(install.contains("make install") && read("Makefile").contains("\ninstall: "));

    let mut shell = Shell::new(&node);
    let [lab] = &blocks(&page, "yaml")[..] else { panic!("one lab") };
    let (file, pcap) = (node.directory.join("lab.yaml"), node.directory.join("lab.pcap"));
    fs::write(&file, lab).expect("a spec");
    shell.instead = vec![("lab.yaml", file), ("lab.pcap", pcap)];

    let mut printed = String::new();
    let mut ran = 0;
    for (language, block) in fenced(&page) {
        match language.as_str() {
            "sh" => {
                printed = shell.run(&block);
                ran += 1;
            }
            "" => {
                let mut left = printed.lines();
                for promised in block.lines() {
                    assert!(
                        left.any(|line| is_within(promised, line)),
                        "{PAGE} promises\n{block}\nnot, in this order,\n{printed}"
                    );
                }
            }
            _ => {}
        }
    }
    assert!(ran >= 9, "{ran} blocks of commands");
}
