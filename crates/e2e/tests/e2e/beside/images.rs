//! Hosts and control guests with root file systems of their own: a directory, and an OCI image
//! layout.

use std::fs;
use std::path::Path;

use pdp_e2e::{Node, eventually, sh};

/// Programs of the machine that the roots get.
const PROGRAMS: &str = "/bin/sh /bin/cat /bin/ls /bin/sleep /bin/ping /bin/ip";

/// Makes a small root: some programs with their libraries, and a file that tells it from others.
fn make_root(root: &Path, mark: &str) {
    let root = root.display();
    sh(&format!(
        "umask 022; mkdir -p {root}
         for directory in proc dev sys run tmp etc bin root var/log var/tmp; do
             mkdir -p {root}/$directory
         done
         for program in {PROGRAMS}; do
             install -D $program {root}$program
             for library in $(ldd $program | grep -o '/[^ ]*'); do
                 [ -e {root}$library ] || install -D $library {root}$library
             done
         done
         echo {mark} > {root}/etc/mark
         echo root:x:0:0:root:/:/bin/sh > {root}/etc/passwd; echo root:x:0: > {root}/etc/group"
    ));
}

/// An OCI image layout of one layer, and no tool but tar.
fn make_layout(layout: &Path, root: &Path) {
    let (layout, root) = (layout.display(), root.display());
    sh(&format!(
        r#"mkdir -p {layout}/blobs/sha256; cd {layout}
        put() {{ # FILE: moved to its digest; prints a descriptor's end
            digest=$(sha256sum $1 | cut -d' ' -f1); size=$(stat -c %s $1)
            mv $1 blobs/sha256/$digest
            printf '"digest": "sha256:%s", "size": %s' $digest $size
        }}
        tar -C {root} --sort=name -cf layer .
        type=application/vnd.oci.image
        layer="{{\"mediaType\": \"$type.layer.v1.tar\", $(put layer)}}"
        echo '{{"architecture": "amd64", "os": "linux"}}' > config
        config="{{\"mediaType\": \"$type.config.v1+json\", $(put config)}}"
        echo "{{\"schemaVersion\": 2, \"config\": $config, \"layers\": [$layer]}}" > manifest
        manifest="{{\"mediaType\": \"$type.manifest.v1+json\", $(put manifest),
            \"annotations\": {{\"org.opencontainers.image.ref.name\": \"small\"}}}}"
        echo "{{\"schemaVersion\": 2, \"manifests\": [$manifest]}}" > index.json
        echo '{{"imageLayoutVersion": "1.0.0"}}' > oci-layout"#
    ));
}

fn spec(directory: &Path) -> String {
    let directory = directory.display();
    format!(
        r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: "0", power: 0.5}}
  forwardingEngines:
    fe1: {{cpus: "1", capacity: 1}}
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
    r1:
      kind: router
      image: {{ociLayout: {directory}/layout, reference: small}}
      interfaces:
        eth0: {{addresses: [10.0.1.1/24]}}
        eth1: {{addresses: [10.0.2.1/24]}}
      # What routing software would do: the kernel's table is what counts.
      commands: ["/bin/sh -c '/bin/ip route add 10.9.0.0/16 via 10.0.2.2; exec /bin/sleep 100000'"]
      dataPlane: {{power: 0.2}}
    h1:
      kind: host
      image: {{rootfs: {directory}/directory}}
      interfaces: {{eth0: {{addresses: [10.0.1.2/24], gateways: [10.0.1.1]}}}}
    h2:
      kind: host
      image: {{ociLayout: {directory}/layout}}
      files: {{/etc/more: {{content: "of the spec"}}}}
      interfaces: {{eth0: {{addresses: [10.0.2.2/24, 10.9.0.1/16], gateways: [10.0.2.1]}}}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#
    )
}

#[test]
fn guests_run_on_images_of_their_own() {
    let mut node = Node::start("images");
    let (root, other) = (node.directory.join("directory"), node.directory.join("other"));
    make_root(&root, "a-directory");
    make_root(&other, "a-layout");
    // What an image lacks of places to mount on is made.
    fs::remove_dir_all(other.join("var")).expect("removed");
    make_layout(&node.directory.join("layout"), &other);
    // What counts is the layout alone.
    fs::remove_dir_all(&other).expect("removed");
    node.apply(&spec(&node.directory));
    eventually("h1 reaches h2", || node.try_exec("red/h1", "/bin/ping -c1 -W1 10.0.2.2").is_ok());
    eventually("by the router's own route", || {
        node.try_exec("red/h1", "/bin/ping -c1 -W1 10.9.0.1").is_ok()
    });
    for (name, mark) in [("h1", "a-directory"), ("h2", "a-layout"), ("r1", "a-layout")] {
        let name = format!("red/{name}");
        assert_eq!(node.exec(&name, "/bin/cat /etc/mark").trim(), mark);
        let listed = node.exec(&name, "/bin/ls /bin");
        assert!(!listed.contains("python3") && listed.contains("ping"), "{name}: {listed}");
    }
    assert_eq!(node.exec("red/h2", "/bin/cat /etc/more").trim(), "of the spec");
    // An image that is not there is told before what runs is stopped, and by a dry run.
    let pid =
        |name: &str| node.json(&["inspect", &format!("red/{name}")])["control"]["pid"].clone();
    let before = [pid("h1"), pid("h2")];
    let good = spec(&node.directory);
    let host = format!("ociLayout: {}/layout}}", node.directory.display());
    for (from, to, said) in [
        ("directory}".to_owned(), "nowhere}".to_owned(), "nowhere: No such file or directory"),
        (
            host.clone(),
            host.replace('}', ", reference: other}"),
            "0 images for linux/amd64 with reference other",
        ),
    ] {
        let wrong = good.replace(&from, &to);
        let file = node.directory.join("wrong.yaml");
        fs::write(&file, &wrong).expect("written");
        let dry = node.try_pdp(&["apply", "--dry-run", "-f", &file.display().to_string()]);
        for words in [node.try_apply(&wrong).expect_err(&to), dry.expect_err(&to)] {
            assert!(words.contains(said), "{words}");
        }
    }
    assert_eq!(before, [pid("h1"), pid("h2")], "what runs is what ran");
    // What runs on an image that is gone since is no fault.
    fs::rename(node.directory.join("layout"), node.directory.join("gone")).expect("renamed");
    node.apply(&good);
    // Guests don't write into what others may run on, too.
    let write = ["exec", "red/h1", "--", "/bin/sh", "-c", "echo x > /etc/mark"];
    let _ = node.try_pdp(&write);
    let mark = fs::read_to_string(root.join("etc/mark")).expect("the mark");
    assert_eq!(mark.trim(), "a-directory");

    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}
