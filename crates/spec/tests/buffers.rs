//! Packets of the mux that queues have set aside: who is refused, and what that is told.

use pdp_spec::{Existing, Intent, SourceFile, check, parse};

const NODE: &str = "
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec: {mux: {cpus: '0-3', workers: WORKERS}}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: acme}
spec: {quota: {QUOTA}}
";

/// A network of one link, whose two ends have as many set aside each.
fn lab(name: &str, each: u32) -> String {
    format!(
        "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes: {{h1: {{kind: host, interfaces: {{eth0: {{}}}}}}, h2: {{kind: host, interfaces: {{eth0: {{}}}}}}}}
  links: [{{endpoints: ['h1:eth0', 'h2:eth0'], rate: 1M, queue: 4096, queues: [{{name: a, buffers: {each}}}]}}]
"
    )
}

fn node(workers: u32, quota: &str) -> String {
    NODE.replace("WORKERS", &workers.to_string()).replace("QUOTA", quota)
}

fn apply(texts: &[String], existing: &Existing) -> Result<Existing, String> {
    let file = SourceFile { name: "f".into(), text: texts.join("---"), ..Default::default() };
    let documents = parse(&[file]).unwrap_or_else(|faults| panic!("{faults:#?}"));
    let Intent { substrate, vnets, tenants } = check(&documents, existing)
        .map_err(|faults| faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
    Ok(Existing { substrate, vnets, tenants, ..existing.clone() })
}

fn machine(workers: u32, quota: &str) -> Existing {
    let machine = Existing { cpus: (0..4).collect(), ..Existing::default() };
    apply(&[node(workers, quota)], &machine).unwrap()
}

#[test]
fn queues_have_half_of_the_packets_of_one_worker() {
    let at = machine(2, "");
    let at = apply(&[lab("a", 2048), lab("b", 1024)], &at).unwrap();
    let words = apply(&[lab("c", 1025)], &at).err().unwrap();
    assert_eq!(
        words,
        "f:7:11: link c/link1: buffers 2050 have no room: queues can have 8192 packets of the mux, of which 2048 are \
         free (ask for less, leave buffers out to share what others leave, take them from another queue, or give the \
         mux fewer workers, which share its packets)"
    );
    // What one gives back another has in the same change, and who stays as it is may.
    let at = apply(&[lab("a", 2047), lab("c", 1025)], &at).unwrap();
    assert!(apply(&[lab("b", 1025)], &at).is_err());
    let at = apply(&[lab("b", 1024)], &at).unwrap();
    // A substrate that leaves less is refused.
    let words = apply(&[node(3, "")], &at).err().unwrap();
    assert!(
        words.contains(
            "3 workers leave 5461 packets for the buffers of queues, below the 8192 that these have"
        ),
        "{words}"
    );
    assert!(apply(&[node(1, "")], &at).is_ok());
}

#[test]
fn a_tenants_queues_have_no_more_than_its_quota_and_it_is_told_nothing_of_others() {
    let at = machine(1, "");
    let words = apply(&[lab("acme.a", 1025)], &at).err().unwrap();
    let said = "buffers: 2050 exceeds tenant acme's quota of 2048, of which its other virtual networks use 0";
    assert!(words.contains(said), "{words}");
    let at = machine(1, "buffers: 3000");
    let at = apply(&[lab("acme.a", 1025), lab("others", 4096), lab("more", 3000)], &at).unwrap();
    let asker = Existing { asker: Some("acme".into()), ..at.clone() };
    let words = apply(&[lab("acme.b", 100)], &asker).err().unwrap();
    assert_eq!(
        words,
        "f:7:11: link acme.b/link1: buffers 200: the mux has no room (ask for less, leave buffers out to share what \
         others leave, or take them from another of your queues)"
    );
    let words = apply(&[node(1, "buffers: 2000")], &at).err().unwrap();
    assert!(
        words.contains("buffers: 2000 is below the 2050 that its virtual networks have"),
        "{words}"
    );
}
