//! Specs, and captures for generators.

use std::collections::{BTreeMap, BTreeSet};

use pdp_spec::{
    Diagnostic, Existing, Object, SourceFile, VirtualNetwork, check, frames, parse, render,
};
use pdpd::intent::model::Model;
use pdpd::plan::DaemonPaths;

/// Name of the file in diagnostics.
const FILE: &str = "s.yaml";

fn source(text: &str) -> SourceFile {
    SourceFile { name: FILE.into(), text: text.into(), attachments: BTreeMap::new() }
}

/// Checks that every diagnostic has a text, and a position unless it concerns no file.
fn check_diagnostics(wrong: &[Diagnostic], sources: &[SourceFile]) {
    assert!(!wrong.is_empty());
    // A single carriage return also ends a line.
    let text = sources[0].text.replace("\r\n", "\n");
    let lines = text.split(['\n', '\r']).count() as u32;
    for diagnostic in wrong {
        assert!(!diagnostic.message.is_empty());
        if diagnostic.file.is_empty() {
            assert_eq!((diagnostic.line, diagnostic.column), (0, 0), "{diagnostic:?}");
        } else {
            assert_eq!(diagnostic.file, FILE);
            assert!((1..=lines + 1).contains(&diagnostic.line), "{diagnostic:?}");
            assert!(diagnostic.column >= 1, "{diagnostic:?}");
        }
    }
    assert!(!render(wrong, sources, false).is_empty());
}

/// A file is refused with positions, or checked, planned
/// and stored. The stored form reads back the same.
pub(crate) fn spec(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let sources = [source(&text)];
    let documents = match parse(&sources) {
        Ok(documents) => documents,
        Err(wrong) => {
            assert!(wrong.iter().all(|wrong| wrong.line > 0), "{wrong:?}");
            return check_diagnostics(&wrong, &sources);
        }
    };
    let cpus: BTreeSet<u32> = (0..4).collect();
    let is_substrate = |object: &Object| matches!(object, Object::Substrate(_));
    let has_substrate = documents.iter().any(|document| is_substrate(&document.object));
    let existing = Model::default().existing(&cpus, has_substrate);
    let intent = match check(&documents, &existing) {
        Ok(intent) => intent,
        Err(wrong) => return check_diagnostics(&wrong, &sources),
    };
    let places = DaemonPaths {
        run: "/run/pdp".into(),
        lib: "/usr/lib/pdp".into(),
        pins: "/sys/fs/bpf/pdp".into(),
    };
    if let Ok(model) = Model::default().with(intent.clone(), &places, &cpus, |_| false) {
        for (name, plan) in &*model.plan.vnets {
            // The mux accepts pdpd's plan.
            assert_eq!(pdp_mux::control::check::check(&plan.mux), Ok(()), "{name}");
        }
        assert!(model.change_from(&model).put.is_empty());
    }
    let vnets = intent.vnets.values();
    let vnets = vnets.map(|vnet| Object::VirtualNetwork(VirtualNetwork::clone(vnet)));
    let substrate = intent.substrate.clone().map(Object::Substrate);
    let objects: Vec<Object> = substrate.into_iter().chain(vnets).collect();
    let stored: Vec<SourceFile> = objects
        .iter()
        .map(|object| source(&serde_json::to_string(object).expect("text")))
        .collect();
    let again = parse(&stored).unwrap_or_else(|wrong| panic!("{wrong:#?}"));
    assert!(objects.iter().eq(again.iter().map(|document| &document.object)));
    let existing = Existing { ..Model::default().existing(&cpus, true) };
    match check(&again, &existing) {
        Ok(second) => assert_eq!(second, intent, "checking what is stored changes nothing"),
        Err(wrong) => panic!("{wrong:#?}"),
    }
}

/// A file accepted as a capture is one for another reader too, with the same frames.
pub(crate) fn pcap(bytes: &[u8]) {
    let Ok(frames) = frames::read(bytes) else { return };
    assert!(!frames.is_empty());
    let mut reader = pcap_file::pcap::PcapReader::new(bytes).expect("a header");
    let mut theirs = Vec::new();
    while let Some(packet) = reader.next_raw_packet() {
        theirs.push(packet.expect("a frame").data.into_owned());
    }
    assert_eq!(frames, theirs);
}
