//! Spec files to objects.
//!
//! No file is read here: what `from:` and `frames:` name comes with [`SourceFile::attachments`],
//! which [`SourceFile::read`] fills on the side of who has the files.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::diagnostic::Diagnostic;
use crate::expand::{self, Expanded};
use crate::frames;
use crate::limits::{DIAGNOSTICS_MAX, FILE_BYTES_MAX, PCAP_BYTES_MAX};
use crate::object::{DataPlane, Object};
use crate::schema;
use crate::shape::{self, Fault, nearest, or};
use crate::tree::{self, Path, Place, Tree, Value};
use crate::units::Base64;

/// A spec file and the files that it names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SourceFile {
    /// Its name, for diagnostics.
    pub name: String,
    /// Its text.
    pub text: String,
    /// What `from:` and a generator's `frames:` name, by the path as written, or why it can't be
    /// had: text as it is, frames in base64.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, Attachment>)]
    pub attachments: BTreeMap<String, Result<String, String>>,
}

/// How an attachment is written.
#[derive(utoipa::ToSchema)]
#[expect(dead_code, reason = "a Result is written like this")]
enum Attachment {
    /// What is in the file.
    Ok(String),
    /// Why it can't be had.
    Err(String),
}

impl SourceFile {
    /// A spec file with what it names read by `read`, which gets the path as written and the most
    /// bytes, and says why it can't be had where it can't.
    pub fn read(
        name: impl Into<String>,
        text: impl Into<String>,
        read: impl Fn(&str, usize) -> Result<Vec<u8>, String>,
    ) -> Self {
        let (name, text) = (name.into(), text.into());
        let mut attachments = BTreeMap::new();
        for document in tree::read(&text).unwrap_or_default() {
            // What can't be written out is refused later, whatever it names.
            let expanded = written_out(&document).ok().flatten();
            let document = expanded.map_or(document, |expanded| expanded.document);
            for_each_named(&document.value, |path, kind| {
                attachments.entry(path.to_owned()).or_insert_with(|| match kind {
                    Named::Text => String::from_utf8(read(path, FILE_BYTES_MAX)?)
                        .map_err(|_| "not UTF-8 text".to_owned()),
                    Named::Frames => Ok(Base64(read(path, PCAP_BYTES_MAX)?.into()).to_string()),
                });
            });
        }
        Self { name, text, attachments }
    }
}

/// What a file is that a spec names.
enum Named {
    /// A `from` in `spec.nodes.*.files` or `spec.nodes.*.dataPlane.program.files`.
    Text,
    /// A `spec.interfaces.*.generator.frames`.
    Frames,
}

/// Calls `found` with each path of a file that a document names.
fn for_each_named(document: &Value, mut found: impl FnMut(&str, Named)) {
    fn entries(value: Option<&Tree>) -> &[(Place, String, Tree)] {
        match value.map(|tree| &tree.value) {
            Some(Value::Map(entries)) => entries,
            _ => &[],
        }
    }
    let Some(spec) = document.get("spec") else { return };
    for (_, _, node) in entries(spec.value.get("nodes")) {
        let program = node.value.get("dataPlane").and_then(|plane| plane.value.get("program"));
        let of_program = entries(program.and_then(|program| program.value.get("files")));
        for (_, _, file) in entries(node.value.get("files")).iter().chain(of_program) {
            if let Some(path) = file.value.text("from") {
                found(path, Named::Text);
            }
        }
    }
    for (_, _, interface) in entries(spec.value.get("interfaces")) {
        let generator = interface.value.get("generator");
        if let Some(path) = generator.and_then(|generator| generator.value.text("frames")) {
            found(path, Named::Frames);
        }
    }
}

/// An object and where its parts stand.
#[derive(Clone, Debug)]
pub struct Document {
    /// The object; files have their content, `from` is gone.
    pub object: Object,
    file: String,
    places: BTreeMap<String, Place>,
}

impl Document {
    /// Of an object that was not read from a file, and has neither `from` nor `frames`.
    pub fn made(object: Object) -> Self {
        Self { object, file: String::new(), places: BTreeMap::new() }
    }

    /// The same with another object, whose links are not where this one's are.
    #[must_use]
    pub fn with(&self, object: Object) -> Self {
        let mut places = self.places.clone();
        places.retain(|path, _| !path.starts_with("/spec/links/"));
        Self { object, file: self.file.clone(), places }
    }

    /// A diagnostic about the value at a path of keys (`["spec", "nodes", "r1"]`), or where that
    /// is not written, about the nearest that is.
    pub fn diagnostic(
        &self,
        path: &[&str],
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> Diagnostic {
        self.at(&Path::of(path), message, hint)
    }

    /// What people call the object at a path; a link by its own name, as commands want it.
    fn label(&self, path: &Path) -> String {
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
        path: &Path,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> Diagnostic {
        let mut here = Some(path.clone());
        let mut place = None;
        while let (None, Some(path)) = (place, &here) {
            place = self.places.get(path.as_str()).copied();
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

/// What people call the object at a path.
pub(crate) fn label(kind: &str, name: &str, path: &Path) -> String {
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

/// The objects of all documents of all files. They have the right shape; whether they fit
/// together is for [`crate::check`].
///
/// # Errors
/// Everything that is wrong, in the order of the files, at most [`DIAGNOSTICS_MAX`].
pub fn parse(files: &[SourceFile]) -> Result<Vec<Document>, Vec<Diagnostic>> {
    let mut documents = Vec::new();
    let mut diagnostics = Vec::new();
    for file in files {
        match tree::read(&file.text) {
            Ok(trees) => {
                for tree in trees {
                    documents.extend(parse_document(file, &tree, &mut diagnostics));
                }
            }
            Err(syntax) => diagnostics.push(Diagnostic {
                file: file.name.clone(),
                line: syntax.place.0,
                column: syntax.place.1,
                object: String::new(),
                hint: match &syntax.message {
                    text if text.contains("flow mapping") => {
                        "correct the YAML; within { } a name with [ ] needs quotes".into()
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
            message: "there is no object in the file".into(),
            hint: "describe one: apiVersion, kind, metadata, spec".into(),
        }));
    }
    if diagnostics.is_empty() { Ok(documents) } else { Err(at_most(diagnostics)) }
}

/// The first [`DIAGNOSTICS_MAX`], and a last one that says how many are left out.
pub(crate) fn at_most(mut diagnostics: Vec<Diagnostic>) -> Vec<Diagnostic> {
    if diagnostics.len() > DIAGNOSTICS_MAX {
        let more = diagnostics.len() - DIAGNOSTICS_MAX;
        diagnostics.truncate(DIAGNOSTICS_MAX);
        diagnostics.push(Diagnostic { message: format!("and {more} more"), ..Default::default() });
    }
    diagnostics
}

/// A virtual network's document with each node and link for itself.
fn written_out(document: &Tree) -> Result<Option<Expanded>, Vec<Fault>> {
    match document.value.text("kind") {
        Some("VirtualNetwork") => expand::expand(document),
        _ => Ok(None),
    }
}

/// Advice for a file of another tool: containerlab's has `topology`, one of docker compose `services`.
fn foreign(tree: &Tree) -> Option<&'static str> {
    let has = |key| tree.value.get(key).is_some();
    if has("topology") {
        Some(
            "this looks like a containerlab file; its nodes and links become spec.nodes and spec.links \
             (examples/ospf.yaml)",
        )
    } else if has("services") {
        Some(
            "this looks like a file of docker compose; its services become nodes of kind host \
             (examples/lan.yaml)",
        )
    } else {
        None
    }
}

fn parse_document(
    file: &SourceFile,
    tree: &Tree,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Document> {
    let found = diagnostics.len();
    let mut report = |place: Place, object: String, message: String, hint: String| {
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
    let kind = tree.value.text("kind").unwrap_or("");
    let Some(schema) = schema::of_kind(kind) else {
        let place = tree.value.get("kind").map_or(tree.place, |kind| kind.place);
        let hint = match nearest(kind, kinds.into_iter()) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => foreign(tree)
                .unwrap_or("write kind: Substrate, kind: VirtualNetwork or kind: Tenant")
                .into(),
        };
        report(
            place,
            String::new(),
            match kind {
                "" => format!("kind is missing: use {}", or(&kinds)),
                _ => format!("unknown kind {kind:?}: use {}", or(&kinds)),
            },
            hint,
        );
        return None;
    };
    let name = tree.value.get("metadata").and_then(|m| m.value.text("name")).unwrap_or("?");
    let mut report = |fault: Fault| {
        report(fault.place, label(kind, name, &fault.path), fault.message, fault.hint);
    };
    let expanded = match written_out(tree) {
        Ok(None) => None,
        Ok(Some(Expanded { mut document, given })) => {
            shape::numbers(&schema, &mut document);
            let given = given.into_iter().flat_map(|(path, mut tree, of)| {
                shape::numbers_of_part(&schema, of, &mut tree);
                shape::faults_of_part(&schema, of, &tree, &path)
            });
            // What is wrong where it is given for several is told once.
            let mut told = BTreeSet::new();
            for fault in given.chain(shape::faults(&schema, &document)) {
                let words: String = fault.message.chars().filter(|c| !c.is_ascii_digit()).collect();
                if told.insert((fault.place, words)) {
                    report(fault);
                }
            }
            Some(document)
        }
        Err(faults) => {
            faults.into_iter().for_each(report);
            return None;
        }
    };
    let tree = match &expanded {
        Some(document) => document,
        None => {
            shape::faults(&schema, tree).into_iter().for_each(report);
            tree
        }
    };
    if diagnostics.len() > found {
        return None;
    }
    let object = match serde_json::from_value::<Object>(tree.value.to_json()) {
        Ok(object) => object,
        Err(error) => {
            diagnostics.push(Diagnostic {
                file: file.name.clone(),
                line: tree.place.0,
                column: tree.place.1,
                object: label(kind, name, &Path::root()),
                message: error.to_string(),
                hint: String::new(),
            });
            return None;
        }
    };
    let mut document = Document { object, file: file.name.clone(), places: tree.places() };
    let faults = attach(&mut document, &file.attachments);
    diagnostics.extend(faults);
    Some(document)
}

/// Replaces what names a file by the file's content.
fn attach(
    document: &mut Document,
    attachments: &BTreeMap<String, Result<String, String>>,
) -> Vec<Diagnostic> {
    let mut faults = Vec::new();
    let mut object = document.object.clone();
    let mut content = |from: &str, at: &Path| {
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
                let plane = node.data_plane.as_mut().and_then(DataPlane::parallel_mut);
                let program = plane.and_then(|plane| plane.program.own_mut());
                let program = program.map(|program| &mut program.files);
                let own = node.files.iter_mut().map(|(path, file)| (&["files"][..], path, file));
                let of_program = program.into_iter().flatten();
                let of_program = of_program
                    .map(|(path, file)| (&["dataPlane", "program", "files"][..], path, file));
                for (key, path, file) in own.chain(of_program) {
                    let Some(from) = file.from.clone() else { continue };
                    let at = [&["spec", "nodes", node_name], key, &[path, "from"]].concat();
                    let at = Path::of(&at);
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
                let at = Path::of(&["spec", "interfaces", name, "generator", "frames"]);
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
