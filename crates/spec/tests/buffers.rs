//! Packets of the mux reserved by queues: which changes are rejected, and with which message.

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

/// A network with one link, whose two ends reserve `each` packets.
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
fn queues_may_use_half_a_workers_packets() {
    let at = machine(2, "");
    let at = apply(&[lab("a", 2048), lab("b", 1024)], &at).unwrap();
    let words = apply(&[lab("c", 1025)], &at).err().unwrap();
    assert_eq!(
        words,
        "f:7:11: link c/link1: buffers 2050 exceed the 2048 free: queues can reserve 8192 of the \
         mux's packets (lower buffers, leave the key out to share unreserved packets, lower those \
         of another queue, or give the mux fewer workers, which split its packets)"
    );
    // Another network in the same change gets what one releases, and an unchanged one may stay.
    let at = apply(&[lab("a", 2047), lab("c", 1025)], &at).unwrap();
    assert!(apply(&[lab("b", 1025)], &at).is_err());
    let at = apply(&[lab("b", 1024)], &at).unwrap();
    // A substrate with too few packets is rejected.
    let words = apply(&[node(3, "")], &at).err().unwrap();
    assert!(
        words.contains(
            "3 workers leave 5461 packets for buffers of queues, but queues reserve 8192"
        ),
        "{words}"
    );
    assert!(apply(&[node(1, "")], &at).is_ok());
}

#[test]
fn tenant_queues_obey_quota_without_revealing_others() {
    let at = machine(1, "");
    let words = apply(&[lab("acme.a", 1025)], &at).err().unwrap();
    let said = "buffers: 2050 exceeds tenant acme's quota of 2048, of which its other virtual networks use 0";
    assert!(words.contains(said), "{words}");
    let at = machine(1, "buffers: 3000");
    let at = apply(&[lab("acme.a", 1025), lab("others", 4096), lab("more", 3000)], &at).unwrap();
    let asker = Existing { requester: Some("acme".into()), ..at.clone() };
    let words = apply(&[lab("acme.b", 100)], &asker).err().unwrap();
    assert_eq!(
        words,
        "f:7:11: link acme.b/link1: buffers 200 exceed the mux's free packets (lower buffers, \
         leave the key out to share unreserved packets, or lower those of another of your queues)"
    );
    let words = apply(&[node(1, "buffers: 2000")], &at).err().unwrap();
    assert!(
        words.contains("buffers: 2000 is below the 2050 that its virtual networks have"),
        "{words}"
    );
}
