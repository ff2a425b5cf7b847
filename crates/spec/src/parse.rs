//! Parser from spec files to objects.
//!
//! This module reads no files. [`SourceFile::attachments`] provides the files that `from:`
//! and `frames:` name. The side that has the files fills it with [`SourceFile::read`].

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::diagnostic::Diagnostic;
use crate::expand::{self, SharedSettings};
use crate::frames;
use crate::limits::{DIAGNOSTICS_MAX, FILE_BYTES_MAX, PCAP_BYTES_MAX};
use crate::nearest::nearest;
use crate::object::Object;
use crate::schema;
use crate::shape::{self, join_alternatives};
use crate::source::SourceFile;
use crate::tree::{self, JsonPointer, SchemaFault, TextPosition, Tree, YamlValue};
use crate::units::Base64;

impl SourceFile {
    /// Makes a spec file and reads the files that it names with `read`. `read` gets the path
    /// as written and the maximum number of bytes, and returns the content or an error.
    pub fn read(
        name: impl Into<String>,
        text: impl Into<String>,
        read: impl Fn(&str, usize) -> Result<Vec<u8>, String>,
    ) -> Self {
        let (name, text) = (name.into(), text.into());
        let mut attachments = BTreeMap::new();
        for mut document in tree::read(&text).unwrap_or_default() {
            // Errors of expansion are reported later, whatever files it names.
            let _ = write_out(&mut document);
            for_each_named(&document.value, |path, kind| {
                attachments.entry(path.to_owned()).or_insert_with(|| match kind {
                    NamedFile::Text => String::from_utf8(read(path, FILE_BYTES_MAX)?)
                        .map_err(|_| "not UTF-8 text".to_owned()),
                    NamedFile::Frames => Ok(Base64(read(path, PCAP_BYTES_MAX)?.into()).to_string()),
                });
            });
        }
        Self { name, text, attachments }
    }
}

/// Kind of a file that a spec names.
enum NamedFile {
    /// A `from` in `spec.nodes.*.files` or `spec.nodes.*.dataPlane.program.files`.
    Text,
    /// A `spec.interfaces.*.generator.frames`.
    Frames,
}

/// Calls `found` with the path of each file that a document names.
fn for_each_named(document: &YamlValue, mut found: impl FnMut(&str, NamedFile)) {
    fn entries(value: Option<&Tree>) -> &[(TextPosition, String, Tree)] {
        match value.map(|tree| &tree.value) {
            Some(YamlValue::Map(entries)) => entries,
            _ => &[],
        }
    }
    let Some(spec) = document.get("spec") else { return };
    for (_, _, node) in entries(spec.value.get("nodes")) {
        let program = node.value.get("dataPlane").and_then(|plane| plane.value.get("program"));
        let of_program = entries(program.and_then(|program| program.value.get("files")));
        for (_, _, file) in entries(node.value.get("files")).iter().chain(of_program) {
            if let Some(path) = file.value.text("from") {
                found(path, NamedFile::Text);
            }
        }
    }
    for (_, _, interface) in entries(spec.value.get("interfaces")) {
        let generator = interface.value.get("generator");
        if let Some(path) = generator.and_then(|generator| generator.value.text("frames")) {
            found(path, NamedFile::Frames);
        }
    }
}

/// An object and the positions of its parts.
#[derive(Clone, Debug)]
pub struct Document {
    /// The object; files have their `content`, and `from` is removed.
    pub object: Object,
    file: String,
    positions: BTreeMap<String, TextPosition>,
}

impl Document {
    /// Makes a document of an object that was not read
    /// from a file. It has neither `from` nor `frames`.
    pub fn from_object(object: Object) -> Self {
        Self { object, file: String::new(), positions: BTreeMap::new() }
    }

    /// Returns the document with another object, whose links have other positions.
    #[must_use]
    pub fn with(&self, object: Object) -> Self {
        let mut places = self.positions.clone();
        places.retain(|path, _| !path.starts_with("/spec/links/"));
        Self { object, file: self.file.clone(), positions: places }
    }

    /// Returns a diagnostic about the value at a path of keys (`["spec", "nodes", "r1"]`).
    /// If the value is not in the file, its nearest parent is marked.
    pub fn diagnostic(
        &self,
        path: &[&str],
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> Diagnostic {
        self.at(&JsonPointer::of(path), message, hint)
    }

    /// Returns the user-visible name of the object at a
    /// path. A link has its own name, as in commands.
    fn label(&self, path: &JsonPointer) -> String {
        let segments = path.segments();
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        if let (Object::VirtualNetwork(vnet), ["spec", "links", index, ..]) =
            (&self.object, segments.as_slice())
            && let Some(link) =
                index.parse().ok().and_then(|index: usize| vnet.spec.links.get(index))
            && let Some(name) = &link.name
        {
            return format!("link {}/{name}", vnet.metadata.name);
        }
        label(self.object.kind(), self.object.name(), path)
    }

    pub(crate) fn at(
        &self,
        path: &JsonPointer,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> Diagnostic {
        let mut here = Some(path.clone());
        let mut place = None;
        while let (None, Some(path)) = (place, &here) {
            place = self.positions.get(path.as_str()).copied();
            here = path.parent();
        }
        let (line, column) = place.unwrap_or((1, 1));
        Diagnostic {
            file: self.file.clone(),
            line,
            column,
            object: self.label(path),
            message: message.into(),
            hint: hint.into(),
        }
    }
}

/// Returns the user-visible name of the object at a path.
pub(crate) fn label(kind: &str, name: &str, path: &JsonPointer) -> String {
    let segments = path.segments();
    let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
    match (kind, segments.as_slice()) {
        ("VirtualNetwork", ["spec", "nodes", node, "interfaces", interface, ..]) => {
            format!("vport {name}/{node}:{interface}")
        }
        ("VirtualNetwork", ["spec", "nodes", node, ..]) => format!("node {name}/{node}"),
        ("VirtualNetwork", ["spec", "externals", external, ..]) => {
            format!("external {name}/{external}")
        }
        ("VirtualNetwork", ["spec", "links", index, ..]) => {
            let number = index.parse::<usize>().map_or(0, |index| index + 1);
            format!("link {name}/link{number}")
        }
        ("VirtualNetwork", _) => format!("vnet {name}"),
        ("Tenant", _) => format!("tenant {name}"),
        ("Substrate", ["spec", "forwardingEngines", engine, ..]) => {
            format!("forwarding engine {engine}")
        }
        ("Substrate", ["spec", "interfaces", interface, ..]) => {
            format!("external interface {interface}")
        }
        ("Substrate", ["spec", "mux", ..]) => "mux".into(),
        ("Substrate", _) => format!("substrate {name}"),
        _ => String::new(),
    }
}

/// Returns the objects of all documents of all files. Their shape
/// is valid; [`crate::check`] checks how they fit together.
///
/// # Errors
/// All errors, in the order of the files, at most [`DIAGNOSTICS_MAX`].
pub fn parse(files: &[SourceFile]) -> Result<Vec<Document>, Vec<Diagnostic>> {
    let mut documents = Vec::new();
    let mut diagnostics = Vec::new();
    for file in files {
        match tree::read(&file.text) {
            Ok(trees) => {
                for tree in trees {
                    documents.extend(parse_document(file, tree, &mut diagnostics));
                }
            }
            Err(syntax) => diagnostics.push(Diagnostic {
                file: file.name.clone(),
                line: syntax.place.0,
                column: syntax.place.1,
                object: String::new(),
                hint: match &syntax.message {
                    text if text.contains("flow mapping") => {
                        "correct the YAML; within { }, quote names with [ ]".into()
                    }
                    text if text.contains("a spec file has at most") => {
                        "split it into several files".into()
                    }
                    _ => "correct the YAML".into(),
                },
                message: syntax.message,
            }),
        }
    }
    if documents.is_empty() && diagnostics.is_empty() {
        diagnostics.extend(files.iter().map(|file| Diagnostic {
            file: file.name.clone(),
            line: 1,
            column: 1,
            object: String::new(),
            message: "the file has no object".into(),
            hint: "add one: apiVersion, kind, metadata, spec".into(),
        }));
    }
    if diagnostics.is_empty() { Ok(documents) } else { Err(at_most(diagnostics)) }
}

/// Returns the first [`DIAGNOSTICS_MAX`], and a last one with the number of omitted ones.
pub(crate) fn at_most(mut diagnostics: Vec<Diagnostic>) -> Vec<Diagnostic> {
    if diagnostics.len() > DIAGNOSTICS_MAX {
        let more = diagnostics.len() - DIAGNOSTICS_MAX;
        diagnostics.truncate(DIAGNOSTICS_MAX);
        diagnostics.push(Diagnostic { message: format!("and {more} more"), ..Default::default() });
    }
    diagnostics
}

/// Expands a virtual network's document to single nodes and links.
fn write_out(document: &mut Tree) -> Result<Option<Vec<SharedSettings>>, Vec<SchemaFault>> {
    match document.value.text("kind") {
        Some("VirtualNetwork") => expand::expand(document),
        _ => Ok(None),
    }
}

/// Advice for a file of another tool: containerlab's has `topology`, one of docker compose
/// `services`.
fn foreign(tree: &Tree) -> Option<&'static str> {
    let has = |key| tree.value.get(key).is_some();
    if has("topology") {
        Some(
            "this looks like a containerlab file; write its nodes and links as spec.nodes and \
             spec.links (examples/ospf.yaml)",
        )
    } else if has("services") {
        Some(
            "this looks like a docker compose file; write its services as nodes of kind host \
             (examples/lan.yaml)",
        )
    } else {
        None
    }
}

fn parse_document(
    file: &SourceFile,
    mut tree: Tree,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Document> {
    let found = diagnostics.len();
    let mut report = |place: TextPosition, object: String, message: String, hint: String| {
        let file = file.name.clone();
        diagnostics.push(Diagnostic {
            file,
            line: place.0,
            column: place.1,
            object,
            message,
            hint,
        });
    };
    let kinds = ["Substrate", "VirtualNetwork", "Tenant"];
    let kind = &*tree.value.text("kind").unwrap_or("").to_owned();
    let Some(schema) = schema::of_kind(kind) else {
        let place = tree.value.get("kind").map_or(tree.position, |kind| kind.position);
        let hint = match nearest(kind, kinds.into_iter()) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => foreign(&tree)
                .unwrap_or("write kind: Substrate, kind: VirtualNetwork or kind: Tenant")
                .into(),
        };
        report(
            place,
            String::new(),
            match kind {
                "" => format!("kind is missing: use {}", join_alternatives(&kinds)),
                _ => format!("unknown kind {kind:?}: use {}", join_alternatives(&kinds)),
            },
            hint,
        );
        return None;
    };
    let name = tree.value.get("metadata").and_then(|m| m.value.text("name"));
    let name = &*name.unwrap_or("?").to_owned();
    let mut report = |fault: SchemaFault| {
        report(fault.position, label(kind, name, &fault.path), fault.message, fault.hint);
    };
    match write_out(&mut tree) {
        Ok(None) => shape::faults(&schema, &tree).into_iter().for_each(report),
        Ok(Some(shared)) => {
            shape::numbers(&schema, &mut tree);
            let shared = shared.into_iter().flat_map(|(path, mut tree, of)| {
                shape::numbers_of_part(&schema, of, &mut tree);
                shape::faults_of_part(&schema, of, &tree, &path)
            });
            // Errors in shared settings are reported once.
            let mut reported = BTreeSet::new();
            for fault in shared.chain(shape::faults(&schema, &tree)) {
                let words: String = fault.message.chars().filter(|c| !c.is_ascii_digit()).collect();
                if reported.insert((fault.position, words)) {
                    report(fault);
                }
            }
        }
        Err(faults) => faults.into_iter().for_each(report),
    }
    if diagnostics.len() > found {
        return None;
    }
    let object = match Object::deserialize(&tree) {
        Ok(object) => object,
        Err(error) => {
            diagnostics.push(Diagnostic {
                file: file.name.clone(),
                line: tree.position.0,
                column: tree.position.1,
                object: label(kind, name, &JsonPointer::root()),
                message: error.to_string(),
                hint: String::new(),
            });
            return None;
        }
    };
    let mut document = Document { object, file: file.name.clone(), positions: tree.positions() };
    let faults = attach(&mut document, &file.attachments);
    diagnostics.extend(faults);
    Some(document)
}

/// Replaces references to a file by its content.
fn attach(
    document: &mut Document,
    attachments: &BTreeMap<String, Result<String, String>>,
) -> Vec<Diagnostic> {
    let mut faults = Vec::new();
    let mut object = document.object.clone();
    let mut content = |from: &str, at: &JsonPointer| {
        let why = match attachments.get(from) {
            Some(Ok(text)) => return Some(text),
            Some(Err(why)) => format!(": {why}"),
            None => " not found".into(),
        };
        let hint = "paths are relative to the spec file";
        faults.push(document.at(at, format!("file {from:?}{why}"), hint));
        None
    };
    let mut wrong = Vec::new();
    match &mut object {
        Object::VirtualNetwork(vnet) => {
            for (node_name, node) in &mut vnet.spec.nodes {
                let plane = node.data_plane.as_mut().and_then(|plane| plane.guests_mut());
                let program = plane.and_then(|plane| plane.program.own_mut());
                let program = program.map(|program| &mut program.files);
                let own = node.files.iter_mut().map(|(path, file)| (&["files"][..], path, file));
                let of_program = program.into_iter().flatten();
                let of_program = of_program
                    .map(|(path, file)| (&["dataPlane", "program", "files"][..], path, file));
                for (key, path, file) in own.chain(of_program) {
                    let Some(from) = file.from.clone() else { continue };
                    let at = [&["spec", "nodes", node_name], key, &[path, "from"]].concat();
                    let at = JsonPointer::of(&at);
                    let Some(text) = content(&from, &at) else { continue };
                    let bytes = text.len();
                    if bytes > FILE_BYTES_MAX {
                        let message =
                            format!("file {from:?} has {bytes} bytes, {FILE_BYTES_MAX} at most");
                        wrong.push((at, message, "put it into the image instead"));
                    } else if file.content.is_some() {
                        let message = format!("file {path} has content and from");
                        wrong.push((at, message, "give one of them"));
                    } else {
                        file.content = Some(text.clone());
                        file.from = None;
                    }
                }
            }
        }
        Object::Tenant(_) => {}
        Object::Substrate(substrate) => {
            for (name, interface) in &mut substrate.spec.interfaces {
                let Some(generator) = &mut interface.generator else { continue };
                let Some(from) = generator.frames.clone() else { continue };
                let at = JsonPointer::of(&["spec", "interfaces", name, "generator", "frames"]);
                let Some(text) = content(&from, &at) else { continue };
                let pcap = text.parse::<Base64>().map_err(|bad| bad.problem).and_then(|pcap| {
                    frames::read(&pcap.0).map_err(|bad| bad.to_string())?;
                    Ok(pcap)
                });
                match pcap {
                    Err(problem) => {
                        let hint = "give frames of Ethernet in pcap format";
                        wrong.push((at, format!("file {from:?} {problem}"), hint));
                    }
                    Ok(_) if generator.pcap.is_some() => {
                        let message = "generator has frames and pcap".to_owned();
                        wrong.push((at, message, "give one of them"));
                    }
                    Ok(pcap) => {
                        generator.pcap = Some(pcap);
                        generator.frames = None;
                    }
                }
            }
        }
    }
    faults.extend(wrong.into_iter().map(|(at, message, hint)| document.at(&at, message, hint)));
    document.object = object;
    faults
}
