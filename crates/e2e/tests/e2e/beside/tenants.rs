//! Two tenants with the same addresses on one node: one is a user of the machine, one uses a token
//! over TLS. Each has its own networks, and neither learns of the other; a third has nothing.

use std::fs;

use pdp_e2e::identity::PdpUser;
use pdp_e2e::{TestNode, eventually};
use serde_json::Value;

/// A user of the machine that is a tenant, and one that is not.
const ACME: u32 = 71_001;
const NOBODY: u32 = 71_002;

const ADDRESS: &str = "127.0.0.1:7443";

const NODE: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  forwardingEngines: {fe1: {cpus: "1", capacity: 0.5}}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: acme}
spec:
  unixUsers: ["71001"]
  quota: {power: 0.4, vnets: 2, vports: 20}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: zeta}
spec:
  quota: {power: 0.5}
"#;

fn vnet(name: &str, power: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {{eth0: {{addresses: [10.1.0.1/24]}}, eth1: {{addresses: [10.2.0.1/24]}}}}
      dataPlane: {{power: {power}}}
    h1:
      kind: host
      interfaces: {{eth0: {{addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}}
      files: {{/etc/motd: {{content: "{name}"}}}}
    h2:
      kind: host
      interfaces: {{eth0: {{addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#
    )
}

#[test]
fn tenants_see_only_their_own_objects() {
    let mut node = TestNode::prepare("tenants");
    node.pdpd_arguments(&["--listen", ADDRESS]);
    node.start_pdpd();
    node.apply(NODE);
    let token = node.directory.join("zeta.token");
    let secret = node.pdp(&["token", "create", "--tenant", "zeta", "--expires", "1h"]);
    fs::write(&token, &secret).expect("token");
    let acme = PdpUser::user(&node, ACME);
    let zeta = PdpUser::token(&node, ADDRESS, &token);
    let everybody = [("acme", &acme, "zeta"), ("zeta", &zeta, "acme")];

    // Each reaches its own network by the same addresses.
    for (name, who, _) in everybody {
        let lab = format!("{name}.lab");
        who.pdp(&["apply", "-f", "-"], &vnet(&lab, "0.2"))
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    for (name, who, _) in everybody {
        let h1 = format!("{name}.lab/h1");
        eventually("its hosts reach each other", || {
            who.pdp(&["exec", "-n", &h1, "--", "ping", "-c1", "-W1", "10.2.0.2"], "").is_ok()
        });
        let motd = who.pdp(&["exec", "-n", &h1, "--", "cat", "/etc/motd"], "");
        assert_eq!(motd, Ok(format!("{name}.lab")));
    }

    for (name, who, other) in everybody {
        // Lists, counters and the substrate contain nothing of the other tenant.
        for verb in
            [&["get"][..], &["get", "tenants"], &["stats"], &["inspect", "substrate"], &["audit"]]
        {
            let text = who.json(verb).to_string();
            assert!(text.contains(name) || *verb == ["stats"], "{verb:?} as {name}: {text}");
            assert!(!text.contains(other), "{verb:?} as {name}: {text}");
        }
        let stats = who.json(&["stats"]);
        let vnets: Vec<&String> = stats["vnets"].as_object().expect("vnets").keys().collect();
        assert_eq!(vnets, [&format!("{name}.lab")]);
        assert_eq!(
            (&stats["workers"], &stats["externals"]),
            (&Value::from(Vec::<Value>::new()), &serde_json::json!({}))
        );
        let engine = &who.json(&["inspect", "substrate"])["status"]["fes"][0];
        assert_eq!(engine["usedMillicores"], 200, "its own alone");

        // For every request, another tenant's object looks like a missing one.
        let existing = format!("{other}.lab");
        let none = format!("{other}.none");
        for verb in [
            &["inspect", "VNET"][..],
            &["delete", "VNET"],
            &["stats", "VNET"],
            &["exec", "-n", "VNET/h1", "--", "true"],
            &["logs", "VNET/r1"],
            &["routes", "VNET/r1"],
            &["capture", "VNET/r1:eth0", "-w", "-"],
            &["trace", "VNET/r1:eth0", "--wait", "1"],
            &["scale", "VNET/r1", "2"],
            &["link", "down", "VNET/link1"],
        ] {
            let ask = |vnet: &str| {
                let words: Vec<String> =
                    verb.iter().map(|word| word.replace("VNET", vnet)).collect();
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                who.pdp(&words, "")
            };
            let (one, two) = (ask(&existing), ask(&none));
            let (one, two) = (one.expect_err("not its"), two.expect_err("not there"));
            assert_eq!(one.replace(&existing, &none), two, "{verb:?} as {name}");
        }
        // Nor can it be taken over, or the node be changed.
        for text in [vnet(&existing, "0.1"), vnet("lab", "0.1"), NODE.to_owned()] {
            let refused = who.pdp(&["apply", "-f", "-"], &text).expect_err("not its to apply");
            assert!(refused.contains("nothing was changed"), "{refused}");
        }
        for verb in [
            &["delete", "substrate"][..],
            &["delete", "tenant/acme"],
            &["down"],
            &["logs"],
            &["doctor"],
            &["token", "list"],
            &["token", "create", "--role", "operator"],
            &["token", "revoke", "1"],
        ] {
            let refused = who.pdp(verb, "").expect_err("an operator's");
            assert!(refused.contains("the role tenant may not do this"), "{verb:?}: {refused}");
        }
    }

    // The quota applies first. Within it, a full node is reported without naming its users.
    let more = acme.pdp(&["apply", "-f", "-"], &vnet("acme.two", "0.3")).expect_err("too much");
    assert!(more.contains("quota of 0.4, of which its other virtual networks use 0.2"), "{more}");
    let full = zeta.pdp(&["apply", "-f", "-"], &vnet("zeta.two", "0.2")).expect_err("no room");
    let first = full.lines().next().unwrap_or_default();
    assert!(
        first.ends_with("power 0.2 exceeds the free power of the forwarding engines"),
        "{full}"
    );
    assert!(!full.contains("acme") && !full.contains("fe1"), "{full}");

    // A user without a tenant has nothing.
    let nobody = PdpUser::user(&node, NOBODY);
    let bad = node.directory.join("bad.token");
    fs::write(&bad, "pdp_0").expect("token");
    let stranger = PdpUser::token(&node, ADDRESS, &bad);
    for (who, reason) in [(&nobody, "unknown user "), (&stranger, "the token is unknown")] {
        for verb in [&["get"][..], &["inspect", "acme.lab"], &["version"], &["audit"]] {
            let refused = who.pdp(verb, "").expect_err("nobody");
            assert!(refused.contains(reason), "{verb:?}: {refused}");
            assert!(!refused.contains("acme.lab\n"), "{refused}");
        }
    }

    // The audit log has all of it, and survives a crash, as do
    // tenants and tokens. Reading it first writes recent refusals.
    node.pdp(&["audit"]);
    node.kill_pdpd();
    node.start_pdpd();
    let rows = node.json(&["audit", "--limit", "10000"]);
    let rows = rows.as_array().expect("rows");
    let has = |who: &str, what: &str, status: u64| {
        rows.iter().any(|row| row["who"] == who && row["what"] == what && row["status"] == status)
    };
    assert!(has("user:71001", "POST /v1/apply", 200));
    assert!(has("token:1", "POST /v1/apply", 200));
    assert!(has("user:71001", "POST /v1/apply", 400));
    assert!(has("token:1", "DELETE /v1/vnets/acme.lab", 404));
    assert!(has("user:71002", "GET /v1/vnets", 403));
    assert!(has("token:?", "GET /v1/vnets", 401));
    assert!(!rows.iter().any(|row| row.to_string().contains(secret.trim())));
    // The network's name finds the request that created it, although its path lacks the name.
    let found = node.json(&["audit", "--vnet", "zeta.lab"]);
    let created = |row: &Value| {
        let object = &row["objects"][0];
        row["what"] == "POST /v1/apply"
            && object["object"] == "vnet/zeta.lab"
            && object["action"] == "create"
    };
    assert!(found.as_array().is_some_and(|rows| rows.iter().any(created)), "{found}");
    let own = zeta.json(&["audit", "--limit", "10000"]);
    let own = own.as_array().expect("rows");
    assert!(own.iter().all(|row| row["who"] == "token:1" && row["tenant"] == "zeta"));
    assert_eq!(acme.json(&["get"])[0]["name"], "acme.lab");
    assert_eq!(zeta.json(&["get"])[0]["name"], "zeta.lab");

    // A tenant is deleted with its tokens, once it has no vnets.
    let refused = node.try_pdp(&["delete", "tenant/zeta"]).expect_err("it has a vnet");
    assert!(refused.contains("tenant zeta has zeta.lab"), "{refused}");
    zeta.pdp(&["delete", "zeta.lab"], "").expect("its own");
    node.pdp(&["delete", "tenant/zeta"]);
    let refused = zeta.pdp(&["get"], "").expect_err("no token any more");
    assert!(refused.contains("the token is unknown"), "{refused}");

    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), Vec::<String>::new());
}
