//! Images from registries: a good one, and hostile ones. Needs root, skopeo, openssl and python3.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use pdp_api::{ChangeAction, ImageQuery, Problem, ProblemKind, PullRequest};
use pdp_container::RuntimePaths;
use pdp_container::cgroup::Cgroups;
use pdp_container::work::Workplace;
use pdp_spec::{Object, PlacedVnet, SourceFile, Tenant};
use pdpd::access::AccessScope;
use pdpd::images::{Images, PullLimits};
use pdpd::intent::model::Model;

/// Response of another service on the machine, which pulls must not reach.
const SECRET: &str = "nobody is to hear this";

struct Registry {
    child: Child,
    port: u16,
    /// Port of the other service, at all addresses of the machine.
    other: u16,
    dir: tempfile::TempDir,
    /// Number of requests to the other service.
    asked: Arc<AtomicUsize>,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"])
            .args(["-nodes", "-days", "2", "-subj", "/CN=registry", "-keyout", "key.pem"])
            .args(["-addext", "subjectAltName=IP:127.0.0.1", "-out", "cert.pem"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let other = TcpListener::bind("0.0.0.0:0").unwrap();
        let other_port = other.local_addr().unwrap().port();
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        std::thread::spawn(move || {
            for stream in other.incoming().flatten() {
                counted.fetch_add(1, Ordering::SeqCst);
                let mut stream = stream;
                let _ = stream.read(&mut [0; 4096]);
                let length = SECRET.len();
                let text = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{SECRET}");
                let _ = stream.write_all(text.as_bytes());
            }
        });
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/registry.py");
        let mut child = Command::new("python3")
            .arg(script)
            .args([dir.path().join("cert.pem"), dir.path().join("key.pem")])
            .arg(other_port.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().unwrap();
        let certs = dir.path().join(format!("certs/127.0.0.1:{port}"));
        fs::create_dir_all(&certs).unwrap();
        fs::copy(dir.path().join("cert.pem"), certs.join("ca.crt")).unwrap();
        Self { child, port, other: other_port, dir, asked }
    }

    /// Sends a request that changes the registry's behaviour.
    fn configure(&self, path: &str) {
        let url = format!("https://127.0.0.1:{}{path}", self.port);
        let done = Command::new("curl").args(["-sSfk", &url]).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }

    fn name(&self, repository: &str) -> String {
        format!("127.0.0.1:{}/lab/{repository}:1", self.port)
    }
}

struct Node {
    images: Images,
    dir: tempfile::TempDir,
    cgroups: Cgroups,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.cgroups.remove("", Duration::from_secs(10));
        self.cgroups.remove_if_empty("");
    }
}

impl Node {
    fn new(registry: &Registry, label: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let any = || "/bin/true".into();
        let cgroup = format!("pdp-registry-{label}-{}", std::process::id());
        let paths = RuntimePaths {
            runc: any(),
            shim: any(),
            init: any(),
            work: any(),
            records: dir.path().join("records"),
            runc_root: dir.path().join("runc"),
            logs: dir.path().join("logs"),
            images: dir.path().join("images"),
            volumes: dir.path().join("volumes"),
            cgroup: cgroup.clone(),
        };
        let cgroups = Cgroups::new(&cgroup).unwrap();
        let mut images =
            Images::open(&paths, cgroups.clone(), Workplace::in_this_process()).unwrap();
        images.settings.pdpd = env!("CARGO_BIN_EXE_pdpd").into();
        images.settings.certs = Some(registry.dir.path().join("certs"));
        images.settings.bounds = PullLimits {
            bytes: 8 << 20,
            stall: Duration::from_secs(10),
            time: Duration::from_secs(120),
            free_bytes: 1 << 20,
        };
        Self { images, dir, cgroups }
    }

    fn pull_for(
        &self,
        tenant: Option<&str>,
        name: &str,
        model: &Model,
    ) -> Result<(ChangeAction, String), Problem> {
        let scope = tenant.map_or(AccessScope::Node, |tenant| AccessScope::Tenant(tenant.into()));
        let request = PullRequest { image: name.into(), tenant: None };
        let report = self.images.pull(&scope, &request, model, &mut |_| {})?;
        let change = &report.changes[0];
        Ok((change.action, change.detail.clone()))
    }

    fn pull(&self, name: &str) -> Result<(ChangeAction, String), Problem> {
        self.pull_for(None, name, &Model::default())
    }

    /// Checks that a refused pull left nothing.
    #[track_caller]
    fn is_clear(&self) {
        let works = fs::read_dir(self.dir.path().join("pulls")).unwrap().count();
        assert_eq!(works, 0);
        assert_eq!(self.cgroups.processes("work").unwrap(), [0; 0]);
        let mine = |entry: &fs::DirEntry| {
            let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
            let cmdline = fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
            status.starts_with("Name:\tskopeo")
                && cmdline.contains(&*self.dir.path().to_string_lossy())
        };
        assert_eq!(fs::read_dir("/proc").unwrap().flatten().filter(mine).count(), 0);
    }
}

fn tenants(yaml: &[&str]) -> Model {
    let text = yaml.join("\n---\n");
    let file = SourceFile { name: "t.yaml".into(), text, ..Default::default() };
    let documents = pdp_spec::parse(&[file]).unwrap();
    let tenants: BTreeMap<String, Tenant> = documents
        .into_iter()
        .map(|document| match document.object {
            Object::Tenant(tenant) => (tenant.metadata.name.clone(), tenant),
            other => panic!("{other:?}"),
        })
        .collect();
    Model { tenants: tenants.into(), ..Model::default() }
}

fn vnet(yaml: &str) -> PlacedVnet {
    let file = SourceFile { name: "v.yaml".into(), text: yaml.into(), ..Default::default() };
    match pdp_spec::parse(&[file]).unwrap().remove(0).object {
        Object::VirtualNetwork(vnet) => PlacedVnet::new(vnet, Default::default()),
        other => panic!("{other:?}"),
    }
}

fn digest_of(pulled: Result<(ChangeAction, String), Problem>) -> String {
    pulled.unwrap_or_else(|problem| panic!("{problem}")).1
}

#[test]
fn hostile_registry_is_reported_and_leaves_no_files() {
    let registry = Registry::start();
    let node = Node::new(&registry, "hostile");
    let good = digest_of(node.pull(&registry.name("good")));
    assert!(good.starts_with("sha256:") && good.len() == 71, "{good}");
    // An existing image is not sent again, under another name or by its
    // digest. From an image for several machines, this machine's one is used.
    for name in ["good", "several"] {
        let again = node.pull(&registry.name(name)).unwrap();
        assert_eq!(again, (ChangeAction::Unchanged, good.clone()), "{name}");
    }
    let by_digest = format!("127.0.0.1:{}/lab/good@{good}", registry.port);
    assert_eq!(digest_of(node.pull(&by_digest)), good);
    let count = node.images.list(&AccessScope::Node, &Model::default()).unwrap().len();
    let liar = format!("127.0.0.1:{}/lab/liar@sha256:{}", registry.port, "1".repeat(64));
    for (name, why) in [
        (registry.name("lies"), "igest"),
        (liar, "the registry sends a different manifest than requested"),
        (registry.name("half"), "EOF"),
        (registry.name("stall"), "sent nothing for 10 s"),
        (registry.name("slow"), "sent nothing for 10 s"),
        (registry.name("flood"), "it has more than 8388608 bytes|file too large"),
        (registry.name("away"), "refused"),
        (registry.name("foreign"), "it is not for linux/amd64"),
        (registry.name("none"), "has an unknown format"),
        (registry.name("absent"), "unknown|404"),
        (format!("127.0.0.1:{}/lab/good:1", registry.port ^ 1), "refused|reset|EOF"),
    ] {
        let problem = node.pull(&name).unwrap_err();
        let error = &problem.error;
        assert!(why.split('|').any(|why| error.contains(why)), "{name}: {why:?} in {error:?}");
        assert!(error.starts_with(&format!("image {name}: ")), "{error}");
        assert!(!error.contains(SECRET) && !error.contains('\n'), "{error}");
        // No hash of the content, which may be another service's response.
        let text = error.replace(&name, "");
        assert!(!text.contains("sends sha256:"), "{error}");
        assert_eq!(problem.kind, ProblemKind::Unavailable);
        node.is_clear();
    }
    assert_eq!(registry.asked.load(Ordering::SeqCst), 0, "another was asked");
    assert_eq!(node.images.list(&AccessScope::Node, &Model::default()).unwrap().len(), count);
    // Without its certificate the registry is not trusted.
    let mut other = Node::new(&registry, "untrusted");
    other.images.settings.certs = None;
    let error = other.pull(&registry.name("good")).unwrap_err().error;
    assert!(error.contains("certificate"), "{error}");
    other.is_clear();
}

#[test]
fn pulls_respect_tenant_rights_and_quota() {
    let registry = Registry::start();
    let mut node = Node::new(&registry, "tenants");
    let at = format!("127.0.0.1:{}", registry.port);
    let tenant = |name: &str, spec: &str| {
        format!("apiVersion: pdp/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{{spec}}}")
    };
    let model = Arc::new(tenants(&[
        &tenant("acme", &format!("registries: ['{at}/lab']")),
        &tenant("other", &format!("registries: ['{at}'], registryAuth: true")),
        &tenant("small", &format!("registries: ['{at}'], quota: {{images: 2Ki}}")),
        &tenant("none", ""),
    ]));
    let now = || model.clone();
    let auth = node.dir.path().join("auth.json");
    let text = format!(
        r#"{{"auths": {{"{at}": {{"auth": "bWU6cGFzcw=="}}, "other.example": {{"auth": "eDp5"}}}}}}"#
    );
    fs::write(&auth, text).unwrap();
    fs::set_permissions(&auth, fs::Permissions::from_mode(0o600)).unwrap();
    node.images.settings.auth = Some(auth);
    let pull = |tenant: &str, name: &str| node.pull_for(Some(tenant), name, &model);
    let good = digest_of(pull("acme", &registry.name("good")));
    for (tenant, name, why) in [
        ("acme", format!("{at}/laboratory/good:1"), "in no registry that the tenant may use"),
        ("acme", "frr".to_owned(), "docker.io/library/frr is in no registry"),
        ("none", registry.name("good"), "in no registry"),
        ("small", registry.name("good"), "2048 bytes"),
        // A tenant gets the daemon's password only if an operator permits it.
        ("acme", registry.name("secret"), "authentication"),
    ] {
        let problem = pull(tenant, &name).unwrap_err();
        assert!(problem.error.contains(why), "{tenant} {name}: {problem}");
        node.is_clear();
    }
    let secret = digest_of(pull("other", &registry.name("secret")));
    assert_eq!(digest_of(node.pull(&registry.name("secret"))), secret, "an operator");
    // An owner never gets an image that another one pulled.
    let scope = |tenant: &str| AccessScope::Tenant(tenant.into());
    let list = |tenant: &str| {
        let images = node.images.list(&scope(tenant), &model).unwrap();
        images.into_iter().map(|image| image.digest).collect::<Vec<_>>()
    };
    assert_eq!((list("acme"), list("other")), (vec![good.clone()], vec![secret.clone()]));
    assert_eq!(node.images.list(&AccessScope::Node, &model).unwrap().len(), 3);
    let own = ImageQuery::default();
    let others = ImageQuery { tenant: Some("other".into()) };
    for query in [&own, &others] {
        let removed = node.images.remove(&scope("acme"), &secret, query, &now);
        assert_eq!(removed.unwrap_err().kind, ProblemKind::NotFound);
    }
    assert!(node.images.prune(&scope("acme"), &others, &now).is_err());
    assert_eq!(node.images.prune(&scope("acme"), &own, &now).unwrap().len(), 1);
    assert_eq!((list("acme").len(), list("other").len()), (0, 1));
    node.images.remove(&AccessScope::Node, &secret[7..20], &others, &now).unwrap();
    assert!(list("other").is_empty());
    // A change is stored after an image was found unused, and before it is removed.
    let kept = digest_of(pull("other", &registry.name("good")));
    let asked = AtomicUsize::new(0);
    let uses = vnet(&format!(
        "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: other.lab}}\n\
         spec: {{nodes: {{h: {{kind: host, image: {{pull: '{}', digest: '{kept}'}}}}}}}}",
        registry.name("good")
    ));
    let vnets = BTreeMap::from([("other.lab".to_owned(), Arc::new(uses))]);
    let later = Arc::new(Model { vnets: vnets.into(), ..(*model).clone() });
    let stored = || match asked.fetch_add(1, Ordering::SeqCst) {
        0 => model.clone(),
        _ => later.clone(),
    };
    let removed = node.images.remove(&scope("other"), &kept, &own, &stored);
    assert_eq!(removed.unwrap_err().kind, ProblemKind::Conflict);
    asked.store(0, Ordering::SeqCst);
    assert_eq!(node.images.prune(&scope("other"), &own, &stored).unwrap(), []);
    assert_eq!(list("other"), [kept]);
    // A pull that hangs delays others of the same tenant, but none of another tenant.
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            assert!(pull("acme", &registry.name("stall")).is_err());
            done.store(true, Ordering::SeqCst);
        });
        let processes = || node.cgroups.processes("work").unwrap_or_default();
        while processes().is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Its user and its capabilities.
        let status = fs::read_to_string(format!("/proc/{}/status", processes()[0])).unwrap();
        pull("other", &registry.name("good")).unwrap();
        assert!(!done.load(Ordering::SeqCst), "it waited for another's");
        for words in ["CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"] {
            let now = processes().first().map(|pid| format!("/proc/{pid}/status"));
            let now = now.and_then(|path| fs::read_to_string(path).ok()).unwrap_or(status.clone());
            assert!(now.contains(words), "{words} in {now}");
        }
        // Only few may wait, so that others keep their request permits.
        let four = [(); 4].map(|()| threads.spawn(|| pull("acme", &registry.name("good"))));
        let ended = four.map(|thread| thread.join().unwrap());
        let refused: Vec<_> = ended.into_iter().filter_map(Result::err).collect();
        assert!(
            refused.len() == 1 && refused[0].error.contains("the limit of 4 images"),
            "{refused:?}"
        );
    });
    node.is_clear();
}

/// Redirects of manifests and blobs, and realms of tokens. Targets are loopback, the machine's
/// own address, link-local and private addresses, and ports of loopback that nobody granted.
#[test]
fn registry_cannot_redirect_pulls_to_local_addresses() {
    let registry = Registry::start();
    let node = Node::new(&registry, "away");
    let own = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    own.connect("192.0.2.77:9").expect("a machine with a route");
    let own = own.local_addr().unwrap().ip().to_string();
    assert_ne!(own, "127.0.0.1");
    let closed = TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
    let mut other = std::net::TcpStream::connect((&*own, registry.other)).expect("it listens");
    other.write_all(b"GET").unwrap();
    other.read_exact(&mut [0; 8]).unwrap();
    assert_eq!(registry.asked.load(Ordering::SeqCst), 1);
    let model = tenants(&[&format!(
        "apiVersion: pdp/v1\nkind: Tenant\nmetadata: {{name: acme}}\nspec: {{registries: ['127.0.0.1:{}/lab']}}",
        registry.port
    )]);
    // The error contains the address, which the registry itself chose,
    // and is the same whatever listens there.
    let error_of = |name: &str, port: u16| {
        let problem = node.pull_for(Some("acme"), name, &model).unwrap_err();
        node.is_clear();
        let text = problem.error.replace(name, "NAME").replace(&port.to_string(), "PORT");
        // The client's port numbers are random.
        text.split_whitespace().filter(|word| !word.contains("->")).collect::<Vec<_>>().join(" ")
    };
    for host in ["127.0.0.1", "127.0.0.9", &own, "169.254.169.254", "10.0.0.1"] {
        for part in ["manifests", "blobs"] {
            let errors = [registry.other, closed]
                .map(|port| error_of(&registry.name(&format!("to-{part}-{host}-{port}")), port));
            assert_eq!(errors[0], errors[1], "{part} at {host}");
            assert!(!errors[0].contains(SECRET), "{}", errors[0]);
        }
        let errors = [registry.other, closed].map(|port| {
            registry.configure(&format!("/realm/{host}:{port}"));
            error_of(&registry.name("good"), port)
        });
        registry.configure("/realm/");
        assert_eq!(errors[0], errors[1], "realm at {host}");
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(registry.asked.load(Ordering::SeqCst), 1, "the other was asked");
    // The registry itself, on loopback, is reachable.
    digest_of(node.pull_for(Some("acme"), &registry.name("good"), &model));
}

#[test]
fn full_disk_is_reported_and_cleaned_up() {
    let registry = Registry::start();
    let mut node = Node::new(&registry, "full");
    node.images.settings.bounds.free_bytes = u64::MAX;
    let error = node.pull(&registry.name("slow")).unwrap_err().error;
    assert!(error.contains("the disk is full"), "{error}");
    node.is_clear();
    // The same if no free space is reserved, when the last byte is used.
    node.images.settings.bounds =
        PullLimits { free_bytes: 0, bytes: 1 << 30, ..node.images.settings.bounds };
    let place = node.dir.path().join("pulls");
    let small = Mount::tmpfs(&place, "size=4m,mode=711");
    let error = node.pull(&registry.name("flood")).unwrap_err().error;
    assert!(error.contains("no space left") || error.contains("disk is full"), "{error}");
    node.is_clear();
    drop(small);
}

/// A mount that is removed when dropped.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, options: &str) -> Self {
        let status =
            Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(at).status();
        assert!(status.unwrap().success());
        Self(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// The bytes in the quota are those on disk.
#[test]
fn image_quota_counts_packed_and_unpacked_bytes() {
    let registry = Registry::start();
    let node = Node::new(&registry, "bytes");
    digest_of(node.pull(&registry.name("good")));
    let images = node.images.list(&AccessScope::Node, &Model::default()).unwrap();
    assert_eq!(
        images[0].unpacked_bytes,
        3 * 4096,
        "the one file's block, its own and its directory's"
    );
    assert!(images[0].packed_bytes > 10_000, "{images:?}");
    let name = registry.name("moved");
    let first = digest_of(node.pull(&name));
    let moved = Command::new("python3")
        .args(["-c", "import ssl,sys,urllib.request as u; u.urlopen(sys.argv[1], context=ssl._create_unverified_context())"])
        .arg(format!("https://127.0.0.1:{}/move", registry.port))
        .status();
    assert!(moved.unwrap().success());
    let (action, second) = node.pull(&name).unwrap();
    assert!(action == ChangeAction::Create && first != second);
    let listed = node.images.list(&AccessScope::Node, &Model::default()).unwrap();
    let names: Vec<_> =
        listed.iter().map(|image| (image.digest == second, image.names.clone())).collect();
    assert!(names.contains(&(true, vec![name])) && names.contains(&(false, vec![])), "{names:?}");
}
