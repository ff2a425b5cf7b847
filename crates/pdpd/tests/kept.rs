//! Messages between processes, and values that are compared after a restart,
//! match `data/kept`. The stored state of this version and of older ones can
//! be read back. `data/kept/README.md` says what to do when a test here fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Write};
use std::fs;
use std::path::{Path, PathBuf};

use pdp_api::{AuditEntry, AuditQuery, Role, Token};
use pdp_container::{
    ProcessOutcome, ProcessState as GuestState, RECORD_VERSION, Runtime, RuntimePaths,
};
use pdp_model::UnderlayProblem;
use pdp_proto::routes::{FromGuest, ToGuest, decode, encode};
use pdp_proto::{mirror, mux, routes, tap};
use pdp_spec::SourceFile;
use pdpd::intent::model::Model;
use pdpd::intent::state::trail::{RequestEnd, Trail, TrailWrite as Row};
use pdpd::intent::state::{JournalEntry, StateFile};
use pdpd::plan::DaemonPaths;
use pdpd::plan::key::ObjectKey;
use pdpd::reconcile::applied::{self, AppliedSettings};
use rusqlite::Connection;
use serde::Serialize;
use serde::de::DeserializeOwned;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/kept")
}

fn kept(name: &str) -> String {
    let path = directory().join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Checks that this version writes a kept file; with `PDP_KEEP` the file is updated.
#[track_caller]
fn keep(name: &str, written: &str, meaning: &str) {
    if std::env::var_os("PDP_KEEP").is_some() {
        fs::write(directory().join(name), written).unwrap();
    }
    let kept = kept(name);
    let (mut was, mut is) = (kept.lines(), written.lines());
    while let (was, is) = (was.next(), is.next())
        && (was, is) != (None, None)
    {
        assert_eq!(was, is, "{name}: {meaning}; data/kept/README.md says what to do");
    }
}

/// Returns the kept databases of this name, one for each version that wrote it. With
/// `PDP_KEEP` that of this version is written once. Existing ones never change.
fn databases(name: &str, written: &Path) -> Vec<String> {
    let own = format!("{name}-{}.sql", env!("CARGO_PKG_VERSION"));
    let path = directory().join(&own);
    if std::env::var_os("PDP_KEEP").is_some() && !path.exists() {
        fs::write(&path, dump(written)).unwrap();
    }
    assert!(path.exists(), "there is no {own}; data/kept/README.md says what to do");
    let entries = fs::read_dir(directory()).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is = |file: &String| {
        let version = file.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
        version.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    names.filter(is).collect()
}

const MESSAGES: &str = "it was written otherwise, and a peer of before may be there";

/// Parses a message and serializes it again.
fn rewritten<M: Serialize + DeserializeOwned>(line: &str) -> (M, String) {
    let message = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    let text = serde_json::to_string(&message).unwrap();
    (message, text)
}

/// Returns the names of a type's variants, from serde's error for an unknown one.
fn variants<M: DeserializeOwned + Debug>() -> Vec<String> {
    let error = serde_json::from_str::<M>("\"none\"").unwrap_err().to_string();
    let names: Vec<String> = error.split('`').skip(3).step_by(2).map(str::to_owned).collect();
    assert!(!names.is_empty(), "{error}");
    names
}

/// Checks that a kept file has every message as this version writes it.
/// Messages of pdpd (or the mirror) follow `>`, answers follow `<`.
fn messages<Q, A>(name: &str, line: impl Fn(&str, &str) -> String)
where
    Q: DeserializeOwned + Debug,
    A: DeserializeOwned + Debug,
{
    let (text, mut written) = (kept(name), String::new());
    for message in text.lines() {
        let (sign, message) = message.split_at(2);
        writeln!(written, "{sign}{}", line(sign, message)).unwrap();
    }
    for (sign, names) in [("> ", variants::<Q>()), ("< ", variants::<A>())] {
        for variant in names {
            let is = |text: &str| text.contains(&format!("\"{variant}\""));
            let found = text.lines().any(|line| line.starts_with(sign) && is(line));
            assert!(found, "{name} has no {variant}: add one");
        }
    }
    keep(name, &written, MESSAGES);
}

#[test]
fn mux_messages_keep_their_format() {
    let name = format!("mux-{}.txt", mux::VERSION);
    messages::<mux::MuxRequest, mux::MuxReply>(&name, |sign, message| match sign {
        "> " => rewritten::<mux::MuxRequest>(message).1,
        _ => rewritten::<mux::MuxReply>(message).1,
    });
    let inner = [
        variants::<mux::OutletConfig>(),
        variants::<mux::AttachMode>(),
        variants::<mux::GuestDistribution>(),
        variants::<mux::FlowKey>(),
        variants::<mux::VlinkEnd>(),
        variants::<mux::Encapsulation>(),
        variants::<UnderlayProblem>(),
    ];
    let text = kept(&name);
    for variant in inner.concat() {
        assert!(text.contains(&format!("\"{variant}\"")), "{name} has no {variant}: add one");
    }
}

#[test]
fn helper_messages_keep_their_format() {
    let name = format!("tap-{}.txt", tap::VERSION);
    messages::<tap::TapRequest, tap::TapReply>(&name, |sign, message| match sign {
        "> " => rewritten::<tap::TapRequest>(message).1,
        _ => rewritten::<tap::TapReply>(message).1,
    });
    let name = format!("mirror-{}.txt", mirror::VERSION);
    messages::<mirror::MirrorRequest, mirror::MirrorReply>(&name, |sign, message| match sign {
        "= " => rewritten::<mirror::MirrorConfig>(message).1,
        "> " => rewritten::<mirror::MirrorRequest>(message).1,
        _ => rewritten::<mirror::MirrorReply>(message).1,
    });
}

/// Processes of earlier builds write other keys, with the same meaning.
#[test]
fn answers_of_earlier_builds_are_read() {
    fn read<A: DeserializeOwned + PartialEq + Debug>(name: &str) {
        let answers = |file: &str| -> Vec<A> {
            let text = kept(file);
            let answers = text.lines().filter_map(|line| line.strip_prefix("< "));
            answers.map(|line| serde_json::from_str(line).expect(line)).collect()
        };
        let now = answers(&format!("{name}.txt"));
        let earlier = answers(&format!("{name}-earlier.txt"));
        assert!(!earlier.is_empty());
        for answer in earlier {
            assert!(now.contains(&answer), "{name}: {answer:#?}");
        }
    }
    read::<mux::MuxReply>(&format!("mux-{}", mux::VERSION));
    read::<tap::TapReply>(&format!("tap-{}", tap::VERSION));
    read::<mirror::MirrorReply>(&format!("mirror-{}", mirror::VERSION));
}

/// Each message as bytes and as JSON.
#[test]
fn route_messages_keep_their_format() {
    fn both<M: Serialize + DeserializeOwned + PartialEq + Debug>(message: &str) -> String {
        let text = message.trim_start_matches(|c: char| c.is_ascii_hexdigit());
        let (message, text) = rewritten::<M>(text.trim_start());
        let frame = encode(std::slice::from_ref(&message)).unwrap();
        assert_eq!(decode::<M>(&frame[4..]).unwrap(), [message]);
        frame.iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}")) + " " + &text
    }
    let name = format!("routes-{}.txt", routes::VERSION);
    messages::<ToGuest, FromGuest>(&name, |sign, message| match sign {
        "> " => both::<ToGuest>(message),
        _ => both::<FromGuest>(message),
    });
}

/// Records that `crates/e2e/tests/e2e/beside/upgrades.rs` finds next to a guest after its end.
#[test]
fn process_records_read_back() {
    let files: BTreeMap<String, serde_json::Value> =
        serde_json::from_str(&kept(&format!("record-{RECORD_VERSION}.json"))).unwrap();
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    let paths = RuntimePaths {
        // Nothing is run.
        runc: "/bin/false".into(),
        shim: "/bin/false".into(),
        init: "/bin/false".into(),
        work: "/bin/false".into(),
        records: at("records"),
        runc_root: at("runc"),
        logs: at("logs"),
        images: at("images"),
        volumes: at("volumes"),
        cgroup: format!("pdp-kept-{}", std::process::id()),
    };
    let runtime = Runtime::new(paths).unwrap();
    let record = at("records/red.r1.g0");
    fs::create_dir(&record).unwrap();
    for (name, content) in files {
        fs::write(record.join(name), content.to_string()).unwrap();
    }
    let exit = ProcessOutcome { code: Some(3), signal: None, at_ms: 1_700_000_000_000 };
    assert_eq!(runtime.state(&record).unwrap(), GuestState::Exited(Some(exit)));
    assert_eq!(runtime.list().unwrap(), [record]);
}

/// All inputs of hashes, in few nodes.
const SPEC: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5, workers: 1}
  interfaces:
    A: {device: extA}
    M: {memif: {mtu: 1400, group: staff}}
  forwardingEngines:
    fe1: {cpus: "1", capacity: 1}
    fe2: {cpus: "2", capacity: 1}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: acme}
spec:
  unixUsers: [alice]
  quota: {vnets: 5, power: 1}
  interfaces: {A: {vxlan: "100-199", locals: [192.0.2.1]}}
  images: [/srv/images/acme]
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: acme.lab}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {eth0: {addresses: [10.0.1.1/24]}, eth1: {addresses: ["2001:db8::1/64"]}}
      files: {/etc/motd: {content: hello, mode: "0600"}}
      commands: [sleep 1]
      env: {LANG: C}
      resources: {routes: 1000}
      dataPlane: {puntLimits: {local: {pps: 20000}}, power: 200m, guests: 2, distribution: {policy: flowlet}}
    h1:
      kind: host
      image: {rootfs: /srv/images/acme/debian}
      interfaces: {eth0: {addresses: [10.0.1.2/24], gateways: [10.0.1.1]}}
  externals:
    out: {interface: A, vxlan: {vni: 100, local: 192.0.2.1, remote: 192.0.2.2}}
  links:
    - {endpoints: ["r1:eth0", "h1:eth0"], rate: 10Mbps, queue: 256}
    - {endpoints: ["r1:eth1", "external:out"], queue: 256}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    taps:
      kind: router
      interfaces: {eth0: {}}
      dataPlane: {puntLimits: {local: {pps: 20000}}, power: 100m, program: {attach: tap, run: [sleep, "1"]}}
    memifs:
      kind: router
      interfaces: {eth0: {}, eth1: {}}
      privileged: true
      dataPlane: {puntLimits: {local: {pps: 20000}}, power: 100m, program: {attach: memif, run: [sleep, "1"], image: {ociLayout: "/srv/images/x:v1"}}}
  externals:
    program: {interface: M}
  links:
    - {endpoints: ["taps:eth0", "memifs:eth0"], queue: 256}
    - {endpoints: ["memifs:eth1", "external:program"], queue: 256}
"#;

fn places() -> DaemonPaths {
    DaemonPaths {
        run: "/run/pdp".into(),
        lib: "/usr/lib/pdp".into(),
        pins: "/sys/fs/bpf/pdp".into(),
    }
}

fn cpus() -> BTreeSet<u32> {
    (0..4).collect()
}

/// The model of [`SPEC`], with a link that a user set down.
fn model() -> Model {
    let file = SourceFile { name: "kept.yaml".into(), text: SPEC.into(), ..SourceFile::default() };
    let documents = pdp_spec::parse(&[file]).unwrap_or_else(|faults| panic!("{faults:#?}"));
    let nothing = Model::default();
    let intent = pdp_spec::check(&documents, &nothing.existing(&cpus(), true))
        .unwrap_or_else(|faults| panic!("{faults:#?}"));
    let before = nothing.with(intent, &places(), &cpus(), |_| false).unwrap();
    let mut model = before.clone();
    model.allocations.set_link("red", "link1", false, false);
    model.replan(&before, ["red"], &places(), &cpus()).unwrap();
    model
}

/// Returns the hashes that a restart of pdpd compares.
fn hashes(model: &Model) -> BTreeMap<ObjectKey, String> {
    let mut hashes =
        BTreeMap::from([(ObjectKey::Mux, model.plan.mux.as_ref().unwrap().hash.clone())]);
    for (vnet, plan) in model.plan.vnets.iter() {
        for (node, plan) in &plan.nodes {
            hashes.insert(ObjectKey::node(vnet, node), plan.hash.clone());
            for (&number, guest) in &plan.guests {
                hashes.insert(ObjectKey::guest(vnet, node, number), guest.hash.clone());
            }
        }
    }
    hashes
}

#[test]
fn upgrade_keeps_all_plan_hashes() {
    let mut written = String::new();
    for (key, hash) in hashes(&model()) {
        writeln!(written, "{key} {hash}").unwrap();
    }
    keep("hashes.txt", &written, "an upgrade would start this anew, of all networks");
}

/// Settings of running guests and hosts, as a restarted pdpd finds them in the journal.
#[test]
fn applied_settings_keep_their_format() {
    let mut written = String::new();
    let mut write = |key: ObjectKey, settings: AppliedSettings| {
        let text = settings.to_journal();
        assert_eq!(AppliedSettings::from_journal(&text), settings);
        writeln!(written, "{key} {text}").unwrap();
    };
    for (vnet, plan) in model().plan.vnets.iter() {
        for (node, plan) in &plan.nodes {
            write(ObjectKey::node(vnet, node), AppliedSettings::of_node(plan));
            for (&number, guest) in &plan.guests {
                write(ObjectKey::guest(vnet, node, number), AppliedSettings::of_guest(guest));
            }
        }
    }
    let name = format!("applied-{}.txt", applied::VERSION);
    for line in fs::read_to_string(directory().join(&name)).unwrap_or_default().lines() {
        let (_, text) = line.split_at(line.find('{').unwrap());
        assert_ne!(AppliedSettings::from_journal(text), AppliedSettings::default(), "{line}");
    }
    keep(&name, &written, "an upgrade would apply these again");
}

/// Dumps a database as SQL statements.
fn dump(path: &Path) -> String {
    let db = Connection::open(path).unwrap();
    let all = |sql: &str| -> Vec<String> {
        let mut statement = db.prepare(sql).unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    };
    let version: i64 = db.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    let mut text = format!("PRAGMA user_version={version};\n");
    let own = "FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'";
    for sql in all(&format!("SELECT sql {own} AND sql IS NOT NULL ORDER BY type DESC, name")) {
        writeln!(text, "{};", sql.split_whitespace().collect::<Vec<_>>().join(" ")).unwrap();
    }
    for table in all(&format!("SELECT name {own} AND type='table' ORDER BY name")) {
        let columns =
            all(&format!("SELECT 'quote(' || name || ')' FROM pragma_table_info('{table}')"));
        let values = columns.join(" || ', ' || ");
        let sql = format!("SELECT {values} FROM {table} ORDER BY 1");
        for row in all(&sql) {
            writeln!(text, "INSERT INTO {table} VALUES ({row});").unwrap();
        }
    }
    text
}

fn load(path: &Path, sql: &str) {
    Connection::open(path).unwrap().execute_batch(sql).unwrap();
}

/// Time of everything in the kept files, milliseconds since 1970.
const AT_MS: u64 = 1_700_000_000_000;

fn tokens() -> Vec<Token> {
    let token = |id, role, tenant: Option<&str>, expires_ms| {
        let tenant = tenant.map(str::to_owned);
        Token { id, role, tenant, created_ms: AT_MS, expires_ms }
    };
    vec![
        token(1, Role::Operator, None, None),
        token(2, Role::Tenant, Some("acme"), Some(AT_MS + 1000)),
        token(3, Role::Viewer, Some("acme"), None),
    ]
}

/// The journal: everything in [`model`], and one object that may exist partly.
fn journal() -> BTreeMap<String, JournalEntry> {
    let limits = r#"{"limits":{}}"#;
    let made = hashes(&model()).into_keys().map(|key| (Some(format!("of {key}")), key, limits));
    let half = (None, ObjectKey::external("A"), "/sys/fs/bpf/pdp/A");
    let vnet = (Some(String::new()), ObjectKey::vnet("red"), "");
    let entry = |(hash, key, detail): (Option<String>, ObjectKey, &str)| {
        (key.to_string(), JournalEntry { hash, detail: detail.into() })
    };
    made.chain([half, vnet]).map(entry).collect()
}

#[test]
fn state_files_of_every_version_are_read() {
    let model = model();
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("pdpd.sqlite");
    {
        let state = StateFile::open(place.path()).unwrap();
        state.commit(&model.change_from(&Model::default())).unwrap();
        for (key, JournalEntry { hash, detail }) in journal() {
            match hash {
                Some(hash) => state.confirm(&key, &hash, &detail).unwrap(),
                None => state.intend(&key, &detail).unwrap(),
            }
        }
        for token in tokens() {
            let hash = [u8::try_from(token.id).unwrap(); 32];
            let tenant = token.tenant.as_deref();
            state.put_token(&hash, token.role, tenant, token.expires_ms).unwrap();
        }
    }
    load(&path, &format!("UPDATE tokens SET created_ms={AT_MS}"));
    for name in databases("state", &path) {
        let place = tempfile::tempdir().unwrap();
        load(&place.path().join("pdpd.sqlite"), &kept(&name));
        let state = StateFile::open(place.path()).unwrap();
        assert!(!state.is_new(), "{name}");
        let loaded = Model::load(
            &places(),
            &cpus(),
            &state.documents().unwrap(),
            state.allocations().unwrap(),
        );
        assert_eq!(loaded.unwrap(), model, "{name}");
        assert_eq!(state.tokens().unwrap(), tokens(), "{name}");
        assert_eq!(state.token(&[2; 32]).unwrap().as_ref(), tokens().get(1), "{name}");
        let found = state.journal().unwrap();
        assert_eq!(found, journal(), "{name}");
        for key in found.keys() {
            key.parse::<ObjectKey>().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

/// Entries of an operator, a tenant and an unknown client. The last one is not finished.
fn rows() -> Vec<AuditEntry> {
    let row = |id, who: &str, role, tenant: Option<&str>, what: &str, status| AuditEntry {
        id,
        at_ms: AT_MS + id,
        who: who.into(),
        from: "pid 7".into(),
        role,
        tenant: tenant.map(str::to_owned),
        what: what.into(),
        status,
        duration_us: status.map(|_| 12),
        ..AuditEntry::default()
    };
    let (tenant, acme) = (Some(Role::Tenant), Some("acme"));
    vec![
        AuditEntry {
            changes: true,
            ..row(1, "user:root", Some(Role::Operator), None, "POST /v1/apply", Some(200))
        },
        AuditEntry {
            error: Some("no vnet acme.none".into()),
            vnet: Some("acme.none".into()),
            ..row(2, "token:2", tenant, acme, "GET /v1/vnets/acme.none", Some(404))
        },
        row(3, "token:?", None, None, "GET /v1/vnets", Some(401)),
        AuditEntry {
            changes: true,
            vnet: Some("acme.lab".into()),
            ..row(4, "token:2", tenant, acme, "POST /v1/vnets/acme.lab/nodes/h1/exec", None)
        },
    ]
}

#[track_caller]
fn is_read(trail: &Trail, rows: &[AuditEntry], what: &str) {
    assert_eq!(trail.entries(&AuditQuery::default(), None).unwrap(), rows, "{what}");
    let of_acme: Vec<_> = rows.iter().filter(|row| row.tenant.is_some()).cloned().collect();
    assert_eq!(trail.entries(&AuditQuery::default(), Some("acme")).unwrap(), of_acme, "{what}");
}

#[test]
fn audit_logs_of_every_version_are_read() {
    let place = tempfile::tempdir().unwrap();
    let mut all = rows();
    {
        let trail = Trail::open(place.path()).unwrap();
        let writes: Vec<Row> =
            all.iter().map(|row| Row::Entry(Box::new(row.clone()), 50)).collect();
        let ids = trail.write(&writes).unwrap();
        let error = Some("broken off".to_owned());
        let end =
            RequestEnd { status: 101, error: error.clone(), duration_us: 34, exit_code: Some(7) };
        trail.write(&[Row::Command(ids[3], "ping ::1".into()), Row::End(ids[3], end)]).unwrap();
        all[3].command = Some("ping ::1".into());
        (all[3].status, all[3].error) = (Some(101), error);
        (all[3].duration_us, all[3].exit) = (Some(34), Some(7));
        is_read(&trail, &all, "as it was written");
    }
    let path = place.path().join("audit.sqlite");
    for name in databases("audit", &path) {
        let place = tempfile::tempdir().unwrap();
        load(&place.path().join("audit.sqlite"), &kept(&name));
        is_read(&Trail::open(place.path()).unwrap(), &all, &name);
    }
}

/// A state file of a version in which the audit log was one of its tables.
#[test]
fn audit_log_in_old_state_file_is_migrated() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("pdpd.sqlite");
    load(&path, &kept("state-0.1.0.sql"));
    for what in ["taken over", "after a crash between copying and removing", "taken over before"] {
        if what != "taken over before" {
            load(&path, &kept("audit-in-state.sql"));
        }
        let state = StateFile::open(place.path()).unwrap();
        is_read(&state.trail, &rows(), what);
        assert_eq!(state.tokens().unwrap(), tokens(), "{what}");
        drop(state);
        assert!(!dump(&path).contains("audit"), "{what}: it is gone from the state");
    }
}
