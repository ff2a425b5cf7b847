//! Hosts and control guests with their own root file systems: a directory, an OCI image layout, an
//! archive, and an image from a registry.

use std::fs;
use std::path::Path;

use pdp_e2e::{Background, TestNode, eventually, sh};

/// Programs of the machine that the roots get.
const PROGRAMS: &str = "/bin/sh /bin/cat /bin/ls /bin/sleep /bin/ping /bin/ip";

/// Makes a small root: some programs with their libraries, and a file that identifies it.
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

/// Makes an OCI image layout of one layer with tar only, and with the image's run configuration.
fn make_layout(layout: &Path, root: &Path, config: &str) {
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
        diff=$(sha256sum layer | cut -d' ' -f1)
        layer="{{\"mediaType\": \"$type.layer.v1.tar\", $(put layer)}}"
        echo '{{"architecture": "amd64", "os": "linux", "config": {config},' > config
        echo "\"rootfs\": {{\"type\": \"layers\", \"diff_ids\": [\"sha256:$diff\"]}}}}" >> config
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
fn guests_run_on_their_own_images() {
    let mut node = TestNode::start("images");
    let (root, other) = (node.directory.join("directory"), node.directory.join("other"));
    make_root(&root, "a-directory");
    make_root(&other, "a-layout");
    // Missing mount points of an image are made.
    fs::remove_dir_all(other.join("var")).expect("removed");
    make_layout(&node.directory.join("layout"), &other, "{}");
    // Only the layout counts.
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
    // A missing image is reported before running processes stop, and also by a dry run.
    let pid =
        |name: &str| node.json(&["inspect", &format!("red/{name}")])["control"]["pid"].clone();
    let before = [pid("h1"), pid("h2")];
    let good = spec(&node.directory);
    let host = format!("ociLayout: {}/layout}}", node.directory.display());
    for (from, to, error) in [
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
            assert!(words.contains(error), "{words}");
        }
    }
    assert_eq!(before, [pid("h1"), pid("h2")], "what runs is what ran");
    // An image that vanished later is no error for running processes.
    fs::rename(node.directory.join("layout"), node.directory.join("gone")).expect("renamed");
    node.apply(&good);
    // Guests can't write into a root that others may use too.
    let write = ["exec", "red/h1", "--", "/bin/sh", "-c", "echo x > /etc/mark"];
    let _ = node.try_pdp(&write);
    let mark = fs::read_to_string(root.join("etc/mark")).expect("the mark");
    assert_eq!(mark.trim(), "a-directory");

    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}

/// Debian's registry with TLS and a password, in the node's network namespace; and a password file.
fn start_registry(node: &TestNode) -> Background {
    let place = node.directory.join("registry").display().to_string();
    sh(&format!(
        r#"mkdir -p {place}/certs/127.0.0.1:5000; cd {place}
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=registry \
            -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem 2> /dev/null
        cp cert.pem certs/127.0.0.1:5000/ca.crt
        htpasswd -Bbn me pass > users
        (umask 077; echo '{{"auths": {{"127.0.0.1:5000": {{"auth": "bWU6cGFzcw=="}}}}}}' > auth.json)
        cat > config.yml << EOF
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {place}/data}}}}
http: {{addr: "127.0.0.1:5000", tls: {{certificate: {place}/cert.pem, key: {place}/key.pem}}}}
auth: {{htpasswd: {{realm: registry, path: {place}/users}}}}
EOF"#
    ));
    node.namespace().spawn(&format!("docker-registry serve {place}/config.yml"))
}

fn push(node: &TestNode, layout: &str, name: &str) {
    let place = node.directory.display();
    let line = format!(
        "skopeo copy --quiet --dest-creds me:pass --dest-cert-dir {place}/registry/certs/127.0.0.1:5000 \
         oci:{place}/{layout}:small docker://127.0.0.1:5000/{name}"
    );
    eventually("it is pushed", || node.namespace().try_run(&line).is_ok());
}

/// An image named as in docker runs as configured in it. After a reboot the same image runs,
/// although the registry is gone and the name denotes another.
#[test]
fn registry_image_runs_and_stays_pinned() {
    let mut node = TestNode::prepare("registry");
    let place = node.directory.display().to_string();
    let registry = start_registry(&node);
    for name in ["first", "second"] {
        let root = node.directory.join(format!("{name}-root"));
        make_root(&root, name);
        fs::create_dir(root.join("srv")).expect("made");
        std::os::unix::fs::chown(root.join("srv"), Some(4000), Some(4001)).expect("given away");
        let config = r#"{"User": "4000:4001", "Entrypoint": ["/bin/sh", "-c"], "Env": ["COLOUR=blue"], "WorkingDir": "/srv",
            "Cmd": ["/bin/cat /etc/mark > said; echo $COLOUR $PWD >> said; exec /bin/sleep 100000"]}"#;
        make_layout(&node.directory.join(name), &root, config);
    }
    push(&node, "first", "lab/small:1");
    sh(&format!(
        "skopeo copy --quiet oci:{place}/second:small docker-archive:{place}/saved.tar:saved:1"
    ));
    let (auth, certs) = (format!("{place}/registry/auth.json"), format!("{place}/registry/certs"));
    node.pdpd_arguments(&["--registry-certs", &certs]);
    node.start_pdpd();
    fs::create_dir(node.directory.join("shown")).expect("made");
    fs::write(node.directory.join("shown/x"), "of the machine\n").expect("written");
    let spec = |image: &str| {
        format!(
            r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
    h1:
      kind: host
      image: {image}
      binds: ["{place}/shown:/opt/shown:ro"]
      exec: ["/bin/sh -c '/bin/cat /etc/hosts /opt/shown/x > by-exec'"]
      interfaces: {{eth0: {{addresses: [10.0.0.1/24]}}}}
    h2: {{kind: host, image: {{archive: {place}/saved.tar}}, interfaces: {{eth0: {{addresses: [10.0.0.2/24]}}}}}}
  links: [{{endpoints: ["h1:eth0", "h2:eth0"]}}]
"#
        )
    };
    let image = "127.0.0.1:5000/lab/small:1";
    // Without the password the error is reported at its position,
    // and nothing is stored. Messages are broken into lines.
    let flat =
        |words: &str| words.replace('|', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    let words = flat(&node.try_apply(&spec(image)).expect_err("no password"));
    assert!(words.contains("authentication required") && words.contains("image"), "{words}");
    assert_eq!(node.json(&["get"]), serde_json::json!([]));
    node.kill_pdpd();
    node.pdpd_arguments(&["--registry-certs", &certs, "--registry-auth", &auth]);
    node.start_pdpd();
    let file = node.directory.join("dry.yaml");
    fs::write(&file, spec(image)).expect("written");
    let dry = node.pdp(&["apply", "--dry-run", "-f", &file.display().to_string()]);
    assert!(dry.contains(&format!("image/{image}")), "{dry}");
    node.apply(&spec(image));
    let output = |node: &TestNode, name: &str| {
        node.try_exec(&format!("red/{name}"), "/bin/cat /srv/said").unwrap_or_default()
    };
    let runs = |node: &TestNode, name: &str, mark: &str| {
        eventually(&format!("{name} runs {mark}"), || {
            output(node, name) == format!("{mark}\nblue /srv\n")
        });
    };
    runs(&node, "h1", "first");
    runs(&node, "h2", "second");
    let listed = node.exec("red/h1", "/bin/ls -ln /srv/said");
    assert!(listed.contains(" 4000 4001 "), "as the image's user: {listed}");
    eventually("they reach each other", || {
        node.try_exec("red/h1", "/bin/ping -c1 -W1 10.0.0.2").is_ok()
    });
    // With its own command, `exec`, the names of the others and bind mounts, over a writable root.
    eventually("h1 is ready", || {
        let commands = node.json(&["inspect", "red/h1"])["commands"].clone();
        let is = |index: usize, name: &str, state: &str| {
            commands[index]["name"] == name && commands[index]["state"] == state
        };
        is(0, "image", "running") && is(1, "exec-1", "done")
    });
    let text = node.exec("red/h1", "/bin/cat /srv/by-exec");
    assert!(text.contains("10.0.0.2\th2") && text.ends_with("of the machine\n"), "{text}");
    // The stored spec contains the digest, and used images are not removed.
    let digest = |node: &TestNode| {
        let stored = node.pdp(&["inspect", "red", "--format", "yaml"]);
        let at = stored.find("sha256:").expect("a digest");
        stored[at..at + 71].to_owned()
    };
    let first = digest(&node);
    let words = node.try_pdp(&["images", "rm", image]).expect_err("it is used");
    assert!(words.contains("is used by red/h1"), "{words}");
    // From now on the name denotes another image. The applied
    // spec keeps the old one until an update is requested.
    push(&node, "second", "lab/small:1");
    let unchanged = node.apply(&spec(image));
    assert!(unchanged.contains("0 changed"), "{unchanged}");
    let words =
        flat(&node.try_apply(&spec("127.0.0.1:5000/lab/none:1")).expect_err("no such image"));
    assert!(words.contains("manifest unknown"), "{words}");
    node.pdp(&["images", "pull", image]);
    drop(registry);
    node.reboot();
    node.start_pdpd();
    runs(&node, "h1", "first");
    assert_eq!(digest(&node), first);
    let changed = node.apply(&spec(image));
    assert!(changed.contains("vnet/red/node/h1"), "{changed}");
    runs(&node, "h1", "second");
    assert_ne!(digest(&node), first);
    let pruned = node.pdp(&["images", "prune"]);
    assert!(pruned.contains("1 removed"), "{pruned}");
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
    assert!(!node.directory.join("state").exists());
}

/// A registry that accepts a connection and stays silent. Other changes and the end of the daemon
/// do not wait for it. A killed pull leaves no process.
#[test]
fn hanging_pull_blocks_nobody_and_ends_with_daemon() {
    let mut node = TestNode::start("hangs");
    let spec = |name: &str, image: &str| {
        format!(
            "{{apiVersion: pdp/v1, kind: VirtualNetwork, metadata: {{name: {name}}}, \
             spec: {{nodes: {{h1: {{kind: host, image: {image}}}}}}}}}"
        )
    };
    let file = node.directory.join("hangs.yaml");
    fs::write(&file, spec("red", "'127.0.0.1:5001/mute:1'")).expect("written");
    let _mute = node
        .namespace()
        .spawn("socat -u TCP-LISTEN:5001,bind=127.0.0.1,fork,reuseaddr OPEN:/dev/null");
    eventually("it listens", || {
        node.namespace().try_run("socat -u OPEN:/dev/null TCP:127.0.0.1:5001").is_ok()
    });
    let place = node.directory.join("state/pulls");
    let pulls = |node: &TestNode| {
        let needle = format!("{}/", place.display());
        let processes = node.processes().into_iter();
        processes.filter(|it| it.line.contains("skopeo") && it.line.contains(&needle)).count()
    };
    let ask = |node: &TestNode| {
        let apply =
            Background::start(&mut node.pdp_command(&["apply", "-f", &file.display().to_string()]));
        eventually("it is pulled", || pulls(node) > 0);
        apply
    };
    let mut apply = ask(&node);
    node.apply(&spec("blue", "{host: true}"));
    assert!(apply.runs() && pulls(&node) > 0, "others were made meanwhile");
    node.kill_pdpd();
    eventually("it ends with the daemon", || pulls(&node) == 0);
    node.start_pdpd();
    assert_eq!(fs::read_dir(&place).expect("there").count(), 0, "of a daemon that was killed");
    let names = node.json(&["get"]);
    assert_eq!(names.as_array().map(Vec::len), Some(1), "{names}");
    let apply = ask(&node);
    sh(&format!("kill -TERM {}", node.pdpd_pid()));
    let output = apply.stop("CONT").replace('|', " ");
    let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(output.contains("the daemon ends during the pull"), "{output}");
    node.wait_pdpd();
    node.start_pdpd();
    let _asks = ask(&node);
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
    assert!(!node.directory.join("state").exists());
}
