//! `pdp export`: a stored vnet as a spec that can be applied, optionally with the current contents
//! of its nodes' files.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use pdp_api::client::Client;
use pdp_api::exec::{ExecFrame, ExecRequest};
use pdp_spec::limits::FILE_BYTES_MAX;
use serde_json::{Value, json};

use crate::daemon::node_command::until_end;
use crate::failure::CliFailure;
use crate::input::name::NodeName;
use crate::output;

/// Command by which FRR writes its running configuration into its files.
const FRR_WRITES: [&str; 3] = ["vtysh", "-c", "write file"];

/// Directory of FRR's configuration.
const FRR: &str = "/etc/frr/";

/// Print a vnet as a spec that can be applied: its current state with all changes and every
/// default.
///
/// With --save, files of the spec have the contents that they have in the nodes now. If the spec
/// has files below /etc/frr, FRR writes its running configuration first. Other files of the nodes
/// are not exported.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp export red > red.yaml\n         \
                        pdp export red --save -o red/ && pdp apply red/red.yaml")]
pub struct ExportArgs {
    /// Name of the vnet.
    #[arg(value_name = "VNET", add = crate::daemon::complete::vnets())]
    pub vnet: String,
    /// Write into this directory: VNET.yaml, and each file of a node as NODE/PATH, which it names
    /// by `from`.
    #[arg(short = 'o', long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Export the files as they are in the nodes now.
    #[arg(long)]
    pub save: bool,
    /// Replace existing files.
    #[arg(long, requires = "output")]
    pub force: bool,
}

pub async fn export(client: &Client, args: ExportArgs) -> Result<ExitCode, CliFailure> {
    let mut spec = client.vnet(&args.vnet).await?.spec;
    spec.as_object_mut().map(|object| object.remove("status"));
    if args.save {
        save(client, &args.vnet, &mut spec).await?;
    }
    let Some(directory) = &args.output else {
        return output::print(crate::output::Format::Yaml, &spec, |_| String::new());
    };
    let mut files = Vec::new();
    for (node, path, file) in files_of(&mut spec) {
        let Some(content) = file["content"].as_str() else { continue };
        let place = place(&node, &path)?;
        files.push((place.clone(), content.to_owned()));
        let object = file.as_object_mut().map(|file| (file.remove("content"), file));
        object.map(|(_, file)| file.insert("from".into(), json!(place)));
    }
    let text = serde_saphyr::to_string(&spec).map_err(std::io::Error::other)?;
    files.push((format!("{}.yaml", args.vnet), text));
    if !args.force {
        let mut paths = files.iter().map(|(place, _)| directory.join(place));
        if let Some(path) = paths.find(|path| path.symlink_metadata().is_ok()) {
            let path = path.display();
            return Err(CliFailure::Other(format!(
                "{path} exists; name another directory, or give --force"
            )));
        }
    }
    for (place, text) in &files {
        let path = directory.join(place);
        write(&path, text)
            .map_err(|error| CliFailure::Other(format!("{}: {error}", path.display())))?;
    }
    let count = pdp_spec::count(files.len() - 1, "file");
    let yaml = directory.join(format!("{}.yaml", args.vnet));
    output::write(format!("{} and {count} of its nodes\n", yaml.display()).as_bytes())
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    file.write_all(text.as_bytes())
}

/// Lists the files of all nodes: the node, the path in it, and the file's spec.
fn files_of(spec: &mut Value) -> Vec<(String, String, &mut Value)> {
    let nodes = spec["spec"]["nodes"].as_object_mut().into_iter().flatten();
    let mut all = Vec::new();
    for (node, spec) in nodes {
        let files = spec.get_mut("files").and_then(Value::as_object_mut).into_iter().flatten();
        all.extend(files.map(|(path, file)| (node.clone(), path.clone(), file)));
    }
    all
}

/// Returns the path of a node's file below the directory.
fn place(node: &str, path: &str) -> Result<String, CliFailure> {
    let below = path.strip_prefix('/').unwrap_or(path);
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    let place = format!("{node}/{below}");
    if below.is_empty() || !Path::new(&place).components().all(plain) {
        return Err(CliFailure::Other(format!(
            "node {node}: {path:?} is not a path below a directory"
        )));
    }
    Ok(place)
}

/// Replaces contents in the spec by those of the nodes' files now.
async fn save(client: &Client, vnet: &str, spec: &mut Value) -> Result<(), CliFailure> {
    let mut frr = std::collections::BTreeSet::new();
    for (node, path, file) in files_of(spec) {
        let name = NodeName { vnet: vnet.into(), node: node.clone() };
        let warn =
            |why: &str| eprintln!("warning: {vnet}/{node}: {path}: {why}; kept as in the spec");
        if path.starts_with(FRR) && frr.insert(node.clone()) {
            let (code, words) = run(client, &name, &FRR_WRITES.map(str::to_owned)).await?;
            if code != 0 {
                let words = String::from_utf8_lossy(&words).trim().replace('\n', "; ");
                let words: String = words.chars().filter(|letter| !letter.is_control()).collect();
                eprintln!("warning: {vnet}/{node}: FRR did not write its configuration: {words}");
            }
        }
        let (code, bytes) = run(client, &name, &["cat".into(), "--".into(), path.clone()]).await?;
        match String::from_utf8(bytes) {
            _ if code != 0 => warn("can't be read"),
            Ok(text) if text.len() <= FILE_BYTES_MAX => file["content"] = text.into(),
            Ok(_) => warn("is too long for a spec"),
            Err(_) => warn("is not text"),
        }
    }
    Ok(())
}

/// Returns the exit code of a command in a node and its output. Keeps little more than a spec's
/// file may have.
async fn run(
    client: &Client,
    name: &NodeName,
    words: &[String],
) -> Result<(i32, Vec<u8>), CliFailure> {
    let request = ExecRequest { command: words.to_vec(), ..Default::default() };
    let mut connection = client.exec(&name.vnet, &name.node, &request).await?;
    let mut bytes = Vec::new();
    let code = until_end(&mut connection, |frame| {
        if let ExecFrame::Stdout(more) = frame
            && bytes.len() <= FILE_BYTES_MAX
        {
            bytes.extend(more);
        }
        Ok(())
    });
    let code = code.await?;
    Ok((code, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exported_files_stay_below_the_directory() {
        assert_eq!(place("r1", "/etc/frr/frr.conf").unwrap(), "r1/etc/frr/frr.conf");
        for (node, path) in
            [("r1", "/"), ("r1", "/../x"), ("..", "/x"), ("", "/x"), ("r1", "/a/./../b")]
        {
            assert!(place(node, path).is_err(), "{node} {path}");
        }
    }
}
